"""The five findings of the study's paper against what its questions found here: agrees, does not agree, cannot tell.

answers ──► verdicts of tests, falls, gradients ──► a row for each finding
"""

from collections.abc import Sequence

from scipy import stats

from marl_jax.study.cliffs import course, fell, form_lost, is_cliff
from marl_jax.study.contrasts import by_seed
from marl_jax.study.questions.bars import NOT_RUN
from marl_jax.study.questions.findings import AT_PEAK, BASE, LEVEL, SEEDS, Answered, Judged, told
from marl_jax.study.record import Run
from marl_jax.study.seeds import Cell
from marl_jax.study.wording import NONE, Table

__all__ = ["agreement"]

AGREES, PARTLY, DIFFERS, UNSURE = "agrees", "agrees in part", "does not agree", "cannot tell"
PARALLEL = "voting", "orch_workers"  # whose roles answer several times at once

HOW = (
    "What the paper found with language models of 0.6 to 4 billion parameters (arXiv 2605.24202, as its abstract has "
    "it), against the runs here. The verdict follows from the tests and counts beside it. Differences agree where more "
    "than half of them are shown to have the paper's sign; those with fewer than three seeds show nothing."
)


def agreement(said: Answered) -> Table:
    """A row for each finding: the verdict, and what it rests on."""
    workflows = [cell for cell in said.cells if not cell.single and not cell.early]
    isolated, shared = list(filter(_apart, workflows)), list(filter(_together, workflows))
    rows = [
        ("Training usually improves a workflow on its base", *_gains(said.judged, workflows)),
        ("Isolated policies reach a higher peak", *_signs(_of(said.judged, 2, AT_PEAK))),
        ("Isolated policies fall off a cliff more often", *_cliffs(isolated, shared)),
        ("Shared policies fail, too, in another shape", *_failures(shared, isolated)),
        (
            "Parallel agents amplify their role's gradient and make isolated policies fall",
            *_amplified(said, isolated),
        ),
        ("Under a shared policy one role has most of the gradient and captures it", *_captured(said)),
    ]
    return Table("The paper's findings, and these", rows, ("the paper", "here", "by"), HOW, words=3)


Verdict = tuple[str, str]  # and what it rests on


def _gains(judged: Sequence[Judged], workflows: Sequence[Cell]) -> Verdict:
    names = {cell.name for cell in workflows}
    verdict, by = _signs(
        [one for one in _of(judged, 1, BASE) if one.test.label.split("+")[0].split()[0] in names]
    )
    scales, tasks = ({name.split("-")[place] for name in names if name.count("-") == 3} for place in (2, 3))
    if min(len(scales), len(tasks)) < 2 and verdict != NOT_RUN:
        by += f"; of {' and '.join(sorted(scales))} on {' and '.join(sorted(tasks))} alone"
    return verdict, by


def _signs(judged: Sequence[Judged]) -> Verdict:
    """Of differences that the paper usually has above zero: more than half of all must be shown to be."""
    higher, lower = (sum(one.verdict == sign for one in judged) for sign in ("higher", "lower"))
    verdict = PARTLY if higher and lower else UNSURE
    if max(higher, lower) > len(judged) / 2:
        verdict = AGREES if higher > lower else DIFFERS
    return (verdict, told(judged)) if judged else (NOT_RUN, "")


def _cliffs(isolated: Sequence[Cell], shared: Sequence[Cell]) -> Verdict:
    """By a sign test over pairs of runs of one seed, of which one fell and the other did not."""
    pairs = [
        (_fell(one), _fell(other))
        for mine in isolated
        for its in shared
        if _but_policies(mine) == _but_policies(its)
        for one, other in by_seed(mine, its)
    ]
    known = [pair for pair in pairs if None not in pair]
    if not known:
        return NOT_RUN, ""
    ours, theirs = (sum(map(bool, side)) for side in zip(*known))
    only = [one for one, other in known if one != other]
    p = float(stats.binomtest(sum(map(bool, only)), len(only)).pvalue) if only else 1.0
    by = f"of {len(known)} pairs of runs {ours} isolated and {theirs} shared ones fell, p {p:.2g}"
    return (UNSURE if p > LEVEL else AGREES if ours > theirs else DIFFERS), by


def _failures(shared: Sequence[Cell], isolated: Sequence[Cell]) -> Verdict:
    runs, others = (
        [run for cell in cells for run in cell.runs if _fell(run) is not None] for cells in (shared, isolated)
    )
    if not runs:
        return NOT_RUN, ""
    lost = lambda some: f"{sum(bool(form_lost(run)) for run in some)} of {len(some)}"
    by = (
        f"{sum(bool(_fell(run)) for run in runs)} of {len(runs)} shared runs fell; the texts of some role lost their "
        f"form in {lost(runs)}, and in {lost(others)} isolated ones"
    )
    return (AGREES if any(map(_is_cliff, shared)) else UNSURE), by


def _amplified(said: Answered, isolated: Sequence[Cell]) -> Verdict:
    bars = said.findings[2].bars
    if not bars:
        return NOT_RUN, ""
    cells = [
        cell for cell in isolated if cell.config["workflow"]["name"] in PARALLEL and len(cell.runs) >= SEEDS
    ]
    grows, falls = bars[-1].value.low > 1, sum(map(_is_cliff, cells))
    by = f"{bars[-1].label} amplify it {bars[-1].value.mean:.2f} times; {falls} of {len(cells)} isolated cells fell"
    if not grows:
        return (DIFFERS if bars[-1].value.high < 1 else UNSURE), by
    return (AGREES if falls else PARTLY), by


def _captured(said: Answered) -> Verdict:
    finding = said.findings[3]
    if not finding.bars or finding.table is None:
        return NOT_RUN, ""
    roles: dict[str, list[tuple[float, float]]] = {}  # of each cell, mean and lower end of each share
    for bar in finding.bars:
        roles.setdefault(bar.label.rpartition(": ")[0], []).append((bar.value.mean, bar.value.low))
    uneven = sum(max(shares)[1] > 1 / len(shares) for shares in roles.values())
    _, held_out, _ = finding.table.rows
    rho, p = held_out[3:]
    after = "too few held-out seeds for what follows" if rho == NONE else f"rank correlation {rho}, p {p}"
    by = f"one role has more than an even share in {uneven} of {len(roles)} cells; {after}"
    follows = rho.startswith("-") and float(p) <= LEVEL  # more dominance, and then a loss
    return (UNSURE if not uneven else AGREES if follows else PARTLY), by


# ---------------------------------------------------------------- details


def _of(judged: Sequence[Judged], question: int, against: str) -> list[Judged]:
    return [one for one in judged if (one.test.question, one.test.against) == (question, against)]


def _apart(cell: Cell) -> bool:
    return len(set(cell.runs[0].policy_map.values())) == len(cell.runs[0].policy_map) > 1


def _together(cell: Cell) -> bool:
    return len(set(cell.runs[0].policy_map.values())) == 1 < len(cell.runs[0].policy_map)


def _but_policies(cell: Cell) -> str:
    """A cell's name with what was changed in it, without its policies: that of its counterpart."""
    return cell.runs[0].folder.parent.name.replace("-isolated-", "-").replace("-shared-", "-")


def _fell(run: Run) -> bool | None:
    return fell(run) if run.finished else None


def _is_cliff(cell: Cell) -> bool:
    """Whether a cell fell over its seeds, where these are enough for a claim."""
    ends = [end for run in cell.runs if (end := course(run))]
    return len(ends) >= SEEDS and bool(is_cliff(ends))
