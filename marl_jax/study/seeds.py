"""Cells over seeds: what runs that differ in their seed alone say together, and how two cells differ.

    runs ──► cells ──► values [seeds, problems] ──► mean and interval over both

Only finished runs count. Two cells are compared run by run and problem by problem, over the seeds that both have,
where they differ in workflow and policies alone and were asked the same problems. A cell is what its runs were
configured as; one that is not what its name says is told apart, and is no other's reference.
"""

import collections
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from marl_jax.runs.cells import POLICIES
from marl_jax.runs.intervals import Interval, over_seeds
from marl_jax.study.record import Record, Run, base, stability, trained
from marl_jax.study.run_tables import NONE, Table
from marl_jax.workflows import BUILT_IN

PerProblem = np.ndarray  # [problems]
Measure = Callable[[Run], PerProblem | None]

CONTROLS = ("single", "single_matched", "single_token_matched")
# What cells that are compared may differ in, besides their seed: their policies, and what makes another workflow.
OTHER_POLICIES = ("seed", "cell", "policies.map", "engine")
OTHER_WORKFLOW = (*OTHER_POLICIES, "workflow.name", "workflow.settings", "advantages.group")
UNLIKE = 1.1  # budgets whose ratio is larger are marked


@dataclasses.dataclass(frozen=True)
class Cell:
    """Runs of one configuration, by rising seed."""

    label: str  # its name, and what else tells it from others
    runs: tuple[Run, ...]

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
        parts = self.name.split("-")
        if len(parts) != 4 or parts[0] not in BUILT_IN or parts[1] not in POLICIES:
            return []
        played, owners = (self.config.get("workflow") or {}).get("name"), self.runs[0].policy_map
        apart = len(set(owners.values()))
        as_named = apart == 1 if parts[1] == "shared" else apart == len(owners) and "/" not in "".join(owners)
        said = [] if played == parts[0] else [f"workflow {played}"]
        return said + ([] if as_named else [f"{role} → {policy}" for role, policy in owners.items()])

    @property
    def settings(self) -> list[str]:
        """Those of its workflow that are not the usual ones."""
        chosen = self.config.get("workflow") or {}
        usual = BUILT_IN[chosen["name"]].settings if chosen.get("name") in BUILT_IN else {}
        said = chosen.get("settings") or {}
        return [f"{name} {value}" for name, value in said.items() if value != usual.get(name)]


def by_cell(runs: Sequence[Run]) -> list[Cell]:
    """Runs together that are equal but for their seed, in order of appearance; a copy of a run is no other run."""
    together: dict[str, dict[int, Run]] = {}
    for run in runs:
        if type(seed := run.config.get("seed")) is int:
            key = json.dumps(
                [run.cell, _without(run.config, "seed"), run.about.get("digests")], sort_keys=True
            )
            together.setdefault(key, {}).setdefault(seed, run)
    found = [tuple(some[seed] for seed in sorted(some)) for some in together.values()]
    cells = [Cell(some[0].cell, some) for some in found]
    told = [cell.odd + cell.settings for cell in cells]
    labels = [f"{cell.name} ({', '.join(more)})" if more else cell.name for cell, more in zip(cells, told)]
    common = collections.Counter(labels)
    return [
        dataclasses.replace(cell, label=label if common[label] == 1 else f"{label} ({_place(cell, runs)})")
        for cell, label in zip(cells, labels)
    ]


def _place(cell: Cell, runs: Sequence[Run]) -> str:
    """Where the first run of a cell lies."""
    root = os.path.commonpath([str(one.folder.parent) for one in runs])
    return os.path.relpath(cell.runs[0].folder, root)


# ---------------------------------------------------------------- measures of a run, problem by problem


def start(run: Run) -> PerProblem | None:
    """Of the base, on val."""
    return _per_problem(base(run)) if _finished(run) else None


def peak(run: Run) -> PerProblem | None:
    """Of the highest evaluation after the start."""
    end = stability(run)
    return _per_problem(end.peak) if end and _finished(run) else None


def terminal(run: Run) -> PerProblem | None:
    """The mean of the last evaluations."""
    end = stability(run)
    if end is None or not _finished(run):
        return None
    last = [_per_problem(record) for record in trained(run) if record["step"] in end.steps]
    known = [one for one in last if one is not None]
    if len(known) < len(last) or len({len(one) for one in known}) > 1:
        return None
    return np.mean(known, axis=0)


def held_out_base(run: Run) -> PerProblem | None:
    """Of the base, on test."""
    pair = _held_out(run)
    return _per_problem(pair[0]) if pair else None


def held_out(run: Run) -> PerProblem | None:
    """Of the policies at the end, on test."""
    pair = _held_out(run)
    return _per_problem(pair[1]) if pair else None


def budget(run: Run) -> float | None:
    """Mean sampled tokens of an episode in the last evaluations, or in the final one on test; None in older runs."""
    end, pair = stability(run) if _finished(run) else None, _held_out(run)
    last = [record for record in trained(run) if end and record["step"] in end.steps]
    last = last or list(pair[1:] if pair else ())
    spent = [record.get("tokens_per_episode") for record in last]
    known = [float(value) for value in spent if isinstance(value, int | float)]
    return float(np.mean(known)) if known and len(known) == len(last) else None


def less(one: Measure, other: Measure) -> Measure:
    """How much more the first has."""
    return lambda run: _minus(one(run), other(run))


def over(
    runs: Sequence[Run], measure: Measure, bounds: tuple[float, float] = (0.0, 1.0)
) -> tuple[Interval, int] | None:
    """Mean and interval of a measure, and of how many runs; None where none has it, or not of as many problems."""
    values = [found for run in runs if (found := measure(run)) is not None]
    if not values or len({len(one) for one in values}) > 1:
        return None
    return over_seeds(np.array(values), bounds=bounds), len(values)


# ---------------------------------------------------------------- tables


HOW = (
    "Means over finished runs that differ in their seed alone, with 95% intervals over seeds and problems, both drawn "
    "at random; of one seed over its problems alone. Intervals of two or three seeds are wide, and still somewhat too "
    "narrow where seeds differ much."
)


def tables_of(runs: Sequence[Run]) -> list[Table]:
    """All that have a row; none where every cell has one run and nothing is to be compared."""
    cells = by_cell(runs)
    found = [on_val(cells), on_test(cells)] if any(len(cell.runs) > 1 for cell in cells) else []
    return [table for table in (*found, contrasts(cells)) if table.rows]


def on_val(cells: Sequence[Cell]) -> Table:
    """How each cell went along its runs."""
    rows = []
    for cell in cells:
        ends = [end for run in cell.runs if _finished(run) and (end := stability(run))]
        found = [_share(cell, measure) for measure in (start, peak, terminal)]
        gain = _points(cell.runs, less(terminal, start), len(cell.runs))
        cliffs = f"{sum(end.cliff for end in ends)} of {len(ends)}" if ends else NONE
        if set(found) - {NONE}:
            rows.append((cell.label, str(len(cell.runs)), *found, gain, cliffs))
    head = ("", "seeds", "base", "peak", "terminal", "terminal over base,\npoints", "cliffs")
    how = f"On validation problems. {HOW} Peak, terminal and cliff are those of each run."
    return Table("Cells", rows, head, how)


def on_test(cells: Sequence[Cell]) -> Table:
    """What the cells came to on problems that nothing was chosen by."""
    rows = []
    for cell in cells:
        found = [_share(cell, measure) for measure in (held_out_base, held_out)]
        gain = _points(cell.runs, less(held_out, held_out_base), len(cell.runs))
        if set(found) - {NONE}:
            rows.append((cell.label, str(len(cell.runs)), *found, gain))
    head = ("", "seeds", "base", "final", "final over base,\npoints")
    return Table("Cells on test problems", rows, head, HOW)


def contrasts(cells: Sequence[Cell]) -> Table:
    """Isolated against shared policies, and workflows against single agents, where both were run."""
    rows = []
    for one, other in _pairs(cells):
        there = {run.config["seed"]: run for run in other.runs}
        mine = [run for run in one.runs if run.config["seed"] in there]
        found = [_points(mine, _against(there, *measured), len(mine)) for measured in MEASURED]
        if set(found) - {NONE}:
            spent = _budgets([(budget(run), budget(there[run.config["seed"]])) for run in mine])
            rows.append((one.label, other.label, str(len(mine)), *found, spent))
    head = ("", "against", "seeds", "base", "peak", "terminal", "test: final", "tokens of\nan episode")
    how = (
        "Differences in points, paired: the same seeds, the same problems, equal settings but for workflow and "
        "policies. Each interval of 95% stands for itself; of one seed it is over problems alone. Peaks are the "
        "highest of several noisy values. Tokens are what both sides sampled on average where the terminal accuracy "
        "was measured; where they are more than 10% apart, it says how many times as many the first took."
    )
    return Table("Cells against each other", rows, head, how, words=2)


def _against(there: Mapping[int, Run], measure: Measure, asked: Callable[[Run], Any]) -> Measure:
    """How much more a run has than the one of its seed, where both were asked the same problems."""

    def difference(run: Run) -> PerProblem | None:
        other = there[run.config["seed"]]
        same = asked(run) is not None and asked(run) == asked(other)
        return _minus(measure(run), measure(other)) if same else None

    return difference


def _budgets(spent: Sequence[tuple[float | None, float | None]]) -> str:
    """Mean tokens of either side, over the seeds that have both, and how many times as many the first took."""
    known = [pair for pair in spent if None not in pair]
    if not known:
        return NONE
    one, other = np.mean(np.array(known, float), axis=0)
    ratio = one / other if other else np.inf
    mark = "" if 1 / UNLIKE <= ratio <= UNLIKE else f"\nx{ratio:.2g} tokens"
    return f"{one:,.0f} : {other:,.0f}{mark}"


def _pairs(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Cell]]:
    for cell in cells:
        parts = cell.name.split("-")
        if len(parts) != 4 or parts[0].startswith("single"):
            continue
        workflow, policy, scale, task = parts
        others: dict[str, tuple[str, ...]] = {
            f"{control}-shared-{scale}-{task}": OTHER_WORKFLOW for control in CONTROLS
        }
        if policy == "isolated" or cell.odd:
            others = {f"{workflow}-shared-{scale}-{task}": OTHER_POLICIES, **others}
        for name, free in others.items():
            for other in (other for other in cells if other.name == name and not other.odd):
                if _without(cell.config, *free) == _without(other.config, *free):
                    yield cell, other


# ---------------------------------------------------------------- parts of these


def _finished(run: Run) -> bool:
    return run.step >= run.steps


def _held_out(run: Run) -> tuple[Record, Record] | None:
    """The base and the final policies on the same test problems, as they were played last; all of them, if ever."""
    if not _finished(run):
        return None
    played = [
        record
        for record in run.evaluations
        if record.get("split") == "test" and record.get("mode") in ("trained", "base")
    ]
    ends = [record for record in played if record["step"] == run.steps]
    if not ends:
        return None
    most = max(record.get("problems") or 0 for record in ends)
    last = next(record for record in reversed(ends) if (record.get("problems") or 0) == most)
    same = ("problems", "samples", "seed", "data")
    bases = [
        record
        for record in played
        if record["step"] == 0 and all(record.get(key) == last.get(key) for key in same)
    ]
    return (bases[-1], last) if bases else None


def _share(cell: Cell, measure: Measure) -> str:
    found = over(cell.runs, measure)
    if found is None:
        return NONE
    (mean, low, high), count = found
    return f"{mean:.1%}\n{100 * low:.1f} – {100 * high:.1f}{_of(count, len(cell.runs))}"


def _points(runs: Sequence[Run], measure: Measure, asked: int) -> str:
    found = over(runs, measure, (-1.0, 1.0))
    if found is None:
        return NONE
    (mean, low, high), count = found
    return f"{100 * mean:+.1f}\n{100 * low:+.1f} to {100 * high:+.1f}{_of(count, asked)}"


def _of(count: int, asked: int) -> str:
    return "" if count == asked else f", {count} of {asked} seeds"


def _per_problem(record: Record | None) -> PerProblem | None:
    values = (record or {}).get("per_problem")
    if not isinstance(values, list) or not values or not all(type(v) in (int, float) for v in values):
        return None
    found = np.array(values, float)
    return found if np.isfinite(found).all() else None


def _minus(a: PerProblem | None, b: PerProblem | None) -> PerProblem | None:
    if a is None or b is None or len(a) != len(b):
        return None
    return a - b


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


def _asked_on_val(run: Run) -> Any:
    return (run.about.get("digests") or {}).get("data val")


def _asked_on_test(run: Run) -> Any:
    pair = _held_out(run)
    return [pair[1].get(key) for key in ("data", "problems", "samples")] if pair else None


# What cells are compared by, and what problems it is about.
MEASURED = (
    (start, _asked_on_val),
    (peak, _asked_on_val),
    (terminal, _asked_on_val),
    (held_out, _asked_on_test),
)
