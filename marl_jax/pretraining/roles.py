"""Scripted roles for micro tasks: right with a given probability, plausibly wrong otherwise.

    say(task, call, rng, skill) -> text

A role knows other answers only from its call (`call.reads`, `call.after`); its own answer is made from the task.
"""

import dataclasses
import random
import re
from collections.abc import Callable, Mapping

from marl_jax.rewards import families
from marl_jax.task import Task
from marl_jax.tasks import micro
from marl_jax.workflows.api import Call
from marl_jax.workflows.parse import strategies


@dataclasses.dataclass(frozen=True)
class Skill:
    """How often the roles are right."""

    draft: float = 0.57  # a first answer by the default strategy
    program: float = 0.85  # a first program
    other: float = 0.8  # factor on `draft` and `program` for another strategy
    again: float = 0.7  # an answer after criticism, or after reading others
    judge: float = 0.85  # a verdict
    pick: float = 0.8  # choosing a right answer if there is one
    plan: float = 0.7  # a plan: a program in words, or a strategy
    follow: float = 0.85  # a program that follows the plan


def say(task: Task, call: Call, rng: random.Random, skill: Skill) -> str:
    """The text of the call's role."""
    return SCRIPTS[call.role](task, call, rng, skill)


def is_right(task: Task, text: str) -> bool:
    """Whether a scripted answer is right; programs are compared as text, not run."""
    return any(text == micro.solution(task, strategy) for strategy in micro.strategies(task))


def run_scripted(task: Task, text: str) -> dict[str, object]:
    """The result of `self_refine.run_public_tests` for a scripted program, without its sandbox."""
    namespace: dict[str, Callable] = {}
    exec(families.program(task, text) or "", namespace)  # safe: `micro` made the program
    for number, test in enumerate(task.public_tests):
        if namespace[test["call"]](*test["args"]) != test["expected"]:
            return {"passed": False, "reason": f"test {number}: wrong answer"}
    return {"passed": True, "reason": "passed"}


# ---------------------------------------------------------------- roles


def _solve(task: Task, call: Call, rng: random.Random, skill: Skill) -> str:
    chance = _chance(task, skill) if call.after is None else max(skill.again, _chance(task, skill))
    return _worked(task, micro.strategies(task)[0], chance, rng)


def _follow(task: Task, call: Call, rng: random.Random, skill: Skill) -> str:
    """A worker's answer by the strategy on its line of the plan."""
    if not call.reads:
        return _solve(task, call, rng, skill)
    strategy = strategies(call.reads[0].text, call.slot + 1)[call.slot]
    chance = _chance(task, skill) * (1.0 if strategy == micro.strategies(task)[0] else skill.other)
    return _worked(task, strategy, chance, rng)


def _judge(task: Task, call: Call, rng: random.Random, skill: Skill) -> str:
    draft = call.reads[0].text
    right = is_right(task, draft)
    if right == (rng.random() < skill.judge):
        return "\\boxed{Correct}"
    return f"check {rng.choice(_names(task, draft)) if right else _slip(task, draft)}, \\boxed{{Incorrect}}"


def _pick(task: Task, call: Call, rng: random.Random, skill: Skill) -> str:
    return f"\\boxed{{{1 + _choose(task, call, rng, skill)}}}"


def _merge(task: Task, call: Call, rng: random.Random, skill: Skill) -> str:
    """The answer of one of the solutions: only its box, or its program."""
    text = call.reads[_choose(task, call, rng, skill)].text
    return f"\\boxed{{{families.parse(task, text)}}}" if task.family == "math" else text


def _divide(task: Task, call: Call, rng: random.Random, skill: Skill) -> str:
    default, *others = micro.strategies(task)
    lines = rng.choice((1, 2, 2, 3))
    ways = [default if rng.random() < skill.plan else rng.choice(others) for _ in range(lines)]
    return "\n".join(f"STRATEGY {i}: {way}" for i, way in enumerate(ways, 1))


def _outline(task: Task, call: Call, rng: random.Random, skill: Skill) -> str:
    """The expressions of a program, one per step."""
    return ", ".join(re.findall(r"(?:x=|return )(.*)", _worked(task, "steps", skill.plan, rng)))


def _code(task: Task, call: Call, rng: random.Random, skill: Skill) -> str:
    """The program of the plan that the call reads, or a mistake."""
    if rng.random() >= skill.follow:
        return micro.mistake(task, rng.randrange(10**9), "steps")
    *steps, last = call.reads[0].text.split(", ")
    lines = [f" x={step}" for step in steps] + [f" return {last}"]
    return "\n".join(["```python", "def f(x):", *lines, "```"])


SCRIPTS: Mapping[str, Callable[[Task, Call, random.Random, Skill], str]] = {
    "generator": _solve,
    "debater": _solve,
    "worker": _follow,
    "evaluator": _judge,
    "aggregator": _pick,
    "synthesizer": _merge,
    "orchestrator": _divide,
    "planner": _outline,
    "coder": _code,
}


# ---------------------------------------------------------------- parts of the roles


def _chance(task: Task, skill: Skill) -> float:
    return skill.draft if task.family == "math" else skill.program


def _worked(task: Task, strategy: str, chance: float, rng: random.Random) -> str:
    if rng.random() < chance:
        return micro.solution(task, strategy)
    return micro.mistake(task, rng.randrange(10**9), strategy)


def _choose(task: Task, call: Call, rng: random.Random, skill: Skill) -> int:
    """The index of an answer that the call reads: with probability `skill.pick` a right one, else any."""
    right = [i for i, read in enumerate(call.reads) if is_right(task, read.text)]
    return rng.choice(right) if right and rng.random() < skill.pick else rng.randrange(len(call.reads))


def _slip(task: Task, draft: str) -> str:
    """The first step where a draft differs from the right answer that it agrees with longest."""
    names = _names(task, draft)
    agreed = [_equal_steps(draft, micro.solution(task, strategy)) for strategy in micro.strategies(task)]
    return names[min(max(agreed), len(names) - 1)]


def _equal_steps(draft: str, solution: str) -> int:
    """The number of equal steps at the start of two worked answers."""
    pairs = zip(_steps(draft), _steps(solution))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(_steps(draft)))


def _names(task: Task, draft: str) -> list[str]:
    """The names of a draft's steps in a critique, without the values that they should have."""
    steps = _steps(draft)
    if task.family == "code":
        return [f"line {i}" for i in range(1, len(steps) + 1)]
    return [step.partition("=")[0] for step in steps[:-1]] + ["answer"]


def _steps(text: str) -> list[str]:
    return text.split("\n")[2:-1] if text.startswith("```") else text.split(", ")
