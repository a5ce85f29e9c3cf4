"""The update as part of the step: rows in blocks by length, each role's gradient apart, one optimiser step per policy.

    rows of a unit ─in_blocks─► update_programs.accumulate ─► parts, denominator ─sum of devices─► update_programs.apply

The programs are the hosted learner's; only the way rows are cut differs, which no sum depends on but for rounding.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from marl_jax.compiled.alphabet import join
from marl_jax.compiled.cast import Cast, rates
from marl_jax.compiled.columns import Columns
from marl_jax.compiled.widths import in_blocks, ladder
from marl_jax.learning import gradients, update_programs
from marl_jax.learning.batching import MicroBatch
from marl_jax.learning.interventions import PerRole
from marl_jax.learning.network import Qwen3
from marl_jax.learning.update import LearnerState
from marl_jax.models.weight_table import Tree
from marl_jax.policies import is_frozen

__all__ = ["Axes", "learn", "trains"]

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


def trains(cast: Cast, columns: Columns) -> jax.Array:
    """Bool[N]: calls that were made, of roles that are not frozen."""
    frozen = cast.config.policies.frozen_roles
    learns = jnp.array([not is_frozen(cue.role, cue.slot, frozen) for cue in columns.cues])
    return (columns.table.length > 0) & jnp.tile(learns, len(columns.answer))


def learn(
    cast: Cast,
    trees: Mapping[str, Tree],
    states: Mapping[str, LearnerState],
    columns: Columns,
    step: jax.Array,  # [] from 0
    bases: Mapping[str, Tree],  # by policy: the weights under its adapter
    references: Mapping[str, Tree],  # by policy: what the KL term is anchored to
    axes: Axes,
) -> tuple[dict[str, Tree], dict[str, LearnerState], Columns, dict[str, Any]]:
    """New policies and states, the table with log-probs and entropy, and what the optimiser says of each policy."""
    trees, states, told = dict(trees), dict(states), dict[str, Any]()
    logp = jnp.zeros(columns.table.tokens.shape, jnp.float32)
    columns = columns.replace(logp=logp, entropy=logp)
    trained = columns.table.trains & _learns(cast, columns, step)
    if cast.config.learner.mask_truncated:
        trained &= ~columns.table.truncated
    for policy in trees:
        ticks = rates(cast.config, policy, len(trees))
        clock: Any = states[policy].steps
        if cast.config.learner.optimiser.schedule.clock != "own":
            clock = sum((state.steps for state in states.values()), jnp.zeros((), jnp.int32))
        rate = ticks[jnp.minimum(clock, len(ticks) - 1)]
        work = _Work(cast, policy, columns, trained, axes)
        new = work.update(trees[policy], states[policy], rate, bases.get(policy), references.get(policy))
        trees[policy], states[policy], columns, told[policy] = new
    return trees, states, columns, told


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


class _Work:
    """What a step asks of one policy."""

    def __init__(self, cast: Cast, policy: str, columns: Columns, trained: jax.Array, axes: Axes):
        self.cast, self.columns, self.trained, self.axes = cast, columns, trained, axes
        self.config = config = cast.config.learner
        owner = dict(cast.config.policies.map)
        own = lambda cue: owner.get(f"{cue.role}/{cue.slot}", owner.get(cue.role)) == policy
        self.roles = list(dict.fromkeys(key.split("/")[0] for key, name in owner.items() if name == policy))
        self.places = [place for place, cue in enumerate(columns.cues) if own(cue)]
        units = {
            place: config.unit(columns.cues[place].role, columns.cues[place].slot) for place in self.places
        }
        if config.gradients == "slots":
            self.units: list[Unit] = sorted(set(units.values()), key=lambda u: (self.roles.index(u[0]), u[1]))
            self.unit_roles = [role for role, _ in self.units]
        else:
            self.units = list(self.roles) if config.apart else [None]
            self.unit_roles = self.roles if config.apart else []
        self.of_unit = [[p for p in self.places if units[p] == unit] for unit in self.units]
        policies = cast.config.policies
        network = Qwen3(cast.parts.model, cast.parts.lora_scale, policies.remat, policies.attention)
        corrected = config.loss.is_cap is not None and config.old_logprobs == "trainer"
        self.settings = update_programs.Settings(network, config.loss, config.logprob_chunk, corrected)

    def update(
        self, tree: Tree, state: LearnerState, rate: jax.Array, frozen: Tree | None, reference: Tree | None
    ) -> tuple[Tree, LearnerState, Columns, dict[str, Any]]:
        """New weights and state; both as they were where no row trains them."""
        config = self.config
        carry: Any = update_programs.nothing(tree, len(self.units), (None,) * len(jax.tree.leaves(tree)))
        carry, columns = (carry, None), self.columns
        for number in range(len(self.units)):
            carry, columns = self._add(number, carry, columns, tree, frozen, reference)
        carry, loss = self.axes.sum(carry)
        trained = self.trained.reshape(-1, len(columns.cues))[:, jnp.array(self.places)]
        rows = self.axes.sum(jnp.sum(trained))
        new, optimiser, damping, applied = update_programs.apply(
            tree,
            state.optimiser,
            state.damping,
            carry,
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
        some = lambda new, old: jax.tree.map(lambda x, y: jnp.where(rows > 0, x, y), new, old)
        told = {"loss": loss, "applied": applied, "rate": rate, "rows": rows}
        return some(new, tree), some(moved, state.replace(empty=state.empty + 1)), columns, told

    def _add(
        self,
        number: int,
        carry: Any,
        columns: Columns,
        tree: Tree,
        frozen: Tree | None,
        reference: Tree | None,
    ) -> tuple[Any, Columns]:
        """((parts, denominator), loss) with the rows of one unit, whose log-probs and entropy the table gets."""
        places = self.of_unit[number]
        if not places:
            return carry, columns
        rows = self._rows(places)
        widest, count = rows["tokens"].shape[1], len(rows["row"])
        anchored = any(role in self.config.interventions.kl_coef for role in self.roles)
        accumulate = functools.partial(
            update_programs.accumulate,
            self.settings,
            unit=jnp.int32(number),
            anchored=anchored,
            on_policy=self.config.old_logprobs == "trainer",
        )

        def block(carry: Any, some: jax.Array, width: int) -> tuple[Any, Any]:
            batch = self._batch(some, rows, width, reference if anchored else None, frozen)
            parts, (more, logp, entropy) = accumulate(carry[0], tree, frozen, batch)
            return (parts, jax.tree.map(jnp.add, carry[1], more)), (logp, entropy)

        if carry[1] is None:
            batch = self._batch(jnp.arange(1), rows, widest, None, frozen)
            shapes = jax.eval_shape(accumulate, carry[0], tree, frozen, batch)[1][0]
            carry = carry[0], jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        widths = ladder(widest, min(4, -(-count // BLOCK)))
        carry, said = in_blocks(rows["length"], BLOCK, widths, block, carry, self.axes.seeds)
        logp, entropy = (
            old.at[rows["row"], : new.shape[1]].set(new)
            for old, new in zip((columns.logp, columns.entropy), said)
        )
        return carry, columns.replace(logp=logp, entropy=entropy)

    def _rows(self, places: list[int]) -> dict[str, jax.Array]:
        """The rows of these calls, each prompt with what was said behind it."""
        columns, table = self.columns, self.columns.table
        row = (jnp.arange(len(columns.answer))[:, None] * len(columns.cues) + jnp.array(places)).reshape(-1)
        prompt = max(columns.widths[place][0] for place in places)
        said = max(columns.widths[place][1] for place in places)
        shown, length = columns.prompt_length[row], table.length[row]
        tokens, _ = join(
            [(table.prompt[row, :prompt], shown), (table.tokens[row, :said], length)], prompt + said
        )
        anchors = self.config.interventions.kl_coef
        anchor = jnp.array([anchors.get(role, 0.0) for role in table.roles], jnp.float32)[table.role[row]]
        return {
            "row": row,
            "tokens": tokens,
            "length": jnp.where(self.trained[row], shown + length - 1, 0),
            "prompt": shown,
            "said": jnp.where(self.trained[row], length, 0),
            "targets": table.tokens[row, :said],
            "logprobs": table.logprobs[row, :said],
            "advantage": table.advantage[row],
            "temperature": table.temperature[row],
            "anchor": anchor,
        }

    def _batch(
        self,
        some: jax.Array,
        rows: dict[str, jax.Array],
        width: int,
        reference: Tree | None,
        frozen: Tree | None,
    ) -> MicroBatch:
        """The micro-batch of some rows, cut at `width` tokens; those out of range are empty."""
        here = {name: values.at[some].get(mode="fill", fill_value=0) for name, values in rows.items()}
        column, said = jnp.arange(width), jnp.arange(here["targets"].shape[1])
        inside = column < here["length"][:, None]
        mask = said < here["said"][:, None]
        source = jnp.clip(here["prompt"][:, None] - 1 + said, 0, width - 1)
        each = lambda x: jnp.broadcast_to(x[:, None], mask.shape)
        batch = MicroBatch(
            tokens=jnp.where(inside, here["tokens"][:, :width], 0),
            positions=jnp.where(inside, column, 0),
            segments=inside.astype(jnp.int32),
            source=jnp.where(mask, source, 0),
            targets=here["targets"],
            mask=mask,
            sequences=each(jnp.arange(len(some))),
            advantages=each(here["advantage"]),
            sampler_logp=here["logprobs"],
            old_logp=here["logprobs"],
            ref_logp=jnp.zeros(mask.shape),
            kl_coef=each(here["anchor"]),
            temperature=jnp.where(mask, here["temperature"][:, None], 1.0),
        )
        if reference is None:
            return batch
        return dataclasses.replace(
            batch, ref_logp=update_programs.score(self.settings, reference, frozen, batch)[0]
        )

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
