"""Comparison of an answer with the expected one: values in their packed form (see `sandbox.plain`), and printed text.

Numbers agree within 1e-6, absolute or relative, when at least one of them is a float; two ints must be equal. A bool
is not an int, a tuple equals a list, nan equals nan; all else by type and value. Sets and dicts are equal when their
members can be paired so that each pair is. Answers come from hostile programs, so nothing here hashes them or calls
into them, a value that is nested too deep equals nothing, and the search for a pairing has a bound (`SEARCH`).
"""

import math
import re
from typing import Any

from marl_jax.rewards.sandbox import plain

TOLERANCE = 1e-6
FLOAT_DIGITS = 15  # digits of an int that a float represents exactly
SEARCH = 100_000  # most pairs of members that are compared for one value, if sorting alone does not pair them


def same_value(actual: Any, expected: Any) -> bool:
    """Whether two plain Python values are equal in the sense above."""
    return same_packed(plain.pack(actual), plain.pack(expected))


def same_packed(actual: Any, expected: Any) -> bool:
    """`same_value` of packed values; an invalid packed value equals nothing."""
    try:
        return _Comparison().same(_tagged(actual), _tagged(expected))
    except (ValueError, TypeError, RecursionError):
        return False


def same_output(actual: str, expected: str) -> bool:
    """Whether two printed texts agree, line by line and word by word, whatever the spacing and the blank lines."""
    if actual == expected:
        return True
    count = len(expected.split())
    if len(actual.split(None, count + 1)) > count:  # before a long text is split into all of its words
        return False
    ours, theirs = _words(actual), _words(expected)
    return len(ours) == len(theirs) and all(
        len(line) == len(other) and all(map(_same_word, line, other)) for line, other in zip(ours, theirs)
    )


_RANK = {
    kind: rank
    for rank, kind in enumerate(("none", "bool", "number", "nan", "str", "bytes", "c", "list", "d", "s", "z"))
}
# The kinds of JSON's own values; the others have a tag.
_KINDS = {type(None): "none", bool: "bool", int: "number", float: "number", str: "str", list: "list"}
_Tagged = tuple[str, Any]


def _tagged(packed: Any) -> _Tagged:
    """(kind, body) of a packed value; ValueError when it is not one."""
    if (kind := _KINDS.get(type(packed))) is not None:
        return kind, packed
    ((tag, body),) = packed.items()
    if tag == "f" and body in ("nan", "inf", "-inf"):
        return ("nan", None) if body == "nan" else ("number", float(body))
    if tag == "i" and isinstance(body, str):
        return "number", int(body, 16)
    if tag == "b" and isinstance(body, str):
        return "bytes", body
    if tag in ("c", "t", "s", "z", "d") and isinstance(body, list):
        return "list" if tag == "t" else tag, body
    raise ValueError("not a packed value")


class _Comparison:
    """One comparison, with the remaining budget of its search for pairings."""

    def __init__(self) -> None:
        self.budget, self.searches = SEARCH, 0
        self.sorted: dict[tuple[int, bool], list[_Tagged]] = {}  # by the identity of the list, and `coarse`

    def same(self, actual: _Tagged, expected: _Tagged) -> bool:
        self.budget -= self.searches > 0
        if self.budget < 0:
            raise ValueError("the search for a pairing has reached its bound")
        (kind, body), (expected_kind, expected_body) = actual, expected
        if kind != expected_kind:
            return False
        if kind == "number":
            return _close(body, expected_body)
        if kind not in ("list", "c", "d", "s", "z"):
            return body == expected_body
        if len(body) != len(expected_body):
            return False
        if kind in ("list", "c"):
            return all(self.same(_tagged(a), _tagged(b)) for a, b in zip(body, expected_body))
        if kind == "d" and not all(isinstance(entry, list) and len(entry) == 2 for entry in body):
            return False
        if all(map(self.same, self.members(body, coarse=False), self.members(expected_body, coarse=False))):
            return True
        return self.paired(self.members(body, coarse=True), self.members(expected_body, coarse=True))

    def members(self, body: list, coarse: bool) -> list[_Tagged]:
        key = id(body), coarse
        if key not in self.sorted:
            body = sorted(body, key=_order)
            if coarse:  # a stable sort: members of equal keys keep their exact order
                body.sort(key=lambda item: _order(item, coarse))
            self.sorted[key] = list(map(_tagged, body))
        return self.sorted[key]

    def paired(self, ours: list[_Tagged], theirs: list[_Tagged]) -> bool:
        """Whether the members of the two sides can be paired so that each pair is equal.

        Members with close numbers, such as (1.0, 2) and (0.9999999, 3), may sort differently on the two sides. Sorting
        by rounded numbers leaves few of them unpaired; these are paired along augmenting paths.
        """
        holders = [place if self.same(*pair) else -1 for place, pair in enumerate(zip(ours, theirs))]
        unpaired = [place for place, holder in enumerate(holders) if holder < 0]
        self.searches += 1
        all_paired = all(self.find_place(member, ours, theirs, holders) for member in unpaired)
        self.searches -= 1
        return all_paired

    def find_place(self, start: int, ours: list[_Tagged], theirs: list[_Tagged], holders: list[int]) -> bool:
        """Pair one more of our members, moving others along an augmenting path; False if there is no path."""
        wanted_by: dict[int, int] = {}
        pending = [start]
        for member in pending:
            for place in (*range(member, len(theirs)), *range(member)):  # nearby places first
                if place in wanted_by or not self.same(ours[member], theirs[place]):
                    continue
                wanted_by[place] = member
                if holders[place] >= 0:
                    pending.append(holders[place])
                    continue
                mover = -1
                while mover != start:
                    mover = wanted_by[place]
                    freed = holders.index(mover) if mover != start else place
                    holders[place], place = mover, freed
                return True
        return False


def _order(packed: Any, coarse: bool = False) -> tuple:
    """A sort key that is equal for equal members; `coarse` rounds numbers, so that close members sort together."""
    kind, body = _tagged(packed)
    if kind in ("list", "c"):
        body = [_order(item, coarse) for item in body]
    elif kind in ("d", "s", "z"):
        body = sorted(_order(item, coarse) for item in body)
    elif kind == "number" and coarse:
        body = _rounded(body)
    return (_RANK[kind], 0 if body is None else body)


def _rounded(value: float) -> float:
    try:
        return round(float(f"{value:.4g}"), 4)
    except OverflowError:  # an int too large for a float, which equals only itself
        return value


def _close(a: float, b: float) -> bool:
    if a == b:
        return True
    if isinstance(a, int) and isinstance(b, int):
        return False
    try:
        return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an int too large for a float
        return False


_NUMBER = re.compile(r"([+-]?)(?:(\d+)|(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?)", re.ASCII)


def _words(text: str) -> list[list[str]]:
    return [words for line in text.splitlines() if (words := line.split())]


def _same_word(a: str, b: str) -> bool:
    if a == b:
        return True
    number, expected = _NUMBER.fullmatch(a), _NUMBER.fullmatch(b)
    if not number or not expected:
        return False
    if expected[2] and len(expected[2]) > 1 and expected[2][0] == "0":  # 0011 is a text of digits
        return False
    if number[2] and expected[2]:  # two ints, of any length: compared digit by digit
        return _digits(number) == _digits(expected)
    x, y = float(a), float(b)
    if expected[2]:  # a float for an int: a relative tolerance would ignore its last digits
        return len(_digits(expected)[1]) <= FLOAT_DIGITS and abs(x - y) <= TOLERANCE
    return math.isfinite(x) and math.isfinite(y) and _close(x, y)


def _digits(match: re.Match) -> tuple[bool, str]:
    digits = match[2].lstrip("0")
    return (match[1] == "-" and digits != "", digits)
