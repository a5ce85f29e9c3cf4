"""Cells over seeds: runs that differ in their seed alone, and what each answered, problem by problem.

    runs ──by_cell──► cells ──measures──► answers to each problem, of each run     (compared in `contrasts`)

Runs that were stopped early, or changed at a resume, stand apart, marked. A cell that is not what its name says is
labelled with the difference, and cells that would have one label with what they differ in.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from marl_jax.config.cells import POLICIES
from marl_jax.study.cliffs import TERMINAL, PerProblem, course, per_problem
from marl_jax.study.record import Run, base, held_out, once, trained
from marl_jax.study.wording import NONE
from marl_jax.workflows import BUILT_IN

# What makes no other run: names, and what changes no number or follows from the other settings.
ASIDE = ("schema", "seed", "seeds", "road", "cell", "engine", "alarms", "logging", "checkpoints")
OF_ENGINE = ("kind", "max_prompt", "sampler")  # what of `engine` does make another run
NAMED = 3  # fields in which a label says that cells differ
TOKENS, CALLS = "tokens_per_episode", "calls_per_episode"  # what an episode spends


@dataclasses.dataclass(frozen=True)
class Cell:
    """Runs of one configuration, by rising seed."""

    runs: tuple[Run, ...]
    label: str = ""  # its name, and what else tells it from others
    folder: str = ""  # the name of its runs' folder, where no other cell has it and it begins with the cell's

    @property
    def name(self) -> str:
        """As the configuration calls it."""
        return self.runs[0].cell

    @property
    def config(self) -> Mapping[str, Any]:
        """Of its first run: the others differ in their seed."""
        return self.runs[0].config

    @property
    def odd_words(self) -> list[str]:
        """Of its label: in what it is not the cell that its name says, another workflow or other policies."""
        named, policies, *_ = self.name.split("-") if self.name.count("-") == 3 else ("", "")
        if named not in BUILT_IN or policies not in POLICIES:
            return []
        played, owners = (self.config.get("workflow") or {}).get("name"), self.runs[0].policy_map
        apart = len(set(owners.values()))
        as_named = apart == 1 if policies == "shared" else apart == len(owners) and "/" not in "".join(owners)
        workflow = [] if played == named else [f"workflow {played}"]
        return workflow + ([] if as_named else [f"{role} → {policy}" for role, policy in owners.items()])

    @property
    def settings(self) -> list[str]:
        """Those of its workflow that are not the usual ones."""
        chosen = self.config.get("workflow") or {}
        usual = BUILT_IN[chosen["name"]].settings if chosen.get("name") in BUILT_IN else {}
        settings = chosen.get("settings") or {}
        return [f"{name} {value}" for name, value in settings.items() if value != usual.get(name)]

    @property
    def single(self) -> bool:
        """Whether it is a single agent, the control of workflows."""
        return str((self.config.get("workflow") or {}).get("name", "")).startswith("single")

    @property
    def isolated(self) -> bool:
        """Whether each of several roles has a policy of its own."""
        owners = self.runs[0].policy_map
        return len(set(owners.values())) == len(owners) > 1 and "/" not in "".join(owners)

    @property
    def shared(self) -> bool:
        """Whether several roles have one policy."""
        owners = self.runs[0].policy_map
        return len(set(owners.values())) == 1 < len(owners)

    @property
    def finished(self) -> bool:
        """Whether all its runs made all their steps."""
        return all(run.finished for run in self.runs)

    @property
    def changed_words(self) -> list[str]:
        """Of its label: that its runs went on with another configuration or other data, if they did."""
        return ["changed at a resume"] if _changed(self.runs[0]) else []

    @property
    def early_words(self) -> list[str]:
        """Of its label: at which steps its runs were stopped, if they were."""
        steps = sorted({run.step for run in self.runs if not run.finished})
        return [f"stopped at step {' and '.join(map(str, steps))}"] if steps else []


def by_cell(runs: Sequence[Run]) -> list[Cell]:
    """Runs together that are equal but for their seed and `ASIDE`, in order of appearance; a copy is no other run."""
    together: dict[str, dict[int, Run]] = {}
    for run in runs:
        if type(seed := run.config.get("seed")) is int:
            together.setdefault(_alike(run), {}).setdefault(seed, run)
    cells = [Cell(tuple(some[seed] for seed in sorted(some))) for some in together.values()]
    places = [cell.runs[0].folder.parent.name for cell in cells]
    folders = [
        name if name.startswith(cell.name) and places.count(name) == 1 else ""
        for cell, name in zip(cells, places)
    ]
    cells = [dataclasses.replace(cell, folder=name) for cell, name in zip(cells, folders)]
    titles = [cell.folder or cell.name for cell in cells]
    # A folder that is called more than its cell says what was changed.
    details = [
        cell.odd_words
        + (cell.settings if title == cell.name else [])
        + _steps(cell, [one for one, its in zip(cells, titles) if its == title])
        + cell.early_words
        + cell.changed_words
        for cell, title in zip(cells, titles)
    ]
    root = os.path.commonpath([run.folder.parent for run in runs]) if runs else ""
    place = lambda cell, _: [os.path.relpath(_place(cell), root).removeprefix(cell.name)]
    for more in (_unlike, place):  # the latter where the former is not enough
        details = _told_apart(cells, titles, details, more)
    told = [", ".join(filter(None, words)) for words in details]
    return [
        dataclasses.replace(cell, label=f"{title} ({words})" if words else title)
        for cell, title, words in zip(cells, titles, told)
    ]


def differing(one: Cell, other: Cell) -> tuple[str, ...]:
    """The fields whose values differ; if none does, the digests that differ, but for versions."""
    mine, its = map(_fields, (one, other))
    found = [path for path in dict.fromkeys([*mine, *its]) if mine.get(path) != its.get(path)]
    if not found:
        mine, its = map(_digests, (one, other))
        found = [name for name in dict.fromkeys([*mine, *its]) if mine.get(name) != its.get(name)]
    return tuple(found)


def uncounted(runs: Mapping[str, Run]) -> list[str]:
    """A line for each run, by their names, that has cell and seed of one before it and other results."""
    first: dict[tuple[str, Any], str] = {}
    lines = []
    for name, run in runs.items():
        other = first.setdefault((_alike(run), run.config.get("seed")), name)
        if runs[other].evaluations != run.evaluations:
            lines.append(f"'{name}' is in no table of cells: '{other}' is the same cell and seed")
    return lines


def _alike(run: Run) -> str:
    """What runs of one cell have in common."""
    same = [run.cell, essential(run.config), run.about.get("digests"), run.finished, _changed(run)]
    return json.dumps(same, sort_keys=True)


def _changed(run: Run) -> bool:
    """Whether a resume changed more than the versions that it ran with."""
    lines = [str(line) for change in run.about.get("changes") or () for line in change]
    return any(not line.startswith("versions.") for line in lines)


def _steps(cell: Cell, alike: Sequence[Cell]) -> list[str]:
    """How many steps its runs are to make, where another cell of its title is to make more or fewer."""
    steps = {one.runs[0].steps for one in alike}
    return [f"{cell.runs[0].steps} steps"] if len(steps) > 1 else []


def _told_apart(
    cells: Sequence[Cell],
    titles: Sequence[str],
    details: Sequence[list[str]],
    more: Callable[[Cell, Sequence[Cell]], list[str]],
) -> list[list[str]]:
    """The details of each cell, and more of those that have their title and details in common."""
    keys = [(title, *words) for title, words in zip(titles, details)]
    groups = [[one for one, its in zip(cells, keys) if its == key] for key in keys]
    return [
        words + more(cell, group) if len(group) > 1 else words
        for cell, words, group in zip(cells, details, groups)
    ]


def _unlike(cell: Cell, group: Sequence[Cell]) -> list[str]:
    """A few of the fields in which it differs from the others of a group, with its values."""
    paths = list(dict.fromkeys(path for other in group for path in differing(cell, other)))
    # Digests are told apart by how they begin, long names (folders, "module:function") by how they end.
    mine = {name: str(digest)[:12] for name, digest in _digests(cell).items()} | _fields(cell)
    values = [f"{path} {str(mine.get(path, NONE))[-24:]}" for path in paths[:NAMED]]
    return values + ([f"{len(paths) - NAMED} more"] if len(paths) > NAMED else [])


def _digests(cell: Cell) -> dict[str, Any]:
    return dict(cell.runs[0].about.get("digests") or {})


def _fields(cell: Cell) -> dict[str, Any]:
    """{path: value} of what makes another run. Policies have no names: maps that share alike are equal."""
    owners = cell.runs[0].policy_map
    numbers = {
        policy: place for place, policy in enumerate(dict.fromkeys(owners[role] for role in sorted(owners)))
    }
    alike = {"policies.map": {role: numbers[owners[role]] for role in sorted(owners)}} if owners else {}
    return dict(_leaves(essential(cell.config))) | alike


def essential(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration that make another run."""
    fields = {name: value for name, value in config.items() if name not in ASIDE}
    engine = {name: value for name, value in (config.get("engine") or {}).items() if name in OF_ENGINE}
    return fields | ({"engine": engine} if engine else {})


def _leaves(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of the fields; a map of roles or settings is one value."""
    for name, value in config.items():
        if isinstance(value, Mapping) and f"{path}{name}" not in ("policies.map", "workflow.settings"):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _place(cell: Cell) -> Path:
    """The folder of its runs, of a matrix; else that of its first run."""
    folder = cell.runs[0].folder
    return folder.parent if folder.name.startswith("seed-") else folder


# ---------------------------------------------------------------- what a run answered


class Answers(NamedTuple):
    """Of a run, its share of right answers to each of some problems."""

    problems: Any  # tells them from other problems
    right: PerProblem


@once
def measures(run: Run) -> dict[str, Answers]:
    """What a run is measured by, as far as it is known."""
    end = course(run)
    start, last = held_out(run) or ({}, {})
    found = {
        "base": per_problem(base(run)),
        "peak": end.peak if end else None,
        "terminal": end.terminal if end else None,
        "test base": per_problem(start),
        "test final": per_problem(last),
    }
    on_val = (run.about.get("digests") or {}).get("data val", run.folder)  # not recorded: no other run's
    on_test = [last.get(key) for key in ("data", "problems", "samples")]
    asked = {name: on_test if name.startswith("test") else on_val for name in found}
    return {name: Answers(asked[name], right) for name, right in found.items() if right is not None}


def budget(run: Run, of: str = TOKENS) -> float | None:
    """Mean tokens, or calls, of an episode in the last evaluations, or in the final one on test; None in older runs."""
    last = trained(run)[-TERMINAL:] if course(run) else held_out(run)[1:]
    counts = [record.get(of) for record in last]
    known = [float(value) for value in counts if isinstance(value, int | float)]
    return float(np.mean(known)) if known and len(known) == len(counts) else None


def difference(one: Answers | None, other: Answers | None) -> PerProblem | None:
    """How much more the first has, problem by problem; None where these are not the same problems."""
    if one is None or other is None or one.problems != other.problems or len(one.right) != len(other.right):
        return None
    return one.right - other.right
