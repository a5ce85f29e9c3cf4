"""The training run: steps of one road or the other, recorded in a folder; it can be killed at any moment.

    state ──road──► table of calls, report, new policies ──► state, metrics      when due: evaluation, checkpoint

The road is hosted (`hosted`) or compiled (`in_arrays`). Seeds that train side by side are separate runs here, which
make each step together.

All randomness follows from the seed and the step. Everything else that a step depends on is in the folder: the
checkpoint, the results of tools, the collected calls. So the same command goes on where the run was, and ends with the
same numbers.
"""

import contextlib
import dataclasses
import functools
import io
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from marl_jax import hosts, threads
from marl_jax.alarms.watch import Alarm
from marl_jax.compile_cache import keep_programs
from marl_jax.config.phase_fields import PhasePosition
from marl_jax.config.run_config import RunConfig
from marl_jax.errors import RunError
from marl_jax.hosts.gathering import gathered
from marl_jax.hosts.layout import fingerprint
from marl_jax.pretraining.pairs import unfamiliar_prompts
from marl_jax.rewards.grading import Grader, grade
from marl_jax.rewards.warn import newly_ungraded
from marl_jax.rollouts.voices import EngineGone
from marl_jax.run_folder.checkpoints import steps as saved_steps
from marl_jax.run_folder.files import disk_errors
from marl_jax.run_folder.folder import EVALUATIONS, METRICS, answers_changed, check_held
from marl_jax.run_folder.folder import read as read_record
from marl_jax.run_folder.json_lines import append_line, missing_evaluations, plain, read_lines
from marl_jax.runs import recording, step_metrics
from marl_jax.runs.divergence import Diverged, broken_update, diverged, finite, ways_out
from marl_jax.runs.evaluation import summary
from marl_jax.runs.in_arrays import cpu_devices
from marl_jax.runs.loading.play import EVALUATION_NOISE
from marl_jax.runs.opening import folders_of, open_runs
from marl_jax.runs.run import Result, Road, Run
from marl_jax.runs.state import State
from marl_jax.runs.stopping import Stop, Stopped
from marl_jax.tasks.buffer import updated
from marl_jax.terminal.live import Live


def train(
    config: RunConfig,
    workdir: str | os.PathLike[str],
    *,
    accept_changes: bool = False,
    live: Live | None = None,
    patience: float | None = None,
) -> int:
    """Train until `config.steps`, or until asked to stop (SIGTERM, Ctrl-C); returns the step that was reached.

    It begins at the folder's newest checkpoint. With `accept_changes`, a changed configuration, data set or code is
    accepted. With `patience`, a process that is asked to stop while XLA compiles saves the last state and exits after
    that many seconds, instead of returning.

    With `mesh.hosts` above 1, each process calls this inside of `hosts.joined`: all take the same steps, and process 0
    writes the folder.
    """
    if not isinstance(config, RunConfig):
        raise TypeError(f"config is {config!r:.80}; give a RunConfig, as load_config('FILE:CELL') returns")
    if config.mesh.hosts != (count := hosts.count()):
        raise hosts.HostsError(
            f"mesh.hosts is {config.mesh.hosts}, and this process is one of {count}: give each process --coordinator "
            "and --process, or call marl_jax.hosts.joined (hosts, and devices=data * model) around train"
        )
    keep_programs()
    if config.road != "hosted":
        cpu_devices()
    with contextlib.ExitStack() as stack:
        # One of several processes cannot save and leave by itself: all stop at the next step or rollout.
        stop = Stop(patience if count == 1 else None)
        stack.push(functools.partial(_leave, stop))
        stack.enter_context(stop)
        hosts.on_stop(stop.request)
        stream = None if hosts.is_first() else io.StringIO()  # another process has the live view
        live = live or stack.enter_context(
            contextlib.closing(Live(config.steps, config.roles, stream, frozen=config.policies.frozen_roles))
        )
        stack.enter_context(hosts.sharing_errors())
        stop.farewell = functools.partial(
            live.note, "stopped before the next step began; the same command starts with it"
        )
        try:
            road, runs, states = open_runs(config, workdir, accept_changes, live, stop, stack)
        except Stopped:
            stop.farewell()
            folders = folders_of(config, workdir)
            return min(max(saved_steps(place / "checkpoints"), default=0) for place in folders)
        newly_ungraded()  # answers that could not be graded before the run, or while roads were timed, do not count
        return _train(config, road, runs, states, live, stop)


def _train(
    config: RunConfig, road: Road, runs: Sequence[Run], states: list[State], live: Live, stop: Stop
) -> int:
    """Train opened runs: steps, evaluations and saves until the last step or a stop; returns the step reached."""
    for run, state in zip(runs, states):
        if state.step and hosts.is_first():
            *_, last = {}, *read_lines(run.folder / METRICS)
            run.live.resumed(state.step, last, _evaluations(run).values(), run.watch.holding)
            _warn_of_lost(run, state)
    if states[0].step > config.steps:
        live.note(f"the run is already past its last step, {config.steps}: no step is made")
    saved, saving = [(state.step, state.accuracy) for state in states], threading.Lock()
    clock = step_metrics.Clock()

    def keep(wait: bool = False) -> None:
        """Begin to save the states that are not saved yet; with `wait`, return when they are saved."""
        with saving, clock("save"):
            # A seed that is two saves ahead of another would have no saved step left in common with it.
            if len(runs) > 1:
                _wait_for_saves(runs)
            for number, (run, state) in enumerate(zip(runs, states)):
                if state.step and saved[number] != (state.step, state.accuracy):
                    save(run, state)
                    saved[number] = state.step, state.accuracy
            if wait:
                _wait_for_saves(runs)

    def farewell() -> None:
        keep(wait=True)
        live.note(f"stopped after step {states[0].step}; the same command goes on from there")

    stop.farewell = farewell
    try:
        while True:
            for number, (run, state) in enumerate(zip(runs, states)):
                if _evaluation_due(run, state):
                    with clock("evaluate"):
                        states[number] = evaluate(road, run, state)
            if any(_save_due(config, state) for state in states):
                keep()
            if states[0].step >= config.steps or stop.requested_of_any():
                break
            if config.alarms == "stop" and hosts.any_of(any(run.watch.holding for run in runs)):
                keep(wait=True)
                for run, state in zip(runs, states):
                    if run.watch.holding:
                        run.live.note(_stopped_by(run.watch.holding, state.step))
                break
            states[:] = step(road, runs, states, clock)
            if failures := [state.failure for state in states if state.failure]:
                keep(wait=True)
                raise Diverged(
                    f"{failures[0]}; step {states[0].step} is saved without these gradients: start the same "
                    f"command again, or {ways_out(config)}"
                )
    except Stopped:
        stop.request()  # the step under way is abandoned; it will be made again
    except EngineGone as error:  # the policies are not affected
        if not stop.requested():  # else the server may have got the same signal, as under SLURM
            keep(wait=True)
            raise EngineGone(f"{error}; the same command goes on after step {states[0].step}") from None
    if stop.requested():
        farewell()
    _wait_for_saves(runs)
    return states[0].step


def _leave(stop: Stop, error: type[BaseException] | None, *_: object) -> None:
    """End the process if it was asked to stop and other threads still compile for a step that was abandoned."""
    if stop.asked and stop.patience is not None and error is None and not threads.join_all(stop.patience):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _wait_for_saves(runs: Sequence[Run]) -> None:
    """Wait until all checkpoints that are being saved are saved."""
    for run in runs:
        hosts.from_all(run.checkpoints.wait)


def step(road: Road, runs: Sequence[Run], states: Sequence[State], clock: step_metrics.Clock) -> list[State]:
    """One step of every run, from problems to policies that have learned from them."""
    clock.begin()
    at = runs[0].phases.at(states[0].step)
    states = [run.phases.enter(at, state) for run, state in zip(runs, states)]
    results = road.step(runs, states, at, clock)
    with clock("log"):
        after = [_after(run, at, state, result) for run, state, result in zip(runs, states, results)]
    tokens = [result.counts.get("draws/tokens", result.table.length.sum()) for result in results]
    times = clock.measures(int(sum(tokens)))
    runs[0].pace.step(times["time/step"])
    with clock("log"):
        ungraded = sum(hosts.from_all(newly_ungraded))
        for run, result, (state, values) in zip(runs, results, after):
            run.phases.collect(at.phase, state.step, result.table)
            if hosts.is_first():
                _report(run, state.step, result, values | times, ungraded)
            ungraded = 0  # reported by the first of several seeds
    return [state for state, _ in after]


def _after(run: Run, at: PhasePosition, state: State, result: Result) -> tuple[State, dict[str, Any]]:
    """The state after a step, which must be finite, and the metrics of the step."""
    updates = {name: learner_state.updates for name, learner_state in result.learner.items()}
    if what := broken_update(result.report, state.updates, updates):
        raise diverged(run, state.step + 1, what)
    # The buffer takes only tasks that this step played, not calls read from files.
    played = result.table if at.phase.source == "play" else result.table.take([])
    data = run.config.data
    buffer, about_buffer = updated(state.buffer, played, data.buffer, state.step + 1, data.family)
    learner, form = result.learner, step_metrics.form(played)
    if result.failure:  # the next start counts skipped gradients from 0
        learner = {name: learner_state.replace(skipped=0) for name, learner_state in learner.items()}
    after = dataclasses.replace(
        state,
        step=state.step + 1,
        trees=result.trees,
        learner=learner,
        position=run.problems.position,
        buffer=buffer,
        accuracy=None,
        form=form | state.form,
        failure=result.failure,
    )
    values = step_metrics.of_step(result.table, result.groups, result.counts, result.report, form, after.form)
    return after, values | run.phases.about(at) | about_buffer


def _report(run: Run, number: int, result: Result, values: dict[str, Any], ungraded: int) -> None:
    """Write the results of a step to the folder and show them; `ungraded` counts answers without a grade."""
    config, parts, table = run.config, run.parts, result.table
    warnings = [*values.get("warnings", ())]
    if number == 1:
        warnings += unfamiliar_prompts(table, parts.pairs, parts.of_policies(parts.tokenizers))
    if not len(table):
        warnings.append("no call was made, so there was nothing to learn")
    if ungraded:
        warnings.append(f"{ungraded} answers could not be graded, and earned 0")
    if warnings:
        values["warnings"] = warnings
    if alarms := run.watch.row(plain({"step": number, **values})):
        values["alarms"] = [alarm.to_json() for alarm in alarms]
    append_line(run.folder / METRICS, number, values)
    for board in run.boards:
        board.write(number, values)
    trainer: list[Any] = [None] * len(table)
    for row, logp in zip(np.flatnonzero(run.phases.reported(table)), result.report.trainer_logp):
        trainer[row] = logp
    recording.record(run.folder / "episodes", "step", config, number, table, parts.decoders, trainer)
    run.live.step(number, values)
    ends = [end.error for bare in table.bare_episodes for end in bare.leaves or (bare,)]
    run.live.failures(number, ends, "path" if table.forked else "episode")
    for warning in warnings:
        run.live.note(f"step {number}: {warning}")
    run.live.alarms([alarm for alarm in alarms if alarm.step == number], run.watch.holding)


def evaluate(road: Road, run: Run, state: State) -> State:
    """Evaluate the policies on the val split into `eval.jsonl`; returns the state with their accuracy."""
    run.live.phase("evaluating")
    before = hosts.from_first(lambda: _evaluations(run))
    # A run that was killed after writing the line, before its checkpoint, finds the line here and uses it.
    record = before.get(state.step) or _play_evaluation(road, run, state, before.get(0))
    run.live.evaluation(record)
    run.live.alarms(run.watch.evaluation(plain(record)), run.watch.holding)
    best = state.best
    if best is None or record["accuracy"] > best["accuracy"]:
        best = {"step": state.step, "accuracy": record["accuracy"]}
    return dataclasses.replace(state, accuracy=record["accuracy"], best=best)


def _evaluations(run: Run) -> dict[int, dict[str, Any]]:
    """The run's evaluations so far, by step; without lines of `experiments.evaluate`, which have `checkpoint`."""
    lines = [line for line in read_lines(run.folder / EVALUATIONS) if run.about.items() <= line.items()]
    return {line["step"]: line for line in lines if "checkpoint" not in line}


def _warn_of_lost(run: Run, state: State) -> None:
    """Warn if evaluations of earlier steps are no longer in `eval.jsonl`."""
    every = 0 if read_record(run.folder)["changes"] or not run.watched else run.config.evaluation.every
    before = state.step + (state.accuracy is not None)
    if lost := missing_evaluations(read_lines(run.folder / EVALUATIONS), every, before):
        base = ", and without step 0 the difference to base is unknown" if 0 in lost else ""
        run.live.note(
            f"eval.jsonl was damaged: it lacks the evaluation of step {', '.join(map(str, lost))}{base}; restore it, "
            "or go on without"
        )


def _play_evaluation(road: Road, run: Run, state: State, base: Mapping[str, Any] | None) -> dict[str, Any]:
    """Play an evaluation, compare it with the line of the base, and write its line."""
    base = None if answers_changed(run.folder) else base
    samples, grader = run.config.evaluation.samples, Grader(run.stop.check)
    with finite(run, state), hosts.sharing_errors(), disk_errors(run.folder):
        table = road.serve(state).play(
            hosts.share(run.watched),
            samples=samples,
            step=EVALUATION_NOISE,
            seed=run.config.seed,
            tool_log=recording.tool_log(run.folder, f"eval-{state.step}"),
            progress=run.stop.watch(run.live.rollout),
            finished=grader.start,
        )
    graded, before = gathered(lambda: grade(table, grader)), base["per_problem"] if base else None
    count = sum(hosts.from_all(newly_ungraded))
    ungraded = {"ungraded": count} if count else {}

    def write_line() -> dict[str, Any]:
        decode = run.parts.decoders
        recording.record(run.folder / "episodes", "val", run.config, state.step, graded, decode)
        line = summary(graded, samples, before, run.parts.metric) | ungraded
        append_line(run.folder / EVALUATIONS, state.step, run.about | line)
        for board in run.boards:
            board.write(state.step, {"eval": line})
        return line

    return {"step": state.step, **run.about, **hosts.from_first(write_line)}


def save(run: Run, state: State) -> None:
    """Begin to save; remove results of tools from before the oldest checkpoint."""
    complete = saved_steps(run.checkpoints.directory)
    _check_replicas(state)
    if hosts.is_first():
        check_held(run.folder)
    run.checkpoints.save(state.step, state.arrays, state.numbers, state.accuracy)
    if not hosts.is_first():
        return
    run.pace.keep()
    for path in (run.folder / "tools").glob("*-*.jsonl"):
        if complete and int(path.stem.rpartition("-")[2]) < complete[0]:
            path.unlink(missing_ok=True)


def _check_replicas(state: State) -> None:
    """Refuse to save if the processes do not have the same weights, as on machines of several kinds."""
    if hosts.count() == 1:
        return
    first, *others = hosts.from_all(lambda: fingerprint((state.trees, state.learner)))
    for number, other in enumerate(others, 1):
        if other != first:
            raise RunError(
                f"step {state.step}: process {number}'s weights differ from process 0's, so nothing is saved: run "
                "all processes on the same kind of machine and software, and start again from the last checkpoint"
            )


def _stopped_by(alarms: Sequence[Alarm], step: int) -> str:
    """The line that is shown when `config.alarms=stop` ends a run."""
    names = ", ".join(f"{alarm.title} since step {alarm.step}" for alarm in alarms)
    return (
        f"stopped after step {step} by {'an alarm' if len(alarms) == 1 else 'alarms'}: {names}; everything is saved, "
        "and the same command goes on from there with --config.alarms=tell"
    )


def _evaluation_due(run: Run, state: State) -> bool:
    """Due every `evaluation.every` steps, before the first and after the last; once for each state."""
    every = run.config.evaluation.every
    due = every and (state.step % every == 0 or state.step >= run.config.steps)
    return bool(due and run.watched and state.accuracy is None)


def _save_due(config: RunConfig, state: State) -> bool:
    best = config.checkpoints.best and state.best is not None and state.best["step"] == state.step
    return state.step > 0 and (
        state.step % config.checkpoints.every == 0 or state.step >= config.steps or best
    )
