"""Jobs of a matrix on a cluster: what is submitted again and what is not; submitit and Ray on this machine."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from marl_jax.commands import run_matrix
from marl_jax.config.run_config import ConfigError
from marl_jax.run_folder.json_lines import last_complete_step, read_lines
from marl_jax.study.jobs import launchers, matrix
from marl_jax.study.jobs.launchers import LauncherError, Work, launch
from marl_jax.study.jobs.matrix import Kind, State, make_jobs

SMALL = (
    ("data.problems", "4"),
    ("rollout.samples", "2"),
    ("evaluation.every", "0"),
    ("checkpoints.best", "false"),
    ("logging.tensorboard", "false"),
)


def jobs_of(root, steps, cells="single-shared-xs-math", seeds=1, texts=SMALL):
    return make_jobs("configs/micro.py", (*texts, ("steps", str(steps))), root, cells, seeds)


class Node:
    """A handle that has ended; it left the run at a step, or raised."""

    def __init__(self, returns):
        self.returns, self.cancelled = returns, False

    def done(self):
        return self.cancelled or self.returns != "busy"

    def result(self):
        if isinstance(self.returns, Exception):
            raise self.returns
        return self.returns

    def cancel(self):
        self.cancelled = True


@pytest.fixture
def cluster(monkeypatch):
    """{name: of each submission the state after it and what it returns, perhaps the newest checkpoint and how many
    evaluations are left}; the names that were submitted."""
    submitted, steps, left = [], {}, {}

    def begin(courses):
        def submit(works):
            submitted.append([job.name for work in works for job in work.jobs])
            return [Node([ended(job) for job in work.jobs][-1]) for work in works]

        def ended(job):
            state, returns, *files = courses[job.name].pop(0)
            if state is None:
                raise returns
            steps[job.name] = state
            saved, left[job.name] = files or (0, 0)
            (job.folder / "checkpoints" / str(saved)).mkdir(parents=True, exist_ok=True)
            return returns

        def states(job):  # before its submission a job is where the last one left it
            return steps.get(job.name, State(Kind.NEW))

        monkeypatch.setattr(launchers, "_submitit", lambda folder, options: submit)
        monkeypatch.setattr(launchers, "POLL_S", 0.0)
        monkeypatch.setattr(matrix, "state", states)
        monkeypatch.setattr(matrix.Job, "testing", lambda job, samples: ["evaluate"] * left.get(job.name, 0))
        return submitted

    return begin


def test_a_job_that_was_stopped_is_submitted_again_as_long_as_it_gets_further(tmp_path, cluster):
    one, other, third = jobs_of(tmp_path, 9, seeds=3)
    told = []
    submitted = cluster(
        {
            one.name: [
                (State(Kind.BEGUN, 3), None),
                (State(Kind.BEGUN, 6), OSError("lost")),
                (State(Kind.DONE, 9), []),
            ],
            other.name: [(State(Kind.DONE, 9), ["the evaluation ended with exit code 1"])],
            third.name: [(State(Kind.NEW), RuntimeError("no such partition"))],
        }
    )
    trouble = launch("submitit", [one, other, third], 1, tmp_path, told.append, {})
    assert submitted[0] == [one.name, other.name, third.name]
    assert trouble[0] == "the evaluation ended with exit code 1" and "no such partition" in trouble[1]
    assert any("step 3" in line for line in told) and any("done" in line for line in told)


BEGUN, DONE = (lambda step: State(Kind.BEGUN, step)), State(Kind.DONE, 20)


@pytest.mark.parametrize(
    ("course", "trouble"),
    [
        # Killed at step 15, went on from 10, and was asked to stop at 14.
        ([(BEGUN(15), OSError("lost"), 10, 0), (BEGUN(14), None, 14, 0), (DONE, [], 20, 0)], []),
        ([(BEGUN(15), None, 10, 0), (BEGUN(12), None, 10, 0)], ["it ended without progress (step 12)"]),
        ([(DONE, None, 20, 2), (DONE, None, 20, 1), (DONE, [], 20, 0)], []),  # stopped while it evaluated
        ([(DONE, None, 20, 2), (DONE, None, 20, 2)], ["evaluations on test are missing (2)"]),
        # Another process is at it and gets further: what this one submits has nothing to do.
        ([(State(Kind.IN_USE, 15), None, 10, 0)], ["it ended without progress"]),
        ([(DONE, ["no memory"], 20, 1), (DONE, ["no memory"], 20, 1)], ["no memory"]),
    ],
)
def test_what_is_left_of_a_job_is_submitted_until_nothing_comes_of_it(tmp_path, cluster, course, trouble):
    (job,) = jobs_of(tmp_path, 20)
    submitted = cluster({job.name: [*course]})
    told = launch("submitit", [job], 4, tmp_path / "logs", lambda text: None, {})
    assert len(submitted) == len(course) and len(told) == len(trouble)
    assert all(part in line for part, line in zip(trouble, told))


def test_seeds_that_train_side_by_side_are_one_job(tmp_path, cluster):
    texts = (*SMALL, ("seeds", "2"))
    jobs = [
        job
        for cell in ("single", "voting")
        for job in jobs_of(tmp_path, 20, f"{cell}-shared-xs-math", 1, texts)
    ]
    submitted = cluster({job.name: [(DONE, [], 20, 0)] for job in jobs})
    assert launch("submitit", jobs, 4, tmp_path / "logs", lambda text: None, {}) == []
    assert submitted == [[job.name for job in jobs]]
    assert [len(group) for group in launchers._side_by_side(jobs)] == [2, 2]


def test_a_scheduler_that_is_away_for_a_while_is_asked_again(tmp_path, cluster, monkeypatch):
    (job,) = jobs_of(tmp_path, 20)
    away = (None, RuntimeError("Socket timed out"))
    course = [(BEGUN(5), None, 5, 0), away, away, (DONE, [], 20, 0)]
    submitted, told = cluster({job.name: [*course]}), []
    assert launch("submitit", [job], 4, tmp_path / "logs", told.append, {}) == []
    assert len(submitted) == 4
    assert [line for line in told if "timed out" in line] == [
        "submitit did not accept a job: Socket timed out; trying again for 10 minutes"
    ]
    monkeypatch.setattr(launchers, "AGAIN_S", -1.0)
    (other,) = jobs_of(tmp_path / "other", 20)
    cluster({other.name: [course[0], away]})
    with pytest.raises(LauncherError, match="Socket timed out"):
        launch("submitit", [other], 4, tmp_path / "logs", told.append, {})


@pytest.mark.parametrize("name", ["submitit", "ray"])
def test_a_launcher_that_is_not_installed_says_what_to_install(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(LauncherError, match=f"pip install {name}$"):
        launch(name, jobs_of(tmp_path, 2), 0, tmp_path, print, {})


# What submitit calls on a SLURM cluster. Tasks of an array run here at once, and leave the script in `submitted`.
SLURM = {
    "sbatch": """
        cp "$1" {place}/submitted
        last=$(sed -n 's/#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p' "$1")
        export SLURM_JOB_ID=7 SLURM_ARRAY_JOB_ID=7 SLURM_JOB_NODELIST=here
        for k in $(seq 0 ${last:-0}); do SLURM_ARRAY_TASK_ID=$k bash "$1" > /dev/null 2>&1 & done
        echo Submitted batch job 7
    """,
    "srun": """
        while [ "$1" != --error ]; do shift; done
        export SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1 SLURM_NNODES=1 SLURM_NODEID=0
        exec "${@:3}"
    """,
    "sacct": "echo 'JobID|State|NodeList'",
    "scancel": "true",
}
REFUSING = SLURM | {"sbatch": "echo 'sbatch: error: invalid partition specified: none' >&2; exit 1"}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Puts programs of these names and texts before all others; the folder that they know."""

    def install(programs):
        place = tmp_path / "slurm"
        place.mkdir()
        for name, text in programs.items():
            (place / name).write_text(f"#!/bin/bash\n{text.replace('{place}', str(place))}\n")
            (place / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")
        return place

    return install


def test_a_cluster_that_refuses_is_told_in_one_line(tmp_path, slurm):
    slurm(REFUSING)
    told = r"^submitit did not accept a job: sbatch: error: invalid partition specified: none$"
    with pytest.raises(LauncherError, match=told):
        launch("submitit", jobs_of(tmp_path, 2), 0, tmp_path / "logs", print, {"slurm_partition": "none"})


@pytest.mark.campaign
def test_all_runs_are_one_job_array_of_slurm(tmp_path, slurm):
    """Its programs are imitated; submitit and what it starts are not."""
    place, jobs = slurm(SLURM), jobs_of(tmp_path / "runs", 2, seeds=2)
    options = {"slurm_partition": "gpu", "gpus_per_node": 1, "timeout_min": 10}
    assert launch("submitit", jobs, 0, tmp_path / "logs", lambda text: None, options) == []
    assert [matrix.state(job).kind for job in jobs] == [Kind.DONE, Kind.DONE]
    asked = (place / "submitted").read_text()
    for flag in ("array=0-1%2", "partition=gpu", "gpus-per-node=1", "time=10", "signal=USR2@90"):
        assert f"#SBATCH --{flag}\n" in asked, asked


def test_a_run_of_several_hosts_is_no_job_of_a_matrix(tmp_path):
    with pytest.raises(ConfigError, match=r"mesh\.hosts is 2: a matrix plays each run in one process"):
        jobs_of(tmp_path, 2, texts=(*SMALL, ("mesh.hosts", "2")))


def test_a_cluster_that_is_not_there_is_told_in_one_line(tmp_path):
    with pytest.raises(LauncherError, match=r"^submitit cannot be used: Could not detect .srun"):
        launch("submitit", jobs_of(tmp_path, 2), 0, tmp_path, print, {"cluster": "slurm"})


def test_without_a_cluster_not_all_runs_start_at_once_here(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        LauncherError, match=r"finds no SLURM on this machine: .* --launcher_options=cluster=local"
    ):
        launch("submitit", jobs_of(tmp_path, 2), 0, tmp_path, print, {})


def test_options_without_a_launcher_are_refused():
    with pytest.raises(LauncherError, match="give a launcher, or leave them out"):
        run_matrix.options_of("local", ["cluster=local"])


def test_options_are_numbers_where_they_are_and_refused_without_a_value():
    texts = ["cluster=local", "gpus_per_node=2", "num_gpus=0.5", "slurm_mem=1.5G"]
    assert run_matrix.options_of("submitit", texts) == {
        "cluster": "local",
        "gpus_per_node": 2,
        "num_gpus": 0.5,
        "slurm_mem": "1.5G",
    }
    with pytest.raises(LauncherError, match="give NAME=VALUE"):
        run_matrix.options_of("ray", ["fast"])


def test_a_run_needs_the_memory_of_its_plan(tmp_path):
    (job,) = jobs_of(tmp_path, 2)
    (larger,) = jobs_of(tmp_path, 2, "single-shared-m-math")
    assert 0 < launchers.resources(job)["memory"] < launchers.resources(larger)["memory"]
    assert launchers.resources(job)["devices"] == 1


@pytest.mark.long
def test_submitit_plays_a_job_in_a_process_of_its_own(tmp_path):
    jobs = jobs_of(tmp_path / "runs", 2)
    options = {"cluster": "local", "timeout_min": 10}
    assert launch("submitit", jobs, 0, tmp_path / "logs", lambda text: None, options) == []
    assert matrix.state(jobs[0]).kind is Kind.DONE
    assert any("step 2/2" in path.read_text() for path in (tmp_path / "logs").glob("*.err"))


@pytest.mark.campaign
def test_a_preempted_job_saves_is_taken_up_again_and_ends_as_one_that_was_not(tmp_path):
    """submitit sends USR2 to a job whose node is wanted back; the run goes on from its last step."""
    import submitit

    (job,), (whole,) = (jobs_of(tmp_path / name, 40) for name in ("preempted", "whole"))
    executor = submitit.AutoExecutor(folder=tmp_path / "logs", cluster="local")
    executor.update_parameters(timeout_min=30)
    handle = executor.submit(Work((job,), 0))
    _reach(job, 3)
    controller = handle._process.pid  # SLURM signals the job itself; here it is the controller's child
    for task in Path(f"/proc/{controller}/task/{controller}/children").read_text().split():
        os.kill(int(task), signal.SIGUSR2)
    assert handle.result() == [] and matrix.state(job).kind is Kind.DONE
    assert "Calling checkpoint method" in "".join(p.read_text() for p in (tmp_path / "logs").glob("*_log.*"))
    assert Work((whole,), 0)() == []
    assert _numbers(job) == _numbers(whole)


@pytest.fixture(scope="module")
def ray():
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.campaign
def test_ray_plays_jobs_on_a_cluster_of_this_machine(tmp_path, ray):
    jobs = jobs_of(tmp_path / "runs", 2, seeds=2)
    assert launch("ray", jobs, 0, tmp_path / "logs", lambda text: None, {}) == []
    assert [matrix.state(job).kind for job in jobs] == [Kind.DONE, Kind.DONE]


@pytest.mark.campaign
def test_what_a_ray_refuses_or_cannot_place_is_told_in_one_line(tmp_path, ray, caplog):
    (job,) = jobs_of(tmp_path, 2)
    with pytest.raises(
        LauncherError, match=r"^ray did not accept a job: Invalid option keyword fast for remote functions"
    ):
        launch("ray", [job], 0, tmp_path, print, {"fast": 1})
    (task,) = launchers._ray(tmp_path, {"num_gpus": 3})([Work((job,), 0)])
    told = r"no node of this Ray has CPU 1, GPU 3, memory [\d.]+ .iB: .* --launcher_options may ask for less"
    assert re.search(told, caplog.text)
    task.cancel()


def _reach(job, step):
    for _ in range(3000):
        if last_complete_step(Path(job.folder) / "metrics.jsonl") >= step:
            return
        time.sleep(0.1)
    raise TimeoutError(f"{job.name} did not reach step {step}")


def _numbers(job):
    lines = read_lines(Path(job.folder) / "metrics.jsonl")
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]
