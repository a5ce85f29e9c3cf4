"""The questions of the study, each answered by the existing runs: a sentence, bars with intervals, and the tests.

    runs ──► cells, pairs ──► the differences that each question asks for ──► tests, corrected together ──► Finding

Two cells answer a question if their configurations differ only in the fields that it asks about. The tests of one
question that have enough seeds for a claim are a family for Holm's correction, so that an answer does not depend on the
other questions. The answer to a question without runs says so.
"""

from collections.abc import Iterable, Sequence
from math import log
from typing import NamedTuple

import numpy as np

from marl_jax.study.cliffs import TERMINAL, course, fell
from marl_jax.study.contrasts import Pair, alike, by_seed, paired_gaps, pairs_of, spent
from marl_jax.study.intervals import Interval, holm, over_seeds, p_value
from marl_jax.study.questions.bars import LEVEL, NOT_RUN, Bar, Finding
from marl_jax.study.questions.mechanisms import amplification, capture, prediction
from marl_jax.study.record import Run
from marl_jax.study.seeds import CALLS, TOKENS, Cell, budget, by_cell
from marl_jax.study.wording import NONE, Table, p_text

UNMATCHED = "not matched: "
SEEDS = 3  # fewer make no claim: over two seeds that differ much, only 87% of the intervals contain the mean


class Test(NamedTuple):
    """A difference in accuracy between runs that a question asks for."""

    question: int
    label: str
    gaps: np.ndarray  # Float[S, P]
    seeds: int  # seeds that both sides have; some may lack the compared accuracy and be missing in `gaps`
    against: str = ""  # the kind of comparison, if the question has several
    made: str = ""  # differences in what made the two sides: machine, road, JAX, code
    # Set by `judge`.
    p: float | None = None  # None if `p_value` has nothing to test, as with one seed
    corrected: float | None = None  # by Holm; None without a p, or for fewer than SEEDS seeds

    @property
    def verdict(self) -> str:
        """The claim that the test allows."""
        if len(self.gaps) < SEEDS:
            return "too few seeds"
        if self.corrected is None or self.corrected > LEVEL:
            return "not shown"
        return "higher" if self.gaps.mean() > 0 else "lower"

    @property
    def bar(self) -> Bar:
        """The difference in points."""
        value = Interval(*(100 * x for x in over_seeds(self.gaps, bounds=(-1.0, 1.0))))
        # Next to gains over the base, differences to controls could not be seen.
        scale = 0 if self.against == BASE else 1
        return Bar(self.label, value, (100 * self.gaps.mean(axis=1)).tolist(), self.verdict, scale=scale)


class Answered(NamedTuple):
    """The answers of the runs to all questions, in order, with the tests, cells and pairs behind them."""

    findings: list[Finding]
    tests: Table
    judged: list[Test]
    cells: list[Cell]
    pairs: list[Pair]


def answers(runs: Sequence[Run]) -> Answered:
    """The answers to all questions."""
    cells = by_cell(runs)
    pairs, _ = pairs_of(cells)
    judged = judge([test for test in _tests(cells, pairs) if test.gaps.size])
    found = [
        _compared(1, judged, _controls(cells, pairs)),
        _compared(2, judged),
        amplification([run for cell in cells for run in cell.runs if run.finished]),
        capture(cells),
        _compared(5, judged, falls=_falls(pairs)),
        _compared(6, judged),
        prediction(cells),
    ]
    return Answered(found, _table(judged, cells), judged, cells, pairs)


def judge(tests: Sequence[Test]) -> list[Test]:
    """The tests with their p, and with the p that is corrected for the other tests of their question."""
    values = [p_value(test.gaps) for test in tests]
    # Tests that can make no claim cannot make a wrong one, so they are not in the family.
    claims = {i: p for i, p in enumerate(values) if p is not None and len(tests[i].gaps) >= SEEDS}
    corrected: dict[int, float] = {}
    for question in {test.question for test in tests}:
        family = {i: p for i, p in claims.items() if tests[i].question == question}
        corrected |= zip(family, holm([*family.values()]))
    return [test._replace(p=p, corrected=corrected.get(i)) for i, (test, p) in enumerate(zip(tests, values))]


# ---------------------------------------------------------------- differences in accuracy

QUESTIONS = {
    1: (
        "Does training help a workflow over its base, over a single agent, over one with as many calls or tokens?",
        "A workflow that ends above a single agent with as many calls or tokens, under more seeds or at another scale.",
    ),
    2: (
        "Do isolated policies come further than one shared policy?",
        "A workflow, scale or task where a difference of either sign is shown.",
    ),
    5: (
        "What do the confounds of the original study do: its schedule, its number of updates, its whole regime?",
        "A fall under a confound, in seeds or a cell whose clean runs do not fall.",
    ),
    6: (
        "Which interventions raise the terminal accuracy?",
        "An intervention that is shown to raise the end, with more seeds or in another cell.",
    ),
}
VERDICTS = ("higher", "lower", "not shown", "too few seeds")
BASE, SINGLE, MATCHED = "Over the base", "Over a single agent", "Over a single agent with as many"
AT_END, AT_PEAK, FROM_PEAK = "At the end", "At the peak", "From the peak to the end"
CONTROLS = SINGLE, *(f"{MATCHED} {of}" for of in ("calls", "tokens", "calls and tokens"))
ORDER = ("", BASE, *CONTROLS, AT_END, AT_PEAK, FROM_PEAK)
NAMED = 3  # differences of one verdict that are named; if there are more, only their number is given
OTHER = 0  # the question of differences in one thing that no question asks for


def _tests(cells: Sequence[Cell], pairs: Sequence[Pair]) -> Iterable[Test]:
    """Differences in the terminal accuracy; also in the peak, and from peak to end, if a question is about them."""

    def itself(question: int, label: str, cell: Cell, than: str, against: str = "") -> Test:
        gaps = paired_gaps([(run, run) for run in cell.runs], "terminal", than)
        return Test(question, label, gaps, len(cell.runs), against)

    for cell in cells:
        if cell.finished and _is_clean(cell):
            yield itself(1, f"{cell.label} over base", cell, "base", BASE)
    for pair in pairs:
        more, less = sides if (sides := sharing_alone(pair)) else (pair.one, pair.other)
        if not sides and _is_clean(more) and not _is_clean(less):
            more, less = less, more
        changed = _is_clean(less) and not _is_clean(more)
        label, runs = f"{more.label} over {less.label}", by_seed(more, less)
        ends = Test(OTHER, label, paired_gaps(runs, "terminal", "terminal"), len(runs), made=pair.made)
        if pair.planned and "workflow.name" in pair.differ:
            if control := _control(pair):
                yield ends._replace(question=1, against=control)
        elif sides:
            peaks = paired_gaps(runs, "peak", "peak")
            yield ends._replace(question=2, against=AT_END)
            yield ends._replace(question=2, against=AT_PEAK, label=f"peak of {label}", gaps=peaks)
        elif changed and _only(pair, *REGIME):
            yield ends._replace(question=5, against=AT_END)
            yield itself(5, f"terminal over peak of {more.label}", more, "peak", FROM_PEAK)
        elif changed and _only(pair, "learner.interventions"):
            yield ends._replace(question=6)
        # Two changed cells differ in two changes, so each is compared only with the clean one that is nearest to it.
        elif pair.planned and not more.single and _is_clean(less) and not _is_far(pair, more, pairs):
            yield ends


def sharing_alone(pair: Pair) -> tuple[Cell, Cell] | None:
    """The isolated and the shared cell of a pair that differs only in this; None for any other pair."""
    sides = [(one, other) for one, other in (pair[:2], pair[1::-1]) if one.isolated and other.shared]
    return sides[0] if sides and _only(pair, "policies.map") else None


def _is_far(pair: Pair, cell: Cell, pairs: Sequence[Pair]) -> bool:
    """Whether a changed cell differs from some clean cell in only a part of what it differs in here."""
    if _is_clean(cell):
        return False
    sides = ((each, other) for each in pairs for one, other in (each[:2], each[1::-1]) if one is cell)
    return any(_is_clean(other) and set(each.differ) < set(pair.differ) for each, other in sides)


def _control(pair: Pair) -> str:
    """Which control the single agent of a pair is: the plain one, or of as many calls or tokens; '' if it is none."""
    if pair.other.config["workflow"]["name"] == "single":
        return SINGLE
    both = {"calls": spent(pair.one, pair.other, CALLS), "tokens": spent(pair.one, pair.other, TOKENS)}
    same = [name for name, budgets in both.items() if budgets and alike(*budgets)]
    return f"{MATCHED} {' and '.join(same)}" if same else ""


def _controls(cells: Sequence[Cell], pairs: Sequence[Pair]) -> Table:
    """The calls and tokens of an episode of each workflow, and the single agents that are nearest to it in each."""
    rows = []
    for cell in cells:
        planned = (pair for pair in pairs if pair.one is cell and pair.planned)
        singles = [pair.other for pair in planned if "workflow.name" in pair.differ]
        # Also a workflow that is only compared with its base, because no single agent made as many steps.
        if singles or (not cell.single and cell.finished and _is_clean(cell) and any(map(course, cell.runs))):
            (calls, by_calls), (tokens, by_tokens) = (_nearest(cell, singles, key) for key in (CALLS, TOKENS))
            rows.append((cell.label, by_calls, by_tokens, calls, tokens))
    how = (
        "Mean calls and tokens of an episode in the evaluations that give the terminal accuracy. A single agent is a "
        "control in calls or tokens if it spends as many within 10%, on average over the seeds that both have. The "
        "nearest is shown, with the workflow's spending over its own (x); a dash: no single agent differs only in the "
        "workflow. Other single agents that answer several times are not compared with the workflow."
    )
    head = ("", "nearest in calls", "nearest in tokens", "calls", "tokens")
    return Table("What the workflows spend", rows, head, how, words=3)


def _nearest(cell: Cell, singles: Sequence[Cell], key: str) -> tuple[str, str]:
    """The budget of an episode of a cell, and the single agent whose budget is nearest to it."""
    own = spent(cell, cell, key)
    amount = f"{own[0]:.3g}" if own else "not recorded"
    known = [(both, single) for single in singles if (both := spent(cell, single, key)) and min(both) > 0]
    if not known:
        return amount, NONE
    (ours, theirs), near = min(known, key=lambda one: abs(log(one[0][0] / one[0][1])))
    budgets = ((budget(run, key), budget(single, key)) for run, single in by_seed(cell, near))
    ratios = [one / other for one, other in budgets if one and other]
    least, mean, most = (f"{ratio:.2g}" for ratio in (min(ratios), ours / theirs, max(ratios)))
    times = f"x{mean}" if least == most else f"x{mean}, by seed {least} to {most}"
    return amount, f"{near.label}\n{'' if alike(ours, theirs) else UNMATCHED}{times}"


def _falls(pairs: Sequence[Pair]) -> str:
    """How many runs under a confound fell off a cliff."""
    sides = [pair[:2] for pair in pairs if _only(pair, *REGIME)]
    confounded = {id(cell): cell for pair in sides for cell in pair if not _is_clean(cell)}
    known = [end for cell in confounded.values() for run in cell.runs if (end := fell(run)) is not None]
    return f"Under them {sum(known)} of {len(known)} runs fell off a cliff. " if known else ""


def _compared(number: int, judged: Sequence[Test], table: Table | None = None, falls: str = "") -> Finding:
    question, doubt = QUESTIONS[number]
    tested = [one for one in judged if one.question == number]
    if not tested:
        return Finding(question, NOT_RUN, doubt)
    if number == 6:
        tested.sort(key=lambda one: -one.gaps.mean())
    answer = ""
    for against in sorted({one.against for one in tested}, key=ORDER.index):
        verdicts = tally([one for one in tested if one.against == against])
        answer += f"{against}: {verdicts}. " if against else f"{verdicts[:1].upper()}{verdicts[1:]}. "
    tables = [table] if table and table.rows else []
    rows = [row for one in tables for row in one.rows]
    lacking = [row[0] for row in rows if any(near == NONE or UNMATCHED in near for near in row[1:3])]
    answer += f"No control in calls, or none in tokens: {', '.join(lacking)}. " if lacking else ""
    return Finding(question, (answer + falls).rstrip(), doubt, [one.bar for one in tested], tables=tables)


def tally(judged: Sequence[Test]) -> str:
    """The number of tests with each verdict, with the names of a few."""
    labels = {v: [one.label for one in judged if one.verdict == v] for v in VERDICTS}
    return ", ".join(
        f"{verdict} in {len(some)} of {len(judged)}" + (f" ({'; '.join(some)})" if len(some) <= NAMED else "")
        for verdict, some in labels.items()
        if some
    )


def _table(judged: Sequence[Test], cells: Sequence[Cell]) -> Table:
    rows = []
    for test in judged:
        by, known = test.bar.value, len(test.gaps)
        p_values = p_text(test.p), p_text(test.corrected)
        numbers = f"{by.mean:+.1f}", f"{by.low:+.1f} – {by.high:+.1f}", *p_values
        seeds = str(known) if known == test.seeds else f"{known} of {test.seeds}"
        rows.append(
            (test.label, test.verdict, *numbers, seeds, str(test.question or NONE), test.made or NONE)
        )
    claims = [(one.p, one.corrected) for one in judged if one.p is not None and one.corrected is not None]
    claimed = sum(corrected <= LEVEL for _, corrected in claims)
    together = sum(corrected <= LEVEL for corrected in holm([p for p, _ in claims]))
    how = (
        f"Points of accuracy on validation problems; terminal is the mean of the last {TERMINAL} evaluations. Each "
        "95% interval is over seeds and problems, uncorrected. p is the larger of two two-sided t tests, over seeds "
        "and problems and over the means of the seeds, so that many problems cannot make up for few seeds. p by Holm "
        f"is corrected for the tests of its question (or those without one) that have {SEEDS} seeds or more; with "
        "fewer no claim is made. A difference is higher or lower if its corrected p is at most "
        f"{LEVEL}: {claimed} of {len(claims)}, or {together} if all questions were corrected for together. '3 of 4' "
        "seeds: one lacks an accuracy to compare. Made with another: how the runs of the two sides differ, besides in "
        "what is compared."
    )
    if early := [cell.label for cell in cells if not cell.finished]:
        how += f" Not tested, because it did not make all its steps: {'; '.join(early)}."
    head = ("", "", "points", "95%", "p", "p by Holm", "seeds", "question", "made with another")
    return Table("Tests", rows, head, how, words=2)


def _is_clean(cell: Cell) -> bool:
    """Whether a cell is under the clean regime, without an intervention."""
    parts = "learner", "learner.optimiser.schedule", "learner.interventions", "learner.interventions.mixing"
    learner, schedule, interventions, mixing = (cell.runs[0].part(f"config.{name}") for name in parts)
    others = [value for name, value in interventions.items() if name not in ("alternate_every", "mixing")]
    defaults = {"normalise_multiplicity": False, "balance": "off", "project_conflicts": False, "damping": 0.0}
    return (
        learner.get("updates", "one") == "one"
        and schedule.get("clamped", True)
        and schedule.get("clock", "own") == "own"
        and not any(others)
        and all(mixing.get(name, value) == value for name, value in defaults.items())
    )


SCHEDULE = "kind", "warmup_steps", "total_steps", "clock", "clamped"
REGIME = (  # fields that `configs/study.py` sets: another rate, clip range or estimator is another question
    *("learner.updates", "learner.sequences_per_update", "learner.loss.dual_clip", "learner.loss.is_cap"),
    *(f"learner.optimiser.schedule.{name}" for name in SCHEDULE),
    *("advantages.group", "advantages.singleton"),
)


def _only(pair: Pair, *paths: str) -> bool:
    """Whether a pair differs only in these parts of the configuration."""
    return all(path.startswith(paths) for path in pair.differ)
