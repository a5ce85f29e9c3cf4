"""The study as a matrix: cells x seeds, each a run in a folder of its own, one after another.

    FILE ──► cells ──► jobs ──► ROOT/CELL/seed-N: train, then play the test split ──► ROOT/report.html

Every job is the commands that a person would type, each in a process of its own. The folders are the only memory:
the same matrix again goes on where it was stopped, and several processes or hosts on one disk share its jobs.
"""

import dataclasses
import difflib
import enum
import fnmatch
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from marl_jax.runs import checkpoints, folder
from marl_jax.runs.config import ConfigError, RunConfig, cells_of, load_config
from marl_jax.runs.metrics import read_lines
from marl_jax.runs.stopping import Stop

Texts = Sequence[tuple[str, str | None]]
SEEDS = "seed"  # the field in which the runs of a cell differ


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of the matrix."""

    spec: str  # FILE:CELL
    texts: Texts  # what the command line sets
    config: RunConfig
    folder: Path

    @property
    def cell(self) -> str:
        return self.spec.rpartition(":")[2]

    @property
    def name(self) -> str:
        return f"{self.cell}, seed {self.config.seed}"

    @property
    def training(self) -> list[str]:
        """What a person would type."""
        texts = [f"--config.{path}" + ("" if text is None else f"={text}") for path, text in self.texts]
        return [
            "experiments.train",
            f"--config={self.spec}",
            *texts,
            f"--workdir={self.folder}",
            "--noreport",
        ]

    def testing(self, samples: int) -> Iterator[list[str]]:
        """One command for the final and one for the best checkpoint, where they have not been played yet."""
        place = self.folder / "checkpoints"
        found = checkpoints.steps(place)
        played = {
            record["step"]
            for record in read_lines(self.folder / "eval.jsonl")
            if record.get("split") == "test"
            and record.get("mode") == "trained"
            and record.get("samples") == samples
        }
        for step in dict.fromkeys([checkpoints.best_of(place, found), *found[-1:]]):
            if step and step not in played:
                yield [
                    "experiments.evaluate",
                    f"--workdir={self.folder}",
                    f"--checkpoint={step}",
                    f"--samples={samples}",
                ]


def make_jobs(spec: str, texts: Texts, root: Path, cells: str = "*", seeds: int = 1) -> list[Job]:
    """The runs of all cells of FILE that fit one of the patterns, the first seed of every cell first.

    Seeds count up from the configuration's. Whatever is wrong with any cell is refused, all of it at once.
    """
    names = _chosen(spec, cells)
    file = spec.rpartition(":")[0] if ":" in spec else spec
    own = [(path, text) for path, text in texts if path != SEEDS]
    wrong: dict[str, list[str]] = {}
    configs: dict[str, RunConfig] = {}
    for name in names:
        try:
            config = load_config(f"{file}:{name}", texts)
            dataclasses.replace(config, seed=config.seed + seeds - 1)  # refused if it is too large
            configs[name] = config
        except ConfigError as error:
            for problem in error.problems:
                wrong.setdefault(problem, []).append(name)
    if wrong:
        raise ConfigError([_in_cells(problem, some, names) for problem, some in wrong.items()])
    jobs = []
    for more in range(seeds):
        for name, config in configs.items():
            seed = config.seed + more
            jobs.append(
                Job(
                    f"{file}:{name}",
                    (*own, (SEEDS, str(seed))),
                    dataclasses.replace(config, seed=seed),
                    root / name / f"seed-{seed}",
                )
            )
    return jobs


def _chosen(spec: str, patterns: str) -> list[str]:
    names = cells_of(spec)
    chosen: dict[str, None] = {}
    for pattern in patterns.split(","):
        fitting = fnmatch.filter(names, pattern.strip())
        if not fitting:
            close = difflib.get_close_matches(pattern, names, 1, 0.3)
            hint = f": did you mean '{close[0]}'?" if close else f", such as {names[0]}"
            raise ConfigError([f"--cells={pattern} fits none of the {len(names)} cells{hint}"])
        chosen |= dict.fromkeys(fitting)
    return [name for name in dict.fromkeys(names) if name in chosen]


def _in_cells(problem: str, some: Sequence[str], names: Sequence[str]) -> str:
    if len(some) == len(names):
        return problem
    return f"{problem} ({', '.join(some[:3])}{f' and {len(some) - 3} more' if len(some) > 3 else ''})"


# ---------------------------------------------------------------- how far a job is


class Kind(enum.Enum):
    NEW = "–"
    BEGUN = "begun"
    DONE = "done"
    CHANGED = "another configuration"
    IN_USE = "in use"


@dataclasses.dataclass(frozen=True)
class State:
    """What the folder of a job says."""

    kind: Kind
    step: int = 0
    steps: int = 0
    changes: Sequence[str] = ()

    def __str__(self) -> str:
        return f"step {self.step} of {self.steps}" if self.kind is Kind.BEGUN else self.kind.value


def state(job: Job) -> State:
    """How far its training is."""
    place, steps = job.folder, job.config.steps
    if not (place / folder.CONFIG).exists():
        return State(Kind.IN_USE if folder.in_use(place) else Kind.NEW, 0, steps)
    changes = folder.differences(folder.read(place)["config"], job.config.to_json())
    if changes:
        return State(Kind.CHANGED, 0, steps, changes)
    if folder.in_use(place):
        return State(Kind.IN_USE, 0, steps)
    saved = checkpoints.steps(place / "checkpoints")[-1:]
    if saved and saved[0] >= steps:
        return State(Kind.DONE, steps, steps)
    lines = list(read_lines(place / "metrics.jsonl"))
    return State(Kind.BEGUN, int(lines[-1]["step"]) if lines else 0, steps)


def check(jobs: Sequence[Job]) -> None:
    """Refuse a matrix with a run that was begun under another configuration."""
    found = [(job, state(job)) for job in jobs]
    lines = [f"  {job.folder}: {'; '.join(of.changes)}" for job, of in found if of.kind is Kind.CHANGED]
    if lines:
        raise folder.FolderError(
            "these runs were begun with something else:\n"
            + "\n".join(lines)
            + "\nask for what they were begun with, or choose another --root"
        )


# ---------------------------------------------------------------- at work


def work(jobs: Sequence[Job], samples: int, say: Callable[[str], None]) -> list[str] | None:
    """Do what is left to do, job by job; why some could not be done, or None where it was asked to stop.

    `samples` episodes of every test problem are played by the final and the best policies; 0: none. A job that
    another process is at is left to it.
    """
    trouble = []
    with Stop() as stop:
        for number, job in enumerate(jobs, 1):
            found = state(job)
            say(f"[{number}/{len(jobs)}] {job.name}: {found}")
            if found.kind is Kind.IN_USE:
                trouble.append(f"{job.name}: another process is at it")
                continue
            if found.kind is not Kind.DONE:
                code = _run(job.training, stop)
                if stop.asked:
                    return None
                if code or state(job).kind is not Kind.DONE:
                    trouble.append(f"{job.name}: training {_ended(code)}")
                    continue
            for command in job.testing(samples) if samples else ():
                if code := _run(command, stop):
                    trouble.append(f"{job.name}: the evaluation {_ended(code)}")
                if stop.asked:
                    return None
    return trouble


def _run(command: Sequence[str], stop: Stop) -> int:
    """A module in a process of its own, which is asked to stop when this one is; its exit code."""
    # In a group of its own, so that Ctrl-C comes to it once, from here: a second one would end it at once.
    child = subprocess.Popen([sys.executable, "-m", *command], process_group=0)
    try:
        while True:
            try:
                return child.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                if stop.asked:
                    child.terminate()
                    return child.wait()
    except BaseException:  # asked a second time
        child.kill()
        child.wait()
        raise


def _ended(code: int) -> str:
    return f"ended with exit code {code}" if code else "was stopped"
