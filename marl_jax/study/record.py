"""The record of a run, read from its folder, finished or not: numbers by step, evaluations, a few episodes.

    config.json ─┐
    metrics.jsonl ┼─► Run ─► curves, tables, transcripts
    eval.jsonl ──┘                        (episodes are read when they are asked for)

A null is a NaN in a series and never a zero; what was not recorded is empty, and said so by whoever shows it.
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from marl_jax.rewards.grading import RIGHT
from marl_jax.rollouts import Episode, read_episodes
from marl_jax.runs import folder
from marl_jax.runs.metrics import read_lines

Record = Mapping[str, Any]
TERMINAL = 3  # evaluations whose mean is the terminal accuracy


class Series(NamedTuple):
    """One number over steps; NaN where it was null."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def known(self) -> "Series":
        """Without the nulls."""
        there = np.isfinite(self.values)
        return Series(self.steps[there], self.values[there])


@dataclasses.dataclass(frozen=True)
class Run:
    """All numbers of a run folder."""

    folder: Path
    about: Mapping[str, Any]  # config.json: config, digests, versions, settled, changes
    metrics: tuple[Record, ...]
    evaluations: tuple[Record, ...]

    @property
    def config(self) -> Mapping[str, Any]:
        return self.about.get("config", {})

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def cell(self) -> str:
        return str(self.config.get("cell") or self.name)

    @property
    def step(self) -> int:
        """The last that is recorded."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def steps(self) -> int:
        """That it was asked for."""
        return int(self.config.get("steps") or 0)

    @property
    def policy_map(self) -> Mapping[str, str]:
        return self.config.get("policies", {}).get("map", {})

    @property
    def roles(self) -> tuple[str, ...]:
        """In the configuration's order, then whatever else the metrics name."""
        named = [key.split("/")[0] for key in self.policy_map]
        return tuple(dict.fromkeys([*named, *self.below("reward/")]))

    def series(self, key: str) -> Series:
        """The values of one key, for the steps that have it."""
        found = [(line["step"], line[key]) for line in self.metrics if key in line]
        steps, values = zip(*found) if found else ((), ())
        numbers = [np.nan if value is None else float(value) for value in values]
        return Series(np.array(steps, float), np.array(numbers, float))

    def below(self, prefix: str) -> list[str]:
        """What follows `prefix` in the keys of the metrics, in order of appearance."""
        keys = dict.fromkeys(key for line in self.metrics for key in line)
        return [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]


def read_run(workdir: str | os.PathLike[str]) -> Run:
    """The run in a folder; only `config.json` has to be there."""
    path = Path(workdir).expanduser().absolute()
    about = folder.read(path)
    return Run(path, about, *(tuple(read_lines(path / name)) for name in ("metrics.jsonl", "eval.jsonl")))


def find_runs(root: str | os.PathLike[str]) -> list[Path]:
    """The run folders in and below a directory, by name; nothing is looked for inside a run."""
    found = []
    for directory, below, files in os.walk(root):
        below.sort()
        if folder.CONFIG in files and (folder.LOCK in files or "metrics.jsonl" in files):
            found.append(Path(directory))
            below.clear()
    return found


# ---------------------------------------------------------------- gradients


def gradient_norms(run: Run) -> dict[str, Series]:
    """Norm of each role's part of its policy's gradient; of each policy's whole one where roles were not kept apart.

    A role that answers from several policies has a series for each, named "role (policy)".
    """
    pairs = [re.fullmatch(r"([^/]+)/norm/(.+)", key) for key in run.below("gradient/")]
    found = [(match[1], match[2]) for match in pairs if match]
    roles = [role for _, role in found]
    norms = {
        role if roles.count(role) == 1 else f"{role} ({policy})": run.series(f"gradient/{policy}/norm/{role}")
        for policy, role in found
    }
    if norms:
        order = {role: place for place, role in enumerate(run.roles)}
        return dict(sorted(norms.items(), key=lambda item: order.get(item[0].split(" (")[0], len(order))))
    policies = [key.removesuffix("/grad_norm") for key in run.below("policy/") if key.endswith("/grad_norm")]
    return {policy: run.series(f"policy/{policy}/grad_norm") for policy in policies}


def gradient_shares(norms: Mapping[str, Series]) -> dict[str, Series]:
    """Each norm over the sum of all, step by step; a role without a gradient in a step has no part in it."""
    steps = np.unique(np.concatenate([series.steps for series in norms.values()])) if norms else np.array([])
    table = np.zeros((len(norms), len(steps)))
    for row, series in zip(table, norms.values()):
        row[np.searchsorted(steps, series.steps)] = np.nan_to_num(series.values)
    mass = table.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        table = np.where(mass > 0, table / mass, np.nan)
    return {name: Series(steps, row) for name, row in zip(norms, table)}


def amplifications(run: Run) -> dict[str, Series]:
    """|sum g| / mean |g|: of a role's parallel slots where those were kept apart, else of a policy's roles."""
    keys = [key for key in run.below("gradient/") if key.endswith("/amplification")]
    slots = [key for key in keys if "/slots/" in key]
    several = [key for key in keys if key.count("/") == 1 and _parts(run, key.split("/")[0]) > 1]
    found = {key.split("/")[2]: run.series(f"gradient/{key}") for key in slots}
    found = {name: series for name, series in found.items() if np.any(series.known.values != 1)}
    return found or {key.split("/")[0]: run.series(f"gradient/{key}") for key in several}


def _parts(run: Run, policy: str) -> int:
    return len(run.below(f"gradient/{policy}/norm/"))


# ---------------------------------------------------------------- evaluations


def trained(run: Run) -> list[Record]:
    """The evaluations along the run (trained, on val), one per step, rising."""
    own = {
        int(record["step"]): record
        for record in run.evaluations
        if record.get("mode", "trained") == "trained"
        and record.get("split", "val") == "val"
        and record.get("accuracy") is not None
    }
    return [own[step] for step in sorted(own)]


def base(run: Run) -> Record | None:
    """The evaluation of where the run started."""
    return next((record for record in trained(run) if record["step"] == 0), None)


def best(records: Sequence[Record]) -> Record:
    """The highest accuracy, the earliest of several."""
    return max(records, key=lambda record: (record["accuracy"], -record["step"]))


@dataclasses.dataclass(frozen=True)
class Stability:
    """How a run ended against how high it came."""

    peak: Record
    terminal: float  # mean accuracy of the last TERMINAL evaluations
    steps: tuple[int, ...]  # of those
    cliff: bool  # terminal lies below the lower end of the peak's interval
    count: int  # evaluations that the peak is the highest of


def stability(run: Run) -> Stability | None:
    """None where fewer than TERMINAL evaluations were made after the start."""
    later = [record for record in trained(run) if record["step"] > 0]
    if len(later) < TERMINAL:
        return None
    peak, last = best(later), later[-TERMINAL:]
    terminal = float(np.mean([record["accuracy"] for record in last]))
    low = peak.get("ci_low")
    cliff = low is not None and terminal < low
    return Stability(peak, terminal, tuple(record["step"] for record in last), cliff, len(later))


# ---------------------------------------------------------------- episodes


@dataclasses.dataclass(frozen=True)
class Sample:
    """An episode of some step with what it earned."""

    step: int
    episode: Episode
    outcome: float | None
    rewards: Sequence[float | None]  # one per call, or none at all
    advantages: Sequence[float | None]

    @property
    def right(self) -> bool | None:
        return None if self.outcome is None else self.outcome >= RIGHT


def samples(run: Run) -> tuple[list[Sample], list[str]]:
    """A right and a wrong episode of the first and of the last recorded step, and what could not be read."""
    files: dict[int, Path] = {}
    for path in (run.folder / "episodes").glob("step-*"):
        if match := re.fullmatch(r"step-(\d+)\.(?:parquet|jsonl\.gz)", path.name):
            files[int(match[1])] = path
    chosen, problems = [], []
    for step in dict.fromkeys([min(files), max(files)]) if files else ():
        try:
            found = _read_samples(step, files[step])
        except (ValueError, OSError, folder.FolderError) as error:
            problems.append(str(error))
            continue
        firsts = {kind: next((s for s in found if s.right is kind), None) for kind in (True, False)}
        picked = [sample for sample in firsts.values() if sample is not None]
        chosen += picked or found[:2]
    return chosen, problems


def _read_samples(step: int, path: Path) -> list[Sample]:
    table = read_episodes(path)

    def by_episode(column: np.ndarray | None) -> list[list[float | None]]:
        lists: list[list[float | None]] = [[] for _ in table.heads]
        for number, value in zip(table.episode.tolist(), () if column is None else column.tolist()):
            lists[number].append(None if value != value else value)
        return lists

    columns = zip(table.episodes(), by_episode(table.reward), by_episode(table.advantage))
    return [
        Sample(step, episode, episode.outcome, rewards, advantages)
        for episode, rewards, advantages in columns
    ]
