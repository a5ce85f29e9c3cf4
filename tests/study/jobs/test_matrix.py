"""A matrix asks for the runs that it says, does what is left to do, and leaves alone what is not its own."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import script

from marl_jax.config.run_config import ConfigError, VllmConfig, from_argv
from marl_jax.run_folder import folder
from marl_jax.run_folder.files import write_atomically
from marl_jax.runs.stopping import TOGETHER_S, Stop
from marl_jax.study.jobs import matrix
from marl_jax.study.jobs.matrix import Kind, make_jobs

MICRO = "configs/micro.py"
TWO = "voting-*-xs-math"


@pytest.fixture
def jobs(tmp_path):
    return make_jobs(MICRO, [("steps", "4")], tmp_path, TWO, seeds=2)


def leave(job, steps=4, played=(), **config):
    """The folder of a job as its training leaves it; `played` are changes to records of the test split."""
    record = {"config": {**job.config.to_json(), **config}, "digests": {}, "versions": {}, "settled": {}}
    (job.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    write_atomically(job.folder / "config.json", json.dumps({**record, "changes": []}))
    lines = "".join(json.dumps({"step": step}) + "\n" for step in range(1, steps + 1))
    write_atomically(job.folder / "metrics.jsonl", lines)
    for step in range(2, steps + 1, 2):
        save(job, step, score=1 / step)
    whole = {"split": "test", "mode": "trained", "samples": 1, "seed": 0, "problems": 9, "of_problems": 9}
    lines = "".join(json.dumps({**whole, **changes}) + "\n" for changes in played)
    write_atomically(job.folder / "eval.jsonl", lines)


def save(job, step, score):
    seal = {"step": step, "score": score, "data": {}, "numbers": {}, "files": {}}
    place = job.folder / "checkpoints" / str(step)
    place.mkdir(exist_ok=True)
    (place / "seal.json").write_text(json.dumps(seal))


# ---------------------------------------------------------------- which runs


def test_seeds_side_by_side_are_trained_by_one_command_and_tested_each(tmp_path):
    jobs = make_jobs(
        MICRO, [("steps", "4"), ("seeds", "3"), ("seed", "5")], tmp_path, "voting-shared-xs-math"
    )
    assert [job.folder.name for job in jobs] == ["seed-5", "seed-6", "seed-7"]
    assert {(job.config.seed, job.config.seeds) for job in jobs} == {(5, 3), (6, 3), (7, 3)}
    [command] = {tuple(job.training) for job in jobs}
    assert f"--workdir={tmp_path / 'voting-shared-xs-math'}" in command and "--config.seeds=3" in command
    assert from_argv(command)[0] == jobs[0].config
    leave(jobs[1])
    assert [matrix.state(job).kind for job in jobs] == [Kind.NEW, Kind.DONE, Kind.NEW]
    with pytest.raises(ConfigError, match=r"--seeds=2 and --config\.seeds=3 are both set"):
        make_jobs(MICRO, [("seeds", "3")], tmp_path, TWO, seeds=2)


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
        assert rest == ["marl_jax", "train", f"--workdir={job.folder}", "--noreport"]


@pytest.mark.long
def test_cells_are_those_that_fit_a_pattern_in_the_order_of_the_file(tmp_path):
    cells = lambda spec, patterns="*": [job.cell for job in make_jobs(spec, [], tmp_path, patterns)]
    assert cells(MICRO, "voting-shared-xs-*, single-*-xs-math,*-xs-math")[:2] == [
        "single-shared-xs-math",
        "voting-shared-xs-math",
    ]
    assert len(cells(MICRO, "*")) == len(set(cells(MICRO, "*"))) == 69
    of_study = [job.cell for job in make_jobs(MICRO, [], tmp_path)]  # without a pattern
    assert of_study == cells(MICRO, "study") and len(set(of_study)) == 54
    assert not any(name.startswith(("debate", "planner_coder", "self_refine")) for name in of_study)
    assert len(cells("configs/study.py", "voting-*-4b-*")) == 4
    assert cells(f"{MICRO}:eval_opt-shared-m-code") == ["eval_opt-shared-m-code"]
    assert cells(MICRO, "single-isolated-s-math") == cells(f"{MICRO}:single-isolated-s-math")
    assert cells(MICRO, "single-isolated-s-math") == ["single-shared-s-math"]


def test_a_cell_that_its_file_makes_and_does_not_list_keeps_what_is_changed_in_it(tmp_path):
    """It has the name of the unchanged cell in its configuration."""
    file, name = "configs/findings.py", "single-shared-s-math+short"
    with pytest.raises(ConfigError, match=rf"fits none of the .* cells; one .* is --config={file}:.*\+short"):
        make_jobs(file, [], tmp_path, cells=name)
    (job,) = make_jobs(f"{file}:{name}", [], tmp_path)
    assert job.folder == tmp_path / name / "seed-0" and job.config.steps == 10


@pytest.mark.parametrize(
    "spec, texts, patterns, message",
    [
        (MICRO, (), "votng-*-xs-math", "fits none of the 69 cells: did you mean 'voting-"),
        (
            f"{MICRO}:voting-shared-s-math",
            (),
            TWO,
            "names a cell, --cells=voting-.* others: leave one of them out",
        ),
        (MICRO, [("steps", "0")], TWO, "steps is 0, so that there is nothing to train"),
        (MICRO, (), "*,", "--cells= fits none of the 69 cells, such as single-shared-xs-math"),
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
        (
            "tests/study/jobs/misspelt_sets.py",
            (),
            "all",
            "SETS of '.*' has 'single-shared-xs-maths' in 'all', which is none of its CELLS: did you mean",
        ),
        ("configs/none.py", (), "*", "there is no file 'configs/none.py'"),
        ("tests/runs/tiny_run.py", (), "*", "defines no CELLS; define it, or give --config="),
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
    states = ", ".join(str(matrix.state(job)) for job in jobs)
    assert states == "done, step 3, begun with another configuration, –"
    with folder.open_folder(new.folder), folder.open_folder(begun.folder):
        assert matrix.state(new).kind is matrix.state(begun).kind is Kind.IN_USE
        assert str(matrix.state(begun)) == "step 3, in use"
    assert matrix.state(new).kind is Kind.NEW and matrix.state(begun).kind is Kind.BEGUN
    with pytest.raises(folder.FolderError, match=rf"\n  {changed.folder}: seed: 5 -> 1\nuse the earlier"):
        matrix.check(jobs)
    matrix.check([done, begun, new])
    accepted = dataclasses.replace(changed, accept_changes=True)
    matrix.check([accepted])
    assert matrix.state(accepted).kind is Kind.DONE and "--accept_changes" in accepted.training
    engine = done.config.to_json()["engine"]
    moved = engine | {"vllm": engine["vllm"] | {"url": "http://127.0.0.1:8001"}}
    leave(done, alarms="stop", engine=moved)  # as `train` goes on with
    assert matrix.state(done).kind is Kind.DONE


def test_a_start_that_came_to_nothing_is_none(jobs):
    leave(jobs[0], steps=0, seed=5)
    assert matrix.state(jobs[0]).kind is Kind.NEW


def test_a_run_whose_last_checkpoint_is_not_whole_goes_on_and_one_without_any_is_left_alone(jobs):
    leave(jobs[0])
    (jobs[0].folder / "checkpoints" / "4" / "seal.json").write_text("{")
    assert matrix.state(jobs[0]).kind is Kind.BEGUN
    shutil.rmtree(jobs[0].folder / "checkpoints")
    assert matrix.state(jobs[0]).kind is Kind.LOST


def test_a_run_that_was_stopped_in_its_last_evaluation_goes_on(jobs):
    leave(jobs[0], played=[{"step": 0, "split": "val"}])
    assert matrix.state(jobs[0]).kind is Kind.DONE
    save(jobs[0], 4, score=None)
    assert str(matrix.state(jobs[0])) == "step 4"
    write_atomically(jobs[0].folder / "eval.jsonl", "")  # there is nothing to evaluate on
    assert matrix.state(jobs[0]).kind is Kind.DONE


@pytest.mark.parametrize("file, text", [("config.json", "{"), ("metrics.jsonl", "{]\n")])
def test_a_folder_that_cannot_be_read_is_damaged(jobs, file, text):
    leave(jobs[0])
    (jobs[0].folder / file).write_text(text)
    found = matrix.state(jobs[0])
    assert found.kind is Kind.DAMAGED and file in found.problems[0]


def test_who_looks_whether_a_folder_is_in_use_keeps_nobody_out_of_it(jobs):
    jobs[0].folder.mkdir(parents=True)
    (jobs[0].folder / folder.LOCK).touch()
    stop = threading.Event()

    def look():
        while not stop.wait(0.001):
            folder.in_use(jobs[0].folder)

    looking = [threading.Thread(target=look) for _ in range(2)]
    for thread in looking:
        thread.start()
    try:
        for _ in range(300):
            with folder.open_folder(jobs[0].folder):
                assert folder.in_use(jobs[0].folder)
    finally:
        stop.set()
        for thread in looking:
            thread.join()


@pytest.mark.parametrize(
    "played, left",
    [
        ([], ["2", "4"]),
        ([{"step": 4}], ["2"]),
        ([{"step": 2}, {"step": 4}], []),
        ([{"step": 4, "split": "val"}, {"step": 2, "mode": "swapped"}], ["2", "4"]),
        ([{"step": 4, "problems": 5}, {"step": 2, "seed": 3}], ["2", "4"]),
        ([{"step": 2, "samples": 2}, {"step": 4, "samples": 2}], ["2", "4"]),
    ],
)
def test_the_best_and_the_final_policies_play_all_of_test_once(jobs, played, left):
    leave(jobs[0], played=played)  # the score falls from step 2 to step 4
    found = [command[3] for command in jobs[0].testing(1)]
    assert found == [f"--checkpoint={step}" for step in left]


def test_a_server_is_asked_where_it_is_now(jobs):
    leave(jobs[0])
    config = jobs[0].config
    url = ",".join(f"http://127.0.0.1:{8000 + n}" for n in range(len(config.policies.specs)))
    server = dataclasses.replace(config.engine, kind="vllm", vllm=VllmConfig(url=url))
    job = dataclasses.replace(jobs[0], config=dataclasses.replace(config, engine=server))
    commands = [*job.testing(1)]
    assert commands and all(f"--url={url}" in command for command in commands)


def test_tests_of_before_a_changed_workflow_are_not_those_of_now(jobs):
    leave(jobs[0], played=[{"step": 2}, {"step": 4}])
    file = jobs[0].folder / "config.json"
    record = json.loads(file.read_text())
    for change, left in (
        ("config.learner.epochs: 1, now 2", 0),
        ("config.workflow.settings.votes: 3, now 5", 2),
    ):
        file.write_text(json.dumps({**record, "changes": [[change]]}))
        assert len([*jobs[0].testing(1)]) == left


# ---------------------------------------------------------------- at work


@pytest.fixture
def worked(monkeypatch):
    """What is run, by module and folder, instead of running it; `does` may leave folders and give exit codes."""

    def run(jobs, does, samples=1):
        ran, said = [], []
        by_folder = {f"--workdir={job.folder}": job for job in jobs}

        def instead(command, stop):
            job = next(by_folder[word] for word in command if word in by_folder)
            ran.append((command[1], job.cell, job.config.seed))
            return does(job, command[1], stop)

        monkeypatch.setattr(matrix, "_run", instead)
        return matrix.work(jobs, samples, said.append), ran, said

    return run


def test_what_is_left_is_done_in_order_and_what_fails_does_not_hold_up_the_rest(jobs, worked):
    shared, isolated, shared_1, isolated_1 = jobs
    leave(shared, played=[{"step": 2}, {"step": 4}])

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
        "voting-isolated-xs-math, seed 0: training ended with exit code 2 (–)",
        *["voting-isolated-xs-math, seed 1: the evaluation ended with exit code 1"] * 2,
        "voting-shared-xs-math, seed 1: another process is working on it",
    ]
    assert said[0] == "[1/4] voting-shared-xs-math, seed 0: done"
    assert said[2] == said[4] == "[3/4] voting-shared-xs-math, seed 1: in use"
    trouble, ran, _ = worked([shared_1], lambda job, module, stop: leave(job) or 0, samples=0)
    assert trouble == [] and len(ran) == 1


def test_a_run_that_another_process_was_at_is_looked_at_again_at_the_end(jobs, worked):
    other = contextlib.ExitStack()
    other.enter_context(folder.open_folder(jobs[0].folder))

    def does(job, module, stop):
        leave(job)
        if job is jobs[1]:  # meanwhile
            leave(jobs[0])
            other.close()
        return 0

    trouble, ran, said = worked(jobs[:2], does, samples=0)
    assert trouble == [] and [name for _, name, _ in ran] == [jobs[1].cell]
    assert said[-1] == f"[1/2] {jobs[0].name}: done"


SAVER = """
import pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), (here / "saved").touch(), sys.exit()))
(here / "ready").touch()
time.sleep(60)
"""
PARENT = """
import sys
from marl_jax.runs.stopping import Stop
from marl_jax.study.jobs import matrix
with Stop(heard=matrix._ask_running) as stop:
    matrix._run(("saves_slowly", sys.argv[1]), stop)
"""


def test_a_run_is_asked_to_save_however_fast_a_second_signal_ends_the_matrix(tmp_path):
    (tmp_path / "saves_slowly.py").write_text(SAVER)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, tmp_path], env={**os.environ, "PYTHONPATH": path}
    )

    def appears(name):
        until = time.monotonic() + 60
        while not (tmp_path / name).exists():
            assert time.monotonic() < until, name
            time.sleep(0.05)

    appears("ready")
    for _ in range(2):
        parent.send_signal(signal.SIGTERM)
        time.sleep(TOGETHER_S + 0.05)
    assert parent.wait(60) == -signal.SIGTERM
    appears("saved")


def test_more_runs_than_can_be_looked_at_are_refused(tmp_path):
    with pytest.raises(
        ConfigError, match="2 cells and 1000000 seeds are more than 100000 runs: ask for fewer"
    ):
        make_jobs(MICRO, [], tmp_path, TWO, seeds=10**6)


def test_folders_that_are_damaged_or_of_something_else_are_told_and_passed_over(jobs, worked):
    for job in jobs[:3]:
        leave(job)
    (jobs[0].folder / "config.json").write_text("{")
    (jobs[1].folder / "eval.jsonl").write_text("{]\n")
    shutil.rmtree(jobs[2].folder / "checkpoints")
    trouble, ran, _ = worked(jobs, lambda job, module, stop: leave(job) or 0)
    assert [text.partition(": ")[0] for text in trouble] == [job.name for job in jobs[:3]]
    assert "config.json" in trouble[0] and "eval.jsonl" in trouble[1] and "no checkpoint" in trouble[2]
    assert {name for _, name, seed in ran if seed == 1} == {"voting-isolated-xs-math"}


def test_several_at_once_share_the_jobs_and_what_follows_them(jobs, monkeypatch):
    ran, trouble = [], []
    training = {"first": threading.Event(), "second": threading.Event()}

    def instead(command, stop):
        job, me = (
            next(job for job in jobs if f"--workdir={job.folder}" in command),
            threading.current_thread().name,
        )
        ran.append((command[1], job.name, me))
        if command[1] == "train":
            training[me].set()
            training["second"].wait(30)  # which comes by the job that the first is at
            leave(job)
        return 0

    def work():
        if threading.current_thread().name == "second":
            training["first"].wait(30)
        trouble.append(matrix.work(jobs[:2], 1, lambda text: None))

    monkeypatch.setattr(matrix, "_run", instead)
    both = [threading.Thread(target=work, name=name) for name in ("first", "second")]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(60)
    assert len([one for one in ran if one[0] == "train"]) == 2
    assert len(trouble) == 2
    assert all("another process is working on it" in text for some in trouble for text in some)


def test_a_training_that_was_stopped_from_outside_or_killed_is_told(jobs, worked):
    trouble, _, _ = worked(jobs[:1], lambda job, module, stop: leave(job, steps=3) or 0)
    assert trouble == ["voting-shared-xs-math, seed 0: training ended with exit code 0 (step 3)"]
    trouble, _, _ = worked(jobs[:1], lambda job, module, stop: -9)
    assert trouble == ["voting-shared-xs-math, seed 0: training was killed by signal 9 (step 3)"]
    job = dataclasses.replace(jobs[0], config=dataclasses.replace(jobs[0].config, alarms="stop"))
    trouble, _, _ = worked([job], lambda job, module, stop: leave(job, steps=3) or 0)
    assert "training was stopped by an alarm; --config.alarms=tell continues it (step 3)" in trouble[0]


def test_once_asked_to_stop_nothing_else_is_begun(jobs, worked):
    def does(job, module, stop):
        stop.asked = True
        return 0

    trouble, ran, _ = worked(jobs, does)
    assert trouble is None and len(ran) == 1


CHILD = """
import signal, sys, time
heard = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: heard.append(number))
print("there", flush=True)
for _ in range(600):
    time.sleep(0.1)
    if heard:
        time.sleep(1.0)
        print("heard", len(heard), flush=True)
        sys.exit(0)
"""


def test_the_exit_code_of_a_child_is_handed_on():
    with Stop() as stop:
        assert matrix._run(["no_such_module"], stop) == 1


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_matrix_that_is_asked_to_stop_asks_its_child_once_and_ends_well(tmp_path, number):
    """The whole script, with a training that only listens; the signal comes as from a terminal, to its group."""
    program = (
        "import sys\n"
        "from marl_jax.study.jobs import matrix\n"
        "matrix.Job.training = property(lambda job: ['slow_child'])\n"
        "from absl import flags\n"
        "from marl_jax.commands import cli\n"
        "from experiments import matrix as script\n"
        "cli.run(script.main, read=script.read)\n"
    )
    (tmp_path / "slow_child.py").write_text(CHILD)
    (tmp_path / "matrix_script.py").write_text(program)
    arguments = [f"--config={MICRO}", f"--root={tmp_path / 'runs'}", f"--cells={TWO}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(script.ROOT)])}
    # Children take over what is ignored, as it is under nohup.
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    running = subprocess.Popen(
        [sys.executable, "-m", "matrix_script", *arguments],
        cwd=script.ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    signal.signal(signal.SIGHUP, inherited)
    try:
        assert running.stdout is not None and running.stdout.readline() == "there\n"
        os.killpg(running.pid, number)
        assert running.wait(timeout=120) == 0
        assert running.stdout.read() == "heard 1\n"  # and no other was begun
    finally:
        running.kill()
        running.stdout.close()


def test_a_dry_run_says_what_there_is_to_do_and_does_nothing(tmp_path, capfd):
    asked = [f"--config={MICRO}", f"--root={tmp_path / 'runs'}", f"--cells={TWO}", "--config.steps=4"]
    leave(make_jobs(MICRO, [("steps", "4")], tmp_path / "runs", TWO)[0], steps=3)
    assert script.run("experiments.matrix", *asked, "--seeds=2", "--dry_run") == 0
    out = capfd.readouterr().out
    assert f"2 cells x 2 seeds = 4 runs in {tmp_path / 'runs'}; time left on CPU: about " in out
    rows = [line.split("  ")[0] for line in out.splitlines()]
    assert "voting-shared-xs-math" in rows and "step 3       –" in out
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
