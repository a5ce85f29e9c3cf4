r"""The grammar of scalar LaTeX, `\frac{1}{2} + 2\sqrt{3}x`, read into the trees of `expressions`.

Recursive descent over a fixed set of tokens, bounded in depth. Text outside of the grammar is refused, so only
trees are evaluated, never the text itself.
"""

import contextlib
import re
from fractions import Fraction

from marl_jax.rewards.math.expressions import (
    EXACT_FUNCTIONS,
    FLOAT_FUNCTIONS,
    HALF,
    ONE,
    NoValue,
    TooBig,
    Tree,
    Unreadable,
    add,
    evaluate,
    multiply,
    number,
    power,
    variables,
)

MAX_DEPTH = 40


def parse(text: str) -> tuple[Tree, bool]:
    r"""The tree of an expression, and whether it is unfinished: a sum or product of plain numbers, \gcd(4, 6).

    Powers, roots and \frac are ways to write a value, so 2^{10} - 1 is finished.
    """
    tokens = _tokens(text)
    if tokens.count("\\infty") > 1 or ("\\infty" in tokens and not _INFINITE.issuperset(tokens)):
        raise Unreadable("infinity has no arithmetic")
    parser = _Parser(tokens)
    tree = parser.stack()
    if parser.next() != "":
        raise Unreadable(text)
    if not _ARROWS.isdisjoint(tokens) and not _is_vector(tree):
        raise Unreadable("vectors have several products")
    plain = all(token in _PLAIN or token[0].isdigit() or token[0] == "." for token in tokens)
    return tree, (parser.unfinished and plain) or any(token[1:] in _MANY_ARGUMENTS for token in tokens)


def _is_vector(tree: Tree) -> bool:
    """Whether a tree is a sum of vectors, each times a number or not; all variables except \\vec{a} are numbers."""
    has_vector = lambda part: any(name.startswith("\\vec") for name in variables(part))
    if tree[0] == "+":
        return all(map(_is_vector, tree[1:]))
    if tree[0] == "*":
        vectors = list(filter(has_vector, tree[1:]))
        return len(vectors) == 1 and _is_vector(vectors[0])
    return tree[0] == "v" and has_vector(tree)


_ONE_ARGUMENT = {*FLOAT_FUNCTIONS, "arccot", "log"}
_MANY_ARGUMENTS = {"gcd", "lcm", "max", "min"}
_INVERSE = {name.removeprefix("arc") for name in _ONE_ARGUMENT if name.startswith("arc")}
_GREEK_NAMES = """
    alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon
    phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega infty ell hbar
"""
_GREEK = {*_GREEK_NAMES.split()}
_FUNCTION_NAMES = {"\\Gamma", "\\zeta", "\\psi", "\\Phi"}  # functions if an argument in brackets follows
_INVERTED = {*"fghFGH"}  # a power between them and brackets names another function: f^{-1}(0), f^{(n)}(0)
_ACCENTS = {"overrightarrow": "vec", "overline": "bar", "widehat": "hat"}
_ACCENTS |= {accent: accent for accent in ("vec", "bar", "hat", "tilde", "dot", "ddot")}
_ARROWS = {"\\vec", "\\overrightarrow"}
_NAMES = {*_GREEK, *_ONE_ARGUMENT, *_MANY_ARGUMENTS, *_ACCENTS, "pi", "frac", "binom", "sqrt"}
_INFINITE = {"\\infty", "+", "-", "(", ")", "{", "}", ""}
_PLAIN = {*"+-*/()[]{}| ", "\\cdot", "\\times", "\\div", ""}
_FENCES = {"|": "abs", "\\lfloor": "floor", "\\lceil": "ceil"}
_CLOSING = {"(": ")", "[": "]", "{": "}", "|": "|", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_ACCENTED = re.compile(r"(?:[A-Za-z]+|\\[A-Za-z]+)(?:_?\d)?")  # a vector, a segment, a mean: a, AB, e_1
_SUBSCRIPT = re.compile(r"[^\W_]+(?:[+-][^\W_]+)*")  # 0, n+1
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:\\overline\{\d+\}|[eE][+-]?\d{1,4}(?!\d))?)"
    r"|(?P<word>\\[A-Za-z]+|[A-Za-z])|(?P<sign>[-+*/^_!|()\[\]{},]|\\[{}|]))"
)


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    at = 0
    text = text.rstrip()
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise Unreadable(text)
        if token["number"] and tokens and tokens[-1][0] in "0123456789." and tokens[-1] != ".":
            tokens.append(" ")  # two numbers side by side: a mixed number, or unreadable
        tokens.append(token.group().lstrip())
        at = token.end()
    return [*tokens, ""]


class _Parser:
    """Recursive descent over the tokens, with a bound on the depth."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.at, self.depth = tokens, 0, 0
        self.bars = 0  # the number of open |
        self.unfinished = False

    def next(self) -> str:
        return self.tokens[self.at]

    def take(self, wanted: str = "") -> str:
        token = self.tokens[self.at]
        if token == "" or (wanted and token != wanted):
            raise Unreadable(f"{token!r} where {wanted or 'an expression'!r} should be")
        self.at += 1
        return token

    def stack(self) -> Tree:
        r"""A complete group, which \over or \choose may divide into two."""
        above = self.sum()
        if self.next() not in ("\\over", "\\choose"):
            return above
        command, below = self.take(), self.sum()
        if command == "\\choose":
            return self.folded(("f", "binom", above, below))
        return multiply([above, power(below, number(-1))])

    def sum(self) -> Tree:
        self.deeper()
        terms = [self.term(self.sign())]
        while self.next() in ("+", "-"):
            terms.append(self.term(self.sign()))
        self.depth -= 1
        if sum(term[0] == "n" for term in terms) > 1:
            self.unfinished = True
        return terms[0] if len(terms) == 1 else add(terms)

    def sign(self) -> int:
        sign = 1
        while self.next() in ("+", "-"):
            sign *= -1 if self.take() == "-" else 1
        return sign

    def term(self, sign: int) -> Tree:
        factors = [self.factor()]
        while True:
            operator = self.next()
            if operator == " ":  # 1 1/2
                self.take()
                whole, above = factors[-1], self.take()
                self.take("/")
                if len(factors) > 1 or whole[0] != "n" or whole[1].denominator != 1:
                    raise Unreadable("two numbers side by side")
                factors = [number(whole[1] + _fraction(above, self.take()))]
                continue
            mixed = operator == "\\frac" and self.tokens[self.at - 1].isdigit() and len(factors) == 1
            over, ten = operator in ("/", "\\div"), False
            if over or operator in ("*", "\\cdot", "\\times"):
                self.take()
                sign *= self.sign()
                ten = self.tokens[self.at : self.at + 2] == ["10", "^"]  # 3 * 10^8 is one number
            elif not self.begins_factor():
                break
            factor = self.factor()
            numbers = factors[-1][0] == factor[0] == "n"
            if numbers and mixed:  # 1\frac{1}{2}
                factors = [number(factors[-1][1] + factor[1])]
                continue
            self.unfinished |= numbers and not (over or ten)
            factors.append(power(factor, number(-1)) if over else factor)
        return multiply([number(sign), *factors]) if sign < 0 or len(factors) > 1 else factors[0]

    def begins_factor(self) -> bool:
        token = self.next()
        if token in ("(", "{", "[", "\\lfloor", "\\lceil"):
            return True
        if token == "|":
            return self.bars == 0
        return token[:1].isalnum() or (token[:1] == "\\" and token[1:] in _NAMES)

    def factor(self) -> Tree:
        base, raised = self.base(), False
        while True:
            if self.next() == "!":
                self.take()
                double = self.next() == "!"
                self.at += double
                base, raised = ("f", "!!" if double else "!", base), False
            elif self.next() == "^" and not raised:
                raised = True
                self.take()
                if self.next() == "\\circ" or self.tokens[self.at : self.at + 3] == ["{", "\\circ", "}"]:
                    self.at += 1 if self.next() == "\\circ" else 3
                    base = multiply([base, ("c", "pi"), number(Fraction(1, 180))])
                else:
                    exponent = self.argument()
                    if base[0] == "v" and "_" not in base[1]:  # v^2_0
                        base = ("v", base[1] + self.subscript())
                    if base[0] == "v" and base[1] in _INVERTED and self.next() == "(":
                        base = self.applied(f"{base[1]}^{_flat(exponent)}", True)
                    else:
                        base = power(base, exponent)
            else:
                return self.folded(base)

    def folded(self, tree: Tree) -> Tree:
        """A function of numbers as its exact value, if that has a bounded size."""
        if tree[0] == "f" and all(part[0] == "n" for part in tree[2:]) and tree[1] in EXACT_FUNCTIONS:
            with contextlib.suppress(TooBig, NoValue):
                value = evaluate(tree, 0)
                return number(value) if isinstance(value, Fraction) else tree
        return tree

    def argument(self) -> Tree:
        r"""The argument of ^ or a command: a group, or a number, letter or command, signed or not (2^10 is 2^{10})."""
        sign = self.sign()
        tree = self.group() if self.next() == "{" else self.base()
        return tree if sign > 0 else multiply([number(-1), tree])

    def digit_argument(self) -> Tree:
        r"""An argument as TeX reads it: one digit if it has no braces (\frac12)."""
        self.skip_gap()
        token = self.next()
        if token.isdigit() and len(token) > 1:
            self.tokens[self.at : self.at + 1] = [token[0], token[1:]]
        self.deeper()
        tree = self.argument()
        self.depth -= 1
        return tree

    def skip_gap(self) -> None:
        if self.next() == " ":
            self.take()

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deep")

    def group(self) -> Tree:
        opening = self.take()
        tree = self.stack()
        self.take(_CLOSING[opening])
        return tree

    def base(self) -> Tree:
        self.skip_gap()
        token = self.next()
        if token in ("(", "[", "{"):
            bars, self.bars = self.bars, 0
            tree = self.group()
            self.bars = bars
            return tree
        if token in _FENCES:
            self.bars += token == "|"
            tree = ("f", _FENCES[token], self.group())
            self.bars -= token == "|"
            return self.folded(tree)
        self.take()
        if token[0].isdigit() or token[0] == ".":
            return number(_number(token))
        name = token.lstrip("\\")
        if token[0] != "\\" and not token.isalpha():
            raise Unreadable(token)
        if token[0] != "\\" or name in _GREEK:
            return self.letter(name)
        if name == "pi":
            return ("c", "pi")
        if name == "frac":
            above, below = self.digit_argument(), self.digit_argument()
            return multiply([above, power(below, number(-1))])
        if name == "binom":
            return self.folded(("f", "binom", self.digit_argument(), self.digit_argument()))
        if name == "sqrt":
            degree = self.group() if self.next() == "[" else number(2)
            return power(self.digit_argument(), power(degree, number(-1)))
        if name in _ONE_ARGUMENT:
            return self.function(name)
        if name in _ACCENTS:
            return self.applied(rf"\{_ACCENTS[name]}{{{self.verbatim(_ACCENTED)}}}{self.subscript()}", False)
        if name in _MANY_ARGUMENTS:
            tree = self.folded(("f", name, *self.list_of_arguments()))
            if tree[0] != "n" and name in ("gcd", "lcm"):
                raise Unreadable(f"{name} of expressions")
            return tree
        raise Unreadable(token)

    def letter(self, name: str) -> Tree:
        if name in ("e", "i") and self.next() != "_":
            return ("c", name)
        name = ("\\" if name in _GREEK else "") + name + self.subscript()
        return self.applied(name, name in _FUNCTION_NAMES) if name != "x" else ("v", name)

    def applied(self, name: str, function: bool) -> Tree:
        """A variable, or the value of a function at a point: f(0) is no product, but 2x(3) may be one."""
        alone = self.tokens[self.at + 2 : self.at + 3] == [")"]
        if self.next() != "(" or not (function or alone):
            return ("v", name)
        return ("v", f"{name}({_flat(self.group())})")

    def verbatim(self, allowed: re.Pattern) -> str:
        """The next token or group, as it is written."""
        text = token = self.take()
        if token == "{":
            text = ""
            while self.next() != "}":
                text += self.take()
            self.take()
        if not allowed.fullmatch(text):
            raise Unreadable(text)
        return text

    def subscript(self) -> str:
        """The subscript that follows, if any: _{n+1} for _{n+1}, _{0} for _0."""
        if self.next() != "_":
            return ""
        self.take()
        return f"_{{{self.verbatim(_SUBSCRIPT)}}}"

    def function(self, name: str) -> Tree:
        exponent, base = ONE, None
        while self.next() in ("^", "_"):
            if self.take() == "^":
                exponent = self.argument()
            else:
                base = self.digit_argument()
        if exponent == number(-1) and name in _INVERSE:
            name, exponent = f"arc{name}", ONE
        argument = self.function_argument()
        if name == "log":
            tree: Tree = ("f", "log", base or number(10), argument)
        elif base is not None:
            raise Unreadable(name)
        elif name == "exp":
            tree = power(("c", "e"), argument)
        elif name == "arccot":
            tree = add([multiply([HALF, ("c", "pi")]), multiply([number(-1), ("f", "arctan", argument)])])
        else:
            tree = ("f", name, argument)
        return power(tree, exponent)

    def function_argument(self) -> Tree:
        if self.next() in ("(", "{", "[", "|"):
            return self.base()
        self.deeper()
        start = self.at
        factors = [self.factor()]
        while self.begins_factor() and self.next() not in ("(", "[") and self.next()[1:] not in _ONE_ARGUMENT:
            factors.append(self.factor())
        slash = self.at
        if self.next() == "/" and self.tokens[slash + 1][1:] not in _ONE_ARGUMENT:
            self.take()  # \sin \pi/6, but \ln 8/\ln 2 and \sin x/x
            below = power(self.factor(), number(-1))
            if self.tokens[slash + 1 : self.at] == self.tokens[start:slash]:
                self.at = slash
            else:
                factors.append(below)
        self.depth -= 1
        return multiply(factors)

    def list_of_arguments(self) -> list[Tree]:
        braces = self.next() == "\\{"
        self.take("\\{" if braces else "(")
        arguments = [self.sum()]
        while self.next() == ",":
            self.take()
            arguments.append(self.sum())
        self.take("\\}" if braces else ")")
        return arguments


def _flat(tree: Tree) -> str:
    """A tree as part of a name. A name in a name is refused: names would double in length at each level."""
    if any("(" in name for name in variables(tree)):
        raise Unreadable("a function of a function")
    return str(tree)


def _number(token: str) -> Fraction:
    """The exact value of a decimal literal, with a power of ten or a repeating part."""
    if "\\" in token:
        digits, repeating = token.removesuffix("}").split("\\overline{")
        places = len(digits.partition(".")[2])
        repeated = Fraction(int(repeating), (10 ** len(repeating) - 1) * 10**places)
        return Fraction(digits.rstrip(".")) + repeated
    return Fraction(token.rstrip("."))


def _fraction(above: str, below: str) -> Fraction:
    if not (above.isdigit() and below.isdigit() and int(below)):
        raise Unreadable(f"{above}/{below}")
    return Fraction(int(above), int(below))
