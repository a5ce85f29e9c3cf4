"""Each workflow driven by hand: what its roles are shown, and what follows from what they say."""

import dataclasses
import random

import driven
import pytest

from marl_jax.task import Task
from marl_jax.workflows import (
    ToolError,
    ToolTimeout,
    debate,
    eval_opt,
    load_prompts,
    orch_workers,
    planner_coder,
    self_refine_with_tests,
    single,
    single_matched,
    single_token_matched,
    voting,
)

MATH = Task("m", "math", "What is 6*7?", gold="42")
CODE = Task("c", "code", "Print 42.", public_tests=({"stdin": "", "stdout": "42"},))


def drive(workflow, say, task=MATH, run_tool=None):
    """The calls of a workflow of this task and what it returns."""
    return driven.drive(workflow(task, load_prompts(task.family)), say, run_tool)


def roles(calls):
    return [(call.role, call.slot) for call in calls]


def shown(call):
    return "\n".join(message["content"] for message in call.messages)


def by_role(**texts):
    return lambda call, n: texts[call.role]


# ---------------------------------------------------------------- single


def test_single_is_one_call():
    calls, answer = drive(single, by_role(generator=r"\boxed{42}"))
    assert roles(calls) == [("generator", 0)]
    assert answer.answer == "42"


def test_matched_single_takes_the_majority_of_its_calls():
    said = [r"\boxed{1}", r"\boxed{42}", "?", r"\boxed{42}"]
    calls, answer = drive(single_matched.bind(calls=4), lambda call, n: said[n])
    assert roles(calls) == [("generator", i) for i in range(4)]
    assert answer.call == 1


@pytest.mark.parametrize(
    ("budget", "calls"),
    [(1, 1), (5, 1), (14, 1), (15, 2), (20, 2), (40, 4), (44, 4), (46, 5), (10_000, 16)],
)
def test_token_matched_single_makes_the_number_of_calls_nearest_to_its_budget(budget, calls):
    made, _ = drive(single_token_matched.bind(tokens=budget), by_role(generator="ten tokens"))
    assert roles(made) == [("generator", i) for i in range(calls)]
    assert len({shown(call) for call in made}) == 1


def test_token_matched_single_meets_its_budget_on_average_whatever_the_lengths():
    dice = random.Random(0)
    spent = []
    for _ in range(2000):
        words = [dice.choice(("x", "x" * 15, "x" * 60)) for _ in range(100)]
        made, _ = drive(
            single_token_matched.bind(tokens=500, calls=100), lambda call, n, words=words: words[n]
        )
        spent.append(sum(map(len, words[: len(made)])))
    assert abs(sum(spent) / len(spent) - 500) < 5


def test_token_matched_single_ends_though_nothing_is_ever_said():
    made, answer = drive(single_token_matched.bind(calls=5), by_role(generator=""))
    assert len(made) == 5 and answer.call == 0


# ---------------------------------------------------------------- voting


@pytest.mark.parametrize(
    ("choice", "picked"),
    [(r"\boxed{3}", 2), ("number 2 looks right", 1), ("no idea", 0), (r"\boxed{9}", 0), ("", 0)],
)
def test_voting_follows_the_box_then_the_first_digit_then_takes_candidate_one(choice, picked):
    calls, answer = drive(
        voting, lambda call, n: choice if call.role == "aggregator" else f"draft {'abc'[n]}"
    )
    assert roles(calls) == [("generator", 0), ("generator", 1), ("generator", 2), ("aggregator", 0)]
    assert answer.text == f"draft {'abc'[picked]}"


def test_voters_see_one_prompt_and_the_aggregator_sees_every_draft():
    calls, _ = drive(voting.bind(votes=4), lambda call, n: f"draft number {n}")
    assert len({shown(call) for call in calls[:4]}) == 1
    for n in range(4):
        assert f"Candidate {n + 1}:\ndraft number {n}" in shown(calls[4])
    assert [read.call for read in calls[4].reads] == [0, 1, 2, 3]


# ---------------------------------------------------------------- eval-opt


@pytest.mark.parametrize(("task", "rounds"), [(MATH, 3), (CODE, 2)])
@pytest.mark.parametrize("verdict", [r"\boxed{Incorrect}", "unreadable", ""])
def test_eval_opt_goes_on_until_its_rounds_are_spent(task, rounds, verdict):
    calls, answer = drive(
        eval_opt, lambda call, n: verdict if call.role == "evaluator" else f"draft {n}", task
    )
    assert roles(calls) == [("generator", 0), ("evaluator", 0)] * rounds
    assert answer.call == 2 * (rounds - 1)  # the last draft


def test_eval_opt_stops_on_a_correct_verdict():
    said = ["draft", r"step 2 fails \boxed{Incorrect}", "better", r"\boxed{Correct}"]
    calls, answer = drive(eval_opt, lambda call, n: said[n])
    assert len(calls) == 4
    assert answer.text == "better"


def test_each_role_goes_on_in_its_own_history():
    calls, _ = drive(eval_opt, lambda call, n: f"words {n}")
    assert [call.after.call if call.after else None for call in calls] == [None, None, 0, 1, 2, 3]
    assert [[read.call for read in call.reads] for call in calls] == [[], [0], [1], [2], [3], [4]]
    assert "words 1" in shown(calls[2])
    assert "words 2" in shown(calls[3])
    assert MATH.question not in shown(calls[3])  # it stands in the history already


def test_the_shared_form_is_one_conversation():
    calls, _ = drive(eval_opt.bind(shared=True), lambda call, n: f"words {n}")
    assert [call.after.call if call.after else None for call in calls] == [None, 0, 1, 2, 3, 4]
    assert not any("words" in shown(call) for call in calls)  # all of it stands in the history already


def test_rounds_are_configurable():
    calls, _ = drive(eval_opt.bind(rounds=1), lambda call, n: "?")
    assert len(calls) == 2


# ---------------------------------------------------------------- orch-workers


def test_each_worker_follows_one_strategy_and_extra_ones_are_dropped():
    plan = "\n".join(f"STRATEGY {i}: way {'abcd'[i - 1]}" for i in (1, 2, 3, 4))
    calls, answer = drive(orch_workers, by_role(orchestrator=plan, worker="work", synthesizer=r"\boxed{42}"))
    assert roles(calls) == [
        ("orchestrator", 0),
        ("worker", 0),
        ("worker", 1),
        ("worker", 2),
        ("synthesizer", 0),
    ]
    for worker, way in zip(calls[1:4], "abc"):
        assert f"way {way}" in shown(worker)
        assert MATH.question in shown(worker)
        assert [read.call for read in worker.reads] == [0]
    assert [read.call for read in calls[4].reads] == [1, 2, 3]
    assert answer.answer == "42"


def test_without_a_strategy_one_worker_gets_the_plain_task():
    calls, _ = drive(orch_workers, by_role(orchestrator="hm", worker="work", synthesizer="end"))
    assert roles(calls) == [("orchestrator", 0), ("worker", 0), ("synthesizer", 0)]
    assert calls[1].messages[-1]["content"] == MATH.question
    assert calls[1].reads == ()


def test_the_number_of_workers_is_configurable():
    plan = "STRATEGY 1: a\nSTRATEGY 2: b\nSTRATEGY 3: c"
    calls, _ = drive(orch_workers.bind(workers=2), by_role(orchestrator=plan, worker="w", synthesizer="s"))
    assert [call.role for call in calls].count("worker") == 2
    assert "up to 2" in shown(calls[0])


# ---------------------------------------------------------------- the others


def test_the_coder_sees_the_plan():
    calls, answer = drive(planner_coder, by_role(planner="loop over i", coder="print(42)"), CODE)
    assert roles(calls) == [("planner", 0), ("coder", 0)]
    assert "loop over i" in shown(calls[1])
    assert answer.text == "print(42)"


def test_debaters_hear_each_other_and_the_majority_wins():
    said = [r"\boxed{1}", r"\boxed{2}", r"\boxed{3}", r"\boxed{3}", r"\boxed{42}", r"\boxed{42}"]
    calls, answer = drive(debate, lambda call, n: said[n])
    assert roles(calls) == [("debater", i) for i in (0, 1, 2)] * 2
    assert [call.after.call for call in calls[3:]] == [0, 1, 2]
    assert [[read.call for read in call.reads] for call in calls[3:]] == [[1, 2], [0, 2], [0, 1]]
    assert answer.answer == "42"


def test_a_debate_of_one_round_is_a_plain_majority():
    calls, _ = drive(debate.bind(agents=2, rounds=1), lambda call, n: "?")
    assert len(calls) == 2


def test_self_refine_repairs_what_fails_and_stops_at_what_passes():
    reports = iter([{"passed": False, "reason": "wanted 42, got 41"}, {"passed": True, "reason": ""}])
    ran = []

    def run_tool(task, response):
        ran.append(response)
        return next(reports)

    said = [r"\boxed{print(41)}", r"\boxed{print(42)}"]
    calls, answer = drive(self_refine_with_tests, lambda call, n: said[n], CODE, run_tool)
    assert ran == said
    assert "wanted 42, got 41" in shown(calls[1])
    assert calls[1].after.call == 0
    assert answer.answer == "print(42)"


def test_self_refine_takes_an_unreadable_draft_for_a_failure():
    said = ["no program", "still none", "never"]
    calls, answer = drive(self_refine_with_tests.bind(rounds=3), lambda call, n: said[n], CODE)
    assert "no program found" in shown(calls[1])
    assert "no program found" in shown(calls[2])
    assert answer.text == "never"


def test_self_refine_takes_tests_that_never_end_for_a_failure():
    said = [r"\boxed{endless}", r"\boxed{still endless}", "never"]
    late = lambda *_: ToolTimeout("run_public_tests: timeout")
    calls, answer = drive(self_refine_with_tests, lambda call, n: said[n], CODE, late)
    assert "time limit of 120 s" in shown(calls[1]) and "time limit of 120 s" in shown(calls[2])
    assert answer.text == "never"


def test_a_failing_tool_ends_the_episode():
    with pytest.raises(ToolError, match="sandbox"):
        drive(self_refine_with_tests, lambda call, n: r"\boxed{x}", CODE, lambda *_: ToolError("no sandbox"))


def test_self_refine_without_public_tests_is_one_call():
    calls, _ = drive(self_refine_with_tests, lambda call, n: "x", dataclasses.replace(CODE, public_tests=()))
    assert len(calls) == 1
