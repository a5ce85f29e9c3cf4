"""The language of designs: what is read, what is refused, how many calls it makes, and what its roles are shown."""

import random
import re

import pytest
from test_workflows import MATH, drive, shown

from marl_jax.workflows import planner, solver, workflow
from marl_jax.workflows.designs import DesignError, canonical, play, read, role_of

RULES = {"judge": "judge", "*": "executor"}
EXAMPLES = {  # design: the calls it makes where nothing is approved
    "solve": 1,
    'solve("by parts")': 1,
    "vote(3, solve)": 3,
    "judge(4, expert)": 5,
    "refine(2, solve)": 5,
    "debate(3, 2, solve)": 9,
    "plan(vote(2, solve))": 3,
    "then(solve, check, solve)": 3,
    "vote(2, refine(1, judge(2, solve)))": 10,
    "route(solve, vote(5, solve))": 2,  # the router takes the first
}


def playing(text):
    @workflow(roles={"executor": solver, "judge": planner})
    def flow(task, prompts):
        return (yield from play(read(text), task, prompts, RULES))

    return flow


@pytest.mark.parametrize("text", EXAMPLES)
def test_a_design_makes_the_calls_that_it_says(text):
    calls, _ = drive(playing(text), lambda call, _: "STRATEGY 1: slowly \\boxed{Incorrect} 1")
    assert len(calls) == EXAMPLES[text] <= read(text).calls
    assert {(call.role, call.slot) for call in calls} and all(call.labels["node"] for call in calls)
    assert {call.role for call in calls} <= {"executor", "judge"}


def test_the_bound_is_reached_by_the_longest_route():
    assert read("route(solve, vote(5, solve))").calls == 6
    calls, _ = drive(playing("route(solve, vote(5, solve))"), lambda call, before: "\\boxed{2}")
    assert len(calls) == 6


@pytest.mark.parametrize("text", EXAMPLES)
def test_a_design_is_its_text(text):
    assert canonical(f" {text.replace(', ', ' ,')} ") == text and str(read(text)) == text


def test_votes_run_side_by_side_and_the_commonest_answer_counts():
    said = iter(["\\boxed{7}", "\\boxed{42}", "\\boxed{42}"])
    calls, answer = drive(playing("vote(3, solve)"), lambda call, before: next(said))
    assert [call.slot for call in calls] == [0, 1, 2] and answer.answer == "42"


def test_a_critic_ends_the_revisions_and_a_revision_goes_on_in_the_history_of_the_draft():
    said = iter(["\\boxed{7}", "\\boxed{Incorrect}", "\\boxed{42}", "\\boxed{Correct}"])
    calls, answer = drive(playing("refine(3, solve)"), lambda call, before: next(said))
    assert answer.answer == "42" and [call.labels["node"] for call in calls] == [
        "solve",
        "critic",
        "solve",
        "critic",
    ]
    assert calls[2].after.text == "\\boxed{7}" and calls[3].reads[0].text == "\\boxed{42}"


def test_reads_are_what_a_prompt_shows():
    calls, _ = drive(playing("plan(solve)"), lambda call, _: "STRATEGY 1: by halves")
    assert [len(call.reads) for call in calls] == [0, 1] and calls[1].reads[0].text == "STRATEGY 1: by halves"
    calls, _ = drive(playing("plan(solve)"), lambda call, _: "no idea")  # which the executor is not shown
    assert [len(call.reads) for call in calls] == [0, 0]
    calls, _ = drive(playing("then(solve, check, solve)"), lambda call, before: f"\\boxed{{{before}}}")
    assert [[one.text for one in call.reads] for call in calls] == [[], ["\\boxed{0}"], ["\\boxed{1}"]]
    calls, _ = drive(playing("then(solve, refine(1, check))"), lambda call, before: f"\\boxed{{{before}}}")
    # The critic is shown the first answer, too.
    assert [[one.call for one in call.reads] for call in calls] == [[], [0], [0, 1], [2]]


@pytest.mark.parametrize(
    ("text", "speakers"),
    [
        ("debate(2, 1, route(alice, bob))", ["router", "router", "bob", "bob", "bob", "bob"]),
        ("debate(2, 1, then(alice, bob))", ["alice", "alice", "bob", "bob", "bob", "bob"]),
        ("refine(1, route(alice, bob))", ["router", "bob", "critic", "bob"]),
    ],
)
def test_who_wrote_a_draft_goes_on_from_it(text, speakers):
    calls, _ = drive(playing(text), lambda call, _: "\\boxed{2}")
    assert [call.labels["node"] for call in calls] == speakers


def test_a_plan_is_followed_and_what_comes_first_is_shown_to_what_comes_then():
    calls, _ = drive(playing("plan(solve)"), lambda call, _: "STRATEGY 1: by halves")
    assert "by halves" in shown(calls[1])
    calls, _ = drive(playing("then(solve, solve)"), lambda call, _: "six times seven")
    assert "six times seven" in shown(calls[1]) and MATH.question in shown(calls[1])


BAD = {
    "": "begin with a name",
    "vote(3 solve)": "never closed",
    "vote(3, solve": "never closed",
    "vote(solve)": "such as vote(2, solve)",
    "vote(0, solve)": "at least 1",
    "vote(999, solve)": "999 calls, and 32 are allowed",
    "vote(9999, vote(9999, vote(9999, solve)))": "are allowed",
    "judge(2, solve, solve)": "such as judge(2, solve)",
    "then(solve)": "such as then(solve, solve)",
    "vot(3, solve)": "did you mean 'vote'",
    "solve solve": "already ends before 'solve'",
    "solve()": "cannot be there",
    "__import__('os').system('ls')": "cannot contain",
    "plan(" * 9 + "solve" + ")" * 9: "more than 8 deep",
    "plan(" * 5000: "too long",
    'solve("a", "b")': "cannot be there",
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_design_is_told_in_a_line(text):
    with pytest.raises(DesignError, match=re.escape(BAD[text])) as told:
        read(text)
    assert "\n" not in str(told.value) and canonical(text) is None


@pytest.mark.parametrize("count", ["1000", "12345", "9" * 500])
def test_large_counts_are_refused_by_the_calls_that_they_make(count):
    with pytest.raises(DesignError, match="calls"):
        read(f"vote({count}, solve)")


def test_a_name_that_no_rule_knows_is_refused_before_anything_is_played():
    assert role_of("expert", RULES) == "executor" and role_of("judge", RULES) == "judge"
    with pytest.raises(DesignError, match="no rule gives 'critic' a role"):
        read("refine(1, solve)", rules={"solve": "executor"})


def test_random_texts_are_designs_or_refused():
    """Nothing else comes of them: no other exception, no design beyond its bound."""
    rng = random.Random(0)
    parts = [
        "vote",
        "solve",
        "refine",
        "then",
        "route",
        "debate",
        "(",
        ")",
        ",",
        "2",
        "3",
        '"x"',
        " ",
        "\n",
        "é",
        "'",
    ]
    read_ones = 0
    for _ in range(3000):
        text = "".join(rng.choice(parts) for _ in range(rng.randrange(14)))
        try:
            design = read(text)
        except DesignError:
            continue
        read_ones += 1
        assert design.calls <= 32 and read(str(design)) == design
    assert read_ones > 20
