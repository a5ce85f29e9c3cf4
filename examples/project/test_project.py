"""The workflow, the task, the reward and the cell, without a model: the test plays the roles."""

import types

from reward import PRICE, own_and_brief
from task import SPLITS, carries
from workflow import first_accepted

from marl_jax.config.run_config import load_config
from marl_jax.rewards import grade_math
from marl_jax.workflows import Completion, load_prompts

PROMPTS = load_prompts("math", "micro")


def play(task, *said):
    """(the calls, the answer) of an episode in which the roles say these texts, with these answers read in them."""
    script, calls, reply = first_accepted(task, PROMPTS), [], None
    for number, (text, answer) in enumerate(said):
        calls.append(script.send(reply))
        reply = Completion(text, tokens=(), logprobs=(), finish_reason="stop", answer=answer, call=number)
    try:
        script.send(reply)
    except StopIteration as ended:
        return calls, ended.value
    raise AssertionError("the workflow asks for more calls")


def test_a_rejected_draft_is_made_anew_and_an_accepted_one_is_the_answer():
    task = carries("train")[0]
    calls, answer = play(
        task,
        ("first", "1"),
        ("no, \\boxed{Incorrect}", "Incorrect"),
        ("second", "2"),
        ("\\boxed{Correct}", "Correct"),
    )
    assert [(call.role, call.slot) for call in calls] == [
        ("generator", 0),
        ("evaluator", 0),
        ("generator", 1),
        ("evaluator", 1),
    ]
    assert answer.text == "second"
    assert "first" in calls[1].messages[-1]["content"]  # the evaluator was shown the draft


def test_every_problem_has_its_answer_and_no_problem_is_in_two_splits():
    splits = [carries(split) for split in SPLITS]
    tasks = [task for some in splits for task in some]
    assert len({task.id for task in tasks}) == len(tasks)
    for task in tasks:
        a, b = task.question.removesuffix("=?").split("+")
        assert grade_math(f"\\boxed{{{int(a) + int(b)}}}", task.gold) == 1.0


def test_a_late_draft_earns_less_than_an_early_one():
    calls = [
        types.SimpleNamespace(role=role, slot=slot) for slot in (0, 1) for role in ("generator", "evaluator")
    ]
    episode = types.SimpleNamespace(calls=calls, outcome=1.0, answers=(0.0, None, 1.0, None))
    assert own_and_brief([episode]) == [
        [
            {"own": 0.0, "price": 0.0},
            {"outcome": 1.0},
            {"own": 1.0, "price": -PRICE},
            {"outcome": 1.0},
        ]
    ]


def test_the_cell_can_be_run():
    """A cell that cannot be run is refused when its configuration is made."""
    config = load_config("cells.py:mine")
    assert config.roles == first_accepted.roles and config.cell == "mine"


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
    print("all of it works")
