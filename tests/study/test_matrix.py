"""A matrix asks for the runs that it says, does what is left to do, and leaves alone what is not its own."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import script

from marl_jax.runs import folder
from marl_jax.runs.config import ConfigError, from_argv
from marl_jax.runs.files import write_atomically
from marl_jax.runs.stopping import Stop
from marl_jax.study import matrix
from marl_jax.study.matrix import Kind, make_jobs

MICRO = "configs/micro.py"
TWO = "voting-*-xs-math"


@pytest.fixture
def jobs(tmp_path):
    return make_jobs(MICRO, [("steps", "4")], tmp_path, TWO, seeds=2)


def leave(job, steps=4, played=(), **config):
    """The folder of a job as its training leaves it."""
    record = {"config": {**job.config.to_json(), **config}, "digests": {}, "versions": {}, "settled": {}}
    (job.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    write_atomically(job.folder / "config.json", json.dumps({**record, "changes": []}))
    lines = "".join(json.dumps({"step": step}) + "\n" for step in range(1, steps + 1))
    write_atomically(job.folder / "metrics.jsonl", lines)
    for step in range(2, steps + 1, 2):
        save(job, step, score=1 / step)
    records = [{"step": step, "split": "test", "mode": "trained", "samples": 1} for step in played]
    write_atomically(job.folder / "eval.jsonl", "".join(json.dumps(one) + "\n" for one in records))


def save(job, step, score):
    seal = {"step": step, "score": score, "data": {}, "numbers": {}, "files": {}}
    place = job.folder / "checkpoints" / str(step)
    place.mkdir(exist_ok=True)
    (place / "seal.json").write_text(json.dumps(seal))


# ---------------------------------------------------------------- which runs


def test_every_cell_gets_every_seed_and_the_first_seed_of_all_cells_comes_first(jobs, tmp_path):
    assert [job.name for job in jobs] == [
        "voting-shared-xs-math, seed 0",
        "voting-isolated-xs-math, seed 0",
        "voting-shared-xs-math, seed 1",
        "voting-isolated-xs-math, seed 1",
    ]
    assert jobs[3].folder == tmp_path / "voting-isolated-xs-math" / "seed-1"


def test_a_job_is_the_command_that_a_person_would_type(tmp_path):
    texts = [("steps", "4"), ("seed", "7"), ("policies.base", "a b")]
    for job in make_jobs(MICRO, texts, tmp_path, TWO, seeds=2):
        config, rest = from_argv(job.training)
        assert config == job.config and config.seed in (7, 8) and config.policies.base == "a b"
        assert rest == ["experiments.train", f"--workdir={job.folder}", "--noreport"]


def test_cells_are_those_that_fit_a_pattern_in_the_order_of_the_file(tmp_path):
    cells = lambda spec, patterns="*": [job.cell for job in make_jobs(spec, [], tmp_path, patterns)]
    assert cells(MICRO, "voting-shared-xs-*, single-*-xs-math,*-xs-math")[:2] == [
        "single-shared-xs-math",
        "voting-shared-xs-math",
    ]
    assert len(cells(MICRO)) == 54 and len(set(cells(MICRO))) == 54
    assert len(cells("configs/study.py", "voting-*-4b-*")) == 4
    assert cells(f"{MICRO}:eval_opt-shared-m-code") == ["eval_opt-shared-m-code"]


@pytest.mark.parametrize(
    "spec, texts, patterns, message",
    [
        (MICRO, (), "votng-*-xs-math", "fits none of the 54 cells: did you mean 'voting-"),
        (MICRO, (), "*,", "--cells= fits none of the 54 cells, such as single-shared-xs-math"),
        (
            MICRO,
            [("stps", "1"), ("seed", "x")],
            TWO,
            r"stps is unknown: did you mean 'steps'\?\n  seed is 'x'",
        ),
        (
            MICRO,
            [("workflow.settings.votes", "2")],
            "*-s-code",
            r"no setting of 'single'.*\(single-shared-s-code\)",
        ),
        (MICRO, [("seed", str(2**31 - 1))], TWO, "seed is 2147483648; it must be at most 2147483647"),
        ("configs/none.py", (), "*", "there is no file 'configs/none.py'"),
        ("tests/runs/tiny_run.py", (), "*", "defines no CELLS, the names of its cells; give FILE:CELL"),
    ],
)
def test_what_is_wrong_with_any_cell_is_told_before_anything_runs(tmp_path, spec, texts, patterns, message):
    with pytest.raises(ConfigError, match=message):
        make_jobs(spec, list(texts), tmp_path, patterns, seeds=2)


# ---------------------------------------------------------------- how far they are


def test_the_folder_says_how_far_a_job_is(jobs):
    done, begun, changed, new = jobs
    leave(done)
    leave(begun, steps=3)
    leave(changed, seed=5)
    assert [str(matrix.state(job)) for job in jobs] == ["done", "step 3 of 4", "another configuration", "–"]
    with folder.open_folder(new.folder), folder.open_folder(done.folder):
        assert matrix.state(new).kind is matrix.state(done).kind is Kind.IN_USE
    assert matrix.state(new).kind is Kind.NEW and matrix.state(done).kind is Kind.DONE
    with pytest.raises(folder.FolderError, match=rf"{changed.folder}: config.seed: 5 -> 1|seed: 5 -> 1"):
        matrix.check(jobs)
    matrix.check([done, begun, new])


@pytest.mark.parametrize("played, left", [((), ["2", "4"]), ((4,), ["2"]), ((2, 4), [])])
def test_the_best_and_the_final_policies_are_played_on_test_once(jobs, played, left):
    leave(jobs[0], played=played)  # the score falls from step 2 to step 4
    commands = list(jobs[0].testing(1))
    assert [command[2] for command in commands] == [f"--checkpoint={step}" for step in left]
    assert len(list(jobs[0].testing(2))) == 2  # of another number of samples


# ---------------------------------------------------------------- at work


@pytest.fixture
def worked(monkeypatch):
    """What is run, by module and folder, instead of running it; `does` may leave folders and give exit codes."""

    def run(jobs, does, samples=1):
        ran, said = [], []
        by_folder = {f"--workdir={job.folder}": job for job in jobs}

        def instead(command, stop):
            job = next(by_folder[word] for word in command if word in by_folder)
            ran.append((command[0].removeprefix("experiments."), job.cell, job.config.seed))
            return does(job, command[0].removeprefix("experiments."), stop)

        monkeypatch.setattr(matrix, "_run", instead)
        return matrix.work(jobs, samples, said.append), ran, said

    return run


def test_what_is_left_is_done_in_order_and_what_fails_does_not_hold_up_the_rest(jobs, worked):
    shared, isolated, shared_1, isolated_1 = jobs
    leave(shared, played=(2, 4))

    def does(job, module, stop):
        if module == "train" and job is isolated:
            return 2
        if module == "train":
            leave(job)
        return int(module == "evaluate" and job is isolated_1)

    with folder.open_folder(shared_1.folder):
        trouble, ran, said = worked(jobs, does)
    assert ran == [
        ("train", "voting-isolated-xs-math", 0),
        ("train", "voting-isolated-xs-math", 1),
        *[("evaluate", "voting-isolated-xs-math", 1)] * 2,
    ]
    assert trouble == [
        "voting-isolated-xs-math, seed 0: training ended with exit code 2",
        "voting-shared-xs-math, seed 1: another process is at it",
        *["voting-isolated-xs-math, seed 1: the evaluation ended with exit code 1"] * 2,
    ]
    assert said[0] == "[1/4] voting-shared-xs-math, seed 0: done" and len(said) == 4
    trouble, ran, _ = worked([shared_1], lambda job, module, stop: leave(job) or 0, samples=0)
    assert trouble == [] and len(ran) == 1


def test_a_training_that_was_stopped_from_outside_is_told(jobs, worked):
    trouble, _, _ = worked(jobs[:1], lambda job, module, stop: leave(job, steps=3) or 0)
    assert trouble == ["voting-shared-xs-math, seed 0: training was stopped"]


def test_once_asked_to_stop_nothing_else_is_begun(jobs, worked):
    def does(job, module, stop):
        stop.asked = True
        return 0

    trouble, ran, _ = worked(jobs, does)
    assert trouble is None and len(ran) == 1


CHILD = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("there", flush=True)
time.sleep(60)
"""


def test_a_child_is_asked_to_stop_once_and_its_exit_code_is_handed_on(tmp_path, monkeypatch):
    (tmp_path / "slow_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Stop() as stop:
        stop.asked = True
        assert matrix._run(["slow_child"], stop) in (5, -signal.SIGTERM)  # before it listens or after
    with Stop() as stop:
        assert matrix._run(["no_such_module"], stop) == 1


def test_a_matrix_that_is_asked_to_stop_passes_it_on_and_ends_well(tmp_path):
    """The whole script, with a training that only listens."""
    program = (
        "import sys\n"
        "from marl_jax.study import matrix\n"
        "matrix.Job.training = property(lambda job: ['slow_child'])\n"
        "from absl import flags\n"
        "from experiments import cli, matrix as script\n"
        "cli.run(script.main, read=script.read)\n"
    )
    (tmp_path / "slow_child.py").write_text(CHILD)
    (tmp_path / "matrix_script.py").write_text(program)
    arguments = [f"--config={MICRO}", f"--root={tmp_path / 'runs'}", f"--cells={TWO}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(script.ROOT)])}
    running = subprocess.Popen(
        [sys.executable, "-m", "matrix_script", *arguments],
        cwd=script.ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert running.stdout is not None and running.stdout.readline() == "there\n"
        begun = time.monotonic()
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=30) == 0 and time.monotonic() - begun < 20
        assert running.stdout.read() == ""  # no other was begun
    finally:
        running.kill()
        running.stdout.close()


def test_a_dry_run_says_what_there_is_to_do_and_does_nothing(tmp_path, capfd):
    asked = [f"--config={MICRO}", f"--root={tmp_path / 'runs'}", f"--cells={TWO}", "--config.steps=4"]
    leave(make_jobs(MICRO, [("steps", "4")], tmp_path / "runs", TWO)[0], steps=3)
    assert script.run("experiments.matrix", *asked, "--seeds=2", "--dry_run") == 0
    out = capfd.readouterr().out
    assert f"2 cells x 2 seeds = 4 runs in {tmp_path / 'runs'}; left on CPU: about " in out
    rows = [line.split("  ")[0] for line in out.splitlines()]
    assert "voting-shared-xs-math" in rows and "step 3 of 4       –" in out
    assert not (tmp_path / "runs" / "voting-isolated-xs-math").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--root=x"], "--config is missing: give --config=FILE"),
        ([f"--config={MICRO}"], "--root is missing: give the directory"),
        ([f"--config={MICRO}", "--root=x", "--seeds=0"], "flag --seeds=0"),
        ([f"--config={MICRO}", "--root=x", "--test_samples=-1"], "flag --test_samples=-1"),
        ([f"--config={MICRO}", "--root=x", "more"], "'more' is no flag"),
    ],
)
def test_the_script_refuses_what_it_cannot_do(capfd, arguments, message):
    assert script.run("experiments.matrix", *arguments) == 2
    out, error = capfd.readouterr()
    assert not out and message in error
