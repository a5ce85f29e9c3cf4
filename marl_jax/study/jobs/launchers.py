"""The jobs of a matrix on a cluster: submitit (SLURM) or Ray runs each on a node; their progress is shown here.

    jobs ──► one Work each ──► submitit's job array | Ray's tasks ──► matrix.work on the node ──► ROOT/CELL/seed-N
             (seeds side by side: one for all)

All nodes see ROOT on one disk, and no other state is kept: a job that was lost or stopped is submitted again as long as
it makes progress, and the same command continues after everything was stopped. Nothing here schedules.
"""

import contextlib
import dataclasses
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
from absl import logging

from marl_jax.errors import UserError
from marl_jax.planning import devices
from marl_jax.planning.plan import find_models, make_plan, show
from marl_jax.run_folder import checkpoints
from marl_jax.run_folder.folder import FolderError
from marl_jax.runs.stopping import Stop
from marl_jax.study.jobs import matrix
from marl_jax.study.jobs.matrix import Job, Kind

LAUNCHERS = ("local", "submitit", "ray")
POLL_S = 2.0
AGAIN_S = 600.0  # how long a scheduler may refuse a job that it took before, as while its controller restarts
SAVE_S = 60.0  # how long runs that were asked to end may take to save
Options = Mapping[str, Any]
Reached = tuple[int, int, int]  # the recorded step, the newest checkpoint's step, minus the evaluations left


class LauncherError(UserError, RuntimeError):
    """A launcher is not installed, or the cluster refuses; one line that says what to do."""


@dataclasses.dataclass(frozen=True)
class Work:
    """A function that is sent to a node: a job, or all jobs of a cell whose seeds train side by side."""

    jobs: tuple[Job, ...]
    samples: int
    # Paths in the configuration are relative to this directory.
    place: str = dataclasses.field(default_factory=os.getcwd)

    def __call__(self) -> list[str] | None:
        """Do the jobs; returns why some could not be done, or None if it was asked to stop."""
        os.chdir(self.place)
        return matrix.work(self.jobs, self.samples, lambda text: print(text, file=sys.stderr, flush=True))

    def checkpoint(self) -> Any:
        """submitit calls this on preemption or timeout: the run saves and ends, and the same work is resubmitted."""
        from submitit.helpers import DelayedSubmission

        matrix.end_running()
        return DelayedSubmission(self)


class Handle(Protocol):
    """A job that was submitted."""

    def done(self) -> bool:
        """Whether it has ended, in whatever way."""

    def result(self) -> list[str] | None:
        """The value that its work returned; raises the work's error."""

    def cancel(self) -> None:
        """Ask it to end."""


Submit = Callable[[Sequence[Work]], Sequence[Handle]]


def launch(
    launcher: str,
    jobs: Sequence[Job],
    samples: int,
    folder: Path,  # for the launcher's logs
    say: Callable[[str], None],
    options: Options,
) -> list[str] | None:
    """Do what is left of the jobs; returns why some could not be done, or None if this process was asked to stop."""
    with _one_line_errors(f"{launcher} cannot be used"):
        submit = {"submitit": _submitit, "ray": _ray}[launcher](folder, options)
    groups = _side_by_side(jobs)
    # By index in `groups`: its handle and how far its jobs were when it was sent; since when it waits to be sent again.
    pending: dict[int, tuple[Handle, list[Reached]]] = {}
    again: dict[int, float] = {}
    trouble, shown = list[str](), dict[str, str]()

    def send(indices: Sequence[int]) -> None:
        before = [[_reached(job, samples) for job in groups[i]] for i in indices]
        with _one_line_errors(f"{launcher} did not accept a job"):
            handles = submit([Work(groups[i], samples) for i in indices])
        pending.update(zip(indices, zip(handles, before)))

    send(range(len(groups)))
    with Stop() as stop:
        while (pending or again) and not stop.asked:
            for i, since in list(again.items()):
                if stop.asked:
                    break
                try:
                    send([i])
                except LauncherError as error:
                    if time.monotonic() - since > AGAIN_S:
                        raise
                    if shown.get(launcher) != str(error):
                        shown[launcher] = str(error)
                        say(f"{error}; trying again for {AGAIN_S / 60:.0f} minutes")
                else:
                    del again[i]
                    shown.pop(launcher, None)
            for i, (handle, before) in list(pending.items()):
                ended = handle.done()
                states = [matrix.state(job) for job in groups[i]]
                for job, state in zip(groups[i], states):
                    if shown.get(job.name) != str(state):
                        shown[job.name] = str(state)
                        say(f"[{jobs.index(job) + 1}/{len(jobs)}] {job.name}: {state}")
                if not ended:
                    continue
                del pending[i]
                lines = _trouble_of(handle, groups[i])
                now = [_reached(job, samples) for job in groups[i]]
                missing = [
                    f"{job.name}: {what}"
                    for job, state, reached in zip(groups[i], states, now)
                    if (what := _lacking(state, reached))
                ]
                progress = any(new > old for one, other in zip(now, before) for new, old in zip(one, other))
                if missing and progress and all(state.kind is not Kind.IN_USE for state in states):
                    again[i] = time.monotonic()
                elif missing and not lines:
                    trouble += [f"{what}; see the logs in {folder}" for what in missing]
                else:
                    trouble += lines
            time.sleep(POLL_S)
        for handle, _ in pending.values():
            handle.cancel()
        until = time.monotonic() + SAVE_S  # jobs that end with this process may still be saving
        while time.monotonic() < until and not all(handle.done() for handle, _ in pending.values()):
            time.sleep(POLL_S)
    return None if stop.asked else trouble


def _trouble_of(handle: Handle, jobs: Sequence[Job]) -> list[str]:
    """Why the work of an ended job could not be done: its own lines, or its error for each of its jobs."""
    try:
        return handle.result() or []
    except Exception as error:
        last = (str(error).strip().splitlines() or [""])[-1]
        return [f"{job.name}: {type(error).__name__}: {last}" for job in jobs]


def _side_by_side(jobs: Sequence[Job]) -> list[tuple[Job, ...]]:
    """Each job alone; seeds that one process trains are one group."""
    groups: dict[Path, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.folder if job.config.seeds == 1 else job.folder.parent, []).append(job)
    return [tuple(some) for some in groups.values()]


def _lacking(state: matrix.State, reached: Reached) -> str:
    """What a job that ended has left undone; empty if nothing."""
    if state.kind is not Kind.DONE:
        return f"it ended without progress ({state})"
    return f"evaluations on test are missing ({-reached[-1]})" if reached[-1] else ""


def _reached(job: Job, samples: int) -> Reached:
    """How far a job is. The recorded step may be earlier than the checkpoint from which the job continues."""
    step, saved, left = matrix.state(job).step, checkpoints.steps(job.folder / "checkpoints"), 0
    with contextlib.suppress(FolderError):  # the job reports it itself
        left = len(list(job.testing(samples))) if samples else 0
    return step, max(saved, default=0), -left


@contextlib.contextmanager
def _one_line_errors(what: str) -> Iterator[None]:
    """Turn any error of a scheduler into a LauncherError of one line."""
    try:
        yield
    except LauncherError:
        raise
    except Exception as error:
        raise LauncherError(f"{what}: {' '.join(str(error).split()) or type(error).__name__}") from None


def resources(job: Job) -> dict[str, float]:
    """What a run needs of a node by its plan for this host: devices, and bytes of memory at the peak.

    The plan is for this host's CPU, since looking at a GPU would take it from the runs.
    """
    jax.config.update("jax_platforms", "cpu")  # has no effect if JAX was initialised before
    plan = make_plan(job.config, find_models(job.config)[0], devices.here())
    return {"devices": job.config.mesh.data * job.config.mesh.model, "memory": float(plan.total)}


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise LauncherError(f"--launcher={name} needs {name}: pip install {name}") from None


def _submitit(folder: Path, options: Options) -> Submit:
    """Submit a job array; options are those of `executor.update_parameters`, and cluster=slurm|local."""
    executor = _package("submitit").AutoExecutor(folder=folder, cluster=options.get("cluster"))
    if executor.cluster == "local" and "cluster" not in options:  # its processes would all start at once
        raise LauncherError(
            "--launcher=submitit finds no SLURM on this machine: run it where sbatch is, leave --launcher out to "
            "play one run after another here, or give --launcher_options=cluster=local to start all of them"
        )
    parameters = {name: value for name, value in options.items() if name != "cluster"}

    def submit(works: Sequence[Work]) -> Sequence[Handle]:
        defaults = {"name": "marl_jax", "timeout_min": 60 * 24}
        if not any("mem" in name for name in parameters):
            memory = max(resources(work.jobs[0])["memory"] for work in works)
            defaults["mem_gb"] = 2 + 2 * memory / 2**30
        executor.update_parameters(**{**defaults, **parameters})
        with executor.batch():
            return [executor.submit(work) for work in works]

    return submit


def _ray(folder: Path, options: Options) -> Submit:
    """Submit a task for each work; options are those of a remote function, and address."""
    ray = _package("ray")
    if not ray.is_initialized():
        ray.init(address=options.get("address"), log_to_driver=False, include_dashboard=False)
    parameters = {name: value for name, value in options.items() if name != "address"}

    def submit(works: Sequence[Work]) -> Sequence[Handle]:
        handles: list[Handle] = []
        for work in works:
            needs = resources(work.jobs[0])
            kind = "num_gpus" if ray.cluster_resources().get("GPU") else "num_cpus"
            wanted = {kind: needs["devices"], "memory": int(needs["memory"]), "max_retries": 0, **parameters}
            _warn_of_waiting(ray, wanted)
            handles.append(_RayTask(ray, ray.remote(**wanted)(lambda work=work: work()).remote()))
        return handles

    return submit


def _warn_of_waiting(ray: Any, wanted: Options) -> None:
    """If no node can take a task, Ray waits silently, because such a node may join."""
    names = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
    needs = {name: wanted[option] for option, name in names.items() if option in wanted}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(name, 0) >= amount for name, amount in needs.items()) for node in nodes):
        form = lambda name: show(needs[name]) if name == "memory" else f"{needs[name]:g}"
        text = ", ".join(f"{name} {form(name)}" for name in needs)
        logging.warning(
            "no node of this Ray has %s: the run waits until one joins; --launcher_options may ask for less",
            text,
        )


@dataclasses.dataclass(frozen=True)
class _RayTask:
    ray: Any
    task: Any

    def done(self) -> bool:
        return bool(self.ray.wait([self.task], timeout=0)[0])

    def result(self) -> list[str] | None:
        return self.ray.get(self.task)  # type: ignore[no-any-return]

    def cancel(self) -> None:
        self.ray.cancel(self.task)
