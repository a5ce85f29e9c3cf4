"""Small arithmetic and equations whose worked answer fits in some tens of characters.

    37+48=?       7+8=15, 3+4+1=8, \\boxed{85}
    3x+5=26, x=?  3x=26-5=21, x=21/3=7, \\boxed{7}

Levels: 1 sums and differences of numbers below 100; 2 of numbers below 1000, of any sign; 3 three terms; 4 products
with one digit; 5 linear equations. A slip is one wrong step (a lost carry, a wrong digit or sign); later steps build
on it.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marl_jax.task import Task

LEVELS = (1, 2, 3, 4, 5)
STRATEGIES = ("columns", "parts")


def draw(rng: random.Random, level: int, accept: Callable[[str], bool]) -> Task:
    """A problem of the level with a key that `accept` accepts."""
    while True:
        if accept(key(task := _draw(rng, level))):
            return task


def key(task: Task) -> str:
    """Equal for equal problems; the order of the terms of a sum does not matter."""
    kind, terms = task.meta["kind"], list(task.meta["terms"])
    return f"{kind} {sorted(terms) if kind in ('add', 'chain') else terms}"


def solution(task: Task, strategy: str = "columns") -> str:
    """A right worked answer, by columns or by parts (an equation has only one way)."""
    return _solve(task.meta, strategy, _Work())[0]


def mistake(task: Task, rng: random.Random, strategy: str | None = None) -> str:
    """A wrong worked answer: one slip somewhere, everything after it consistent with it."""
    strategy = strategy or rng.choice(STRATEGIES)
    right = _Work()
    _solve(task.meta, strategy, right)
    while True:
        text, answer = _solve(task.meta, strategy, _Work(rng.randrange(right.spot), rng))
        if str(answer) != task.gold:
            return text


def _draw(rng: random.Random, level: int) -> Task:
    if level == 1:
        a, b = rng.randrange(100), rng.randrange(100)
        return _task(level, "add", a, b) if rng.random() < 0.5 else _task(level, "sub", max(a, b), min(a, b))
    if level == 2:
        a, b = rng.randrange(100, 1000), rng.randrange(10, 1000)
        return _task(level, rng.choice(("add", "sub")), *rng.choice(((a, b), (b, a))))
    if level == 3:
        a, b, c = (rng.randrange(1, 100) for _ in range(3))
        return _task(level, "chain", a, rng.choice((b, -b)), rng.choice((c, -c)))
    if level == 4:
        return _task(level, "mul", rng.randrange(11, 1000), rng.randrange(2, 10))
    a, x, b = rng.randrange(2, 10), rng.randrange(-20, 21), rng.choice((-1, 1)) * rng.randrange(1, 100)
    return _task(level, "line", a, b, a * x + b)


def _task(level: int, kind: str, *terms: int) -> Task:
    meta = {"kind": kind, "terms": list(terms)}
    question = {
        "add": "{0}+{1}=?",
        "sub": "{0}-{1}=?",
        "mul": "{0}*{1}=?",
        "chain": "{0}{1:+}{2:+}=?",
        "line": "{0}x{1:+}={2}, x=?",
    }[kind].format(*terms)
    _, gold = _solve(meta, "parts", _Work())
    return Task(f"micro_math/{question}", "math", question, gold=str(gold), level=level, meta=meta)


class _Work:
    """The lines of a worked answer, with at most one slip, made at the `slip`-th spot where one is possible."""

    def __init__(self, slip: int | None = None, rng: random.Random | None = None):
        self.slip, self.rng = slip, rng or random.Random(0)
        self.spot = 0
        self.lines: list[str] = []

    def step(self, text: str, value: int) -> int:
        """Write `text=value`; a slip is off by one or by ten, and makes no value negative."""
        if self._slips():
            value += self.rng.choice([off for off in (-10, -1, 1, 10) if value < 0 or value + off >= 0])
        self.lines.append(f"{text}={value}")
        return value

    def carry(self, value: int) -> int:
        """A carry or borrow; a slip forgets it."""
        return 0 if value and self._slips() else value

    def sign(self, value: int) -> int:
        """The sign of an answer; a slip loses a minus."""
        return -value if value < 0 and self._slips() else value

    def close(self, answer: int) -> tuple[str, int]:
        return ", ".join([*self.lines, f"\\boxed{{{answer}}}"]), answer

    def _slips(self) -> bool:
        self.spot += 1
        return self.spot - 1 == self.slip


def _solve(meta: Mapping[str, Any], strategy: str, work: _Work) -> tuple[str, int]:
    kind, terms = meta["kind"], meta["terms"]
    columns = strategy == "columns"
    if kind == "add":
        return work.close((_add_columns if columns else _in_parts)(work, *terms))
    if kind == "sub":
        a, b = terms
        high, low = max(a, b), min(a, b)
        value = _subtract_columns(work, high, low) if columns else _in_parts(work, high, low, "-")
        return work.close(work.sign(-value if a < b else value))
    if kind == "chain":
        a, b, c = terms if columns else (terms[0], terms[2], terms[1])
        half = work.sign(work.step(f"{a}{b:+}", a + b))
        return work.close(work.step(f"{half}{c:+}", half + c))
    if kind == "mul":
        return work.close((_multiply_columns if columns else _multiply_parts)(work, *terms))
    a, b, c = terms
    right = work.step(f"{a}x={c}{-b:+}", c - b)
    return work.close(work.step(f"x={right}/{a}", int(right / a)))  # rounded towards zero, as on paper


def _add_columns(work: _Work, a: int, b: int) -> int:
    places = range(max(len(str(a)), len(str(b))))
    pairs = [(a // 10**place % 10, b // 10**place % 10) for place in places]
    return _carried(work, [(f"{x}+{y}", x + y) for x, y in pairs])


def _multiply_columns(work: _Work, a: int, b: int) -> int:
    return _carried(work, [(f"{x}*{b}", int(x) * b) for x in reversed(str(a))])


def _carried(work: _Work, columns: Sequence[tuple[str, int]]) -> int:
    """Work out the columns from the right, each with the carry of the one before."""
    digits, carry = [], 0
    for place, (text, value) in enumerate(columns):
        total = work.step(f"{text}+{carry}" if carry else text, value + carry)
        digits.append(total % 10 * 10**place)
        carry = work.carry(total // 10)
    return sum(digits) + carry * 10 ** len(digits)


def _subtract_columns(work: _Work, a: int, b: int) -> int:
    digits, borrow = [], 0
    for place in range(len(str(a))):
        x, y = a // 10**place % 10 - borrow, b // 10**place % 10
        borrow = int(x < y)
        x += 10 * borrow
        digits.append(work.step(f"{x}-{y}", x - y) * 10**place)
        borrow = work.carry(borrow)
    return sum(digits)


def _in_parts(work: _Work, a: int, b: int, sign: str = "+") -> int:
    for part in _parts(b):
        a = work.step(f"{a}{sign}{part}", a + part if sign == "+" else a - part)
    return a


def _multiply_parts(work: _Work, a: int, b: int) -> int:
    total = 0
    for part in _parts(a):
        product = work.step(f"{part}*{b}", part * b)
        total = work.step(f"{total}+{product}", total + product) if total else product
    return total


def _parts(number: int) -> list[int]:
    """347 -> [300, 40, 7]; 0 -> [0]."""
    text = str(number)
    parts = [int(digit) * 10 ** (len(text) - 1 - i) for i, digit in enumerate(text)]
    return [part for part in parts if part] or [0]
