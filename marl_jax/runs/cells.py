"""Cells of the study by name: {workflow}-{policy}-{scale}-{task}, such as voting-isolated-s-math."""

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Literal, cast

WORKFLOWS = ("single", "voting", "eval_opt", "orch_workers", "single_matched", "single_token_matched")
POLICIES = ("shared", "isolated")
TASKS = ("math", "code")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell. A workflow of one role has one cell, whatever the policy is called."""

    workflow: str
    policy: Literal["shared", "isolated"]
    scale: str
    task: Literal["math", "code"]

    def __str__(self) -> str:
        return f"{self.workflow}-{self.policy}-{self.scale}-{self.task}"


def parse_cell(name: str, scales: Sequence[str]) -> Cell:
    """The cell of a name; a name that is none gets the nearest one told."""
    parts = name.split("-")
    choices = (WORKFLOWS, POLICIES, scales, TASKS)
    if len(parts) == 4 and all(part in known for part, known in zip(parts, choices)):
        workflow, policy, scale, task = parts
        policy = "shared" if workflow.startswith("single") else policy
        return Cell(workflow, cast(Literal["shared"], policy), scale, cast(Literal["math"], task))
    close = difflib.get_close_matches(name, [str(cell) for cell in all_cells(scales)], 1, 0.3)
    hint = f"did you mean '{close[0]}'? " if close else ""
    raise ValueError(
        f"cell {name!r} does not exist: {hint}It is {{workflow}}-{{policy}}-{{scale}}-{{task}} with workflow "
        f"{'|'.join(WORKFLOWS)}, policy {'|'.join(POLICIES)}, scale {'|'.join(scales)}, task {'|'.join(TASKS)}"
    )


def all_cells(scales: Sequence[str]) -> list[Cell]:
    """Every cell once."""
    return [
        Cell(workflow, cast(Literal["shared"], policy), scale, cast(Literal["math"], task))
        for workflow in WORKFLOWS
        for policy in (POLICIES[:1] if workflow.startswith("single") else POLICIES)
        for scale in scales
        for task in TASKS
    ]
