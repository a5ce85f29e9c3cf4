"""The numbers of docs/findings-falls.md follow from results: from evaluations, and from every step of the runs."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from marl_jax.alarms.watch import judge

REPOSITORY = Path(__file__).parents[3]
PAGE = (REPOSITORY / "docs/findings-falls.md").read_text()
STEPS = json.loads((REPOSITORY / "results/falls.json").read_text())
CELL = "voting-isolated-xs-math"


def table():
    lines = [line for line in PAGE.splitlines() if re.match(r"\| `?\w+`?, seed \d \| \d+ \|", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def named(run):
    """The run of "`anchor`, seed 1"."""
    change, seed = re.fullmatch(r"`?(\w+)`?, seed (\d)", run).groups()
    return f"{CELL}+rate6{'' if change == 'clean' else f'+{change}'}/seed-{seed}"


def jolts(run):
    rows = [
        {"step": i + 1, "policy/p0/update_norm": length, "policy/p0/learning_rate": 1.0}
        for i, length in enumerate(run["update"])
    ]
    return [alarm.step for alarm in judge(rows).alarms]


def test_the_table_of_jolts_has_the_numbers_of_the_runs():
    rows = table()
    assert len(rows) >= 3
    for name, step, gradient, update, right in rows:
        run, at = STEPS[named(name)], int(step) - 1
        length, before = np.array(run["gradient"]), np.array(run["update"])
        assert float(gradient) == pytest.approx(length[at] / np.median(length[at - 15 : at]), rel=0.02)
        assert float(update) == pytest.approx(before[at] / before[at - 1], rel=0.02)
        shares = [np.mean(run["reward"][at - 5 : at]), np.mean(run["reward"][at + 1 : at + 6])]
        assert [float(share) for share in re.findall(r"0\.\d+", right)] == pytest.approx(shares, abs=0.006)


def test_no_other_run_has_a_jolt():
    found = {(name, step) for name, run in STEPS.items() for step in jolts(run)}
    assert found == {(named(name), int(step)) for name, step, *_ in table()}
    others = int(re.search(r"In none of the other (\d+) runs", PAGE)[1])
    assert len(STEPS) == len({name for name, _ in found}) + others
    assert all(len(values) == 200 for run in STEPS.values() for values in run.values())


def swings(folder):
    """Mean absolute differences of successive evaluations in the second half of each run, in points."""
    found = []
    for path in (REPOSITORY / "results/study" / folder).glob("seed-*.run.json"):
        lines = json.loads(path.read_text())["evaluations"]
        own = [line for line in lines if (line["split"], line["mode"]) == ("val", "trained")]
        by_step = {line["step"]: 100 * line["accuracy"] for line in own}
        values = [by_step[step] for step in sorted(by_step)]
        found.append(np.abs(np.diff(values[len(values) // 2 :])).mean())
    return found


def test_the_swings_of_the_page_are_those_of_the_evaluations():
    at_six = sorted(path.name for path in (REPOSITORY / "results/study").glob(f"{CELL}+rate6*"))
    own, three, six = swings(CELL), swings(f"{CELL}+rate3"), [x for name in at_six for x in swings(name)]
    said = re.search(
        r"differ by (\S+) to (\S+) points in the second half.*At three times the rate it is (\S+) to (\S+), "
        r"at six times, with and without interventions, (\S+) to (\S+) \((\d+) runs\)",
        " ".join(PAGE.split()),
    )
    expected = [f(x) for x in (own, three, six) for f in (min, max)]
    assert [float(number) for number in said.groups()[:6]] == pytest.approx(expected, abs=0.051)
    assert len(six) == int(said[7])
