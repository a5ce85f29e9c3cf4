"""The update: rows in, new policies out, and a report of which role moved what.

    rows -> mini-batches -> micro-batches of one role -> g_role += d numerator        (parts, float32)
    parts / denominator -> Gram matrix -> interventions -> clip -> optimiser -> new weights

Each policy is a tree of its own with its own optimiser state; a row reaches the policy it names and no other.
Where roles need not be told apart (`LearnerConfig.apart`), micro-batches hold rows of all, and there is one part.
Everything on the device is jitted once per shape, with donated buffers; the report is read back in one go.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from marl_jax.learning import compiled, gradients
from marl_jax.learning.batching import (
    Batch,
    MicroBatch,
    by_row,
    check_rows,
    make_batches,
    padding_share,
    write,
)
from marl_jax.learning.learner_config import LearnerConfig
from marl_jax.learning.network import Network
from marl_jax.learning.optimiser import transformation
from marl_jax.learning.role_statistics import Evidence
from marl_jax.learning.step_report import (
    Report,
    gap_warnings,
    gradient_report,
    policy_report,
    role_reports,
    skip_warnings,
)
from marl_jax.learning.streams import Streams, stream_count
from marl_jax.learning.work import Work, mini_batches_of, per_role_of, units_of
from marl_jax.refused import Refused
from marl_jax.table import Table

Tree = Any


class LearnerState(flax.struct.PyTreeNode):
    """What the learner carries for a policy from step to step besides its weights; it belongs in a checkpoint."""

    optimiser: Any
    damping: Any  # average of damped gradients, None where damping is off
    steps: int = 0  # learner steps that updated it: the clock of its schedule
    updates: int = 0  # optimiser steps taken
    skipped: int = 0  # optimiser steps left out for a non-finite gradient
    empty: int = 0  # learner steps without a row for it


class NonFiniteGradients(Refused, RuntimeError):
    """A policy's gradients were not finite more often than the configuration allows."""


class Learner:
    """Compiled functions for one network and configuration; all state is passed in and handed back."""

    def __init__(
        self, network: Network, config: LearnerConfig, roles: Mapping[str, str], *, mesh: Mesh | None = None
    ):
        """`roles` maps each role (or "role/slot") to its policy. On a mesh, batches are laid over its axis "data"."""
        self.network, self.config, self.roles, self.mesh = network, config, dict(roles), mesh
        self._check_interventions()
        if strangers := sorted({*config.learning_rates} - {*roles.values()}):
            raise ValueError(
                f"learning_rates name {strangers}, no policies; there are {sorted({*roles.values()})}"
            )
        self._corrected = config.loss.is_cap is not None and config.old_logprobs == "trainer"
        # On CPU the buffers of a slice stay in cache, and memory that the system has to map is reused by the next.
        slices = config.batch.slice_tokens if mesh is None and jax.default_backend() == "cpu" else 0
        self._settings = compiled.Settings(
            network, config.loss, config.logprob_chunk, self._corrected, slices
        )
        devices = 1 if mesh is None else mesh.size
        self._streams = Streams(stream_count(jax.default_backend(), devices, config.batch.streams))

    def init(self, policies: Mapping[str, Tree]) -> dict[str, LearnerState]:
        """Fresh states for {policy: float32 tree}."""
        for name, tree in policies.items():
            narrow = {str(x.dtype) for x in jax.tree.leaves(tree) if jnp.finfo(x.dtype).bits < 32}
            if narrow:
                raise ValueError(
                    f"policy {name!r} is {', '.join(narrow)}; train float32 weights, which the network computes with "
                    "in its own dtype"
                )
        return {
            name: LearnerState(
                transformation(self.config.optimiser).init(tree),
                jax.tree.map(jnp.zeros_like, tree) if self._damped(name) else None,
            )
            for name, tree in policies.items()
        }

    def step(
        self,
        policies: Mapping[str, Tree],
        states: Mapping[str, LearnerState],
        rows: Table,
        *,
        step: int = 0,
        bases: Mapping[str, Tree] | None = None,
        references: Mapping[str, Tree] | None = None,
        check: Callable[[], None] | None = None,
    ) -> tuple[dict[str, Tree], dict[str, LearnerState], Report]:
        """New policies and states; the old ones are donated. Steps count from 0.

        By policy: `bases` are the frozen weights under its adapter, `references` the trees of the KL anchor. `check`
        is called before every micro-batch for as long as the old policies and states are whole: it may raise.
        """
        self._check_rows(policies, states, rows, bases)
        policies, states = dict(policies), dict(states)
        skipped = {policy: state.skipped for policy, state in states.items()}
        reports: dict[str, dict[str, float]] = {}
        evidence = Evidence.of_nothing(len(rows))
        described: dict[str, dict[str, Any]] = {}
        trains = self._trained(rows, step)
        for policy in policies:
            own = rows.having(policy=policy)
            mine = np.flatnonzero(own & trains)
            if not len(mine):
                states[policy] = states[policy].replace(empty=states[policy].empty + 1)
                reports[policy] = _counters(states[policy])
                continue
            frozen, reference = (bases or {}).get(policy), self._reference(policy, references)
            work = self._work(
                policy,
                policies[policy],
                rows.take(mine),
                rows.take(own),
                step=step,
                frozen=frozen,
                reference=reference,
            )
            policies[policy], states[policy], reports[policy], described[policy], batches_of, done = (
                self._update(policy, policies[policy], states, work, frozen, check)
            )
            check = None  # the first policy is a new one now
            self._note(evidence, mine, work, batches_of, done)
        role_stats = role_reports(rows, evidence, self.config.loss, self._corrected)
        cosines = gradients.all_cosines(described, self.roles) if self.config.gradients != "off" else {}
        lost = {policy: state.skipped - skipped[policy] for policy, state in states.items()}
        warnings = gap_warnings(role_stats, self.config.gap_tolerance) + skip_warnings(lost)
        return policies, states, Report(reports, role_stats, described, cosines, warnings)

    def logprobs(self, tree: Tree, rows: Table, *, frozen: Tree = None) -> list[np.ndarray]:
        """Log-probs of every row's tokens under one policy."""
        batches = self._batches(rows)

        def step(nothing: tuple[()], batch: Batch) -> tuple[tuple[()], jax.Array]:
            return nothing, compiled.score(self._settings, tree, frozen, self._place(batch.arrays))[0]

        _, out = self._streams.run(step, tuple, batches, program=lambda batch: batch.shapes)
        return by_row(len(rows), batches, jax.device_get(out))

    # One policy, one step

    def _update(
        self,
        policy: str,
        tree: Tree,
        states: Mapping[str, LearnerState],
        work: Work,
        frozen: Tree,
        check: Callable[[], None] | None,
    ) -> tuple[Tree, LearnerState, dict[str, float], dict[str, Any], list[list[Batch]], list[Any]]:
        config, state = self.config, states[policy]
        rate = self._rate(policy, states)
        index = {unit: k for k, unit in enumerate(work.units)}
        optimiser, damping = state.optimiser, state.damping
        done: list[Any] = []  # of every mini-batch: what its micro-batches and its optimiser step came to
        batches_of: list[list[Batch]] = []
        for members in work.mini_batches:
            batches = self._written(work, members)
            carry, outs = self._gradient(
                policy,
                tree,
                frozen,
                batches,
                index,
                check,
                anchored=work.ref is not None,
                on_policy=work.on_policy,
            )
            check = None  # the old tree and state are given away next
            tree, optimiser, damping, applied = compiled.apply(
                tree,
                optimiser,
                damping,
                carry,
                np.float32(rate),
                work.per_role,
                config=config.optimiser,
                mixing=config.interventions.mixing,
                apart=config.apart,
                layer_norms=config.layer_norms,
            )
            done.append((outs, applied))
            batches_of.append(batches)
        done = jax.device_get(done)
        state = self._counted(policy, state.replace(optimiser=optimiser, damping=damping), done)
        report = _counters(state) | policy_report(
            [([out[0] for out in outs], applied) for outs, applied in done], rate
        )
        report["padding_share"] = padding_share(itertools.chain(*batches_of))
        described = {}
        if config.gradients != "off":
            described = gradient_report([applied for _, applied in done], work.units, work.unit_roles)
        return tree, state, report, described, batches_of, done

    def _work(
        self,
        policy: str,
        tree: Tree,
        rows: Table,
        everyone: Table,  # with the rows that are not trained on
        *,
        step: int,
        frozen: Tree,
        reference: Tree,
    ) -> Work:
        """What a step asks of one policy."""
        mini_batches = mini_batches_of(self.config, policy, len(rows), step)
        on_policy = len(mini_batches) == 1 and self.config.old_logprobs == "trainer"
        old = [rows.logprobs[i] for i in range(len(rows))]
        if self.config.old_logprobs == "trainer" and not on_policy:
            old = self.logprobs(tree, rows, frozen=frozen)
        ref = None if reference is None else self.logprobs(reference, rows, frozen=frozen)
        roles = self._roles_of(policy)
        units, unit_roles = units_of(self.config, roles, rows)
        per_role = per_role_of(self.config, roles, everyone, unit_roles)
        return Work(rows, mini_batches, old, ref, on_policy, units, unit_roles, per_role)

    def _rate(self, policy: str, states: Mapping[str, LearnerState]) -> float:
        """The learning rate by the policy's clock, or by that which all policies share."""
        schedule = self.config.optimiser.schedule
        own = self.config.learning_rates.get(policy, schedule.learning_rate)
        clock = states[policy].steps
        if schedule.clock != "own":
            clock = sum(state.steps for state in states.values())
        return dataclasses.replace(schedule, learning_rate=own)(clock)

    def _written(self, work: Work, members: np.ndarray) -> list[Batch]:
        """Micro-batches of a mini-batch's rows, with what they are compared with."""
        rows = work.rows.take(members)
        batches = self._batches(rows)
        write(batches, "old_logp", [work.old[i] for i in members])
        if work.ref is not None:
            anchors = self.config.interventions.kl_coef
            write(batches, "ref_logp", [work.ref[i] for i in members])
            write(batches, "kl_coef", [anchors.get(rows.roles[code], 0.0) for code in rows.role])
        return batches

    def _counted(self, policy: str, state: LearnerState, done: Sequence[Any]) -> LearnerState:
        """The state after a step; refused where too many gradients were not finite."""
        finite = [bool(applied["finite"]) for _, applied in done]
        state = state.replace(
            steps=state.steps + 1,
            updates=state.updates + sum(finite),
            skipped=state.skipped + finite.count(False),
        )
        if state.skipped >= self.config.max_skips:
            raise NonFiniteGradients(
                f"policy {policy!r}: {state.skipped} gradients were not finite (max_skips {self.config.max_skips}); "
                "go back to the last good checkpoint, with a smaller learning rate or a tighter clip"
            )
        return state

    def _note(
        self,
        evidence: Evidence,
        rows: np.ndarray,  # of the step, by row of the policy's work
        work: Work,
        batches_of: Sequence[list[Batch]],
        done: Sequence[Any],
    ) -> None:
        """Every row as the last of its policy's updates computed it."""
        for update, (members, batches, (outs, _)) in enumerate(zip(work.mini_batches, batches_of, done)):
            logp, entropy = (by_row(len(members), batches, [out[which] for out in outs]) for which in (1, 2))
            evidence.note("logp", rows[members], logp)
            evidence.note("entropy", rows[members], entropy)
            # With the sampler's as the old ones, the trainer's are known of the rows of the first update.
            if self.config.old_logprobs == "sampler" and update == 0:
                evidence.note("trainer_logp", rows[members], logp)
        old = [evidence.logp[i] for i in rows] if work.on_policy else work.old
        evidence.note("old_logp", rows, old)
        if self.config.old_logprobs != "sampler":
            evidence.note("trainer_logp", rows, old)
        if work.ref is not None:
            evidence.note("ref_logp", rows, work.ref)

    def _gradient(
        self,
        policy: str,
        tree: Tree,
        frozen: Tree,
        batches: Sequence[Batch],
        index: Mapping[Any, int],  # the part of each unit
        check: Callable[[], None] | None,
        **flags: bool,
    ) -> tuple[Any, list[Any]]:
        """The parts with their denominator, and what `accumulate` says of every micro-batch."""

        def step(carry: Any, batch: Batch) -> tuple[Any, Any]:
            arrays = self._place(batch.arrays)
            try:
                return compiled.accumulate(
                    self._settings, carry, tree, frozen, arrays, index[batch.unit], **flags
                )
            except IndexError as error:  # what XLA raised on an H100, see docs/hosts.md
                error.add_note(
                    "on a GPU, policies.attention=blocks does without the kernel that XLA failed on"
                )
                raise

        return self._streams.run(
            step,
            lambda: self._zeros(tree, len(index)),
            batches,
            program=lambda batch: (policy, len(index), *flags.values(), batch.shapes),
            check=check,
        )

    def _roles_of(self, policy: str) -> list[str]:
        return list(dict.fromkeys(_role(key) for key, name in self.roles.items() if name == policy))

    def _damped(self, policy: str) -> bool:
        return any(self.config.interventions.damps(role) for role in self._roles_of(policy))

    def _batches(self, rows: Table) -> list[Batch]:
        units = [
            self.config.unit(rows.roles[role], slot) for role, slot in zip(rows.role, rows.slot.tolist())
        ]
        parallel = 1 if self.mesh is None else self.mesh.shape["data"]
        # Masks are dear where there are kernels that could skip them; on CPU they are not worth more programs.
        mark_unmasked = jax.default_backend() != "cpu"
        return make_batches(rows, units, self.config.batch, multiple_of=parallel, mark_unmasked=mark_unmasked)

    def _zeros(self, tree: Tree, units: int) -> Any:
        def laid(leaf: jax.Array) -> NamedSharding | None:
            if self.mesh is None:
                return None
            spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else ()
            return NamedSharding(self.mesh, PartitionSpec(None, *spec))

        return compiled.nothing(tree, units, tuple(map(laid, jax.tree.leaves(tree))))

    def _place(self, arrays: MicroBatch) -> MicroBatch:
        if self.mesh is None:
            return arrays
        return jax.device_put(arrays, NamedSharding(self.mesh, PartitionSpec("data")))

    # On the host

    def _check_interventions(self) -> None:
        config = self.config.interventions
        known = {_role(key) for key in self.roles}
        for setting, roles in config.named.items():
            if strangers := sorted({*roles} - known):
                raise ValueError(
                    f"interventions.{setting} names {strangers}, which are no roles; there are {sorted(known)}"
                )
        for policy in self.roles.values():
            if self._damped(policy) and len(self._roles_of(policy)) > 1:
                raise ValueError(
                    f"coherence damping is defined for isolated policies, and {policy!r} is shared: give every role "
                    "that it acts on its own policy, or leave the role out of mixing.roles"
                )

    def _check_rows(
        self,
        policies: Mapping[str, Tree],
        states: Mapping[str, LearnerState],
        rows: Table,
        bases: Mapping[str, Tree] | None,
    ) -> None:
        """Refuse what cannot be learned from while all policies are whole."""
        codes = set(zip(rows.role.tolist(), rows.slot.tolist(), rows.policy.tolist()))
        said = [(rows.roles[role], slot, rows.policies[policy]) for role, slot, policy in codes]
        if strangers := [whose for whose in said if not self._mapped(*whose)]:
            raise ValueError(
                f"rows of (role, slot, policy) {sorted(strangers)} do not follow the map {self.roles}"
            )
        if absent := sorted({*rows.present("policy")} - {*policies}):
            raise ValueError(
                f"rows are for the policies {absent}, which were not handed over; leave such rows out"
            )
        if absent := sorted({*policies} - {*states}):
            raise ValueError(f"policies {absent} have no state: take it from `init`")
        lora = getattr(self.network, "lora_scale", None) is not None
        if lora and (absent := sorted({*policies} - {*(bases or {})})):
            raise ValueError(f"policies {absent} are adapters: hand over the weights under them as `bases`")
        for column, adds in {"reward": "rewards.credit.with_rewards", "advantage": "with_advantages"}.items():
            if getattr(rows, column) is None:
                raise ValueError(f"the table has no column {column!r}: {adds}() adds it")
        check_rows(rows, self.config.batch)

    def _mapped(self, role: str, slot: int, policy: str) -> bool:
        return self.roles.get(f"{role}/{slot}", self.roles.get(role)) == policy

    def _trained(self, rows: Table, step: int) -> np.ndarray:
        """Bool[N]: the rows whose role learns in this step."""
        learns = np.array([self.config.interventions.trains(role, step) for role in rows.roles], bool)
        return learns[rows.role] & ~(rows.truncated & self.config.mask_truncated)

    def _reference(self, policy: str, references: Mapping[str, Tree] | None) -> Tree:
        anchored = [role for role in self._roles_of(policy) if role in self.config.interventions.kl_coef]
        if not anchored:
            return None
        if references is None or policy not in references:
            raise ValueError(
                f"kl_coef of {anchored} needs references[{policy!r}], the tree it is anchored to"
            )
        return references[policy]


def _counters(state: LearnerState) -> dict[str, float]:
    return {name: getattr(state, name) for name in ("steps", "updates", "skipped", "empty")}


def _role(key: str) -> str:
    return key.split("/")[0]
