"""The questions of a study: answers of made-up runs, known beforehand, and the numbers of the committed page."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from study_folders import cell, course, metrics, policies, run, with_about, write_lines

from marl_jax.config.run_config import config_module
from marl_jax.run_folder.folder import FolderError
from marl_jax.study import results
from marl_jax.study.contrasts import pairs_of
from marl_jax.study.intervals import Interval, holm
from marl_jax.study.questions import findings, mechanisms
from marl_jax.study.questions.bars import Bar, Finding
from marl_jax.study.questions.mechanisms import _ranks
from marl_jax.study.record import read_run
from marl_jax.study.report import drawing, findings_text
from marl_jax.study.report.html_page import write_overview
from marl_jax.study.seeds import by_cell
from marl_jax.study.wording import NONE

REPOSITORY = Path(__file__).parents[3]
PAGE, STUDY = REPOSITORY / "docs/findings.md", REPOSITORY / "results/study"


ENTROPIES = "role/generator/entropy", "role/aggregator/entropy"
RISING, FLAT, FALLING = (0.2, 0.9, 0.9, 0.9), (0.2, 0.2, 0.2, 0.2), (0.2, 0.95, 0.3, 0.2, 0.2)


def learner(**changes):
    return {"learner": {"updates": "one", "interventions": {"mixing": {"damping": 0.0}}, **changes}}


def test_tests_are_gains_and_contrasts_corrected_for_each_other(tmp_path):
    runs = cell(tmp_path, "voting-isolated-s-math", RISING) + cell(tmp_path, "voting-shared-s-math", FLAT)
    found, table, *_ = findings.answers(runs)
    assert {row[0]: (row[1], row[7]) for row in table.rows} == {
        "voting-isolated-s-math over base": ("higher", "1"),
        "voting-shared-s-math over base": ("not shown", "1"),
        "voting-isolated-s-math over voting-shared-s-math": ("higher", "2"),
        "peak of voting-isolated-s-math over voting-shared-s-math": ("higher", "2"),
    }
    raw, held = (np.array([float(row[place]) for row in table.rows]) for place in (4, 5))
    asked = np.array([row[7] for row in table.rows])
    for question in "12":  # the families
        assert held[asked == question] == pytest.approx(holm(raw[asked == question]), rel=0.05)
    assert "at most 0.05: 3 of 4, or " in table.how
    of = "voting-isolated-s-math over voting-shared-s-math"
    assert (
        found[1].answer
        == f"At the end: higher in 1 of 1 ({of}). At the peak: higher in 1 of 1 (peak of {of})."
    )
    bar = found[1].bars[0]
    assert bar.value.low < bar.value.mean == pytest.approx(np.mean(bar.runs)) and len(bar.runs) == 3


def test_the_answer_to_a_question_does_not_depend_on_what_else_is_asked():
    gains = np.array([[0.48, 0.5, 0.53]]).T + np.zeros((3, 40))  # p 0.0009 by the means of three seeds
    chance = np.random.default_rng(0).normal(size=(70, 3, 40))
    tests = [findings.Test(1, "gain", gains, 3), *(findings.Test(2, "none", gaps, 3) for gaps in chance)]
    judged = findings.judge(tests)
    alone, together = judged[0].p, holm([one.p for one in judged])[0]
    assert judged[0].corrected == alone < 0.05 < together and judged[0].verdict == "higher"
    how = findings._table(judged, []).how
    called = sum(one.verdict in ("higher", "lower") for one in judged)
    assert f": {called} of 71, or {called - 1} if all questions were corrected for together" in how


def test_a_gain_of_all_problems_under_three_seeds_is_shown(tmp_path):
    rows = findings.answers(cell(tmp_path, "voting-isolated-s-math", (0.0, 1.0, 1.0, 1.0))).tests.rows
    # One of 180 values is taken for zero: t = 179 with two degrees of freedom.
    assert rows[0][1:5] == ("higher", "+100.0", "+88.0 – +100.0", f"{2 * stats.t.sf(179, 2):.2g}")


def test_a_seed_that_lacks_a_measure_is_left_out_of_a_test_and_counted(tmp_path):
    runs = cell(tmp_path, "voting-isolated-s-math", RISING, seeds=range(4))
    runs[0] = dataclasses.replace(runs[0], evaluations=runs[0].evaluations[1:])  # its base was not evaluated
    runs += cell(tmp_path, "voting-shared-s-math", FLAT, seeds=range(4))
    rows = {row[0]: row for row in findings.answers(runs).tests.rows}
    assert rows["voting-isolated-s-math over base"][1] == "higher"
    assert [row[6] for row in rows.values()] == ["3 of 4", "4", "4", "4"]


def test_isolated_against_shared_is_one_policy_against_as_many_as_roles_whatever_their_names(tmp_path):
    maps = {
        "mine": {"generator": "p0", "aggregator": "p1"},
        "renamed": {"generator": "g", "aggregator": "a"},
        "in part": {"generator": "p0", "generator/1": "p1", "generator/2": "p1", "aggregator": "p0"},
    }
    runs = []
    for name, owners in maps.items():
        runs += cell(tmp_path, name, RISING, policies=policies(**owners))
    answered = findings.answers(runs)
    assert answered.findings[1].answer == "Not run."
    assert [(pair.one.name, pair.other.name, *pair.differ) for pair in answered.pairs] == [
        ("in part", "mine", "policies.map"),
        ("in part", "renamed", "policies.map"),
    ]
    runs += cell(tmp_path, "shared", FLAT, policies=policies(generator="x", aggregator="x"))
    two = [one.label for one in findings.answers(runs).judged if one.question == 2]
    assert two == [
        "mine over shared",
        "peak of mine over shared",
        "renamed over shared",
        "peak of renamed over shared",
    ]


def test_a_test_says_what_made_its_two_sides(tmp_path):
    runs = cell(tmp_path, "voting-isolated-s-math", RISING)
    versions = {**runs[0].about["versions"], "device": "cpu"}
    runs = [with_about(one, versions=versions) for one in runs]
    other = versions | {"device": "NVIDIA H200", "jax": "0.11.2"}
    shared = cell(tmp_path, "voting-shared-s-math", FLAT)
    made = lambda shared: {
        row[-1] for row in findings.answers([*runs, *shared]).tests.rows if "shared-s-math" in row[0][9:]
    }
    here = [with_about(one, versions=versions) for one in shared]
    assert made(here) == {NONE}
    assert "machine, jax" in made([with_about(one, versions=other) for one in shared])
    *_, last = cell(tmp_path, "voting-shared-s-math", FLAT, range(4))  # a seed that nothing is compared with
    assert made([*here, with_about(last, versions=other)]) == {NONE}


def test_one_seed_shows_nothing_and_a_question_without_runs_says_so(tmp_path):
    found, table, *_ = findings.answers(cell(tmp_path, "voting-isolated-s-math", RISING, seeds=[0]))
    assert [row[1] for row in table.rows] == ["too few seeds"] and "at most 0.05: 0 of 0," in table.how
    assert [one.answer == "Not run." for one in found] == [False, True, True, True, True, True, False]


def test_the_single_agent_stands_below_the_workflow_and_a_worse_one_is_lower(tmp_path):
    single = {"workflow": {"name": "single"}, "policies": policies(generator="p0")}
    runs = cell(tmp_path, "single-shared-s-math", RISING, **single)
    runs += cell(tmp_path, "voting-shared-s-math", FLAT)
    found, table, *_ = findings.answers(runs)
    assert {row[0]: row[1] for row in table.rows}["voting-shared-s-math over single-shared-s-math"] == "lower"
    # What an episode spends was not recorded, so nothing is a control of as many calls or tokens.
    assert found[0].tables[0].rows == [("voting-shared-s-math", NONE, NONE, "not recorded", "not recorded")]
    assert "none in tokens: voting-shared-s-math." in found[0].answer


def test_a_workflow_without_a_single_agent_of_its_steps_lacks_its_controls_by_name(tmp_path):
    single = {"workflow": {"name": "single", "settings": {}}, "policies": policies(generator="p0")}
    cell(tmp_path, "voting-shared-s-math", FLAT)
    cell(tmp_path, "voting-shared-s-math+long", (*FLAT, 0.2))
    cell(tmp_path, "single-shared-s-math", RISING, **single)
    runs = spending("voting-shared-s-math", tmp_path, 1.0, 30.0)
    runs += spending("voting-shared-s-math+long", tmp_path, 4.0, 100.0)
    runs += spending("single-shared-s-math", tmp_path, 1.0, 30.0)
    finding = findings.answers(runs).findings[0]
    assert "No control in calls, or none in tokens: voting-shared-s-math+long." in finding.answer
    assert ("voting-shared-s-math+long", NONE, NONE, "4", "100") in finding.tables[0].rows


def spending(folder, root, calls, tokens):
    """The runs of a cell, each of whose evaluations spent this."""
    for path in sorted((root / folder).glob("seed-*")):
        lines = [json.loads(line) for line in (path / "eval.jsonl").read_text().splitlines()]
        write_lines(
            path / "eval.jsonl",
            [line | {"calls_per_episode": calls, "tokens_per_episode": tokens} for line in lines],
        )
    return [read_run(path) for path in sorted((root / folder).glob("seed-*"))]


def test_a_control_is_of_as_many_calls_or_tokens_where_it_spends_as_many_whatever_its_name(tmp_path):
    single = {"policies": policies(generator="p0")}
    cell(tmp_path, "voting-shared-s-math", FLAT)
    for name in ("single", "single_matched", "single_token_matched"):
        cell(tmp_path, f"{name}-shared-s-math", RISING, **single, workflow={"name": name, "settings": {}})
    voting = spending("voting-shared-s-math", tmp_path, 4.0, 100.0)

    def over(matched, token_matched):
        """{control: what the answer calls it}, of two controls that spend so many calls and tokens."""
        runs = voting + spending("single-shared-s-math", tmp_path, 1.0, 25.0)
        runs += spending("single_matched-shared-s-math", tmp_path, *matched)
        runs += spending("single_token_matched-shared-s-math", tmp_path, *token_matched)
        answered = findings.answers(runs)
        tests = [one for one in answered.judged if one.against.startswith("Over a single")]
        found = {
            re.search(r" over (\w+)-", test.label)[1]: test.against.removeprefix("Over a ") for test in tests
        }
        return found, answered.findings[0], answered.tests

    found, finding, _ = over((4.0, 97.0), (6.0, 105.0))
    assert found == {
        "single": "single agent",
        "single_matched": "single agent with as many calls and tokens",
        "single_token_matched": "single agent with as many tokens",
    }
    assert "is lacking" not in finding.answer
    # A budget that is 3.2 times as large is that of no control, and its difference is in no test.
    found, finding, tests = over((2.0, 31.0), (6.0, 31.0))
    assert found == {"single": "single agent"} and len(tests.rows) == 5
    assert "No control in calls, or none in tokens: voting-shared-s-math." in finding.answer
    assert finding.tables[0].rows == [
        ("voting-shared-s-math", "single_token_matched-shared-s-math\nnot matched: x0.67",
         "single_matched-shared-s-math\nnot matched: x3.2", "4", "100")
    ]  # fmt: skip
    over((4.0, 0.0), (0.0, 97.0))  # nothing is matched by what spent nothing
    finding = over((4.0, None), (6.0, None))[1]
    (row,) = finding.tables[0].rows
    assert row[1] == "single_matched-shared-s-math\nx1" and row[2] == "single-shared-s-math\nnot matched: x4"


def test_runs_that_were_stopped_early_are_named_and_in_no_test(tmp_path):
    runs = cell(tmp_path, "voting-isolated-s-math", FALLING)
    stopped = [with_about(one, config={**one.config, "steps": 90}) for one in runs]
    whole = cell(tmp_path / "whole", "voting-isolated-s-math", FALLING)
    found, table, *_ = findings.answers(stopped + whole)
    assert [row[0] for row in table.rows] == ["voting-isolated-s-math (40 steps) over base"]
    assert "did not make all its steps: voting-isolated-s-math (90 steps, stopped at step 40)" in table.how
    assert found[6].answer.startswith("3 of 3 runs fell") and "Left out: 3 runs that" in found[6].answer


def test_regimes_and_interventions_are_compared_with_the_clean_run(tmp_path):
    name = "voting-isolated-s-math"
    regime = learner(updates="sequences") | {"advantages": {"group": "study"}}  # in both, yet one thing
    runs = (
        cell(tmp_path, f"{name}+updates", FALLING, **learner(updates="sequences"))
        + cell(tmp_path, f"{name}+regime", FALLING, **regime)
        + cell(tmp_path, name, (*RISING, 0.9), **learner())
        + cell(
            tmp_path,
            f"{name}+damping",
            (*RISING, 0.9),
            **learner(interventions={"mixing": {"damping": 0.3}}),
        )
    )
    found, table, *_ = findings.answers(runs)
    rows = {row[0]: (row[1], row[7]) for row in table.rows}
    # Whether they fall is another question than where they end.
    assert re.findall(r"[A-Z][a-z ]+: lower in 2 of 2", found[4].answer) == [
        "At the end: lower in 2 of 2",
        "From the peak to the end: lower in 2 of 2",
    ]
    assert rows[f"{name}+updates over {name}"] == ("lower", "5")
    assert rows[f"terminal over peak of {name}+updates"] == ("lower", "5")
    assert rows[f"{name}+damping over {name}"] == ("not shown", "6")
    assert rows[f"{name}+regime over {name}"] == ("lower", "5")
    clean = {pair.planned for pair in pairs_of(by_cell(runs))[0] if "advantages.group" in pair.differ}
    assert clean == {True}  # however many pairs there are that differ in several things
    assert f"{name}+updates over base" not in rows
    # Changed cells meet the clean one alone: more tests would take power from those that a question asks for.
    assert not [label for label in rows if label.count("+") == 2]


@pytest.mark.parametrize(
    ("one", "other", "question"),
    [
        (*({"optimiser": {"schedule": {"learning_rate": rate}}} for rate in (3e-4, 1e-3)), NONE),
        (*({"loss": {"clip_high": clip}} for clip in (0.28, 0.2)), NONE),
        (*({"interventions": {"mixing": {"damping_window": window}}} for window in (32, 128)), NONE),
        ({}, {"updates": "sequences", "optimiser": {"schedule": {"learning_rate": 1e-3}}}, NONE),
        ({}, {"optimiser": {"schedule": {"clock": "shared"}}}, "5"),
    ],
)
def test_what_is_no_confound_and_no_intervention_answers_neither_question(tmp_path, one, other, question):
    name = "voting-isolated-s-math"
    runs = cell(tmp_path, name, RISING, **learner(**one))
    runs += cell(tmp_path, f"{name}+b", FLAT, **learner(**other))
    found, table, *_ = findings.answers(runs)
    assert [row[7] for row in table.rows if row[0] == f"{name}+b over {name}"] == [question]
    assert (found[4].answer == "Not run.") == (question == NONE) and found[5].answer == "Not run."


def test_a_changed_cell_meets_the_clean_one_that_is_nearest_to_it(tmp_path):
    name, rate = "voting-isolated-s-math", {"optimiser": {"schedule": {"learning_rate": 1e-3}}}
    damped = {"interventions": {"mixing": {"damping": 0.3}}}
    runs = cell(tmp_path, name, RISING, **learner()) + cell(tmp_path, f"{name}+rate", FLAT, **learner(**rate))
    runs += cell(tmp_path, f"{name}+damping", RISING, **learner(**damped))
    rows = {row[0]: row[7] for row in findings.answers(runs)[1].rows if "base" not in row[0]}
    assert rows == {f"{name}+rate over {name}": NONE, f"{name}+damping over {name}": "6"}


POWERS = [(0.3, "opposed"), (0.5, "independent"), (0.7, "agents between"), (1.0, "aligned")]


def with_agents(folder, power, role="generator", **changes):
    """Runs of 1 to 8 generators whose amplification grows with this power of their number."""
    runs, rng = [], np.random.default_rng(1)
    for agents in (1, 2, 4, 8):
        for seed in range(3):
            slots = f"gradient/p0/slots/{role}"
            more = {f"{slots}/norm/{slot}": 1.0 for slot in range(agents)} | {"policy/p0/update_norm": 0.1}
            alone = "gradient/p1/slots/aggregator"
            more |= {f"{alone}/norm/0": 1.0, f"{alone}/amplification": 1.0, "policy/p1/update_norm": 0.7}
            more[f"{slots}/amplification"] = agents**power * np.exp(rng.normal(0, 0.02))
            more[f"gradient/p0/norm/{role}"] = agents**-0.7
            # In one step nothing has an advantage, so that there is no ratio.
            idle = {f"{slots}/norm/{slot}": 0.0 for slot in range(agents)} | {f"{slots}/amplification": None}
            lines = [metrics(step, **more | (idle if step == 20 else {})) for step in (10, 20, 30)]
            place = folder / f"voting-isolated-s-math+votes{agents}" / f"seed-{seed}"
            settings = {"workflow": {"name": "voting", "settings": {"votes": agents}}}
            runs.append(run(place, seed, course(rng, *RISING), lines=lines, **settings, **changes))
    return runs


def test_the_largest_series_of_agents_is_told_of_whatever_the_order_of_runs(tmp_path):
    one = with_agents(tmp_path / "one", 0.5)[:-1]
    other = with_agents(tmp_path / "two", 1.0, rollout={"samples": 4})
    said = [findings.answers(runs)[0][2].answer for runs in ([*one, *other], [*other, *one])]
    assert said[0] == said[1] and "it grows as for aligned agents" in said[0]
    assert said[0].endswith("Left out: 1 smaller series of other cells or roles.")


@pytest.mark.parametrize("role", ["solver (v2", "c++"])
def test_agents_are_counted_whatever_signs_their_role_is_named_with(tmp_path, role):
    found = findings.answers(with_agents(tmp_path, 0.5, role))[0][2]
    assert [bar.label for bar in found.bars] == ["1 agent", "2 agents", "4 agents", "8 agents"]


@pytest.mark.parametrize(("power", "word"), POWERS)
def test_the_power_of_the_amplification_is_found(tmp_path, power, word):
    runs = with_agents(tmp_path, power)
    found = findings.answers(runs)[0][2]
    said = re.search(
        r"power of (\d\.\d+) \((\d\.\d+) – (\d\.\d+)\): it grows as for (\w+(?: between)?)", found.answer
    )
    assert float(said[2]) <= power <= float(said[3]) and said[4] == word
    # The sum itself became shorter, whatever it is beside the parts.
    assert (
        "power of -0.70 (-0.70 – -0.70): with 8 agents it is 0.23 (0.23 – 0.23) times as long" in found.answer
    )
    assert found.answer.endswith("Adam's update 1.00 (1.00 – 1.00) times.")
    # Of independent agents whose parts are equally long.
    assert "n to the power of 0.500" in found.tables[0].how
    assert [bar.level for bar in found.bars] == [1, 2**0.5, 2, 8**0.5] and found.bars[0].label == "1 agent"


def test_the_dominant_role_is_named_and_foretells_where_ranks_agree(tmp_path):
    runs = []
    rng = np.random.default_rng(2)
    # A step in which nothing had an advantage, and a run of such steps, say nothing of shares.
    names = ("share/aggregator", "share/generator", "dominance")
    idle = {f"gradient/p0/{name}": None for name in names}
    for seed in range(12):
        dominance = 0.5 + 0.03 * seed
        shares = {"gradient/p0/share/aggregator": dominance, "gradient/p0/share/generator": 1 - dominance}
        lines = [
            metrics(step, isolated=False, **shares, **{"gradient/p0/dominance": dominance})
            for step in (10, 50)
        ]
        lines.insert(1, metrics(40, isolated=False, **idle))
        end = 0.9 - 0.06 * seed
        name = "voting-shared-s-math"
        along = course(rng, 0.2, 0.5, 0.9, end, end, end, problems=400)
        runs.append(run(tmp_path / name / f"seed-{seed}", seed, along, name, lines=lines))
    runs.append(
        run(tmp_path / name / "seed-12", 12, along, name, lines=[metrics(50, isolated=False, **idle)])
    )
    found = findings.answers(runs)[0][3]
    assert "aggregator in voting-shared-s-math" in found.answer and {bar.level for bar in found.bars} == {0.5}
    shares, (_, (_, cells, count, rho, p), _) = found.tables[0], found.tables[1].rows
    ((_, role, said, share, *_, others, seeds),) = shares.rows
    assert (role, said, seeds) == ("aggregator", "above an even share", "12") and others.startswith(
        "generator 0.3"
    )
    # Of 0.5 to 0.83: with t(11) = 2.201 of its standard error 0.0312 to each side.
    of = [float(x) for x in re.findall(r"[.\d]+", share)]
    assert of == pytest.approx([0.665, 0.665 - 2.201 * 0.0312, 0.665 + 2.201 * 0.0312], abs=0.0051)
    assert "picked and then tested" in shares.how
    assert (cells, count) == ("1", "6") and float(rho) < -0.9 and float(p) < 0.05


def test_dominance_that_differs_between_cells_alone_foretells_nothing(tmp_path):
    """Two cells: the one with more dominance loses more. Within each, dominance and what follows go together."""
    rng, runs = np.random.default_rng(4), []
    for name, dominance, end in (("voting-shared-s-math", 0.5, 0.8), ("voting-shared-xs-math", 0.8, 0.3)):
        for seed in range(4):
            value = dominance + 0.03 * seed
            lines = [metrics(step, isolated=False, **{"gradient/p0/share/aggregator": value,
                     "gradient/p0/dominance": value}) for step in (10, 50)]  # fmt: skip
            last = end + 0.05 * seed
            along = course(rng, 0.2, 0.5, 0.9, last, last, last, problems=2000)
            runs.append(run(tmp_path / name / f"seed-{seed}", seed, along, name, lines=lines))
    table = findings.answers(runs)[0][3].tables[1]
    assert [row[1:4] for row in table.rows] == [
        ("2", "4", "+1.00"), ("2", "4", "+1.00"), ("2", "8", "+1.00"),
    ]  # fmt: skip
    # Of two pairs, each in the order of the other or not: the two of four orders are as far that all follow or none.
    assert table.rows[1][4] == "0.5, least possible 0.5"  # two cells of two seeds have four orders
    one_each = findings.answers([one for one in runs if one.config["seed"] in (0, 1)])[0][3]
    assert one_each.tables[1].rows[1][3] == NONE and "too few runs of held-out seeds" in one_each.answer
    assert "such as seeds 1 and 3" in one_each.answer


def test_the_p_of_a_rank_correlation_counts_the_orders_that_are_as_far():
    rho, p = _ranks([np.array([[1.0, 2.0, 3.0], [9.0, 5.0, 1.0]])])
    assert rho == pytest.approx(-1) and p == pytest.approx(2 / 6)  # of six orders, this one and its mirror
    rho, p = _ranks([np.array([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 4.0, 3.0]])])
    # Three swaps of neighbours, the order itself, their mirrors.
    assert rho == pytest.approx(0.8) and p == pytest.approx(8 / 24)
    many = np.random.default_rng(0).random((2, 12))
    known = stats.spearmanr(*many)
    assert _ranks([many]) == pytest.approx((known.statistic, known.pvalue), abs=0.02)
    assert np.isnan(_ranks([np.array([[1.0, 1.0], [2.0, 3.0]])])).all()


def test_two_seeds_make_no_claim_however_small_their_p(tmp_path):
    _, table, *_ = findings.answers(cell(tmp_path, "voting-isolated-s-math", (0.01, *[0.99] * 3), range(2)))
    ((_, verdict, _, _, p, held, *_),) = table.rows
    assert verdict == "too few seeds" and float(p) < 0.05 and held == NONE


def test_what_has_too_few_seeds_for_a_claim_takes_no_power_from_the_others(tmp_path):
    runs = cell(tmp_path, "voting-isolated-s-math", RISING)
    alone = findings.answers(runs).tests.rows[0]
    others = cell(tmp_path, "voting-isolated-m-math", RISING, seeds=range(2))
    among = {row[0]: row for row in findings.answers([*runs, *others]).tests.rows}
    assert among[alone[0]] == alone and among["voting-isolated-m-math over base"][5] == NONE


def test_a_monitor_is_chosen_on_even_seeds_and_tested_on_odd_ones(tmp_path):
    rng, runs = np.random.default_rng(3), []
    for seed in range(8):
        falls = seed % 4 < 2
        lines = [
            metrics(step, **dict.fromkeys(ENTROPIES, 0.1 if falls and step > 15 else 1.0))
            for step in range(1, 41)
        ]
        shares = FALLING if falls else (*RISING, 0.9)
        place = tmp_path / "voting-isolated-s-math" / f"seed-{seed}"
        runs.append(run(place, seed, course(rng, *shares, problems=200), lines=lines))
    answer = findings.answers(runs)[0][6].answer
    assert "4 of 8 runs fell off a cliff" in answer and "'entropy falls to" in answer
    assert "it fired before 2 of 2 falls, too late in 0, and in 0 of 2 runs" in answer
    assert float(re.search(r"accuracy by \+(\d+)", answer)[1]) > 40


def test_a_run_stopped_before_its_first_evaluation_keeps_its_base(tmp_path):
    rng = np.random.default_rng(3)
    along = course(rng, *FALLING, problems=200)
    told = run(tmp_path / "voting-isolated-s-math" / "seed-0", 0, along)
    shares = [np.mean(line["per_problem"]) for line in told.evaluations]
    for step, kept in ((5, shares[0]), (10, shares[1]), (19, shares[1])):
        assert mechanisms._saved(told, step) == pytest.approx(100 * (kept - np.mean(shares[-3:])))


def test_a_monitor_fires_when_the_first_of_the_roles_passes_its_threshold(tmp_path):
    lines = [
        metrics(step) | {"role/generator/entropy": 1.0 if step < 30 else 0.1, "role/aggregator/entropy": 1.0}
        for step in range(1, 41)
    ]
    told = run(tmp_path / "voting-isolated-s-math" / "seed-0", 0, {40: [1.0]}, lines=lines)
    _, fires = mechanisms._monitor("entropy", 1 / 3)
    late = fires(told)
    for line in lines[14:]:
        line["role/aggregator/entropy"] = 0.1
    told = run(tmp_path / "voting-isolated-s-math" / "seed-1", 1, {40: [1.0]}, lines=lines)
    assert fires(told) == late - 15


def test_an_alarm_after_the_fall_foretells_nothing_and_what_it_stops_for_nothing_counts(tmp_path):
    """Even seeds are warned before their fall at step 20, two odd ones behind it, and one for nothing."""
    rng, runs, warned = np.random.default_rng(3), [], {0: 15, 1: 30, 4: 15, 5: 30, 7: 30}
    for seed in range(8):
        falls, start = seed % 4 < 2, warned.get(seed, 99)
        # So far at once that every threshold is passed a few steps later.
        lines = [
            metrics(step, **dict.fromkeys(ENTROPIES, 0.1 if step >= start else 1.0)) for step in range(1, 41)
        ]
        place = tmp_path / "voting-isolated-s-math" / f"seed-{seed}"
        along = course(rng, *(FALLING if falls else (*RISING, 0.9)), problems=200)
        runs.append(run(place, seed, along, lines=lines))
    finding = findings.answers(runs)[0][6]
    assert "it fired before 0 of 2 falls, too late in 2, and in 1 of 2 runs" in finding.answer
    even, odd = finding.tables[0].rows
    assert even[1:6] == ("4", "2", "2", "0", "0") and odd[1:7] == ("4", "2", "0", "2", "1", "3")
    kept = []
    for seed in (1, 5, 7):  # stopped between the evaluations at steps 30 and 40
        shares = [np.mean(line["per_problem"]) for line in runs[seed].evaluations]
        kept.append(100 * (shares[3] - np.mean(shares[-3:])))
    assert float(odd[7]) == pytest.approx(np.mean(kept), abs=0.051)
    assert [bar.label for bar in finding.bars] == ["stopped after a fall", "stopped without a fall"]


def test_a_page_over_results_shows_the_questions_and_each_run(tmp_path):
    cell(tmp_path / "runs", "voting-isolated-s-math", RISING)
    lines = [metrics(30, isolated=False, warnings=["half of the answers were cut"], failed=3)]
    cell(tmp_path / "runs", "voting-shared-s-math", FLAT, lines=lines)
    results.collect(tmp_path / "runs", tmp_path / "results", unfinished=True)
    (tmp_path / "results" / "odd.run.json").write_text("{}")
    page = write_overview(results.read_study(tmp_path / "results"), tmp_path / "page")[0].read_text()
    assert "2. Do isolated policies come further" in page and "odd.run.json" in page
    assert "Isolated policies reach a higher peak" in page and "cannot tell" in page
    # Of what a few steps kept it is not said that there is no more.
    assert (
        "not kept" in page
        and "Compact results keep no warnings"
        in (tmp_path / "page/voting-isolated-s-math/seed-2/report.html").read_text()
    )
    # A hundred runs have no pictures beside their pages, and say why there is nothing to read.
    place = tmp_path / "page/voting-shared-s-math/seed-2"
    assert [path.name for path in place.iterdir()] == ["report.html"]
    own = (place / "report.html").read_text()
    assert "keep 1 of 30 steps and no episodes" in own
    assert "contain no episodes" in own and "report.png" not in own
    assert "3 episodes ended by an error in the kept steps" in own
    # Alarms were judged before rows were left out.
    assert "monitors raised an alarm" in own and "Not judged" not in own


def test_the_numbers_of_a_page_are_made_anew_and_its_words_stay(tmp_path, monkeypatch):
    cell(tmp_path / "runs", "voting-isolated-s-math", RISING)
    results.collect(tmp_path / "runs", tmp_path / "results", unfinished=True)
    page = tmp_path / "findings.md"
    page.write_text(f"Words.\n{findings_text.BEGIN}\nold\n{findings_text.END}\nMore.\n")
    findings_text.write_findings(results.read_study(tmp_path / "results"), page)
    text = page.read_text()
    assert text.startswith("Words.\n") and text.endswith("\nMore.\n") and "old" not in text
    assert "\n| voting-isolated-s-math over base | +73.0 | " in text and " | 3 | higher |" in text
    assert "![" in text and (tmp_path / "findings-1.svg").exists() and (tmp_path / "findings-1.png").exists()
    monkeypatch.setenv("HOME", str(tmp_path))
    findings_text.write_findings(results.read_study(tmp_path / "results"), "~/findings.md")
    assert page.read_text() == text
    with monkeypatch.context() as patch:
        patch.setattr(drawing, "write_atomically", lambda *_, **__: Path("/proc/self/none").touch())
        with pytest.raises(FolderError, match=r"cannot be used \(.*\): choose another --findings"):
            findings_text.write_findings(results.read_study(tmp_path / "results"), page)
    page.write_text("Words.")
    with pytest.raises(FolderError, match="lacks the marks"):
        findings_text.write_findings(results.read_study(tmp_path / "results"), page)


def test_a_file_that_cannot_be_read_is_left_out_by_name(tmp_path):
    cell(tmp_path / "runs", "voting-isolated-s-math", RISING)
    results.collect(tmp_path / "runs", tmp_path / "results", unfinished=True)
    (tmp_path / "results/half.run.json").write_text('{"schema": 1, "about"')
    page = tmp_path / "findings.md"
    page.write_text(f"{findings_text.BEGIN}{findings_text.END}")
    findings_text.write_findings(results.read_study(tmp_path / "results"), page)
    beside = tmp_path / "findings-runs.md"
    assert "| voting-isolated-s-math |" in beside.read_text() and f"]({beside.name})" in page.read_text()
    (line,) = [line for line in beside.read_text().splitlines() if line.startswith("- Left out:")]
    assert "half.run.json' is no result of a run" in line
    with pytest.raises(FolderError, match="no result of a run in or below"):
        findings_text.write_findings(results.read_study(tmp_path / "runs"), page)
    assert "| voting-isolated-s-math |" in beside.read_text()


def test_runs_of_other_settings_under_a_name_are_a_row_of_their_own_and_not_what_the_name_asks_for(tmp_path):
    runs = cell(tmp_path, "voting-shared-xs-math", RISING)
    five = {"workflow": {"name": "voting", "settings": {"votes": 5}}}
    odd = [with_about(runs[2], config={**runs[2].config, **five})]
    cells = by_cell(runs[:2] + odd)
    assert [row[:1] + row[4:5] for row in findings_text._made(cells).rows] == [
        ("voting-shared-xs-math", "0, 1"), ("voting-shared-xs-math (votes 5)", "2"),
    ]  # fmt: skip
    assert (
        "voting-shared-xs-math (1 of 3)"
        in dict(row[:2] for row in findings_text._lacking(cells).rows)["xs-math"]
    )


def test_what_is_lacking_is_told_by_seed_with_the_hours_of_what_was_timed(tmp_path):
    """Two of three seeds of one cell, at 9 seconds a step: its third takes 200 of them."""
    runs = cell(tmp_path, "voting-shared-xs-math", RISING, seeds=range(2))
    steps = runs[0].step
    runs = [with_about(one, made={"seconds": 9.0 * steps}) for one in runs]
    rows = {row[0]: row[1:] for row in findings_text._lacking(by_cell(runs)).rows}
    assert "voting-shared-xs-math (1 of 3)" in rows["xs-math"][0]
    assert "single-shared-xs-math," in rows["xs-math"][0]
    assert rows["xs-math"][1] == "25"  # nine cells of three seeds, but two runs
    # Isolated and shared voting are of a kind.
    assert rows["xs-math"][2:] == (f"{4 * 200 * 9 / 3600:.1f}", "21 runs")
    assert rows["interventions"][1:] == ("21", f"{21 * 200 * 9 / 3600:.1f}", "–")
    assert rows["s-math"][2] == "unknown"
    rest = rows[findings_text.REST]
    assert "voting-isolated-m-code" in rest[0] and "xs-math" not in rest[0]
    assert "voting-isolated-s-math" not in rest[0]
    # 54 cells of the map: nine of xs math, three of xs code and two of s math have a part.
    assert rest[1] == str(3 * (54 - 9 - 3 - 2))
    # Under the original's regime the parts have one of them.
    assert rows[findings_text.REGIME][1] == str(3 * 53)
    assert "voting-shared-m-code + regime" in rows[findings_text.REGIME][0]


@pytest.mark.long
def test_the_committed_page_is_that_of_the_committed_files(tmp_path):
    """Its words as they are, its numbers but for their last digits, which another machine may round otherwise."""
    page, number = tmp_path / "findings.md", r"[-+]?\d+(?:\.\d+)?(?:e-\d+)?"
    page.write_text(PAGE.read_text())
    findings_text.write_findings(results.read_study(STUDY), page)
    numbers = lambda text: [float(x) for x in re.findall(number, text)]
    for name in ("findings.md", "findings-tests.md", "findings-runs.md"):
        made, kept = (tmp_path / name).read_text(), (PAGE.parent / name).read_text()
        assert re.sub(number, "N", made) == re.sub(number, "N", kept)
        assert numbers(made) == pytest.approx(numbers(kept), rel=0.02, abs=0.011)


def spent_by(cell):
    """(calls, tokens) of an episode in the last three evaluations, mean over seeds, from the JSON alone."""
    of = []
    for path in sorted((STUDY / cell).glob("seed-*.run.json")):
        lines = json.loads(path.read_text())["evaluations"]
        lines = [line for line in lines if (line["split"], line["mode"]) == ("val", "trained")]
        last = sorted(lines, key=lambda line: line["step"])[-3:]
        of += [(line["calls_per_episode"], line["tokens_per_episode"]) for line in last]
    return np.mean(of, axis=0) if of else None


def test_controls_spend_the_calls_of_a_workflow_and_its_tokens_but_for_half_a_call():
    """A control that is not run yet is judged by its budget."""
    module = config_module(REPOSITORY / "configs/findings.py")
    calls, tokens = np.transpose(
        [spent_by(name) for name in module.SETS["xs-math"] if not name.startswith("single")]
    )
    a_call = spent_by("single-shared-xs-math")[1]
    for name in module.SETS["controls"]:
        ((of, budget),) = module.get_config(name).workflow.settings.items()
        spent = spent_by(name)
        if of == "calls":
            assert min(abs((budget if spent is None else spent[0]) / calls - 1)) < 0.1, name
        else:
            assert min(abs((budget if spent is None else spent[1]) - tokens)) < a_call / 2, name


@pytest.mark.parametrize(
    "changes", [("anchor", "damping"), ("equalise", "damping"), ("schedule", "long"), ("regime", "long")]
)
def test_a_name_has_all_that_is_changed_in_its_cell_whatever_the_order(changes):
    module, cell_name = config_module(REPOSITORY / "configs/findings.py"), "voting-isolated-xs-math"
    made = [module.get_config("+".join((cell_name, *order))) for order in (changes, changes[::-1])]
    assert made[0] == made[1]
    interventions = made[0].learner.interventions
    assert bool(interventions.kl_coef) == ("anchor" in changes)
    assert (interventions.mixing.damping > 0) == ("damping" in changes)


def test_a_number_of_one_run_is_written_without_an_interval():
    finding = Finding("question", "answer", "doubt", [Bar("stopped", Interval(1.0, -np.inf, np.inf), [1.0])])
    assert "| stopped | +1.0 | – | 1 | – |" in findings_text._differences(finding, "tests.md")
