r"""Scalar expressions as canonical trees: their arithmetic, and their values at a point.

    1/2 + 2 sqrt(3) x   ->   ("+", ("*", ("n", 2), ("^", ("n", 3), ("n", 1/2)), ("v", "x")), ("n", 1/2))

Numbers are exact fractions, sums and products are flat, collected and sorted, quadratic surds reduced: most
expressions that are equal have equal trees.
"""

import cmath
import functools
import math
import operator
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

Tree = tuple  # ("n", Fraction) | ("v", name) | ("c", "pi" | "e" | "i") | (operator, *trees) | ("f", name, *trees)
Value = Fraction | complex

POINTS = 3  # points at which expressions are evaluated
MAX_BITS = 14_000  # largest size of a computed number: fewer than the 4,300 digits that Python converts


class Unreadable(ValueError):
    """The text is outside the grammar."""


class TooBig(ValueError):
    """The value has more digits than the grader computes."""


class NoValue(ValueError):
    """The tree has no value at the point, or we define none."""


def evaluate(tree: Tree, point: int) -> Value:
    """The value, with every variable at its point-th value: a Fraction if that is exact, else a complex float."""
    kind = tree[0]
    if kind == "n":
        return tree[1]
    if kind == "v":
        return _value_at(tree[1], point)
    if kind == "c":
        return {"pi": complex(math.pi), "e": complex(math.e), "i": 1j}[tree[1]]
    values = [evaluate(part, point) for part in (tree[2:] if kind == "f" else tree[1:])]
    try:
        return _apply(kind if kind != "f" else tree[1], values)
    except (OverflowError, TooBig) as error:
        raise TooBig from error
    except (ArithmeticError, TypeError, ValueError) as error:
        raise NoValue from error


def plug_in(tree: Tree, point: int) -> Tree:
    """The tree with every variable replaced by its point-th value, which is a constant."""
    if tree[0] in "nc":
        return tree
    if tree[0] == "v":
        return number(_value_at(tree[1], point))
    parts = [plug_in(part, point) if isinstance(part, tuple) else part for part in tree[1:]]
    match tree[0]:
        case "+":
            return add(parts)
        case "*":
            return multiply(parts)
        case "^":
            return power(*parts)
    return ("f", *parts)


def variables(tree: Tree) -> set[str]:
    """The names of the tree's variables."""
    if tree[0] == "v":
        return {tree[1]}
    return set().union(*(variables(part) for part in tree[1:] if isinstance(part, tuple)))


def is_rational(tree: Tree) -> bool:
    """Whether a tree is a quotient of polynomials: two of these that agree at a few random points are the same."""
    if tree[0] == "^":
        return is_rational(tree[1]) and tree[2][0] == "n" and tree[2][1].denominator == 1
    return tree[0] in ("n", "v") or (tree[0] in ("+", "*") and all(map(is_rational, tree[1:])))


def rename(a: Tree, b: Tree) -> tuple[Tree, Tree]:
    """The two trees with their variables renamed in the same way: x0, x1..."""
    names = {name: f"x{i}" for i, name in enumerate(sorted(variables(a) | variables(b)))}

    def renamed(tree: Tree) -> Tree:
        if tree[0] == "v":
            return ("v", names[tree[1]])
        return tuple(renamed(part) if isinstance(part, tuple) else part for part in tree)

    return renamed(a), renamed(b)


# --- canonical trees ------------------------------------------------------------------------------------------


def number(value: Fraction | int) -> Tree:
    """The tree of a number."""
    return ("n", _bound(Fraction(value)))


def _bound(value: Fraction) -> Fraction:
    if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
        raise TooBig
    return value


ZERO, ONE, HALF = number(0), number(1), number(Fraction(1, 2))


def add(terms: list[Tree]) -> Tree:
    """The sum, with like terms collected."""
    counts: dict[Tree, Fraction] = {}
    for term in terms:
        for part in term[1:] if term[0] == "+" else (term,):
            count, rest = _coefficient(part)
            counts[rest] = _bound(counts.get(rest, Fraction(0)) + count)
    parts = [multiply([number(count), rest]) for rest, count in counts.items() if count]
    return parts[0] if len(parts) == 1 else ("+", *sorted(parts, key=repr)) if parts else ZERO


def multiply(factors: list[Tree]) -> Tree:
    """The product, with numbers multiplied, equal bases collected, and square roots of numbers joined."""
    count, radicand = Fraction(1), Fraction(1)
    powers: dict[Tree, list[Tree]] = {}
    for factor in factors:
        for part in factor[1:] if factor[0] == "*" else (factor,):
            if part[0] == "n":
                count = _bound(count * part[1])
            elif part[0] == "^" and part[1][0] == "n" and part[2] == HALF and part[1][1] > 0:
                radicand = _bound(radicand * part[1][1])
            else:
                base, exponent = part[1:] if part[0] == "^" else (part, ONE)
                powers.setdefault(base, []).append(exponent)
    if not count:
        return ZERO
    root = power(number(radicand), HALF) if radicand != 1 else ONE
    outside, root = _coefficient(root)
    count *= outside
    exponents = {base: terms[0] if len(terms) == 1 else add(terms) for base, terms in powers.items()}
    parts = [power(base, exponent) for base, exponent in exponents.items()]
    parts = [part for part in (root, *parts) if part != ONE]
    if len(parts) == 1 and parts[0][0] == "+" and count != 1:
        return add([multiply([number(count), part]) for part in parts[0][1:]])
    if any(part[0] in "n*" for part in parts):
        return multiply([number(count), *parts])
    parts = [number(count), *sorted(parts, key=repr)] if count != 1 or not parts else sorted(parts, key=repr)
    return parts[0] if len(parts) == 1 else ("*", *parts)


def power(base: Tree, exponent: Tree) -> Tree:
    """The power: computed if it is exact and of bounded size; square roots of numbers are reduced."""
    if exponent == ONE:
        return base
    if exponent[0] == "n" and base[0] == "n":
        return _number_power(base[1], exponent[1])
    if exponent[0] == "n" and exponent[1].denominator == 1:
        if exponent == ZERO:
            return ONE
        if base == ("c", "i"):
            turns = exponent[1].numerator % 4
            return (ONE, base, number(-1), ("*", number(-1), base))[turns]
        if base[0] == "^" and base[2][0] == "n":
            return power(base[1], number(base[2][1] * exponent[1]))
        if base[0] == "*":
            return multiply([power(part, exponent) for part in base[1:]])
    return ("^", base, exponent)


def _number_power(base: Fraction, exponent: Fraction) -> Tree:
    unevaluated = ("^", number(base), number(exponent))
    numerator = exponent.numerator
    if base == 0:
        if exponent < 0:
            raise Unreadable("division by zero")
        return ZERO if exponent else ONE
    if exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        return number(base**numerator) if bits * abs(numerator) <= MAX_BITS or abs(base) == 1 else unevaluated
    if base < 0 and exponent == Fraction(1, 2):
        return multiply([("c", "i"), power(number(-base), HALF)])
    if (base < 0 and exponent.denominator % 2 == 0) or exponent.denominator > 64 or abs(numerator) > 64:
        return unevaluated
    n, d = (_root(part, exponent.denominator) for part in (base.numerator, base.denominator))
    if n is not None and d is not None:
        return _number_power(Fraction(n, d), Fraction(numerator))
    if exponent.denominator == 2:
        outside, inside = _square_part(base.numerator * base.denominator)
        count = Fraction(outside, base.denominator) * base ** ((numerator - 1) // 2)
        surd = ("^", number(inside), HALF)
        return surd if count == 1 else ("*", number(count), surd)
    return unevaluated


def _root(value: int, degree: int) -> int | None:
    """The exact integer root; None if there is none."""
    size = abs(value)
    if size.bit_length() > 512:
        return None
    low, high = 0, 1 << (size.bit_length() // degree + 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if middle**degree < size else (low, middle)
    return (low if value >= 0 else -low) if low**degree == size else None


def _square_part(value: int) -> tuple[int, int]:
    """(outside, inside) with value = outside**2 * inside, as far as primes below 1000 tell."""
    outside, inside, factor = 1, 1, 2
    while factor * factor <= value and factor < 1000:
        while value % factor == 0:
            value //= factor
            if inside % factor:
                inside *= factor
            else:
                inside //= factor
                outside *= factor
        factor += 1
    root = _root(value, 2)
    return (outside, inside * value) if root is None else (outside * root, inside)


def _coefficient(tree: Tree) -> tuple[Fraction, Tree]:
    if tree[0] == "n":
        return tree[1], ONE
    if tree[0] == "*" and tree[1][0] == "n":
        return tree[1][1], tree[2] if len(tree) == 3 else ("*", *tree[2:])
    return Fraction(1), tree


# --- values ---------------------------------------------------------------------------------------------------


@functools.lru_cache(4096)
def _value_at(name: str, point: int) -> Fraction:
    """The value of a variable at a point: the same in every process, and negative at the last point."""
    draw = random.Random(f"{name}/{point}")
    value = Fraction(draw.randint(300, 2900), draw.choice((997, 991, 983, 977)))
    return -value if point == POINTS - 1 else value


def _apply(name: str, values: list[Value]) -> Value:
    if name in _ARITHMETIC:
        return functools.reduce(lambda x, y: _checked(_ARITHMETIC[name](x, y)), values)
    if name == "^":
        return _power_value(*values)
    if name in EXACT_FUNCTIONS:
        if name == "abs" and isinstance(values[0], complex):
            return complex(abs(values[0]))
        if name == "!" and complex(values[0]).imag == 0 and values[0] != int(values[0].real):
            return complex(math.gamma(values[0].real + 1))
        if not all(isinstance(value, Fraction) for value in values):
            raise NoValue
        return _bound(Fraction(EXACT_FUNCTIONS[name](*values)))
    if name == "log":
        return cmath.log(complex(values[1])) / cmath.log(complex(values[0]))
    return _checked(FLOAT_FUNCTIONS[name](complex(values[0])))


def _power_value(base: Value, exponent: Value) -> Value:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        folded = _number_power(base, exponent)
        if folded[0] == "n":
            return folded[1]
        if exponent.denominator == 1 and base:
            raise TooBig
    base = complex(base)
    if isinstance(exponent, Fraction) and exponent.denominator % 2 and base.imag == 0 and base.real < 0:
        size = (-base.real) ** float(exponent)  # the real odd root
        return _checked(complex(-size if exponent.numerator % 2 else size))
    return _checked(base ** complex(exponent))


def _checked(value: Value) -> Value:
    if isinstance(value, Fraction):
        return _bound(value)
    if not cmath.isfinite(value):
        raise TooBig
    return value


def _factorial(n: Fraction) -> int:
    if n > 2000:
        raise TooBig
    return math.factorial(_integer(n))


def _double_factorial(n: Fraction) -> int:
    if n > 2000:
        raise TooBig
    if n < -1:
        raise NoValue
    return math.prod(range(_integer(n), 0, -2))


def _binomial(above: Fraction, below: Fraction) -> int:
    n, k = _integer(above), _integer(below)
    if min(k, n - k) * n.bit_length() > MAX_BITS:  # an upper bound of the value's bits
        raise TooBig
    return math.comb(n, k)


def _integer(value: Fraction) -> int:
    if value.denominator != 1:
        raise NoValue
    return value.numerator


_ARITHMETIC: dict[str, Callable[..., Value]] = {"+": operator.add, "*": operator.mul}
EXACT_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "!": _factorial,
    "!!": _double_factorial,
    "binom": _binomial,
    "gcd": lambda *v: math.gcd(*map(_integer, v)),
    "lcm": lambda *v: math.lcm(*map(_integer, v)),
    "max": lambda *v: max(v),
    "min": lambda *v: min(v),
}
_INVERTIBLE = ("sin", "cos", "tan", "sinh", "cosh", "tanh")
_RECIPROCALS = {"cot": "tan", "sec": "cos", "csc": "sin", "coth": "tanh", "sech": "cosh", "csch": "sinh"}
FLOAT_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(cmath, name) for name in ("exp", *_INVERTIBLE)},
    **{f"arc{name}": getattr(cmath, f"a{name}") for name in _INVERTIBLE},
    **{name: lambda z, of=of: 1 / getattr(cmath, of)(z) for name, of in _RECIPROCALS.items()},
    **{f"arc{name}": lambda z, of=of: getattr(cmath, f"a{of}")(1 / z) for name, of in _RECIPROCALS.items()},
    "ln": cmath.log,
}
del FLOAT_FUNCTIONS["arccot"]  # it is on another branch: see `latex`
