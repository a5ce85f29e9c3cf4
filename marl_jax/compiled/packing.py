"""Packs in arrays: rows lie end to end on one line, which is cut into packs of complete rows.

    [ stem a | a1 | a2 | a3 .. ][ stem b | b1 .. ] ..      the line; a stem is what all prompts of a group begin with
    [ stem a | a1 | a2 ] [ stem a | a3 .. | stem b ] ..    packs: a group that is split has its stem in each of them

Like the packs of `learning.packs`, but rows keep their order: sums of lengths tell which rows a pack takes.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marl_jax.learning.batching import BLOCK, STEM, MicroBatch
from marl_jax.learning.packs import blocks_of
from marl_jax.models.scatter import distinct


class Rows(NamedTuple):
    """N rows in groups whose prompts share a beginning (the stem): the tokens fed after it, and the targets."""

    row: jax.Array  # Int[N], rows of the table
    group: jax.Array  # Int[N], the row's group, in ascending order
    stem: jax.Array  # Int[G, P], the beginning that a group's prompts share
    stem_length: jax.Array  # Int[G], its length
    tokens: jax.Array  # Int[N, S], the prompt after the stem, then the completion
    rest: jax.Array  # Int[N], prompt tokens after the stem
    target_count: jax.Array  # Int[N], number of targets; 0: the row takes no position
    targets: jax.Array  # Int[N, M]
    logprobs: jax.Array  # [N, M]
    advantage: jax.Array  # [N]
    temperature: jax.Array  # [N]
    kl_coef: jax.Array  # [N], weight of the KL term to the reference for the row's role

    @property
    def fed(self) -> jax.Array:
        """Int[N], tokens of a row that are fed; the last token is predicted, never fed."""
        return jnp.where(self.target_count > 0, self.rest + self.target_count - 1, 0)

    @property
    def seen(self) -> int:
        """The most blocks that a token may see."""
        return int(self.seen_by(self.tokens.shape[1]))

    def seen_by(self, fed: Any) -> Any:
        """The most blocks that a token may see in a row of which `fed` tokens are fed."""
        return blocks_of(self.stem.shape[1]) + blocks_of(fed) + 1


class Line(NamedTuple):
    """The position of every row in a single pack of all rows."""

    start: jax.Array  # Int[N], position of the row's first token
    fed: jax.Array  # Int[N]
    stem: jax.Array  # Int[N], length of its group's stem
    begin: jax.Array  # Int[N], where its group begins, aligned to a block
    end: jax.Array  # Int[N], where its group's last row ends
    after: jax.Array  # Int[N], where the next group begins
    target: jax.Array  # Int[N], number of the row's first target among the targets of all rows


class Pack(NamedTuple):
    """A pack, and the rows that its targets belong to."""

    batch: MicroBatch  # of one sequence; its table is wide enough for the longest row
    need: jax.Array  # [] how many of the last columns of its table are needed
    stop: jax.Array  # [] the first row that did not fit
    row: jax.Array  # Int[M], the row of each target; N or more for padding
    column: jax.Array  # Int[M], the target's number in its row


def line_of(rows: Rows) -> Line:
    """The line of all rows."""
    groups = len(rows.stem_length)
    total = jax.ops.segment_sum(rows.fed, rows.group, groups, indices_are_sorted=True)
    learned = jax.ops.segment_sum(rows.target_count, rows.group, groups, indices_are_sorted=True)
    stem = jnp.where(learned > 0, rows.stem_length, 0)
    size = stem + total
    room = blocks_of(size) * BLOCK
    begin = jnp.cumsum(room) - room
    inside = jnp.cumsum(rows.fed) - rows.fed
    inside -= (jnp.cumsum(total) - total)[rows.group]  # from the first row of its group
    of_group = lambda x: x[rows.group]
    return Line(
        of_group(begin + stem) + inside,
        rows.fed,
        of_group(stem),
        of_group(begin),
        of_group(begin + size),
        of_group(begin + room),
        jnp.cumsum(rows.target_count) - rows.target_count,
    )


def take(rows: Rows, line: Line, first: jax.Array, size: int, sampled: int) -> Pack:
    """A pack of up to `size` tokens and `sampled` targets, from row `first` on."""
    count = len(rows.row)
    number = jnp.arange(count)
    at = lambda x: x.at[first].get(mode="clip")
    same = rows.group == at(rows.group)
    # A pack begins with a copy of the first row's stem, then the rest of its group, then all later groups.
    moved = at(line.start) - at(line.stem)
    offset = jnp.where(same, moved, at(line.after) - blocks_of(at(line.end) - moved) * BLOCK)
    start, target = line.start - offset, line.target - at(line.target)
    begin = jnp.where(same, 0, line.begin - offset)  # where the row's group begins
    fits = (number >= first) & (start + line.fed <= size) & (target + rows.target_count <= sampled)

    def row_at(end: int, begins: jax.Array) -> jax.Array:
        # A row that does not fit begins past the end, so that no position belongs to it.
        starts = jnp.where(number < first, -1, jnp.where(fits, begins, end))
        return jnp.clip(jnp.searchsorted(starts, jnp.arange(end), side="right") - 1, 0, count - 1)

    leads = (number == first) | ~jnp.pad(rows.group[1:] == rows.group[:-1], (1, 0))  # its stem precedes it
    r = row_at(size, jnp.where(leads, begin, start))
    inner, behind = jnp.arange(size) - start[r], jnp.arange(size) - begin[r]  # position in row and in group
    stem, live = inner < 0, fits[r] & (inner < line.fed[r])
    tokens = jnp.where(stem, _entry(rows.stem, rows.group[r], behind), _entry(rows.tokens, r, inner))
    row_of_block, inside = r[::BLOCK], (live & ~stem)[::BLOCK]  # at the first position of each block
    since = jnp.where(inside, start[row_of_block] // BLOCK, jnp.arange(size // BLOCK))
    stems = jnp.where(live[::BLOCK], line.stem[row_of_block], 0)
    table = _table(since, begin[row_of_block] // BLOCK, stems, blocks_of(rows.stem.shape[1]), rows.seen)

    t = row_at(sampled, target)
    column = jnp.arange(sampled) - target[t]
    mask = fits[t] & (column < rows.target_count[t])
    before = rows.rest[t] + column  # tokens of the row that are fed before the target, without the stem
    source = jnp.where(before > 0, start[t] + before, begin[t] + line.stem[t]) - 1
    learned = jnp.cumsum(rows.target_count > 0) - (rows.target_count > 0)  # learned rows before each row
    batch = MicroBatch(
        tokens=jnp.where(live, tokens, 0),
        positions=jnp.where(live, jnp.where(stem, behind, line.stem[r] + inner), 0),
        segments=jnp.where(live, jnp.where(stem, STEM, STEM + 1 + r - first), 0),
        source=jnp.where(mask, source, 0),
        targets=_entry(rows.targets, t, column),
        mask=mask,
        sequences=jnp.where(mask, learned[t] - at(learned), 0),
        advantages=rows.advantage[t],
        sampler_logp=_entry(rows.logprobs, t, column),
        old_logp=_entry(rows.logprobs, t, column),
        ref_logp=jnp.zeros(sampled),
        kl_coef=rows.kl_coef[t],
        temperature=jnp.where(mask, rows.temperature[t], 1.0),
        table=(table,),
    )
    batch = jax.tree.map(lambda x: x[None], batch)
    need = rows.seen_by(jnp.where(fits, line.fed, 0).max())
    return Pack(batch, need, first + fits.sum(), distinct(jnp.where(mask, t, count), count), column)


def _table(since: jax.Array, begin: jax.Array, stem: jax.Array, stems: int, seen: int) -> jax.Array:
    """Int[B, seen], the blocks that each block sees: from `since` to itself, and up to `stems` of its stem; else -1.

    The stem has `stem` tokens and begins at block `begin`.
    """
    block = jnp.arange(len(since))[:, None]
    back = block - jnp.arange(seen - stems)[::-1]  # the farthest first
    step = jnp.arange(stems)
    ahead = begin[:, None] + step
    visible = (step * BLOCK < stem[:, None]) & (ahead < since[:, None])
    own = jnp.where(back >= since[:, None], back, -1)
    return jnp.concatenate([own, jnp.where(visible, ahead, -1)], axis=1)


def _entry(x: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
    return x[row, jnp.clip(column, 0, x.shape[1] - 1)]
