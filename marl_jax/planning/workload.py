"""The micro-batches of an update: those that the calls of a dry run make, and the largest that any calls could."""

import collections
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from marl_jax.config.run_config import RunConfig
from marl_jax.learning.batching import BLOCK, BatchConfig, MicroBatch, blank_arrays, make_batches
from marl_jax.learning.packs import blocks_of, make_packs, most_blocks, table_cuts, table_width
from marl_jax.planning.dry_run import Demand
from marl_jax.policies import is_frozen
from marl_jax.table import Table


@dataclasses.dataclass(frozen=True)
class Shape:
    """One kind of micro-batch: `rows` sequences of prefix + branches x length tokens, `sampled` of each in the loss.

    Or a pack of `length` tokens.
    """

    rows: int
    prefix: int
    length: int
    branches: int
    sampled: int
    seen: tuple[tuple[int, int], ...] = ()  # of a pack, by piece: (blocks, blocks that each may see)

    @property
    def width(self) -> int:
        """Tokens of a row, padding included."""
        return self.prefix + self.branches * self.length

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch, padding included."""
        return self.rows * self.width

    @classmethod
    def of(cls, arrays: MicroBatch) -> "Shape":
        """The shape of a micro-batch; of one pack, if it has packs."""
        (rows, width), (_, sampled) = arrays.tokens.shape, arrays.targets.shape
        length = (width - arrays.prefix) // arrays.branches
        seen = tuple(piece.shape[1:] for piece in arrays.table or ())
        return cls(1 if seen else rows, arrays.prefix, length, arrays.branches, sampled, seen)

    def arrays(self) -> MicroBatch:
        """A micro-batch of this shape without contents."""
        arrays: Any = jax.eval_shape(lambda: blank_arrays(self.rows, self.width, self.sampled))
        table = tuple(jax.ShapeDtypeStruct((self.rows, *piece), jnp.int32) for piece in self.seen)
        return MicroBatch(**arrays, table=table or None, prefix=self.prefix, branches=self.branches)


def batches_of(config: RunConfig, demand: Demand, policy: str, platform: str) -> list[tuple[Shape, int]]:
    """The micro-batches, or packs, that the calls of the dry run make which train a policy: (shape, how many)."""
    frozen = *config.policies.frozen_roles, *config.learner.interventions.freeze
    calls = [call for call in demand.of([policy]) if not is_frozen(call.role, call.slot, frozen)]
    if not calls:
        return []
    table = Table.make(
        role=[call.role for call in calls],
        policy=[policy] * len(calls),
        prompt=[call.prompt for call in calls],
        tokens=[[0] * call.new for call in calls],
        logprobs=[[0.0] * call.new for call in calls],
    )
    counts: collections.Counter[Shape] = collections.Counter()
    units = [config.learner.unit(call.role, call.slot) for call in calls]
    for batch in (make_packs if platform == "cpu" else make_batches)(table, units, config.learner.batch):
        shape = Shape.of(batch.arrays)
        counts[shape] += batch.size // shape.tokens
    return list(counts.items())


def all_shapes(config: BatchConfig, max_prompt: int, max_new: int, platform: str) -> Iterator[Shape]:
    """Every shape that a full micro-batch may have when calls are as long as allowed; of packs, the largest."""
    if platform == "cpu":
        blocks = most_blocks(blocks_of(max_prompt + max_new), config)
        seen = min(table_width(blocks_of(max_prompt) + blocks_of(max_new) + 1), blocks)
        cuts = table_cuts(blocks, seen)
        yield Shape(1, 0, blocks * BLOCK, 1, blocks * BLOCK, tuple((b - a, seen) for a, b in cuts))
        return
    longest = _first(config.buckets, max_prompt + max_new - 1)
    for length in (bucket for bucket in config.buckets if bucket <= longest):
        yield Shape(_rows(config, length), 0, length, 1, length)
    if not config.share_prompts:
        return
    room = min(config.tree_limit, config.token_budget)
    for prefix, length in itertools.product(config.buckets, config.buckets):
        if prefix > _first(config.buckets, max_prompt) or length > _first(config.buckets, max_new):
            continue
        branches = 1
        while (width := prefix + branches * length) <= room:
            yield Shape(_rows(config, width), prefix, length, branches, branches * length)
            branches *= 2


def _first(buckets: tuple[int, ...], length: int) -> int:
    return next((bucket for bucket in buckets if bucket >= length), buckets[-1])


def _rows(config: BatchConfig, width: int) -> int:
    """How many sequences the budget has room for, rounded down to a power of two."""
    return 1 << (max(1, config.token_budget // width).bit_length() - 1)
