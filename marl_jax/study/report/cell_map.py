"""The map of a study: a row for each workflow and policy map, a column for each scale and task, gains in the cells."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from marl_jax.study.cliffs import course, is_cliff
from marl_jax.study.record import Run, base, trained
from marl_jax.study.seeds import by_cell

HOW = (
    "Terminal accuracy (of the last evaluation, if a run has fewer than three) minus base, in points, mean over the "
    "seeds; green is a gain, red a loss, in full colour at {:.1f} points, the largest here; ▼ is a cliff of the cell "
    "over its seeds. Each number below links to the run of a seed."
)


@dataclasses.dataclass(frozen=True)
class CellMap:
    """Texts and shades of a table; None for a cell without a run."""

    head: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Mapping[str, Any] | None]]]
    how: str


def _gain(run: Run) -> float | None:
    if (along := course(run)) and along.base is not None:
        return float(along.terminal.mean() - along.base.mean())
    start, last = base(run), trained(run)[-1:]
    return last[0]["accuracy"] - start["accuracy"] if start and last and last[0] is not start else None


def cell_map(runs: Mapping[str, Run]) -> CellMap:
    """The map of runs, by the names of their folders; empty if none has the name of a study cell and was evaluated."""
    names = {id(run): name for name, run in runs.items()}
    entries: dict[tuple[str, str], dict[str, Any]] = {}
    for cell in by_cell(list(runs.values())):
        parts = cell.name.split("-")
        gains = [gain for run in cell.runs if (gain := _gain(run)) is not None]
        if len(parts) == 4 and gains:
            row = " ".join(parts[:2]) + cell.label[len(cell.name) :].replace("+", " + ")
            entries[row, " ".join(parts[2:])] = {
                "gain": float(np.mean(gains)),
                "cliff": bool(is_cliff([one for one in map(course, cell.runs) if one])),
                "links": [(f"{names[id(run)]}/report.html", run.config.get("seed")) for run in cell.runs],
            }
    largest = max((abs(entry["gain"]) for entry in entries.values()), default=0.0)
    for entry in entries.values():
        gain = entry["gain"]
        shade = f"{abs(gain) / (largest or 1.0):.2f}"
        entry.update(gain=f"{100 * gain:+.1f}", sign="up" if gain > 0 else "down", shade=shade)
    head = sorted({column for _, column in entries})
    rows = list(dict.fromkeys(row for row, _ in entries))
    table = [(row, [entries.get((row, column)) for column in head]) for row in rows]
    return CellMap(head, table, HOW.format(100 * largest))
