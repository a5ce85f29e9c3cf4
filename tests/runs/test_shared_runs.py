"""Processes that share a run compute what one process does, and go on from each other's folders."""

import dataclasses
import json
import os
import pickle
import re
import shutil
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from closeness import EPS, close_trees
from hosts_kit import ended, free_port, play, said, start
from run_kit import quiet, records, same
from tiny_run import KINDS, tiny_config

import marl_jax
from marl_jax.config.run_config import CheckpointConfig, EvaluationConfig, LogConfig
from marl_jax.rollouts import read_episodes
from marl_jax.run_folder.checkpoints import restore, steps
from marl_jax.runs import loop

HERE = Path(__file__).parent


def by_itself(base, workdir, kind, count):
    """A run of one process that keeps every state and every episode."""
    config = dataclasses.replace(
        KINDS[kind](tiny_config(base)),
        steps=count,
        evaluation=EvaluationConfig(every=0),
        checkpoints=CheckpointConfig(every=1, latest=count, best=False),
        logging=LogConfig(episodes_every=1, episodes_problems=4),
    )
    assert loop.train(config, workdir, live=quiet()) == count


def agree_step_by_step(base, tmp_path, kind, *, hosts, data, count, model=1):
    config = KINDS[kind](tiny_config(base))
    by_itself(base, tmp_path / "alone", kind, count)
    words = (base, tmp_path / "alone", tmp_path / "shared", kind, data, model, tmp_path / "out")
    # A collective on CPU keeps a thread while it waits, of which there are as many as cores if nobody says otherwise.
    threads = {"PJRT_NPROC": "16"} if model > 1 else {}
    play(HERE / "steps_run.py", tmp_path / "logs", hosts, *words, devices=data * model, **threads)
    every = [pickle.loads((tmp_path / f"out-{k}.pickle").read_bytes()) for k in range(hosts)]
    assert every[0].keys() == set(range(1, count + 1))
    lines = {line["step"]: line for line in records(tmp_path / "alone")[0]}
    for step, found in every[0].items():
        for other in every[1:]:  # replicas are equal to the bit, and so are the tables
            mine, theirs = (jax.tree.leaves(one[step]["arrays"]) for one in (every[0], other))
            assert [np.asarray(leaf).tobytes() for leaf in mine] == [
                np.asarray(leaf).tobytes() for leaf in theirs
            ]
            assert pickle.dumps(found["table"].advantage) == pickle.dumps(other[step]["table"].advantage)
        table = found["table"]
        alone = read_episodes(tmp_path / "alone" / "episodes" / f"step-{step:06d}.parquet")
        assert [bare.task.id for bare in table.bare_episodes] == [
            bare.task.id for bare in alone.bare_episodes
        ]
        for name in ("prompt", "tokens"):
            mine, theirs = getattr(table, name), getattr(alone, name)
            assert [row.tolist() for row in mine] == [row.tolist() for row in theirs], name
        for name in ("episode", "call", "slot", "turn", "reads"):
            np.testing.assert_array_equal(getattr(table, name), getattr(alone, name), name)
        assert (table.roles, table.policies) == (alone.roles, alone.policies)
        for name in ("reward", "advantage"):
            np.testing.assert_array_equal(getattr(table, name), getattr(alone, name), name)
        for row in range(len(table)):
            np.testing.assert_allclose(table.logprobs[row], alone.logprobs[row], rtol=0, atol=1e-6)
        # The first moment of Adam is a mean of gradients, the same ones before this step: it tells this one apart.
        expected, _ = restore(tmp_path / "alone" / "checkpoints", step, found["arrays"])
        for policy, state in expected["learner"].items():
            close_trees(found["arrays"]["learner"][policy].optimiser[0].mu, state.optimiser[0].mu)
            assert found["norms"][policy] == pytest.approx(
                lines[step][f"policy/{policy}/grad_norm"], rel=1e-6
            )
            if model == 1:  # split products round otherwise
                trees = (one["policies"][policy] for one in (found["arrays"], expected))
                close_after_adam(*trees, state, config.learner.optimiser)


def close_after_adam(actual, expected, state, config):
    """Every weight within roundings of the norm of all, and of what Adam makes of the roundings of its gradients.

    They are divided by the root of its second moment: where a gradient is all rounding, each step may go either way.
    """
    mu, nu = state.optimiser[0].mu, state.optimiser[0].nu
    flat = lambda tree: np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)])
    norm = lambda tree: np.linalg.norm(flat(tree))
    rate, slack = config.schedule.learning_rate, 8 * EPS * norm(mu) / (1 - config.b1**state.steps)
    root = np.sqrt(flat(nu) / (1 - config.b2**state.steps))
    # Of a step, of its numerator and its denominator; a gradient of 0, as of A beside a B of 0, has no roundings.
    share = np.where(root > 0, slack / np.maximum(root, slack), 0.0)
    assert np.mean(share > 0.1) < 0.02  # nearly all weights are told apart
    allowed = 64 * EPS * norm(expected) + 2 * state.steps * rate * share
    apart = np.abs(flat(actual) - flat(expected))
    assert np.all(apart <= allowed), np.max(apart - allowed)


@pytest.mark.long
def test_two_processes_take_the_steps_of_one(base, tmp_path):
    """Tokens, prompts, rewards and advantages are equal, gradients within roundings, replicas to the bit."""
    agree_step_by_step(base, tmp_path, "plain", hosts=2, data=1, count=2)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("kind", "hosts", "data", "model"),
    [
        ("plain", 2, 2, 1),
        ("lora", 2, 1, 1),
        ("packed", 4, 1, 1),
        ("intervened", 2, 2, 1),
        ("plain", 4, 2, 1),
        ("plain", 2, 1, 2),
        ("lora", 1, 1, 2),
        ("lora", 2, 1, 2),
    ],
)
def test_every_layout_takes_the_steps_of_one_process(base, tmp_path, kind, hosts, data, model):
    agree_step_by_step(base, tmp_path, kind, hosts=hosts, data=data, model=model, count=3)


def shared(base, workdir, logs, hosts=2, *options, devices=1, kind="plain"):
    """The exit codes of processes that share the run, and when the last of them ended."""
    words = (base, workdir, f"--kind={kind}", f"--data={devices}", *options)
    codes = ended(start(HERE / "shared_run.py", logs, hosts, *words, devices=devices), 400.0)
    return codes, time.time()


def finish(base, workdir, logs, hosts=2, **options):
    codes, _ = shared(base, workdir, logs, hosts, **options)
    assert codes == [0] * hosts, "\n".join(said(logs, k)[-3000:] for k in range(hosts))
    assert all("reached 8" in said(logs, k) for k in range(hosts))


@pytest.fixture(scope="module")
def undisturbed(base, tmp_path_factory):
    """A run that two processes shared, from its beginning to its end."""
    place = tmp_path_factory.mktemp("shared")
    finish(base, place / "run", place / "logs")
    return place / "run"


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("kind", "hosts", "devices"),
    [(kind, 2, 2) for kind in ("plain", "with_tools", "redrawn", "phased", "branching")] + [("plain", 4, 1)],
)
def test_two_runs_of_one_layout_have_the_same_bits(base, tmp_path, kind, hosts, devices):
    for name in ("one", "other"):
        finish(base, tmp_path / name, tmp_path / "logs", hosts, devices=devices, kind=kind)
    same(tmp_path / "one", tmp_path / "other", kind)


@pytest.mark.campaign
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("at", ["playing", "learning", "saving"])
def test_a_process_that_is_killed_ends_the_others_and_the_same_command_goes_on(
    base, undisturbed, tmp_path, lost, at
):
    """At a save, the checkpoint before stays whole."""
    workdir, logs = tmp_path / "run", tmp_path / "logs"
    codes, over = shared(base, workdir, logs, 2, f"--on={lost}", f"--at={at}", "--visit=3")
    assert codes[lost] == -signal.SIGKILL and codes[1 - lost] not in (0, None), codes
    assert over - float(said(logs, lost).split("signalled at ")[1].split()[0]) < 60
    ours = [line for line in said(logs, 1 - lost).splitlines() if "of 2 (pid" in line]
    assert ours[0].startswith(f"process {lost} of 2 (pid") and "Start the same command again" in ours[0], ours
    if at == "saving":
        assert steps(workdir / "checkpoints")[-1] >= 4
    finish(base, workdir, logs)
    same(workdir, undisturbed)


@pytest.mark.campaign
@pytest.mark.parametrize("asked", [0, 1])
@pytest.mark.parametrize("at", ["opening", "playing", "learning"])
def test_a_stop_that_one_process_is_asked_for_ends_all_at_one_step(base, undisturbed, tmp_path, asked, at):
    workdir, logs = tmp_path / "run", tmp_path / "logs"
    visit = {"opening": 1, "playing": 5, "learning": 4}[at]
    codes, _ = shared(
        base, workdir, logs, 2, f"--on={asked}", f"--at={at}", f"--visit={visit}", "--signal=SIGTERM"
    )
    assert codes == [0, 0], "\n".join(said(logs, k)[-3000:] for k in range(2))
    reached = [re.findall(r"reached (\d+)", said(logs, k)) for k in range(2)]
    assert reached[0] == reached[1] and int(reached[0][0]) < 8
    assert max(steps(workdir / "checkpoints"), default=0) == int(reached[0][0])
    finish(base, workdir, logs)
    same(workdir, undisturbed)


@pytest.mark.campaign
@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2), (2, 4)])
def test_a_run_goes_on_with_another_number_of_processes(base, undisturbed, tmp_path, first, then):
    workdir, logs = tmp_path / "run", tmp_path / "logs"
    codes, _ = shared(base, workdir, logs, first, "--on=0", "--at=step", "--visit=5", "--signal=SIGTERM")
    assert codes == [0] * first and steps(workdir / "checkpoints")[-1] == 4
    finish(base, workdir, logs, then)
    for mine, theirs in zip(records(workdir)[0], records(undisturbed)[0], strict=True):
        assert mine["tokens"] == theirs["tokens"]
        assert mine["reward/generator"] == pytest.approx(theirs["reward/generator"], abs=1e-12)
        assert mine["policy/p0/grad_norm"] == pytest.approx(theirs["policy/p0/grad_norm"], rel=1e-4)


@pytest.mark.campaign
@pytest.mark.parametrize("at", ["playing", "learning"])
def test_an_error_of_one_process_ends_all(base, tmp_path, at):
    """Where the others can hear it, they say it, too; in the update, which all compute, they say who is lost."""
    logs = tmp_path / "logs"
    codes, _ = shared(base, tmp_path / "run", logs, 2, "--on=1", f"--at={at}", "--visit=3", "--signal=error")
    assert codes[0] not in (0, None) and codes[1] not in (0, None)
    assert "this process has an error of its own" in said(logs, 1)
    told = "this process has an error of its own" if at == "playing" else "process 1 of 2"
    assert told in said(logs, 0)


@pytest.fixture
def disks(base, tmp_path):
    """What lies on the disk of each of two hosts, under the same names: the code, a base, data."""
    places = [tmp_path / f"host{k}" for k in range(2)]
    for place in places:
        shutil.copytree(
            Path(marl_jax.__file__).parent, place / "marl_jax", ignore=shutil.ignore_patterns("*.pyc")
        )
        shutil.copytree(base, place / "base")
        (place / "data").mkdir()
        rows = [{"question": f"{n}+{n}=?", "gold": str(2 * n)} for n in range(24)]
        (place / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return places


def from_own_disks(disks, workdir, logs, *options):
    """The exit codes of two processes that share a run, each in the folder of its host."""
    coordinator, words = f"127.0.0.1:{free_port()}", ("base", workdir, *options)
    processes = [
        one
        for k, disk in enumerate(disks)
        for one in start(
            HERE / "shared_run.py", logs, 2, *words, coordinator=coordinator, only=[k], cwd=disk,
            PYTHONPATH=os.pathsep.join(map(str, (disk, HERE.parent))),
        )
    ]  # fmt: skip
    return ended(processes)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("changed", "line", "options", "told"),
    [
        ("marl_jax/task.py", "", ["--changed=1"], ["config.seed: 0 -> 7", "versions.code: "]),
        ("base/config.json", "", [], ["digests.base base: "]),
        (
            "data/train.jsonl",
            '{"question": "7+8=?", "gold": "15"}',
            ["--files=data"],
            ["digests.data train: ", "digests.data val: "],
        ),
    ],
)
def test_processes_that_differ_are_refused_with_what_differs(disks, tmp_path, changed, line, options, told):
    """Where one host has another code, configuration, base or data."""
    with open(disks[1] / changed, "a") as file:
        file.write(f"\n{line}")
    logs = tmp_path / "logs"
    codes = from_own_disks(disks, tmp_path / "run", logs, *options)
    assert codes == [2, 2], said(logs, 0) + said(logs, 1)
    for k in range(2):
        assert "start the same command, with the same code and data, on every host" in said(logs, k)
        found = [line.strip() for line in said(logs, k).splitlines() if line.startswith("  process 1: ")]
        assert len(found) == len(told), found
        assert all(line.startswith(f"process 1: {text}") for line, text in zip(found, told)), found
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.campaign
def test_a_folder_that_a_process_does_not_see_is_refused(base, tmp_path):
    codes, _ = shared(base, tmp_path / "run", tmp_path / "logs", 2, "--blind=1")
    assert codes == [2, 2]
    for k in range(2):
        assert "process 1 does not see the run folder" in said(tmp_path / "logs", k)
