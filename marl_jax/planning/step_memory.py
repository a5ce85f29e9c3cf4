"""Memory of the compiled road, counted from its own step as JAX traces it; nothing is compiled.

    trace ──liveness──► given (state, problems) | results (new state, table) | scratch, on each device
    seeds in turn:      seeds x (given + results) + devices x scratch
    one program (vmap): given + results + scratch of all seeds of a device

XLA's own counts differ, see docs/compiled.md: XLA keeps copies that are counted once here, and never writes some other
arrays.
"""

import bisect
import dataclasses
from typing import Any

from jax.extend import core

from marl_jax.config.run_config import RunConfig
from marl_jax.planning import memory
from marl_jax.planning.liveness import arrays_bytes, count_equations, made_bytes
from marl_jax.planning.memory import Part
from marl_jax.planning.plan import Plan

HOSTED_PHASES = ("gradient", "optimiser")  # the compiled road does not have them
# Measured (tests/planning/test_peak.py): memory of a host that a first start takes to compile a step, and that programs
# and libraries keep: a constant, and bytes for each equation of the trace. Reading kept programs takes less.
COMPILER_BYTES, EQUATION_BYTES = 900 << 20, 82 << 10
ENGINES = (memory.LANES, memory.PROMPTS, memory.SAMPLING, memory.SERVED)


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes of a step on each device."""

    given: int  # the state and the problems
    results: int  # the new state and the table
    scratch: int
    devices: int = 1
    equations: int = 0  # of the traced step

    def needed(self, seeds: int, *, together: bool) -> int:
        """Bytes of seeds in turn on all devices, which share a memory; `together`: of one device with its share."""
        if together:  # the trace has the seeds of the share
            return self.given + self.results + self.scratch
        return seeds * (self.given + self.results) + self.devices * self.scratch

    def fitting(self, seeds: int, free: int, *, together: bool) -> int:
        """How many seeds fit into `free` bytes, if `seeds` need what `needed` returns."""
        if together:
            share = -(-seeds // self.devices)
            return free * share // max(self.needed(seeds, together=True), 1) * self.devices
        return max(0, (free - self.devices * self.scratch) // max(self.given + self.results, 1))


def of_step(traced: core.ClosedJaxpr, devices: int) -> StepMemory:
    """The memory of a traced step, its weights counted unsharded. If devices share its problems, one is counted."""
    program: Any = traced.jaxpr
    inner = [eqn.params["jaxpr"] for eqn in program.eqns if eqn.primitive.name == "shard_map"]
    program = inner[0] if inner else program
    results = arrays_bytes(program.outvars)
    scratch = made_bytes(program) - results
    given = arrays_bytes(program.invars)
    return StepMemory(given, results, max(0, scratch), devices, count_equations(program))


def compiled_plan(plan: Plan, config: RunConfig, step: StepMemory) -> Plan:
    """The plan of the hosted road with the arrays of the step in place of the learner's; engines play evaluations.

    `step` is of one seed, traced for the devices here. Several CPU devices keep copies of the state next to the run's,
    and so does the program of several seeds on an accelerator. If accelerators shard weights, all arrays are counted as
    sharded, which is nearly right.
    """
    seeds, at_once, shards = config.seeds, step.devices, 1
    if plan.device.platform == "cpu":
        at_once, result_sets = (min(at_once, seeds), seeds) if seeds > 1 else (at_once, at_once)
        # Sharded weights are on the mesh already.
        copying = at_once if config.mesh.model == 1 else at_once - 1
        copies = step.given * copying if step.devices > 1 else 0
    else:
        at_once = result_sets = -(-(seeds if seeds > 1 else at_once) // config.mesh.data)
        states = sum(part.bytes for part in plan.parts if part.name in memory.OF_SEEDS)
        copies, shards = states * at_once if seeds > 1 else 0, config.mesh.model
    results, scratch = step.results * result_sets // shards, step.scratch * at_once // shards
    new = {memory.COPIES: copies, memory.RESULTS: results, memory.SCRATCH: scratch}

    def bytes_of(part: Part) -> int:
        if part.name == memory.PROGRAMS:
            return COMPILER_BYTES + EQUATION_BYTES * step.equations
        return part.bytes * (seeds if part.name in memory.OF_SEEDS else 1)

    parts = [
        dataclasses.replace(part, bytes=bytes_of(part))
        for part in plan.parts
        if part.phase not in HOSTED_PHASES and (config.evaluation.every or part.name not in ENGINES)
    ]
    return dataclasses.replace(
        plan, parts=(*parts, *(Part(name, size, "step") for name, size in new.items() if size))
    )


def seeds_that_fit(plan: Plan, config: RunConfig, step: StepMemory) -> int:
    """How many of the seeds fit side by side on the device of a hosted plan."""
    too_many = lambda seeds: not compiled_plan(plan, dataclasses.replace(config, seeds=seeds), step).fits
    # From two on, more seeds never need less; a single seed is split over the devices, and may need more than two.
    fit = 1 + bisect.bisect_left(range(2, config.seeds + 1), True, key=too_many)
    return fit if fit > 1 or not too_many(1) else 0
