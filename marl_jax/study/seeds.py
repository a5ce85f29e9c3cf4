"""Cells over seeds: what runs that differ in their seed alone show together, and how two cells differ.

    runs ──► cells ──► values [seeds, problems] ──► mean and interval over both

Runs that were stopped early stand apart, marked. Two cells are compared run by run and problem by problem, over the
seeds that both have, where they met the same problems; what their configurations differ in stands beside it, whatever
their names. A cell that is not what its name says is labelled with the difference.
"""

import collections
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from marl_jax.config.cells import POLICIES
from marl_jax.study.cliffs import TERMINAL, PerProblem, course, fell, form_of, is_cliff, per_problem
from marl_jax.study.intervals import over_seeds
from marl_jax.study.record import Run, base, held_out, once, trained
from marl_jax.study.run_tables import NONE, Table, points, share
from marl_jax.workflows import BUILT_IN

__all__ = [
    "CALLS",
    "TOKENS",
    "Answers",
    "Cell",
    "Pair",
    "alike",
    "budget",
    "by_cell",
    "by_seed",
    "contrasts",
    "difference",
    "measures",
    "names_of",
    "on_test",
    "on_val",
    "paired_gaps",
    "pairs_of",
    "spent",
    "tables_of",
]

# What makes no other run: names, and what changes no number or follows from the other settings.
ASIDE = ("schema", "seed", "seeds", "road", "cell", "engine", "alarms", "logging", "checkpoints")
WORKFLOW = ("workflow", "policies.map", "advantages.group")  # what makes another workflow
MOST = 12  # of pairs that differ in several things; more of them are not shown
UNLIKE = 1.1  # budgets whose ratio is larger are marked, and match nothing
TOKENS, CALLS = "tokens_per_episode", "calls_per_episode"  # what an episode spends


@dataclasses.dataclass(frozen=True)
class Cell:
    """Runs of one configuration, by rising seed."""

    runs: tuple[Run, ...]
    label: str = ""  # its name, and what else tells it from others

    @property
    def name(self) -> str:
        """As the configuration calls it."""
        return self.runs[0].cell

    @property
    def config(self) -> Mapping[str, Any]:
        """Of its first run: the others differ in their seed."""
        return self.runs[0].config

    @property
    def odd(self) -> list[str]:
        """In what it is not the cell that its name says: another workflow, other policies."""
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
    def early(self) -> list[str]:
        """At which steps its runs were stopped, if they were."""
        steps = sorted({run.step for run in self.runs if not run.finished})
        return [f"stopped at step {' and '.join(map(str, steps))}"] if steps else []


def by_cell(runs: Sequence[Run]) -> list[Cell]:
    """Runs together that are equal but for their seed and `ASIDE`, in order of appearance; a copy is no other run."""
    together: dict[str, dict[int, Run]] = {}
    for run in runs:
        if type(seed := run.config.get("seed")) is int:
            same = [run.cell, _without(run.config, *ASIDE), run.about.get("digests"), run.finished]
            together.setdefault(json.dumps(same, sort_keys=True), {}).setdefault(seed, run)
    cells = [Cell(tuple(some[seed] for seed in sorted(some))) for some in together.values()]
    details = [", ".join(cell.odd + cell.settings + cell.early) for cell in cells]
    labels = [f"{cell.name} ({more})" if more else cell.name for cell, more in zip(cells, details)]
    common = collections.Counter(labels)
    root = os.path.commonpath([run.folder.parent for run in runs]) if runs else ""
    places = [os.path.relpath(_place(cell), root).removeprefix(cell.name) for cell in cells]
    return [
        dataclasses.replace(cell, label=f"{label} ({place})" if common[label] > 1 and place else label)
        for cell, label, place in zip(cells, labels, places)
    ]


def names_of(cells: Sequence[Cell]) -> dict[int, str]:
    """Of each cell its folder's, which says what was changed, where no other cell has it; else its label."""
    places = [cell.runs[0].folder.parent.name for cell in cells]
    return {
        id(cell): place if place.startswith(cell.name) and places.count(place) == 1 else cell.label
        for cell, place in zip(cells, places)
    }


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


def spent(one: "Cell", other: "Cell", of: str = TOKENS) -> tuple[float, float] | None:
    """The mean budgets of two cells over their common seeds, of those where both are known; None of no seed."""
    both = [(budget(run, of), budget(its, of)) for run, its in by_seed(one, other)]
    known = [pair for pair in both if None not in pair]
    if not known:
        return None
    mine, its = np.mean(np.array(known, float), axis=0)
    return float(mine), float(its)


def alike(one: float, other: float) -> bool:
    """Whether two budgets match."""
    return other / UNLIKE <= one <= other * UNLIKE


def difference(one: Answers | None, other: Answers | None) -> PerProblem | None:
    """How much more the first has, problem by problem; None where these are not the same problems."""
    if one is None or other is None or one.problems != other.problems or len(one.right) != len(other.right):
        return None
    return one.right - other.right


# ---------------------------------------------------------------- tables


HOW = (
    "Means over runs that differ in their seed alone, with 95% intervals over seeds and problems, both drawn "
    "at random; of one seed over its problems alone. Intervals of two or three seeds are wide, and still somewhat too "
    "narrow where seeds differ much."
)


def tables_of(runs: Sequence[Run]) -> list[Table]:
    """All that have a row; none where every cell has one run and nothing is to be compared."""
    cells = by_cell(runs)
    found = [on_val(cells), on_test(cells)] if any(len(cell.runs) > 1 for cell in cells) else []
    pairs, lines = pairs_of(cells)
    refused = Table("Cells that are not compared", [(line,) for line in lines], words=1, facts=True)
    return [table for table in (*found, contrasts(pairs), refused) if table.rows]


def on_val(cells: Sequence[Cell]) -> Table:
    """How each cell went along its runs."""
    rows = _rows(cells, ("base", "peak", "terminal"), cliffs=True)
    head = ("", "seeds", "base", "peak", "terminal", "terminal over base,\npoints", "cliffs")
    how = (
        f"On validation problems. {HOW} Peak and terminal need {TERMINAL} evaluations after the start. Cliffs: of so "
        "many runs, whether the runs fell together, and what the texts of those that fell lost beside their accuracy."
    )
    return Table("Cells", rows, head, how)


def on_test(cells: Sequence[Cell]) -> Table:
    """What the cells came to on problems that nothing was chosen by."""
    head = ("", "seeds", "base", "final", "final over base,\npoints")
    return Table("Cells on test problems", _rows(cells, ("test base", "test final")), head, HOW)


def _rows(cells: Sequence[Cell], shown: Sequence[str], cliffs: bool = False) -> list[tuple[str, ...]]:
    """Of each cell that has them some measures, and how much more it has of the last than of the first."""
    rows = []
    for cell in cells:
        runs = [measures(run) for run in cell.runs]
        found = [_over_runs([run[name].right if name in run else None for run in runs]) for name in shown]
        gains = [difference(run.get(shown[-1]), run.get(shown[0])) for run in runs]
        if set(found) - {NONE}:
            found = [
                f"{NONE}\n{_too_few(cell)}" if text == NONE and name in ("peak", "terminal") else text
                for name, text in zip(shown, found)
            ]
            row = (cell.label, str(len(runs)), *found, _over_runs(gains, differences=True))
            rows.append((*row, _fallen(cell)) if cliffs else row)
    return rows


def _fallen(cell: Cell) -> str:
    """How many runs fell by themselves, beneath it whether they did together, and which form they lost with it."""
    known = [run for run in cell.runs if fell(run) is not None]
    fallen = [run for run in known if fell(run)]
    together = is_cliff([end for run in cell.runs if (end := course(run))]) if len(known) > 1 else None
    below = [] if together is None else ["a cliff" if together else "no cliff"]
    below += [f"form: {form_of(fallen)}"] if fallen else []
    count = f"{len(fallen)} of {len(known)}" if known else NONE
    return "\n".join([count, ", ".join(below)]) if below else count


def _too_few(cell: Cell) -> str:
    """Why a cell has no peak and no terminal accuracy."""
    counts = [sum(record["step"] > 0 for record in trained(run)) for run in cell.runs]
    return f"{min(counts)} of {TERMINAL} evaluations"


def contrasts(pairs: Sequence["Pair"]) -> Table:
    """Each pair of cells that met the same problems: first those that differ in one thing, then the others."""
    compared = ("base", "peak", "terminal", "test final")
    rows = []
    for pair in pairs:
        both = by_seed(pair.one, pair.other)
        measured = [(measures(run), measures(its)) for run, its in both]
        gaps = [[difference(mine.get(name), its.get(name)) for mine, its in measured] for name in compared]
        found = [_over_runs(gap, differences=True) for gap in gaps]
        if set(found) - {NONE}:
            tokens = _budgets(spent(pair.one, pair.other))
            rows.append((pair.one.label, pair.other.label, pair.text, str(len(both)), *found, tokens))
    head = (
        "",
        "against",
        "differ in",
        "seeds",
        "base",
        "peak",
        "terminal",
        "test: final",
        "tokens of\nan episode",
    )
    how = (
        "Differences in points, paired: the same seeds, the same problems. Where cells differ in several things, none "
        "of them alone explains it. Each interval of 95% stands for itself; of one seed it is over problems alone. "
        "Peaks are the highest of several noisy values. Tokens are what both sides sampled on average where the "
        "terminal accuracy was measured; where they are more than 10% apart, it says how many times as many the first "
        "took."
    )
    return Table("Cells against each other", rows, head, how, words=3)


def paired_gaps(pairs: Sequence[tuple[Run, Run]], mine: str, its: str) -> np.ndarray:
    """Float[S, P]: how much more the first of each pair has; empty where some lack it or met other problems."""
    found = [difference(measures(one).get(mine), measures(other).get(its)) for one, other in pairs]
    known = [gap for gap in found if gap is not None]
    complete = known and len(known) == len(found) and len({len(gap) for gap in known}) == 1
    return np.array(known) if complete else np.zeros((0, 0))


def by_seed(one: Cell, other: Cell) -> list[tuple[Run, Run]]:
    """Runs of both with the same seed."""
    there = {run.config["seed"]: run for run in other.runs}
    return [(run, there[run.config["seed"]]) for run in one.runs if run.config["seed"] in there]


class Pair(NamedTuple):
    """Two cells, the first above the second; the second is the control where one of them is."""

    one: Cell
    other: Cell
    differ: tuple[str, ...]  # fields, by their paths

    @property
    def planned(self) -> bool:
        """Whether they differ in one thing: workflow against single agent, policies, or another part of the fields."""
        if "workflow.name" in self.differ:
            return all(map(_of_workflow, self.differ)) and self.other.single > self.one.single
        parts = {path.partition(".")[0] for path in self.differ}
        return len(parts) == 1 and not any(path.startswith("policies.base") for path in self.differ)

    @property
    def text(self) -> str:
        """What they differ in; of another workflow its name alone."""
        other = "workflow.name" in self.differ
        shown = [
            path for path in self.differ if path == "workflow.name" or not (other and _of_workflow(path))
        ]
        return ", ".join([*shown[:3], *([f"{len(shown) - 3} more"] if len(shown) > 3 else [])])

    @property
    def refused(self) -> str:
        """Why they cannot be compared; empty where some measure of both is of the same problems."""
        if not self.differ:
            return "they differ in nothing but their names"
        if "evaluation.metric" in self.differ:
            return "what is called accuracy is not the same function"
        both = [(measures(run), measures(its)) for run, its in by_seed(self.one, self.other)]
        if not both:
            return "they have no seed in common"
        shared = [(mine[name], its[name]) for mine, its in both for name in mine if name in its]
        if not shared:
            return "one was not evaluated as the other was"
        alike = any(difference(*answers) is not None for answers in shared)
        return "" if alike else "they met other problems"


def pairs_of(cells: Sequence[Cell]) -> tuple[list[Pair], list[str]]:
    """The pairs to compare, those that differ in one thing first, and a line for each reason not to compare some."""
    planned, others, refused = list[Pair](), list[Pair](), dict[str, list[str]]()
    order = [(-cell.single, len(set(cell.runs[0].policy_map.values())), k) for k, cell in enumerate(cells)]
    for one, mine in zip(cells, order):
        if one.early:
            refused.setdefault("it has not made all its steps", []).append(one.label)
        for other, its in zip(cells, order):
            if its < mine and not one.early + other.early:
                pair = Pair(one, other, _differ(one, other))
                if why := pair.refused:
                    refused.setdefault(why, []).append(f"{one.label} with {other.label}")
                else:
                    (planned if pair.planned else others).append(pair)
    if len(others) > MOST:
        refused["they differ in several things"] = [
            f"{each.one.label} with {each.other.label}" for each in others
        ]
        others = []
    return planned + others, [
        "; ".join(names[:3]) + (f"; {len(names) - 3} more" if len(names) > 3 else "") + f": {why}"
        for why, names in refused.items()
    ]


def _of_workflow(path: str) -> bool:
    return path.startswith(WORKFLOW)


def _differ(one: Cell, other: Cell) -> tuple[str, ...]:
    """The fields whose values differ, and where none does, what else a run depends on."""
    mine, its = (dict(_leaves(_without(cell.config, *ASIDE))) for cell in (one, other))
    found = [path for path in dict.fromkeys([*mine, *its]) if mine.get(path) != its.get(path)]
    if not found:
        mine, its = (dict(cell.runs[0].about.get("digests") or {}) for cell in (one, other))
        found = [name for name in dict.fromkeys([*mine, *its]) if mine.get(name) != its.get(name)]
    return tuple(found)


def _leaves(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of the fields; a map of roles or settings is one value."""
    for name, value in config.items():
        if isinstance(value, Mapping) and f"{path}{name}" not in ("policies.map", "workflow.settings"):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _over_runs(values: Sequence[PerProblem | None], differences: bool = False) -> str:
    """Mean and interval over the runs that have values, of as many problems each; how many, where not all have."""
    known = [one for one in values if one is not None]
    if len({len(one) for one in known}) != 1:
        return NONE
    found = over_seeds(np.array(known), bounds=(-1.0, 1.0) if differences else (0.0, 1.0))
    count = "" if len(known) == len(values) else f", {len(known)} of {len(values)} seeds"
    return (points if differences else share)(found) + count


def _budgets(tokens: tuple[float, float] | None) -> str:
    """Mean tokens of either side, and how many times as many the first took where that is not as many."""
    if tokens is None:
        return NONE
    one, other = tokens
    mark = "" if alike(one, other) else f"\nx{one / other if other else np.inf:.2g} tokens"
    return f"{one:,.0f} : {other:,.0f}{mark}"


def _without(config: Mapping[str, Any], *paths: str) -> dict[str, Any]:
    """The configuration without some of its fields."""
    left = dict(config)
    for path in paths:
        first, _, rest = path.partition(".")
        if rest and isinstance(left.get(first), Mapping):
            left[first] = _without(left[first], rest)
        else:
            left.pop(first, None)
    return left
