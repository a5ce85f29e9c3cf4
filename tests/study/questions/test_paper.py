"""The paper's findings against runs that show them, runs that show the opposite, and runs that show nothing."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import study_folders
from study_folders import course, metrics, policies, run

from marl_jax.study.questions import findings
from marl_jax.study.questions.paper import _captured, agreement
from marl_jax.study.wording import Table

UP, FLAT, DOWN = (0.2, 0.9, 0.9, 0.9, 0.9), (0.2, 0.2, 0.2, 0.2, 0.2), (0.6, 0.1, 0.1, 0.1, 0.1)
CLIFF = (0.2, 0.95, 0.3, 0.2, 0.2)
cell = functools.partial(study_folders.cell, problems=200)


def verdicts(runs):
    return [row[1] for row in agreement(findings.answers(runs)).rows]


@pytest.mark.parametrize(
    ("isolated", "shared", "expected"),
    [  # improves on the base, higher peak, falls more often, shared ones fail
        (UP, FLAT, ("cannot tell", "agrees", "cannot tell", "cannot tell")),
        (UP, UP, ("agrees", "cannot tell", "cannot tell", "cannot tell")),
        (DOWN, DOWN, ("does not agree", "cannot tell", "cannot tell", "cannot tell")),
        (UP, DOWN, ("agrees in part", "agrees", "cannot tell", "cannot tell")),
        (FLAT, UP, ("cannot tell", "does not agree", "cannot tell", "cannot tell")),
        (FLAT, CLIFF, ("cannot tell", "does not agree", "cannot tell", "agrees")),
    ],
)
def test_verdicts_follow_the_runs(tmp_path, isolated, shared, expected):
    runs = cell(tmp_path, "voting-isolated-s-math", isolated) + cell(tmp_path, "voting-shared-s-math", shared)
    assert verdicts(runs)[:4] == list(expected)


def test_cells_of_any_folder_count(tmp_path):
    runs = cell(tmp_path, "voting-isolated-s-math-mine", UP)
    for one in runs:
        one.about["config"]["cell"] = "voting-isolated-s-math"
    (tests, table) = findings.answers(runs).tests, agreement(findings.answers(runs))
    assert tests.rows[0][1] == "higher" and table.rows[0][1] == "agrees"


@pytest.mark.parametrize("pairs", [5, 6])
def test_falling_more_often_is_a_sign_test_over_pairs_of_a_seed(tmp_path, pairs):
    """Of n pairs in which the isolated run alone fell, p is 2 / 2^n: 0.0625 of five, 0.031 of six."""
    seeds = range(pairs)
    isolated = cell(tmp_path, "voting-isolated-s-math", CLIFF, seeds)
    row = agreement(findings.answers(isolated + cell(tmp_path, "voting-shared-s-math", UP, seeds))).rows[2]
    assert row[1] == ("agrees" if pairs == 6 else "cannot tell")
    assert row[2] == f"in {pairs} pairs of runs {pairs} isolated and 0 shared ones fell, p {2 / 2**pairs:.2g}"


def test_a_few_seeds_show_nothing_and_what_is_not_run_says_so(tmp_path):
    few = cell(tmp_path, "voting-isolated-s-math", UP, (0, 1))
    few += cell(tmp_path, "voting-shared-s-math", FLAT, (0, 1))
    assert verdicts(few)[:2] == ["cannot tell", "cannot tell"]
    single = {"workflow": {"name": "single"}, "policies": policies(generator="p0")}
    assert verdicts(cell(tmp_path, "single-shared-s-math", UP, **single)) == ["Not run."] * 6


@pytest.mark.parametrize(
    ("shares", "power", "expected", "fell"),
    [
        (CLIFF, 0.7, "agrees", "2 of 2"),  # the cell of one agent shows nothing of several
        (UP, 0.7, "agrees in part", "0 of 2"),
        (UP, 0.5, "cannot tell", "0 of 2"),  # as independent agents
        (CLIFF, 0.3, "does not agree", "2 of 2"),
        (CLIFF[:2], 0.7, "cannot tell", "0 of 0"),  # too short for a peak and an end
    ],
)
def test_amplification_agrees_where_it_is_more_than_of_independent_agents_and_their_runs_fall(
    tmp_path, shares, power, expected, fell
):
    runs, slots = [], "gradient/p0/slots/generator"
    for agents in (1, 2, 4):
        more = {f"{slots}/norm/{slot}": 1.0 for slot in range(agents)} | {
            f"{slots}/amplification": agents**power
        }
        lines = [metrics(step, **more, **{"policy/p0/update_norm": 0.1}) for step in (10, 20, 40)]
        settings = {"workflow": {"name": "voting", "settings": {"votes": agents}}}
        runs += cell(tmp_path, f"voting-isolated-s-math+votes{agents}", shares, lines=lines, **settings)
    row = agreement(findings.answers(runs)).rows[4]
    assert row[1:] == (
        expected,
        "relative to the mean length of one agent's part, the sum of n parts (2 or more) grows with n to the power of "
        f"{power:.2f} ({power:.2f} – {power:.2f}), where 0.5 means independent agents; {fell} isolated cells fell",
    )


def test_runs_of_two_workflows_in_one_folder_are_no_pair(tmp_path):
    owners = policies(generator="p0", evaluator="p0")
    other = {"workflow": {"name": "eval_opt", "settings": {}}, "policies": owners}
    rng, runs = np.random.default_rng(0), []
    for name, shares, more in (("voting-isolated-s-math", CLIFF, {}), ("eval_opt-shared-s-math", UP, other)):
        for seed in range(6):
            along = course(rng, *shares, problems=200)
            runs.append(run(tmp_path / f"{name[:2]}{seed}", seed, along, name, **more))
    assert verdicts(runs)[2] == "Not run."


def test_a_role_with_most_of_the_gradient_captures_it_where_dominance_foretells_a_loss(tmp_path):
    def shared(most, change):
        runs = []
        for seed in range(12):
            value = most + 0.01 * seed
            shares = {"gradient/p0/share/aggregator": value, "gradient/p0/share/generator": 1 - value}
            lines = [
                metrics(step, isolated=False, **shares, **{"gradient/p0/dominance": value})
                for step in (5, 50)
            ]
            end = 0.5 + change * seed
            along = (0.2, 0.3, 0.5, end, end, end)
            runs += cell(tmp_path / f"{most}", "voting-shared-s-math", along, [seed], lines=lines)
        return agreement(findings.answers(runs)).rows[5][1]

    assert shared(0.7, -0.04) == "agrees" and shared(0.71, 0.04) == "agrees in part"
    assert shared(0.44, -0.04) == "cannot tell"  # about one half each


def test_a_p_that_is_shown_as_the_level_confirms_nothing():
    shares = Table("", [("voting-shared-s-math", "aggregator", "above an even share")])
    ranks = Table("", [(), ("odd seeds, held out", "1", "9", "-0.67", "0.05")])  # of 0.0504
    finding = SimpleNamespace(tables=[shares, ranks])
    assert _captured(SimpleNamespace(findings=[None] * 3 + [finding]))[0] == "agrees in part"
