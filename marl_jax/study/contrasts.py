"""Cells against each other: which pairs are compared, in what they differ, and by how much, seed by seed.

    cells ──pairs_of──► pairs, or why not ──paired_gaps──► differences [seeds, problems]

Two cells are compared run by run and problem by problem, over the seeds that both have, where they met the same
problems; what their configurations differ in, and what made them, stands beside it, whatever their names.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from marl_jax.study.record import Run
from marl_jax.study.seeds import TOKENS, Cell, budget, difference, differing, measures

WORKFLOW = ("workflow", "policies.map", "advantages.group")  # what makes another workflow
MOST = 12  # of pairs that differ in several things; more of them are not shown
MADE = ("machine", "road", "jax", "code")  # what a run was made by, beside what it was asked for
UNLIKE = 1.1  # budgets whose ratio is larger are marked, and match nothing


class Pair(NamedTuple):
    """Two cells, the first above the second; the second is the control where one of them is."""

    one: Cell
    other: Cell
    differ: tuple[str, ...]  # fields, by their paths

    @property
    def planned(self) -> bool:
        """Whether they differ in one thing: workflow against single agent, policies, or another part of the fields.

        Learner and advantages are one part: a regime, as the original's, is in both.
        """
        if "workflow.name" in self.differ:
            return all(map(_of_workflow, self.differ)) and self.other.single > self.one.single
        parts = {path.partition(".")[0].replace("advantages", "learner") for path in self.differ}
        return len(parts) == 1 and not any(path.startswith("policies.base") for path in self.differ)

    @property
    def text(self) -> str:
        """What they differ in, beneath it what made them; of another workflow its name alone."""
        other = "workflow.name" in self.differ
        shown = [
            path for path in self.differ if path == "workflow.name" or not (other and _of_workflow(path))
        ]
        told = ", ".join([*shown[:3], *([f"{len(shown) - 3} more"] if len(shown) > 3 else [])])
        return told + (f"\nmade with another {self.made}" if self.made else "")

    @property
    def made(self) -> str:
        """Which of machine, road, JAX and code differ between two runs of a seed; what was not recorded is left out."""
        both = [(_made_by(run), _made_by(its)) for run, its in by_seed(self.one, self.other)]
        apart = lambda mine, its: None not in (mine, its) and mine != its
        return ", ".join(name for name in MADE if any(apart(mine[name], its[name]) for mine, its in both))

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
        if not one.finished:
            refused.setdefault("it has not made all its steps", []).append(one.label)
        for other, its in zip(cells, order):
            if its < mine and one.finished and other.finished:
                pair = Pair(one, other, differing(one, other))
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


def paired_gaps(pairs: Sequence[tuple[Run, Run]], mine: str, its: str) -> np.ndarray:
    """Float[S, P]: how much more the first of each pair has, of those where both have it and met the same problems."""
    found = [difference(measures(one).get(mine), measures(other).get(its)) for one, other in pairs]
    known = [gap for gap in found if gap is not None]
    return np.array(known) if len({len(gap) for gap in known}) == 1 else np.zeros((0, 0))


def machine_of(run: Run) -> str:
    """The processor or accelerator that it was trained on; empty where it was not recorded."""
    device = (run.about.get("versions") or {}).get("device") or ""
    return str((run.about.get("made") or {}).get("machine") or device)


def _made_by(run: Run) -> dict[str, Any]:
    """{what a run was made by: None where it was not recorded}."""
    versions = run.about.get("versions") or {}
    made = machine_of(run) or None, run.config.get("road"), versions.get("jax"), versions.get("code")
    return dict(zip(MADE, made))


def by_seed(one: Cell, other: Cell) -> list[tuple[Run, Run]]:
    """Runs of both with the same seed."""
    there = {run.config["seed"]: run for run in other.runs}
    return [(run, there[run.config["seed"]]) for run in one.runs if run.config["seed"] in there]


def spent(one: Cell, other: Cell, of: str = TOKENS) -> tuple[float, float] | None:
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


def _of_workflow(path: str) -> bool:
    return path.startswith(WORKFLOW)
