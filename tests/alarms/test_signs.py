"""Numbers of a table that show a role deciding without looking, counted by hand."""

import dataclasses

import numpy as np
import pytest

from marl_jax.alarms import signs as signs_of_tables
from marl_jax.alarms.signs import choices, copied, repeated, signs
from marl_jax.episodes import CallRecord, Episode, Leaf
from marl_jax.rewards.grading import grade
from marl_jax.table import Table
from marl_jax.task import Task

TASK = Task("t", "math", "6 times 7?", gold="42")
KIND = {"generator": "solver", "evaluator": "judge", "aggregator": "picker"}


def call(role, answer, reads=(), prompt=(1, 2), tokens=(3,)):
    return CallRecord(
        role, "p0", 0, 0, prompt, tokens, (0.0,) * len(tokens), answer or "", "stop", answer, reads, kind=KIND[role]
    )  # fmt: skip


def judged(*pairs):
    """An episode for each (draft, verdict)."""
    return [
        Episode(TASK, i, "any", (call("generator", draft), call("evaluator", said, (0,))), draft)
        for i, (draft, said) in enumerate(pairs)
    ]


def picked(*pairs):
    """An episode for each (drafts, pick)."""
    return [
        Episode(
            TASK,
            i,
            "any",
            (
                *(call("generator", draft) for draft in drafts),
                call("aggregator", pick, tuple(range(len(drafts)))),
            ),
            drafts[0],
        )
        for i, (drafts, pick) in enumerate(pairs)
    ]


def of(episodes, role):
    table = grade(Table.of(episodes), lambda task, answer: float(answer == task.gold))
    return choices(table, table.having(role=role))


def test_picks_below_a_fork_are_judged_by_what_they_read():
    """Two drafts, then a fork of two: on each path a pick. One of the drafts is right, and one of the picks."""
    drafts = (call("generator", "42"), call("generator", "0"))
    picks = [
        dataclasses.replace(call("aggregator", pick, (0, 1)), path=(way,)) for way, pick in enumerate("12")
    ]
    ends = tuple(Leaf((way,), answer) for way, answer in enumerate(("42", "0")))
    forked = Episode(TASK, 0, "any", (*drafts, *picks), None, leaves=ends)
    found = of([forked], "aggregator")
    assert found == {
        "calls": 2, "commonest": 0.5, "asked": 2, "accuracy": 0.5, "chance": 0.5, "balanced_accuracy": 0.5,
    }  # fmt: skip


def test_a_judge_is_told_by_its_recall_on_right_and_on_wrong_answers():
    found = of(
        judged(
            ("42", "Correct"), ("42", "Correct"), ("42", "Incorrect"), ("42", None),
            ("0", "Correct"), ("0", "Incorrect"),
        ),
        "evaluator",
    )  # fmt: skip
    assert found == {
        "calls": 5,  # that can be read
        "commonest": 3 / 5,  # Correct
        "right": 4,
        "wrong": 2,
        "recall_right": 2 / 4,
        "recall_wrong": 1 / 2,
        "balanced_accuracy": 1 / 2,
    }


@pytest.mark.parametrize("verdict", ["Correct", "Incorrect"])
def test_a_judge_that_always_says_one_thing_is_balanced_at_one_half_however_accurate_it_is(verdict):
    found = of(judged(*[("42", verdict)] * 9, ("0", verdict)), "evaluator")
    assert (found["commonest"], found["balanced_accuracy"]) == (1.0, 0.5)


def test_a_judge_that_met_right_answers_alone_has_no_balance():
    found = of(judged(("42", "Correct"), ("42", "Correct")), "evaluator")
    assert (found["recall_right"], found["recall_wrong"], found["balanced_accuracy"]) == (1.0, None, None)


def test_a_picker_is_asked_where_it_has_a_choice():
    found = of(
        picked(
            (("42", "0", "0"), "1"),  # right, one of three
            (("42", "42", "0"), "3"),  # wrong, two of three
            (("0", "0", "42"), "2"),  # wrong, one of three
            (("42", "42", "42"), "1"),  # whatever it says
            (("0", "0", "0"), "1"),
        ),
        "aggregator",
    )
    chance = (1 / 3 + 2 / 3 + 1 / 3) / 3
    assert found == {
        "calls": 3,
        "commonest": 1 / 3,
        "asked": 3,
        "accuracy": 1 / 3,
        "chance": pytest.approx(chance),
        "balanced_accuracy": pytest.approx(0.5 + 0.5 * (1 / 3 - chance) / (1 - chance)),
    }


def test_a_picker_is_perfect_at_one_and_blind_at_one_half():
    drafts = [("42", "0"), ("0", "42")]
    assert of(picked(*zip(drafts, ("1", "2"))), "aggregator")["balanced_accuracy"] == 1.0
    assert of(picked(*zip(drafts, ("1", "1"))), "aggregator")["balanced_accuracy"] == 0.5


def test_roles_that_choose_nothing_and_episodes_that_failed_are_left_out():
    assert of(judged(("42", "Correct")), "generator") == {}
    table = grade(
        Table.of([Episode(TASK, 0, "any", (call("evaluator", "Correct"),), None, error="too long")]),
        lambda task, answer: 0.0,
    )
    assert choices(table, table.having(role="evaluator")) == {}


# ---------------------------------------------------------------- copies


def said(*rows):
    """A table of (prompt, tokens)."""
    prompts, tokens = zip(*rows)
    return Table.make(
        role=["generator"] * len(rows),
        policy=["p0"] * len(rows),
        prompt=prompts,
        tokens=tokens,
        logprobs=[(0.0,) * len(row) for row in tokens],
    )


def test_tokens_in_long_stretches_of_the_prompt_are_copied():
    prompt, other = (1, 2, 3, 4, 5, 6), (7, 7, 7, 7)
    table = said(
        (prompt, (9, 2, 3, 4, 9)),  # three of five
        (prompt, (2, 3, 4, 5)),  # all, by two stretches
        (prompt, (3, 2, 1)),  # none in this order
        (prompt, (1, 2)),  # too short to say
        (other, (2, 3, 4, 5)),  # of another prompt
        (other, (7, 7, 7, 7, 7, 8)),  # five of six
        ((), (7, 7, 7)),
    )
    np.testing.assert_allclose(copied(table, 3), [3 / 5, 1, 0, np.nan, 0, 5 / 6, 0])
    assert np.isnan(copied(table.take([3]), 3)).all()


@pytest.mark.parametrize("at_once", [60, 1 << 20])
def test_copies_are_those_that_a_plain_search_finds(at_once, monkeypatch):
    monkeypatch.setattr(signs_of_tables, "AT_ONCE", at_once)
    chance = np.random.default_rng(0)
    draw = lambda low, high: tuple(chance.integers(0, 3, chance.integers(low, high)).tolist())
    prompts = [draw(0, 12) for _ in range(20)]
    table = said(*((prompts[i // 3 % 20], draw(1, 14)) for i in range(200)))
    for run in (2, 4):
        expected = []
        for row in range(len(table)):
            text, prompt = table.tokens[row].tolist(), table.prompt[row].tolist()
            stretches = {tuple(prompt[k : k + run]) for k in range(len(prompt) - run + 1)}
            marked = {
                k + i for k in range(len(text) - run + 1) if tuple(text[k : k + run]) in stretches for i in range(run)
            }  # fmt: skip
            expected.append(len(marked) / len(text) if len(text) >= run else np.nan)
        np.testing.assert_allclose(copied(table, run), expected)


def test_tokens_that_a_completion_has_said_before_are_repeated():
    table = said(
        ((), (1, 2, 3, 9, 1, 2, 3, 8)),  # three of eight, said a second time
        ((), (1, 2, 1, 2, 1, 2)),  # all but the first two
        ((), (5, 5, 5, 5)),  # all but the first
        ((1, 2, 3), (1, 2, 3)),  # of the prompt, and said once
        ((), (1, 2)),  # too short to say
        ((), (1, 2, 3)),  # another text has it, too
    )
    np.testing.assert_allclose(repeated(table, 3), [3 / 8, 4 / 6, 3 / 4, 0, np.nan, 0])
    assert np.isnan(repeated(table.take([4]), 3)).all()


def test_they_stand_in_the_line_of_a_step():
    episodes = judged(("42", "Correct"), ("0", "Incorrect"))
    table = grade(Table.of(episodes), lambda task, answer: float(answer == task.gold))
    found = signs(table)
    assert found["choice/evaluator/balanced_accuracy"] == 1.0
    # A token each.
    assert not any(name.startswith(("choice/generator", "copied", "repeated")) for name in found)
    long = tuple(range(1, 13))
    copy = Episode(TASK, 0, "any", (call("generator", "42", prompt=long, tokens=(0, *long[:11])),), "42")
    table = grade(Table.of([copy]), lambda task, answer: 1.0)
    assert signs(table) == {"copied/generator": pytest.approx(11 / 12), "repeated/generator": 0.0}
