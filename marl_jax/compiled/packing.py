"""Rows in packs, in arrays: end to end on one line, cut into packs of whole rows.

    [ stem a | a1 | a2 | a3 .. ][ stem b | b1 .. ] ..      the line; a stem is what all prompts of a group begin with
    [ stem a | a1 | a2 ] [ stem a | a3 .. | stem b ] ..    packs: where a group is parted, its stem lies again

As `learning.packs` has them, but rows keep their order: which of them a pack takes follows from sums of lengths.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marl_jax.learning.batching import BLOCK, STEM, MicroBatch
from marl_jax.learning.packs import blocks_of
from marl_jax.models.scatter import distinct


class Rows(NamedTuple):
    """N rows in groups whose prompts share a beginning (the stem): the tokens fed behind it, and the targets."""

    row: jax.Array  # Int[N] of the table
    group: jax.Array  # Int[N], never less than that of the row before
    stem: jax.Array  # Int[G, P], the beginning that a group's prompts share
    stems: jax.Array  # Int[G], its length
    tokens: jax.Array  # Int[N, S], the rest of its prompt, and its completion
    ahead: jax.Array  # Int[N], tokens of the rest of its prompt
    said: jax.Array  # Int[N], number of targets; 0: the row takes no place
    targets: jax.Array  # Int[N, M]
    logprobs: jax.Array  # [N, M]
    advantage: jax.Array  # [N]
    temperature: jax.Array  # [N]
    anchor: jax.Array  # [N], how strongly the row's role is held to the reference (kl_coef)

    @property
    def fed(self) -> jax.Array:
        """Int[N], tokens that are fed of a row; the last is predicted, never read."""
        return jnp.where(self.said > 0, self.ahead + self.said - 1, 0)

    @property
    def seen(self) -> int:
        """The most blocks that a token may see."""
        return int(self.seen_by(self.tokens.shape[1]))

    def seen_by(self, fed: Any) -> Any:
        """The most blocks that a token of a row may see of which so many tokens are fed."""
        return blocks_of(self.stem.shape[1]) + -(-fed // BLOCK) + 1


class Line(NamedTuple):
    """The place of every row in a single pack of all rows."""

    start: jax.Array  # Int[N] place of a row's first token
    fed: jax.Array  # Int[N]
    stem: jax.Array  # Int[N], length of its group's stem
    begin: jax.Array  # Int[N], where its group begins: with a block
    end: jax.Array  # Int[N], where its group's last row ends
    after: jax.Array  # Int[N], where the next group begins
    target: jax.Array  # Int[N] place of the first token that is learned of it, among all that are


class Taken(NamedTuple):
    """A pack, and the rows that its targets belong to."""

    batch: MicroBatch  # of one sequence; its table has the columns of the longest row
    need: jax.Array  # [] how many of the last blocks its rows see
    stop: jax.Array  # [] the first row that had no room
    row: jax.Array  # Int[M], N or more for padding
    column: jax.Array  # Int[M] its number in its row


def line_of(rows: Rows) -> Line:
    """The line of all rows."""
    groups = len(rows.stems)
    total = jax.ops.segment_sum(rows.fed, rows.group, groups, indices_are_sorted=True)
    learned = jax.ops.segment_sum(rows.said, rows.group, groups, indices_are_sorted=True)
    stem = jnp.where(learned > 0, rows.stems, 0)
    size = stem + total
    room = _whole(size)
    begin = jnp.cumsum(room) - room
    inside = jnp.cumsum(rows.fed) - rows.fed
    inside -= (jnp.cumsum(total) - total)[rows.group]  # from the first row of its group
    of = lambda x: x[rows.group]
    return Line(
        of(begin + stem) + inside,
        rows.fed,
        of(stem),
        of(begin),
        of(begin + size),
        of(begin + room),
        jnp.cumsum(rows.said) - rows.said,
    )


def take(rows: Rows, line: Line, first: jax.Array, size: int, sampled: int) -> Taken:
    """A pack of `size` tokens and `sampled` targets from row `first` on."""
    count = len(rows.row)
    number = jnp.arange(count)
    at = lambda x: x.at[first].get(mode="clip")
    same = rows.group == at(rows.group)
    # The rest of the first row's group comes behind a copy of its stem, and all later groups behind that.
    moved = at(line.start) - at(line.stem)
    offset = jnp.where(same, moved, at(line.after) - _whole(at(line.end) - moved))
    start, target = line.start - offset, line.target - at(line.target)
    begin = jnp.where(same, 0, line.begin - offset)  # of its group
    fits = (number >= first) & (start + line.fed <= size) & (target + rows.said <= sampled)

    def row_at(places: int, begins: jax.Array) -> jax.Array:
        # A row without room begins past the end: no place is its own.
        of = jnp.where(number < first, -1, jnp.where(fits, begins, places))
        return jnp.clip(jnp.searchsorted(of, jnp.arange(places), side="right") - 1, 0, count - 1)

    leads = (number == first) | ~jnp.pad(rows.group[1:] == rows.group[:-1], (1, 0))  # its stem is before it
    r = row_at(size, jnp.where(leads, begin, start))
    inner, behind = jnp.arange(size) - start[r], jnp.arange(size) - begin[r]  # place in its row, in its group
    stem, live = inner < 0, fits[r] & (inner < line.fed[r])
    tokens = jnp.where(stem, _entry(rows.stem, rows.group[r], behind), _entry(rows.tokens, r, inner))
    whose, within = r[::BLOCK], (live & ~stem)[::BLOCK]  # of the first place of each block
    since = jnp.where(within, start[whose] // BLOCK, jnp.arange(size // BLOCK))
    stems = jnp.where(live[::BLOCK], line.stem[whose], 0)
    table = _table(since, begin[whose] // BLOCK, stems, blocks_of(rows.stem.shape[1]), rows.seen)

    t = row_at(sampled, target)
    column = jnp.arange(sampled) - target[t]
    mask = fits[t] & (column < rows.said[t])
    before = rows.ahead[t] + column  # tokens of its own that are read for it
    source = jnp.where(before > 0, start[t] + before, begin[t] + line.stem[t]) - 1
    taught = jnp.cumsum(rows.said > 0) - (rows.said > 0)  # before each row
    batch = MicroBatch(
        tokens=jnp.where(live, tokens, 0),
        positions=jnp.where(live, jnp.where(stem, behind, line.stem[r] + inner), 0),
        segments=jnp.where(live, jnp.where(stem, STEM, STEM + 1 + r - first), 0),
        source=jnp.where(mask, source, 0),
        targets=_entry(rows.targets, t, column),
        mask=mask,
        sequences=jnp.where(mask, taught[t] - at(taught), 0),
        advantages=rows.advantage[t],
        sampler_logp=_entry(rows.logprobs, t, column),
        old_logp=_entry(rows.logprobs, t, column),
        ref_logp=jnp.zeros(sampled),
        kl_coef=rows.anchor[t],
        temperature=jnp.where(mask, rows.temperature[t], 1.0),
        table=(table,),
    )
    batch = jax.tree.map(lambda x: x[None], batch)
    need = rows.seen_by(jnp.where(fits, line.fed, 0).max())
    return Taken(batch, need, first + fits.sum(), distinct(jnp.where(mask, t, count), count), column)


def _table(since: jax.Array, begin: jax.Array, stem: jax.Array, stems: int, seen: int) -> jax.Array:
    """Int[B, seen], what each block sees: from `since` to itself, and up to `stems` blocks of its stem; else -1.

    The stem has `stem` tokens and begins with block `begin`.
    """
    block = jnp.arange(len(since))[:, None]
    back = block - jnp.arange(seen - stems)[::-1]  # the farthest first
    step = jnp.arange(stems)
    ahead = begin[:, None] + step
    there = (step * BLOCK < stem[:, None]) & (ahead < since[:, None])
    own = jnp.where(back >= since[:, None], back, -1)
    return jnp.concatenate([own, jnp.where(there, ahead, -1)], axis=1)


def _entry(x: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
    return x[row, jnp.clip(column, 0, x.shape[1] - 1)]


def _whole(tokens: jax.Array) -> jax.Array:
    """Of blocks that hold so many."""
    return -(-tokens // BLOCK) * BLOCK
