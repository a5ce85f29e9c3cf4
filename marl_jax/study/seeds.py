"""Cells: groups of runs that differ only in their seed, and the answers of each run, problem by problem.

    runs ──by_cell──► cells ──measures──► answers to each problem, of each run     (compared in `contrasts`)

Runs that were stopped early, or changed at a resume, form cells of their own, whose labels say so. If a cell is not
what its name says, its label names the difference; cells whose labels would be equal are labelled with what differs.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from marl_jax.config.cells import POLICIES
from marl_jax.study.cliffs import TERMINAL, PerProblem, course, per_problem
from marl_jax.study.record import Run, base, held_out, once, trained
from marl_jax.study.wording import NONE
from marl_jax.workflows import BUILT_IN

# Fields that do not distinguish runs: names, and fields that change no number or follow from other settings.
ASIDE = ("schema", "seed", "seeds", "road", "cell", "engine", "alarms", "logging", "checkpoints")
OF_ENGINE = ("kind", "max_prompt", "sampler")  # fields of `engine` that do distinguish runs
NAMED = 3  # differing fields that a label names at most
TOKENS, CALLS = "tokens_per_episode", "calls_per_episode"  # what an episode spends


@dataclasses.dataclass(frozen=True)
class Cell:
    """Runs of one configuration, sorted by seed."""

    runs: tuple[Run, ...]
    label: str = ""  # its name, and what distinguishes it from other cells
    folder: str = ""  # its runs' folder, if it begins with the cell's name and no other cell has it

    @property
    def name(self) -> str:
        """The cell's name in the configuration."""
        return self.runs[0].cell

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration of its first run; those of the others differ in the seed."""
        return self.runs[0].config

    @property
    def single(self) -> bool:
        """Whether it is a single agent, the control of workflows."""
        return str(self.runs[0].part("config.workflow").get("name", "")).startswith("single")

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


def by_cell(runs: Sequence[Run]) -> list[Cell]:
    """Group runs by `_cell_key`, in order of appearance; of several runs with one seed, only the first counts."""
    groups: dict[str, dict[int, Run]] = {}
    for run in runs:
        if type(seed := run.config.get("seed")) is int:
            groups.setdefault(_cell_key(run), {}).setdefault(seed, run)
    cells = [Cell(tuple(some[seed] for seed in sorted(some))) for some in groups.values()]
    parents = [cell.runs[0].folder.parent.name for cell in cells]
    folders = [
        name if name.startswith(cell.name) and parents.count(name) == 1 else ""
        for cell, name in zip(cells, parents)
    ]
    titles = [folder or cell.name for cell, folder in zip(cells, folders)]
    namesakes = {name: [one for one, other in zip(cells, titles) if other == name] for name in titles}
    details = [list(_details(cell, title, namesakes[title])) for cell, title in zip(cells, titles)]
    root = os.path.commonpath([run.folder.parent for run in runs]) if runs else ""
    place = lambda cell, _: [os.path.relpath(_place(cell), root).removeprefix(cell.name)]
    for more in (_unlike, place):  # the folder only if the fields do not suffice
        keys = [(title, *words) for title, words in zip(titles, details)]
        alike = [[one for one, other in zip(cells, keys) if other == key] for key in keys]
        details = [
            words + more(cell, group) if len(group) > 1 else words
            for cell, words, group in zip(cells, details, alike)
        ]
    notes = [", ".join(filter(None, words)) for words in details]
    labels = [f"{title} ({note})" if note else title for title, note in zip(titles, notes)]
    return [Cell(cell.runs, label, folder) for cell, label, folder in zip(cells, labels, folders)]


def differing(one: Cell, other: Cell) -> tuple[str, ...]:
    """The fields whose values differ, and bases and prompts that changed under one name.

    If no field differs, these are the digests that differ, but for versions.
    """
    left, right = map(_fields, (one, other))
    found = [path for path in dict.fromkeys([*left, *right]) if left.get(path) != right.get(path)]
    ours, theirs = (cell.runs[0].part("digests") for cell in (one, other))
    unlike = [name for name in dict.fromkeys([*ours, *theirs]) if ours.get(name) != theirs.get(name)]
    if found:  # other digests follow from fields
        prompts = [] if {"workflow.prompts", "data.family"} & {*found} else ["prompts"]
        changed = [name for name in unlike if name.startswith("base ") or name in prompts]
        unlike = [name for name in changed if name in ours and name in theirs]
    return (*found, *unlike)


def uncounted(runs: Mapping[str, Run]) -> list[str]:
    """A line for each run that has the cell and the seed of an earlier run, but other results."""
    first: dict[tuple[str, Any], str] = {}
    lines = []
    for name, run in runs.items():
        other = first.setdefault((_cell_key(run), run.config.get("seed")), name)
        if runs[other].evaluations != run.evaluations:
            lines.append(f"'{name}' is left out of tables of cells: '{other}' has the same cell and seed")
    return lines


def _cell_key(run: Run) -> str:
    """The key of a run's cell: its name, configuration but for `ASIDE`, digests, and whether finished or changed."""
    same = [run.cell, essential(run.config), run.about.get("digests"), run.finished, run.changed]
    return json.dumps(same, sort_keys=True)


def _details(cell: Cell, title: str, namesakes: Sequence[Cell]) -> Iterator[str]:
    """What a label adds to a cell's title: whatever is not as the title says, or differs from cells of that title."""
    first, owners = cell.runs[0], cell.runs[0].policy_map
    played, settings = map(first.part("config.workflow").get, ("name", "settings"))
    named, policies, *_ = cell.name.split("-") if cell.name.count("-") == 3 else ("", "")
    if named in BUILT_IN and policies in POLICIES:
        if played != named:
            yield f"workflow {played}"
        count = len(set(owners.values()))
        isolated = count == len(owners) and "/" not in "".join(owners)
        if not (count == 1 if policies == "shared" else isolated):
            yield from (f"{role} → {policy}" for role, policy in owners.items())
    if title == cell.name:  # a longer name of a folder says already which settings were changed
        defaults = BUILT_IN[played].settings if played in BUILT_IN else {}
        changed = {name: value for name, value in (settings or {}).items() if value != defaults.get(name)}
        yield from (f"{name} {value}" for name, value in changed.items())
    if len({one.runs[0].steps for one in namesakes}) > 1:
        yield f"{first.steps} steps"
    if early := sorted({run.step for run in cell.runs if not run.finished}):
        yield f"stopped at step {' and '.join(map(str, early))}"
    if first.changed:
        yield "changed at a resume"


def _unlike(cell: Cell, group: Sequence[Cell]) -> list[str]:
    """The cell's values of a few fields in which it differs from the others of a group."""
    paths = list(dict.fromkeys(path for other in group for path in differing(cell, other)))
    # Digests differ at their beginning, long names (folders, "module:function") at their end.
    own = {name: str(digest)[:12] for name, digest in cell.runs[0].part("digests").items()} | _fields(cell)
    values = [f"{path} {str(own.get(path, NONE))[-24:]}" for path in paths[:NAMED]]
    return values + ([f"{len(paths) - NAMED} more"] if len(paths) > NAMED else [])


def _fields(cell: Cell) -> dict[str, Any]:
    """{path: value} of the fields that distinguish runs. Policies are numbered: names do not make maps differ."""
    owners = cell.runs[0].policy_map
    numbers = {
        policy: place for place, policy in enumerate(dict.fromkeys(owners[role] for role in sorted(owners)))
    }
    sharing = {"policies.map": {role: numbers[owners[role]] for role in sorted(owners)}} if owners else {}
    return dict(_leaves(essential(cell.config))) | sharing


def essential(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration that distinguish runs."""
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
    """The folder of its seeds in a matrix; else the folder of its first run."""
    folder = cell.runs[0].folder
    return folder.parent if folder.name.startswith("seed-") else folder


# ---------------------------------------------------------------- what a run answered


class Answers(NamedTuple):
    """A run's share of right answers to each of some problems."""

    problems: Any  # equal for the same problems
    right: PerProblem


@once
def measures(run: Run) -> dict[str, Answers]:
    """The measures of a run that are known, by name."""
    end = course(run)
    start, last = held_out(run) or ({}, {})
    accuracies = {
        "base": per_problem(base(run)),
        "peak": end.peak if end else None,
        "terminal": end.terminal if end else None,
        "test base": per_problem(start),
        "test final": per_problem(last),
    }
    on_val = run.part("digests").get("data val", run.folder)  # unrecorded: no other run's
    on_test = [last.get(key) for key in ("data", "problems", "samples")]
    problems = {name: on_test if name.startswith("test") else on_val for name in accuracies}
    return {name: Answers(problems[name], right) for name, right in accuracies.items() if right is not None}


def budget(run: Run, key: str = TOKENS) -> float | None:
    """Mean tokens (or calls) per episode in the last evaluations, else in the final one on test; None in older runs."""
    last = trained(run)[-TERMINAL:] if course(run) else held_out(run)[1:]
    counts = [record.get(key) for record in last]
    known = [float(value) for value in counts if isinstance(value, int | float)]
    return float(np.mean(known)) if known and len(known) == len(counts) else None


def difference(one: Answers | None, other: Answers | None) -> PerProblem | None:
    """The first minus the second, problem by problem; None if the problems are not the same."""
    if one is None or other is None or one.problems != other.problems or len(one.right) != len(other.right):
        return None
    return one.right - other.right
