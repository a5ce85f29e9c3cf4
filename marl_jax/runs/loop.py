"""The training run: one line from tasks to new policies, in a folder that can be killed at any moment.

    tasks -> table of calls -> rewards -> advantages -> update -> engines -> metrics    when due: evaluation, checkpoint

All randomness follows from the seed and the step, and everything else that a step depends on is in the checkpoint,
so the same command goes on where it was and ends with the same numbers.
"""

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from marl_jax.config.run_config import RunConfig
from marl_jax.learning import with_advantages
from marl_jax.policies import is_frozen
from marl_jax.rewards.crediting import Crediting
from marl_jax.rewards.grading import Grader, grade
from marl_jax.rollouts import ToolLog, write_episodes
from marl_jax.run_folder.checkpoints import steps as saved_steps
from marl_jax.run_folder.files import disk_errors
from marl_jax.run_folder.metrics import read_lines
from marl_jax.runs import measures
from marl_jax.runs.evaluation import summary
from marl_jax.runs.live import Live
from marl_jax.runs.opening import Run, State, open_run
from marl_jax.runs.play import EVALUATION_NOISE, play
from marl_jax.runs.resampling import resample
from marl_jax.runs.stopping import Stop, Stopped
from marl_jax.table import Table
from marl_jax.tasks import Task


def train(
    config: RunConfig,
    workdir: str | os.PathLike[str],
    *,
    accept_changes: bool = False,
    live: Live | None = None,
    patience: float | None = None,
) -> int:
    """Train until `config.steps`, or until asked to stop (SIGTERM, Ctrl-C); the step that was reached.

    It begins where the folder's newest checkpoint is. With `accept_changes`, a changed configuration, data set or code
    is accepted. With `patience`, a process that is asked to stop while XLA compiles saves the last state and exits so
    many seconds later, instead of returning.
    """
    if not isinstance(config, RunConfig):
        raise TypeError(f"config is {config!r:.80}; give a RunConfig, such as load_config makes of FILE:CELL")
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(Stop(patience))
        live = live or stack.enter_context(Live(config.steps, config.roles))
        stop.farewell = functools.partial(
            live.note, "stopped before a step was begun; the same command begins with it"
        )
        try:
            run, state = open_run(config, workdir, accept_changes, live, stop, stack)
        except Stopped:
            stop.farewell()
            return max(saved_steps(Path(workdir).expanduser() / "checkpoints"), default=0)
        if state.step:
            *_, last = {}, *read_lines(run.metrics.path)
            live.resumed(state.step, last, _evaluated(run).values())
        if state.step > config.steps:
            live.note(f"the run is already past its last step, {config.steps}: it ends as it is")
        kept, saving = (state.step, state.accuracy), threading.Lock()

        def keep(whole: bool = False) -> None:
            """Begin to save the state, if that has not been; `whole`: until it is saved."""
            nonlocal kept
            with saving:
                if state.step and kept != (state.step, state.accuracy):
                    save(run, state)
                    kept = state.step, state.accuracy
                if whole:
                    run.checkpoints.wait()

        def farewell() -> None:
            keep(whole=True)
            live.note(f"stopped after step {state.step}; the same command goes on from there")

        stop.farewell = farewell
        try:
            while True:
                if _evaluation_due(run, state):
                    state = evaluate(run, state)
                if _save_due(config, state):
                    keep()
                if state.step >= config.steps or stop.heed():
                    break
                state = step(run, state)
        except Stopped:
            pass  # the step under way is abandoned; it will be made again
        if stop.heed():
            farewell()
        run.checkpoints.wait()
        return state.step


def step(run: Run, state: State) -> State:
    """One step: the whole road, from problems to policies that have learned from them."""
    config, parts, number = run.config, run.parts, state.step + 1
    clock, samples = measures.Clock(), config.rollout.samples

    # problems -> episodes -> rewards (again and again for problems that teach nothing, if asked to)
    tasks = next(run.problems)
    play_step = functools.partial(
        play,
        config,
        parts,
        run.service,
        samples=samples,
        step=number,
        tool_log=ToolLog(run.folder / "tools" / f"step-{number}.jsonl"),
        progress=run.stop.watch(run.live.rollout),
    )
    draws, presets = config.rollout.draws, parts.workflow.groups
    with Crediting(parts.credit, config.rewards, samples, run.stop.check) as crediting:

        def sample(some: Sequence[Task], first: int) -> Table:
            run.live.phase("sampling")
            with clock("rollout"), disk_errors(run.folder):
                return play_step(some, first_sample=first, finished=crediting.finished)

        def reward(table: Table) -> Table:
            run.live.phase("grading")
            with clock("grade"):
                return crediting(table)

        table, counts = resample(sample, reward, tasks, config.advantages, draws=draws, presets=presets)

    # rewards -> advantages -> update -> engines
    run.live.phase("learning")
    with clock("learn"):
        table, groups = with_advantages(table, config.advantages, presets)
        table = table.replace(trains=_trains(table, config))
        trees, states, report = run.learner.step(
            state.trees,
            state.learner,
            table.take(table.trains),
            step=state.step,
            bases=parts.learned_bases(),
            references=run.references,
            check=run.stop.check,
        )
        after = dataclasses.replace(
            state,
            step=number,
            trees=trees,
            learner=states,
            position=run.problems.position,
            accuracy=None,
            form=measures.form(table) | (state.form or {}),
        )
        run.service.update(parts.frozen_trees() | trees, after.updates)

    # what happened
    values = measures.of_step(table, groups, counts if draws > 1 else None, report, after.form, clock)
    run.metrics.write(number, values)
    for board in run.boards:
        board.write(number, values)
    every = config.logging.episodes_every
    if every and (number % every == 0 or number in (1, config.steps)):
        some = table.of_episodes(range(min(config.logging.episodes_problems * samples, len(table.heads))))
        with disk_errors(run.folder / "episodes"):
            write_episodes(run.folder / "episodes" / f"step-{number:06d}.parquet", some)
    run.live.step(number, values)
    run.live.failing(number, [head.error for head in table.heads])
    for warning in report.warnings:
        run.live.note(f"step {number}: {warning}")
    return after


def _trains(table: Table, config: RunConfig) -> np.ndarray:
    """Bool[N]: calls that sampled something, of roles that are not frozen."""
    slots = zip(table.role.tolist(), table.slot.tolist())
    frozen = [is_frozen(table.roles[role], slot, config.policies.frozen_roles) for role, slot in slots]
    return (table.length > 0) & ~np.array(frozen, bool)


def evaluate(run: Run, state: State) -> State:
    """The accuracy of the policies as they are on the val split, into `eval.jsonl`."""
    run.live.phase("evaluating")
    before = _evaluated(run)
    # Killed between the line and the checkpoint that knows of it, a run finds its line and goes on from there.
    record = before.get(state.step) or _played(run, state, before.get(0))
    run.live.evaluation(record)
    best = state.best
    if best is None or record["accuracy"] > best["accuracy"]:
        best = {"step": state.step, "accuracy": record["accuracy"]}
    return dataclasses.replace(state, accuracy=record["accuracy"], best=best)


def _evaluated(run: Run) -> dict[int, dict[str, Any]]:
    """Its own evaluations so far, by step; those with a checkpoint are of `experiments.evaluate`."""
    own = [line for line in read_lines(run.evaluations.path) if run.about.items() <= line.items()]
    return {line["step"]: line for line in own if "checkpoint" not in line}


def _played(run: Run, state: State, base: Mapping[str, Any] | None) -> dict[str, Any]:
    """The line of an evaluation, which is played, paired with the line of the base, and written."""
    samples, grader = run.config.evaluation.samples, Grader(run.stop.check)
    with disk_errors(run.folder):
        table = play(
            run.config,
            run.parts,
            run.service,
            run.watched,
            samples=samples,
            step=EVALUATION_NOISE,
            tool_log=ToolLog(run.folder / "tools" / f"eval-{state.step}.jsonl"),
            progress=run.stop.watch(run.live.rollout),
            finished=grader.start,
        )
    found = summary(grade(table, grader), samples, base["per_problem"] if base else None)
    run.evaluations.write(state.step, run.about | found)
    for board in run.boards:
        board.write(state.step, {"eval": found})
    return {"step": state.step, **run.about, **found}


def save(run: Run, state: State) -> None:
    """Begin to save; results of tools that no checkpoint can come back to are forgotten."""
    complete = saved_steps(run.checkpoints.directory)
    run.checkpoints.save(state.step, state.arrays, state.numbers, state.accuracy)
    for path in (run.folder / "tools").glob("*-*.jsonl"):
        if complete and int(path.stem.rpartition("-")[2]) < complete[0]:
            path.unlink(missing_ok=True)


def _evaluation_due(run: Run, state: State) -> bool:
    """At every so many steps, before the first and after the last; not again for a state that has been."""
    every = run.config.evaluation.every
    due = every and (state.step % every == 0 or state.step >= run.config.steps)
    return bool(due and run.watched and state.accuracy is None)


def _save_due(config: RunConfig, state: State) -> bool:
    best = config.checkpoints.best and state.best is not None and state.best["step"] == state.step
    return state.step > 0 and (
        state.step % config.checkpoints.every == 0 or state.step >= config.steps or best
    )
