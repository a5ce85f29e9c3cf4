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
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_run import KINDS, make_base, tiny_config

from marl_jax.learning.update import NonFiniteGradients
from marl_jax.rewards.credit import CreditConfig
from marl_jax.rollouts import read_episodes
from marl_jax.runs import loop, opening
from marl_jax.runs.checkpoints import CheckpointError, restore, steps
from marl_jax.runs.folder import FolderError, differences
from marl_jax.runs.live import Live
from marl_jax.runs.metrics import comparable, read_lines
from marl_jax.runs.run_config import CheckpointConfig, DataConfig, EvaluationConfig, WorkflowConfig
from marl_jax.sampling import engine
from marl_jax.tasks import DataError, Task
from marl_jax.workflows import Call, workflow

SCRIPT = Path(__file__).with_name("tiny_run.py")


def quiet(steps=8):
    return Live(steps, ("generator", "aggregator"), io.StringIO())


def run(base, workdir, **changes):
    return loop.train(tiny_config(base, **changes), workdir, live=quiet())


def weights(workdir, which="latest", kind="plain"):
    """Every array of a checkpoint, as bytes by file-independent path."""
    parts = opening.load_parts(KINDS[kind](tiny_config(BASE[0])))
    templates = {"policies": {name: parts.start(0)[name] for name in parts.trained}}
    trees, data = restore(Path(workdir) / "checkpoints", which, templates)
    leaves = jax.tree_util.tree_flatten_with_path(trees)[0]
    return data["step"], {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


def records(workdir):
    workdir = Path(workdir)
    lines = [comparable(line) for line in read_lines(workdir / "metrics.jsonl")]
    return lines, list(read_lines(workdir / "eval.jsonl"))


BASE = []


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    BASE[:] = [make_base(tmp_path_factory.mktemp("base") / "tiny")]
    return BASE[0]


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """A run that was never interrupted."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    assert run(base, workdir) == 8
    return workdir


def same(workdir, whole, kind="plain"):
    for name, mine, theirs in zip(("metrics", "eval"), records(workdir), records(whole)):
        assert [line["step"] for line in mine] == [line["step"] for line in theirs], name
        for one, other in zip(mine, theirs):
            none_of(differences(other, one), f"{name}, step {one['step']}")
    (step, mine), (last, theirs) = weights(workdir, kind=kind), weights(whole, kind=kind)
    assert step == last
    none_of([path for path in mine | theirs if mine.get(path) != theirs.get(path)], "weights")


def none_of(lines, what):
    """Nothing differs; if it does, what does is named, in few lines."""
    if lines:
        pytest.fail("\n  ".join([f"{what}: {len(lines)} differ", *lines[:8]]))


def test_a_run_leaves_what_its_folder_promises(whole):
    metrics, evaluations = records(whole)
    assert [line["step"] for line in metrics] == list(range(1, 9))
    assert [line["step"] for line in evaluations] == [0, 4, 8]
    assert {"split": "val", "problems": 4, "samples": 1}.items() <= evaluations[0].items()
    assert evaluations[0]["difference"] is None and evaluations[-1]["difference"] is not None
    first = metrics[0]
    assert first["episodes"] == 16 and first["calls"] == 48 and first["failed"] == 0
    assert {"reward/generator", "own/generator", "role/generator/entropy", "policy/p0/grad_norm"} <= set(
        first
    )
    assert first["role/generator/gap_max"] < 1e-4
    assert first["cosine/generator/aggregator"] is None  # separate weights
    assert len(steps(whole / "checkpoints")) >= 2
    assert json.loads((whole / "config.json").read_text())["settled"]["engine"]["widths"]
    episodes = read_episodes(whole / "episodes" / "step-000004.jsonl.gz")
    lines = [
        json.loads(line)
        for line in (whole / "episodes" / "step-000004.rewards.jsonl").read_text().splitlines()
    ]
    assert len(episodes) == len(lines) == 4  # of one problem
    written = sorted(path.name for path in (whole / "episodes").glob("*.gz"))
    assert written == [f"step-{step:06d}.jsonl.gz" for step in (1, 4, 8)]  # the first, every fourth, the last
    assert [len(line["rewards"]) for line in lines] == [len(episode.calls) for episode in episodes]


def test_training_raises_what_it_is_paid_for(whole):
    rewards = [line["reward/generator"] for line in records(whole)[0]]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.05


def test_an_update_reaches_the_sampler_of_every_policy(whole):
    for episode in read_episodes(whole / "episodes" / "step-000008.jsonl.gz"):
        assert {(call.policy, call.version) for call in episode.calls} == {("p0", 7), ("p1", 7)}


def test_a_finished_run_is_left_as_it_is(base, whole):
    before = records(whole), weights(whole)
    assert run(base, whole) == 8
    assert (records(whole), weights(whole)) == before


def test_another_seed_is_another_run_and_the_same_seed_the_same(base, whole, tmp_path):
    run(base, tmp_path / "same")
    same(tmp_path / "same", whole)
    run(base, tmp_path / "other", seed=1)
    assert records(tmp_path / "other")[0] != records(whole)[0]


def in_a_process(base, workdir, *options, dies_after=None):
    """(exit status, what it said, when it ended) of a run that is killed if it lives longer than so many seconds."""
    log = workdir.with_suffix(".log")  # a pipe might be held open by what outlives the process
    command = [sys.executable, SCRIPT, base, workdir, *options]
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, "JAX_PLATFORMS": "cpu"}
        )
        try:
            process.wait(600 if dies_after is None else dies_after)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return process.returncode, log.read_text(), time.time()


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
    assert ended - float(said.split("signalled at ")[1].split()[0]) < 30
    return steps(workdir / "checkpoints")


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
    assert ended - float(said.split("signalled at ")[1].split()[0]) < 30
    assert steps(tmp_path / "run" / "checkpoints")[-1] == reached
    assert run(base, tmp_path / "run") == 8
    same(tmp_path / "run", whole)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", KINDS)
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


def test_shapes_that_were_measured_are_not_measured_again(base, tmp_path, monkeypatch):
    measured = []

    def measure(params, adapters, config, settings, *rest):
        measured.append(settings)
        return settings

    monkeypatch.setattr(engine, "stable_shapes", measure)
    for _ in range(2):
        assert run(base, tmp_path / "run", steps=1) == 1
    assert len(measured) == 2  # an engine for each of two policies, at the first start
    assert json.loads((tmp_path / "run" / "config.json").read_text())["settled"]["measured"]


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


def test_an_evaluation_is_compared_with_one_of_the_same_problems_and_noise_alone(base, tmp_path):
    run(base, tmp_path / "run", steps=1)
    changed = tiny_config(base, steps=2)
    changed = dataclasses.replace(changed, data=dataclasses.replace(changed.data, seed=1))
    assert loop.train(changed, tmp_path / "run", live=quiet(2), accept_changes=True) == 2
    lines = records(tmp_path / "run")[1]
    assert [(line["step"], line["difference"] is None) for line in lines] == [
        (0, True),
        (1, False),
        (2, True),
    ]


def test_a_batch_larger_than_the_data_is_refused(base, tmp_path):
    config = tiny_config(base, steps=1)
    larger = dataclasses.replace(config, data=dataclasses.replace(config.data, problems=40))
    with pytest.raises(DataError, match=r"data\.problems is 40 and the train split has 16"):
        loop.train(larger, tmp_path / "run", live=quiet(1))


def sums(split):
    """A data set of one's own; two problems of val are learned from."""
    asked = {"train": range(16), "val": (20, 3, 21, 4)}[split]
    return [Task(f"{split}/{i}", "math", f"{i}+1=?", gold=str(i + 1)) for i in asked]


def unanswered(split):
    return [dataclasses.replace(task, question=None if i == 2 else "?") for i, task in enumerate(sums(split))]


def own_data(base, function, **changes):
    return tiny_config(base, data=DataConfig("math", f"test_loop:{function.__name__}", problems=4), **changes)


def test_a_broken_task_of_ones_own_is_told_before_anything_is_compiled(base, tmp_path):
    with pytest.raises(
        DataError,
        match=r"'test_loop:unanswered', train: 1 of its 16 .* task 2 \(id 'train/2'\): field 'question'",
    ):
        loop.train(own_data(base, unanswered), tmp_path / "run", live=quiet())
    assert not (tmp_path / "run" / "config.json").exists()


def unanswerable(split):
    return [dataclasses.replace(task, gold="") for task in sums(split)]


def test_only_a_reward_of_ones_own_does_without_answers(base, tmp_path):
    config = own_data(base, unanswerable, steps=1)
    assert loop.train(config, tmp_path / "own", live=quiet(1)) == 1
    with pytest.raises(DataError, match=r"train: 16 of its 16 .* field 'gold' is empty"):
        loop.train(dataclasses.replace(config, rewards=CreditConfig()), tmp_path / "run", live=quiet(1))


def test_problems_of_val_that_are_learned_from_are_told(base, tmp_path):
    said = io.StringIO()
    with Live(0, ("generator", "aggregator"), said) as live:
        loop.train(own_data(base, sums, steps=0), tmp_path / "run", live=live)
    assert "'test_loop:sums': 2 of the 4 problems of val are in train, too" in said.getvalue()
    assert "(the first is 'val/3')" in said.getvalue()


def test_a_val_split_that_leaves_too_few_problems_is_what_to_lower(base, tmp_path):
    row = json.dumps({"family": "math", "question": "1+1=?", "answer": "2"})
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join([row] * 30))
    data = DataConfig(
        "math", "jsonl", str(tmp_path / "data"), str(tmp_path / "cache"), problems=8, val_size=20
    )
    with pytest.raises(DataError, match=r"the train split has 7: .*, or --config\.data\.val_size \(20\)"):
        loop.train(tiny_config(base, data=data), tmp_path / "run", live=quiet(1))


def test_a_run_stopped_by_broken_gradients_keeps_its_last_good_checkpoint(base, whole, tmp_path, monkeypatch):
    steps_made, real = itertools.count(1), opening.Learner.step

    def step(self, *args, **options):
        if next(steps_made) == 6:
            raise NonFiniteGradients("policy 'p0': 10 gradients were not finite")
        return real(self, *args, **options)

    with monkeypatch.context() as patch, pytest.raises(NonFiniteGradients):
        patch.setattr(opening.Learner, "step", step)
        run(base, tmp_path / "run")
    assert steps(tmp_path / "run" / "checkpoints")[-1] == 4
    assert run(base, tmp_path / "run") == 8
    same(tmp_path / "run", whole)


def test_a_damaged_newest_checkpoint_costs_only_its_own_steps(base, whole, tmp_path):
    run(base, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "8"
    victim = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:10])
    run(base, tmp_path / "run")
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
        ("config.json", Path.unlink, "holds what a run left, but no config.json"),
        ("config.json", lambda path: path.write_text("[]"), "its config.json is no run's"),
        ("config.json", break_settled, "broken settled.engine"),
    ],
)
def test_a_folder_that_lost_what_a_resume_needs_is_one_line(
    base, whole, tmp_path, monkeypatch, name, harm, message
):
    monkeypatch.setattr(opening, "make_service", None)  # it is told before engines are built
    harm(shutil.copytree(whole, tmp_path / "run") / name)
    with pytest.raises((FolderError, CheckpointError)) as error:
        run(base, tmp_path / "run")
    assert message in str(error.value) and "\n" not in str(error.value)


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
    with pytest.raises(CheckpointError, match="go on without these lines by --accept_changes"):
        run(base, copy)
    assert loop.train(tiny_config(base), copy, accept_changes=True, live=quiet()) == 8
    (copy / "metrics.jsonl").unlink()
    assert loop.train(tiny_config(base), copy, accept_changes=True, live=quiet()) == 8
    assert weights(copy) == weights(whole)


def test_a_run_that_is_past_the_last_step_asked_for_says_so_and_ends(base, whole, tmp_path):
    copy, said = shutil.copytree(whole, tmp_path / "run"), io.StringIO()
    live = Live(5, ("generator", "aggregator"), said)
    assert loop.train(tiny_config(base, steps=5), copy, accept_changes=True, live=live) == 8
    assert "the run is already past its last step, 5: it ends as it is" in said.getvalue()
    same(copy, whole)


@workflow(roles=("generator", "aggregator"), families=("math",))
def failing(task, prompts):
    yield Call("generator", prompts.generator(question=task.question))
    raise ValueError("no such word")


def test_steps_in_which_every_episode_failed_are_told_once(base, tmp_path):
    config = tiny_config(
        base,
        steps=2,
        workflow=WorkflowConfig(f"{__name__}:failing", prompts="micro"),
        rewards=CreditConfig(),
        evaluation=EvaluationConfig(every=0),
        checkpoints=CheckpointConfig(best=False),
    )
    said = io.StringIO()
    assert loop.train(config, tmp_path / "run", live=Live(2, config.roles, said)) == 2
    told = [line for line in said.getvalue().splitlines() if "every episode" in line]
    assert len(told) == 1
    assert told[0].startswith(
        "step 1: every episode ended in an error, the first in ValueError: no such word"
    )


def test_a_changed_configuration_is_refused_by_field_unless_accepted(base, whole):
    changed = tiny_config(base, steps=9, seed=5)
    with pytest.raises(FolderError) as error:
        loop.train(changed, whole, live=quiet())
    assert "config.steps: 8 -> 9" in str(error.value) and "config.seed: 0 -> 5" in str(error.value)
    assert "--accept_changes" in str(error.value)


def test_an_accepted_change_that_the_checkpoint_does_not_fit_leaves_the_run_as_it_was(base, whole, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(whole, workdir)
    record = (workdir / "config.json").read_text()
    damped = KINDS["intervened"](tiny_config(base))  # and no average of gradients is there
    with pytest.raises(CheckpointError, match=r"does not fit: 'learner'.*; start the run as it was, or"):
        loop.train(damped, workdir, accept_changes=True, live=quiet())
    assert (workdir / "config.json").read_text() == record


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


def test_a_full_disk_stops_the_run_and_what_was_saved_goes_on(base, whole, tmp_path, monkeypatch):
    from marl_jax.runs import measures
    from marl_jax.runs.files import DiskFull

    write = measures.write_episodes

    def full(path, *rest):
        if "000004" in str(path):  # a checkpoint has been written
            raise OSError(28, "No space left on device")
        return write(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(measures, "write_episodes", full)
        with pytest.raises(DiskFull, match="start the same command again"):
            run(base, tmp_path / "run")
    assert run(base, tmp_path / "run") == 8
    same(tmp_path / "run", whole)


def test_frozen_roles_are_served_and_never_move(base, tmp_path):
    config = tiny_config(base, steps=2)
    policies = dataclasses.replace(config.policies, frozen_roles=("aggregator",))
    loop.train(dataclasses.replace(config, policies=policies), tmp_path / "run", live=quiet())
    line = records(tmp_path / "run")[0][-1]
    assert "policy/p0/updates" in line and "policy/p1/updates" not in line
    assert not any(name.startswith("role/aggregator") for name in line)


def test_adapters_alone_are_saved_under_lora(base, tmp_path):
    config = tiny_config(base, steps=2)
    policies = dataclasses.replace(config.policies, train="lora", lora_rank=2, lora_alpha=4.0)
    config = dataclasses.replace(config, policies=policies)
    loop.train(config, tmp_path / "run", live=quiet())
    lines = records(tmp_path / "run")[0]
    assert lines[-1]["role/generator/gap_max"] < 1e-4 and lines[-1]["policy/p0/updates"] == 2
    parts = opening.load_parts(config)
    templates = {"policies": {name: parts.start(0)[name] for name in parts.trained}}
    trees, _ = restore(tmp_path / "run" / "checkpoints", "latest", templates)
    assert all("a" in leaf and "b" in leaf for tree in trees["policies"].values() for leaf in tree.values())


def test_a_kl_anchor_is_to_each_policys_own_start(base, tmp_path):
    config = tiny_config(base, steps=2)
    anchored = dataclasses.replace(config.learner.interventions, kl_coef={"generator": 0.1})
    learner = dataclasses.replace(config.learner, interventions=anchored)
    loop.train(dataclasses.replace(config, learner=learner), tmp_path / "run", live=quiet())
    first, second = (line["role/generator/kl"] for line in records(tmp_path / "run")[0])
    assert first < 1e-8 < second  # at the first step it is where it began


def test_dynamic_sampling_draws_again(base, tmp_path):
    config = tiny_config(base, steps=1)
    rollout = dataclasses.replace(config.rollout, draws=3)
    loop.train(dataclasses.replace(config, rollout=rollout), tmp_path / "run", live=quiet())
    line = records(tmp_path / "run")[0][0]
    assert line["draws/draws"] in (1, 2, 3) and line["draws/problems"] == 4


credited = threading.Event()


def noted_credit(graded):
    credited.set()
    return [1.0] * len(graded)


def test_credit_of_ones_own_is_called_while_other_problems_are_sampled(base, tmp_path):
    class Watch(Live):
        """Lets no rollout end before the first credit was asked for."""

        def rollout(self, progress):
            if 4 <= progress.done < progress.episodes:  # one problem at a time, so that one is complete
                seen.append(credited.wait(60))
            super().rollout(progress)

    seen = []
    config = tiny_config(base, steps=1, rewards=CreditConfig(f"{__name__}:noted_credit"))
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, ahead=1))
    live = Watch(1, ("generator", "aggregator"), io.StringIO())
    assert loop.train(config, tmp_path / "run", live=live) == 1
    assert seen and all(seen)
    assert records(tmp_path / "run")[0][0]["reward/generator"] == 1.0


def test_signals_off_the_main_thread_are_left_alone(base, tmp_path):
    reached = []
    thread = threading.Thread(target=lambda: reached.append(run(base, tmp_path / "run", steps=1)))
    thread.start()
    thread.join()
    assert reached == [1]


@pytest.mark.parametrize("config", [None, {"steps": 3}, "configs/micro.py:single-shared-xs-math"])
def test_what_is_no_configuration_is_refused(config, tmp_path):
    with pytest.raises(TypeError, match="give a RunConfig, such as load_config makes"):
        loop.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
