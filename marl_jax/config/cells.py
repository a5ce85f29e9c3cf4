"""Cells of the study by name: {workflow}-{policy}-{scale}-{task}, such as voting-isolated-s-math."""

import dataclasses
import itertools
from collections.abc import Sequence

from marl_jax.fields import nearest

WORKFLOWS = ("single", "voting", "eval_opt", "orch_workers", "single_matched", "single_token_matched")
POLICIES = ("shared", "isolated")
TASKS = ("math", "code")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell. A workflow of one role has one cell, whatever the policy is called."""

    workflow: str
    policy: str
    scale: str
    task: str

    def __str__(self) -> str:
        return f"{self.workflow}-{self.policy}-{self.scale}-{self.task}"


def parse_cell(name: str, scales: Sequence[str]) -> Cell:
    """The cell of a name; the error for a name that has none suggests the nearest."""
    named = name.replace("-isolated-", "-shared-") if name.startswith("single") else name
    cells = {str(cell): cell for cell in all_cells(scales)}
    if named in cells:
        return cells[named]
    near = nearest(name, cells, ".", 0.3)
    raise ValueError(
        f"cell {name!r} does not exist{near} It is {{workflow}}-{{policy}}-{{scale}}-{{task}} with workflow "
        f"{'|'.join(WORKFLOWS)}, policy {'|'.join(POLICIES)}, scale {'|'.join(scales)}, task {'|'.join(TASKS)}"
    )


def all_cells(scales: Sequence[str]) -> list[Cell]:
    """Every cell once."""
    cells = itertools.starmap(Cell, itertools.product(WORKFLOWS, POLICIES, scales, TASKS))
    return [cell for cell in cells if cell.policy == "shared" or not cell.workflow.startswith("single")]
