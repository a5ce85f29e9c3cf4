"""Tables of cells: the results of each over its seeds, and the differences between cells."""

from collections.abc import Mapping, Sequence

import numpy as np

from marl_jax.study.cliffs import TERMINAL, PerProblem, course, fell, form_of, is_cliff, lacks
from marl_jax.study.contrasts import Pair, alike, by_seed, pairs_of, spent
from marl_jax.study.intervals import over_seeds
from marl_jax.study.record import Run
from marl_jax.study.run_tables import runs_table
from marl_jax.study.seeds import Cell, by_cell, difference, measures
from marl_jax.study.wording import NONE, Table, points, share

HOW = (
    "Means over runs that differ only in their seed, with 95% intervals over seeds and problems, both as random "
    "samples; with one seed, over its problems only. Intervals of two or three seeds are wide, and still somewhat too "
    "narrow if seeds differ much."
)


def tables_of(runs: Sequence[Run]) -> list[Table]:
    """The tables that have a row; accuracies of cells only if a cell has several runs."""
    cells = by_cell(runs)
    found = [on_val(cells), on_test(cells)] if any(len(cell.runs) > 1 for cell in cells) else []
    pairs, lines = pairs_of(cells)
    refused = Table("Cells that are not compared", [(line,) for line in lines], words=1, facts=True)
    return [table for table in (*found, contrasts(pairs), refused) if table.rows]


def terminal_tables(runs: Mapping[str, Run]) -> list[Table]:
    """The tables of runs, by their names; if none compares them, a table with a row for each run comes first."""
    found = tables_of(list(runs.values()))
    if all(table.facts for table in found) and runs:
        return [runs_table(runs), *found]
    return found


def on_val(cells: Sequence[Cell]) -> Table:
    """Accuracy of the cells on validation problems, before and along their runs."""
    rows = _rows(cells, ("base", "peak", "terminal"), cliffs=True)
    head = ("", "seeds", "base", "peak", "terminal", "terminal over base,\npoints", "cliffs")
    how = (
        f"On validation problems. {HOW} Peak and terminal need {TERMINAL} evaluations after the start. Cliffs: how "
        "many runs fell, whether all runs together did, and what the texts of those that fell lost besides accuracy."
    )
    return Table("Cells", rows, head, how)


def on_test(cells: Sequence[Cell]) -> Table:
    """Accuracy of the cells on test problems, which were not used to choose anything."""
    head = ("", "seeds", "base", "final", "final over base,\npoints")
    return Table("Cells on test problems", _rows(cells, ("test base", "test final")), head, HOW)


def _rows(cells: Sequence[Cell], shown: Sequence[str], cliffs: bool = False) -> list[tuple[str, ...]]:
    """A row for each cell that has one of the measures `shown`, with the gain of the last over the first."""
    rows = []
    for cell in cells:
        measured = [measures(run) for run in cell.runs]
        texts = [_over_runs([run[name].right if name in run else None for run in measured]) for name in shown]
        gains = [difference(run.get(shown[-1]), run.get(shown[0])) for run in measured]
        if set(texts) - {NONE}:
            texts = [
                f"{NONE}\n{_too_few(cell)}" if text == NONE and name in ("peak", "terminal") else text
                for name, text in zip(shown, texts)
            ]
            row = (cell.label, str(len(measured)), *texts, _over_runs(gains, differences=True))
            rows.append((*row, _fallen(cell)) if cliffs else row)
    return rows


def _fallen(cell: Cell) -> str:
    """How many runs fell by themselves; on a second line, whether they fell together and which form they lost."""
    known = [run for run in cell.runs if fell(run) is not None]
    fallen = [run for run in known if fell(run)]
    together = is_cliff([end for run in cell.runs if (end := course(run))]) if len(known) > 1 else None
    notes = [] if together is None else ["a cliff" if together else "no cliff"]
    notes += [f"form: {form_of(fallen)}"] if fallen else []
    count = f"{len(fallen)} of {len(known)}" if known else NONE
    return "\n".join([count, ", ".join(notes)]) if notes else count


def _too_few(cell: Cell) -> str:
    """Why a cell has no peak and no terminal accuracy."""
    return min(
        (lacks(run) for run in cell.runs if course(run) is None),
        default="seeds have different numbers of problems",
    )


def contrasts(pairs: Sequence[Pair]) -> Table:
    """Pairs of cells with the same problems: first those that differ in one thing, then the others."""
    compared = ("base", "peak", "terminal", "test final")
    rows = []
    for pair in pairs:
        both = by_seed(pair.one, pair.other)
        measured = [(measures(a), measures(b)) for a, b in both]
        gaps = [[difference(a.get(name), b.get(name)) for a, b in measured] for name in compared]
        found = [_over_runs(gap, differences=True) for gap in gaps]
        if set(found) - {NONE}:
            tokens = _budgets(spent(pair.one, pair.other))
            rows.append((pair.one.label, pair.other.label, pair.text, str(len(both)), *found, tokens))
    numbers = ("base", "peak", "terminal", "test: final", "tokens of\nan episode")
    head = ("", "against", "differ in", "seeds", *numbers)
    how = (
        "Differences in points, paired: the same seeds, the same problems. Where cells differ in several things, none "
        "of them alone explains it. No 95% interval is corrected for the others; with one seed it is over problems "
        "only. Peaks are chosen on one half of the problems and measured on the other, both ways round. Tokens are the "
        "means of both sides in the evaluations that give the terminal accuracy; if they are more than 10% apart, "
        "their ratio is below them."
    )
    return Table("Cells against each other", rows, head, how, words=3)


def _over_runs(values: Sequence[PerProblem | None], differences: bool = False) -> str:
    """Mean and interval over the runs with values, with their number if some have none; a dash if problems differ."""
    known = [one for one in values if one is not None]
    if len({len(one) for one in known}) != 1:
        return NONE
    found = over_seeds(np.array(known), bounds=(-1.0, 1.0) if differences else (0.0, 1.0))
    count = "" if len(known) == len(values) else f", {len(known)} of {len(values)} seeds"
    return (points if differences else share)(found) + count


def _budgets(tokens: tuple[float, float] | None) -> str:
    """Mean tokens of both sides, and if they do not match, how many times as many the first took."""
    if tokens is None:
        return NONE
    one, other = tokens
    mark = "" if alike(one, other) else f"\nx{one / other if other else np.inf:.2g} tokens"
    return f"{one:,.0f} : {other:,.0f}{mark}"
