"""The run survives anything: killed at any moment, it ends with the numbers of one that never was."""

import contextlib
import dataclasses
import io
import itertools
import json
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from pace import slowness
from run_kit import in_a_process, quiet, records, run, same, weights
from tiny_run import CUT, KINDS, tiny_config

from marl_jax.learning.update import Learner, NonFiniteGradients
from marl_jax.run_folder.checkpoints import CheckpointError, restore, steps
from marl_jax.run_folder.folder import FolderError
from marl_jax.runs import loop, recording
from marl_jax.runs.divergence import Diverged
from marl_jax.runs.loading import roads
from marl_jax.terminal.live import Live


@pytest.mark.long
def test_a_finished_run_is_left_as_it_is(base, whole):
    before = records(whole), weights(whole)
    assert run(base, whole) == 8
    assert (records(whole), weights(whole)) == before


def killed(base, workdir, moments, kind="plain"):
    """How often it died, at most at these moments, before it came through.

    They are seconds after its birth (step 0), or after it began its Nth step.
    """
    deaths = 0
    for step, seconds in moments:
        if step:
            options = (f"--kind={kind}", "--at=step", f"--visit={step}", f"--after={seconds}")
            status, said, _ = in_a_process(base, workdir, *options)
        else:
            status, said, _ = in_a_process(base, workdir, f"--kind={kind}", dies_after=seconds)
        if status == 0:
            return deaths
        assert status == -signal.SIGKILL, said[-2000:]
        deaths += 1
    return deaths


@pytest.mark.long
def test_a_run_killed_at_random_moments_ends_like_one_that_never_was(base, whole, tmp_path):
    """Killed in a step and while it opens again, and asked to end while it opens and while it learns."""
    workdir, chance = tmp_path / "run", random.Random(0)
    assert asked_to_end(base, workdir, "opening", 1) == []
    assert killed(base, workdir, [(chance.randint(2, 3), chance.uniform(0, 0.1))]) == 1
    status, said, _ = in_a_process(base, workdir, "--at=opening", f"--after={chance.uniform(0, 0.5)}")
    assert status == -signal.SIGKILL, said[-2000:]
    # Of the steps that this process makes, it is asked in the third.
    first = max(steps(workdir / "checkpoints"), default=0)
    assert max(asked_to_end(base, workdir, "learning", 3)) == first + 2
    assert run(base, workdir) == 8
    same(workdir, whole)


def asked_to_end(base, workdir, place, visit):
    """The steps of the checkpoints that a process leaves when it gets SIGTERM there for the Nth time."""
    status, said, ended = in_a_process(base, workdir, "--signal=SIGTERM", f"--at={place}", f"--visit={visit}")
    assert status == 0, said[-2000:]
    assert ended - float(said.split("signalled at ")[1].split()[0]) < 30 * slowness(time.monotonic)
    return steps(workdir / "checkpoints")


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "reached"),
    [
        (("--at=learning", "--visit=4", "--stuck=600"), 3),  # step 4 is abandoned
        (
            ("--at=policy", "--visit=8", "--stuck=5"),
            4,
        ),  # its first policy is a new one already: it is finished
    ],
)
def test_a_stop_that_is_not_heeded_loses_no_step(base, whole, tmp_path, options, reached):
    status, said, ended = in_a_process(base, tmp_path / "run", "--signal=SIGTERM", *options)
    assert status == 0 and f"stopped after step {reached}" in said, said[-2000:]
    assert ended - float(said.split("signalled at ")[1].split()[0]) < 30 * slowness(time.monotonic)
    assert steps(tmp_path / "run" / "checkpoints")[-1] == reached
    assert run(base, tmp_path / "run") == 8
    same(tmp_path / "run", whole)


# Weights that are cut need four devices: test_roads.py kills that run.
@pytest.mark.campaign
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - CUT.keys()))
def test_fifty_kills_change_nothing(base, tmp_path, kind):
    chance, deaths, runs = random.Random(f"kills of {kind}"), 0, 0
    assert in_a_process(base, tmp_path / "whole", f"--kind={kind}")[0] == 0
    while deaths < (14 if kind == "plain" else 6):
        in_a_step = [(chance.randint(1, 5), chance.uniform(0, 1)) for _ in range(3)]
        since_birth = [(0, chance.uniform(0, 12)) for _ in range(3)]
        moments = chance.sample(in_a_step + since_birth, 6)
        deaths += killed(base, tmp_path / f"run-{runs}", moments, kind)
        status, said, _ = in_a_process(base, tmp_path / f"run-{runs}", f"--kind={kind}")
        assert status == 0, said[-2000:]
        same(tmp_path / f"run-{runs}", tmp_path / "whole", kind)
        runs += 1
    print(f"{kind}: {deaths} kills over {runs} runs")


@pytest.mark.campaign
def test_several_widths_and_lengths_are_measured_once(base, tmp_path):
    status, said, _ = in_a_process(base, tmp_path / "run", "--kind=wide", "--at=step", "--visit=3")
    assert status == -signal.SIGKILL, said[-2000:]
    settled = json.loads((tmp_path / "run" / "config.json").read_text())["settled"]
    assert settled["measured"] and len(settled["engine"]["widths"]) * len(settled["engine"]["lengths"]) > 2
    assert in_a_process(base, tmp_path / "run", "--kind=wide")[0] == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["settled"] == settled


@pytest.mark.long
def test_sigterm_saves_and_ends_well_and_the_same_command_goes_on(base, whole, tmp_path):
    class Asked(Live):
        """Sends the signal in the middle of the rollout of step 4."""

        def rollout(self, progress):
            if self._step == 3:
                asked.append(time.monotonic())
                os.kill(os.getpid(), signal.SIGTERM)
            super().rollout(progress)

    asked = []
    live = Asked(8, ("generator", "aggregator"), io.StringIO())
    before = signal.getsignal(signal.SIGTERM)
    assert loop.train(tiny_config(base), tmp_path / "run", live=live) == 3
    assert time.monotonic() - asked[0] < 300 and signal.getsignal(signal.SIGTERM) is before
    assert steps(tmp_path / "run" / "checkpoints")[-1] == 3
    assert run(base, tmp_path / "run") == 8
    same(tmp_path / "run", whole)


@pytest.mark.long
def test_a_stop_while_evaluating_loses_no_evaluation(base, whole, tmp_path, monkeypatch):
    class Asked(Live):
        def rollout(self, progress):
            if self._step == 4 and self._phase == "evaluating":
                os.kill(os.getpid(), signal.SIGTERM)
            super().rollout(progress)

    live = Asked(8, ("generator", "aggregator"), io.StringIO())
    assert loop.train(tiny_config(base), tmp_path / "run", live=live) == 4
    assert [line["step"] for line in records(tmp_path / "run")[1]] == [0]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "save", lambda run, state: (_ for _ in ()).throw(KeyboardInterrupt))
        run(base, tmp_path / "run")  # as if killed when the line is there and the checkpoint not yet
    assert [line["step"] for line in records(tmp_path / "run")[1]] == [0, 4]
    run(base, tmp_path / "run")
    same(tmp_path / "run", whole)


@pytest.mark.long
def test_a_run_stopped_by_broken_gradients_is_saved_without_them_and_goes_on(
    base, whole, tmp_path, monkeypatch
):
    steps_made, real = itertools.count(1), Learner.step

    def step(self, *args, **options):
        outcome = real(self, *args, **options)
        if next(steps_made) == 6:
            raise NonFiniteGradients("policy 'p0': 10 gradients were not finite", outcome)
        return outcome

    with monkeypatch.context() as patch, pytest.raises(Diverged, match="step 6 is saved without these"):
        patch.setattr(Learner, "step", step)
        run(base, tmp_path / "run")
    assert steps(tmp_path / "run" / "checkpoints")[-1] == 6
    assert run(base, tmp_path / "run") == 8
    same(tmp_path / "run", whole)


@pytest.mark.long
def test_a_damaged_newest_checkpoint_costs_only_its_own_steps(base, whole, tmp_path):
    run(base, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "8"
    victim = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:10])
    with (tmp_path / "run" / "eval.jsonl").open("a") as lines:  # by experiments.evaluate
        lines.write('{"step": 8, "checkpoint": "8"}\n' * 2)
    said = io.StringIO()
    loop.train(tiny_config(base), tmp_path / "run", live=Live(8, ("generator", "aggregator"), said))
    told = "2 evaluations by experiments.evaluate of checkpoints after step 6 are removed from eval.jsonl (8)"
    assert told in said.getvalue()
    same(tmp_path / "run", whole)
    assert (tmp_path / "run" / "checkpoints" / "8.damaged").is_dir()


def in_the_way(path):
    """What is not a file becomes one, and a file a directory."""
    if path.is_dir():
        shutil.rmtree(path)
        path.touch()
    else:
        path.unlink()
        path.mkdir()


def break_settled(path):
    about = json.loads(path.read_text())
    path.write_text(json.dumps({**about, "settled": {"engine": {"widths": "wide"}}}))


@pytest.mark.parametrize(
    "name, harm, message",
    [
        ("metrics.jsonl", Path.unlink, "checkpoint 8 is ahead of metrics.jsonl, which has no step 1"),
        ("metrics.jsonl", lambda path: path.write_text(""), "which has no step 1"),
        ("metrics.jsonl", lambda path: path.write_text("hello\n"), "line that is no JSON object with a step"),
        ("eval.jsonl", lambda path: path.write_text("[1]\n"), "line that is no JSON object with a step"),
        *((name, in_the_way, "cannot be used") for name in ("metrics.jsonl", "eval.jsonl")),
        *((name, in_the_way, "cannot be used") for name in ("checkpoints", "tensorboard")),
        ("checkpoints", shutil.rmtree, "8 steps are recorded, but there is no checkpoint in"),
        ("config.json", Path.unlink, "has results of a run, but no config.json"),
        ("config.json", lambda path: path.write_text("[]"), "its config.json is not a run's"),
        ("config.json", break_settled, "broken settled.engine"),
    ],
)
def test_a_folder_that_lost_what_a_resume_needs_is_one_line(
    base, whole, tmp_path, monkeypatch, name, harm, message
):
    monkeypatch.setattr(roads, "make_service", None)  # it is told before engines are built
    harm(shutil.copytree(whole, tmp_path / "run") / name)
    with pytest.raises((FolderError, CheckpointError)) as error:
        run(base, tmp_path / "run")
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.long
def test_a_run_without_its_checkpoints_begins_again_if_told_to(base, whole, tmp_path):
    copy = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(copy / "checkpoints")
    assert loop.train(tiny_config(base), copy, accept_changes=True, live=quiet()) == 8
    assert [line["step"] for line in records(copy)[0]] == [*range(1, 9)] and weights(copy) == weights(whole)


@pytest.mark.parametrize("steps_made", [4, 5])
def test_killed_before_its_first_checkpoint_is_whole_a_run_begins_again(base, whole, tmp_path, steps_made):
    """One checkpoint every second step: the save of step 4 waits for that of step 2."""
    copy = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(copy / "checkpoints")
    lines = (copy / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_bytes(b"".join(lines[:steps_made]))
    if steps_made > 4:
        with pytest.raises(CheckpointError, match="5 steps are recorded, but there is no checkpoint in"):
            run(base, copy)
    else:
        assert run(base, copy) == 8


def test_steps_whose_metrics_are_lost_are_made_again(base, whole, tmp_path):
    copy = shutil.copytree(whole, tmp_path / "run")
    lines = (copy / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_bytes(b"".join(lines[:7]))
    (copy / "checkpoints" / "010").mkdir()
    assert run(base, copy) == 8
    same(copy, whole)
    assert (copy / "checkpoints" / "8.unrecorded").is_dir()


def test_a_run_goes_on_without_the_lines_it_lost_if_told_to(base, whole, tmp_path):
    copy = shutil.copytree(whole, tmp_path / "run")
    lines = (copy / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_bytes(b"".join(lines[:2]))  # before both checkpoints that are kept whole
    with pytest.raises(CheckpointError, match="go on without the missing lines by --accept_changes"):
        run(base, copy)
    assert loop.train(tiny_config(base), copy, accept_changes=True, live=quiet()) == 8
    (copy / "metrics.jsonl").unlink()
    assert loop.train(tiny_config(base), copy, accept_changes=True, live=quiet()) == 8
    assert weights(copy) == weights(whole)
    (copy / "metrics.jsonl").write_bytes(b"".join(lines[:2]))
    for place in (copy / "checkpoints").glob("[0-9]*"):
        (place / "seal.json").unlink()
    with pytest.raises(
        CheckpointError
    ) as refused:  # damaged ones cannot be gone on from, whatever is accepted
        run(base, copy)
    assert "--accept_changes" not in str(refused.value)


def test_an_accepted_change_that_the_checkpoint_does_not_fit_leaves_the_run_as_it_was(base, whole, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(whole, workdir)
    record = (workdir / "config.json").read_text()
    damped = KINDS["intervened"](tiny_config(base))  # and no average of gradients is there
    with pytest.raises(CheckpointError, match=r"does not fit: 'learner'.*; start the run as it was, or"):
        loop.train(damped, workdir, accept_changes=True, live=quiet())
    assert (workdir / "config.json").read_text() == record


def test_with_accepted_data_of_fewer_problems_a_run_goes_on_at_the_next_epoch(base, whole, tmp_path):
    copy = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(copy / "checkpoints" / "8")  # step 7 begins behind 8 problems of the second epoch
    few = tiny_config(base)
    few = dataclasses.replace(few, data=dataclasses.replace(few.data, train_size=8))
    assert loop.train(few, copy, accept_changes=True, live=quiet()) == 8
    position = restore(copy / "checkpoints", "latest", {})[1]["position"]
    assert position == {"epoch": 3, "index": 0, "seed": 0}


def test_a_second_process_on_the_folder_is_refused(base, tmp_path):
    found = []

    class Second(Live):
        def rollout(self, progress):
            if not found:
                with contextlib.suppress(FolderError):
                    found.append("refused")
                    loop.train(tiny_config(base), tmp_path / "run", live=quiet())
                    found.append("ran")
            super().rollout(progress)

    live = Second(8, ("generator", "aggregator"), io.StringIO())
    loop.train(tiny_config(base, steps=1), tmp_path / "run", live=live)
    assert found == ["refused"]


@pytest.mark.long
def test_a_full_disk_stops_the_run_and_what_was_saved_goes_on(base, whole, tmp_path, monkeypatch):
    from marl_jax.run_folder.files import DiskFull

    write = recording.write_episodes

    def full(path, *rest):
        if "000004" in str(path):  # a checkpoint has been written
            raise OSError(28, "No space left on device")
        return write(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(recording, "write_episodes", full)
        with pytest.raises(DiskFull, match="start the same command again"):
            run(base, tmp_path / "run")
    assert run(base, tmp_path / "run") == 8
    same(tmp_path / "run", whole)


def test_signals_off_the_main_thread_are_left_alone(base, tmp_path):
    reached = []
    thread = threading.Thread(target=lambda: reached.append(run(base, tmp_path / "run", steps=1)))
    thread.start()
    thread.join()
    assert reached == [1]
