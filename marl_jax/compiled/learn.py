"""The update as part of the step: rows in blocks by length, each role's gradient apart, one optimiser step per policy.

    rows of a unit ─in_blocks─► update_programs.accumulate ─► parts, denominator ─sum of devices─► update_programs.apply

The programs are the hosted learner's; only the way rows are cut differs, which no sum depends on but for rounding.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from marl_jax.compiled.alphabet import join
from marl_jax.compiled.cast import Cast, rates
from marl_jax.compiled.columns import Columns
from marl_jax.compiled.script import Cue
from marl_jax.compiled.widths import in_blocks, ladder
from marl_jax.learning import update_programs
from marl_jax.learning.batching import MicroBatch
from marl_jax.learning.by_role import gradients
from marl_jax.learning.by_role.interventions import PerRole
from marl_jax.learning.network import Qwen3
from marl_jax.learning.update import LearnerState
from marl_jax.models.weight_table import Tree
from marl_jax.policies import is_frozen, policy_of

__all__ = ["Axes", "evidence", "learn", "ready", "units_of"]

BLOCK = 32  # rows that are differentiated together
Unit = Any  # a role, (role, slot), or None for all rows


@flax.struct.dataclass
class Axes:
    """What a step may sum over, by the names of mapped axes."""

    seeds: str | None = flax.struct.field(pytree_node=False, default=None)
    data: str | None = flax.struct.field(pytree_node=False, default=None)

    def sum(self, tree: Any) -> Any:
        """Over the devices that share the episodes."""
        return tree if self.data is None else jax.lax.psum(tree, self.data)


def ready(cast: Cast, columns: Columns) -> Columns:
    """The table before anything is learned of it: which rows train, of roles that are not frozen; no log-probs yet."""
    frozen = cast.config.policies.frozen_roles
    learns = jnp.array([not is_frozen(cue.role, cue.slot, frozen) for cue in columns.cues])
    trains = (columns.table.length > 0) & jnp.tile(learns, len(columns.answer))
    none = jnp.zeros(columns.table.tokens.shape, jnp.float32)
    anchored = cast.config.learner.interventions.kl_coef
    return columns.replace(
        table=columns.table.replace(trains=trains),
        logp=none,
        entropy=none,
        ref_logp=none if anchored else None,
    )


def learn(
    cast: Cast,
    policy: str,
    state: Any,  # `step.State`
    columns: Columns,
    axes: Axes,
) -> tuple[Tree, LearnerState, Columns, dict[str, Any]]:
    """The new policy and its state, the table with its log-probs and entropy, and what the optimiser says of it."""
    trained = columns.table.trains & _learns(cast, columns, state.step)
    if cast.config.learner.mask_truncated:
        trained &= ~columns.table.truncated
    own = state.learner[policy]
    ticks = rates(cast.config, policy, len(state.trees))
    clock: Any = own.steps
    if cast.config.learner.optimiser.schedule.clock != "own":
        clock = sum((other.steps for other in state.learner.values()), jnp.zeros((), jnp.int32))
    rate = ticks[jnp.minimum(clock, len(ticks) - 1)]
    work = _Work(cast, policy, columns, trained, axes)
    return work.update(state.trees[policy], own, rate, state.bases.get(policy), state.references.get(policy))


def _learns(cast: Cast, columns: Columns, step: jax.Array) -> jax.Array:
    """Bool[N]: whether a row's role is trained in this step."""
    config = cast.config.learner.interventions
    turn = step // config.alternate_every % max(len(config.alternate), 1)

    def now(role: str) -> jax.Array:
        return (
            turn == config.alternate.index(role)
            if role in config.alternate
            else jnp.array(role not in config.freeze)
        )

    return jnp.stack([now(role) for role in columns.table.roles])[columns.table.role]


def units_of(cast: Cast, policy: str, cues: Sequence[Cue]) -> tuple[list[Unit], list[str]]:
    """What the gradients of a policy are kept apart by, and the role of each; as `learning.work.units_of` has it."""
    config, roles = cast.config.learner, _roles(cast, policy)
    if config.gradients == "slots":
        there = {(cue.role, cue.slot) for cue in cues if _owner(cast, cue) == policy}
        units = sorted(there, key=lambda unit: (roles.index(unit[0]), unit[1]))
        return units, [role for role, _ in units]
    return (roles, roles) if config.apart else ([None], [])


def _roles(cast: Cast, policy: str) -> list[str]:
    owners = cast.config.policies.map.items()
    return list(dict.fromkeys(key.split("/")[0] for key, name in owners if name == policy))


def _owner(cast: Cast, cue: Cue) -> str:
    return policy_of(cast.config.policies.map, cue.role, cue.slot)


class _Rows(NamedTuple):
    """G prompts, each with the B completions that are learned behind it: many where a problem's calls share one."""

    row: jax.Array  # Int[G, B] of the table
    prompt: jax.Array  # Int[G, P]
    shown: jax.Array  # Int[G], its length
    tokens: jax.Array  # Int[G, B, S]
    said: jax.Array  # Int[G, B], how many of them are learned
    logprobs: jax.Array  # [G, B, S]
    advantage: jax.Array  # [G, B]
    temperature: jax.Array  # [G, B]
    anchor: jax.Array  # [G, B]

    @property
    def shared(self) -> bool:
        """Whether prompts are computed once for several completions."""
        return self.row.shape[1] > 1

    @property
    def need(self) -> jax.Array:
        """Int[G]: what the width of a block must hold, 0 of rows that are not learned."""
        if self.shared:
            return self.said.max(axis=1)
        return jnp.where(self.said[:, 0] > 0, self.shown + self.said[:, 0] - 1, 0)

    @property
    def longest(self) -> int:
        """The most that `need` may be."""
        return self.tokens.shape[2] + (0 if self.shared else self.prompt.shape[1] - 1)


def _micro_batch(rows: _Rows, width: int) -> MicroBatch:
    """A few rows: a shared prompt with branches of `width` tokens, else prompt and completion in `width` tokens."""
    (count, branches, most), prompt = rows.tokens.shape, rows.prompt.shape[1]
    learned = min(width, most) if rows.shared else most  # tokens of a completion that may be targets
    column = jnp.arange(learned)
    mask = column < rows.said[..., None]
    fed = jnp.maximum(rows.said - 1, 0)  # the last is predicted, never read
    shown = rows.shown[:, None, None]
    if rows.shared:
        stem, own = jnp.arange(prompt) < rows.shown[:, None], column < fed[..., None]
        flat = lambda x: x.reshape(count, -1)
        tokens = jnp.concatenate([rows.prompt, flat(rows.tokens[..., :learned])], axis=1)
        inside = jnp.concatenate([stem, flat(own)], axis=1)
        behind = jnp.broadcast_to(shown + column, own.shape)
        ahead = jnp.broadcast_to(jnp.arange(prompt), stem.shape)
        positions = jnp.concatenate([ahead, flat(behind)], axis=1)
        place = prompt + learned * jnp.arange(branches)[:, None] + column - 1
        source = jnp.where(column == 0, shown - 1, place)
    else:
        length = rows.shown + fed[:, 0]
        tokens, _ = join([(rows.prompt, rows.shown), (rows.tokens[:, 0], fed[:, 0])], width)
        inside = jnp.arange(width) < length[:, None]
        positions = jnp.broadcast_to(jnp.arange(width), inside.shape)
        source = jnp.minimum(shown - 1 + column, width - 1)
    each = lambda x: jnp.broadcast_to(x[..., None], mask.shape).reshape(count, -1)
    targets = lambda x: x[..., :learned].reshape(count, -1)
    return MicroBatch(
        tokens=jnp.where(inside, tokens, 0),
        positions=jnp.where(inside, positions, 0),
        segments=inside.astype(jnp.int32),
        source=jnp.where(mask, source, 0).reshape(count, -1),
        targets=targets(rows.tokens),
        mask=mask.reshape(count, -1),
        sequences=each(jnp.arange(count * branches).reshape(count, branches)),
        advantages=each(rows.advantage),
        sampler_logp=targets(rows.logprobs),
        old_logp=targets(rows.logprobs),
        ref_logp=jnp.zeros((count, branches * learned)),
        kl_coef=each(rows.anchor),
        temperature=jnp.where(each(rows.said) > 0, each(rows.temperature), 1.0),
        prefix=prompt if rows.shared else 0,
        branches=branches,
        unmasked=True,
    )


class _Work:
    """What a step asks of one policy."""

    def __init__(self, cast: Cast, policy: str, columns: Columns, trained: jax.Array, axes: Axes):
        self.cast, self.columns, self.trained, self.axes = cast, columns, trained, axes
        self.config = config = cast.config.learner
        self.roles = _roles(cast, policy)
        self.units, self.unit_roles = units_of(cast, policy, columns.cues)
        self.places = [place for place, cue in enumerate(columns.cues) if _owner(cast, cue) == policy]
        policies = cast.config.policies
        network = Qwen3(cast.parts.model, cast.parts.lora_scale, policies.remat, policies.attention)
        corrected = config.loss.heeds_sampler and config.old_logprobs == "trainer"
        self.settings = update_programs.Settings(network, config.loss, config.logprob_chunk, corrected)

    def update(
        self, tree: Tree, state: LearnerState, rate: jax.Array, frozen: Tree | None, reference: Tree | None
    ) -> tuple[Tree, LearnerState, Columns, dict[str, Any]]:
        """New weights and state; both as they were where no row trains them."""
        config, columns = self.config, self.columns
        parts = update_programs.nothing(tree, len(self.units), (None,) * len(jax.tree.leaves(tree)))
        carry: Any = parts, None, jnp.zeros(2, jnp.int32)
        for number, unit in enumerate(self.units):
            for places in self._together(unit):
                rows = self._rows(places)
                carry, columns = self._add(number, rows, carry, columns, tree, frozen, reference)
        parts, loss, (filled, computed) = self.axes.sum(carry)
        trained = self.trained.reshape(-1, len(columns.cues))[:, jnp.array(self.places)]
        count = self.axes.sum(jnp.sum(trained))
        new, optimiser, damping, applied = update_programs.apply(
            tree,
            state.optimiser,
            state.damping,
            parts,
            rate,
            self._per_role(),
            settings=config.step_settings,
        )
        finite = applied["finite"].astype(jnp.int32)
        moved = state.replace(
            optimiser=optimiser,
            damping=damping,
            steps=state.steps + 1,
            updates=state.updates + finite,
            skipped=state.skipped + 1 - finite,
        )
        some = lambda new, old: jax.tree.map(lambda x, y: jnp.where(count > 0, x, y), new, old)
        told = {"loss": loss, "applied": applied, "rate": rate, "rows": count}
        told["padding_share"] = 1 - filled / jnp.maximum(computed, 1)
        return some(new, tree), some(moved, state.replace(empty=state.empty + 1)), columns, told

    def _together(self, unit: Unit) -> list[list[int]]:
        """The places of a unit: those whose prompts a problem's episodes share, prompt by prompt, then the others."""
        config, cues, shared = self.config, self.columns.cues, self.columns.shared
        groups: dict[Any, list[int]] = {}
        for place in self.places:
            if config.unit(cues[place].role, cues[place].slot) == unit:
                groups.setdefault(cues[place].pieces if shared[place] else None, []).append(place)
        return list(groups.values())

    def _rows(self, places: Sequence[int]) -> _Rows:
        """The rows of these calls."""
        columns, table, samples = self.columns, self.columns.table, self.cast.samples
        row = jnp.arange(len(columns.answer))[:, None] * len(columns.cues) + jnp.array(places)
        shared = columns.shared[places[0]] and samples * len(places) > 1
        row = row.reshape(-1, samples * len(places) if shared else 1)
        prompt, said = (max(columns.widths[place][side] for place in places) for side in (0, 1))
        anchors = self.config.interventions.kl_coef
        anchor = jnp.array([anchors.get(role, 0.0) for role in table.roles], jnp.float32)
        # A call that was not made has no prompt.
        first = row[:, 0]
        if shared:
            first = jnp.take_along_axis(row, jnp.argmax(columns.prompt_length[row], axis=1)[:, None], axis=1)[
                :, 0
            ]
        return _Rows(
            row,
            table.prompt[first, :prompt],
            columns.prompt_length[first],
            table.tokens[row, :said],
            jnp.where(self.trained[row], table.length[row], 0),
            table.logprobs[row, :said],
            table.advantage[row],
            table.temperature[row],
            anchor[table.role[row]],
        )

    def _add(
        self,
        number: int,
        rows: _Rows,
        carry: Any,
        columns: Columns,
        tree: Tree,
        frozen: Tree | None,
        reference: Tree | None,
    ) -> tuple[Any, Columns]:
        """(parts and denominator, loss, places filled and computed) with rows of one unit; the table with log-probs."""
        _, branches, most = rows.tokens.shape
        anchored = any(role in self.config.interventions.kl_coef for role in self.roles)
        accumulate = functools.partial(
            update_programs.accumulate,
            self.settings,
            unit=jnp.int32(number),
            anchored=anchored,
            on_policy=self.config.old_logprobs == "trainer",
        )

        def block(carry: Any, some: jax.Array, width: int) -> tuple[Any, Any]:
            here = jax.tree.map(lambda x: x.at[some].get(mode="fill", fill_value=0), rows)
            batch = _micro_batch(here, width)
            if anchored:
                score = update_programs.score(self.settings, reference, frozen, batch)[0]
                batch = dataclasses.replace(batch, ref_logp=score)
            parts, (loss, *said) = accumulate(carry[0], tree, frozen, batch)
            counts = jnp.array([batch.segments.sum(), batch.segments.size])
            apart = lambda x: x.reshape(len(some), branches, -1)
            wide = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, most - x.shape[2])))
            said = [wide(apart(x)) for x in (*said, batch.ref_logp)]
            return (parts, jax.tree.map(jnp.add, carry[1], loss), carry[2] + counts), said

        if carry[1] is None:
            batch = _micro_batch(jax.tree.map(lambda x: x[:1], rows), rows.longest)
            shapes = jax.eval_shape(accumulate, carry[0], tree, frozen, batch)[1][0]
            carry = carry[0], jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), carry[2]
        size = max(1, BLOCK // branches)
        carry, said = in_blocks(rows.need, size, ladder(rows.longest), block, carry, self.axes.seeds)
        row = rows.row.reshape(-1)
        new = {
            name: None if old is None else old.at[row, :most].set(values.reshape(len(row), most))
            for (name, old), values in zip(evidence(columns).items(), said)
        }
        return carry, columns.replace(**new)

    def _per_role(self) -> PerRole:
        """What the roles of the policy are weighed by, as `learning.work.per_role_of` has it."""
        if not self.config.apart:
            return PerRole(jnp.ones(1), jnp.ones(1, bool), None, jnp.ones((1, 1)))
        table, cues = self.columns.table, self.columns.cues
        counts = self.axes.sum(jnp.sum(table.trains.reshape(-1, len(cues)), axis=0))
        parallel = []
        for role in self.roles:
            slots: dict[int, Any] = {}
            for place in self.places:
                if cues[place].role == role:
                    slots[cues[place].slot] = slots.get(cues[place].slot, 0) + counts[place]
            each = jnp.stack([*slots.values(), jnp.zeros((), counts.dtype)])
            parallel.append(jnp.where(each.sum() > 0, each.sum() / jnp.maximum(each.max(), 1), 1.0))
        limits, mixing = self.config.interventions.role_clip, self.config.interventions.mixing
        return PerRole(
            multiplicity=jnp.stack(parallel).astype(jnp.float32),
            mixed=jnp.array([mixing.acts_on(role) for role in self.roles]),
            clip=jnp.array([limits.get(role, jnp.inf) for role in self.roles]) if limits else None,
            membership=jnp.asarray(gradients.role_matrix(self.unit_roles, self.roles), jnp.float32),
        )


def evidence(columns: Columns) -> dict[str, Any]:
    """What the learner computes of rows."""
    return {name: getattr(columns, name) for name in ("logp", "entropy", "ref_logp")}
