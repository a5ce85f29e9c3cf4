"""Micro-batches for accelerators: rows packed into sequences, prompts that several rows share computed once.

    plain  [ prompt a | a1 ][ prompt b | b1 ] ...                rows side by side, separated by segments
    tree   [ prompt ][ a1 | a2 ][ a3 ] ...                       one prompt, then branches of `length` tokens

In a tree every completion sees the prompt and itself, at the positions it has when computed alone. A plain
batch is a tree without a prompt, with one branch. All rows of a micro-batch belong to one unit: a role, a slot, or all
roles. Attention kernels want such rectangles. A CPU has no such kernel; it uses `packs`, as does the compiled road.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import numpy as np

from marl_jax import fields
from marl_jax.errors import UserError
from marl_jax.fields import Count, Whole
from marl_jax.table import Table

BLOCK = 32  # tokens in a block of a pack
STEM = 1  # segment id of the prompts that rows share
LEAST_SAVING = 0.2  # prompts are shared only if this saves at least this share of a unit's tokens


class RowError(UserError, ValueError):
    """A row fits into no micro-batch, for example a flattened episode that is too long."""


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """The shapes that micro-batches may have."""

    # Lengths that sequences are padded to on accelerators; no row may be longer than the last.
    buckets: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    token_budget: Count = 16384  # tokens of a micro-batch, padding included; a longer row gets one of its own
    share_prompts: bool = True  # completions share one copy of their prompt; always so on the compiled road
    # Longest tree, on accelerators; without a flash kernel, the scores of its branches exist at once.
    tree_limit: int = 8192
    # On a CPU, tokens of a pack, whose gradient is computed at once; 0: `token_budget`.
    slice_tokens: Whole = 1024
    streams: Count = 2  # micro-batches that are differentiated in parallel on one CPU, see `streams`

    def __post_init__(self) -> None:
        fields.check(self)
        if not self.buckets or list(self.buckets) != sorted(set(self.buckets)) or self.buckets[0] < 1:
            raise ValueError(f"length buckets {self.buckets} must be positive and increasing")


@flax.struct.dataclass
class MicroBatch:
    """Inputs of the loss: G sequences of S tokens, of which at most M per sequence were sampled."""

    tokens: Any  # int[G, S]
    positions: Any  # int[G, S]
    segments: Any  # int[G, S], 0 is padding
    source: Any  # int[G, M], index in the sequence of the token whose hidden state predicts the target
    targets: Any  # int[G, M], sampled tokens
    mask: Any  # bool[G, M], the token counts in the loss
    sequences: Any  # int[G, M], equal for tokens of one row
    advantages: Any  # float[G, M]
    sampler_logp: Any  # float[G, M], log-probs under the sampler
    old_logp: Any  # float[G, M], the log-probs that the ratio is taken against
    ref_logp: Any  # float[G, M], log-probs under the reference
    kl_coef: Any  # float[G, M], KL coefficient of the row's role
    temperature: Any  # float[G, M], at which the token was sampled
    kept: Any = None  # int[G, M, K], ids that top-k/top-p left
    clip_low: Any = None  # float[G, M], clip range of the row; None: the loss's
    clip_high: Any = None  # float[G, M]
    # Only in packs: for each of B blocks, the blocks that it may see (none later than itself), padded with -1. A tuple
    # of pieces int[G, B, R] that together cover all blocks of a pack; a single piece lists the blocks in order.
    table: Any = None
    prefix: int = flax.struct.field(pytree_node=False, default=0)  # length of the shared prompt, padded
    branches: int = flax.struct.field(pytree_node=False, default=1)  # branches of each tree
    unmasked: bool = flax.struct.field(pytree_node=False, default=False)  # see `make_batches`


@dataclasses.dataclass(frozen=True)
class Placement:
    """The targets `start` to `stop` of sequence `sequence` are the sampled tokens of row `row`."""

    row: int  # index into the table
    sequence: int  # index into the micro-batch
    start: int  # index of the row's first target in the sequence
    stop: int  # one past the last


class Placed(NamedTuple):
    """Rows behind one shared prompt, or rows with their own prompts, and where they are in a micro-batch."""

    sequence: int  # index into the micro-batch
    start: int  # index in the sequence of the first token
    stem: int  # tokens of the shared prompt; 0: none
    rows: Sequence[tuple[int, int]]  # (row, offset from `start` of its tokens after the shared prompt)


@dataclasses.dataclass(frozen=True)
class Batch:
    """One micro-batch and the placements of its rows."""

    unit: Hashable  # a role, a slot, or all roles
    arrays: MicroBatch  # inputs of the loss
    placements: tuple[Placement, ...]  # where the targets of each row are

    @property
    def size(self) -> int:
        """The number of tokens that are computed, padding included."""
        return self.computed.size

    @property
    def computed(self) -> np.ndarray:
        """Int[G, S], the segments of all tokens that are computed; 0 is padding."""
        segments = self.arrays.segments
        return segments if self.arrays.table is None else segments[segments.any(axis=1)]  # no empty packs

    @property
    def shapes(self) -> Hashable:
        """The static structure and the shapes of its arrays; batches that agree on them share a compiled program."""
        leaves, structure = jax.tree.flatten(self.arrays)
        return structure, *(x.shape for x in leaves)


class _Sequence(NamedTuple):
    """The rows of one sequence of a micro-batch, by branch."""

    # (padded length of the shared prompt, 0 without one; length of a branch; branches that there is room for)
    shape: tuple[int, int, int]
    branches: tuple[tuple[int, ...], ...]  # rows of each branch

    @property
    def tokens(self) -> int:
        prefix, length, size = self.shape
        return prefix + length * size


def make_batches(
    rows: Table, units: Sequence[Hashable], config: BatchConfig, *, multiple_of: int = 1
) -> list[Batch]:
    """Micro-batches over all rows, unit by unit; each has a multiple of `multiple_of` sequences.

    A micro-batch with one row per sequence or branch is marked `unmasked`: its attention masks only padding behind a
    shared prompt. It is compiled separately, because kernels are faster without a mask.
    """
    check_rows(rows, config)
    batches = []
    for unit in dict.fromkeys(units):
        members = [i for i, u in enumerate(units) if u == unit]
        by_shape: dict[tuple[int, int, int], list[_Sequence]] = {}
        for sequence in _arrange(rows, members, config):
            by_shape.setdefault(sequence.shape, []).append(sequence)
        for sequences in by_shape.values():
            width = max(1, config.token_budget // sequences[0].tokens)
            width = max(multiple_of, power_of_two(width + 1) // 2 // multiple_of * multiple_of)
            # Full micro-batches, then quarters for the remainder: at most two numbers of sequences for each shape.
            quarter = max(1, width // 4 // multiple_of) * multiple_of
            while sequences:
                size = width if len(sequences) > width - quarter else quarter
                one_row_each = all(len(branch) == 1 for s in sequences[:size] for branch in s.branches)
                batches.append(_fill(rows, sequences[:size], size, unit, one_row_each))
                sequences = sequences[size:]
    return batches


def padding_share(batches: Sequence[Batch]) -> float:
    """Padding tokens / all tokens that are computed."""
    padding = sum(int(np.sum(batch.computed == 0)) for batch in batches)
    return padding / max(sum(batch.size for batch in batches), 1)


def by_row(count: int, batches: Sequence[Batch], values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Cut per-token arrays [G, M], one for each micro-batch, back into `count` rows."""
    rows: list[Any] = [None] * count
    for batch, array in zip(batches, values, strict=True):
        for p in batch.placements:
            rows[p.row] = array[p.sequence, p.start : p.stop]
    return rows


def write(batches: Iterable[Batch], name: str, values: Sequence[Any]) -> None:
    """Write each row's values (one per sampled token, or one for all of them) into the array `name`."""
    for batch in batches:
        for p in batch.placements:
            getattr(batch.arrays, name)[p.sequence, p.start : p.stop] = values[p.row]


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices by bin: the longest item first, each item into the first bin that still has room."""
    bins: list[list[int]] = []
    room = np.empty(len(lengths), np.int64)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = np.flatnonzero(room[: len(bins)] >= lengths[i])
        if fits.size:
            bins[fits[0]].append(i)
            room[fits[0]] -= lengths[i]
        else:
            room[len(bins)] = capacity - lengths[i]
            bins.append([i])
    return bins


def _arrange(rows: Table, indices: Sequence[int], config: BatchConfig) -> list[_Sequence]:
    """Trees for the prompts where sharing computes fewer tokens, plain packing for all other rows."""
    # The last sampled token is predicted, never read.
    lengths = (rows.prompt.lengths + rows.length - 1).tolist()
    by_prompt: dict[bytes, list[int]] = {}
    for i in indices:
        by_prompt.setdefault(rows.prompt[i].tobytes(), []).append(i)
    prompts = list(by_prompt.values())
    sequences: list[_Sequence] = []
    unshared: list[int] = []
    saved_tokens = 0
    trees_of = _trees(rows, prompts, config) if config.share_prompts else [[]] * len(prompts)
    for members, trees in zip(prompts, trees_of):
        separate_tokens = sum(lengths[i] for i in members)
        tree_tokens = sum(tree.tokens for tree in trees)
        if trees and tree_tokens < separate_tokens:
            sequences += trees
            saved_tokens += separate_tokens - tree_tokens
        else:
            unshared += members
    if saved_tokens < LEAST_SAVING * sum(lengths[i] for i in indices):  # not worth separate programs
        sequences, unshared = [], list(indices)
    buckets = {i: _bucket(lengths[i], config.buckets) for i in unshared}
    packable = [i for i in unshared if buckets[i] <= config.token_budget]
    sequences += [
        _Sequence((0, buckets[i], 1), ((i,),)) for i in unshared if buckets[i] > config.token_budget
    ]
    if packable:
        capacity = max(buckets[i] for i in packable)
        for members in first_fit_decreasing([lengths[i] for i in packable], capacity):
            sequences.append(_Sequence((0, capacity, 1), (tuple(packable[i] for i in members),)))
    return sequences


def _trees(rows: Table, prompts: Sequence[Sequence[int]], config: BatchConfig) -> list[list[_Sequence]]:
    """Trees for the rows of each prompt; none for a prompt with one row or with rows beyond the limits.

    All trees of one shape have the same number of branches: the power of two that computes the fewest tokens.
    """
    # {(prefix, length of a branch): {index of the prompt: rows of each branch}}
    by_shape: dict[tuple[int, int], dict[int, list[tuple[int, ...]]]] = {}
    for k, members in enumerate(prompts):
        # The last sampled token is predicted, never read.
        lengths = [int(rows.length[i]) - 1 for i in members]
        prompt, longest = int(rows.prompt.lengths[members[0]]), max(*lengths, 1)
        if len(members) > 1 and max(prompt, longest) <= config.buckets[-1]:
            shape = _bucket(prompt, config.buckets), _bucket(longest, config.buckets)
            bins = first_fit_decreasing(lengths, shape[1])
            by_shape.setdefault(shape, {})[k] = [tuple(members[i] for i in items) for items in bins]
    trees: list[list[_Sequence]] = [[] for _ in prompts]
    for shape, branches_of in by_shape.items():
        size = _branches(*shape, [len(branches) for branches in branches_of.values()], config)
        for k, branches in branches_of.items() if size else ():
            starts = range(0, len(branches), size)
            trees[k] = [_Sequence((*shape, size), tuple(branches[i : i + size])) for i in starts]
    return trees


def _branches(prefix: int, length: int, counts: Sequence[int], config: BatchConfig) -> int:
    """The number of branches of a tree; 0 if not even one fits."""
    limit = (min(config.tree_limit, config.token_budget) - prefix) // length
    sizes = [1 << k for k in range(max(counts).bit_length() + 1) if 1 << k <= limit]
    cost = {size: sum(-(-count // size) for count in counts) * (prefix + size * length) for size in sizes}
    return min(sizes, key=lambda size: (cost[size], -size), default=0)


def _fill(rows: Table, sequences: Sequence[_Sequence], size: int, unit: Hashable, unmasked: bool) -> Batch:
    prefix, length, branches = sequences[0].shape
    groups: list[Placed] = []
    for g, sequence in enumerate(sequences):
        placed: list[tuple[int, int]] = []
        for b, members in enumerate(sequence.branches):
            start = prefix + b * length
            for i in members:
                placed.append((i, start))
                start += int(rows.length[i]) - 1 + (0 if prefix else int(rows.prompt.lengths[i]))
        groups.append(Placed(g, 0, int(rows.prompt.lengths[placed[0][0]]) if prefix else 0, placed))
    sampled = max(sum(int(rows.length[i]) for i, _ in group.rows) for group in groups)
    shape = size, sequences[0].tokens, sampled
    return fill(rows, unit, shape, groups, prefix=prefix, branches=branches, unmasked=unmasked)


def fill(
    rows: Table,
    unit: Hashable,
    shape: tuple[int, int, int],  # sequences, tokens of each, and the largest number of sampled tokens of one
    groups: Sequence[Placed],  # sequence by sequence
    **layout: Any,  # other fields of `MicroBatch`
) -> Batch:
    """The micro-batch with these groups of rows in its sequences."""
    size, total, sampled = shape
    # Few widths, so that few programs are compiled. Many short rows behind one prompt have more targets than inputs.
    room = total - layout.get("prefix", 0)
    step = max(1, room // 16)
    sampled = min(max(16, power_of_two(sampled)), room) if sampled <= room else -(-sampled // step) * step
    arrays: dict[str, Any] = blank_arrays(size, total, sampled)
    kept = _kept(rows, [i for group in groups for i, _ in group.rows], (size, sampled))
    advantages = np.zeros(len(rows)) if rows.advantage is None else rows.advantage
    columns = {"targets": rows.tokens, "sampler_logp": rows.logprobs, "temperature": rows.temperature}
    columns["advantages"] = advantages if rows.weight is None else advantages * rows.weight
    for name in ("clip_low", "clip_high"):
        if (bounds := getattr(rows, name)) is not None:
            columns[name], arrays[name] = bounds, np.zeros((size, sampled), np.float32)
    placements: list[Placement] = []
    ends, segments = [0] * size, [STEM] * size
    for g, begin, stem, placed in groups:
        if stem:
            _write(arrays, g, begin, rows.prompt[placed[0][0]], 0, STEM)
        for i, offset in placed:
            prompt, tokens, start = rows.prompt[i], rows.tokens[i], begin + offset
            segments[g] += 1
            first, ends[g] = ends[g], ends[g] + len(tokens)
            fed = tokens[:-1] if stem else np.concatenate([prompt, tokens[:-1]])
            _write(arrays, g, start, fed, stem, segments[g])
            span = g, slice(first, ends[g])
            arrays["source"][span] = start + len(fed) - len(tokens) + np.arange(len(tokens))
            if stem:
                arrays["source"][g, first] = begin + stem - 1
            arrays["sequences"][span] = len(placements)
            arrays["mask"][span] = rows.counted(i)
            for name, column in columns.items():
                arrays[name][span] = column[i]
            if kept is not None and len(sets := rows.kept[i]):  # empty: nothing was cut from the distribution
                width = min(kept.shape[2], sets.shape[1])
                kept[(*span, slice(width))] = sets[:, :width]
            placements.append(Placement(i, g, first, ends[g]))
    return Batch(unit, MicroBatch(**arrays, kept=kept, **layout), tuple(placements))


def blank_arrays(size: int, total: int, sampled: int) -> dict[str, np.ndarray]:
    """Empty arrays of a micro-batch of `size` sequences with `total` inputs and `sampled` targets each."""
    fed_fields = ("tokens", "positions", "segments")
    int_fields = ("source", "targets", "sequences")
    float_fields = ("advantages", "sampler_logp", "old_logp", "ref_logp", "kl_coef")
    return {
        **{name: np.zeros((size, total), np.int32) for name in fed_fields},
        **{name: np.zeros((size, sampled), np.int32) for name in int_fields},
        **{name: np.zeros((size, sampled), np.float32) for name in float_fields},
        "temperature": np.ones((size, sampled), np.float32),
        "mask": np.zeros((size, sampled), bool),
    }


def _write(
    arrays: dict[str, np.ndarray], g: int, start: int, tokens: np.ndarray, position: int, segment: int
) -> None:
    place = slice(start, start + len(tokens))
    arrays["tokens"][g, place] = tokens
    arrays["positions"][g, place] = position + np.arange(len(tokens))
    arrays["segments"][g, place] = segment


def _kept(rows: Table, members: Sequence[int], shape: tuple[int, int]) -> np.ndarray | None:
    if rows.kept is None:
        return None
    width = max(int((rows.kept[i] >= 0).sum(axis=1).max(initial=0)) for i in members)
    return np.full((*shape, power_of_two(width)), -1, np.int32) if width else None


def check_rows(rows: Table, config: BatchConfig) -> None:
    """Refuse rows that fit into no micro-batch. A row that fits only into a tree is refused later if it gets none."""

    def refuse(wrong: np.ndarray, why: Callable[[int], str]) -> None:
        for i in np.flatnonzero(wrong)[:1]:
            raise RowError(f"a row of role {rows.role_of(i)!r} has {why(i)}")

    prompts = rows.prompt.lengths
    empty = (prompts == 0) | (rows.length == 0)
    refuse(empty, lambda _: "an empty prompt or completion; leave such calls out")
    for ids in (rows.prompt, rows.tokens):
        if len(ids.values) and ids.values.min() < 0:
            below = np.array([ids[i].min() < 0 for i in range(len(rows))], bool)
            refuse(below, lambda _: "a token id below 0; leave out tokens that are not learned")
    unequal = rows.length != rows.logprobs.lengths
    refuse(unequal, lambda i: f"{rows.length[i]} tokens, {rows.logprobs.lengths[i]} log-probs")
    if rows.spoken is not None:
        unmarked = np.array([not rows.spoken[i].any() for i in range(len(rows))], bool)
        bad = unmarked | (rows.spoken.lengths != rows.length)
        refuse(bad, lambda i: f"{rows.length[i]} tokens; `spoken` must have as many marks, at least one true")
    if rows.kept is not None:
        sets = rows.kept.lengths
        bad = (sets > 0) & (sets != rows.length)
        refuse(bad, lambda i: f"{rows.length[i]} tokens and {sets[i]} kept sets; give one per token, or none")
    not_positive = ~(rows.temperature > 0)
    refuse(not_positive, lambda i: f"temperature {rows.temperature[i]}; learning needs one above 0")
    _bucket(int(np.maximum(prompts, rows.length - 1).max(initial=1)), config.buckets)


def _bucket(length: int, buckets: Sequence[int]) -> int:
    for bucket in buckets:
        if length <= bucket:
            return bucket
    raise RowError(
        f"a row of {length} tokens fits no length bucket (longest {buckets[-1]}): add a longer one to "
        "learner.batch.buckets"
    )


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
