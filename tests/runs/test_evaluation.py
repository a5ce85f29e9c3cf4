"""What an evaluation says of episodes, counted by hand."""

import dataclasses

import numpy as np
import pytest
from run_names import undocumented

from marl_jax.episodes import CallRecord, Episode, Leaf
from marl_jax.own import OwnError
from marl_jax.rewards.grading import grade
from marl_jax.rewards.own_metric import load_metric
from marl_jax.runs.evaluation import outcomes, summary
from marl_jax.study.page_episodes import lost_by
from marl_jax.table import Table
from marl_jax.task import Task
from marl_jax.workflows import BUILT_IN

KINDS = {role: flow.kind_of(role) for flow in BUILT_IN.values() for role in flow.roles}


def call(role, answer, reads=(), slot=0, tokens=4):
    ids = tuple(range(tokens))
    return CallRecord(
        role, "p0", slot, 0, (1, 2), ids, (0.0,) * tokens, answer or "", "stop", answer, reads,
        kind=KINDS[role],
    )  # fmt: skip


def episode(task, calls, answer, sample=0, error=None):
    return Episode(
        Task(task, "math", "6 times 7?", gold="42"), sample, "any", tuple(calls), answer, error=error
    )


def single(task, answer, sample=0, error=None):
    return episode(task, [call("generator", answer)], answer, sample, error)


def vote(task, drafts, pick, sample=0):
    """Voters, and an aggregator that names one of them ("1", "2"...) or none that can be read."""
    calls = [call("generator", draft, slot=i) for i, draft in enumerate(drafts)]
    calls.append(call("aggregator", pick, tuple(range(len(drafts))), tokens=1))
    return episode(task, calls, drafts[int(pick or 1) - 1], sample)


def graded(*episodes):
    return grade(Table.of(episodes), lambda task, answer: float(answer == task.gold))


def test_outcomes_are_problems_by_samples():
    found = outcomes(
        graded(*(single(t, a) for t, a in (("a", "42"), ("a", "1"), ("b", None), ("b", "42")))), 2
    )
    assert found.tolist() == [[True, False], [False, True]]


def test_episodes_that_are_not_task_by_task_are_refused():
    mixed = [single("a", "42"), single("b", "42"), single("a", "1"), single("b", "42")]
    with pytest.raises(ValueError, match="episodes of a, b are mixed"):
        outcomes(graded(*mixed), 2)
    with pytest.raises(ValueError, match="3 episodes are not 2 samples of each"):
        outcomes(graded(*mixed[:3]), 2)
    with pytest.raises(ValueError, match="0 episodes are not"):
        summary(graded(), 1)


def test_one_sample_has_wilsons_interval():
    found = summary(graded(*(single(str(i), "42" if i < 8 else "0") for i in range(10))), 1)
    assert (found["accuracy"], found["problems"], found["samples"]) == (0.8, 10, 1)
    assert (found["ci_low"], found["ci_high"]) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert found["pass_at_k"] == {"1": 0.8}
    assert found["difference"] is None


def test_several_samples_are_resampled_by_problem():
    # Two problems, one always right and one never: resampled means are 0, 1/2 and 1, whatever the samples.
    found = summary(graded(*(single(t, a, i) for t, a in (("a", "42"), ("b", "0")) for i in range(4))), 4)
    assert (found["accuracy"], found["ci_low"], found["ci_high"]) == (0.5, 0.0, 1.0)
    assert found["per_problem"] == [1.0, 0.0]
    assert found["pass_at_k"] == {"1": 0.5, "2": 0.5, "4": 0.5}


def test_pass_at_k_and_the_difference_are_of_problems():
    answers = {"a": ("42", "0", "0"), "b": ("42", "42", "0")}
    found = summary(
        graded(*(single(t, a, i) for t in answers for i, a in enumerate(answers[t]))), 3, [0.0, 1 / 3]
    )
    # One of three right: two of them hold it in 2 of 3 pairs; two right: every pair holds one.
    assert found["pass_at_k"] == pytest.approx({"1": 0.5, "2": (2 / 3 + 1) / 2, "3": 1.0})
    assert found["per_problem"] == pytest.approx([1 / 3, 2 / 3])
    others = 3.841459 / (
        2 + 3.841459
    )  # both gained as much: Wilson's bound of 0 in 2 on those that may not have
    low, high = (1 / 3 + others * (bound - 1 / 3) for bound in (-1, 1))
    assert found["difference"] == pytest.approx({"mean": 1 / 3, "low": low, "high": high})


def test_pass_at_all_samples_is_told_whatever_their_number():
    found = summary(graded(*(single("a", a, i) for i, a in enumerate(("0", "0", "0", "0", "42")))), 5)
    assert found["pass_at_k"] == pytest.approx({"1": 0.2, "2": 0.4, "4": 0.8, "5": 1.0})


def test_an_error_is_wrong_and_its_calls_are_in_no_roles_numbers():
    found = summary(graded(single("a", "42"), single("b", "42", error="a tool failed")), 1)
    assert (found["accuracy"], found["errors"]) == (0.5, 1)
    assert found["roles"] == {"generator": {"kind": "solver", "calls": 1, "unreadable": 0.0, "accuracy": 1.0}}
    assert summary(graded(single("a", None, error="too long")), 1)["roles"] == {}


def test_voters_picks_and_what_was_to_be_had():
    found = summary(
        graded(
            vote("a", ("42", "0", "1"), "1"),  # picked right
            vote("b", ("0", "42", None), "1"),  # could have
            vote("c", ("0", "0", "0"), "3"),  # nothing to pick
            vote("d", ("42", "42", "0"), None),  # unreadable: the first, which is right
        ),
        1,
    )
    assert (found["accuracy"], found["any_correct"]) == (0.5, 0.75)
    generator, aggregator = found["roles"].values()
    assert generator == {
        "kind": "solver",
        "calls": 12,
        "unreadable": pytest.approx(1 / 12),
        "accuracy": 4 / 12,
    }
    assert aggregator == {
        "kind": "picker",
        "calls": 4,
        "unreadable": 0.25,
        "pick_when_possible": pytest.approx(2 / 3),
        "possible": 3,
        "choice": {  # a, b and d show right and wrong answers
            "calls": 2,
            "commonest": 1.0,
            "asked": 3,
            "accuracy": pytest.approx(2 / 3),
            "chance": pytest.approx(4 / 9),
            "balanced_accuracy": pytest.approx(0.7),
        },
    }
    assert (found["calls_per_episode"], found["tokens_per_episode"]) == (4, 13)


def test_a_pick_that_never_was_possible_has_no_share():
    (_, aggregator) = summary(graded(vote("a", ("0", "1"), "1")), 1)["roles"].values()
    assert (aggregator["pick_when_possible"], aggregator["possible"]) == (None, 0)


def test_verdicts_have_precision_recall_and_the_counts_behind_them():
    turns = [
        ("42", "Correct"),
        ("42", "Incorrect"),
        ("42", None),
        ("0", "Correct"),
        ("0", "Incorrect"),
        (None, "Correct"),
    ]
    episodes = [
        episode(str(i), [call("generator", draft), call("evaluator", verdict, (0,))], draft)
        for i, (draft, verdict) in enumerate(turns)
    ]
    line = summary(graded(*episodes), 1)
    assert undocumented("eval.jsonl", line) == []
    evaluator = line["roles"]["evaluator"]
    assert evaluator == {
        "kind": "judge",
        "calls": 6,
        "unreadable": pytest.approx(1 / 6),
        "accuracy": pytest.approx(2 / 6),  # 42 Correct, 0 Incorrect
        "precision": pytest.approx(1 / 3),  # of three Correct, one was
        "recall": pytest.approx(1 / 3),  # of three right answers, one was found so
        "verdicts": 6,
        "said_correct": 3,
        "was_correct": 3,
        "both_correct": 1,
        "choice": {
            "calls": 5,
            "commonest": 3 / 5,
            "right": 3,
            "wrong": 3,
            "recall_right": pytest.approx(1 / 3),
            "recall_wrong": pytest.approx(1 / 3),
            "balanced_accuracy": pytest.approx(1 / 3),
        },
    }


def test_a_judge_is_asked_about_the_last_answer_it_read():
    calls = [
        call("generator", "0"),
        call("evaluator", "Incorrect", (0,)),
        call("generator", "42", (1,)),
        call("evaluator", "Correct", (0, 2)),
    ]
    found = summary(graded(episode("a", calls, "42")), 1)["roles"]["evaluator"]
    assert (found["accuracy"], found["precision"], found["recall"]) == (1.0, 1.0, 1.0)


def test_a_judge_of_nothing_right_and_silent_has_no_precision_and_no_recall():
    calls = [call("generator", "0"), call("evaluator", "Incorrect", (0,))]
    found = summary(graded(episode("a", calls, "0")), 1)["roles"]["evaluator"]
    assert (found["accuracy"], found["precision"], found["recall"]) == (1.0, None, None)


def test_planners_are_worth_what_they_led_to_and_synthesizers_the_outcome():
    def orch(task, solved, final):
        calls = [call("orchestrator", "add")]
        calls += [call("worker", answer, (0,), slot=i) for i, answer in enumerate(solved)]
        calls.append(call("synthesizer", final, tuple(range(1, 1 + len(solved)))))
        return episode(task, calls, final)

    found = summary(graded(orch("a", ("42", "0"), "0"), orch("b", ("42", "42"), "42")), 1)
    assert found["roles"]["orchestrator"]["mean"] == 0.75
    assert found["roles"]["worker"]["accuracy"] == 0.75
    assert found["roles"]["synthesizer"] == {"kind": "team", "calls": 2, "unreadable": 0.0, "accuracy": 0.5}
    assert (found["accuracy"], found["any_correct"]) == (0.5, 1.0)


def test_a_right_answer_to_another_task_is_none_that_was_there_and_nobody_lost_it():
    hint = dataclasses.replace(call("generator", "4"), about=Task("hint", "math", "2 times 2?", gold="4"))
    again = dataclasses.replace(call("generator", "42"), about=Task("b", "math", "6 times 7?", gold="42"))
    table = graded(episode("a", [hint, call("generator", "0", (0,))], "0"), episode("b", [again], "0"))
    assert summary(table, 1)["any_correct"] == 0.5
    assert [lost_by(one) for one in table.episodes()] == ["", "nobody"]


def test_a_part_of_a_point_is_right_from_one_half_on():
    table = Table.of([episode("a", [], answer) for answer in ("0.5", "0.49")])
    assert outcomes(grade(table, lambda task, answer: float(answer)), 2).tolist() == [[True, False]]


# ---------------------------------------------------------------- a metric of one's own


def tokens_left(table):
    """The share of 10 tokens that an episode did not need."""
    return 1 - np.bincount(table.episode, table.length, len(table.bare_episodes)) / 10


def odd(table):
    return [head.task.id in "ac" for head in table.bare_episodes]


def wrong(value):
    return lambda table: value


PERCENT, TOO_FEW, WORDS, NOTHING = wrong([50.0, 60.0]), wrong([1.0]), wrong("good"), wrong(None)


def broken(table):
    return table.colour


def test_the_accuracy_is_the_mean_of_a_metric_and_what_failed_is_worth_nothing():
    episodes = [single("a", "1"), single("b", "42"), single("c", "42", error="a tool failed")]
    found = summary(graded(*episodes), 1, [0.1, 0.1, 0.1], load_metric(f"{__name__}:tokens_left"))
    # One call of 4 tokens leaves 0.6, whatever it answered.
    assert found["per_problem"] == pytest.approx([0.6, 0.6, 0.0]) and found["accuracy"] == pytest.approx(0.4)
    assert found["pass_at_k"] == pytest.approx({"1": 2 / 3})  # 0.6 is 0.5 or more
    assert (
        found["difference"]["mean"] == pytest.approx(0.3) and 0 <= found["ci_low"] <= 0.4 <= found["ci_high"]
    )
    assert found["roles"]["generator"]["accuracy"] == 0.5  # the role's own answers are graded as ever


def every_one(table):
    return np.ones(len(table.bare_episodes))


def test_a_metric_counts_for_every_path_that_did_not_fail():
    ends = Leaf((0,), None, outcome=0.0), Leaf((1,), None, error="a tool failed", outcome=0.0)
    episodes = [single("a", "0"), single("b", "0"), single("c", "0", error="a tool failed")]
    table = graded(*episodes)
    bare = [
        table.bare_episodes[0],
        dataclasses.replace(table.bare_episodes[1], leaves=ends, error="a tool failed"),
    ]
    table = table.replace(bare_episodes=(*bare, table.bare_episodes[2]))
    found = summary(table, 1, metric=every_one)
    assert found["per_problem"] == [1.0, 0.5, 0.0] and found["pass_at_k"] == {"1": 0.5}
    assert found["any_correct"] == pytest.approx(2 / 3)


def test_a_metric_of_right_and_wrong_has_wilsons_interval():
    found = summary(graded(*(single(t, "0") for t in "abc")), 1, metric=load_metric(f"{__name__}:odd"))
    by_grade = summary(graded(*(single(t, "42" if t in "ac" else "0") for t in "abc")), 1)
    same = ("accuracy", "ci_low", "ci_high", "per_problem", "pass_at_k")
    assert [found[name] for name in same] == [by_grade[name] for name in same]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("PERCENT", "returned 50 for episode 0; it is shown as a share, so scale it to 0 .. 1"),
        ("TOO_FEW", "returned 1 values for 2 episodes; return one number per episode"),
        ("WORDS", "returned 'good'; return one number per episode"),
        ("NOTHING", "returned None for 2 episodes; return one number per episode"),  # a return is missing
        (
            "broken",
            r"raised AttributeError: 'Table' object has no attribute 'colour' \(in broken, line \d+\)$",
        ),
    ],
)
def test_what_is_no_metric_is_one_line_by_its_name(name, told):
    with pytest.raises(OwnError, match=f"^metric '{__name__}:{name}' {told}") as error:
        summary(graded(single("a", "1"), single("b", "1")), 1, metric=load_metric(f"{__name__}:{name}"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "told"), [("accuracy", "give 'module:function'"), ("math:pi", "is a float, not a function")]
)
def test_a_metric_that_is_no_function_is_refused_before_anything_is_played(name, told):
    with pytest.raises(ValueError, match=told):
        load_metric(name)
