"""Canonical trees keep the value of what they were read from."""

import math
import random
from fractions import Fraction

import pytest

from marl_jax.rewards.math.expressions import NoValue, TooBig, Unreadable, evaluate, rename, variables
from marl_jax.rewards.math.latex import parse


def random_expression(draw: random.Random, depth: int) -> tuple[str, float]:
    """An expression in LaTeX, and its value worked out in floats along the way."""
    if depth == 0:
        n = draw.randint(1, 30)
        return draw.choice(
            [(str(n), n), (rf"\sqrt{{{n}}}", math.sqrt(n)), (r"\pi", math.pi), (f"{n}.5", n + 0.5)]
        )
    (a, x), (b, y) = random_expression(draw, depth - 1), random_expression(draw, depth - 1)
    return draw.choice(
        [
            (f"({a})+({b})", x + y),
            (f"({a})-({b})", x - y),
            (rf"({a}) \cdot ({b})", x * y),
            (rf"\frac{{{a}}}{{{b}}}", x / y if y else math.nan),
            (f"({a})^2", x * x),
            (rf"\left|{a}\right|".replace(r"\left", "").replace(r"\right", ""), abs(x)),
            (f"-({a})", -x),
        ]
    )


def test_a_tree_has_the_value_of_its_text():
    draw = random.Random(0)
    checked = 0
    for _ in range(2000):
        text, value = random_expression(draw, draw.randint(0, 3))
        try:
            found = evaluate(parse(text)[0], 0)
        except (Unreadable, NoValue):  # a division by zero
            continue
        if not math.isfinite(value) or abs(value) > 1e12:
            continue
        assert complex(found) == pytest.approx(value, rel=1e-7, abs=1e-6), text
        checked += 1
    assert checked > 1500


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (r"\sqrt{72}", r"6\sqrt2"),
        (r"\frac{3}{\sqrt3}", r"\sqrt3"),
        (r"\sqrt{\frac34}", r"\frac{\sqrt3}{2}"),
        (r"2^{3/2}", r"2\sqrt2"),
        (r"\sqrt8 - \sqrt2", r"\sqrt2"),
        (r"i^2", "-1"),
        (r"3x - x + x", "3x"),
        (r"\frac{a}{b}", r"a b^{-1}"),
        (r"\frac{1+\sqrt5}{2}", r"\frac12+\frac{\sqrt5}{2}"),
        (r"x^2 x^3", "x^5"),
        (r"\frac{2x}{4}", r"\frac{x}{2}"),
    ],
)
def test_equal_expressions_have_one_tree(left, right):
    assert parse(left)[0] == parse(right)[0]


@pytest.mark.parametrize(
    "text", ["", "+", "x +", "(1", "1)", "2 3", r"\frac{1}", r"\foo", "f'", "a..b", "1..2", "$", "x=1"]
)
def test_text_outside_the_grammar_is_refused(text):
    with pytest.raises(Unreadable):
        parse(text)


@pytest.mark.parametrize(
    "text", ["(" * 300 + "1" + ")" * 300, r"\sqrt" * 150 + "2", "9^{" * 200 + "9" + "}" * 200]
)
def test_nesting_is_bounded(text):
    with pytest.raises(Unreadable):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        *("9^{9^{9^9}}", "10^{10^{10}}", "(9!)!", "2^{-9^{9^9}}", "x^{99999}"),
        *(r"\binom{10^{10}}{10^9}", r"\binom{2^{99}}{999}"),
    ],
)
def test_a_value_too_big_to_write_is_not_worked_out(text):
    with pytest.raises(TooBig):
        evaluate(parse(text)[0], 0)


def test_variables_are_renamed_alike_in_both_trees():
    a, b = rename(parse(r"\alpha S + 1")[0], parse("S")[0])
    assert b == ("v", "x0")
    assert variables(a) == {"x0", "x1"}


def test_values_at_rational_points_are_exact():
    value = evaluate(parse(r"\frac{x^2-1}{x-1} - x")[0], 1)
    assert value == Fraction(1)
    assert isinstance(value, Fraction)
