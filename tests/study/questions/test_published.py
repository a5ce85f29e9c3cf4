"""The numbers of docs/findings.md follow from results/study: computed anew with numpy and scipy, nothing of ours.

What is expected is read out of the pages, so that these tests hold for any set of runs.
"""

import functools
import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from scipy import stats

REPOSITORY = Path(__file__).parents[3]
DOCS, STUDY = REPOSITORY / "docs", REPOSITORY / "results/study"
OWN = ("val", "trained")  # evaluations of the run itself
LAST = 3  # evaluations whose mean is the terminal accuracy


def text_of(name):
    return (DOCS / name).read_text()


def rows_of(name, heading):
    """The cells of the rows of the table under a heading."""
    table = text_of(name).split(f"# {heading}\n")[1].split("\n#")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def interval(text):
    """The numbers of "+1.1 – +3.2", or of "1.57 (1.48 – 1.65)"."""
    return [float(number) for number in re.findall(r"[-+]?\d+\.\d+", text)]


@functools.cache
def runs_of(folder):
    """{seed: the JSON of a run}"""
    found = {path.name: json.loads(path.read_text()) for path in (STUDY / folder).glob("seed-*.run.json")}
    return {int(name.split("-")[1].split(".")[0]): run for name, run in found.items()}


class Course(NamedTuple):
    """Right answers by problem: before training, where they are most, and at the end."""

    base: np.ndarray
    peak: np.ndarray
    terminal: np.ndarray


@functools.cache
def course(folder, seed):
    lines = [line for line in runs_of(folder)[seed]["evaluations"] if (line["split"], line["mode"]) == OWN]
    by_step = {line["step"]: np.array(line["per_problem"], float) for line in lines}
    right = np.array([by_step[step] for step in sorted(by_step) if step])
    if len(right) < LAST:
        return None
    even = np.arange(right.shape[1]) % 2 == 0
    # Equal numbers of right answers may have means that differ in their last bits: the first of them counts.
    chosen = [int(np.argmax(np.round(right[:, half].mean(axis=1), 9))) for half in (even, ~even)]
    peak = np.where(even, right[chosen[1]], right[chosen[0]])
    return Course(by_step[0], peak, right[-LAST:].mean(axis=0))


def differences(label):
    """[seeds, problems], in points, of a row of the tests."""
    folder = lambda name: name.split(" (")[0]
    if match := re.fullmatch(r"terminal over peak of (.+)", label):
        sides = ((folder(match[1]), "terminal"), (folder(match[1]), "peak"))
    else:
        measure = "peak" if label.startswith("peak of ") else "terminal"
        one, other = map(folder, label.removeprefix("peak of ").split(" over "))
        sides = ((one, measure), (one, "base") if other == "base" else (other, measure))
    common = sorted(runs_of(sides[0][0]).keys() & runs_of(sides[1][0]).keys())
    both = [[course(name, seed) for name, _ in sides] for seed in common]
    gaps = [getattr(a, sides[0][1]) - getattr(b, sides[1][1]) for a, b in both if a and b]
    return 100 * np.array(gaps)


def two_way(values):
    """(the standard error of the mean, its degrees of freedom) with seeds and problems drawn at random."""
    seeds, problems = values.shape
    freedom = np.array([seeds - 1, problems - 1, (seeds - 1) * (problems - 1)])
    of_seeds = problems * values.mean(axis=1).var(ddof=1)
    of_problems = seeds * values.mean(axis=0).var(ddof=1)
    rest = values.size * values.var() - of_seeds * freedom[0] - of_problems * freedom[1]
    squares = np.array([of_seeds, of_problems, rest / freedom[2]])
    both = squares[0] + squares[1] - squares[2]
    satterthwaite = both**2 / np.sum(squares**2 / freedom)
    # Chance may make the estimate less than what one source alone gives.
    if both < squares.max():
        both, satterthwaite = squares.max(), freedom[np.argmax(squares)]
    return np.sqrt(both / values.size), satterthwaite


TESTS = [pytest.param(row, id=row[0]) for row in rows_of("findings-tests.md", "Tests")]


def p_of(values):
    """The larger of two p: over seeds and problems, and over the means of the seeds."""
    error, freedom = two_way(values)
    of_both = 2 * stats.t.sf(abs(values.mean()) / error, freedom)
    return np.nanmax([of_both, stats.ttest_1samp(values.mean(axis=1), 0.0).pvalue])


def test_the_table_has_tests_of_every_kind():
    labels = [param.values[0][0] for param in TESTS]
    kinds = {"over base": 0, "peak of ": 0, "terminal over peak": 0}
    kinds = {kind: sum(kind in label for label in labels) for kind in kinds}
    assert all(kinds.values()) and sum(kinds.values()) < len(labels)


@pytest.mark.parametrize("row", TESTS)
def test_a_published_difference_has_its_mean_interval_and_p(row):
    label, _, points, ends, p, _, seeds, *_ = row
    values = differences(label)
    assert len(values) == int(seeds.split()[0])
    assert float(points) == pytest.approx(values.mean(), abs=0.051)
    if len(values) == 1 or np.ptp(values) == 0:
        return  # without a variance over seeds the library has rules of its own (test_intervals.py)
    error, freedom = two_way(values)
    reach = values.mean() + stats.t.ppf([0.025, 0.975], freedom) * error
    assert interval(ends) == pytest.approx(reach.clip(-100, 100), abs=0.051)
    assert float(p) == pytest.approx(p_of(values), rel=0.051)  # of two digits


def test_published_verdicts_are_those_of_holm_in_each_question():
    rows = [param.values[0] for param in TESTS]
    for question in {row[7] for row in rows}:
        tested = [row for row in rows if row[7] == question and row[4] != "–"]
        family = [row for row in tested if int(row[6].split()[0]) >= 3]
        ps = np.array([p_of(differences(row[0])) for row in family])
        order = np.argsort(ps)
        raised = np.maximum.accumulate(ps[order] * np.arange(len(ps), 0, -1)).clip(max=1.0)
        for row, p in zip([family[index] for index in order], raised):
            assert float(row[5]) == pytest.approx(p, rel=0.051), row[0]
            shown = "higher" if float(row[2]) > 0 else "lower"
            assert row[1] == (shown if p <= 0.05 else "not shown"), row[0]


def falls(folder):
    """For each run of a folder with a course: True or False; None if it is too near to tell with other draws."""
    found = []
    for seed in sorted(runs_of(folder)):
        if not (one := course(folder, seed)):
            continue
        drop, gain = one.peak - one.terminal, np.mean(one.peak - one.base)
        if drop.mean() < 0.1 * gain - 1e-9 or np.ptp(drop) == 0:
            found.append(bool(np.ptp(drop) == 0 and drop.mean() > max(0.1 * gain, 0)))
            continue
        drawn = np.random.default_rng(1).integers(len(drop), size=(4000, len(drop)))
        low = np.quantile(drop[drawn].mean(axis=1), 0.025)
        found.append(None if abs(low) < 0.002 else bool(low > 0))
    return found


def test_published_falls_are_those_of_the_runs():
    fell, known, unsure = 0, 0, 0
    for row in rows_of("findings-runs.md", "Runs"):
        found = falls(row[0].split(" (")[0])
        fell, known, unsure = fell + found.count(True), known + len(found), unsure + found.count(None)
        if row[-1] in ("–", ""):
            assert not found, row[0]
            continue
        said, of = map(int, row[-1].split(" of "))
        assert len(found) == of and 0 <= said - found.count(True) <= found.count(None), row[0]
    said, of = map(int, re.search(r"(\d+) of (\d+) runs fell off a cliff, ", text_of("findings.md")).groups())
    assert known == of > 0 and 0 <= said - fell <= unsure


def mean_over_steps(run, key):
    return np.nanmean(np.array(run["metrics"][key], float))


def t_interval(values):
    values = np.asarray(values, float)
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return [values.mean(), values.mean() - half, values.mean() + half]


def amplifications():
    """{number of agents: {seed: mean over steps}} of the series of voters whose slots were measured."""
    series = {}
    for place in STUDY.glob("*+slots+*"):
        name = re.sub(r"\+votes\d+", "", place.name)
        for seed, run in runs_of(place.name).items():
            slots = "gradient/p0/slots/generator"
            agents = sum(key.startswith(f"{slots}/norm/") for key in run["metrics"])
            series.setdefault(name, {}).setdefault(agents, {})[seed] = mean_over_steps(
                run, f"{slots}/amplification"
            )
    return max(series.values(), key=lambda by_agents: sum(map(len, by_agents.values())))


def test_the_published_power_of_the_amplification_is_the_slope_of_its_logarithm():
    found = amplifications()
    counts = sorted(found)
    seeds = sorted(set.intersection(*(set(found[agents]) for agents in counts)))
    several = [agents for agents in counts if agents > 1]
    slopes = [
        np.polyfit(np.log(several), np.log([found[agents][seed] for agents in several]), 1)[0]
        for seed in seeds
    ]
    said = re.search(r"of 2 agents or more grows with n to the power of (.+?\))", text_of("findings.md"))[1]
    assert len(seeds) >= 3 and interval(said) == pytest.approx(t_interval(slopes), abs=0.0051)
    table = rows_of("findings.md", "Agents")
    assert [int(row[0]) for row in table] == counts and {int(row[1]) for row in table} == {len(seeds)}
    for row, agents in zip(table, counts):
        values = [found[agents][seed] for seed in seeds]
        assert interval(row[2]) == pytest.approx(t_interval(values), abs=0.0051)
        over_alone = t_interval([value / agents**0.5 for value in values])
        assert interval(row[3]) == pytest.approx(over_alone, abs=0.0051)


@pytest.mark.parametrize(
    "row", rows_of("findings-tests.md", "Shares of the gradient"), ids=lambda row: row[0]
)
def test_a_published_share_of_the_gradient_is_that_of_the_role_with_the_largest(row):
    runs = runs_of(row[0].split(" (")[0]).values()
    roles = next(iter(runs))["about"]["config"]["policies"]["map"]
    shares = {
        role: np.clip(t_interval([mean_over_steps(run, f"gradient/p0/share/{role}") for run in runs]), 0, 1)
        for role in roles
    }
    leader = max(shares, key=lambda role: shares[role][0])
    assert row[1] == leader and interval(row[3]) == pytest.approx(shares[leader], abs=0.0051)
    assert row[2] == ("above an even share" if shares[leader][1] > 1 / len(roles) else "not shown")
