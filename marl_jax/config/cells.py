"""Cells by name: {workflow}-{policy}-{scale}-{task}, such as voting-isolated-s-math.

Every built-in workflow has cells for the families of tasks that it declares. Those of the study are a separate set.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from marl_jax.fields import nearest
from marl_jax.workflows import BUILT_IN

STUDY = ("single", "voting", "eval_opt", "orch_workers", "single_matched", "single_token_matched")
WORKFLOWS = (*STUDY, *(name for name in BUILT_IN if name not in STUDY))
POLICIES = ("shared", "isolated")
TASKS = ("math", "code")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell. For a workflow of one role, both policies are the same, so it has only the shared cell."""

    workflow: str  # one of WORKFLOWS
    policy: str  # one of POLICIES
    scale: str  # size of the model, such as `s` or `0.6b`
    task: str  # the family of the data, `math` or `code`

    def __str__(self) -> str:
        return f"{self.workflow}-{self.policy}-{self.scale}-{self.task}"


def parse_cell(name: str, scales: Sequence[str]) -> Cell:
    """The cell of this name; the error for an unknown name suggests the nearest one."""
    canonical = name.replace("-isolated-", "-shared-") if _has_one_role(name.partition("-")[0]) else name
    cells = {str(cell): cell for cell in all_cells(scales)}
    if canonical in cells:
        return cells[canonical]
    near = nearest(name, cells, ".", 0.3)
    empty = "the name of the cell is empty: give --config=FILE:CELL."
    missing = f"cell {name!r} does not exist{near}" if name else empty
    raise ValueError(
        f"{missing} A name is {{workflow}}-{{policy}}-{{scale}}-{{task}} with workflow "
        f"{'|'.join(WORKFLOWS)}, policy {'|'.join(POLICIES)}, scale {'|'.join(scales)}, task {'|'.join(TASKS)}"
    )


def all_cells(scales: Sequence[str]) -> list[Cell]:
    """Every cell once."""
    cells = itertools.starmap(Cell, itertools.product(WORKFLOWS, POLICIES, scales, TASKS))
    return [
        cell
        for cell in cells
        if cell.task in BUILT_IN[cell.workflow].families
        and (cell.policy == "shared" or not _has_one_role(cell.workflow))
    ]


def of_study(name: str) -> bool:
    """Whether a cell belongs to the study."""
    return name.partition("-")[0] in STUDY


def _has_one_role(workflow: str) -> bool:
    """Whether a workflow has only one role, and so only one policy."""
    return workflow in BUILT_IN and len(BUILT_IN[workflow].roles) == 1
