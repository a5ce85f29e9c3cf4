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

from marl_jax.alarms.watch import Alarm
from marl_jax.compile_cache import keep_programs
from marl_jax.config.phase_fields import Place
from marl_jax.config.run_config import RunConfig
from marl_jax.learning import NonFiniteGradients, Report, with_advantages
from marl_jax.pretraining.pairs import unfamiliar
from marl_jax.rewards.background_credit import BackgroundCredit
from marl_jax.rewards.grading import Grader, grade
from marl_jax.rollouts import Chat, ToolLog
from marl_jax.run_folder.checkpoints import steps as saved_steps
from marl_jax.run_folder.files import disk_errors
from marl_jax.run_folder.folder import read as read_record
from marl_jax.run_folder.metrics import lacking, plain, read_lines
from marl_jax.runs import measures, recording
from marl_jax.runs.divergence import Diverged, broken_update, diverged, ways_out
from marl_jax.runs.evaluation import summary
from marl_jax.runs.live import Live
from marl_jax.runs.opening import Run, open_run
from marl_jax.runs.play import EVALUATION_NOISE
from marl_jax.runs.resampling import ResampleCounts, resample
from marl_jax.runs.state import State
from marl_jax.runs.stopping import Stop, Stopped
from marl_jax.sampling.engine import NotFinite
from marl_jax.table import Table
from marl_jax.tasks import Task
from marl_jax.tasks.buffer import learned, mixed

__all__ = ["evaluate", "save", "step", "train"]


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
    keep_programs()
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
            live.resumed(state.step, last, _evaluated(run).values(), run.watch.holding)
            _tell_lost(run, state)
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
                if config.alarms == "stop" and run.watch.holding:
                    keep(whole=True)
                    live.note(_stopped_by(run.watch.holding, state.step))
                    break
                state = step(run, state)
                if state.failure:
                    keep(whole=True)
                    raise Diverged(
                        f"{state.failure}; step {state.step} is saved without them, and the same command goes on from "
                        f"there: or {ways_out(config)}"
                    )
        except Stopped:
            pass  # the step under way is abandoned; it will be made again
        except NotFinite as error:  # of the policies that answer: those of this state
            if not state.step:
                raise
            run.checkpoints.wait()
            raise diverged(run.folder, config, state.step + 1, str(error), bad=state.step) from error
        if stop.heed():
            farewell()
        run.checkpoints.wait()
        return state.step


def step(run: Run, state: State) -> State:
    """One step: the whole road, from problems to policies that have learned from them."""
    config, parts, number = run.config, run.parts, state.step + 1
    clock, at = measures.Clock(), run.phases.at(state.step)
    state, moved = run.phases.enter(at, state)
    if moved:
        run.service.update(parts.frozen_trees() | state.trees, state.updates)
    given = run.phases.given(at, state.step)
    table, counts = _played_step(run, state, clock) if given is None else (given, None)

    # rewards -> advantages -> update -> engines
    run.live.phase("learning")
    with clock("learn"):
        table, groups = with_advantages(table, config.advantages, parts.workflow.groups)
        table = table.replace(trains=run.phases.trains(at.phase, table))
        described = run.phases.described(table)
        trees, states, report, failure = _learned(run, state, at, table.take(described))
        buffer, about_buffer = learned(state.buffer, table, config.data.buffer, number)
        after = dataclasses.replace(
            state,
            step=number,
            trees=trees,
            learner=states,
            position=run.problems.position,
            buffer=buffer,
            accuracy=None,
            form=measures.form(table) | (state.form or {}),
            failure=failure,
        )
        run.service.update(parts.frozen_trees() | trees, after.updates)
    run.phases.collect(at.phase, number, table)

    # what happened
    values = measures.of_step(table, groups, counts, report, after.form, clock)
    values |= run.phases.about(at) | about_buffer
    if number == 1 and (strange := unfamiliar(table, parts.pairs, parts.tokenizer)):
        values["warnings"] = [*values.get("warnings", ()), *strange]
    if begun := run.watch.row(plain({"step": number, **values})):
        values["alarms"] = [alarm.to_json() for alarm in begun]
    run.metrics.write(number, values)
    run.pace.step(values["time/step"])
    for board in run.boards:
        board.write(number, values)
    trainer: list[Any] = [None] * len(table)
    for row, known in zip(np.flatnonzero(described), report.trainer_logp):
        trainer[row] = known
    recording.record_step(
        run.folder / "episodes", config, number, table, Chat(parts.tokenizer).decode, trainer
    )
    run.live.step(number, values)
    run.live.failing(number, [bare.error for bare in table.bare_episodes])
    for warning in values.get("warnings", ()):
        run.live.note(f"step {number}: {warning}")
    run.live.alarms([alarm for alarm in begun if alarm.step == number], run.watch.holding)
    return after


def _played_step(run: Run, state: State, clock: measures.Clock) -> tuple[Table, ResampleCounts | None]:
    """Problems -> episodes -> rewards, again and again for problems that teach nothing, if asked to."""
    config, parts, samples, number = run.config, run.parts, run.config.rollout.samples, state.step + 1
    tasks = mixed(next(run.problems), state.buffer, config.data.buffer, config.seed, number)
    play = functools.partial(
        run.player.play,
        samples=samples,
        step=number,
        seed=config.seed,
        tool_log=ToolLog(run.folder / "tools" / f"step-{number}.jsonl"),
        progress=run.stop.watch(run.live.rollout),
    )
    draws, presets = config.rollout.draws, parts.workflow.groups
    with BackgroundCredit(parts.credit, config.rewards, samples, run.stop.check) as background:

        def sample(some: Sequence[Task], first: int) -> Table:
            run.live.phase("sampling")
            with clock("rollout"), disk_errors(run.folder):
                return play(some, first_sample=first, finished=background.finished)

        def reward(table: Table) -> Table:
            run.live.phase("grading")
            with clock("grade"):
                return background(table)

        table, counts = resample(sample, reward, tasks, config.advantages, draws=draws, presets=presets)
    return table, counts if draws > 1 else None


def _learned(
    run: Run, state: State, at: Place, rows: Table
) -> tuple[dict[str, Any], dict[str, Any], Report, str]:
    """(policies, states, report) of an update, and why it is the last one; empty where it is not."""
    failure = ""
    try:
        trees, states, report = run.phases.learner(at.phase).step(
            state.trees,
            state.learner,
            rows,
            step=state.step,
            bases=run.parts.learned_bases(),
            references=run.phases.references(at.phase, state),
            check=run.stop.check,
        )
    except NonFiniteGradients as error:  # they were left out: the policies are good, and can be saved
        if error.outcome is None:
            raise
        trees, states, report = error.outcome
        states = {name: one.replace(skipped=0) for name, one in states.items()}  # the next start counts anew
        failure = str(error)
    if what := broken_update(report, state.updates, {name: one.updates for name, one in states.items()}):
        raise diverged(run.folder, run.config, state.step + 1, what)
    return trees, states, report, failure


def evaluate(run: Run, state: State) -> State:
    """The accuracy of the policies as they are on the val split, into `eval.jsonl`."""
    run.live.phase("evaluating")
    before = _evaluated(run)
    # Killed between the line and the checkpoint that knows of it, a run finds its line and goes on from there.
    record = before.get(state.step) or _played(run, state, before.get(0))
    run.live.evaluation(record)
    run.live.alarms(run.watch.evaluation(plain(record)), run.watch.holding)
    best = state.best
    if best is None or record["accuracy"] > best["accuracy"]:
        best = {"step": state.step, "accuracy": record["accuracy"]}
    return dataclasses.replace(state, accuracy=record["accuracy"], best=best)


def _evaluated(run: Run) -> dict[int, dict[str, Any]]:
    """Its own evaluations so far, by step; those with a checkpoint are of `experiments.evaluate`."""
    own = [line for line in read_lines(run.evaluations.path) if run.about.items() <= line.items()]
    return {line["step"]: line for line in own if "checkpoint" not in line}


def _tell_lost(run: Run, state: State) -> None:
    """Say which evaluations of the steps before are not in `eval.jsonl` any more."""
    every = 0 if read_record(run.folder)["changes"] or not run.watched else run.config.evaluation.every
    made = state.step + (state.accuracy is not None)
    if lost := lacking(read_lines(run.evaluations.path), every, made):
        base = ", and without that of step 0 no difference to base is known" if 0 in lost else ""
        run.live.note(
            f"eval.jsonl was damaged: it lacks the evaluation of step {', '.join(map(str, lost))}{base}; restore it, "
            "or go on without"
        )


def _played(run: Run, state: State, base: Mapping[str, Any] | None) -> dict[str, Any]:
    """The line of an evaluation, which is played, paired with the line of the base, and written."""
    samples, grader = run.config.evaluation.samples, Grader(run.stop.check)
    with disk_errors(run.folder):
        table = run.player.play(
            run.watched,
            samples=samples,
            step=EVALUATION_NOISE,
            seed=run.config.seed,
            tool_log=ToolLog(run.folder / "tools" / f"eval-{state.step}.jsonl"),
            progress=run.stop.watch(run.live.rollout),
            finished=grader.start,
        )
    graded, before = grade(table, grader), base["per_problem"] if base else None
    decode = Chat(run.parts.tokenizer).decode
    recording.record_evaluation(run.folder / "episodes", run.config, state.step, graded, decode)
    found = summary(graded, samples, before, run.parts.metric)
    run.evaluations.write(state.step, run.about | found)
    for board in run.boards:
        board.write(state.step, {"eval": found})
    return {"step": state.step, **run.about, **found}


def save(run: Run, state: State) -> None:
    """Begin to save; results of tools that no checkpoint can come back to are forgotten."""
    complete = saved_steps(run.checkpoints.directory)
    run.checkpoints.save(state.step, state.arrays, state.numbers, state.accuracy)
    run.pace.keep()
    for path in (run.folder / "tools").glob("*-*.jsonl"):
        if complete and int(path.stem.rpartition("-")[2]) < complete[0]:
            path.unlink(missing_ok=True)


def _stopped_by(alarms: Sequence[Alarm], step: int) -> str:
    """The line of a run that `config.alarms=stop` ends."""
    names = ", ".join(f"{alarm.title} since step {alarm.step}" for alarm in alarms)
    return (
        f"stopped after step {step} by {'an alarm' if len(alarms) == 1 else 'alarms'}: {names}; everything is saved, "
        "and the same command goes on from there with --config.alarms=tell"
    )


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
