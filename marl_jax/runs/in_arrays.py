"""The compiled road: a step is a few programs of `marl_jax.compiled`.

    State ──compiled.state_of──► programs ──► columns of the played calls ──to_host──► Table ──┬──► Result
                                     └─────► trees, metrics of policies that learn meanwhile ──┘

One seed's problems are split over its devices (`_devices`). Several seeds are distributed over the devices.
On accelerators, the seeds of a device are one program (`vmap`); on a CPU they take their steps in turn, which gives
each the bits of a run alone on one device.
"""

import contextlib
import dataclasses
import functools
import gc
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from marl_jax import compiled, user_cache
from marl_jax.compiled import Columns, NoArrayForm, kept
from marl_jax.compiled.cast import Cast
from marl_jax.compiled.learn import learner_columns, units_of
from marl_jax.compiled.rehearsal import count_calls
from marl_jax.config.phase_fields import PhasePosition
from marl_jax.config.run_config import RunConfig
from marl_jax.learning import LearnerState, NonFiniteGradients
from marl_jax.learning.by_role.role_statistics import Evidence
from marl_jax.learning.by_role.step_report import gradient_report, policy_report
from marl_jax.learning.estimators.groups import count_groups
from marl_jax.planning.plan import PlanError, show
from marl_jax.planning.step_memory import StepMemory, of_step
from marl_jax.policies import roles_of
from marl_jax.rollouts import Player
from marl_jax.run_folder.folder import FolderError
from marl_jax.runs.divergence import finite
from marl_jax.runs.hosted import Hosted, tasks_of_step
from marl_jax.runs.loading.parts import Parts
from marl_jax.runs.run import Result, Run
from marl_jax.runs.state import State
from marl_jax.runs.step_metrics import Clock
from marl_jax.runs.step_programs import WHOLE, Layout, take_step, trace
from marl_jax.sampling.engine import NotFinite
from marl_jax.sampling.shapes import free_bytes
from marl_jax.table import Table
from marl_jax.task import Task
from marl_jax.threads import Workers, run_parallel

FORCED = "xla_force_host_platform_device_count"
PATIENCE = "xla_cpu_collective_call_terminate_timeout_seconds"


def cpu_devices() -> None:
    """Let JAX see each core as a device, unless JAX has started or the user has set the number of devices.

    XLA ends a process whose cores wait for each other for 40 s, as on a machine that is busy or sleeps: here they may
    wait for a day.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if PATIENCE not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{PATIENCE}=86400".strip()
    if FORCED not in flags and getattr(jax.config, "jax_num_cpu_devices", -1) < 0:
        with contextlib.suppress(RuntimeError):  # JAX has started
            jax.config.update("jax_num_cpu_devices", user_cache.cores())


class Compiled:
    """The compiled road. Evaluations are played by engines, which are made for the first evaluation."""

    def __init__(self, config: RunConfig, parts: Parts, train: Sequence[Task], settled: int | None):
        """`settled` is the number of devices that the run was begun on. Cells without a form in arrays are refused."""
        self._config, self._parts, self._cast = config, parts, compiled.cast_of(config, parts)
        train = list(train)  # reads each task from the disk
        # The tasks of one step, to trace it with.
        self._examples = list(itertools.islice(itertools.cycle(train), config.data.problems))
        self._width = max(len(task.question) for task in train)
        compiled.tasks_of(self._cast, train, self._width)
        count_calls(self._cast, self._width)  # refuses prompts that may not fit
        self.devices = _devices(config, settled)
        make = functools.partial(compiled.make_halves, config, parts=parts)
        self._side_by_side = _in_one_program(config.seeds, self.devices[0])
        self._layouts = [Layout.on(device, self._side_by_side) for device in self.devices]
        if config.seeds == 1 and len(self.devices) > 1:
            mesh = self._mesh()
            shared = "data" if mesh.shape["data"] > 1 else None
            # Inside of loops XLA exchanges pieces of sharded weights, and waits for all devices: unless all devices
            # take the same number of turns, a run hangs.
            loop_axis = shared if config.mesh.model > 1 else None
            self._halves, self._layouts = make(data_axis=shared, seeds_axis=loop_axis), [Layout.over(mesh)]
        else:
            self._halves = make(seeds_axis="seeds" if self._side_by_side else None)
        self._programs: dict[int, list[Any]] = {}  # by index of the layout
        self._fixed: dict[int, Any] = {}  # by index of the layout: placed weights that no step changes
        self._workers = Workers("compiled", len(self._layouts), finish=True)
        self.make_engines: Callable[[State], Hosted] | None = None
        self.engines: Hosted | None = None

    @property
    def layout(self) -> str:
        """The devices and what is split over them, in words."""
        count, seeds = len(self.devices), self._config.seeds
        where = f"{count} {self.devices[0].platform} device{'s' * (count > 1)}"
        data, model = self._config.mesh.data, self._config.mesh.model
        if model > 1:
            problems = f"problems split over {data} x " * (data > 1)
            return f"{problems}weights split over {model} {where.partition(' ')[2]}"
        if seeds == 1:
            return f"problems split over {where}" if count > 1 else f"on {where}"
        return f"{seeds} seeds {'in one program' if self._side_by_side else 'in turn'} on {where}"

    def serve(self, state: State) -> Player:
        """The player of evaluations, with the policies of this state in its engines, on their own device."""
        if self._parts.mesh is None:
            state = dataclasses.replace(state, trees=jax.device_put(state.trees, jax.local_devices()[0]))
        if self.engines is None:
            assert self.make_engines is not None
            self.engines = self.make_engines(state)
        return self.engines.serve(state)

    def step(
        self, runs: Sequence[Run], states: Sequence[State], at: PhasePosition, clock: Clock
    ) -> list[Result]:
        """The results of the next step of each run. The states are unchanged."""
        runs[0].live.phase("sampling and learning")
        with clock("prepare"):
            tasks = [tasks_of_step(run, state) for run, state in zip(runs, states)]
            inputs = [self._inputs(run, state, drawn, at) for run, state, drawn in zip(runs, states, tasks)]
        jobs, played = self._begin(inputs)
        tables = list[Table]()
        for number, (run, state, drawn, future) in enumerate(zip(runs, states, tasks, played)):
            job = jobs[number % len(jobs)]
            with clock("program"):
                self._workers.wait([future, job], runs[0].stop.check)
                if job.done():
                    job.result()  # raises the error of the job
            with clock("table"):
                tables.append(self._table(run, state, drawn, future.result()))
        with clock("program"):
            for job in jobs:
                self._workers.wait([job], runs[0].stop.check)
            outputs = [jobs[n % len(jobs)].result()[n // len(jobs)] for n in range(len(inputs))]
        with clock("table"):
            return [self._result(*of_seed, at) for of_seed in zip(runs, states, tables, outputs)]

    def _mesh(self) -> Mesh:
        """The devices along "data"; along "model", too, if weights are sharded."""
        if self._config.mesh.model > 1:
            assert self._parts.mesh is not None
            return self._parts.mesh
        return jax.make_mesh((len(self.devices),), ("data",), (AxisType.Auto,), devices=self.devices)

    # ---------------------------------------------------------------- to the devices and back

    def _inputs(self, run: Run, state: State, tasks: Sequence[Task], at: PhasePosition) -> tuple[Any, ...]:
        words = compiled.noise_words(self._cast, tasks, seed=run.config.seed, step=state.step + 1)
        references = run.phases.references(at.phase, state)
        before = compiled.state_of(
            self._parts, state.trees, state.learner, step=state.step, references=references
        )
        return before, words, compiled.tasks_of(self._cast, tasks, self._width)

    def _begin(self, inputs: Sequence[Any]) -> tuple[list[Future[list[Any]]], list[Future[Columns]]]:
        """Futures: by layout, the outputs of its seeds; by seed, the played columns, set before policies learn."""
        count, played = len(self._layouts), [Future[Columns]() for _ in inputs]

        def work(index: int) -> list[Any]:
            numbers = range(index, len(inputs), count)
            if not self._side_by_side:
                return [self._step_of(index, inputs[n], played[n].set_result) for n in numbers]

            def publish(columns: Columns) -> None:
                for number, seed_columns in zip(numbers, _unstack(columns, len(numbers))):
                    played[number].set_result(seed_columns)

            group = [inputs[number] for number in numbers]
            return _unstack(self._step_of(index, _stack(group), publish), len(numbers)) if numbers else []

        return [self._workers.submit(work, index) for index in range(count)], played

    def _step_of(self, index: int, inputs: Any, publish: Callable[[Columns], None]) -> Any:
        """(trees and learner, columns, metrics) of a seed, or of the stacked seeds of one program.

        `publish` is called with the columns as soon as they exist, while the policies still learn.
        """
        (state, *rest), layout = inputs, self._layouts[index]
        if index not in self._fixed:
            fixed = {name: getattr(state, name) for name in ("bases", "references")}
            self._fixed[index] = layout.place(fixed)
        placed = (layout.place(state.replace(**self._fixed[index])), *rest)
        if index not in self._programs:
            with _no_collection():
                self._programs[index] = self._loaded_or_compiled(layout, placed)
        after, columns, metrics = take_step(self._programs[index], *placed)
        publish(jax.device_get(columns.replace(**dict.fromkeys(learner_columns(columns)))))
        return after, *jax.device_get((columns, metrics))

    def _loaded_or_compiled(self, layout: Layout, placed: Any) -> list[Any]:
        """The programs of a step of these arguments: those that an earlier start kept, or compiled and kept now."""
        about = {"arguments": kept.describe(placed), "options": self._compiler_options()}
        file = kept.file_of(self._config, self._parts, layout.devices, **about)
        if loaded := kept.load(file, layout.devices, self._check_memory):
            return loaded
        needs = list[StepMemory]()

        def checked(traced: jax.stages.Traced) -> jax.stages.Traced:
            needs.append(self._count(traced))
            self._check_memory(needs[-1])
            return traced

        halves: Iterator[jax.stages.Traced] = trace(self._halves, layout, placed)
        if self._config.seeds > 1:  # the number of seeds that fit is counted from the complete step
            checked(jax.jit(layout.step(self._halves)).trace(*placed))
        else:
            halves = map(checked, halves)
        with kept.jax_cache_hits(file) as hits:
            programs = run_parallel("compile", self.compiled, halves)
        kept.keep(file, programs, max(needs, key=self._needed), hits)
        return programs

    def _compiler_options(self) -> dict[str, Any] | None:
        """On a CPU less optimisation of each kernel: parts of a step compile 12 to 23% sooner, and run as fast."""
        full = self.devices[0].platform != "cpu" or jax.config.values["jax_disable_most_optimizations"]
        return None if full else {"xla_backend_optimization_level": 1}

    def _count(self, traced: jax.stages.Traced) -> StepMemory:
        return of_step(traced.jaxpr, len(self.devices) // self._config.mesh.model)

    def _needed(self, step: StepMemory) -> int:
        """Bytes that a step still needs; the state of a single seed is in memory when its step is traced."""
        present = step.given if self._config.seeds == 1 else 0
        # Each accelerator has a memory of its own, with its pieces of weights.
        separate = self.devices[0].platform != "cpu"
        needed = step.needed(self._config.seeds, together=separate) - present
        return needed // self._config.mesh.model if separate else needed

    def _check_memory(self, step: StepMemory) -> None:
        """Refuse programs that do not fit in memory; the message names the number of seeds that would fit."""
        seeds, free, total = self._config.seeds, free_bytes(), self._needed(step)
        if total <= free:
            return
        if seeds == 1:
            raise PlanError(
                f"a step as one program needs {show(total)} and {show(free)} are free: lower --config.data.problems or "
                "--config.rollout.samples, or take --config.road=hosted"
            )
        fit = step.fitting(seeds, free, together=self._side_by_side)
        raise PlanError(
            f"{seeds} seeds side by side need {show(total)} and {show(free)} are free: {fit} fit; lower "
            "--config.seeds"
        )

    def planned(self) -> tuple[StepMemory, Any]:
        """The memory of one seed's step on each device, counted from its trace; and the trace."""
        state = jax.eval_shape(functools.partial(compiled.start, self._config, parts=self._parts))
        words = compiled.noise_words(self._cast, self._examples, seed=self._config.seed, step=1)
        tasks = compiled.tasks_of(self._cast, self._examples, self._width)
        layout, halves = self._layouts[0], self._halves
        if self._side_by_side:
            layout, halves = Layout.on(self.devices[0]), compiled.make_halves(self._config, parts=self._parts)
        traced = jax.jit(layout.step(halves)).trace(state, words, tasks)
        return self._count(traced), traced

    def compiled(self, traced: Any) -> jax.stages.Compiled:
        """The program of a traced step, as runs compile it."""
        return traced.lower().compile(compiler_options=self._compiler_options())

    def _home(self, leaf: Any) -> Any:
        """The leaf, placed as checkpoints have it: on the configuration's mesh, or on one device."""
        if not isinstance(leaf, jax.Array) or self._config.mesh.model > 1:
            return leaf
        mesh = self._parts.mesh
        return leaf.addressable_data(0) if mesh is None else jax.device_put(leaf, NamedSharding(mesh, WHOLE))

    # ---------------------------------------------------------------- results of a step

    def _table(self, run: Run, state: State, tasks: Sequence[Task], columns: Columns) -> Table:
        table = compiled.to_host(self._cast, columns, tasks, seed=run.config.seed, step=state.step + 1)
        with finite(run, state):
            if not np.isfinite(table.logprobs.values).all():
                raise NotFinite("the model gives no finite log-probability: are its weights finite?")
        return table

    def _result(self, run: Run, state: State, table: Table, outputs: Any, at: PhasePosition) -> Result:
        (trees, learner_states), columns, metrics = outputs
        rewards = table.reward if table.penalty is None else table.reward + table.penalty
        groups = count_groups(rewards, table.group, [table.roles[code] for code in table.role])
        learner, reported = run.phases.learner(at.phase), run.phases.reported(table)
        rows, states = table.take(reported), {}
        for name, learner_state in learner_states.items():
            numbers = {count: int(value) for count, value in jax.device_get(learner_state.counts).items()}
            states[name] = jax.tree.map(self._home, learner_state).replace(**numbers)
        trees = jax.tree.map(self._home, trees)
        learned = learner.learns(rows, state.step)
        computed = _evidence(self._config, columns, np.flatnonzero(reported), learned)
        failure = ""
        try:
            outcome = learner.conclude(
                trees,
                states,
                rows,
                computed,
                {name: learner_state.skipped for name, learner_state in state.learner.items()},
                *_reports_of(self._cast, columns, states, metrics["policy"], rows.take(learned)),
            )
        except NonFiniteGradients as error:
            outcome, failure = error.outcome, str(error)
        trees, states, report = outcome
        counts = {"beyond": int(metrics["beyond"])}
        return Result(table, groups, counts, report, trees, states, failure)


def _in_one_program(seeds: int, device: jax.Device) -> bool:
    """Whether the seeds of a device are one program; on a CPU they take their steps in turn."""
    return seeds > 1 and device.platform != "cpu"


def _devices(config: RunConfig, settled: int | None) -> list[jax.Device]:
    """As many devices as the run began on; at first the mesh's, else one, or all of a CPU that can share the work."""
    available, model = jax.local_devices(), config.mesh.model
    count = settled or (config.mesh.devices if config.mesh.devices > 1 else None)
    if count is None:
        shared = config.seeds if config.seeds > 1 else config.data.problems
        count = 1 if available[0].platform != "cpu" else min(len(available), shared)
        while config.seeds == 1 and config.data.problems % count:
            count -= 1
    if count > len(available):
        began = "this run was begun on" if settled else "mesh asks for"
        raise FolderError(
            f"{began} {count} devices and there are {len(available)}: start it where there are {count} (on a CPU: "
            f"XLA_FLAGS=--{FORCED}={count}), or choose another --workdir"
        )
    of_mesh = " (mesh.data)" * (config.mesh.devices > 1)
    if config.seeds == 1 and config.data.problems % (count // model):
        raise NoArrayForm(
            f"{config.data.problems} problems that {count // model} devices{of_mesh} do not divide"
        )
    return available[:count]


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's garbage collection, which would scan all objects of a trace again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _stack(inputs: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The inputs of several seeds, stacked."""
    stack = lambda *leaves: (np if isinstance(leaves[0], np.ndarray) else jnp).stack(leaves)
    states, *rest = zip(*inputs)
    changing = {
        name: jax.tree.map(stack, *(getattr(state, name) for state in states))
        for name in ("trees", "learner", "step")
    }
    return states[0].replace(**changing), *(jax.tree.map(stack, *values) for values in rest)


def _unstack(tree: Any, count: int) -> list[Any]:
    """The seeds of a leading axis, one by one."""
    return [jax.tree.map(lambda leaf, n=n: leaf[n], tree) for n in range(count)]


def _evidence(config: RunConfig, columns: Columns, rows: np.ndarray, trained: np.ndarray) -> Evidence:
    """The computed log-probs of `rows`, for those that were trained."""
    positions = np.flatnonzero(columns.table.length)[rows]
    evidence, learned = Evidence.empty(len(rows)), np.flatnonzero(trained)
    values = {"logp": columns.logp, "entropy": columns.entropy, "trainer_logp": columns.logp}
    sampled = config.learner.old_logprobs == "sampler"
    values["old_logp"] = columns.table.logprobs if sampled else columns.logp
    table, length = columns.table, columns.table.length
    for name, column in values.items():
        evidence.write(name, learned, [column[row, : length[row]] for row in positions[learned]])
    if (ref_logp := columns.ref_logp) is not None:  # no entry for a policy without an anchored role
        anchors, owners = config.learner.interventions.kl_coef, config.policies.map
        anchored = np.array([not anchors.keys().isdisjoint(roles_of(owners, p)) for p in table.policies])
        learned = learned[anchored[table.policy[positions[learned]]]]
        evidence.write("ref_logp", learned, [ref_logp[row, : length[row]] for row in positions[learned]])
    return evidence


def _reports_of(
    cast: Cast,
    columns: Columns,
    states: Mapping[str, LearnerState],
    metrics: Mapping[str, Any],
    learned: Table,  # the rows of the step that trained
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(reports, gradients) by policy."""
    reports, gradients = {}, {}
    slots = {caller[:2] for caller in learned.callers}
    for policy, numbers in metrics.items():
        reports[policy] = dict(states[policy].counts)
        if not numbers["rows"]:
            continue
        reports[policy] |= policy_report([([numbers["loss"]], numbers["applied"])], float(numbers["rate"]))
        reports[policy]["padding_share"] = float(numbers["padding_share"])
        if cast.config.learner.gradients != "off":
            units, roles = units_of(cast, policy, columns.cues)
            present = [k for k, unit in enumerate(units) if unit in slots or not isinstance(unit, tuple)]
            applied = dict(numbers["applied"])
            parts = {name: applied[name] for name in ("gram", "weight", "layers") if name in applied}
            applied |= jax.tree.map(lambda x, k=present: x[k], parts)
            applied["gram"] = applied["gram"][:, present]
            gradients[policy] = gradient_report(
                [applied], [units[k] for k in present], [roles[k] for k in present]
            )
    return reports, gradients
