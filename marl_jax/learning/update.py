"""The update: from rows to new policies, and a report of how each role moved its policy.

    rows -> mini-batches -> micro-batches of one unit -> g_unit += d numerator        (parts, float32)
    parts / denominator -> Gram matrix -> interventions -> clip -> optimiser -> new weights

Each policy is a tree of its own with its own optimiser state; a row trains only the policy that it names.
A unit is a role, or a role's slot. Without `LearnerConfig.split_by_role`, micro-batches mix the rows of all roles, and
there is one part. Everything on the device is jitted once per shape; results of updates are read back once per policy.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from marl_jax.errors import UserError
from marl_jax.fields import require
from marl_jax.hosts import layout
from marl_jax.learning import batching, objectives, update_programs
from marl_jax.learning.batching import Batch, MicroBatch
from marl_jax.learning.by_role import gradients, step_report
from marl_jax.learning.by_role.role_statistics import Evidence
from marl_jax.learning.by_role.step_report import Report
from marl_jax.learning.learner_checks import check_interventions, check_learnable, check_not_donated
from marl_jax.learning.learner_config import LearnerConfig
from marl_jax.learning.losses import OBJECTIVES
from marl_jax.learning.network import Network
from marl_jax.learning.optimiser import transformation
from marl_jax.learning.packs import make_packs
from marl_jax.learning.streams import Streams, stream_count
from marl_jax.learning.work import Work, calls_by_slot, mini_batches_of, per_role_of, units_of
from marl_jax.models.weight_table import Tree, check_mesh
from marl_jax.policies import per_name, roles_of
from marl_jax.stopwatch import Stopwatch
from marl_jax.table import Table


class LearnerState(flax.struct.PyTreeNode):
    """The training state of a policy besides its weights, carried from step to step and saved in checkpoints."""

    optimiser: Any  # state of the optax transformation
    damping: Any  # moving average of damped gradients; None if damping is off
    steps: int = 0  # learner steps with rows for the policy since its optimiser began: its schedule's clock
    updates: int = 0  # optimiser steps that were taken
    skipped: int = 0  # optimiser steps left out for a non-finite gradient since a run last ended by them
    empty: int = 0  # learner steps without a row for the policy

    @property
    def counts(self) -> dict[str, Any]:
        """{steps, updates, skipped, empty}."""
        return {name: getattr(self, name) for name in ("steps", "updates", "skipped", "empty")}

    def after(self, optimiser: Any, damping: Any, *, taken: Any, skipped: Any) -> "LearnerState":
        """The state after a learner step with rows, with `taken` optimiser steps taken and `skipped` left out."""
        counts = {"steps": self.steps + 1, "updates": self.updates + taken, "skipped": self.skipped + skipped}
        return self.replace(optimiser=optimiser, damping=damping, **counts)


class NonFiniteGradients(UserError, RuntimeError):
    """A policy's gradients were not finite `max_skips` times.

    These gradients were left out: `outcome` is the finite result of the step, (policies, states, report).
    """

    def __init__(self, text: str, outcome: Any) -> None:
        super().__init__(text)
        self.outcome = outcome


class Learner:
    """Trains policies with the programs of one configuration; weights and states are passed in and returned."""

    def __init__(
        self,
        network: Network | Mapping[str, Network],
        config: LearnerConfig,
        roles: Mapping[str, str],
        *,
        mesh: Mesh | None = None,
    ):
        """`roles` maps each role (or "role/slot") to its policy; `network` is one for all policies, or one by policy.

        On a mesh, batches are sharded over its axis "data". The mesh may span several processes: each then calls `step`
        with the same rows, and with trees on its own devices.
        """
        self.network, self.config, self.roles, self.mesh = network, config, dict(roles), mesh
        check_interventions(config, self.roles)
        if mesh is not None:
            check_mesh(mesh)
            require("data" in mesh.shape, f"the mesh has no axis 'data' for batches, only {mesh.axis_names}")
        self._objective = config.loss.kind if config.loss.kind in OBJECTIVES else None
        self._data_mesh = mesh if mesh is not None and mesh.shape["data"] > 1 else None
        self._settings = {
            policy: update_programs.Settings.of(net, config, self._data_mesh)
            for policy, net in per_name(network, dict.fromkeys(self.roles.values())).items()
        }
        devices = 1 if mesh is None else mesh.size
        self._streams = Streams(stream_count(jax.default_backend(), devices, config.batch.streams))
        self.watch = Stopwatch()  # seconds of logprobs, gradient and optimiser: dispatch and waiting

    def init(self, policies: Mapping[str, Tree]) -> dict[str, LearnerState]:
        """Fresh states for {policy: float32 tree}."""
        states = {}
        for name, tree in policies.items():
            narrow = {str(x.dtype) for x in jax.tree.leaves(tree) if jnp.finfo(x.dtype).bits < 32}
            if narrow:
                raise ValueError(
                    f"policy {name!r} is {', '.join(narrow)}; train float32 weights, which the network computes with "
                    "in its own dtype"
                )
            optimiser = transformation(self.config.optimiser).init(tree)
            damped = any(map(self.config.interventions.damps, roles_of(self.roles, name)))
            damping = jax.tree.map(jnp.zeros_like, tree) if damped else None
            states[name] = LearnerState(_with_replicated_scalars(tree, optimiser), damping)
        return states

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
        """(new policies, new states, report); old ones of policies that learn are donated. Steps count from 0.

        `bases` are the frozen weights under adapters, `references` the trees of KL anchors and objectives, by policy.
        Rows whose column `trains` is false are in the report, but are not learned from. `check` may raise; it is called
        before every micro-batch of the first gradient, while nothing is donated yet.
        """
        check_learnable(rows, policies, states, self.roles)
        check_not_donated(policies=policies, states=states, bases=bases, references=references)
        is_adapter = lambda name: getattr(self._settings[name].network, "lora_scale", None) is not None
        if no_base := sorted({*filter(is_adapter, policies)} - {*(bases or {})}):
            raise ValueError(f"policies {no_base} are adapters: pass their base weights as `bases`")
        trains, warnings = self.learns(rows, step), list[str]()
        learned = rows.take(trains)  # the other rows are only in the report
        batching.check_rows(learned, self.config.batch)
        trees, shardings = (policies, states, bases, references), layout.shardings_of((policies, states))
        if self.mesh is not None and layout.spans(self.mesh):
            trees = layout.to_global(trees, self.mesh)
        policies, states, bases, references = dict(trees[0]), dict(trees[1]), trees[2] or {}, trees[3] or {}
        skipped = {policy: state.skipped for policy, state in states.items()}
        reports: dict[str, dict[str, float]] = {}
        evidence = Evidence.empty(len(rows))
        described: dict[str, dict[str, Any]] = {}
        # Looked up first: a missing reference must raise before any policy is donated.
        anchors = {policy: self._reference(policy, references) for policy in learned.present("policy")}
        for policy in sorted(policies):  # with a shared clock, the order decides the learning rates
            chosen, aim = np.flatnonzero(learned.having(policy=policy)), None
            if self._objective and len(chosen):
                aim = objectives.aim(self._objective, learned, self.config.preference, chosen)
                chosen = chosen[aim.rows]
            counts = {} if aim is None else aim.counts
            if not len(chosen):
                states[policy] = states[policy].replace(empty=states[policy].empty + 1)
                reports[policy] = states[policy].counts | counts
                warnings += [f"policy {policy!r} learned nothing: {aim.missing}"] if aim else []
                continue
            own_trees = policies[policy], bases.get(policy), anchors[policy]
            work = self._work(policy, own_trees, rows, np.flatnonzero(trains)[chosen], step=step, aim=aim)
            policies[policy], states[policy], reports[policy], described[policy] = self._update(
                policies[policy], states, work, evidence, check
            )
            reports[policy] |= counts
            check = None  # the first policy has changed
        new_trees, new_states = layout.to_local((policies, states), shardings)
        return self.conclude(new_trees, new_states, rows, evidence, skipped, reports, described, warnings)

    def conclude(
        self,
        policies: dict[str, Tree],
        states: dict[str, LearnerState],
        rows: Table,
        evidence: Evidence,  # log-probs of these rows
        skipped: Mapping[str, int],  # by policy, before the step
        reports: dict[str, dict[str, float]],  # by policy
        described: dict[str, dict[str, Any]],  # by policy, see `gradient_report`
        warnings: Sequence[str] = (),  # of the step, besides those that follow from the reports
    ) -> tuple[dict[str, Tree], dict[str, LearnerState], Report]:
        """End a step: (policies, states, report); raises `NonFiniteGradients` if too many gradients were left out."""
        settings = next(iter(self._settings.values()))  # all policies have the same loss
        role_stats = step_report.role_reports(rows, evidence, settings.loss, settings.sampler_weights)
        cosines = gradients.all_cosines(described, self.roles) if self.config.gradients != "off" else {}
        skips = {policy: state.skipped - skipped[policy] for policy, state in states.items()}
        limit, tolerance = self.config.max_skips, self.config.gap_tolerance
        all_warnings = *step_report.warnings_of(role_stats, reports, skips, tolerance), *warnings
        report = Report(reports, role_stats, described, cosines, all_warnings, evidence.trainer_logp)
        outcome = policies, states, report
        for policy, state in states.items():
            if skips[policy] and state.skipped >= limit:
                raise NonFiniteGradients(
                    f"policy {policy!r}: {state.skipped} gradients were not finite and were skipped "
                    f"(max_skips {limit})",
                    outcome,
                )
        return outcome

    def logprobs(
        self, tree: Tree, rows: Table, *, frozen: Tree | None = None, policy: str | None = None
    ) -> list[np.ndarray]:
        """Log-probs of every row's tokens under the weights `tree`; `policy` selects the network."""
        policy = next(iter(self._settings)) if policy is None else policy
        return self._scores(policy, tree, frozen, self._batches(rows), len(rows))

    def learns(self, rows: Table, step: int) -> np.ndarray:
        """Bool[N]: the rows that a policy learns from in this step; steps count from 0."""
        role_trains = np.array([self.config.interventions.trains(role, step) for role in rows.roles], bool)
        return role_trains[rows.role] & ~(rows.truncated & self.config.mask_truncated) & rows.trains

    def _scores(
        self, policy: str, tree: Tree, frozen: Tree | None, batches: list[Batch], rows: int
    ) -> list[np.ndarray]:
        settings = self._settings[policy]

        def step(nothing: tuple[()], batch: Batch) -> tuple[tuple[()], jax.Array]:
            return nothing, update_programs.score(settings, tree, frozen, self._place(batch.arrays))[0]

        with self.watch("logprobs"):
            _, out = self._streams.run(step, tuple, batches, program=lambda batch: (settings, batch.shapes))
            return batching.by_row(rows, batches, self._on_host(out))

    # One policy, one step

    def _update(
        self,
        tree: Tree,
        states: Mapping[str, LearnerState],
        work: Work,
        evidence: Evidence,
        check: Callable[[], None] | None,
    ) -> tuple[Tree, LearnerState, dict[str, float], dict[str, Any]]:
        """New weights and state, and the reports of the policy and of its gradients."""
        config, settings, state = self.config, self.config.step_settings, states[work.policy]
        rate = self._rate(work.policy, states)
        optimiser, damping = state.optimiser, state.damping
        results: list[Any] = []  # per mini-batch: (outputs by micro-batch, outputs of the optimiser step)
        values: list[objectives.Value] = []
        batches_of: list[list[Batch]] = []
        for members in work.mini_batches:
            batches = self._micro_batches(work, members)
            if work.aim is not None and work.aim.kind != "sft":
                values.append(self._with_slopes(work, members, batches, tree))
            carry, outputs = self._gradient(work, tree, batches, check)
            check = None  # the old tree and state are donated next
            with self.watch("optimiser"):
                tree, optimiser, damping, applied = update_programs.apply(
                    tree, optimiser, damping, carry, np.float32(rate), work.per_role, settings=settings
                )
                if self._streams.count > 1:  # the threads of the next gradient would have to wait for it
                    jax.block_until_ready(applied)
            results.append((outputs, applied))
            batches_of.append(batches)
        results = self._read_back(results)
        losses, steps = [[out[0] for out in outputs] for outputs, _ in results], [step for _, step in results]
        finite = [bool(step["finite"]) for step in steps]
        state = state.after(optimiser, damping, taken=sum(finite), skipped=finite.count(False))
        report = state.counts | step_report.policy_report([*zip(losses, steps)], rate)
        report |= objectives.means(values)
        report["padding_share"] = batching.padding_share([*itertools.chain(*batches_of)])
        described = {}
        if config.gradients != "off":
            described = step_report.gradient_report(steps, work.units, work.unit_roles)
        self._record_evidence(evidence, work, batches_of, results)
        return tree, state, report, described

    def _work(
        self,
        policy: str,
        trees: tuple[Tree, Tree | None, Tree | None],  # the weights, those under the adapter, the reference
        all_rows: Table,  # rows of all policies
        indices: np.ndarray,  # the rows that this policy learns from
        *,
        step: int,
        aim: objectives.Aim | None,
    ) -> Work:
        """The work of one step for one policy."""
        (tree, frozen, reference), rows = trees, all_rows.take(indices)
        if aim is not None:
            rows = rows.replace(advantage=aim.weight, weight=None)
        together = None if aim is None else aim.together
        mini_batches = mini_batches_of(self.config, policy, len(rows), step, together)
        logprobs_of = functools.partial(self.logprobs, frozen=frozen, policy=policy)
        old = None  # an objective has no ratio, and a single update takes it against its own log-probs
        if aim is None and self.config.old_logprobs == "sampler":
            old = [rows.logprobs[i] for i in range(len(rows))]
        elif aim is None and len(mini_batches) > 1:
            old = logprobs_of(tree, rows)
        ref = None if reference is None else logprobs_of(reference, rows)
        other, other_ref = None, []
        if aim is not None and aim.kind == "kto":
            assert reference is not None
            other = objectives.mismatched(rows, self.config.batch.buckets[-1])
            other_ref = logprobs_of(reference, other)
        roles = roles_of(self.roles, policy)
        units, unit_roles = units_of(self.config, roles, [call[:2] for call in rows.callers])
        policy_rows = all_rows.take(all_rows.having(policy=policy))  # including rows that are not trained on
        per_role = per_role_of(self.config, roles, calls_by_slot(roles, policy_rows), unit_roles)
        return Work(
            policy,
            frozen,
            rows,
            indices,
            mini_batches,
            old=old,
            ref=ref,
            units=units,
            unit_roles=unit_roles,
            per_role=per_role,
            aim=aim,
            mismatched=other,
            mismatched_ref=other_ref,
        )

    def _rate(self, policy: str, states: Mapping[str, LearnerState]) -> float:
        """The learning rate at the policy's clock, or at the shared clock."""
        schedule, clock = self.config.schedule_of(policy), states[policy].steps
        if schedule.clock != "own":
            clock = sum(state.steps for state in states.values())
        return schedule(clock)

    def _micro_batches(self, work: Work, members: np.ndarray) -> list[Batch]:
        """Micro-batches of a mini-batch, with old and reference log-probs written into them."""
        rows = work.rows.take(members)
        batches = self._batches(rows)
        if work.old is not None:
            batching.write(batches, "old_logp", [work.old[i] for i in members])
        if work.ref is not None:
            anchors = self.config.interventions.kl_coef
            batching.write(batches, "ref_logp", [work.ref[i] for i in members])
            batching.write(batches, "kl_coef", [anchors.get(role, 0.0) for role, *_ in rows.callers])
        return batches

    def _with_slopes(
        self, work: Work, members: np.ndarray, batches: list[Batch], tree: Tree
    ) -> objectives.Value:
        """The objective at these weights; its slopes are written into the micro-batches as advantages."""
        assert work.aim is not None and work.ref is not None
        logp = self._scores(work.policy, tree, work.frozen, batches, len(members))
        rows = work.rows.take(members)
        scores = objectives.log_ratios(logp, [work.ref[i] for i in members], rows)
        divergence = 0.0
        if work.mismatched is not None:
            changed = members[objectives.has_other_prompt(rows, work.mismatched.take(members))]
            other = work.mismatched.take(changed)
            logp = self.logprobs(tree, other, frozen=work.frozen, policy=work.policy)
            ratios = objectives.log_ratios(logp, [work.mismatched_ref[i] for i in changed], other)
            divergence = max(0.0, float(ratios.sum()) / max(1, len(changed)))
        value = work.aim.value(members, scores, divergence)
        lengths = np.array([rows.counted(i).sum() for i in range(len(rows))])
        share = objectives.token_share(self.config.loss, lengths)
        batching.write(batches, "advantages", (-value.slope / share).tolist())
        return value

    def _record_evidence(
        self, evidence: Evidence, work: Work, batches_of: Sequence[list[Batch]], results: Sequence[Any]
    ) -> None:
        """Record the old log-probs of every row, and its log-probs and entropy in the last update that had it."""
        indices, sampled = work.row_indices, work.aim is None
        by_update = zip(work.mini_batches, batches_of, results)
        for update, (members, batches, (outputs, _)) in enumerate(by_update):
            logp, entropy = (
                batching.by_row(len(members), batches, [out[k] for out in outputs]) for k in (1, 2)
            )
            evidence.write("logp", indices[members], logp)
            evidence.write("entropy", indices[members], entropy)
            # If the old log-probs are the sampler's, those of the trainer are known for the first update only.
            if self.config.old_logprobs == "sampler" and update == 0 and sampled:
                evidence.write("trainer_logp", indices[members], logp)
        old = [evidence.logp[i] for i in indices] if work.old is None else work.old
        evidence.write("old_logp", indices, old)
        if self.config.old_logprobs != "sampler" and sampled:
            evidence.write("trainer_logp", indices, old)
        if work.ref is not None:
            evidence.write("ref_logp", indices, work.ref)

    def _gradient(
        self, work: Work, tree: Tree, batches: Sequence[Batch], check: Callable[[], None] | None
    ) -> tuple[Any, list[Any]]:
        """(the last carry of `accumulate`, its other outputs for every micro-batch)."""
        settings, part_of = self._settings[work.policy], {unit: k for k, unit in enumerate(work.units)}
        flags = {"anchored": work.ref is not None, "on_policy": work.old is None}

        def step(carry: Any, batch: Batch) -> tuple[Any, Any]:
            arrays = self._place(batch.arrays)
            try:
                return update_programs.accumulate(
                    settings, carry, tree, work.frozen, arrays, part_of[batch.unit], **flags
                )
            except IndexError as error:  # raised by XLA on an H100, see docs/hosts.md
                error.add_note("on a GPU, policies.attention=blocks avoids the kernel that XLA failed on")
                raise

        start = lambda: self._zeros(tree, len(part_of))
        program = lambda batch: (work.policy, len(part_of), *flags.values(), batch.shapes)
        with self.watch("gradient"):
            return self._streams.run(step, start, batches, program=program, check=check)

    def _batches(self, rows: Table) -> list[Batch]:
        units = [self.config.unit(role, slot) for role, slot, _ in rows.callers]
        parallel = 1 if self.mesh is None else self.mesh.shape["data"]
        if jax.default_backend() == "cpu":  # it has no kernel that suits branches of shared prompts
            streams = self._streams.count
            return make_packs(rows, units, self.config.batch, multiple_of=parallel, streams=streams)
        return batching.make_batches(rows, units, self.config.batch, multiple_of=parallel)

    def _zeros(self, tree: Tree, units: int) -> Any:
        if self.mesh is None:
            return update_programs.zero_carry(tree, units)
        leading = (None,) if self._data_mesh is None else ("data", None)
        specs = (getattr(leaf.sharding, "spec", ()) for leaf in jax.tree.leaves(tree))
        shardings = tuple(NamedSharding(self.mesh, PartitionSpec(*leading, *spec)) for spec in specs)
        return update_programs.zero_carry(tree, units, shardings, self._data_mesh)

    def _place(self, arrays: MicroBatch) -> MicroBatch:
        if self.mesh is None:
            return arrays
        if layout.spans(self.mesh):
            return layout.sharded(arrays, self.mesh)
        return jax.device_put(arrays, NamedSharding(self.mesh, PartitionSpec("data")))

    def _on_host(self, outputs: Any) -> Any:
        """Outputs of programs as numpy arrays on the host."""
        return layout.on_host(outputs) if layout.spans(self.mesh) else jax.device_get(outputs)

    def _read_back(self, results: list[Any]) -> list[Any]:
        """The outputs of all updates of a step on the host; losses of a micro-batch are summed over devices."""
        for outputs, applied in results:  # in the order of dispatch, so each wait counts under its name
            with self.watch("gradient"):
                jax.block_until_ready(outputs)
            with self.watch("optimiser"):
                jax.block_until_ready(applied)
        results = self._on_host(results)
        if self._data_mesh is None:
            return results
        summed = lambda loss: jax.tree.map(lambda x: x.sum(0), loss)
        return [([(summed(loss), *rest) for loss, *rest in outputs], applied) for outputs, applied in results]

    def _reference(self, policy: str, references: Mapping[str, Tree]) -> Tree | None:
        coefficients = self.config.interventions.kl_coef
        roles_with_kl = [role for role in roles_of(self.roles, policy) if role in coefficients]
        by_objective = self._objective in objectives.NEED_REFERENCE
        if not roles_with_kl and not by_objective:
            return None
        if policy not in references:
            what = f"loss.kind {self._objective!r}" if by_objective else f"kl_coef of {roles_with_kl}"
            raise ValueError(f"{what} needs references[{policy!r}], the weights to compare with")
        return references[policy]


def _with_replicated_scalars(tree: Tree, state: Any) -> Any:
    """The state with its scalars replicated over the mesh of the tree, as in a restored checkpoint."""
    sharding = getattr(jax.tree.leaves(tree)[0], "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return state
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, everywhere), state)
