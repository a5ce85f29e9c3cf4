"""The map of a study: a row for each workflow and policy map, a column for each scale and task, gains in the cells."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from marl_jax.study.cliffs import course, is_cliff
from marl_jax.study.record import Run, base, trained
from marl_jax.study.seeds import by_cell

HOW = (
    "Final accuracy minus base, in points, mean over the seeds; green is a gain, red a loss, "
    "in full colour at {:.1f} points, the largest here; ▼ is a cliff. Each number below links to the run of a seed."
)


@dataclasses.dataclass(frozen=True)
class CellMap:
    """Texts and shades of a table; None for a cell without a run."""

    head: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Mapping[str, Any] | None]]]
    how: str


def cell_map(runs: Mapping[str, Run]) -> CellMap:
    """The map of runs, by the names of their folders; empty if none has the name of a study cell and was evaluated."""
    names = {id(run): name for name, run in runs.items()}
    entries: dict[tuple[str, str], Mapping[str, Any]] = {}
    for cell in by_cell(list(runs.values())):
        parts = cell.name.split("-")
        if len(parts) != 4:
            continue
        ends = [(trained(run)[-1], start) for run in cell.runs if (start := base(run))]
        gains = [last["accuracy"] - start["accuracy"] for last, start in ends if last is not start]
        courses = [one for one in map(course, cell.runs) if one]
        if gains:
            row = " ".join(parts[:2]) + cell.label[len(cell.name) :].replace("+", " + ")
            entries[row, " ".join(parts[2:])] = {
                "gain": float(np.mean(gains)),
                "cliff": bool(courses) and bool(is_cliff(courses)),
                "links": [(f"{names[id(run)]}/report.html", run.config.get("seed")) for run in cell.runs],
            }
    largest = max((abs(cell["gain"]) for cell in entries.values()), default=0.0)
    head = sorted({column for _, column in entries})
    rows = list(dict.fromkeys(row for row, _ in entries))
    shown = {place: _shaded(cell, largest) for place, cell in entries.items()}
    table = [(row, [shown.get((row, column)) for column in head]) for row in rows]
    return CellMap(head, table, HOW.format(100 * largest))


def _shaded(cell: Mapping[str, Any], largest: float) -> Mapping[str, Any]:
    """A cell with its gain as text, the gain's sign, and its share of the largest gain."""
    gain = cell["gain"]
    sign, shade = "up" if gain > 0 else "down", abs(gain) / (largest or 1.0)
    return {**cell, "gain": f"{100 * gain:+.1f}", "sign": sign, "shade": f"{shade:.2f}"}
