"""The questions of the study, each answered by the runs there are: a sentence, bars with intervals, and the tests.

    runs ──► cells, pairs ──► the differences that each question asks for ──► tests, corrected together ──► Finding

Two cells answer a question where their configurations differ in what it asks about and in nothing else. The tests of
all questions are one family for Holm's correction. A question without runs says so.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from marl_jax.study.cliffs import TERMINAL, course, is_cliff
from marl_jax.study.intervals import Interval, holm, over_runs, over_seeds, p_value
from marl_jax.study.record import Run, Series
from marl_jax.study.run_tables import NONE, Table
from marl_jax.study.seeds import Cell, Pair, by_cell, by_seed, paired_gaps, pairs_of

__all__ = ["Bar", "Finding", "Judged", "Test", "answers"]

NOT_RUN = "Not run."
HELD_OUT = 1  # seeds of odd number test what those of even number chose
SEEDS = 3  # fewer make no claim: over two seeds that differ much, intervals hold the mean in 87% of the cases


class Bar(NamedTuple):
    """A number with its interval, and its value in each run."""

    label: str
    value: Interval
    runs: Sequence[float]
    verdict: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What the runs say of one question."""

    question: str
    answer: str
    doubt: str  # what would change our mind
    bars: Sequence[Bar] = ()
    unit: str = "points"
    level: float = 0.0  # what the bars are to be compared with
    table: Table | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the greatest of all that is drawn."""
        values = [x for bar in self.bars for x in (*bar.runs, *bar.value) if math.isfinite(x)]
        return min([*values, self.level]), max([*values, self.level])

    def number(self, value: float) -> str:
        """As it is shown."""
        return f"{value:+.1f}" if self.unit == "points" else f"{value:.2f}"

    def place(self, value: float) -> float:
        """Of a value between the ends, as a share; what lies beyond them is at an end."""
        low, high = self.ends
        return min(max((value - low) / ((high - low) or 1.0), 0.0), 1.0)


class Test(NamedTuple):
    """A difference in accuracy between runs, which a question asks for."""

    question: int
    label: str
    gaps: np.ndarray  # Float[S, P]
    against: str = ""  # what it is compared with, where the question has several of these

    @property
    def bar(self) -> Bar:
        """In points."""
        found = over_seeds(self.gaps, bounds=(-1.0, 1.0))
        return Bar(self.label, Interval(*(100 * x for x in found)), (100 * self.gaps.mean(axis=1)).tolist())


def answers(runs: Sequence[Run]) -> tuple[list[Finding], Table]:
    """Of all questions, in their order; and the tests that they rest on."""
    cells = by_cell(runs)
    pairs, _ = pairs_of(cells)
    tests = [test for test in _tests(cells, pairs) if test.gaps.size]
    values = [p_value(test.gaps) for test in tests]
    held = iter(holm([p for p in values if p is not None]))
    judged = [Judged(test, p, None if p is None else next(held)) for test, p in zip(tests, values)]
    found = [
        *(_compared(number, judged) for number in (1, 2)),
        _amplification(runs),
        _capture(cells),
        *(_compared(number, judged) for number in (5, 6)),
        _foretold(cells),
    ]
    return found, _table(judged)


# ---------------------------------------------------------------- differences in accuracy

LEVEL = 0.05  # of the chance that any of the tests is wrong where nothing differs
QUESTIONS = {
    1: (
        "Does training help a workflow over its base, over a single agent, over one with as many calls or tokens?",
        "A workflow that stays below the single agent at equal calls or tokens, under more seeds or at another scale.",
    ),
    2: (
        "Do isolated policies come further than one shared policy?",
        "A workflow, scale or task where the paired difference has the other sign.",
    ),
    5: (
        "What do the two confounds of the original study do: its unclamped shared schedule, and its number of updates?",
        "A fall under the clean regime as large as that under the original's.",
    ),
    6: (
        "Which interventions raise the terminal accuracy?",
        "An order of the interventions that changes with other seeds or in another cell.",
    ),
}
VERDICTS = ("higher", "lower", "not shown", "too few seeds")
CONTROLS = {
    "single": "Over a single agent",
    "single_matched": "Over a single agent with as many calls",
    "single_token_matched": "Over a single agent with as many tokens",
}
BASE = "Over the base"
NAMED = 3  # differences of one verdict; of more the number is given
OTHER = 0  # differences in one thing that no question asks for


class Judged(NamedTuple):
    """A test, its p, and that by Holm; None of one seed."""

    test: Test
    p: float | None
    held: float | None

    @property
    def verdict(self) -> str:
        """What may be said."""
        if len(self.test.gaps) < SEEDS:
            return "too few seeds"
        if self.held is None or self.held > LEVEL:
            return "not shown"
        return "higher" if self.test.gaps.mean() > 0 else "lower"


def _tests(cells: Sequence[Cell], pairs: Sequence[Pair]) -> Iterable[Test]:
    """Differences in the accuracy at the end; of the original's regime, of the fall from the peak, too."""
    ends, names = ("terminal", "terminal"), _names(cells)
    itself = lambda cell, one, other: paired_gaps([(run, run) for run in cell.runs], one, other)
    for cell in cells:
        if not cell.early and _is_clean(cell):
            yield Test(1, f"{names[id(cell)]} over base", itself(cell, "terminal", "base"), BASE)
    for pair in pairs:
        more, less = pair.one, pair.other
        if _is_clean(more) and not _is_clean(less):
            more, less = less, more
        label, gaps = f"{names[id(more)]} over {names[id(less)]}", paired_gaps(by_seed(more, less), *ends)
        if pair.planned and "workflow.name" in pair.differ:
            yield Test(1, label, gaps, _control(less))
        elif _only(pair, "policies.map"):
            yield Test(2, label, gaps)
        elif _is_clean(less) and _only(pair, *REGIME):
            yield Test(5, label, gaps)
            yield Test(5, f"terminal over peak of {names[id(more)]}", itself(more, "terminal", "peak"))
        elif _is_clean(less) and _only(pair, "learner.interventions"):
            yield Test(6, label, gaps)
        elif pair.planned:
            yield Test(OTHER, label, gaps)


def _control(cell: Cell) -> str:
    name = cell.config["workflow"]["name"]
    return CONTROLS.get(name, f"Over {name}")


def _compared(number: int, judged: Sequence[Judged]) -> Finding:
    question, doubt = QUESTIONS[number]
    mine = [one for one in judged if one.test.question == number]
    if not mine:
        return Finding(question, NOT_RUN, doubt)
    if number == 6:
        mine.sort(key=lambda one: -one.test.gaps.mean())
    said = ""
    for against in dict.fromkeys(one.test.against for one in mine):
        some = [one for one in mine if one.test.against == against]
        verdicts = _told(some)
        said += f"{against}: {verdicts}. " if against else f"{_upper(verdicts)}. "
    bars = [one.test.bar._replace(verdict=one.verdict) for one in mine]
    return Finding(question, said.rstrip(), doubt, bars)


def _told(judged: Sequence[Judged]) -> str:
    """How many have each verdict, with the names of a few."""
    labels = {v: [one.test.label for one in judged if one.verdict == v] for v in VERDICTS}
    return ", ".join(
        f"{verdict} in {len(some)} of {len(judged)}" + (f" ({'; '.join(some)})" if len(some) <= NAMED else "")
        for verdict, some in labels.items()
        if some
    )


def _table(judged: Sequence[Judged]) -> Table:
    rows = []
    for test, p, held in judged:
        by = test.bar.value
        numbers = [f"{by.mean:+.1f}", f"{by.low:+.1f} – {by.high:+.1f}", _small(p), _small(held)]
        about = str(test.question or NONE)
        rows.append((test.label, Judged(test, p, held).verdict, about, str(len(test.gaps)), *numbers))
    tested = sum(one.p is not None for one in judged)
    how = (
        f"Points of accuracy on validation problems; terminal is the mean of the last {TERMINAL} evaluations. 95% "
        f"intervals over seeds and problems, each for itself. p is the larger of two two-sided t tests, over seeds and "
        "problems and over the means of the seeds alone, so that few seeds do not pass for many problems; it is "
        f"corrected by Holm for the {tested} that have one. "
        f"Higher or lower where the corrected p is at most {LEVEL} and there are {SEEDS} seeds or more."
    )
    head = ("", "", "question", "seeds", "points", "95%", "p", "p by Holm")
    return Table("Tests", rows, head, how, words=2)


def _names(cells: Sequence[Cell]) -> dict[int, str]:
    """Of each cell its folder's, which says what was changed, where no other cell has it; else its label."""
    places = [cell.runs[0].folder.parent.name for cell in cells]
    return {
        id(cell): place if place.startswith(cell.name) and places.count(place) == 1 else cell.label
        for cell, place in zip(cells, places)
    }


def _is_clean(cell: Cell) -> bool:
    """Whether it is under the clean regime, without an intervention."""
    learner = cell.config.get("learner") or {}
    schedule = (learner.get("optimiser") or {}).get("schedule") or {}
    mixing = {
        name: value
        for name, value in (learner.get("interventions") or {}).items()
        if name != "alternate_every"
    }
    changed = mixing.pop("mixing", {})
    defaults = {"normalise_multiplicity": False, "balance": "off", "project_conflicts": False, "damping": 0.0}
    return (
        learner.get("updates", "one") == "one"
        and schedule.get("clamped", True)
        and not any(mixing.values())
        and all(changed.get(name, value) == value for name, value in defaults.items())
    )


REGIME = "learner.updates", "learner.sequences", "learner.loss", "learner.optimiser.schedule", "advantages"


def _only(pair: Pair, *places: str) -> bool:
    """Whether they differ in these parts of the configuration alone."""
    return all(path.startswith(places) for path in pair.differ)


# ---------------------------------------------------------------- gradients


def _amplification(runs: Sequence[Run]) -> Finding:
    """The gradient of a role against the number of its parallel agents, and what Adam leaves of it."""
    question = "How does a role's gradient grow with n parallel agents of it, and what is left of it in Adam's update?"
    doubt = "Another power of n at a later stage of training, at larger scale, or where agents see different prompts."
    found = list[tuple[int, int, float, float]]()  # agents, seed, amplification, length of the update
    for run in runs:
        for match in run.keys("gradient/([^/]+)/slots/([^/]+)/amplification"):
            values = run.series(match[0]).known.values
            updates = run.series(f"policy/{match[1]}/update_norm").known.values
            agents = len(run.keys(f"gradient/{match[1]}/slots/{match[2]}/norm/.+"))
            if len(values) and len(updates):
                found.append((agents, int(run.config["seed"]), float(values.mean()), float(updates.mean())))
    counts, seeds = sorted({agents for agents, *_ in found}), sorted({seed for _, seed, *_ in found})
    table = {(agents, seed): (growth, update) for agents, seed, growth, update in found}
    complete = [seed for seed in seeds if all((agents, seed) in table for agents in counts)]
    if len(counts) < 3 or not complete:
        return Finding(question, NOT_RUN, doubt)
    bars, rows = [], []
    for agents in counts:
        growth, update = (np.array([table[agents, seed][k] for seed in complete]) for k in (0, 1))
        less = update / np.array([table[counts[0], seed][1] for seed in complete])
        bars.append(Bar(f"{agents} agents", over_runs(growth), growth.tolist()))
        rows.append((str(agents), str(len(complete)), *map(_number, (over_runs(growth), over_runs(less)))))
    powers = [_slope(counts, [table[agents, seed][0] for agents in counts]) for seed in complete]
    power = over_runs(powers)
    nearer = "independent (n to the power of 0.5)" if abs(power.mean - 0.5) < 0.25 else "aligned (n)"
    if not (power.low > 0.75 or power.high < 0.75):
        nearer = "neither independent nor aligned for certain"
    answer = (
        f"The summed gradient grows with n to the power of {_number(power)}: the agents are {nearer}. Adam's update "
        f"with {counts[-1]} agents is {rows[-1][-1]} times as long as with {counts[0]}."
    )
    how = (
        "Amplification is |sum g| / mean |g| over the parallel agents, mean over the steps; the update's length is "
        "relative to the fewest agents. 95% t intervals over seeds."
    )
    table_ = Table("Agents", rows, ("agents", "seeds", "amplification", "length of the update"), how)
    return Finding(question, answer, doubt, bars, "times", 1.0, table_)


def _capture(cells: Sequence[Cell]) -> Finding:
    """Which role's gradient dominates a shared policy, and whether that says what comes."""
    question = "Which role's gradient dominates a shared policy, and does it foretell what happens later?"
    doubt = "A rank correlation of the same sign, with p below 0.05, on the seeds that were held out."
    shared = [
        cell for cell in cells if len({*cell.runs[0].policy_map.values()}) == 1 < len(cell.runs[0].policy_map)
    ]
    names = _names(cells)
    bars, points, leading = [], [], list[str]()
    for cell in shared:
        by_role: dict[str, list[float]] = {}
        for run in cell.runs:
            for match in run.keys("gradient/[^/]+/share/([^/]+)"):
                by_role.setdefault(match[1], []).append(float(_mean(run.series(match[0]))))
            if (point := _half_way(run)) is not None:
                points.append((int(run.config["seed"]), *point))
        bars += [
            Bar(f"{names[id(cell)]}: {role}", over_runs(values), values) for role, values in by_role.items()
        ]
        if by_role:
            role = max(by_role, key=lambda name: np.mean(by_role[name]))
            leading.append(f"{role} in {names[id(cell)]} ({np.mean(by_role[role]):.0%})")
    if not bars:
        return Finding(question, NOT_RUN, doubt)
    rows = []
    for name, part in (("even seeds", 0), ("odd seeds, held out", HELD_OUT)):
        some = np.array([point[1:] for point in points if point[0] % 2 == part])
        rho, p = _ranks(*some.T) if len(some) > 2 else (math.nan, math.nan)
        rows.append((name, str(len(some)), NONE if math.isnan(rho) else f"{rho:+.2f}", _small(p)))
    tested = rows[-1]
    answer = f"The largest share has {'; '.join(leading)}. " + (
        f"Dominance in the first half of a run and the change of accuracy in its second have a rank correlation of "
        f"{tested[2]} over {tested[1]} runs of held-out seeds (p {tested[3]})."
        if tested[2] != NONE
        else "Too few runs to say whether dominance foretells anything."
    )
    how = (
        "Rank correlation (Spearman) of the mean dominance over the first half of a run's steps with the change of "
        "accuracy from there to its end."
    )
    table = Table("Dominance and what follows", rows, ("", "runs", "correlation", "p"), how)
    return Finding(question, answer, doubt, bars, "share of gradient mass", 0.5, table)


def _half_way(run: Run) -> tuple[float, float] | None:
    """Dominance before the middle of a run, and the change of accuracy behind it."""
    end = course(run)
    dominance = [run.series(match[0]).known for match in run.keys("gradient/[^/]+/dominance")]
    if end is None or not dominance:
        return None
    middle = run.step / 2
    early = dominance[0].values[dominance[0].steps <= middle]
    near = min(range(len(end.steps)), key=lambda k: abs(end.steps[k] - middle))
    return (float(early.mean()), float(end.terminal.mean() - end.right[near].mean())) if len(early) else None


# ---------------------------------------------------------------- cliffs foretold


# Of roles, each against its own start.
MONITORS = ("entropy", "length", "approx_kl", "advantage_zero_share")
FACTORS = (3.0, 2.0, 1.5, 1 / 1.5, 1 / 2.0, 1 / 3.0)


def _foretold(cells: Sequence[Cell]) -> Finding:
    """The monitor and threshold that tell falling runs from others on even seeds, tested on odd ones."""
    question = "Can a simple monitor foretell a cliff, and what does stopping by it save?"
    doubt = "A monitor that keeps its hits and its silence on other seeds and cells."
    judged = [(run, is_cliff([end])) for cell in cells for run in cell.runs if (end := course(run))]
    fell = {id(run): verdict for run, verdict in judged if verdict is not None}
    runs = [run for run, _ in judged if id(run) in fell]
    if not runs:
        return Finding(question, NOT_RUN, doubt)
    falls = sum(fell.values())
    learnt, tested = ([run for run in runs if run.config["seed"] % 2 == part] for part in (0, HELD_OUT))
    if not any(fell[id(run)] for run in learnt):
        where = "none of them with an even seed, " if falls else ""
        answer = f"{falls} of {len(runs)} runs fell off a cliff, {where}and nothing to choose a monitor by."
        return Finding(question, answer, doubt)
    monitors = [_monitor(key, factor) for key in MONITORS for factor in FACTORS]
    scored = [(_score(learnt, fell, fires), name, fires) for name, fires in monitors]
    score, name, fires = max(scored, key=lambda one: one[0])
    hits = [run for run in tested if fell[id(run)] and fires(run) is not None]
    false = [run for run in tested if not fell[id(run)] and fires(run) is not None]
    saved = [_saved(run, fires(run)) for run in hits]
    count = sum(fell[id(run)] for run in tested)
    answer = (
        f"{falls} of {len(runs)} runs fell off a cliff. On even seeds '{name}' told them apart best (hits minus false "
        f"alarms {score:+.2f}); on odd seeds it fired before {len(hits)} of {count} falls, and in {len(false)} of "
        f"{len(tested) - count} runs that did not fall."
        + (f" Stopping there would have kept {np.mean(saved):+.1f} points." if saved else "")
    )
    return Finding(question, answer, doubt)


def _monitor(key: str, factor: float) -> tuple[str, Callable[[Run], float | None]]:
    """Its name, and the function that says at which step of a run it fires first."""

    def fires(run: Run) -> float | None:
        window = max(run.steps / 10, 1)
        for role in run.roles:
            steps, values = run.series(f"role/{role}/{key}").known
            begin = values[steps <= window].mean() if (steps <= window).any() else 0.0
            for step in steps[steps > window] if begin else ():
                now = values[(steps > step - window) & (steps <= step)].mean() / begin
                if (now >= factor) if factor > 1 else (now <= factor):
                    return float(step)
        return None

    way = f"rises to {factor:g}" if factor > 1 else f"falls to {factor:.2g}"
    return f"{key} {way} times its start", fires


def _score(runs: Sequence[Run], fell: dict[int, bool], fires: Callable[[Run], float | None]) -> float:
    """Share of falls with an alarm before the end, minus the share of other runs with one."""
    alarms = [(fell[id(run)], fires(run) is not None) for run in runs]
    rate = lambda of: float(np.mean([float(alarm) for fall, alarm in alarms if fall is of] or [0.0]))
    return rate(True) - rate(False)


def _saved(run: Run, step: float | None) -> float:
    """Points of accuracy at the evaluation at or before a step, above the terminal ones."""
    end: Any = course(run)
    there = [k for k, at in enumerate(end.steps) if at <= (step or 0)]
    return 100 * float(end.right[there[-1] if there else 0].mean() - end.terminal.mean())


# ---------------------------------------------------------------- numbers


def _mean(series: Series) -> float:
    return float(series.known.values.mean()) if len(series.known.values) else math.nan


def _slope(counts: Sequence[int], values: Sequence[float]) -> float:
    """Of the logarithms: the power that the values grow with."""
    return float(np.polyfit(np.log(counts), np.log(values), 1)[0])


def _ranks(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Spearman's rank correlation, and its p by permutation; NaN where either has one value alone.

    The p counts all orders of up to 7 values, and 9,999 drawn ones of more.
    """
    from scipy import stats

    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return math.nan, math.nan
    first, second = (stats.zscore(stats.rankdata(values)) for values in (one, other))
    correlation = lambda values, axis: np.mean(values * second, axis=axis)
    found = stats.permutation_test(
        (first,), correlation, permutation_type="pairings", vectorized=True, n_resamples=9999, rng=0
    )
    return float(found.statistic), float(found.pvalue)


def _number(found: Interval) -> str:
    ends = f" ({found.low:.2f} – {found.high:.2f})" if math.isfinite(found.low) else ""
    return f"{found.mean:.2f}{ends}"


def _small(p: float | None) -> str:
    return NONE if p is None or math.isnan(p) else f"{p:.2g}"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
