r"""The math reward: 1 when the last boxed answer of a response equals the gold answer.

    response --extract_boxed--> answer --clean, read--> tree --compare--> 1.0 or 0.0

Exact arithmetic and floats at a few points decide nearly every pair in this process, in microseconds; pairs that
floats cannot decide are settled by math-verify in a worker, which gets the trees and never the text. A
response without a box earns 0: the prompt asks for a box.

The algebra of one answer takes at most 1.5 seconds of wall time, or, if starting the workers takes that long, half a
second after they are up (`math_pool.start` starts them ahead); answers of a batch wait for each other. Algebra is
limited by its CPU time; an answer that needs nearly all of it may be judged right on one machine and wrong on a slower
one. If the wall time runs out first, or workers die, this grade is 0, and the next grading of the same answer tries
again.

Equal and different forms of quantities (the last column is different):

    percent   50\% is 50\%, 0.5, 1/2, and 50 as in data sets   50 is not 0.5; 5\% is not 0.5; 60\% is not 60^\circ
    units     5 cm is 5 cm, 5 centimeters and 5;               5 cm is not 5 m or 5 cm^2; 100 cm is not 1 m
              \$12 per hour is \$12                            \$12 per hour is not \$12 per day
    words     12 apples is 12: a plural noun alone, one        12 apples is not 12 oranges
              before per or of, or a noun after these is a
              unit; other words make a text, which must be
              written alike                                    5 zorble is not 5; 5 at most is not 5
"""

import contextlib
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

from marl_jax.rewards.math import math_pool
from marl_jax.rewards.math.answers import Node, difference, is_asked, is_label, read, readings, unbraced
from marl_jax.rewards.math.boxed import extract_boxed
from marl_jax.rewards.math.expressions import (
    POINTS,
    NoValue,
    TooBig,
    Tree,
    Unreadable,
    Value,
    evaluate,
    is_rational,
    multiply,
    number,
    plug_in,
    power,
    rename,
    variables,
)
from marl_jax.rewards.math.latex import parse
from marl_jax.rewards.math.spelling import choice, clean, squeeze
from marl_jax.rewards.math.units import agree
from marl_jax.rewards.warn import ungraded

MAX_CHARS = 1000  # longest answer that is parsed; a longer one must be the text of the gold answer
MAX_ITEMS = 40  # most items of a list that are compared by value
_GAP = r"(?:\\?[\s,;~])*+"
_ROUNDED = re.compile(  # 2\sqrt3 \approx 3.46, 1/3 \approx 33.3\%, or with the rounded value in brackets
    rf"\s*\$?(?P<exact>[^$]*[^$\s(\\,;~]){_GAP}(?P<opened>\()?\s*(?:\\approx|\\simeq|[≈≃])\s*-?(?:\d+(?:,\d{{3}})*)?\.?\d*"
    rf"(?<=\d)(?:\s*\\(?:times|cdot)\s*10\^(?:\d|\{{-?\d+\}}))?(?:\\?%)?{_GAP}"
    r"(?P<unit>(?:\\(?:text|mathrm)\s*\{[^{}]*\}(?:\^\d|\^\{\d\})?)?)\s*(?(opened)\))\s*\$?\.?\s*"
)
_INDEX = re.compile(r"\s*_\s*(?:\d|\{\s*\d+\s*\})$")
_ARGUMENT = re.compile(r"(?<=[A-Za-z])\([a-z]\)$")
CPU_LIMIT_S = 0.7  # CPU time of algebra, for all comparisons of one answer
WALL_LIMIT_S = 1.5  # the same in wall time, which includes waiting for a worker


def grade_math(response: str, gold: str) -> float:
    """1.0 if the last boxed answer of the response is equivalent to the gold answer, else 0.0.

    No answer equals an empty gold answer.
    """
    for name, text in (("response", response), ("gold", gold)):
        if not isinstance(text, str):
            raise TypeError(f"{name} is {type(text).__name__}, expected a text")
    answer = extract_boxed(response)
    return 1.0 if answer is not None and equivalent(answer, gold) else 0.0


def equivalent(answer: str, gold: str) -> bool:
    r"""Whether an answer (the content of a box) equals the gold answer.

    Values are compared exactly, never rounded. A unit may be left out but not changed; 50\% equals 0.5 and, as
    is usual in data sets, 50. Bare lists and sets have no order, tuples do; ends of intervals count. A label
    (x = 5) may be left out. If the gold answer is a number, plain numbers joined by + - * (2 + 3) are no answer, but
    quotients, powers, roots, binomials and \frac are (6/2, 2^{10} - 1).
    """
    if (verdict := _without_algebra(answer, gold)) is not None:
        return verdict
    try:
        return _by_algebra(answer, gold)
    except _Undecided:
        return False


def start_equivalent(answer: str, gold: str) -> Callable[[], bool]:
    """Start `equivalent`; the returned function waits for its verdict, so that the algebra of a batch runs in parallel.

    At most as many run at a time as there are workers, so that no answer's time runs out while it waits for others.
    """
    if _without_algebra(answer, gold) is not None:
        return lambda: equivalent(answer, gold)

    return math_pool.ask(equivalent, answer, gold).result


class _Undecided(Exception):
    """Algebra was cut short by its time limit or a crash, so there is no verdict to cache."""


def _without_algebra(answer: str, gold: str) -> bool | None:
    """The verdict if it needs no algebra, else None."""
    if len(answer) > MAX_CHARS or len(gold) > MAX_CHARS:
        return bool(gold.strip()) and answer.strip() == gold.strip()
    return _quickly(answer, gold)


@lru_cache(1 << 16)
def _quickly(answer: str, gold: str) -> bool | None:
    compare = _Comparison(algebra=False)
    same = _compared(answer, gold, compare)
    return None if compare.undecided and not same else same


@lru_cache(1 << 12)
def _by_algebra(answer: str, gold: str) -> bool:
    compare = _Comparison()
    same = _compared(answer, gold, compare)
    if compare.undecided and not same:
        # Logged, because from rewards alone a busy machine looks like wrong answers.
        ungraded("a math answer earns 0, as comparing it by algebra took too long: %s", answer)
        raise _Undecided
    return same


def _compared(answer: str, gold: str, compare: "_Comparison") -> bool:
    answer_text, (gold_text, golds) = clean(_exact(answer)), _gold(gold)
    if not answer_text or not gold_text:
        return False
    if squeeze(answer_text) == squeeze(gold_text):
        return True
    (letter, text), (gold_letter, rest) = choice(answer_text), choice(gold_text)
    if letter and letter == gold_letter and (not (text and rest) or _compared(text, rest, compare)):
        return True
    try:
        return any(compare.same(a, g) for a in readings(answer_text) for g in golds)
    except RecursionError:
        return False


def _exact(text: str) -> str:
    r"""The exact side of 2\sqrt3 \approx 3.46, with its unit; x \approx 3.46 has no exact side and stays as it is."""
    match = _ROUNDED.fullmatch(text)
    if match is None or is_asked(clean(match["exact"])):
        return text
    return match["exact"] + ("" if match["exact"].endswith(match["unit"]) else " " + match["unit"])


@lru_cache(1 << 14)
def _gold(gold: str) -> tuple[str, tuple[Node, ...]]:
    text = clean(_exact(extract_boxed(gold) or gold.rpartition("####")[2]))  # GSM8K's gold is behind ####
    try:
        return text, tuple(readings(text))
    except RecursionError:
        return text, ()


def _named_alike(a: tuple[Node, ...], g: tuple[Node, ...]) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """Solutions x_1 = 1, x_2 = 2 as x = 1, x = 2 if the other side has no indices; else both sides as they are."""
    bare = _unnumbered(a), _unnumbered(g)
    names = [{item[1][0] for item in side if item[0] == "equation"} for side in bare]
    numbered = [side != other for side, other in zip(bare, (a, g))]
    return bare if names[0] == names[1] and len(names[0]) == 1 and sum(numbered) == 1 else (a, g)


def _unnumbered(items: tuple[Node, ...]) -> tuple[Node, ...]:
    return tuple(
        ("equation", (_INDEX.sub("", item[1][0]), *item[1][1:])) if item[0] == "equation" else item
        for item in items
    )


def _named_apart(items: tuple[Node, ...]) -> bool:
    """Whether all items are values of different variables: x = 1, y = 2, but not x_1 = 1, x_2 = 2."""
    names = {item[1][0] for item in _unnumbered(items) if item[0] == "equation" and is_label(item[1][0])}
    return len(names) == len(items)


def _same_name(a: str, g: str) -> bool:
    """Whether two labels mean the same: y(t) is also y, but not y(x); f(x) is y."""
    return a == g or {a, g} == {"f(x)", "y"} or _ARGUMENT.sub("", a) == g or a == _ARGUMENT.sub("", g)


def _plain(node: Node) -> Node:
    """A column as a point, a ratio of two numbers as their fraction, anything else as it is."""
    if node[0] == "matrix" and all(len(row) == 1 for row in node[1]):
        return ("bracket", "(", ")", tuple(row[0] for row in node[1]), "")
    if node[:2] == ("bracket", ":") and [part[0] for part in node[3]] == ["scalar"] * 2 and not node[4]:
        (_, x, *_), (_, y, *_) = node[3]
        with contextlib.suppress(ValueError):  # too big, or a division by zero
            fraction = multiply([x, power(y, number(-1))])
            if fraction[0] != "n" or fraction[1].denominator != 1:
                return ("scalar", fraction, False, "", False)
    return node


class _Comparison:
    """One comparison of an answer with a gold answer, and the time it may still spend on algebra."""

    def __init__(self, algebra: bool = True) -> None:
        self.cpu_s, self.wall_s = CPU_LIMIT_S, WALL_LIMIT_S
        self.algebra = algebra  # False: a comparison that needs algebra stays undecided
        self.undecided = False
        # Cached, because nested sets are compared in both directions at every depth.
        self.compared: dict[tuple[Node, Node], bool] = {}

    def same(self, a: Node, g: Node) -> bool:
        if (a, g) not in self.compared:
            self.compared[a, g] = False  # stays if a percentage or an angle is too big to compute
            with contextlib.suppress(TooBig):
                self.compared[a, g] = self._same(a, g)
        return self.compared[a, g]

    def _same(self, a: Node, g: Node) -> bool:
        kinds = {a[0], g[0]}
        if "equation" in kinds:
            return self.same_equation(a, g)
        if kinds == {"list"} and _named_apart(g[1]) and all(item[0] != "equation" for item in a[1]):
            return self.same_row(a[1], g[1])
        if kinds <= {"list", "set"}:
            return self.same_items(*_named_alike(a[1], g[1]), distinct="set" in kinds)
        if a[0] == "set":  # {5} for 5
            return len(a[1]) == 1 and self.same(a[1][0], g)
        if g[0] == "set":
            return len(g[1]) == 1 and self.same(a, g[1][0])
        if len(kinds) > 1:
            a, g = _plain(a), _plain(g)
            if a[0] != g[0]:
                return False
        match a[0]:
            case "scalar":
                return self.same_scalar(a, g)
            case "union":
                return self.same_items(a[1], g[1], distinct=False)
            case "bracket":
                named = bool(a[4] and g[4]) and a[4] != g[4]
                return a[1:3] == g[1:3] and not named and self.same_row(a[3], g[3])
            case "matrix":
                return len(a[1]) == len(g[1]) and all(map(self.same_row, a[1], g[1]))
            case "inequality":
                return a[1] == g[1] and self.proportional(a[2], g[2], positive=True)
        return a == g and a[1] != ""

    def same_row(self, a: tuple[Node, ...], g: tuple[Node, ...]) -> bool:
        return len(a) == len(g) and all(map(self.same, a, g))

    def same_items(self, a: tuple[Node, ...], g: tuple[Node, ...], distinct: bool) -> bool:
        """Whether the items can be paired, or, with `distinct`, whether each has an equal on the other side."""
        if distinct:
            a, g = tuple(dict.fromkeys(a)), tuple(dict.fromkeys(g))
        counts_a, counts_g = Counter(a), Counter(g)
        rest_a, rest_g = list((counts_a - counts_g).elements()), list((counts_g - counts_a).elements())
        if max(len(rest_a), len(rest_g)) > MAX_ITEMS:
            return False
        if distinct:
            # In a set, {2} is not 2.
            alike = lambda x, y: (x[0] == "set") == (y[0] == "set") and self.same(x, y)
            return all(any(alike(x, y) for y in g) for x in rest_a) and all(
                any(alike(x, y) for x in a) for y in rest_g
            )
        if len(rest_a) != len(rest_g):
            return False
        for y in rest_g:
            place = next((i for i, x in enumerate(rest_a) if self.same(x, y)), None)
            if place is None:
                return False
            rest_a.pop(place)
        return True

    def same_equation(self, a: Node, g: Node) -> bool:
        if a[0] != "equation":  # 5 for x = 5
            return is_label(g[1][0]) and self.same(a, read(g[1][-1]))
        if g[0] != "equation":  # x = 2 + 3 = 5 for 5
            first, *rest, last = a[1]
            steps = rest if is_asked(first, last) else [first, *rest]
            if is_label(first):  # A = \pi r^2 = 9\pi
                steps = [step for step in steps if not _is_formula(step, last)]
            return self.same(read(last), g) and all(self.same_value(step, last) for step in steps)
        if [squeeze(part) for part in a[1]] == [squeeze(part) for part in g[1]]:
            return True
        ours, golds = self.stated(a[1]), self.stated(g[1])
        for label, value in (golds, golds[::-1]) if len(golds) == 2 else ():
            if is_label(label):
                for other, stated in (ours, ours[::-1]) if len(ours) == 2 else ():
                    named = _same_name(squeeze(unbraced(other)), squeeze(unbraced(label)))
                    if named and self.same(read(stated), read(value)):
                        return True
        our_diff, gold_diff = difference(ours), difference(golds)
        if our_diff is None or gold_diff is None or not variables(gold_diff) or _solved(golds):
            return False
        return self.proportional(our_diff, gold_diff, positive=False)

    def stated(self, parts: tuple[str, ...]) -> tuple[str, ...]:
        """x = 5 for x = 2 + 3 = 5; any other equation as it is."""
        label, *steps, last = parts
        derived = steps and is_label(label) and not is_label(last)
        return (label, last) if derived and all(self.same_value(step, last) for step in steps) else parts

    def same_value(self, step: str, last: str) -> bool:
        if "%" in step + last:
            return self.same(read(step), read(last))
        try:
            return self.same_tree(parse(step)[0], parse(last)[0])
        except (Unreadable, TooBig):
            return squeeze(step) == squeeze(last)

    def same_scalar(self, a: Node, g: Node) -> bool:
        _, tree_a, unfinished, unit_a, percent_a = a
        _, tree_g, gold_unfinished, unit_g, percent_g = g
        if not agree(unit_a, unit_g) or (percent_a and unit_g) or (unit_a and percent_g):
            return False
        if unfinished and not gold_unfinished and tree_g[0] == "n":
            return False
        if self.same_tree(tree_a, tree_g):
            return True
        scaled = lambda tree, applies, factor: multiply([factor, tree]) if applies else tree
        if {unit_a, unit_g} == {"degree", ""}:  # \pi/3 for 60^\circ
            turn = multiply([number(Fraction(1, 180)), ("c", "pi")])
            return self.same_tree(scaled(tree_a, unit_a, turn), scaled(tree_g, unit_g, turn))
        if percent_a == percent_g:
            return False
        hundredth = number(Fraction(1, 100))
        return self.same_tree(scaled(tree_a, percent_a, hundredth), scaled(tree_g, percent_g, hundredth))

    def same_tree(self, a: Tree, g: Tree) -> bool:
        """Exact values decide; floats that differ refute; algebra decides the rest."""
        if a == g:
            return True
        if a[0] == g[0] == "n":
            return False
        exact = is_rational(a) and is_rational(g)
        for point in range(POINTS):
            try:
                x, y = evaluate(a, point), evaluate(g, point)
            except TooBig:
                return False
            except NoValue:  # a division by zero, or a function outside of its domain
                exact = False
                continue
            if _differ(x, y):
                return False
        return exact or self.same_algebra(a, g)

    def proportional(self, a: Tree, g: Tree, positive: bool) -> bool:
        """Whether a = c g with one constant c, which must be positive for an inequality."""
        if a == g:
            return True
        try:
            values = [(complex(evaluate(a, point)), complex(evaluate(g, point))) for point in range(POINTS)]
            ratios = [x / y for x, y in values]
            if not all(ratios) or (positive and (abs(ratios[0].imag) > 1e-9 or ratios[0].real < 0)):
                return False
            return self.same_tree(multiply([a, plug_in(g, 0)]), multiply([g, plug_in(a, 0)]))
        except (TooBig, NoValue, Unreadable, OverflowError, ZeroDivisionError):
            return False

    def same_algebra(self, a: Tree, g: Tree) -> bool:
        if self.cpu_s <= 0 or self.undecided:
            return False
        if not self.algebra:
            self.undecided = True
            return False
        verdict = math_pool.equal(*rename(a, g), self.cpu_s, self.wall_s)
        self.cpu_s -= verdict.cpu_s
        self.wall_s -= verdict.wall_s
        self.undecided = verdict.same is None
        return bool(verdict.same)


def _is_formula(step: str, last: str) -> bool:
    r"""Whether a step to a value is a formula, as \pi r^2 before 9\pi; one in x alone may be an equation."""
    (kind, tree, *_), (_, value, *_) = read(step), read(last)
    known = isinstance(value, tuple) and variables(value)
    return kind == "scalar" and not is_label(step) and bool(variables(tree) - {"x", "\\infty"}) and not known


def _differ(x: Value, y: Value) -> bool:
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x != y
    try:
        x, y = complex(x), complex(y)
    except OverflowError:  # one exact value is beyond the floats, the other within
        return True
    return abs(x - y) > 1e-9 * max(abs(x), abs(y)) + 1e-12


def _solved(parts: tuple[str, ...]) -> bool:
    """Whether an equation states a value (x = 5); another equation with the same root does not state it."""
    sides = parts if is_label(parts[0]) else parts[::-1]
    value = difference((sides[-1], "0"))
    return is_label(sides[0]) and value is not None and not variables(value)
