"""Families read and grade responses through the real graders and the real sandbox."""

import pytest
from published import helper_row, humaneval_row, jsonl

from marl_jax.rewards import run_program
from marl_jax.rewards.families import FAMILIES, grade, grade_answer, parse, program, start_answer
from marl_jax.task import Task
from marl_jax.tasks import load, micro

SUM = Task("sum", "math", "1/4+1/4?", gold="\\frac{1}{2}")


def test_a_math_answer_is_the_last_box_and_is_graded_by_meaning():
    response = "First \\boxed{3}, no: \\boxed{0.5}."
    assert parse(SUM, response) == "0.5" and grade(SUM, response) == 1.0
    assert parse(SUM, "one half") is None and grade(SUM, "one half") == 0.0
    assert grade(SUM, "\\boxed{3}") == 0.0


def test_a_code_answer_is_the_last_fenced_block_and_is_run():
    task = next(micro.stream("micro_code", "test", levels=(4,)))
    right, wrong = micro.solution(task), micro.mistake(task, 0)
    assert parse(task, f"Draft:\n{wrong}\nBetter:\n{right}\n").startswith("def f(x):")
    assert grade(task, f"Draft:\n{wrong}\nBetter:\n{right}\n") == 1.0
    assert grade(task, f"{right}\nor rather\n{wrong}") == 0.0
    assert parse(task, "return x") is None and grade(task, "return x") == 0.0


def test_code_without_tests_is_worth_nothing():
    assert grade(Task("t", "code", "f?"), "```python\ndef f(): pass\n```") == 0.0


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
def test_worked_programs_pass_and_mistakes_fail_in_the_sandbox(level):
    for task in list(micro.take("micro_code", "val", 4, levels=(level,))):
        assert [grade(task, micro.solution(task, strategy)) for strategy in micro.strategies(task)] == [
            1.0,
            1.0,
        ]
        assert grade(task, micro.mistake(task, 1)) == 0.0


def test_a_humaneval_answer_may_leave_out_what_its_prompt_imports(tmp_path):
    jsonl(tmp_path / "HumanEval.jsonl", [humaneval_row(2)])
    (task,) = load("humaneval", tmp_path, "test", cache=tmp_path / "cache")
    response = "```python\ndef total(x: List[int]) -> int:\n    return sum(x) + 2\n```"
    assert program(task, response).startswith("from typing import List\n\ndef total")
    assert grade(task, response) == 1.0
    assert program(task, "no code") is None and grade(task, "no code") == 0.0


@pytest.mark.parametrize(
    "head",
    [
        "from __future__ import annotations\n",
        '"""Sums."""\n\n# see below\nfrom __future__ import (\n    annotations,\n)\nfrom __future__ import division\n',
        "from __future__ import annotations; import math\n",
        "\ufefffrom __future__ import annotations\n",
        "\ufeff",
    ],
)
def test_an_answers_future_imports_stay_above_what_its_prompt_imports(head, tmp_path):
    jsonl(tmp_path / "HumanEval.jsonl", [humaneval_row(2)])
    (task,) = load("humaneval", tmp_path, "test", cache=tmp_path / "cache")
    code = f"{head}def total(x: List[int]) -> int:\n    return sum(x) + 2\n\nassert List"
    assert grade_answer(task, code) == 1.0


@pytest.mark.parametrize(
    "code", ["x = '__future__'\nx = (", "import x\nfrom __future__ import y", "__future__ '"]
)
def test_an_answer_without_leading_future_imports_comes_after_the_preamble(code):
    task = Task("c", "code", "?", tests=({"stdin": "", "stdout": ""},), meta={"preamble": "import math"})
    assert program(task, f"```\n{code}\n```") == f"import math\n\n{code}"


@pytest.mark.parametrize(
    "code, reward",
    [
        ("def find_zero(xs):\n    return -xs[0] / xs[1]", 1.0),
        ("def find_zero(xs):\n    return -xs[0] / xs[1] if poly(xs, 0) else 0.0", 1.0),
        ("def find_zero(xs):\n    return 0.0", 0.0),
        ("def poly(xs, x):\n    return 0.0\n\ndef find_zero(xs):\n    return 0.0", 0.0),
    ],
    ids=["right", "right, with the helper", "wrong", "wrong, with a helper that says it is right"],
)
def test_a_check_relies_on_the_prompts_helper_and_never_on_the_programs(code, reward, tmp_path):
    jsonl(tmp_path / "HumanEval.jsonl", [helper_row()])
    (task,) = load("humaneval", tmp_path, "test", cache=tmp_path / "cache")
    assert task.tests[0]["functions"] == ["find_zero"]
    assert run_program(program(task, f"```python\n{code}\n```"), task.tests).passed == bool(reward)
    assert grade(task, f"```python\n{code}\n```") == reward


def test_many_answers_are_graded_as_each_alone():
    (code,) = micro.take("micro_code", "val", 1, levels=(2,))
    right, wrong = (parse(code, made) for made in (micro.solution(code), micro.mistake(code, 1)))
    pairs = [(SUM, "0.5"), (code, wrong), (code, right), (SUM, "3"), (code, "def f(")]
    started = [start_answer(*pair) for pair in pairs]
    together = [wait() for wait in started]
    assert together == [grade_answer(*pair) for pair in pairs] == [1.0, 0.0, 1.0, 0.0, 0.0]


def test_there_are_two_families():
    assert set(FAMILIES) == {"math", "code"}
