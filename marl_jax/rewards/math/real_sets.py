r"""Sets of real numbers: \cup, \cap and \setminus of intervals and points, in one form for all ways to write a set.

The ends of all operands cut the line into cells, and a set is the cells that it contains:

    ends      0     5        a point is a cell, a gap is a cell
    cells  0  1  2  3  4     [0, 5) is {1, 2}, \{5\} is {3}, and their union is {1, 2, 3}
"""

import functools
import itertools
import math
import operator
from collections.abc import Iterator
from fractions import Fraction

from marl_jax.rewards.math.expressions import NoValue, TooBig, Tree, evaluate, variables

Node = tuple  # as in `answers`

_OPERATIONS = {"\\cup": operator.or_, "\\cap": operator.and_, "\\setminus": operator.sub}
_INFINITY = ("v", "\\infty")


def combine(sign: str, sets: tuple[Node, ...]) -> Node | None:
    """The sets joined by the operator `sign`; None if one is no set of numbers, or the order of ends is in doubt."""
    operands = [_pieces(node) for node in sets]
    pieces = [piece for operand in operands for piece in operand]
    names = {piece[4] for piece in pieces if piece[4]}
    ends = _sorted({end[1] for piece in pieces for end in piece[3]})
    if not all(operands) or not ends or len(names) > 1:
        return None
    if any(ends.index(low[1]) > ends.index(high[1]) for *_, (low, high), _ in pieces):  # a reversed interval
        return None
    cells = functools.reduce(_OPERATIONS[sign], (_cells(operand, ends) for operand in operands))
    runs = list(_runs(cells, ends, "".join(names)))
    points = tuple(run[3][0] for run in runs if run[1] == "[" and run[3][0] == run[3][1])
    items = [run for run in runs if run[3][0] != run[3][1]]
    if points or not items:
        items.append(("set", points))
    return items[0] if len(items) == 1 else ("union", tuple(items))


def _pieces(node: Node) -> tuple[Node, ...]:
    """The set as intervals, where a point is an interval of no length; empty if it is no set of constants."""
    match node[0]:
        case "set":
            pieces: tuple[Node, ...] = tuple(("bracket", "[", "]", (item, item), "") for item in node[1])
        case "union":
            parts = [_pieces(item) for item in node[1]]
            return tuple(piece for part in parts for piece in part) if all(parts) else ()
        case "bracket" if node[1] in "([" and node[2] in ")]" and len(node[3]) == 2:
            pieces = (node,)
        case _:
            return ()
    ends = [(end, side in "[]") for _, *sides, pair, _ in pieces for end, side in zip(pair, sides)]
    return pieces if all(_is_end(end, closed) for end, closed in ends) else ()


def _is_end(end: Node, closed: bool) -> bool:
    """Whether an end is a plain number (2 + 3 is not), or an infinity that is excluded."""
    return end[0] == "scalar" and end[2:] == (False, "", False) and not (closed and variables(end[1]))


def _sorted(ends: set[Tree]) -> list[Tree]:
    """The ends from left to right; empty if one is no real constant, or two are too close to tell apart."""
    try:
        values = {end: _value(end) for end in ends}
        ordered = sorted(ends, key=values.__getitem__)
        in_doubt = any(_close(values[a], values[b]) for a, b in itertools.pairwise(ordered))
    except (NoValue, TooBig, OverflowError):
        return []
    return [] if in_doubt else ordered


def _close(a: Fraction | float, b: Fraction | float) -> bool:
    exact = isinstance(a, Fraction) and isinstance(b, Fraction)
    return not exact and math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)


def _value(end: Tree) -> Fraction | float:
    if variables(end) == {"\\infty"}:
        return math.inf if end == _INFINITY else -math.inf
    value = evaluate(end, 0)
    if variables(end) or (isinstance(value, complex) and abs(value.imag) > 1e-12):
        raise NoValue
    return value if isinstance(value, Fraction) else value.real


def _cells(pieces: tuple[Node, ...], ends: list[Tree]) -> set[int]:
    cells: set[int] = set()
    for _, left, right, (low, high), _ in pieces:
        first, last = (2 * ends.index(end[1]) + 1 for end in (low, high))
        cells.update(range(first + (left == "("), last + (right == "]")))
    return cells


def _runs(cells: set[int], ends: list[Tree], name: str) -> Iterator[Node]:
    """The longest intervals that the cells make up; an interval is open at an end whose cell is even."""
    for first in sorted(cells):
        if first - 1 in cells:
            continue
        last = next(cell for cell in range(first, 2 * len(ends) + 1) if cell + 1 not in cells)
        low, high = (("scalar", ends[at], False, "", False) for at in ((first - 1) // 2, last // 2))
        yield ("bracket", "[" if first % 2 else "(", "]" if last % 2 else ")", (low, high), name)
