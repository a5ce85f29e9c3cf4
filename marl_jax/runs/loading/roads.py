"""Which road a run takes: the hosted one, the compiled one, or the faster of both, timed on the first step.

The choice, and the shapes of the hosted road's engines, are settled at the first start and kept in `config.json`.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from marl_jax import hosts
from marl_jax.compiled import NoArrayForm
from marl_jax.config.run_config import RunConfig
from marl_jax.planning.memory import Shapes
from marl_jax.planning.plan import PlanError
from marl_jax.rollouts.serving import Service
from marl_jax.run_folder.folder import read, settle
from marl_jax.runs.hosted import Hosted
from marl_jax.runs.in_arrays import Compiled
from marl_jax.runs.loading.parts import Parts
from marl_jax.runs.loading.play import make_service, planned_engine, player_of, settled_form, settled_shapes
from marl_jax.runs.run import Road, Run
from marl_jax.runs.state import State
from marl_jax.runs.step_metrics import Clock
from marl_jax.tasks import Task


def compiled_road(
    config: RunConfig, parts: Parts, train: Sequence[Task], settled: Mapping[str, Any]
) -> tuple[Compiled | None, str]:
    """The compiled road, unless the run or its cell needs the hosted one; and the first page's text about the road."""
    if hosts.count() > 1:
        return None, f"hosted, shared by {hosts.count()} processes"
    if config.road == "hosted":
        return None, "hosted"
    try:
        road = Compiled(config, parts, train, settled.get("devices"))
    except NoArrayForm as error:
        if config.road == "compiled":
            raise
        return None, f"hosted, as {error.reason}"
    if config.road == "auto" and "road" not in settled:
        return road, "the faster one of hosted and compiled: both are timed now"
    name = settled["road"] if config.road == "auto" else config.road
    return road, f"{name}, {road.layout}" if name == "compiled" else name


def chosen_road(
    compiled: Compiled | None,
    settled: Mapping[str, Any],
    runs: Sequence[Run],
    states: list[State],
    stack: contextlib.ExitStack,
) -> Road:
    """The road of the run. If the faster one is to be chosen, both are timed once, on their first step."""
    hosted = functools.partial(_hosted, runs, stack)
    if compiled is None:
        return hosted(states[0])
    compiled.make_engines = hosted
    choice: str = runs[0].config.road
    if choice == "auto" and "road" in settled:
        choice = settled["road"]
    elif choice == "auto":
        compiled.engines = hosted(states[0])
        try:
            seconds = {"compiled": seconds_of_step(compiled, runs, states)}
        except PlanError as error:
            choice, why = "hosted", str(error)
        else:
            seconds["hosted"] = seconds_of_step(compiled.engines, runs, states)
            choice = min(seconds, key=lambda name: seconds[name])
            why = "a step took " + ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
        runs[0].live.note(f"road {choice}: {why}")
    _settle(runs, road=choice, **({"devices": len(compiled.devices)} if choice == "compiled" else {}))
    return compiled if choice == "compiled" else compiled.engines or hosted(states[0])


def seconds_of_step(road: Road, runs: Sequence[Run], states: Sequence[State]) -> float:
    """Seconds of the first step, made twice as the first time compiles; its results are dropped."""
    at, seconds = runs[0].phases.at(states[0].step), 0.0
    copied = lambda leaf: jnp.array(leaf, copy=True) if isinstance(leaf, jax.Array) else leaf
    for _ in range(2):
        copies = [
            dataclasses.replace(
                state, trees=jax.tree.map(copied, state.trees), learner=jax.tree.map(copied, state.learner)
            )
            for state in states
        ]
        began = time.perf_counter()
        road.step(runs, copies, at, Clock())
        seconds = time.perf_counter() - began
        for run, state in zip(runs, states):
            run.problems.position = state.position
    return seconds


def _hosted(runs: Sequence[Run], stack: contextlib.ExitStack, state: State) -> Hosted:
    """The engines, with the policies of this state; their shapes are the same at all starts of the run."""
    run = runs[0]
    policies, services = run.parts.frozen_trees() | state.trees, list[Service]()
    make = functools.partial(make_service, run.config, run.parts, policies, log=run.folder / "vllm.log")

    def make_first() -> Shapes:
        settled = read(run.folder)["settled"]
        shapes = settled_shapes(settled, run.config) or planned_engine(run.config, run.parts)
        measured = settled.get("measured", False)
        services.append(make(shapes, state.updates, measured=measured))
        if not measured:  # for later starts
            _settle(runs, **settled_form(services[0].settings), measured=True)
        return services[0].settings

    shapes = hosts.from_first(make_first)
    if not services:
        services.append(make(shapes, state.updates, measured=True))
    service = services[0]
    stack.callback(service.close)
    run.stop.check_together()
    return Hosted(service, player_of(run.config, run.parts, service), run.parts.frozen_trees(), state.trees)


def _settle(runs: Sequence[Run], **measured: Any) -> None:
    for run in runs:
        settled = read(run.folder)["settled"]
        if settled | measured != settled:
            settle(run.folder, settled | measured)
