"""Credit by hand: what every role of every workflow earns for what happened in an episode."""

import dataclasses
import math
import sys
import types
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from marl_jax.commands import cli
from marl_jax.episodes import CallRecord, Episode
from marl_jax.learning import Report
from marl_jax.own import OwnError
from marl_jax.rewards.credit import (
    CreditConfig,
    by_episodes,
    combine,
    format_penalty,
    length_penalty,
    load_credit,
    make_credit,
    outcome,
    own_correctness,
    own_work,
    team_and_local,
    voting_rubric,
    with_rewards,
)
from marl_jax.rewards.families import grade_answer
from marl_jax.rewards.grading import Grader, grade
from marl_jax.rewards.leaves import over_leaves
from marl_jax.runs import step_metrics
from marl_jax.table import Table
from marl_jax.task import Task
from marl_jax.workflows import BUILT_IN

TASK = Task(id="t", family="math", question="6 times 7?", gold="42")
KINDS = {role: flow.kind_of(role) for flow in BUILT_IN.values() for role in flow.roles}


def call(role, answer, *, slot=0, turn=0, reads=(), tokens=4, kind=None):
    ids = tuple(range(tokens))
    return CallRecord(
        role, "p0", slot, turn, (1, 2), ids, (0.0,) * tokens, answer or "", "stop", answer, reads,
        kind=kind or KINDS[role],
    )  # fmt: skip


def episode(calls, answer, *, error=None, task=TASK):
    return Episode(task, 0, "any", tuple(calls), answer, error=error)


def voting(drafts, pick, answer, **more):
    """Voters that answered `drafts`, and an aggregator that read them and picked."""
    voters = [call("generator", draft, slot=i) for i, draft in enumerate(drafts)]
    return episode([*voters, call("aggregator", pick, reads=tuple(range(len(drafts))))], answer, **more)


def eval_opt(*turns, answer):
    """Turns of (draft, verdict)."""
    calls = []
    for turn, (draft, verdict) in enumerate(turns):
        calls.append(call("generator", draft, turn=turn))
        calls.append(call("evaluator", verdict, turn=turn, reads=(2 * turn,)))
    return episode(calls, answer)


def orch(answers, answer):
    workers = [call("worker", said, slot=i, reads=(0,)) for i, said in enumerate(answers)]
    reads = tuple(range(1, len(answers) + 1))
    return episode([call("orchestrator", "a\nb"), *workers, call("synthesizer", answer, reads=reads)], answer)


def exact(task, answer):
    return float(answer == task.gold)


def graded(*episodes):
    return grade(Table.of(episodes), exact)


def by_episode(table, column):
    """The values of a column, episode by episode; None for NaN."""
    values = [[] for _ in table.bare_episodes]
    for number, value in zip(table.episode.tolist(), column.tolist()):
        values[number].append(None if math.isnan(value) else value)
    return values


def earned(credit, *episodes):
    """The reward of every call."""
    table = with_rewards(graded(*episodes), credit)
    return by_episode(table, table.reward)


def worked(one):
    """What the own work of every call of an episode is worth; None where there was nothing to get right."""
    value, known = own_work(table := graded(one))
    return by_episode(table, np.where(known, value, np.nan))[0]


# --- grading --------------------------------------------------------------------------------------------------


def test_outcomes_and_the_answers_of_solvers_are_graded():
    (one,) = graded(voting(["42", "41", None], "2", "41")).episodes()
    assert one.outcome == 0.0
    assert one.answers == (1.0, 0.0, 0.0, None)
    assert one.kinds == ("solver", "solver", "solver", "picker")


def test_each_distinct_answer_is_graded_once():
    asked = []

    def noted(task, answer):
        asked.append((task.id, answer))
        return exact(task, answer)

    other = Task(id="u", family="math", question="1+1?", gold="2")
    episodes = [voting(["42", "42", "41"], "1", "42")] * 2 + [voting(["42"], "1", "42", task=other)]
    grade(Table.of(episodes), noted)
    assert sorted(asked) == [("t", "41"), ("t", "42"), ("u", "42")]


def test_without_a_grader_of_ones_own_the_familys_grades_math_and_programs_in_one_batch():
    task = Task("c", "code", "Print 1.", tests=({"stdin": "", "stdout": "1\n"},))
    batch = Table.of(
        [
            voting(["42.0", "41", None], "1", "42.0"),
            voting(["print(1)", "print(2)"], "2", "print(2)", task=task),
        ]
    )
    math_one, code_one = grade(batch).episodes()
    assert (math_one.outcome, math_one.answers) == (1.0, (1.0, 0.0, 0.0, None))
    assert (code_one.outcome, code_one.answers) == (0.0, (1.0, 0.0, None))
    assert grade(batch, grade_answer).episodes() == [math_one, code_one]


def test_a_grader_starts_each_distinct_answer_once_and_before_any_is_waited_for(monkeypatch):
    submitted = []

    class Verdict:
        passed, lost = True, False

        def result(self):
            assert len(submitted) == 3
            return self

    monkeypatch.setattr(
        "marl_jax.rewards.code.submit_program", lambda *asked, **_: submitted.append(asked) or Verdict()
    )
    task = Task("c", "code", "?", tests=({"stdin": "", "stdout": ""},), meta={"preamble": "import math"})
    first, second = voting(["1", "2", None], "1", "1", task=task), voting(["2", "3"], "2", "3", task=task)
    grader = Grader()
    grader.start(first)
    assert submitted == [(f"import math\n\n{n}", task.tests) for n in (1, 2)]
    assert [one.outcome for one in grade(Table.of([first, second]), grader).episodes()] == [1.0, 1.0]


def test_an_episode_that_failed_has_nothing_to_grade(monkeypatch):
    monkeypatch.setattr(
        "marl_jax.rewards.math.equivalence.start_equivalent", lambda *asked: pytest.fail("graded")
    )
    (one,) = grade(Table.of([voting(["42"], "1", "42", error="lost")])).episodes()
    assert (one.outcome, one.answers) == (0.0, (0.0, None))


def test_tasks_that_share_an_id_are_graded_apart():
    twin = Task(id="t", family="math", question="40 + 3?", gold="43")
    first, second = graded(voting(["42"], "1", "42"), voting(["42"], "1", "42", task=twin)).episodes()
    assert (first.outcome, second.outcome) == (1.0, 0.0)
    grader = Grader()
    for expected, worth in (("1", 1.0), ("2", 0.0), ("1", 1.0)):
        code = Task("c", "code", "?", gold="print(1)", tests=({"stdin": "", "stdout": expected},))
        assert grader(code, "print(1)") == worth
    assert grader(replace(code, family="math"), "print(1)") == 1.0 and len(grader._started) == 3


def test_a_grade_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="the grade of task 't' is nan; it must be a finite number"):
        grade(Table.of([voting(["42"], "1", "42")]), lambda task, answer: math.nan)


def test_math_answers_are_graded_as_the_parser_reads_them():
    assert grade_answer(TASK, "42.0") == 1.0
    assert grade_answer(TASK, "43") == 0.0


# --- outcome --------------------------------------------------------------------------------------------------


def test_outcome_is_broadcast_to_every_call():
    assert earned(outcome, voting(["42", "41", "1"], "1", "42")) == [[1, 1, 1, 1]]
    assert earned(outcome, voting(["42", "41", "1"], "2", "41")) == [[0, 0, 0, 0]]


def test_an_episode_without_an_answer_earns_nothing():
    assert earned(outcome, voting([None, None, None], None, None)) == [[0, 0, 0, 0]]


def test_an_episode_that_ended_in_an_error_earns_nothing_whatever_the_credit():
    broken = voting(["42", "42", "42"], "1", "42", error="ValueError: no")
    for credit in (outcome, voting_rubric, own_correctness, team_and_local(1.0), format_penalty(1.0)):
        assert earned(credit, broken, voting(["42"], "1", "42"))[0] == [0, 0, 0, 0]


# --- the study's rubric for voting ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafts", "pick", "answer", "rewards", "why"),
    [
        (
            ["42", "41", None],
            "1",
            "42",
            [1.0, -0.5, 0.5, 1.0],
            "right; readable and wrong; unreadable; picked right",
        ),
        (["42", "41", None], "2", "41", [0.5, -1.0, 0.0, -1.0], "the final one is wrong; picked wrong"),
        (["40", "41", None], "2", "41", [-1.0, -1.0, 0.0, 0.0], "nothing right to pick"),
        (["42", "42", "42"], "3", "42", [1.0, 1.0, 1.0, 1.0], "all right"),
        (["42", "41", "40"], None, "42", [1.0, -0.5, -0.5, 1.0], "an unreadable pick is the first candidate"),
        (["41", "42", "40"], None, "41", [-1.0, 0.5, -1.0, -1.0], "and may be wrong"),
    ],
)
def test_the_voting_rubric(drafts, pick, answer, rewards, why):
    assert earned(voting_rubric, voting(drafts, pick, answer)) == [rewards], why


def test_the_rubric_has_no_rule_for_other_roles():
    with pytest.raises(ValueError, match="no rule for role 'evaluator'"):
        earned(voting_rubric, eval_opt(("42", "Correct"), answer="42"))


# --- own work -------------------------------------------------------------------------------------------------


def test_a_voter_earns_its_own_answer_and_the_aggregator_its_pick():
    assert worked(voting(["42", "41", None], "1", "42")) == [1, 0, 0, 1]
    assert worked(voting(["42", "41", None], "2", "41")) == [1, 0, 0, 0]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (1, 2, 3, 0)])
def test_a_pick_counts_drafts_wherever_a_plan_stands_between_them(order):
    plan, drafts = call("orchestrator", "first"), [call("generator", x) for x in ("41", "42", "40")]
    for pick, value in (("1", 0), ("2", 1), ("3", 0), ("4", 0), (None, 0)):
        flow = episode([plan, *drafts, call("aggregator", pick, reads=order)], "42")
        assert worked(flow)[-1] == value


def test_without_a_right_candidate_there_is_nothing_to_pick():
    hopeless = voting(["40", "41", None], "1", "40")
    assert worked(hopeless) == [0, 0, 0, None]
    assert math.isnan(own_correctness(graded(hopeless))["own"][3])
    assert earned(own_correctness, hopeless) == [[0, 0, 0, 0]]


def test_an_evaluator_earns_a_right_verdict_on_the_draft_it_read():
    refined = eval_opt(("41", "Incorrect"), ("42", "Correct"), answer="42")
    assert worked(refined) == [0, 1, 1, 1]
    fooled = eval_opt(("41", "Correct"), answer="41")
    assert worked(fooled) == [0, 0]
    harsh = eval_opt(("42", "Incorrect"), ("41", None), answer="41")
    assert worked(harsh) == [1, 0, 0, 0]


def test_an_unreadable_draft_is_rightly_called_incorrect():
    assert worked(eval_opt((None, "Incorrect"), answer=None)) == [0, 1]


def test_an_orchestrator_earns_the_mean_of_its_workers_and_the_synthesizer_the_outcome():
    assert worked(orch(["42", "41", "42"], "42")) == [pytest.approx(2 / 3), 1, 0, 1, 1]
    assert worked(orch(["42", "42"], "41")) == [1, 1, 1, 0]


def test_an_orchestrator_that_nobody_read_earns_nothing():
    plain = episode(
        [call("orchestrator", None), call("worker", "42"), call("synthesizer", "42", reads=(1,))], "42"
    )
    assert worked(plain) == [0, 1, 1]


def test_a_role_earns_the_outcome_unless_it_is_declared_what_it_does():
    def solo(**kinds):
        kind = lambda role: kinds.get(role, "team")
        calls = [
            call("prover", "42", kind=kind("prover")),
            call("critic", "x", reads=(0,), kind=kind("critic")),
        ]
        return episode(calls, "42")

    assert worked(solo()) == [1, 1]
    assert worked(solo(prover="solver", critic="judge")) == [1, 0]


def test_team_and_local_is_alpha_times_the_outcome_plus_own_work():
    credit = team_and_local(0.5)
    assert earned(credit, voting(["42", "41", None], "1", "42")) == [[1.5, 0.5, 0.5, 1.5]]
    assert earned(credit, voting(["40", "41", None], "2", "41")) == [[0, 0, 0, 0]]


# --- penalties ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 0.0), (10, 0.0), (15, -0.2), (20, -0.4), (99, -0.4)])
def test_length_costs_from_free_to_limit(tokens, penalty):
    one = episode([call("generator", "42", tokens=tokens)], "42")
    assert earned(length_penalty(0.4, free=10, limit=20), one) == [[pytest.approx(penalty)]]


def test_what_cannot_be_read_costs_the_format_penalty():
    assert earned(format_penalty(0.25), voting(["42", None, "1"], None, "42")) == [[0, -0.25, 0, -0.25]]


def test_penalties_may_be_of_some_roles_only():
    credit = format_penalty(0.25, roles=("aggregator",))
    assert earned(credit, voting(["42", None], None, "42")) == [[0, 0, -0.25]]


def test_credits_add_up_and_keep_their_components():
    credit = combine(outcome, format_penalty(0.25), length_penalty(1.0, free=0, limit=8))
    table = with_rewards(graded(voting(["42", None], "1", "42")), credit)
    assert {name: column.tolist() for name, column in table.components.items()} == {
        "outcome": [1.0, 1.0, 1.0],
        "format": [0.0, -0.25, 0.0],
        "length": [-0.5, -0.5, -0.5],
    }
    assert table.reward.tolist() == [0.5, 0.25, 0.5]


def test_components_of_one_name_are_added_where_calls_have_them():
    credit = combine(
        format_penalty(0.25, roles=("generator",)), format_penalty(1.0, roles=("generator",)), own_correctness
    )
    table = graded(voting(["40", None], None, "40"))
    found = {name: by_episode(table, column)[0] for name, column in credit(table).items()}
    assert found == {"format": [0.0, -1.25, None], "own": [0.0, 0.0, None]}


@pytest.mark.parametrize(("free", "limit"), [(5, 5), (6, 5), (-1, 5)])
def test_a_length_penalty_without_a_slope_is_refused(free, limit):
    with pytest.raises(ValueError, match=f"free={free} and limit={limit} must satisfy"):
        length_penalty(1.0, free=free, limit=limit)


def test_a_penalty_that_pays_is_refused():
    for make in (lambda: length_penalty(-1.0, free=0, limit=1), lambda: format_penalty(-1.0)):
        with pytest.raises(ValueError, match=r"weight=-1\.0 must be at least 0"):
            make()


# --- the log --------------------------------------------------------------------------------------------------


def logged(credit, *episodes):
    """What the line of a step says of rewards."""
    nothing = Report({}, {}, {}, {}, ())
    table = with_rewards(graded(*episodes), credit)
    line = step_metrics.of_step(table, {}, {}, nothing, {}, {})
    return {name: value for name, value in line.items() if name.startswith(("reward/", "credit/"))}


def test_every_component_is_logged_by_role_as_its_mean():
    episodes = [voting(["42", "41", None], "1", "42"), voting(["40", "41", None], "2", "41")]
    assert logged(voting_rubric, *episodes) == {
        "credit/generator/own": 0.5 / 6,
        "credit/generator/final": 1.5 / 6,
        "credit/generator/wrong": -3.0 / 6,
        "reward/generator": -1.0 / 6,
        "credit/aggregator/pick": 1.0 / 2,
        "reward/aggregator": 1.0 / 2,
    }


def test_a_component_is_counted_only_where_it_could_be_earned():
    found = logged(own_correctness, voting(["42"], "1", "42"), voting(["41"], "1", "41"))
    assert (found["credit/aggregator/own"], found["reward/aggregator"]) == (1.0, 0.5)
    hopeless = logged(own_correctness, voting(["41"], "1", "41"))
    assert "credit/aggregator/own" not in hopeless and hopeless["reward/aggregator"] == 0.0


# --- a credit named in a config -------------------------------------------------------------------------------


@pytest.fixture
def mine(monkeypatch):
    """A module of the user's with one function that the test sets."""
    module = types.ModuleType("my_credits")
    monkeypatch.setitem(sys.modules, "my_credits", module)

    def define(function):
        module.__dict__["reward"] = function
        return load_credit("my_credits:reward")

    return define


TWO = (voting(["42", "41"], "1", "42"), voting(["41"], "1", "41"))


@pytest.mark.parametrize(
    ("result", "rewards"),
    [
        ([0.5, 2], [[0.5, 0.5, 0.5], [2, 2]]),
        ([[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 5]]),
        ([np.array([1.0, 2.0, 3.0]), np.float32(0.5)], [[1, 2, 3], [0.5, 0.5]]),
        (np.array([0.25, 1.0]), [[0.25, 0.25, 0.25], [1, 1]]),
        (jnp.array([0.25, 1.0]), [[0.25, 0.25, 0.25], [1, 1]]),
        ([np.array(0.5), np.bool_(True)], [[0.5, 0.5, 0.5], [1, 1]]),
        ([[{"a": 1, "b": 2}, {}, 3], (4, {"c": 5})], [[3, 0, 3], [4, 5]]),
        ([{"a": 1, "b": 2}, {}], [[3, 3, 3], [0, 0]]),
    ],
    ids=[
        "per episode",
        "per call",
        "arrays",
        "one array",
        "one of jax",
        "scalars",
        "components",
        "of episodes",
    ],
)
def test_a_users_function_may_return(mine, result, rewards):
    assert earned(mine(lambda graded: result), *TWO) == rewards


def test_a_users_function_sees_the_whole_batch_at_once(mine):
    batches = []

    def reward(graded):
        batches.append(len(graded))
        return [one.outcome - sum(o.outcome for o in graded) / len(graded) for one in graded]

    broken = voting(["42"], "1", "42", error="timeout")
    assert earned(mine(reward), TWO[0], broken, TWO[1]) == [[0.5] * 3, [0, 0], [-0.5] * 2]
    assert batches == [2]


def test_a_users_function_is_told_grades_and_kinds_with_the_calls(mine):
    seen = []
    earned(mine(lambda graded: seen.extend(graded) or [0.0]), TWO[0])
    (one,) = seen
    assert (one.outcome, one.answers) == (1.0, (1.0, 0.0, None))
    assert one.kinds == ("solver", "solver", "picker")
    assert one.episode.calls == TWO[0].calls and one.episode.task == TASK


def test_a_function_without_a_name_is_a_credit_too():
    credit = by_episodes(lambda graded: [one.outcome / 2 for one in graded])
    assert earned(combine(credit, outcome), *TWO) == [[1.5] * 3, [0, 0]]
    with pytest.raises(OwnError, match="the credit function returned 0 items for 2 episodes"):
        earned(by_episodes(lambda graded: []), *TWO)


def test_a_function_of_episodes_in_the_place_of_a_credit_is_told():
    table = Table.of(TWO)
    with pytest.raises(OwnError, match=r"called with a table .* pass rewards.by_episodes"):
        with_rewards(table, lambda graded: [one.outcome for one in graded])


def test_a_function_of_episodes_sees_a_problem_at_a_time_or_all_at_once():
    other = dataclasses.replace(TASK, id="other")
    episodes = [TWO[0], dataclasses.replace(TWO[1], task=other), dataclasses.replace(TWO[1], sample=1)]
    most = lambda graded: [max(one.outcome for one in graded)] * len(graded)
    size = lambda graded: [len(graded)] * len(graded)
    assert earned(by_episodes(most), *episodes) == [[1.0] * 3, [0.0] * 2, [1.0] * 2]
    assert earned(by_episodes(size), *episodes) == [[2.0] * 3, [1.0] * 2, [2.0] * 2]
    assert earned(by_episodes(size, batch="step"), *episodes) == [[3.0] * 3, [3.0] * 2, [3.0] * 2]


def test_components_may_be_lists_with_none_where_a_call_has_no_part():
    table = with_rewards(graded(*TWO), lambda table: {"own": [1, None, 0.5, True, 2]})
    np.testing.assert_array_equal(table.reward, [1.0, 0.0, 0.5, 1.0, 2.0])
    np.testing.assert_array_equal(table.take([0, 1, 4]).components["own"], [1.0, np.nan, 2.0])


def test_a_table_that_lacks_something_is_told_what_adds_it():
    bare = Table.of([*TWO])
    for credit in (outcome, voting_rubric, own_correctness, team_and_local(1.0)):
        with pytest.raises(ValueError, match=r"has no column '(grade|outcome)': rewards.grade\(\) adds it"):
            with_rewards(bare, credit)
    with pytest.raises(ValueError, match="leaves are 'median'"):
        with_rewards(graded(*TWO), outcome, leaves="median")
    with pytest.raises(
        OwnError, match="component 'own' of the credit is no array of 5 numbers, one for each"
    ):
        with_rewards(graded(*TWO), lambda table: {"own": np.zeros(3)})
    with pytest.raises(OwnError, match="the credit gave a ndarray: return a dictionary"):
        with_rewards(graded(*TWO), lambda table: np.ones(len(table)))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], r"credit 'my_credits:reward' returned 1 items for 2 episodes"),
        (None, r"returned a NoneType for 2 episodes"),
        ({"a": 1}, r"returned a dict for 2 episodes"),
        (
            [[1, 2], 3],
            r"returned 2 items for task 't', sample 0 of 3 calls; return one number or {component: number}, or one "
            "per call",
        ),
        ([1.0, np.str_("high")], r"call 0 is .*'high'"),
        ([1.0, "high"], r"returned a str for task 't', sample 0 of 2 calls"),
        (
            [1.0, math.nan],
            r"component 'user' of task 't', sample 0, call 0 is nan; it must be a finite number",
        ),
        ([1.0, [1, math.inf]], r"call 1 is inf"),
        ([1.0, [{"a": None}, 1]], r"component 'a' .* is None"),
        ([1.0, [1, "2"]], r"call 1 is '2'"),
        ([1.0, [1, 10**400]], r"call 1 is 10+; it must be a finite number"),
    ],
)
def test_a_wrong_result_is_refused_in_one_line(mine, result, message):
    with pytest.raises(OwnError, match=message) as error:
        earned(mine(lambda graded: result), *TWO)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("change", [list.reverse, list.clear, list.pop])
def test_a_function_that_changes_its_list_is_refused(mine, change):
    """Its numbers would be those of other episodes."""
    with pytest.raises(OwnError, match="changed the list of episodes that it was given"):
        earned(mine(lambda graded: (change(graded), [1.0] * len(graded))[1]), *TWO)


def test_a_script_tells_a_wrong_result_and_a_bug_in_one_line(mine, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script"])
    with pytest.raises(SystemExit) as end:
        cli.run(lambda *_: earned(mine(lambda graded: None), *TWO))
    line = "credit 'my_credits:reward' returned a NoneType for 2 episodes; return one item per episode\n"
    assert end.value.code == cli.REFUSED and capsys.readouterr().err == line
    with pytest.raises(SystemExit) as end:
        cli.run(lambda *_: earned(mine(lambda graded: int("x")), *TWO))
    told = capsys.readouterr().err
    assert end.value.code == cli.REFUSED and told.count("\n") == 1
    assert told.startswith("credit 'my_credits:reward' raised ValueError: invalid literal for int()")
    assert "(in <lambda>, line " in told
    with pytest.raises(OwnError, match=r"but 1 was given$"):  # no line of the library, which has no mistake
        earned(mine(lambda: []), *TWO)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "cannot import module 'no_such_module'"),
        (
            "half_written:f",
            r"cannot import module 'half_written': SyntaxError: .*\(half_written.py, line 2\)$",
        ),
        ("misnamed:f", r"cannot import module 'misnamed': NameError: .* \(in <module>, line 3\)$"),
        ("rewards/mine.py:f", "give a module, not a file: 'package.module:name'"),
        ("math:no_such", "module 'math' has no 'no_such'"),
        ("math:pi", "is a float, not a function"),
        ("math:", "module 'math' has no ''"),
        ("outcom", "credit 'outcom' is unknown; use outcome, voting_rubric"),
    ],
)
def test_a_credit_that_does_not_exist_is_refused_before_it_is_needed(name, message, tmp_path, monkeypatch):
    (tmp_path / "half_written.py").write_text("\ndef f(\n")
    (tmp_path / "misnamed.py").write_text("\n\nf = g\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=message):
        make_credit(CreditConfig(name))


def test_a_config_names_a_credit_and_its_penalties():
    config = CreditConfig(
        "team_and_local", alpha=2.0, format_penalty=0.25, length_penalty=1.0, length_limit=8
    )
    assert earned(make_credit(config), voting(["42", None], "1", "42")) == [[2.5, 1.25, 2.5]]
    assert make_credit(CreditConfig()) is outcome


def test_no_rows_have_no_leaves():
    assert over_leaves(np.zeros(0), np.zeros(0, int), 0).shape == (0,)
