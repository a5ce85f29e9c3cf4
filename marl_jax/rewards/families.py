"""Families of tasks: how their answers are parsed and graded.

response --parse--> answer (None where there is none) --grade_answer--> reward in [0, 1]

The graders are imported with the first answer, so that code that only describes a run does not load them.
"""

import contextlib
import dataclasses
import functools
import io
import tokenize
from collections.abc import Callable

from marl_jax.rewards.fences import extract_program
from marl_jax.rewards.math.boxed import extract_boxed
from marl_jax.rewards.warn import ungraded
from marl_jax.task import Family, Task

TRIES = 3  # runs of a program whose sandbox fails


@dataclasses.dataclass(frozen=True)
class Grading:
    """The functions of a family, and the form of its responses."""

    parse: Callable[[str], str | None]  # response -> answer
    start: Callable[[Task, str], Callable[[], float]]  # task, answer -> a function that waits for its reward
    form: str  # format of a response with an answer, as `parse` reads it


def parse(task: Task, response: str) -> str | None:
    """The answer of a response: the content of its last box, or its last fenced block of code."""
    return FAMILIES[task.family].parse(response)


def as_response(task: Task, answer: str) -> str:
    """The answer in the form of a response; a text that has this form already is left as it is."""
    return answer if parse(task, answer) is not None else FAMILIES[task.family].form.format(answer)


def grade(task: Task, response: str) -> float:
    """1.0 for a right response, 0.0 for a wrong or unreadable one."""
    answer = parse(task, response)
    return 0.0 if answer is None else grade_answer(task, answer)


def grade_answer(task: Task, answer: str) -> float:
    """1.0 for a right answer as `parse` reads it: the content of a box, or a program."""
    return start_answer(task, answer)()


def start_answer(task: Task, answer: str) -> Callable[[], float]:
    """Start grading; the returned function waits for the reward. Start all answers before waiting for the first."""
    return FAMILIES[task.family].start(task, answer)


def program(task: Task, response: str) -> str | None:
    """The program to run for a response: its code, after the imports and helpers that the task's prompt gave it."""
    code = extract_program(response)
    return None if code is None else _runnable(task, code)


def _runnable(task: Task, code: str) -> str:
    preamble = task.meta.get("preamble", "")
    if not preamble:
        return code
    code = code.removeprefix("\ufeff")  # a byte order mark is only valid at the start
    lines, count = code.split("\n"), _future_lines(code)
    return "\n".join([*lines[:count], f"{preamble}\n", *lines[count:]])


def _future_lines(code: str) -> int:
    """Number of lines up to the end of a program's `from __future__` imports, which must stay first."""
    lines, words = 0, list[str]()
    if "__future__" not in code:
        return lines
    # Tokenized, not parsed: deep nesting in a model's answer can crash the parser, and the process with it.
    with contextlib.suppress(tokenize.TokenError, SyntaxError, ValueError):
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if token.type == tokenize.NEWLINE:
                if words[:2] == ["from", "__future__"]:
                    lines = token.start[0]
                elif len(words) != 1 or words[0][-1:] not in ("'", '"'):  # a docstring may come first
                    break
                words = []
            elif token.type not in (tokenize.COMMENT, tokenize.NL):
                words.append(token.string)
    return lines


def _start_math(task: Task, answer: str) -> Callable[[], float]:
    from marl_jax.rewards.math.equivalence import start_equivalent

    same = start_equivalent(answer, task.gold)
    return lambda: float(same())


def _start_code(task: Task, answer: str) -> Callable[[], float]:
    if not task.tests:  # allowed for rewards that do not use the grade
        return lambda: 0.0
    from marl_jax.rewards.code import submit_program

    submit = functools.partial(submit_program, _runnable(task, answer), task.tests, digest=task.tests_digest)
    first = submit()

    def passed() -> float:
        verdict = first.result()
        for _ in range(TRIES - 1):
            if verdict.lost:  # a sandbox that failed says nothing about the program
                verdict = submit().result()
        if verdict.lost:
            ungraded("a program could not be graded, and earns 0: %s", verdict.reason)
        return float(verdict.passed)

    return passed


FAMILIES: dict[Family, Grading] = {
    "math": Grading(extract_boxed, _start_math, "\\boxed{{{}}}"),
    "code": Grading(extract_program, _start_code, "```python\n{}\n```"),
}
