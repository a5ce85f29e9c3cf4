"""The study as a matrix: cells x seeds, each a run in a folder of its own, one after another.

    FILE ──► cells ──► jobs ──► ROOT/CELL/seed-N: train, then play the test split ──► ROOT/report.html

Every job runs the commands that a person would type, each in a process of its own. No state is kept but the folders:
the same command continues a matrix that was stopped, and several processes or hosts on one disk share its jobs.
"""

import contextlib
import dataclasses
import enum
import fnmatch
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from marl_jax.config.run_config import ConfigError, RunConfig, cells_of, load_config, sets_of
from marl_jax.fields import nearest
from marl_jax.run_folder import checkpoints, folder
from marl_jax.run_folder.folder import FolderError, lock, path_errors
from marl_jax.run_folder.json_lines import last_complete_step, read_lines
from marl_jax.runs.stopping import Stop

MOST_RUNS = 100_000  # runs of a matrix; each is checked before the first begins
Texts = Sequence[tuple[str, str | None]]


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of the matrix."""

    spec: str  # FILE:CELL
    texts: Texts  # fields that the command line sets
    config: RunConfig
    folder: Path
    accept_changes: bool = False

    @property
    def cell(self) -> str:
        """The cell's name, without the file."""
        return self.spec.rpartition(":")[2]

    @property
    def name(self) -> str:
        """The cell and the seed, as they are shown."""
        return f"{self.cell}, seed {self.config.seed}"

    @property
    def training(self) -> list[str]:
        """The command that trains it, as a person would type it; seeds side by side have one command."""
        texts = [f"--config.{path}" + ("" if text is None else f"={text}") for path, text in self.texts]
        place = self.folder if self.config.seeds == 1 else self.folder.parent
        where = [f"--workdir={place}", "--noreport", *self._accept]
        return ["marl_jax", "train", f"--config={self.spec}", *texts, *where]

    def testing(self, samples: int) -> Iterator[list[str]]:
        """A command for the best and for the final checkpoint, each unless it has played all of test already."""
        place = self.folder / "checkpoints"
        found = checkpoints.steps(place)
        wanted = {"split": "test", "mode": "trained", "samples": samples, "seed": self.config.seed}
        played = {
            record["step"]
            for record in read_lines(self.folder / "eval.jsonl")
            if all(record.get(name) == value for name, value in wanted.items())
            and record.get("problems") == record.get("of_problems")
            and not folder.answers_changed(self.folder)  # then `evaluate` decides which lines are still valid
        }
        server = self.config.engine.vllm  # the run folder may have an older address
        where = [f"--url={server.url}"] if server.url and not server.start else []
        for step in dict.fromkeys([checkpoints.best_of(place, found), *found[-1:]]):
            if step and step not in played:
                which = [f"--checkpoint={step}", f"--samples={samples}", *where, *self._accept]
                yield ["marl_jax", "evaluate", f"--workdir={self.folder}", *which]

    @property
    def _accept(self) -> list[str]:
        return ["--accept_changes"] if self.accept_changes else []


def make_jobs(
    spec: str, texts: Texts, root: Path, cells: str = "", seeds: int = 1, accept_changes: bool = False
) -> list[Job]:
    """The runs of FILE:CELL, or of the cells of FILE that match a pattern; the first seed of every cell first.

    A pattern may be the name of a set. Without patterns, the first set of FILE is used, or all cells if it has no set.

    Seeds count up from the configuration's; with --config.seeds, the seeds of a cell train side by side.
    The errors of all cells are raised together.
    """
    file, _, cell = spec.partition(":")
    names = _chosen(file, cell, cells)
    wrong: dict[str, list[str]] = {}  # {problem: the cells that have it}
    configs: dict[str, RunConfig] = {}
    for name in names:
        try:
            configs[name] = _runnable(load_config(f"{file}:{name}", texts), seeds)
        except ConfigError as error:
            for problem in error.problems:
                wrong.setdefault(problem, []).append(name)
    if wrong:
        raise ConfigError([in_cells(problem, some, names) for problem, some in wrong.items()])
    count = max(seeds, *(config.seeds for config in configs.values()))
    if count * len(configs) > MOST_RUNS:
        raise ConfigError(
            [f"{len(configs)} cells and {count} seeds are more than {MOST_RUNS} runs: ask for fewer seeds"]
        )
    return [
        Job(
            f"{file}:{name}",
            (*texts, ("seed", str(config.seed + (offset if config.seeds == 1 else 0)))),
            dataclasses.replace(config, seed=config.seed + offset),
            root / name / f"seed-{config.seed + offset}",
            accept_changes,
        )
        for offset in range(count)
        for name, config in configs.items()
        if offset < max(seeds, config.seeds)
    ]


def _runnable(config: RunConfig, seeds: int) -> RunConfig:
    """The configuration, if a matrix can run it under `seeds` seeds."""
    dataclasses.replace(config, seed=config.seed + seeds - 1)  # refused if it is too large
    if config.seeds > 1 < seeds:
        raise ConfigError(
            [
                f"--seeds={seeds} and --config.seeds={config.seeds} are both set: leave out the first for "
                "seeds side by side, or the second for one run after another"
            ]
        )
    if not config.steps:
        raise ConfigError(["steps is 0, so that there is nothing to train: use experiments.evaluate"])
    if config.mesh.hosts > 1:
        raise ConfigError(
            [
                f"mesh.hosts is {config.mesh.hosts}: a matrix plays each run in one process, set it to 1, or "
                "start the processes of one run by experiments.train"
            ]
        )
    return config


def _chosen(file: str, cell: str, patterns: str) -> list[str]:
    names = cells_of(file)
    sets = sets_of(file)
    if not patterns:
        patterns = "*" if cell else next(iter(sets), "*")
    if cell and patterns == "*":
        return _named(file, cell, names) or [cell]
    if cell or not names:
        both = f"--config={file}:{cell} names a cell, --cells={patterns} others: leave one of them out"
        none = f"--cells={patterns} fits none: '{file}' defines no CELLS; define it, or give --config={file}:CELL"
        raise ConfigError([both if cell else none])
    chosen: set[str] = set()
    for pattern in map(str.strip, patterns.split(",")):
        matches = sets.get(pattern) or fnmatch.filter(names, pattern) or _named(file, pattern, names)
        if not matches:
            near = nearest(pattern, names, f", such as {names[0]}", 0.3)
            with contextlib.suppress(ConfigError):
                load_config(f"{file}:{pattern}")
                near = f"; one that the file makes and does not list is --config={file}:{pattern}"
            raise ConfigError([f"--cells={pattern} fits none of the {len(names)} cells{near}"])
        chosen.update(matches)
    return [name for name in dict.fromkeys(names) if name in chosen]


def _named(file: str, name: str, names: Sequence[str]) -> list[str]:
    """The listed cell of a name, which may be listed under another name: single-isolated-... is single-shared-...

    Empty if no listed cell has the configuration of that name.
    """
    if name in names:
        return [name]
    with contextlib.suppress(ConfigError):
        config = load_config(f"{file}:{name}")
        if config.cell in names and config == load_config(f"{file}:{config.cell}"):
            return [config.cell]
    return []


def in_cells(problem: str, some: Sequence[str], names: Sequence[str]) -> str:
    """A problem, with the cells that have it unless all have."""
    if len(some) == len(names):
        return problem
    return f"{problem} ({', '.join(some[:3])}{f' and {len(some) - 3} more' if len(some) > 3 else ''})"


# ---------------------------------------------------------------- how far a job is


class Kind(enum.Enum):
    """The kinds of states of a job's folder."""

    NEW = "–"
    BEGUN = "begun"
    DONE = "done"
    IN_USE = "in use"
    CHANGED = "begun with another configuration"
    LOST = "all steps, but no checkpoint"
    DAMAGED = "damaged"


@dataclasses.dataclass(frozen=True)
class State:
    """How far a job's training is, by its folder."""

    kind: Kind
    step: int = 0
    problems: Sequence[str] = ()  # faults of the folder, or fields that differ

    def __str__(self) -> str:
        if self.kind in (Kind.BEGUN, Kind.IN_USE) and self.step:
            return f"step {self.step}" + (", in use" if self.kind is Kind.IN_USE else "")
        return self.kind.value


def state(job: Job) -> State:
    """How far a job's training is."""
    try:
        with path_errors(job.folder, "make it readable, or move it away"):
            return _state(job)
    except FolderError as error:
        return State(Kind.DAMAGED, 0, [str(error)])


def _state(job: Job) -> State:
    place, steps = job.folder, job.config.steps
    step = min(steps, last_complete_step(place / "metrics.jsonl"))
    if folder.in_use(place):
        return State(Kind.IN_USE, step)
    earlier = folder.earlier(place)
    if not earlier or not folder.has_results(place):
        return State(Kind.NEW)  # a start without results does not count
    changes = folder.changes(earlier["config"], job.config)
    if changes and not job.accept_changes:
        return State(Kind.CHANGED, step, changes)
    saved = checkpoints.steps(place / "checkpoints")
    if step == steps and not saved:
        return State(
            Kind.LOST,
            step,
            ["all steps are recorded, but there is no checkpoint: restore it, or move the folder away"],
        )
    complete = saved and saved[-1] >= steps and checkpoints.is_sealed(place / "checkpoints" / str(saved[-1]))
    done = step == steps and complete and not _unevaluated(job, saved[-1])
    return State(Kind.DONE if done else Kind.BEGUN, step)


def _unevaluated(job: Job, step: int) -> bool:
    """Whether a run was stopped during its last evaluation: its last checkpoint has no score then."""
    evaluates = job.config.evaluation.every and any(
        "checkpoint" not in line for line in read_lines(job.folder / "eval.jsonl")
    )
    return bool(evaluates) and checkpoints.best_of(job.folder / "checkpoints", [step]) is None


def check(jobs: Sequence[Job]) -> None:
    """Refuse a matrix with a run that was begun under another configuration."""
    found = [(job, state(job)) for job in jobs]
    lines = [f"  {job.folder}: {'; '.join(now.problems)}" for job, now in found if now.kind is Kind.CHANGED]
    if lines:
        raise FolderError(
            "these runs were begun with another configuration:\n"
            + "\n".join(lines)
            + "\nuse the earlier configuration, choose another --root, or accept the change with --accept_changes"
        )


# ---------------------------------------------------------------- at work


def work(jobs: Sequence[Job], samples: int, say: Callable[[str], None]) -> list[str] | None:
    """Do what is left to do, job by job; returns why some could not be done, or None if it was asked to stop.

    The final and the best policies play `samples` episodes of every test problem; 0: none. A job that another process
    works on is left to it.
    """
    trouble, busy = list[str](), list[tuple[int, Job]]()
    with Stop(heard=_ask_running) as stop:
        # Jobs that another process works on are tried again when all others are done.
        for number, job in itertools.chain(enumerate(jobs, 1), busy):
            again = (number, job) in busy
            try:
                with _taken(job) as owned:
                    current = state(job) if owned else State(Kind.IN_USE)
                    say(f"[{number}/{len(jobs)}] {job.name}: {current}")
                    if current.kind is Kind.IN_USE and not again:
                        busy.append((number, job))
                        continue
                    trouble += [f"{job.name}: {text}" for text in _do(job, current, samples, stop)]
            except FolderError as error:
                trouble.append(f"{job.name}: {error}")
            if stop.asked:
                return None
    return trouble


def _do(job: Job, current: State, samples: int, stop: Stop) -> Iterator[str]:
    """Do what is left of one job; yields what goes wrong."""
    if current.kind is Kind.IN_USE:
        yield "another process is working on it"
    elif current.kind in (Kind.CHANGED, Kind.LOST, Kind.DAMAGED):
        yield "; ".join(current.problems)
    elif current.kind is not Kind.DONE:
        code = _run(job.training, stop)
        current = state(job)
        by_alarm = code == 0 and job.config.alarms == "stop"
        if not stop.asked and current.kind is not Kind.DONE:
            why = "was stopped by an alarm; --config.alarms=tell continues it" if by_alarm else _ended(code)
            yield f"training {why} ({current})"
    if current.kind is not Kind.DONE or not samples:
        return
    for command in job.testing(samples):
        if stop.asked:
            return
        if code := _run(command, stop):
            yield f"the evaluation {_ended(code)}"


@contextlib.contextmanager
def _taken(job: Job) -> Iterator[bool]:
    """Lock a job, its training and its evaluations, while the context lasts; yields whether this process got it."""
    path = job.folder.parent / f".{job.folder.name if job.config.seeds == 1 else 'seeds'}.lock"
    with contextlib.ExitStack() as stack:
        with path_errors(path.parent, "choose another --root"):
            path.parent.mkdir(parents=True, exist_ok=True)
            owner = stack.enter_context(lock(path))
        yield owner is None


# The running child process, until it is asked to stop: asked a second time, it would end without saving.
_running: list[subprocess.Popen[bytes]] = []


def _ask_running() -> list[subprocess.Popen[bytes]]:
    asked = []
    while _running:
        asked.append(_running.pop())
        asked[-1].terminate()
    return asked


def end_running() -> None:
    """Ask the running process to stop, and wait until it has saved; may be called from a signal handler."""
    for child in _ask_running():
        child.wait()


def _run(command: Sequence[str], stop: Stop) -> int:
    """Run a module in a process of its own, which is asked to stop when this one is; returns its exit code."""
    # In a process group of its own, so that Ctrl-C reaches it once, from here: a second one would end it at once.
    child = subprocess.Popen([sys.executable, "-m", *command], process_group=0)
    _running[:] = [child]
    try:
        while True:
            try:
                return child.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                if stop.asked:
                    _ask_running()
                    return child.wait()
    except BaseException:  # asked a second time
        child.kill()
        child.wait()
        raise


def _ended(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
