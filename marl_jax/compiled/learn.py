"""The update as part of the step: rows in packs, a separate gradient for each role, one optimiser step per policy.

    rows of a unit ─take─► pack by pack update_programs.accumulate ─► parts ─sum over devices─► update_programs.apply

The programs are the hosted learner's; only the rows of each pack differ, which changes sums by rounding alone.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from marl_jax.compiled.alphabet import join
from marl_jax.compiled.cast import Cast, rates
from marl_jax.compiled.columns import Columns
from marl_jax.compiled.packing import Pack, Rows, line_of, take
from marl_jax.compiled.script import Cue
from marl_jax.compiled.widths import by_width, over_seeds
from marl_jax.learning import update_programs, work
from marl_jax.learning.batching import BLOCK, BatchConfig
from marl_jax.learning.network import Qwen3
from marl_jax.learning.packs import blocks_of, common_blocks
from marl_jax.learning.update import LearnerState
from marl_jax.models.scatter import UNIQUE
from marl_jax.models.weight_table import Tree
from marl_jax.policies import is_frozen, policy_of, roles_of

_ALL = jnp.iinfo(jnp.int32).max
MOST_STEM = 32  # the longest stem, in tokens, where prompts are not equal; 64 tokens were no faster
# Unlike in the hosted learner, no argument is donated: the caller of the step keeps its state.
_apply = jax.jit(update_programs.apply.__wrapped__, static_argnames="settings")  # type: ignore[attr-defined]
Unit = Any  # a role, (role, slot), or None for all rows


@dataclasses.dataclass(frozen=True)
class Axes:
    """The names of mapped axes: loops follow the largest need over `seeds`, sums go over `data`."""

    seeds: str | None
    data: str | None

    def sum(self, tree: Any) -> Any:
        """The sum over the devices that the episodes are sharded over."""
        return tree if self.data is None else jax.lax.psum(tree, self.data)


def before_update(cast: Cast, columns: Columns) -> Columns:
    """The table before the update: `trains` marks the rows of roles that are not frozen; log-probs are still 0."""
    frozen = cast.config.policies.frozen_roles
    learns = jnp.array([not is_frozen(cue.role, cue.slot, frozen) for cue in columns.cues])
    trains = (columns.table.length > 0) & jnp.tile(learns, len(columns.answer))
    zeros = jnp.zeros(columns.table.tokens.shape, jnp.float32)
    ref_logp = zeros if cast.config.learner.interventions.kl_coef else None
    table = columns.table.replace(trains=trains)
    return columns.replace(table=table, logp=zeros, entropy=zeros, ref_logp=ref_logp)


def units_of(cast: Cast, policy: str, cues: Sequence[Cue]) -> tuple[list[Unit], list[str]]:
    """The units of a policy, each with a gradient of its own, and the role of each unit."""
    calls = [(cue.role, cue.slot) for cue in cues if _owner(cast, cue) == policy]
    return work.units_of(cast.config.learner, roles_of(cast.config.policies.map, policy), calls)


def _owner(cast: Cast, cue: Cue) -> str:
    return policy_of(cast.config.policies.map, cue.role, cue.slot)


class Update:
    """The update of one policy in a step."""

    def __init__(self, cast: Cast, policy: str, state: Any, columns: Columns, axes: Axes):
        """`state` is a `step.State`."""
        self.cast, self.columns, self.axes = cast, columns, axes
        self.tree, self.learner = state.trees[policy], state.learner[policy]
        self.frozen, self.reference = state.bases.get(policy), state.references.get(policy)
        self.config = config = cast.config.learner
        self.roles = roles_of(cast.config.policies.map, policy)
        self.units, self.unit_roles = units_of(cast, policy, columns.cues)
        self.places = [place for place, cue in enumerate(columns.cues) if _owner(cast, cue) == policy]
        policies = cast.config.policies
        network = Qwen3(cast.parts.model, cast.parts.lora_scale, policies.remat, policies.attention)
        self.settings = update_programs.Settings.of(network, config)
        trains, table = config.interventions.trains, columns.table
        role_trains = jnp.stack([jnp.asarray(trains(role, state.step)) for role in table.roles])
        self.trained = table.trains & role_trains[table.role]
        if config.mask_truncated:
            self.trained &= ~table.truncated
        schedule = rates(cast.config, policy, len(state.trees))
        clock: Any = self.learner.steps
        if config.optimiser.schedule.clock != "own":
            clock = sum((other.steps for other in state.learner.values()), jnp.zeros((), jnp.int32))
        self.rate = schedule[jnp.minimum(clock, len(schedule) - 1)]

    def run(self) -> tuple[tuple[Tree, LearnerState], dict[str, Any], dict[str, Any]]:
        """The new weights and state, the columns that the learner computes, and the metrics of the update.

        If no row trains, these are the old weights and state, with one more empty step counted.
        """
        config, columns, tree, state = self.config, self.columns, self.tree, self.learner
        parts = update_programs.zero_carry(tree, len(self.units))
        carry: Any = parts, None, jnp.zeros(2, jnp.int32)
        for number, unit in enumerate(self.units):
            for places in self._places_of(unit):
                rows = self._rows(places)
                carry, columns = self._add(number, rows, carry, columns)
        parts, loss, (filled, computed) = self.axes.sum(carry)
        trained = self.trained.reshape(-1, len(columns.cues))[:, jnp.array(self.places, jnp.int32)]
        count = self.axes.sum(jnp.sum(trained))
        per_role = work.per_role_of(config, self.roles, self._calls(), self.unit_roles)
        new, optimiser, damping, applied = _apply(
            tree, state.optimiser, state.damping, parts, self.rate, per_role, settings=config.step_settings
        )
        finite = applied["finite"].astype(jnp.int32)
        new_state = state.after(optimiser, damping, taken=finite, skipped=1 - finite)
        select = lambda new, old: jax.tree.map(lambda x, y: jnp.where(count > 0, x, y), new, old)
        metrics = {"loss": loss, "applied": applied, "rate": self.rate, "rows": count}
        metrics["padding_share"] = 1 - filled / jnp.maximum(computed, 1)
        after = select(new, tree), select(new_state, state.replace(empty=state.empty + 1))
        return after, learner_columns(columns), metrics

    def _places_of(self, unit: Unit) -> list[list[int]]:
        """The places of a unit in lists: one per prompt that a problem's episodes share, one for all other calls."""
        config, cues, shared = self.config, self.columns.cues, self.columns.shared
        groups: dict[Any, list[int]] = {}
        for place in self.places:
            if config.unit(cues[place].role, cues[place].slot) == unit:
                groups.setdefault(cues[place].pieces if shared[place] else None, []).append(place)
        return list(groups.values())

    def _rows(self, places: Sequence[int]) -> Rows:
        """The rows of these calls, one group per problem; groups with the longest rows come last."""
        columns, table, samples = self.columns, self.columns.table, self.cast.samples
        prompt, most = (max(columns.widths[place][side] for place in places) for side in (0, 1))
        equal = columns.shared[places[0]]  # their prompts are equal: the stem is the complete prompt
        row = jnp.arange(len(columns.answer))[:, None] * len(columns.cues) + jnp.array(places)
        row = row.reshape(-1, samples * len(places))
        stem, stem_length = self._common_stem(row, prompt if equal else min(prompt, MOST_STEM))
        rest = columns.prompt_length[row] - stem_length[:, None]
        need = jnp.where(self.trained[row], rest + table.length[row], 0).max(axis=1)
        order = jnp.argsort(need)
        group = jnp.arange(row.size) // row.shape[1]
        row, rest = row[order].reshape(-1), rest[order].reshape(-1)
        prompts = table.prompt[row, :prompt], columns.prompt_length[row]
        completions = table.tokens[row, :most], table.length[row]
        text = join([prompts, completions], prompt + most)[0]
        width = most if equal else prompt + most - 1
        index = stem_length[order][group, None] + jnp.arange(width)
        kl_coefs = self.config.interventions.kl_coef
        kl_coef = jnp.array([kl_coefs.get(role, 0.0) for role in table.roles], jnp.float32)
        return Rows(
            row,
            group,
            stem[order],
            stem_length[order],
            jnp.take_along_axis(text, jnp.minimum(index, text.shape[1] - 1), axis=1),
            rest,
            jnp.where(self.trained[row], table.length[row], 0),
            table.tokens[row, :most],
            table.logprobs[row, :most],
            table.advantage[row],
            table.temperature[row],
            kl_coef[table.role[row]],
        )

    def _common_stem(self, row: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
        """The common beginning of the prompts of the rows [G, B] that train: tokens [G, most], and its length [G]."""
        prompts, learned = self.columns.table.prompt[row, :most], self.trained[row]
        first = jnp.take_along_axis(prompts, jnp.argmax(learned, axis=1)[:, None, None], axis=1)
        same = (prompts == first) & (jnp.arange(most) < self.columns.prompt_length[row][..., None])
        return first[:, 0], jnp.cumprod(jnp.all(same | ~learned[..., None], axis=1), axis=1).sum(axis=1)

    def _add(self, number: int, rows: Rows, carry: Any, columns: Columns) -> tuple[Any, Columns]:
        """Add rows to the carry (parts and denominator, loss, filled and computed positions), log-probs to columns."""
        anchored = any(role in self.config.interventions.kl_coef for role in self.roles)
        flags = {"anchored": anchored, "on_policy": self.config.old_logprobs == "trainer"}
        accumulate = functools.partial(
            update_programs.accumulate, self.settings, unit=jnp.int32(number), **flags
        )
        size, sampled, widths = _shape(rows, self.config.batch)
        line, most = line_of(rows), rows.targets.shape[1]

        def add(state: Any, pack: Pack, seen: int) -> Any:
            (parts, loss, counted), _, values = state
            batch = dataclasses.replace(pack.batch, table=(pack.batch.table[0][..., -seen:],))
            if anchored:
                score = update_programs.score(self.settings, self.reference, self.frozen, batch)[0]
                batch = dataclasses.replace(batch, ref_logp=score)
            parts, (more_loss, *values_of) = accumulate(parts, self.tree, self.frozen, batch)
            counted += jnp.array([jnp.sum(batch.segments > 0), size])
            # Each (row, column) occurs once in a pack (`packing.take`).
            put = lambda old, new: old.at[pack.row, pack.column].set(new[0], **UNIQUE)
            carry = parts, jax.tree.map(jnp.add, loss, more_loss), counted
            return carry, pack.stop, list(map(put, values, (*values_of, batch.ref_logp)))

        def step(state: Any) -> Any:
            pack = take(rows, line, state[1], size, sampled)
            return by_width(pack.need, widths, lambda seen: add(state, pack, seen), self.axes.seeds)

        def unfinished(state: Any) -> jax.Array:
            left = rows.target_count.sum() - line.target.at[state[1]].get(mode="fill", fill_value=_ALL)
            return over_seeds((left > 0).astype(jnp.int32), self.axes.seeds) > 0

        if carry[1] is None:
            batch = take(rows, line, jnp.int32(0), size, sampled).batch
            shapes = jax.eval_shape(accumulate, carry[0], self.tree, self.frozen, batch)[1][0]
            carry = carry[0], jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), carry[2]
        values = [jnp.zeros((len(rows.row), most), jnp.float32)] * 3
        with jax.named_scope("packs"):
            carry, _, values = jax.lax.while_loop(unfinished, step, (carry, jnp.int32(0), values))
        new = {
            name: None if old is None else old.at[rows.row, :most].set(value, **UNIQUE)
            for (name, old), value in zip(learner_columns(columns).items(), values)
        }
        return carry, columns.replace(**new)

    def _calls(self) -> jax.Array:
        """Numbers of calls [roles, slots], as `learning.work.calls_by_slot` returns them."""
        table, cues = self.columns.table, self.columns.cues
        counts = self.axes.sum(jnp.sum(table.trains.reshape(-1, len(cues)), axis=0))
        slots = sorted({0, *(cues[place].slot for place in self.places)})
        calls = {(role, slot): jnp.zeros((), counts.dtype) for role in self.roles for slot in slots}
        for place in self.places:
            calls[cues[place].role, cues[place].slot] += counts[place]
        return jnp.stack([*calls.values()]).reshape(len(self.roles), -1)


def learner_columns(columns: Columns) -> dict[str, Any]:
    """The columns that the learner computes."""
    return {name: getattr(columns, name) for name in ("logp", "entropy", "ref_logp")}


def _shape(rows: Rows, config: BatchConfig) -> tuple[int, int, tuple[int, ...]]:
    """The tokens of a pack, the most targets in it, and the widths to choose from for its table."""
    (_, prompt), (_, length), (_, most) = rows.stem.shape, rows.tokens.shape, rows.targets.shape
    if jax.default_backend() != "cpu":
        config = dataclasses.replace(config, slice_tokens=0)
    size = common_blocks(blocks_of(prompt + length), config) * BLOCK
    if length == most:
        return size, size, (rows.seen,)
    # Most prompts have a third to a half of their largest length, and long rows come last.
    quarters = min(4, -(-6 * most // length))
    return size, size * quarters // 4, tuple(sorted({int(rows.seen_by(length // 3)), rows.seen}))
