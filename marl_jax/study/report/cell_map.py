"""The map of a study: a row for each workflow and policy map, a column for each scale and task, gains in the cells."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from marl_jax.study.cliffs import course, is_cliff
from marl_jax.study.record import Run, base, trained
from marl_jax.study.seeds import by_cell

__all__ = ["CellMap", "cell_map"]

STRONGEST = 0.4  # a gain of so much has the full colour

HOW = (
    "Final accuracy minus base, in points, mean over the seeds; green is a gain, red a loss, ▼ a cliff. "
    "Each number below leads to the run of a seed."
)


@dataclasses.dataclass(frozen=True)
class CellMap:
    """Texts and shades of a table; nothing stands for a cell without a run."""

    head: Sequence[str] = ()
    rows: Sequence[tuple[str, Sequence[Mapping[str, Any] | None]]] = ()
    how: str = HOW


def cell_map(runs: Mapping[str, Run]) -> CellMap:
    """Of runs by the names of their folders; empty where none is a cell of the study by its name and was evaluated."""
    names = {id(run): name for name, run in runs.items()}
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for cell in by_cell(list(runs.values())):
        parts = cell.name.split("-")
        if len(parts) != 4:
            continue
        gains = [
            trained(run)[-1]["accuracy"] - start["accuracy"] for run in cell.runs if (start := base(run))
        ]
        courses = [one for one in map(course, cell.runs) if one]
        if gains:
            gain = float(np.mean(gains))
            row = " ".join(parts[:2]) + cell.label[len(cell.name) :]
            found[row, " ".join(parts[2:])] = {
                "gain": f"{100 * gain:+.1f}",
                "sign": "up" if gain > 0 else "down",
                "shade": f"{min(abs(gain) / STRONGEST, 1):.2f}",
                "cliff": bool(courses) and bool(is_cliff(courses)),
                "links": [(f"{names[id(run)]}/report.html", run.config.get("seed")) for run in cell.runs],
            }
    head = sorted({column for _, column in found})
    rows = list(dict.fromkeys(row for row, _ in found))
    return CellMap(head, [(row, [found.get((row, column)) for column in head]) for row in rows])
