"""Small Python functions to write from a short description or from examples, with hidden tests.

    Write f(x): add 7, times 3           ```python
    Write f(x): f(0)=21 f(2)=27 f(5)=36  def f(x):
                                          x=x+7
                                          return x*3
                                         ```

A program is a chain of steps from a fixed table. Levels: 1 one step on a number; 2 two; 3 one step on a list;
4 two, the last of which may reduce it; 5 three.
"""

import functools
import hashlib
import random
import re
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

from marl_jax.task import Task

LEVELS = (1, 2, 3, 4, 5)
STRATEGIES = ("steps", "expression")
TESTS = 5  # hidden tests of a problem

Step = tuple[str, int | None]  # (name in the table, its constant)
# name -> (words, expression in x and c, constants)
_NUMBER = {
    "add": ("add {c}", "x+{c}", range(1, 100)),
    "subtract": ("subtract {c}", "x-{c}", range(1, 100)),
    "times": ("times {c}", "x*{c}", range(2, 20)),
    "modulo": ("modulo {c}", "x%{c}", range(2, 20)),
    "least": ("at least {c}", "max(x,{c})", range(0, 10)),
    "most": ("at most {c}", "min(x,{c})", range(0, 10)),
    "negate": ("negate", "-x", None),
    "square": ("square", "x*x", None),
    "halve": ("halve", "x//2", None),
    "absolute": ("absolute", "abs(x)", None),
}
_LIST = {
    "add each": ("add {c} to each", "[i+{c} for i in x]", range(1, 20)),
    "times each": ("times {c} for each", "[i*{c} for i in x]", range(2, 10)),
    "above": ("keep above {c}", "[i for i in x if i>{c}]", range(0, 6)),
    "below": ("keep below {c}", "[i for i in x if i<{c}]", range(3, 9)),
    "even": ("keep even", "[i for i in x if i%2==0]", None),
    "first": ("first {c}", "x[:{c}]", range(1, 4)),
    "drop": ("drop {c}", "x[{c}:]", range(1, 4)),
    "sort": ("sort", "sorted(x)", None),
    "reverse": ("reverse", "x[::-1]", None),
}
_REDUCE = {
    "sum": ("sum", "sum(x)", None),
    "count": ("count", "len(x)", None),
    "largest": ("largest", "max(x,default=0)", None),
    "smallest": ("smallest", "min(x,default=0)", None),
}
_TABLE = {**_NUMBER, **_LIST, **_REDUCE}
_CHAINS: Mapping[int, tuple[tuple[Mapping[str, Any], ...], ...]] = {
    1: ((_NUMBER,),),
    2: ((_NUMBER, _NUMBER),),
    3: ((_LIST,), (_LIST,), (_REDUCE,)),
    4: ((_LIST, _LIST), (_LIST, _REDUCE)),
    5: ((_LIST, _LIST, _LIST), (_LIST, _LIST, _REDUCE)),
}
_PROBES: Mapping[str, list[Any]] = {
    "number": [-40, -13, -7, -3, -2, -1, 0, 1, 2, 3, 5, 8, 13, 21, 40, 99, 150],
    "list": [
        [],
        [4],
        [3, 1, 2],
        [0, 9, 5, 2],
        [7, 7, 1, 8],
        [2, 4, 6, 8, 1],
        [9, 0, 3, 3, 6],
        [1, 8, 2, 5, 4, 7],
    ],
}


def draw(rng: random.Random, level: int, accept: Callable[[str], bool]) -> Task:
    """A problem of the level with a key that `accept` accepts, described in words or by examples."""
    while True:
        chain = tuple(_step(rng, table) for table in rng.choice(_CHAINS[level]))
        if not _dull(chain) and accept(_key(chain)) and (task := _task(level, chain, rng)):
            return task


def key(task: Task) -> str:
    """The behaviour of the function, equal for every wording and every program of it.

    Single steps without a constant are the vocabulary: their keys are marked `taught`, and are always in train.
    """
    return _key(_chain(task))


def solution(task: Task, strategy: str = "steps") -> str:
    """A right program, step by step or as one expression."""
    return _program(_chain(task), strategy)


def mistake(task: Task, rng: random.Random, strategy: str | None = None) -> str:
    """A program that fails a test: a constant is off, or a step is swapped, lost or out of order."""
    chain = _chain(task)
    while True:
        wrong = _slip(chain, rng)
        if wrong and any(_run(wrong, test["args"][0]) != test["expected"] for test in task.tests):
            return _program(wrong, strategy or rng.choice(STRATEGIES))


def _task(level: int, chain: tuple[Step, ...], rng: random.Random) -> Task | None:
    """The problem of a chain, or None if `_tests` finds no tests."""
    words = rng.random() < 0.5
    drawn = random.Random(repr(chain)) if words else rng  # in words, a chain is always the same problem
    examples = _tests(chain, drawn, 3 if _kind(chain) == "number" else 2, shown=True)
    if not examples:
        return None
    if words:
        shown = ", ".join(_TABLE[name][0].format(c=constant) for name, constant in chain)
    else:
        shown = " ".join(f"f({_show(test['args'][0])})={_show(test['expected'])}" for test in examples)
    question = f"Write f(x): {shown}"
    name = repr((question, chain))
    hidden = _tests(chain, random.Random(name), TESTS)  # equal problems have equal tests
    if not hidden:
        return None
    return Task(
        f"micro_code/{hashlib.sha256(name.encode()).hexdigest()[:16]}",
        "code",
        question,
        tests=hidden,
        public_tests=examples,
        level=level,
        meta={"chain": [list(step) for step in chain]},
    )


def _step(rng: random.Random, table: Mapping[str, Any]) -> Step:
    name = rng.choice(tuple(table))
    constants = table[name][2]
    return name, None if constants is None else rng.choice(constants)


def _slip(chain: Sequence[Step], rng: random.Random) -> tuple[Step, ...] | None:
    at = rng.randrange(len(chain))
    name, constant = chain[at]
    siblings = next(table for table in (_NUMBER, _LIST, _REDUCE) if name in table)
    match rng.choice(("constant", "constant", "swap", "lose", "order")):
        case "constant" if constant is not None:
            new: tuple[Step, ...] = ((name, max(1, constant + rng.choice((-10, -1, 1, 10)))),)
        case "swap":
            new = (_step(rng, siblings),)
        case "lose" if len(chain) > 1:
            new = ()
        case "order" if at + 1 < len(chain) and chain[at + 1][0] in siblings:
            return (*chain[:at], chain[at + 1], chain[at], *chain[at + 2 :])
        case _:
            return None
    return (*chain[:at], *new, *chain[at + 1 :])


def _program(chain: Sequence[Step], strategy: str) -> str:
    if strategy == "expression":
        body = "x"
        for step in chain:
            bare = body == "x" or re.search(r"(\(|in )x\b", _expression(step))
            body = re.sub(r"\bx\b", body if bare else f"({body})", _expression(step))
        lines = [f" return {body}"]
    else:
        lines = [f" x={_expression(step)}" for step in chain[:-1]] + [f" return {_expression(chain[-1])}"]
    return "```python\ndef f(x):\n" + "\n".join(lines) + "\n```"


def _expression(step: Step) -> str:
    return _TABLE[step[0]][1].format(c=step[1])


def _chain(task: Task) -> tuple[Step, ...]:
    return tuple((name, constant) for name, constant in task.meta["chain"])


def _kind(chain: Sequence[Step]) -> str:
    return "number" if chain[0][0] in _NUMBER else "list"


def _tests(
    chain: Sequence[Step], rng: random.Random, count: int, shown: bool = False
) -> tuple[dict[str, Any], ...] | None:
    """Tests with enough different results that no constant function passes; None if 20 attempts find none.

    The first shown input is 0, or a list that begins with 0, which reveals the constants of many chains.
    """
    for _ in range(20):
        inputs = [_input(rng, _kind(chain)) for _ in range(count)]
        if shown:
            inputs[0] = 0 if _kind(chain) == "number" else [0, *inputs[0][1:]]
        tests = tuple({"call": "f", "args": [value], "expected": _run(chain, value)} for value in inputs)
        if len({str(test["expected"]) for test in tests}) > count // 2:
            return tests
    return None


def _input(rng: random.Random, kind: str) -> Any:
    if kind == "number":
        return rng.randrange(-50, 100)
    return [rng.randrange(10) for _ in range(rng.randrange(3, 6))]


def _show(value: Any) -> str:
    return str(value).replace(" ", "")


@functools.cache
def _compiled(name: str) -> CodeType:
    return compile(_TABLE[name][1].format(c="c"), name, "eval")


def _run(chain: Sequence[Step], value: Any) -> Any:
    for name, constant in chain:  # safe: the expressions come from the table above
        value = eval(_compiled(name), {"x": value, "c": constant})
    return value


def _behaviour(chain: tuple[Step, ...]) -> str:
    return f"{_kind(chain)} {_outputs(chain)}"


@functools.cache
def _taught() -> frozenset[str]:
    return frozenset(
        _behaviour(((name, None),)) for name, (_, _, constants) in _TABLE.items() if constants is None
    )


def _key(chain: tuple[Step, ...]) -> str:
    behaviour = _behaviour(chain)
    return f"taught {behaviour}" if behaviour in _taught() else behaviour


def _dull(chain: tuple[Step, ...]) -> bool:
    """Whether a chain returns its input unchanged, or fewer than four different results on the probes."""
    outputs = _outputs(chain)
    return outputs == _PROBES[_kind(chain)] or len(set(map(str, outputs))) < 4


@functools.lru_cache(1 << 16)
def _outputs(chain: tuple[Step, ...]) -> list[Any]:
    return [_run(chain, probe) for probe in _PROBES[_kind(chain)]]
