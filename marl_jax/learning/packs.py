"""Packs: rows of any length end to end in whole blocks, so that the cost of an update follows the real tokens.

    [ prompt a | a1 | a2 | a3 .. ][ prompt b | b1 .. ][ row | row .. ]       a pack, cut into blocks of BLOCK tokens

A prompt starts a block and lies once before its completions, which run on from one block into the next; segments keep
them apart. A table names for each block the blocks that its tokens may see: those of their prompt, and from the
first block of their own row to this one. A prompt of one row is a part of that row.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Hashable, Sequence

import numpy as np

from marl_jax.learning.batching import BLOCK, Batch, BatchConfig, Placed, check_rows, fill, power_of_two
from marl_jax.table import Table

ALIKE = 8  # blocks: rows whose tokens see no more are packed together, longer ones by octaves
# Where there are so many packs, groups may fill others better, of so many eighths. They are other programs, and must
# save this share of the tokens.
MANY, ODD, SAVING = 8, (9, 10), 0.05
# Blocks that a token could see for the time that all else of it takes: 9 and 17 by two measurements.
APART = 16


@dataclasses.dataclass(frozen=True)
class _Group:
    """Rows behind one shared prompt, or rows with their own prompts: the longest first."""

    stem: int  # tokens of the shared prompt; 0: none
    rows: tuple[int, ...]
    lengths: tuple[int, ...]  # tokens that each row adds to the prompt
    starts: tuple[int, ...] = ()  # of each row within the group, once placed

    def part(self, room: int, tight: bool) -> tuple["_Group", "_Group"]:
        """The rows that fit into so many blocks, with their places, and all others; always the longest that fits.

        `tight`: none lies in more blocks than the longest needs; where all would, the next block starts.
        """
        left = sorted(zip((-length for length in self.lengths), self.rows))
        behind, at = blocks_of(self.stem), self.stem
        most = max(2, blocks_of(self.lengths[0])) if tight else room
        placed: list[tuple[int, int, int]] = []
        while left:
            stop = min(room, max(behind, at // BLOCK) + most) * BLOCK
            i = bisect.bisect_left(left, at - stop, key=lambda one: one[0])
            if i < len(left):
                size, row = left.pop(i)
                placed.append((row, -size, at))
                at -= size
            elif at % BLOCK:
                at = blocks_of(at) * BLOCK
            else:
                break
        rest = _Group(self.stem, tuple(row for _, row in left), tuple(-size for size, _ in left))
        return _Group(self.stem, *zip(*placed)) if placed else _Group(self.stem, (), ()), rest

    @property
    def blocks(self) -> int:
        """That it takes where it has its place."""
        return blocks_of(max(self.stem, self.starts[-1] + self.lengths[-1]))

    @property
    def seen(self) -> int:
        """The most blocks that one of its tokens may see, wherever it lies."""
        return blocks_of(self.stem) + blocks_of(self.lengths[0]) + 1

    @functools.cached_property
    def table(self) -> list[list[int]]:
        """The blocks that each of its blocks may see, as offsets from its first."""
        behind = blocks_of(self.stem)
        first = [*range(self.blocks)]  # of the rows that lie in a block
        for length, start in zip(self.lengths, self.starts):
            begin = max(behind, start // BLOCK)  # a row that begins in the prompt's last block sees it anyway
            for block in range(begin, blocks_of(start + length)):
                first[block] = min(first[block], begin)
        stem = [*range(behind)]
        return [[*stem[: b + 1], *range(max(behind, first[b]), b + 1)] for b in range(self.blocks)]


_Pack = list[_Group]  # each with its place, one after the other


def make_packs(
    rows: Table, units: Sequence[Hashable], config: BatchConfig, *, multiple_of: int = 1, streams: int = 1
) -> list[Batch]:
    """Micro-batches over all rows, unit by unit, as `make_batches`: each holds packs, of which the last may be empty.

    Packs come in multiples of `multiple_of` and are dealt out evenly, as are those of a unit to the `streams`.
    """
    check_rows(rows, config)
    batches = []
    for unit in dict.fromkeys(units):
        by_seen: dict[int, list[_Group]] = {}
        for group in _groups(rows, [i for i, u in enumerate(units) if u == unit], config):
            by_seen.setdefault(_octave(group.seen), []).append(group)
        for groups in by_seen.values():
            sized = _sized(groups, config)
            most = max(_widest(packs) for _, packs in sized)
            for blocks, packs in sized:
                width = max(1, config.token_budget // (blocks * BLOCK) // multiple_of) * multiple_of
                count = -(-len(packs) // width)
                count = min(-(-count // streams) * streams, len(packs))
                batches += _batches(rows, packs, (count, width, blocks, most), unit, multiple_of)
    return batches


def most_blocks(need: int, config: BatchConfig) -> int:
    """The blocks of the largest pack for rows that need so many blocks."""
    common = common_blocks(need, config)
    return max(common, min(common * ODD[-1] // 8, config.token_budget // BLOCK))


def looks(seen: int) -> int:
    """The width of a table for blocks that see so many: few widths, so that few programs are compiled."""
    step = 1 if seen <= ALIKE else power_of_two(seen) // 4
    return -(-seen // step) * step


def pieces(blocks: int, seen: int) -> list[tuple[int, int]]:
    """Where a table is cut, start to stop: in four if blocks may see many, as they then differ in how many they see."""
    cuts = [blocks * k // 4 for k in range(5)] if seen > ALIKE else [0, blocks]
    return [*itertools.pairwise(cuts)]


def blocks_of(tokens: int) -> int:
    """Whole blocks that hold so many tokens."""
    return -(-tokens // BLOCK)


def common_blocks(need: int, config: BatchConfig) -> int:
    """Blocks of a pack of common size, for rows that need so many."""
    common = min(config.slice_tokens or config.token_budget, config.token_budget)
    return max(1, common // BLOCK, power_of_two(need))


def _groups(rows: Table, mine: Sequence[int], config: BatchConfig) -> list[_Group]:
    by_prompt: dict[Hashable, list[int]] = {}
    for i in mine:
        by_prompt.setdefault(rows.prompt[i].tobytes() if config.share_prompts else i, []).append(i)
    fed = rows.length - 1  # the last sampled token is predicted, never read
    whole = rows.prompt.lengths + fed
    made, alone = list[_Group](), dict[int, list[int]]()
    for members in by_prompt.values():
        if len(members) > 1:
            made.append(_sorted(members, fed, int(rows.prompt.lengths[members[0]])))
        else:
            alone.setdefault(_octave(blocks_of(int(whole[members[0]])) + 1), []).extend(members)
    return made + [_sorted(members, whole, 0) for members in alone.values()]


def _octave(seen: int) -> int:
    return max(ALIKE, power_of_two(seen))


def _sorted(rows: Sequence[int], lengths: np.ndarray, stem: int) -> _Group:
    rows = sorted(rows, key=lambda i: -lengths[i])
    return _Group(stem, tuple(rows), tuple(lengths[rows].tolist()))


def _sized(groups: Sequence[_Group], config: BatchConfig) -> list[tuple[int, list[_Pack]]]:
    """Packs by their blocks: of common size, or of one that saves much where there are many; the last in quarters."""
    need = max(blocks_of(group.stem + group.lengths[0]) for group in groups)
    blocks, most = common_blocks(need, config), config.token_budget // BLOCK
    both = [(_packed(groups, blocks, tight), tight) for tight in (True, False)]
    packs, tight = min(both, key=lambda one: len(one[0]) * (APART + _widest(one[0])))
    quarter, cost = blocks // 4, (1 - SAVING) * len(packs) * blocks
    for longer in (blocks * eighths // 8 for eighths in ODD if len(packs) >= MANY):
        tried = _packed(groups, longer, tight) if longer <= most else packs
        if len(tried) * longer < cost:
            blocks, packs, cost = longer, tried, len(tried) * longer
    small = _packed(packs[-1], quarter, tight) if quarter >= need else []
    if not 0 < len(small) * quarter < blocks:
        return [(blocks, packs)]
    return [(blocks, packs[:-1])] * (len(packs) > 1) + [(quarter, small)]


def _widest(packs: Sequence[_Pack]) -> int:
    """The most blocks that one of theirs may see."""
    return max(len(one) for pack in packs for group in pack for one in group.table)


def _packed(groups: Sequence[_Group], room: int, tight: bool) -> list[_Pack]:
    """Packs of `room` blocks: the largest group and those that fill it up best, then a part of the next one."""

    def sized(group: _Group) -> tuple[int, _Group]:
        placed, rest = group.part(room, tight)
        return (room + 1, group) if rest.rows else (placed.blocks, placed)

    left = sorted(map(sized, groups), key=lambda one: -one[0])
    packs = []
    while left:
        chosen = _best([size for size, _ in left], room)
        pack, free = [left[i][1] for i in chosen], room - sum(left[i][0] for i in chosen)
        left = [one for i, one in enumerate(left) if i not in chosen]
        if left and (not pack or free * BLOCK >= 2 * left[0][1].stem):  # that prompt is computed twice
            placed, rest = left[0][1].part(free, tight)
            if placed.rows:
                pack.append(placed)
                left[:1] = [sized(rest)] if rest.rows else []
                left.sort(key=lambda one: -one[0])
        packs.append(pack)
    return packs


def _best(sizes: Sequence[int], room: int) -> set[int]:
    """Indices of sizes, in descending order, that fill the room best: the largest that fits, and others."""
    first = bisect.bisect_left(sizes, -room, key=lambda size: -size)
    if first == len(sizes):
        return set()
    sums: dict[int, tuple[int, ...]] = {sizes[first]: (first,)}
    for i in range(first + 1, len(sizes)):
        if room in sums:
            break
        for total, which in list(sums.items()):
            if total + sizes[i] <= room:
                sums.setdefault(total + sizes[i], (*which, i))
    return {*sums[max(sums)]}


def _table(pack: _Pack, blocks: int) -> list[list[int]]:
    """The blocks that each block may see, itself the last; empty ones see themselves."""
    seen = list[list[int]]()
    for group in pack:
        base = len(seen)
        seen += [[base + block for block in one] for one in group.table]
    return [*seen, *([block] for block in range(len(seen), blocks))]


def _batches(
    rows: Table, packs: Sequence[_Pack], shape: tuple[int, int, int, int], unit: Hashable, multiple_of: int
) -> list[Batch]:
    """`shape` is how many micro-batches, packs that each has room for, blocks of a pack, and the most that one sees."""
    count, width, blocks, most = shape
    tables, cuts, seen = [_table(pack, blocks) for pack in packs], pieces(blocks, most), [looks(most)]
    if len(cuts) > 1:
        tables = [sorted(table, key=len) for table in tables]
        quarter = looks(most) // 4  # few widths again
        longest = (max(len(one) for table in tables for one in table[a:b]) for a, b in cuts)
        seen = [-(-length // quarter) * quarter for length in longest]
    sampled = max(sum(int(rows.length[i]) for group in pack for i in group.rows) for pack in packs)
    total, step = blocks * BLOCK, blocks * BLOCK // 4
    # Few widths; above all tokens where rows are many and short.
    sampled = max(sampled, step) if sampled <= total else -(-sampled // step) * step
    batches = []
    for part in reversed(range(count)):  # the fewest packs first: the stream that has them takes what follows
        stems, places = list[tuple[int, int, int]](), list[Placed]()
        table = tuple(np.full((width, b - a, n), -1, np.int32) for (a, b), n in zip(cuts, seen))
        for number, (pack, sees) in enumerate(zip(packs[part::count], tables[part::count])):
            g, begin = number % multiple_of * (width // multiple_of) + number // multiple_of, 0
            for piece, (a, b) in zip(table, cuts):
                for line, blocks_seen in zip(piece[g], sees[a:b]):
                    line[: len(blocks_seen)] = blocks_seen
            for group in pack:
                last = begin + group.stem - 1 if group.stem else None
                stems += [(group.rows[0], g, begin)] * (last is not None)
                places += [Placed(i, g, begin + start, last) for i, start in zip(group.rows, group.starts)]
                begin += group.blocks * BLOCK
        batches.append(fill(rows, unit, (width, total, sampled), stems, places, table=table))
    return batches
