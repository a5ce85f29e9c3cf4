"""Packs: rows of any length are laid end to end in blocks, so that the cost of an update follows the real tokens.

    [ prompt a | a1 | a2 | a3 .. ][ prompt b | b1 .. ][ row | row .. ]       a pack, cut into blocks of BLOCK tokens

A shared prompt starts a block and is stored once, before its completions, which run on from one block into the next;
segments separate them. For each block, a table lists the blocks that its tokens may see: those of their prompt, and
those from the first block of their own row to this one. A prompt that no other row shares is a part of its row.
"""

import bisect
import dataclasses
import functools
import itertools
import operator
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from marl_jax.learning.batching import BLOCK, Batch, BatchConfig, Placed, check_rows, fill, power_of_two
from marl_jax.table import Table

ALIKE = 8  # rows whose tokens see at most this many blocks are packed together, longer rows by octaves
# If there are at least MANY packs, longer ones, of ODD eighths of the common size, may be filled better. They need
# other programs, so they must save the share SAVING of the tokens.
MANY, ODD, SAVING = 8, (9, 10), 0.05
# All other work on a token costs as much as attention to this number of blocks: 9 and 17 by two measurements.
APART = 16


@dataclasses.dataclass(frozen=True)
class _Group:
    """Rows behind one shared prompt, or rows with their own prompts; the longest row is first."""

    stem: int  # tokens of the shared prompt; 0: none
    rows: tuple[int, ...]
    lengths: tuple[int, ...]  # tokens that each row adds to the prompt
    starts: tuple[int, ...] = ()  # offset of each row in the group; empty before rows are placed

    def split(self, room: int, tight: bool) -> tuple["_Group", "_Group"]:
        """(a placed group of rows that fit into `room` blocks, a group of the others); the longest that fits is next.

        `tight`: no row spans more blocks than the longest needs (or 2); if every row would, the next block is begun.
        """
        if self.starts:  # placed before, in another order
            pairs = sorted(zip(self.rows, self.lengths), key=lambda pair: (-pair[1], pair[0]))
            return _Group(self.stem, *zip(*pairs)).split(room, tight)
        rows, lengths = list(self.rows), list(self.lengths)
        prompt_blocks, end = blocks_of(self.stem), self.stem
        row_blocks = max(2, blocks_of(self.lengths[0])) if tight else room
        placements: list[tuple[int, int, int]] = []
        while rows:
            stop = min(room, max(prompt_blocks, end // BLOCK) + row_blocks) * BLOCK
            i = bisect.bisect_left(lengths, end - stop, key=operator.neg)
            if i < len(rows):
                placements.append((rows.pop(i), lengths[i], end))
                end += lengths.pop(i)
            elif end % BLOCK:
                end = blocks_of(end) * BLOCK
            else:
                break
        rest = _Group(self.stem, tuple(rows), tuple(lengths))
        return _Group(self.stem, *zip(*placements)) if placements else _Group(self.stem, (), ()), rest

    @property
    def blocks(self) -> int:
        """The number of blocks that a placed group takes."""
        return blocks_of(max(self.stem, self.starts[-1] + self.lengths[-1]))

    @property
    def seen(self) -> int:
        """The largest number of blocks that one of its tokens may see, wherever the rows are placed."""
        return blocks_of(self.stem) + blocks_of(self.lengths[0]) + 1

    @functools.cached_property
    def table(self) -> list[list[int]]:
        """The blocks that each block of the group may see, as offsets from the group's first block."""
        prompt_blocks = blocks_of(self.stem)
        first = [*range(self.blocks)]  # for each block, the block in which the first of its rows begins
        for length, start in zip(self.lengths, self.starts):
            # A row that begins in the prompt's last block sees it anyway.
            begin = max(prompt_blocks, start // BLOCK)
            for block in range(begin, blocks_of(start + length)):
                first[block] = min(first[block], begin)
        prompt = [*range(prompt_blocks)]
        return [[*prompt[: b + 1], *range(max(prompt_blocks, first[b]), b + 1)] for b in range(self.blocks)]


_Pack = list[_Group]  # placed groups, one after the other


def make_packs(
    rows: Table, units: Sequence[Hashable], config: BatchConfig, *, multiple_of: int = 1, streams: int = 1
) -> list[Batch]:
    """Like `make_batches`, with sequences that are packs; some packs of a micro-batch may be empty.

    A micro-batch has a multiple of `multiple_of` packs. Packs with rows are spread evenly over devices and `streams`.
    """
    check_rows(rows, config)
    batches = []
    for unit in dict.fromkeys(units):
        by_seen: dict[int, list[_Group]] = {}
        for group in _groups(rows, [i for i, u in enumerate(units) if u == unit], config):
            by_seen.setdefault(_octave(group.seen), []).append(group)
        for groups in by_seen.values():
            packs_by_size = _packs_by_size(groups, config)
            widest = max(_widest(packs) for _, packs in packs_by_size)
            for blocks, packs in packs_by_size:
                width = max(1, config.token_budget // (blocks * BLOCK) // multiple_of) * multiple_of
                count = -(-len(packs) // width)
                count = min(-(-count // streams) * streams, len(packs))
                batches += _batches(rows, packs, (count, width, blocks, widest), unit, multiple_of)
    return batches


def most_blocks(need: int, config: BatchConfig) -> int:
    """The number of blocks of the largest pack for rows that need `need` blocks."""
    common = common_blocks(need, config)
    return max(common, min(common * ODD[-1] // 8, config.token_budget // BLOCK))


def table_width(seen: int) -> int:
    """The width of the table of blocks that see `seen` blocks: few widths, so that few programs are compiled."""
    step = 1 if seen <= ALIKE else power_of_two(seen) // 4
    return -(-seen // step) * step


def table_cuts(blocks: int, seen: int) -> list[tuple[int, int]]:
    """(start, stop) of the pieces of a table: four if blocks may see many blocks, because some then see far fewer."""
    cuts = [blocks * k // 4 for k in range(5)] if seen > ALIKE else [0, blocks]
    return [*itertools.pairwise(cuts)]


def blocks_of(tokens: Any) -> Any:
    """The number of blocks that contain `tokens` tokens; an integer or an array."""
    return -(-tokens // BLOCK)


def common_blocks(need: int, config: BatchConfig) -> int:
    """The number of blocks of a pack of common size, for rows that need `need` blocks."""
    common = min(config.slice_tokens or config.token_budget, config.token_budget)
    return max(1, common // BLOCK, power_of_two(need))


def _groups(rows: Table, indices: Sequence[int], config: BatchConfig) -> list[_Group]:
    by_prompt: dict[Hashable, list[int]] = {}
    for i in indices:
        by_prompt.setdefault(rows.prompt[i].tobytes() if config.share_prompts else i, []).append(i)
    fed = rows.length - 1  # the last sampled token is predicted, never read
    full_lengths = rows.prompt.lengths + fed
    groups, by_octave = list[_Group](), dict[int, list[int]]()
    for members in by_prompt.values():
        if len(members) > 1:
            groups.append(_group(members, fed, int(rows.prompt.lengths[members[0]])))
        else:
            by_octave.setdefault(_octave(blocks_of(int(full_lengths[members[0]])) + 1), []).extend(members)
    return groups + [_group(members, full_lengths, 0) for members in by_octave.values()]


def _octave(seen: int) -> int:
    return max(ALIKE, power_of_two(seen))


def _group(rows: Sequence[int], lengths: np.ndarray, stem: int) -> _Group:
    rows = sorted(rows, key=lambda i: -lengths[i])
    return _Group(stem, tuple(rows), tuple(lengths[rows].tolist()))


def _packs_by_size(groups: Sequence[_Group], config: BatchConfig) -> list[tuple[int, list[_Pack]]]:
    """(blocks, packs of that size): the common size, or a longer one if that saves much; quarters for the last pack."""
    largest = max(blocks_of(group.stem + group.lengths[0]) for group in groups)
    blocks, limit = common_blocks(largest, config), config.token_budget // BLOCK
    attempts = [(_fill_packs(groups, blocks, tight), tight) for tight in (True, False)]
    packs, tight = min(attempts, key=lambda attempt: len(attempt[0]) * (APART + _widest(attempt[0])))
    quarter, cost = blocks // 4, (1 - SAVING) * len(packs) * blocks
    for longer in (blocks * eighths // 8 for eighths in ODD if len(packs) >= MANY):
        longer_packs = _fill_packs(groups, longer, tight) if longer <= limit else packs
        if len(longer_packs) * longer < cost:
            blocks, packs, cost = longer, longer_packs, len(longer_packs) * longer
    last_packs = _fill_packs(packs[-1], quarter, tight) if quarter >= largest else []
    if not 0 < len(last_packs) * quarter < blocks:
        return [(blocks, packs)]
    return [(blocks, packs[:-1])] * (len(packs) > 1) + [(quarter, last_packs)]


def _widest(packs: Sequence[_Pack]) -> int:
    """The largest number of blocks that a block of these packs may see."""
    return max(len(seen) for pack in packs for group in pack for seen in group.table)


def _fill_packs(groups: Sequence[_Group], room: int, tight: bool) -> list[_Pack]:
    """Packs of `room` blocks: the largest group, the groups that fill the pack best, then a part of the next one."""

    def with_size(group: _Group) -> tuple[int, _Group]:
        placed, rest = group.split(room, tight)
        return (room + 1, group) if rest.rows else (placed.blocks, placed)

    pending = sorted(map(with_size, groups), key=lambda entry: -entry[0])
    packs = []
    while pending:
        chosen = _best_fill([size for size, _ in pending], room)
        pack, free = [pending[i][1] for i in chosen], room - sum(pending[i][0] for i in chosen)
        pending = [entry for i, entry in enumerate(pending) if i not in chosen]
        if pending and (not pack or free * BLOCK >= 2 * pending[0][1].stem):  # its prompt is computed twice
            placed, rest = pending[0][1].split(free, tight)
            if placed.rows:
                pack.append(placed)
                pending[:1] = [with_size(rest)] if rest.rows else []
                pending.sort(key=lambda entry: -entry[0])
        packs.append(pack)
    return packs


def _best_fill(sizes: Sequence[int], room: int) -> set[int]:
    """Indices of the sizes (given in descending order) that fill the room best, with the largest that fits."""
    first = bisect.bisect_left(sizes, -room, key=lambda size: -size)
    if first == len(sizes):
        return set()
    sums: dict[int, tuple[int, ...]] = {sizes[first]: (first,)}
    for i in range(first + 1, len(sizes)):
        if room in sums:
            break
        for total, chosen in list(sums.items()):
            if total + sizes[i] <= room:
                sums.setdefault(total + sizes[i], (*chosen, i))
    return {*sums[max(sums)]}


def _table(pack: _Pack, blocks: int) -> list[list[int]]:
    """The blocks that each block of a pack may see, itself the last; empty blocks see only themselves."""
    seen = list[list[int]]()
    for group in pack:
        base = len(seen)
        seen += [[base + offset for offset in offsets] for offsets in group.table]
    return [*seen, *([block] for block in range(len(seen), blocks))]


def _batches(
    rows: Table, packs: Sequence[_Pack], shape: tuple[int, int, int, int], unit: Hashable, multiple_of: int
) -> list[Batch]:
    """`shape`: number of micro-batches, packs of each, blocks of a pack, and the most blocks that one block sees."""
    count, width, blocks, most = shape
    tables = [_table(pack, blocks) for pack in packs]
    cuts, table_widths = table_cuts(blocks, most), [table_width(most)]
    if len(cuts) > 1:
        tables = [sorted(table, key=len) for table in tables]
        quarter = table_width(most) // 4  # few widths again
        longest = (max(len(blocks_seen) for table in tables for blocks_seen in table[a:b]) for a, b in cuts)
        table_widths = [-(-length // quarter) * quarter for length in longest]
    sampled = max(sum(int(rows.length[i]) for group in pack for i in group.rows) for pack in packs)
    total, step = blocks * BLOCK, blocks * BLOCK // 4
    # Few widths again. Many short rows behind one prompt have more targets than inputs.
    sampled = max(sampled, step) if sampled <= total else -(-sampled // step) * step
    batches = []
    for k in reversed(range(count)):  # the fewest packs first: their stream gets the next micro-batches
        groups: list[Placed] = []
        table = tuple(np.full((width, b - a, n), -1, np.int32) for (a, b), n in zip(cuts, table_widths))
        for number, (pack, seen_by_block) in enumerate(zip(packs[k::count], tables[k::count])):
            g, at = number % multiple_of * (width // multiple_of) + number // multiple_of, 0
            for entry, blocks_seen in zip(itertools.chain(*(piece[g] for piece in table)), seen_by_block):
                entry[: len(blocks_seen)] = blocks_seen
            for group in pack:
                groups.append(Placed(g, at, group.stem, [*zip(group.rows, group.starts)]))
                at += group.blocks * BLOCK
        batches.append(fill(rows, unit, (width, total, sampled), groups, table=table))
    return batches
