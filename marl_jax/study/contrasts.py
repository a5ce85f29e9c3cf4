"""Cells against each other: which pairs are compared, in what they differ, and by how much, seed by seed.

    cells ──pairs_of──► pairs, or why not ──paired_gaps──► differences [seeds, problems]

Two cells are compared run by run and problem by problem, over the seeds that both have, if they were evaluated on the
same problems. The fields in which they differ, and differences of machine and code, are shown, not only their names.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from marl_jax.study.record import Run
from marl_jax.study.seeds import TOKENS, Cell, budget, difference, differing, measures

WORKFLOW = ("workflow", "policies.map", "advantages.group")  # fields that change with the workflow
MOST = 12  # pairs that differ in several things; if there are more, none of them is shown
MADE = ("machine", "road", "jax", "code")  # what a run was made by; it does not distinguish cells
UNLIKE = 1.1  # budgets whose ratio is larger do not match, and tables mark them


class Pair(NamedTuple):
    """Two cells, of which `one` minus `other` is reported; a single agent, the control, is `other`."""

    one: Cell
    other: Cell
    differ: tuple[str, ...]  # paths of the fields that differ

    @property
    def planned(self) -> bool:
        """Whether they differ in one thing: workflow against single agent, policies, or another part of the fields.

        Learner and advantages count as one part: a regime, such as the original study's, sets fields of both.
        """
        if "workflow.name" in self.differ:
            return all(map(_of_workflow, self.differ)) and self.other.single > self.one.single
        parts = {path.partition(".")[0].replace("advantages", "learner") for path in self.differ}
        return len(parts) == 1 and not any(path.startswith("policies.base") for path in self.differ)

    @property
    def text(self) -> str:
        """What they differ in (of another workflow only its name); on a second line, what made them that differs."""
        other = "workflow.name" in self.differ
        shown = [
            path for path in self.differ if path == "workflow.name" or not (other and _of_workflow(path))
        ]
        names = ", ".join([*shown[:3], *([f"{len(shown) - 3} more"] if len(shown) > 3 else [])])
        return names + (f"\nmade with another {self.made}" if self.made else "")

    @property
    def made(self) -> str:
        """Which of machine, road, JAX and code differ between two runs of a seed; what was not recorded is left out."""
        both = [(_made_by(a), _made_by(b)) for a, b in by_seed(self.one, self.other)]
        unlike = lambda a, b: None not in (a, b) and a != b
        return ", ".join(name for name in MADE if any(unlike(a[name], b[name]) for a, b in both))

    @property
    def refused(self) -> str:
        """Why they cannot be compared; empty if both have a measure on the same problems."""
        if not self.differ:
            return "they differ only in their names"
        if "evaluation.metric" in self.differ:
            return "their evaluation.metric differs"
        both = [(measures(a), measures(b)) for a, b in by_seed(self.one, self.other)]
        if not both:
            return "they have no seed in common"
        shared = [(a[name], b[name]) for a, b in both for name in a if name in b]
        if not shared:
            return "they have no kind of evaluation in common"
        comparable = any(difference(*answers) is not None for answers in shared)
        return "" if comparable else "their problems differ"


def pairs_of(cells: Sequence[Cell]) -> tuple[list[Pair], list[str]]:
    """The pairs to compare, first those that differ in one thing, and a line for each reason not to compare pairs."""
    planned, others, refused = list[Pair](), list[Pair](), dict[str, list[str]]()
    keys = [(-cell.single, len(set(cell.runs[0].policy_map.values())), k) for k, cell in enumerate(cells)]
    for one, key in zip(cells, keys):
        if not one.finished:
            refused.setdefault("not all steps are made", []).append(one.label)
        for other, other_key in zip(cells, keys):
            if other_key < key and one.finished and other.finished:
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


def paired_gaps(pairs: Sequence[tuple[Run, Run]], measure: str, other_measure: str) -> np.ndarray:
    """Float[S, P]: `measure` of the first run minus `other_measure` of the second, for pairs on the same problems."""
    gaps = [difference(measures(a).get(measure), measures(b).get(other_measure)) for a, b in pairs]
    known = [gap for gap in gaps if gap is not None]
    return np.array(known) if len({len(gap) for gap in known}) == 1 else np.zeros((0, 0))


def machine_of(run: Run) -> str:
    """The processor or accelerator that a run was trained on; empty if it was not recorded."""
    return str(run.part("made").get("machine") or run.part("versions").get("device") or "")


def _made_by(run: Run) -> dict[str, Any]:
    """{name in MADE: its value, or None if it was not recorded}."""
    versions = run.part("versions")
    made = machine_of(run) or None, run.config.get("road"), versions.get("jax"), versions.get("code")
    return dict(zip(MADE, made))


def by_seed(one: Cell, other: Cell) -> list[tuple[Run, Run]]:
    """Pairs of runs with the same seed."""
    others = {run.config["seed"]: run for run in other.runs}
    return [(run, others[run.config["seed"]]) for run in one.runs if run.config["seed"] in others]


def spent(one: Cell, other: Cell, key: str = TOKENS) -> tuple[float, float] | None:
    """The mean budgets of two cells over the common seeds whose budgets are known; None without such a seed."""
    both = [(budget(a, key), budget(b, key)) for a, b in by_seed(one, other)]
    known = [pair for pair in both if None not in pair]
    if not known:
        return None
    first, second = np.mean(np.array(known, float), axis=0)
    return float(first), float(second)


def alike(one: float, other: float) -> bool:
    """Whether two budgets match."""
    return other / UNLIKE <= one <= other * UNLIKE


def _of_workflow(path: str) -> bool:
    return path.startswith(WORKFLOW)
