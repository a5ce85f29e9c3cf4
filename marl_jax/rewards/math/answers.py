r"""Parsing of a math answer's text to its value: numbers, lists, sets, tuples, intervals, matrices, text.

`read` parses a cleaned answer (see `spelling`) into its structure, down to scalars, each with its unit. A node
is a plain tuple, so two answers that read the same have equal nodes:

    ("scalar", tree, unfinished, unit, percent)   ("text", folded)   ("list" | "set" | "union", items)
    ("bracket", "[", ")", items, variable)        ("matrix", rows)   ("equation", parts)
    ("inequality", "<" | "<=", tree)              tree < 0
"""

import contextlib
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction

from marl_jax.rewards.math.expressions import TooBig, Tree, Unreadable, add, multiply, number, variables
from marl_jax.rewards.math.latex import MAX_DEPTH, parse
from marl_jax.rewards.math.real_sets import combine
from marl_jax.rewards.math.units import SPACED_LETTERS, UNIT_LETTERS, has_words, measure

Node = tuple


def readings(text: str) -> Iterator[Node]:
    r"""The ways to read a cleaned answer. 1,234, 5 is a list of two numbers or of three, but 1,034 is always one
    number. A, C is also AC; 10 am also 10:00 am; 90^\circ - A also 90 - A; x = 1, y = 2 also a point; x > 1 and x < 3
    also one interval; x \ne 1, 2 also a set; 3x \pm y = 0 also two lines; 1/4 or 0.25 also one number; the m of 5 m
    also a variable. A text that is nested too deep is only text.
    """
    depths = itertools.accumulate(map(_step, _BRACKET.findall(text) if len(text) > MAX_DEPTH else ()))
    if max(depths, default=0) > MAX_DEPTH:
        yield _text(text)
        return
    joined = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
    if _THOUSANDS.fullmatch(text) or any(",0" in number for number in _THOUSANDS.findall(text)):
        text = joined
    elif joined != text and not any(map(text.count, "([{")):
        yield read(joined)
    if _INNER_DEGREES.search(text) and not _NO_UNIT.search(text):
        yield read(_DEGREES.sub("", text))
    if _CHOICES.fullmatch(text):
        yield read("".join(sorted(re.findall(_CHOICE, text))))
    if _HOUR.fullmatch(text):
        yield read(text.replace(" ", ":00 "))
    if (match := _LEFT_OUT.fullmatch(text)) is not None:
        yield read(rf"(-\infty,\infty) \setminus \{{{match['points']}\}}")
    node = read(text)
    yield node
    if node[0] == "equation" and (signed := _signed(text)):
        yield ("list", signed)
    if _LETTER.search(text):
        yield read(_LETTER.sub(r"{\1}", text))
    if node[0] == "list" and all(item[0] == "equation" and len(item[1]) == 2 for item in node[1]):
        names, values = zip(*(item[1] for item in node[1]))
        if all(len(name) == 1 for name in names) and list(names) == sorted(set(names)):
            yield ("bracket", "(", ")", tuple(map(read, values)), "")
    by_or = node[0] == "list" and not {*",;"} & {*text} and not _AND.search(text)
    if by_or and len(set(map(_as_number, node[1]))) == 1:
        yield node[1][0]
    is_joint = node[0] == "list" and (_AND.search(text) or any(item[0] == "union" for item in node[1]))
    if is_joint and (joint := _intersection(text, node[1])) is not None:  # also x \ne 1, x > 0
        yield joint


@functools.lru_cache(1 << 12)
def read(text: str) -> Node:
    """The structure of a cleaned answer. Cached: a part is read again for each form that the answer may have."""
    text = text.strip()
    if _SET_OPERATOR.search(text):
        name, *values = _split(text, _EQUALS)
        if len(values) == 1 and is_label(name):  # a label, not an operand: D = \mathbb{R} \setminus \{1\}
            return ("equation", (name, *values))
        if len(parts := _split(text, _SET_OPERATOR)) > 1:
            sign, *others = {match.group() for match in _SET_OPERATOR.finditer(text)}
            return _text(text) if others else _set_algebra(sign, tuple(map(read, parts))) or _text(text)
    if (points := _points(text)) is not None:
        return points
    if len(parts := _split(text, _SEPARATOR)) > 1:
        if not all(parts):
            return _text(text)
        items = tuple(itertools.chain.from_iterable(map(_items, parts)))
        return (_solutions(items) if "or" in text and not _AND.search(text) else None) or ("list", items)
    if text.startswith(("(", "[", "{", "\\{")):
        node = _bracket(text)
        signed = _signed(text) if node[:3] == ("bracket", "(", ")") or node[0] == "text" else ()  # (0, \pm 1)
        return ("list", signed) if signed else node
    if (match := _POINT.fullmatch(text)) is not None and _is_point(_bracket(match["place"])):
        return ("equation", (match["name"], match["place"]))
    if text.startswith("\\begin"):
        return _matrix(text)
    if _RELATION.search(text):
        return _relation(text)
    signed = _signed(text)
    return ("list", signed) if signed else _scaled_matrix(text) or _scalar(text)


# --- structure ------------------------------------------------------------------------------------------------

_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\S)")
# A letter without a space before it is no unit.
_LETTER = re.compile(rf" ([{''.join([*UNIT_LETTERS, *SPACED_LETTERS])}])$")
_CHOICE = r"[A-J]|\\textcircled\{\d+\}"
_CHOICES = re.compile(rf"(?:{_CHOICE}|\([A-J]\))(?:(?: ?, ?(?:and )?| and )(?:{_CHOICE}|\([A-J]\)))+")
_HOUR = re.compile(r"\d{1,2} [ap]m")
_SET_OPERATOR = re.compile(r"\\(?:cup|cap|setminus)(?![A-Za-z])")
_EQUALS = re.compile("=")
_SEPARATOR = re.compile(r"[,;]\s*(?:(?:and|or)(?![A-Za-z]))?|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
_OR, _AND = (re.compile(rf"(?<![A-Za-z\\]){word}(?![A-Za-z])") for word in ("or", "and"))
_SEMICOLON = re.compile(";")
_RELATION = re.compile(r"\\(?:le|ge|ne|in)(?![A-Za-z])|[=<>]")
_BRACKET = re.compile(r"(\\begin|\\end|\\[{}]|[()\[\]{}])")
_OPENING = {"(", "[", "{", "\\{", "\\begin"}
_SINGLE = re.compile(r"\{\s*([A-Za-z\d]|\\[A-Za-z]+)\s*\}")
_POINT = re.compile(r"(?P<name>[A-Z](?:_(?:\w|\{\w\})|'+)?) ?(?P<place>\(.*,.*\))")
_EDGES = re.compile(r"^[\s,;]*(?:(?:if|for|when)(?![A-Za-z]))?\s*|[\s,;.]+$")  # of a case or its condition
_ARTICLE = re.compile(r"^\s*(?:an?|the) (?=[a-z]{3})", re.I)
_EXCLAIMED = re.compile(r"(?<=[a-z]{2})[.,;:!?]+$")
# Text in which degrees mean more than their number.
_NO_UNIT = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|pi)(?![A-Za-z])|=")
_DEGREES = re.compile(r"\s*\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})")
_INNER_DEGREES = re.compile(_DEGREES.pattern + r"\s*[-+]")
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_NAME = r"(?:[A-Za-z]|\\[a-zA-Z]+)(?:_(?:\{[^{}]*\}|[A-Za-z\d]))?'*"
_VARIABLE = re.compile(_NAME)
_CONSTANTS = {"e", "i", "\\pi", "\\infty"}
_LEFT_OUT = re.compile(rf"{_NAME}\s*\\ne(?![A-Za-z])(?P<points>[^=<>|]*,[^=<>|]*)")
_REAL = r"\s*\\in\s*\(-\\infty,\\infty\)\s*"
_CONDITION = re.compile(
    rf"(?P<name>{_NAME})\s*(?:{_REAL})?[|:]\s*(?:(?P=name){_REAL}(?:,|and)\s*)?(?P<condition>.+)", re.DOTALL
)
_LABEL = re.compile(
    r"(?:m?\s*\\(?:angle|triangle|overline|widehat|hat|bar|vec|overrightarrow)\s*)?"
    rf"(?:{_NAME}|\{{?[A-Za-z ]+\}}?)(?: ?\([^()=]*\))?(?:_\{{(?:max|min)\}})?"
    rf"|\|[A-Z]{{1,3}}\||\({_NAME}(?:,\s*{_NAME})+\)"
    # Of x alone a ratio is no label: the reader in arrays knows no other letter.
    r"|(?=.*[A-Za-wyz])[A-Za-z]{1,3}(?:_\d)?(?:\s*:\s*[A-Za-z]{1,3}(?:_\d)?)+"
    r"|[A-Z]\s*\^\s*\{-1\}|[f-h]\^\{-1\}\([^()=]*\)"
    r"|(?=.*[A-Z])(?:[A-Z(){} ]|_ ?\{?\w|\\(?:cup|cap|setminus|complement|overline)(?![A-Za-z]))+"
)
_TO_SOLVE = re.compile(  # sides to solve, \ln(x) = 1, or check, \log_2(8) = 4; but \sin(A) is a quantity
    r"\\(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|ln|log|exp)(?:_(?:\w|\{[^{}]*\}))? ?"
    r"\((?!.*(?:[A-Z]|\\(?:alpha|beta|gamma|theta|phi)(?![A-Za-z])))"
)
# Quantities that problems ask for: a sum of names, an area, a modulus, a probability, a mean, f(g(2)), a function of
# an angle, an integral, a sum, a limit, an expression of vectors; but |x| = 5 and \\sin x = 1 are to be solved.
_ASKED = re.compile(
    r"[A-Za-z](?:\s*[+-]\s*[A-Za-z])+|\[[A-Z]{3,6}\]|\|[zw]\|(?:\^(?:2|\{2\}))?"
    r"|(?:[PE]|\\mathbb\s*\{\s*[PE]\s*\})\s*[(\[][^()\[\]]*[)\]]"
    r"|[A-Za-z]\([A-Za-z]\([^()=]*\)\)"
    r"|\\(?:sin|cos|tan|cot|sec|csc)\s*(?:\^(?:2|\{2\})\s*)?(?:\\angle\s*)?2?"
    r"\s*(?:\\(?:alpha|beta|gamma|theta|phi|varphi)|[A-Z]{1,3})"
    r"|\\(?:i{0,2}int|oint|sum|prod|lim|det|dim)(?![A-Za-z]).+|.*\\(?:vec|overrightarrow)(?![A-Za-z]).*",
    re.DOTALL,
)


def _split(text: str, separator: re.Pattern) -> list[str]:
    """The parts between the separators that are outside of all brackets."""
    if not separator.search(text):
        return [text]
    cuts = [at for match in separator.finditer(_blanked(text)) for at in match.span()]
    ends = [0, *cuts, len(text)]
    return [text[start:end].strip() for start, end in zip(ends[::2], ends[1::2])]


def _blanked(text: str) -> str:
    """The text with its brackets and their contents blanked out; positions stay the same."""
    depth, kept = 0, ""
    for at, part in enumerate(_BRACKET.split(text)):  # texts and brackets alternate
        kept += "\0" * len(part) if depth or at % 2 else part
        depth += _step(part) if at % 2 else 0
    return kept


def _step(bracket: str) -> int:
    return 1 if bracket in _OPENING else -1


def _set_algebra(sign: str, items: tuple[Node, ...]) -> Node | None:
    """The result of an operator on sets: computed for sets of numbers; other unions are kept, others are None."""
    if (node := combine(sign, items)) is not None or sign != "\\cup":
        return node
    if all(item[0] == "set" for item in items):
        return ("set", tuple(itertools.chain.from_iterable(item[1] for item in items)))
    return ("union", items)


def _points(text: str) -> Node | None:
    """Solutions that each give all the names a value, as points: x = 1, y = 2 or x = 2, y = 1 is (1, 2), (2, 1)."""
    for joint in (_OR, _SEMICOLON, _AND):
        parts = _split(text, joint)
        nodes = [read(part.strip(",; ")) for part in parts] if len(parts) > 1 else []
        if not nodes or any(node[0] != "list" for node in nodes):
            continue
        points = [{_name(item): item for item in node[1]} for node in nodes]
        alike = len(set(map(frozenset, points))) == 1 and "" not in points[0]
        # x > 0, y > 1 and x < 2, y < 3 are conditions on one point.
        separate = joint is _OR or all(item[0] == "equation" for node in nodes for item in node[1])
        if alike and separate and all(len(point) == len(node[1]) for point, node in zip(points, nodes)):
            rows = (tuple(point[name] for name in sorted(point)) for point in points)
            return ("list", tuple(("bracket", "(", ")", row, "") for row in rows))
    return None


def _name(item: Node) -> str:
    """The name that a value or a condition is of; "" for none."""
    return unbraced(item[1][0]) if item[0] == "equation" and len(item[1]) == 2 else _variable_of(item)


def _solutions(items: tuple[Node, ...]) -> Node | None:
    """The numbers that satisfy one of several conditions on a variable: x < 1 or x = 2 or x > 3."""
    names = {item[4] for item in items if _is_condition(item)}
    if len(names) != 1:
        return None
    sets: list[Node] = []
    for item in items:
        if item[0] == "equation" and len(item[1]) == 2 and unbraced(item[1][0]) in names:
            sets.append(("set", (read(item[1][1]),)))
        elif _is_condition(item):
            sets.append(item)
        else:
            return None
    return _set_algebra("\\cup", tuple(sets))


def _intersection(text: str, items: tuple[Node, ...]) -> Node | None:
    """The numbers that satisfy all conditions: x > 1 and x < 3. None if there are none, or one condition is enough."""
    names = set(map(_variable_of, items))
    if "or" in text or "" in names or len(names) > 1:
        return None
    joint = combine("\\cap", items)
    return None if joint == ("set", ()) or joint in items else joint


def _as_number(node: Node) -> Node:
    r"""25\% as 0.25, anything else as it is."""
    with contextlib.suppress(TooBig):
        if node[0] == "scalar" and node[4]:
            return ("scalar", multiply([number(Fraction(1, 100)), node[1]]), *node[2:4], False)
    return node


def _variable_of(node: Node) -> str:
    """The variable of a condition: x for x < 1 or x = 2; "" if the node is no condition on one variable."""
    parts = [part for part in node[1] if part[0] != "set"] if node[0] == "union" else [node]
    names = {part[4] if _is_condition(part) else "" for part in parts}
    return names.pop() if len(names) == 1 else ""


def _items(text: str) -> tuple[Node, ...]:
    r"""The values of an item of a list or set: two if it has one \pm."""
    return _signed(text) or (read(text),)


def _signed(text: str) -> tuple[Node, ...]:
    r"""The two values of a text with one \pm; empty for any other text."""
    if len(_PLUS_MINUS.findall(text)) != 1:
        return ()
    texts = [text.replace("\\pm", plus).replace("\\mp", minus) for plus, minus in ("+-", "-+")]
    return tuple(map(_finished, map(read, texts)))


def _bracket(text: str) -> Node:
    depth = 0
    for match in _BRACKET.finditer(text):
        depth += _step(match.group())
        if depth == 0:
            break
    left = "\\{" if text[0] == "\\" else text[0]
    if depth or match.end() != len(text):  # (1 + 2) x
        return _relation(text) if _RELATION.search(text) else _scalar(text)
    right = match.group()
    inner = text[len(left) : match.start()].strip()
    parts = _split(inner, _SEPARATOR) if inner else []
    # {x|x>1}; but {x:x=1} is no set in the alphabet of `rewards.arrays`.
    numbers = _set_builder(inner) if left == "\\{" or (left == "{" and "|" in inner) else None
    if numbers or left == "\\{":
        return numbers or ("set", tuple(itertools.chain.from_iterable(map(_items, parts))))
    items = tuple(map(read, parts))
    if len(items) == 1 and (left in "({" or items[0][0] == "matrix"):
        return items[0]
    if left == "{":
        return ("list", items) if items else _text(text)
    return ("bracket", left, right, items, "")


def _is_point(node: Node) -> bool:
    return node[0] == "bracket" and node[1:3] == ("(", ")") and all(item[0] == "scalar" for item in node[3])


def _set_builder(inner: str) -> Node | None:
    """The real numbers of a set that is given by conditions, x | x > 3, or equations, x | x = 1 or x = 3."""
    match = _CONDITION.fullmatch(inner)
    if match is None:
        return None
    node, name = read(match["condition"]), unbraced(match["name"])
    items = node[1] if node[0] == "list" else (node,)
    if all(item[0] == "equation" and len(item[1]) == 2 and unbraced(item[1][0]) == name for item in items):
        points = tuple(point for item in items for point in _items(item[1][1]))
        constant = all(point[0] == "scalar" and not variables(point[1]) for point in points)
        return ("set", points) if constant and (len(items) == 1 or "or" in match["condition"]) else None
    if node[0] == "list":
        node = _intersection(match["condition"], items) or node
    return node if _variable_of(node) == name else None


def _is_condition(node: Node) -> bool:
    return node[0] == "bracket" and node[1] != ":" and node[4] != ""


def _matrix(text: str) -> Node:
    match = re.fullmatch(
        r"\\begin\{(?P<kind>[pbB]?matrix|smallmatrix|array|cases|aligned|gathered)\}(?:\{[lcr| ]*\})?"
        r"(?P<body>.*)\\end\{(?P=kind)\}",
        text,
        re.DOTALL,
    )
    if match is None or "\\begin" in match["body"]:
        return _text(text)
    rows = [row for row in match["body"].split("\\\\") if row.strip()]
    if match["kind"] in ("aligned", "gathered"):  # one below the other; a row that begins with = goes on
        return read(re.sub(r", *=", " =", ", ".join(_EDGES.sub("", row.replace("&", " ")) for row in rows)))
    if match["kind"] == "cases":
        return _cases([_EDGES.sub("", row) for row in rows])
    return ("matrix", tuple(tuple(read(cell) for cell in row.split("&")) for row in rows))


def _cases(rows: list[str]) -> Node:
    """Values, in any order, each with its condition; without conditions, equations that all hold."""
    if not any("&" in row for row in rows):
        return read(", ".join(rows))
    parts = [tuple(read(_EDGES.sub("", cell)) for cell in row.split("&")) for row in rows]
    return ("set", tuple(("bracket", "&", "&", part, "") for part in parts))


def _scaled_matrix(text: str) -> Node | None:
    """A matrix times a number, multiplied out."""
    at = text.find("\\begin")
    if at <= 0:
        return None
    at -= text[at - 1] in "(["
    factor, matrix = text[:at].rstrip().removesuffix("\\cdot"), read(text[at:])
    cells = [cell for row in matrix[1] for cell in row] if matrix[0] == "matrix" else []
    if not cells or any(cell[0] != "scalar" or cell[2:] != (False, "", False) for cell in cells):
        return None
    try:
        scale = parse(factor + "1" if factor in ("+", "-") else factor)[0]
        times = lambda cell: ("scalar", multiply([scale, cell[1]]), False, "", False)
        return ("matrix", tuple(tuple(map(times, row)) for row in matrix[1]))
    except ValueError:
        return None


def _relation(text: str) -> Node:
    parts, signs = _split(text, _RELATION), _RELATION.findall(_blanked(text))
    if not signs or not all(parts):
        return _text(text)
    if set(signs) == {"="}:
        return ("equation", tuple(parts))
    if signs == ["\\in"] and (_VARIABLE.fullmatch(parts[0]) or (text[0] == "(" and is_label(parts[0]))):
        return read(parts[1])
    if signs == ["\\ne"] and _is_variable(parts[0]):
        reals, points = read(f"-\\infty<{parts[0]}<\\infty"), ("set", _items(parts[1]))
        return combine("\\setminus", (reals, points)) or _text(text)
    if all(sign in ("<", "\\le") for sign in signs):
        return _inequality(text, parts, [sign == "<" for sign in signs])
    if all(sign in (">", "\\ge") for sign in signs):
        return _inequality(text, parts[::-1], [sign == ">" for sign in signs[::-1]])
    return _text(text)


def _inequality(text: str, parts: list[str], strict: list[bool]) -> Node:
    """a < x < b as the interval that it describes; another comparison of two sides as the sign of a difference."""
    sides, is_open = parts, strict
    if _is_variable(parts[0]):
        sides, is_open = ["-\\infty", *sides], [True, *is_open]
    if _is_variable(parts[-1]):
        sides, is_open = [*sides, "\\infty"], [*is_open, True]
    if len(sides) == 3 and _is_variable(sides[1]):
        ends = read(sides[0]), read(sides[2])
        if all(end[0] == "scalar" and variables(end[1]) <= {"\\infty"} for end in ends):
            left, right = "(" if is_open[0] else "[", ")" if is_open[1] else "]"
            return ("bracket", left, right, ends, unbraced(sides[1]))
    tree = difference(parts)
    return _text(text) if tree is None else ("inequality", "<" if strict[0] else "<=", tree)


def difference(parts: Sequence[str]) -> Tree | None:
    """The left side minus the right side; None unless there are two sides, which can be read and have no words."""
    if len(parts) != 2 or any(map(has_words, parts)):
        return None
    try:
        left, right = (parse(part)[0] for part in parts)
        return add([left, multiply([number(-1), right])])
    except (Unreadable, TooBig):
        return None


def _is_variable(text: str) -> bool:
    return _VARIABLE.fullmatch(text) is not None and text not in _CONSTANTS


def _finished(node: Node) -> Node:
    return (*node[:2], False, *node[3:]) if node[0] == "scalar" else node


def _text(text: str) -> Node:
    """Words are case-folded and lose their marks; in formulas braces, case, primes and factorials have a meaning."""
    if "\\" in text:
        return ("text", re.sub(r"\s+", "", unbraced(text)).strip('.,;:?"'))
    bare = _EXCLAIMED.sub("", re.sub(r"[\s{}]+", "", _ARTICLE.sub("", text)).casefold().strip('.,;:?"'))
    return ("text", bare.strip("'") if bare.startswith("'") else bare)


def unbraced(text: str) -> str:
    """The text without braces around one letter, digit or command: x_1 for x_{1}."""
    return _SINGLE.sub(r"\1", text)


def is_label(text: str) -> bool:
    """Whether an equation's side only names the quantity: x, f(x), a_5, AB, Area, A \\cap B; \\pi is a value."""
    text = text.strip()
    named = len(text) <= 40 and bool(_LABEL.fullmatch(text)) and not _TO_SOLVE.match(text)
    return named and text != "\\pi" and "not" not in text.split()


def is_asked(text: str, value: str = "") -> bool:
    """Whether an answer may name its value like this: by a label, m + n, [ABC], P(X = 1), \\sin A, or a text in several
    variables, as one equation cannot solve for them; but one that ends in 0 or 1 is a curve. Gold x + y = 5 is a line.
    """
    if is_label(text) or _ASKED.fullmatch(text):
        return True
    node = read(text)
    several = node[0] == "scalar" and len(variables(node[1]) - {"\\infty"}) > 1
    return several and value not in ("0", "1")


# --- scalars --------------------------------------------------------------------------------------------------

_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_BASE = re.compile(
    r"\(?(?P<digits>[0-9A-Z]{1,200})\)?(?: ?_[ {(]*| ?\( ?base | (?:in )?base )"
    rf"(?P<base>[2-9]|[12]\d|3[0-6]|{'|'.join(_BASES)})[ )}}]*"
)


def _scalar(text: str) -> Node:
    percent = text.endswith("%")
    body, unit, scale = (text[:-1].rstrip(), "", 1) if percent else measure(text)
    numeral = _BASE.fullmatch(body)
    if numeral is None and has_words(body):
        return _text(text)
    if ":" in body:
        items = [part.strip() for part in body.split(":")]
        return ("bracket", ":", ":", tuple(map(_scalar, items)), unit) if all(items) else _text(text)
    try:
        if numeral is not None and scale == 1:
            base = _BASES.get(numeral["base"]) or int(numeral["base"])
            value = int(numeral["digits"], base)
            decimal = ("scalar", number(value), False, unit, percent)
            return decimal if base == 10 else ("text", f"{value} in base {base}")
        tree, unfinished = parse(body)
        tree = multiply([number(scale), tree]) if scale != 1 else tree
    except ValueError:
        return _text(text)
    return ("scalar", tree, unfinished, unit, percent)
