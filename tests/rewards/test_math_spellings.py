r"""Made-up answers: one value written in two ways is one answer, and a value beside it is another.

Values are drawn first and written down afterwards, so what is equal is known without the grader.
"""

import random
from collections.abc import Callable
from fractions import Fraction

import pytest

from marl_jax.rewards import grade_math
from marl_jax.rewards.math import math_pool

Write = Callable[[list[Fraction]], str]  # one of the ways to write an answer that says these values

NAMES = ["x", "f(x)", "a_{5}", "AB", r"\theta", r"\text{Area}", "P(A)", r"\angle ABC"]
UNITS = [("cm", "centimeters"), ("m/s", "meters per second"), ("m^2", "square meters"), ("apples", "apples")]


def number(value: Fraction, draw: random.Random, alone: bool) -> str:
    """One of the ways to write a number; alone, it may have commas in it."""
    size = abs(value)
    ways = whole(int(size), alone) if size.denominator == 1 else broken(size, draw.choice([1, 2, 3]))
    return (draw.choice(["-", "- ", "−"]) if value < 0 else "") + draw.choice(ways)


def whole(n: int, alone: bool) -> list[str]:
    zeros = len(str(n)) - len(str(n).rstrip("0")) if n else 0
    ways = [f"{n}", f"{n}.0", f"0{n}", rf"\frac{{{7 * n}}}{{7}}", rf"\sqrt{{{n * n}}}"]
    ways += [f"{n:,}".replace(",", comma) for comma in (",", "{,}", r",\!", r"\,") if alone]
    if zeros:
        ways += [rf"{n // 10**zeros} \times 10^{{{zeros}}}", f"{n // 10**zeros}e{zeros}"]
    return ways


def broken(value: Fraction, k: int) -> list[str]:
    a, b = value.numerator * k, value.denominator * k
    ways = [rf"\frac{{{a}}}{{{b}}}", rf"\dfrac{{{a}}}{{{b}}}", f"{a}/{b}", rf"{{{a} \over {b}}}"]
    if max(a, b) < 10:
        ways.append(rf"\frac{a}{b}")
    if a > b:
        ways += [rf"{a // b}\frac{{{a % b}}}{{{b}}}", f"{a // b} {a % b}/{b}"]
    if value.denominator in (2, 4, 5, 20):
        ways += [f"{float(value):.2f}", f"{float(value):.3f}"]
    if value.denominator == 9:
        ways += [rf"{a // b}.\{bar}{{{9 * (a % b) // b}}}" for bar in ("overline", "bar", "dot")]
    return ways


def one(draw: random.Random) -> Write:
    name, units = draw.choice(NAMES), draw.choice(UNITS)

    def write(values: list[Fraction]) -> str:
        text, inside = (number(values[0], draw, alone) for alone in (True, False))
        ways = [f"{name} = {inside}", rf"\left({inside}\right)", f"${text}$", f"{text}."]
        ways += [rf"{text}\text{{ {draw.choice(units)}}}", rf"\boxed{{{text}}}", rf"\text{{Answer: }}{text}"]
        return draw.choice([text, text, text, *ways])

    return write


def several(draw: random.Random) -> Write:
    left, right = draw.choice([("(", ")"), (r"\{", r"\}"), ("", "")])

    def write(values: list[Fraction]) -> str:
        items = values if left == "(" else draw.sample(values, len(values))
        text = ", ".join(number(item, draw, alone=False) for item in items)
        return draw.choice(
            [f"{left}{text}{right}", rf"\left{left} {text} \right{right}" if left else f"${text}$"]
        )

    return write


def interval(draw: random.Random) -> Write:
    left, right = draw.choice(["()", "[)", "(]", "[]"])
    above, below = (r"\le" if bracket in "[]" else "<" for bracket in (left, right))

    def write(values: list[Fraction]) -> str:
        low, high = (number(value, draw, alone=False) for value in sorted(values[:2]))
        brackets, condition = rf"\left{left}{low}, {high}\right{right}", rf"{low} {above} x {below} {high}"
        ways = [brackets, rf"x \in {brackets}", condition, rf"\{{x \mid {condition}\}}"]
        return draw.choice([f"{left}{low},{high}{right}", *ways])

    return write


def matrix(draw: random.Random) -> Write:
    def write(values: list[Fraction]) -> str:
        kind, end = draw.choice(["pmatrix", "bmatrix"]), draw.choice([r"\\", r" \\[4pt] "])
        cells = [number(value, draw, alone=False) for value in values[:2]]
        return rf"\begin{{{kind}}} 1 & {cells[0]} {end} {cells[1]} & 0 \end{{{kind}}}"

    return write


def polynomial(draw: random.Random) -> Write:
    def write(values: list[Fraction]) -> str:
        a, b = (number(value, draw, alone=False) for value in values[:2])
        return draw.choice(
            [f"({a})x^2 + ({b})x", f"x(({b}) + ({a})x)", rf"\frac{{2({a})x^3 + 2x^2 ({b})}}{{2x}}"]
        )

    return write


def surd(draw: random.Random) -> Write:
    def write(values: list[Fraction]) -> str:
        a, b = (number(value, draw, alone=False) for value in values[:2])
        ways = [rf"({a}) \sqrt{{7}}", rf"({a}) \cdot 7^{{1/2}}", rf"\frac{{7({a})}}{{\sqrt7}}"]
        ways = [rf"{way} + ({b})" for way in ways] + [rf"({b}) - (-({way}))" for way in ways]
        return draw.choice([*ways, rf"\frac{{2({b}) + ({a})\sqrt{{28}}}}{{2}}"])

    return write


@pytest.mark.parametrize("form", [one, several, interval, matrix, polynomial, surd])
def test_how_an_answer_is_written_does_not_matter_and_what_it_says_does(form, monkeypatch):
    monkeypatch.setattr(math_pool, "equal", lambda *asked: pytest.fail(f"no ordinary answer: {asked}"))
    draw = random.Random(form.__name__)
    for _ in range(400):
        drawn = {Fraction(draw.randint(-2000, 4000), draw.choice([1, 1, 2, 4, 9, 20, 7])) for _ in range(4)}
        *values, other = drawn
        changed = (
            [other, *values[1:]] if form is one or draw.random() < 0.5 else [values[0], other, *values[2:]]
        )
        write = form(draw)
        answer, gold, beside = write(values), write(values), write(changed)
        assert grade_math(rf"\boxed{{{answer}}}", gold) == 1.0, (answer, gold)
        assert grade_math(rf"\boxed{{{beside}}}", gold) == 0.0, (beside, gold)
        assert grade_math(rf"\boxed{{{gold}}}", beside) == 0.0, (gold, beside)


@pytest.mark.parametrize("written", ["sın x", "pİ", "ınfty", "5 tİmes 2"])
def test_a_letter_that_python_takes_for_an_i_makes_no_word_of_mathematics(written):
    assert grade_math(rf"\boxed{{{written}}}", "5") == 0.0
