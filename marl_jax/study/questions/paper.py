"""The findings of the study's paper compared with the runs here: agrees, agrees in part, does not agree, cannot tell.

answers ──► verdicts of tests, falls, gradients ──► a row for each finding
"""

from collections.abc import Sequence

from scipy import stats

from marl_jax.study.cliffs import course, fell, form_lost, is_cliff
from marl_jax.study.contrasts import by_seed
from marl_jax.study.questions.bars import LEVEL, NOT_RUN
from marl_jax.study.questions.findings import AT_PEAK, BASE, SEEDS, Answered, Test, sharing_alone, tally
from marl_jax.study.questions.mechanisms import ABOVE, growth_of_several
from marl_jax.study.seeds import Cell
from marl_jax.study.wording import NONE, Table
from marl_jax.workflows import BUILT_IN

AGREES, PARTLY, DIFFERS, UNSURE = "agrees", "agrees in part", "does not agree", "cannot tell"

HOW = (
    "Findings of the paper, by its abstract (arXiv 2605.24202, language models of 0.6 to 4 billion parameters), "
    "compared with the runs here. Each verdict follows from the evidence next to it. Differences agree if more than "
    "half of them are shown to have the paper's sign; those with fewer than three seeds show nothing."
)


def agreement(answered: Answered) -> Table:
    """A row for each finding: the verdict, and the numbers that it follows from."""
    workflows = [cell for cell in answered.cells if not cell.single and cell.finished]
    isolated, shared = (
        [cell for cell in workflows if getattr(cell, name)] for name in ("isolated", "shared")
    )
    rows = [
        ("Training usually improves a workflow on its base", *_gains(answered.judged, workflows)),
        ("Isolated policies reach a higher peak", *_signs(_of(answered.judged, 2, AT_PEAK))),
        ("Isolated policies fall off a cliff more often", *_cliffs(answered)),
        ("Shared policies fail, too, in another shape", *_failures(shared, isolated)),
        (
            "Parallel agents amplify their role's gradient and make isolated policies fall",
            *_amplified(answered, isolated),
        ),
        ("Under a shared policy one role has most of the gradient and captures it", *_captured(answered)),
    ]
    return Table("The paper's findings and ours", rows, ("the paper", "here", "evidence"), HOW, words=3)


Verdict = tuple[str, str]  # the verdict, and the numbers that it follows from


def _gains(judged: Sequence[Test], workflows: Sequence[Cell]) -> Verdict:
    names, tested = {cell.name for cell in workflows}, {f"{cell.label} over base" for cell in workflows}
    verdict, by = _signs([one for one in _of(judged, 1, BASE) if one.label in tested])
    scales, tasks = ({name.split("-")[place] for name in names if name.count("-") == 3} for place in (2, 3))
    if min(len(scales), len(tasks)) < 2 and verdict != NOT_RUN:
        by += f"; only for {' and '.join(sorted(scales))} on {' and '.join(sorted(tasks))}"
    return verdict, by


def _signs(judged: Sequence[Test]) -> Verdict:
    """Differences that are usually positive in the paper agree if more than half of them are shown to be positive."""
    higher, lower = (sum(one.verdict == sign for one in judged) for sign in ("higher", "lower"))
    verdict = PARTLY if higher and lower else UNSURE
    if max(higher, lower) > len(judged) / 2:
        verdict = AGREES if higher > lower else DIFFERS
    return (verdict, tally(judged)) if judged else (NOT_RUN, "")


def _cliffs(answered: Answered) -> Verdict:
    """A sign test over the pairs of runs of one seed in which one run fell and the other did not."""
    sides = [found for pair in answered.pairs if (found := sharing_alone(pair))]
    pairs = [(fell(a), fell(b)) for both in sides for a, b in by_seed(*both)]
    known = [pair for pair in pairs if None not in pair]
    if not known:
        return NOT_RUN, ""
    isolated, shared = (sum(map(bool, side)) for side in zip(*known))
    discordant = [one for one, other in known if one != other]
    p = float(stats.binomtest(sum(map(bool, discordant)), len(discordant)).pvalue) if discordant else 1.0
    by = f"in {len(known)} pairs of runs {isolated} isolated and {shared} shared ones fell, p {p:.2g}"
    return (UNSURE if p > LEVEL else AGREES if isolated > shared else DIFFERS), by


def _failures(shared: Sequence[Cell], isolated: Sequence[Cell]) -> Verdict:
    runs, others = (
        [run for cell in cells for run in cell.runs if fell(run) is not None] for cells in (shared, isolated)
    )
    if not runs:
        return NOT_RUN, ""
    lost = lambda some: f"{sum(bool(form_lost(run)) for run in some)} of {len(some)}"
    by = (
        f"{sum(bool(fell(run)) for run in runs)} of {len(runs)} shared runs fell; a role's texts lost their "
        f"form in {lost(runs)} shared and {lost(others)} isolated runs"
    )
    return (AGREES if any(map(_is_cliff, shared)) else UNSURE), by


def _amplified(answered: Answered, isolated: Sequence[Cell]) -> Verdict:
    """Agrees if amplification grows faster than for independent agents and an isolated cell of several agents fell."""
    if not (bars := answered.findings[2].bars):
        return NOT_RUN, ""
    power = growth_of_several(bars)
    verdicts = [cliff for cell in isolated if _agents(cell) > 1 and (cliff := _is_cliff(cell)) is not None]
    by = (
        "relative to the mean length of one agent's part, the sum of n parts (2 or more) grows with n to the power of "
        f"{power.mean:.2f} ({power.low:.2f} – {power.high:.2f}), where 0.5 means independent agents; "
        f"{sum(verdicts)} of {len(verdicts)} isolated cells fell"
    )
    if power.low <= 0.5 + 1e-9:
        return (DIFFERS if power.high < 0.5 - 1e-9 else UNSURE), by
    return (AGREES if any(verdicts) else PARTLY if verdicts else UNSURE), by


def _captured(answered: Answered) -> Verdict:
    finding = answered.findings[3]
    if not finding.tables:
        return NOT_RUN, ""
    shares, ranks = finding.tables
    uneven = [cell for cell, _, verdict, *_ in shares.rows if verdict == ABOVE]
    cells = len({cell for cell, *_ in shares.rows})
    held_out = ranks.rows[1]
    rho, p = held_out[3:]
    few = rho == NONE or "least possible" in p
    after = "too few held-out seeds to test its effect" if few else f"rank correlation {rho}, p {p}"
    named = f" ({'; '.join(uneven)})" if uneven else ""
    by = f"one role has more than an even share in {len(uneven)} of {cells} cells{named}; {after}"
    follows = not few and rho.startswith("-") and float(p) < LEVEL  # more dominance is followed by a loss
    return (UNSURE if not uneven else AGREES if follows else PARTLY), by


# ---------------------------------------------------------------- details


def _of(judged: Sequence[Test], question: int, against: str) -> list[Test]:
    return [one for one in judged if (one.question, one.against) == (question, against)]


def _agents(cell: Cell) -> int:
    """The most parallel calls of one role of the cell's workflow; 0 if the workflow is not built in."""
    chosen = cell.config["workflow"]
    played = BUILT_IN.get(chosen["name"])
    return max(played.slots_of(role, chosen.get("settings")) for role in played.roles) if played else 0


def _is_cliff(cell: Cell) -> bool | None:
    """Whether a cell fell over its seeds; None if these are too few for a claim, or if it is not known."""
    ends = [end for run in cell.runs if (end := course(run))]
    return is_cliff(ends) if len(ends) >= SEEDS else None
