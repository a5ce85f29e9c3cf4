"""One spelling for math answers: LaTeX variants, styling, plain words and Unicode become the same.

`clean` changes the spelling of an answer and never its value; `choice` reads the option that an answer names.
"""

import re
import unicodedata

from marl_jax.rewards.math.units import UNIT_LETTERS


def clean(text: str) -> str:
    """The answer without delimiters, styling, and variants of spelling."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", _typeset(_visible(text)).translate(_UNICODE)).translate(_UNICODE)
    if "sqrt" in text:
        text = _PLAIN_ROOT.sub(r"\\sqrt{\1}", text)
    if any(mark in text for mark in "\\$~"):
        text = _OLD_ROMAN.sub(lambda match: rf"\mathrm{{{match[1] or match[2]}}}", text)
        text = _CASES.sub(r"\\begin{cases}\2\\end{cases}", text)
        text = _BRACKETED_UNIT.sub(
            lambda match: f" {match[1]}" if match[1] else rf"\text{{ {match[2]}}}", text
        )
        text = _UNIT_FRACTION.sub(r"\1/\2", _NEGATIVE_SPACE.sub("", _ROW_SPACE.sub(r"\\\\", text)))
        text = _MATH_DELIMITER.sub(" ", _ESCAPED_DOLLARS.sub(r"\1", text).replace("\\$", "¤"))
        text = _PRICE.sub(r"\1¤", text).replace("$", "")
        # A bare m may be a variable.
        text = _LETTER_UNIT.sub(lambda match: f" {UNIT_LETTERS[match['letter']]}", text)
        text = _BOLD_SET.sub(r"\1\\mathbb{\2}", text)
        for _ in range(4):  # \textbf{\text{A}}
            text, found = _WRAPPER.subn(r" \1 ", text)
            if not found:
                break
        text = _LOGIC.sub(lambda match: r" \cap " if match["both"] else r" \cup ", text)
        text = _COMMAND.sub(_rename, text)
        text = _REMOVED.sub(r" \\setminus ", _REPEATING.sub(_repeating, text))
        text = _LAST_ROW.sub("", text)
        text = _EXTREME.sub(r"_{\1}", text)
        text = _PRIMES.sub(lambda match: "'" * match.group().count("prime"), text)
    text = _PERIOD.sub(r"\1\\overline{\2}", text)
    text = _ORDINAL.sub(r"\1", _RAISED_O.sub(r"^\\circ ", text.replace("{:}", ":")))
    text = _AM_PM.sub(lambda match: f" {match.group().strip()[0].lower()}m", text)
    if (match := _NO_SUCH.match(text)) is not None:
        text = match[1]
    text = _PLAIN_WORD.sub(lambda match: _PLAIN[match.group().lower()], text.replace("**", "^ "))
    text = _TIMES_TEN.sub(r" \\times ", text)
    text = _COMMA_IN_NUMBER.sub(lambda match: "" if match["thousands"] else ".", text)
    text = _SPACED_THOUSANDS.sub(lambda match: match.group().replace(" ", ""), " ".join(text.split()))
    text = _MODULO.sub(lambda match: f" mod {match.group(match.lastindex or 0)}", text)
    text = _COMPARISON.sub(lambda match: _COMPARISONS[match.group()], text)
    text = _ELLIPSIS.sub(r"\1, \\ldots", _ANSWER.sub("", text.strip(" =")))
    text = _LETTER_CHOICE.sub(r"\1", text.rstrip(" .,;:"))
    text = _RATIO.sub(r"\1:\2", text)
    if (match := _FOR_ALL.fullmatch(text)) is not None:
        text = match["function"]
    if (match := _FOR_CONSTANT.fullmatch(text)) is not None:
        constant, body = match["a"] or match["b"] or match["c"], match["function"].partition("=")[2]
        if constant != match["name"] and constant in _COMMAND.sub("", body):
            text = match["function"]
    text = _INTEGERS.sub(_in_integers, text)
    if (match := _FAMILY.fullmatch(text)) is not None:
        text = _family(**match.groupdict())
    head, _, condition = text.rpartition("(")  # y = x^2 (x > 0)
    if condition.endswith(")") and condition.count(")") == 1 and "=" in head and _ORDER.search(condition):
        text = f"{head.rstrip(' ,;')}, {condition[:-1]}"
    if (match := _WORDED.fullmatch(text)) is not None:  # 5 squared, 3 halves
        return _WORD_FORMS[match["word"]].format(match["count"])
    return _NUMERALS.get(text.lower(), text)


def choice(text: str) -> tuple[str, str]:
    """The letter and the text of the option that a cleaned answer names: `(B) 12`, `B. 12`, `option b`, `B`.

    Both are "" if it names no option, or two; `(B)^2` and `(B) + 1` are values.
    """
    match = _OPTION.fullmatch(text)
    if match is None or _SECOND_OPTION.search(match["text"] or ""):
        return "", ""
    return (match["named"] or match["marked"] or match["lone"]).upper(), match["text"] or ""


def squeeze(text: str) -> str:
    """The text without spaces that have no meaning: all except those between two digits or two letters."""
    return _EMPTY_SPACE.sub("", text)


def _visible(text: str) -> str:
    """The text without invisible characters; an invisible times or comma stays, because it has a meaning."""
    return "".join(char for char in text if unicodedata.category(char) != "Cf" or char in "\u2062\u2063")


def _typeset(text: str) -> str:
    """The text with raised and lowered characters, fractions and roots in LaTeX. NFKC would make 10⁵ 105."""
    text = _SLASHED.sub(lambda match: rf"\frac{{{_flat(match[1])}}}{{{_flat(match[2])}}}", text)
    text = _RAISED.sub(lambda match: f"^{{{_flat(match.group())}}}", text)
    text = _LOWERED.sub(lambda match: f"_{{{_flat(match.group())}}}", text)
    text = _VULGAR.sub(lambda match: "\\frac{{{}}}{{{}}}".format(*_flat(match.group()).split("⁄")), text)
    return _ROOT.sub(lambda match: f"\\sqrt{_ROOTS[match['root']]}{{{match['radicand']}}}", text)


def _flat(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("−", "-")


def _rename(match: re.Match) -> str:
    if match["operator"]:
        name = "\\" + match["operator"]
        return _COMMANDS.get(name, name) + " "
    if match["reals"]:
        return "(0,\\infty)" if match["positive"] else "(-\\infty,\\infty)"
    return " " if match["styling"] else _COMMANDS.get(match.group(), match.group())


def _family(body: str, name: str, numbers: str, positive: str | None) -> str:
    r"""Answers for all integers in one form: x=2k\pi, k \in Z for x=2n\pi (n \in Z). The n of a_n = 2n is an index."""
    if (numbers == "N" or positive) and re.match(rf"[A-Za-z]_\{{? ?{name} ?\}}? ?=", body):
        return body
    index = re.compile(rf"(?<![A-Za-z\\]){name}(?![A-Za-z])")
    if not re.search(r"(?<![A-Za-z\\])k(?![A-Za-z])", body):
        body, name = index.sub("k", body), "k"
    return rf"{body}, {name} \in {'N^+' if positive else numbers}"


def _in_integers(match: re.Match) -> str:
    name, positive = match["after"] or match["before"], match["p"] or match["q"]
    return rf", {name} \in Z{'^+' if positive else ''}"


def _repeating(match: re.Match) -> str:
    r"""0.\dot12\dot3 and 0.\bar{123} as 0.\overline{123}."""
    digits = re.sub(r"\D", "", match[2])
    return rf"{match[1]}\overline{{{digits}}}"


# Each line: the spelling, then its variants.
_COMMAND_TABLE = r"""
    SPACE            \, \; \: \> \quad \qquad \enspace \thinspace \space ~
    NOTHING          \left. \right. \left \middle \right \displaystyle \textstyle \limits \bf \rm \large \Large \huge
    NOTHING          \big \Big \bigg \Bigg \bigl \bigr \Bigl \Bigr \biggl \biggr \Biggl \Biggr
    AND              \land \wedge
    OR               \lor \vee
    \frac            \dfrac \tfrac \cfrac \nicefrac \sfrac
    \cup             \bigcup
    \cap             \bigcap
    \log             \lg
    \cot             \ctg
    \binom           \dbinom \tbinom
    \le              \leq \leqslant
    \ge              \geq \geqslant
    \ne              \neq
    \setminus        \backslash \smallsetminus
    \angle           \measuredangle
    <                \lt
    >                \gt
    =                \approx \simeq \equiv
    |                \lvert \rvert \vert \mid \| \lVert \rVert \Vert
    \{               \lbrace
    \}               \rbrace
    (                \langle \lparen
    )                \rangle \rparen
    [                \lbrack
    ]                \rbrack
    \{\}             \emptyset \varnothing
    :                \colon
    \phi             \varphi
    \theta           \vartheta
    \epsilon         \varepsilon
    *                \ast
    \cdot            \cdotp
    %                \%
    &                \&
    £                \pounds
    €                \euro
    ^\circ           \degree
    angstrom         \AA
    \arcsin          \asin
    \arccos          \acos
    \arctan          \atan \arctg
    \arccot          \acot \arcctg
    \arcsinh         \arsinh \asinh
    \arccosh         \arcosh \acosh
    \arctanh         \artanh \atanh
    \tan             \tg
    (-\infty,\infty) \R
    \ldots           \dots \cdots \dotsc \dotsb \hdots
    \\               \cr
"""
_PLAIN_TABLE = r"""
    \infty infinity inf oo
    ^\circ degree degrees
    %      percent pct
"""
_UNICODE_TABLE = r"""
    -      − – — ‐ ‑
    '      ’ ‘ ′
    .      。
    ,      、
    OR     或
    AND    且 和
    \lor   ∨
    \land  ∧
    (      ⟨
    )      ⟩
    \cdot  · ⋅ ∙
    \times ×
    \div   ÷
    /      ⁄ ∕
    :      ∶
    \approx ≈ ≃
    \angle ∠ ∡
    \infty ∞
    \sqrt  √
    \sqrt[3] ∛
    \sqrt[4] ∜
    ^\circ ° º ˚
    angstrom Å
    \le    ≤ ⩽ ≦
    \ge    ≥ ⩾ ≧
    \lfloor ⌊
    \rfloor ⌋
    \lceil ⌈
    \rceil ⌉
    \ne    ≠
    \cup   ∪
    \cap   ∩
    \setminus ∖
    \in    ∈
    \pm    ±
    \{\}   ∅
    (-\infty,\infty) ℝ
"""


def _spellings(table: str) -> dict[str, str]:
    words = {"SPACE": " ", "NOTHING": "", "AND": " and ", "OR": " or "}
    rows = [line.split() for line in table.strip().splitlines()]
    return {variant: words.get(spelling, spelling) for spelling, *variants in rows for variant in variants}


_COMMANDS = _spellings(_COMMAND_TABLE) | {"\\ ": " "}
_COMMAND_NAMES = "sqrt pi sin cos tan arcsin arccos arctan exp log ln infty"  # written without a backslash
_PLAIN = {name: f"\\{name} " for name in _COMMAND_NAMES.split()}
_PLAIN |= {word: f"{spelling} " for word, spelling in _spellings(_PLAIN_TABLE).items()}
_PLAIN |= dict.fromkeys(("all real numbers", "all reals"), "(-\\infty,\\infty)")
_PLAIN |= {"dne": "does not exist", "per cent": "% "}
_PLAIN |= dict.fromkeys(("empty set", "no solution", "no solutions"), "\\{\\}")
_UNICODE = {
    ord(char): spelling if len(spelling) == 1 else f"{spelling} "
    for char, spelling in _spellings(_UNICODE_TABLE).items()
}
_GREEK = """
    α=alpha β=beta γ=gamma δ=delta ε=epsilon θ=theta λ=lambda μ=mu π=pi ρ=rho σ=sigma τ=tau φ=phi ω=omega Γ=Gamma
    Δ=Delta Θ=Theta Π=Pi Σ=Sigma Φ=Phi Ω=Omega
"""
_UNICODE |= {ord(pair[0]): f"\\{pair[2:]} " for pair in _GREEK.split()}
_UNICODE |= {0x2460 + i: rf"\textcircled{{{i + 1}}}" for i in range(20)}  # NFKC makes ①③ 13
_HIGH = "²³¹\u02b0-\u02b8\u02e0-\u02e4\u1d2c-\u1d61\u1d9b-\u1dbf\u2070-\u207f"
_LOW = "\u1d62-\u1d6a\u2080-\u209c\u2c7c"
_RAISED, _LOWERED, _SLASHED = (
    re.compile(part) for part in (f"[{_HIGH}]+", f"[{_LOW}]+", f"([{_HIGH}]+)⁄([{_LOW}]+)")
)
_VULGAR = re.compile("[¼-¾⅐-⅞↉]")
_ROOTS = {"√": "", "∛": "[3]", "∜": "[4]"}
_ROOT = re.compile(r"(?P<root>[√∛∜])\s*(?P<radicand>\d+(?:\.\d+)?|[A-Za-z])")
_PLAIN_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s*(\d+(?:\.\d+)?)")
_MATH_DELIMITER = re.compile(r"(?<!\\)\\[()\[\]]")
_ESCAPED_DOLLARS = re.compile(r"^\s*\\\$([^$]*)\\\$\s*$")
_CASES = re.compile(
    r"\\left\s*\\(?:\{|lbrace)\s*\\begin\{(array|aligned|matrix)\}(?:\{[lcr| ]*\})?(.*?)\\end\{\1\}\s*\\right\s*\.",
    re.DOTALL,
)
_NEGATIVE_SPACE = re.compile(r"\\!\s*")
_ROW_SPACE = re.compile(r"\\\\\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm|in)\s*\]")
_NAMED = r"\\(?:text|mathrm)\{[A-Za-z ]+\}(?:\^\d|\^\{\d\})?"
_UNIT_FRACTION = re.compile(
    rf"(?<=[\d}} ,;])\\[dt]?frac\{{({_NAMED}(?:\s*\\cdot\s*{_NAMED})*)\}}\{{({_NAMED})\}}(?=[\s$.]*$)"
)
_LETTER_UNIT = re.compile(
    rf"(?<=[\d)}}! ,;:])\\(?:text|mathrm|rm)\s*\{{\s*(?P<letter>[{''.join(UNIT_LETTERS)}])\s*\}}(?=[\s^{{}}\d.-]*$)"
)
_SOME_NAME = r"\\(?:text|mathrm)\s*\{[^{}()]*\}(?:\s*\^\s*(?:\d|\{\s*-?\d\s*\}))?"
_BRACKETED_UNIT = re.compile(  # 5(\text{cm}^2), 5\text{ (cm)}
    rf"(?<=[\d}} ])\s*(?:\\left\s*)?\(\s*((?:{_SOME_NAME}\s*(?:/\s*)?)+)(?:\\right\s*)?\)(?=[\s$.]*$)"
    r"|(?<=[\d}])\s*\\text\s*\{\s*\(([A-Za-z/ ]{1,30})\)\s*\}(?=[\s$.]*$)"
)
_REMOVED = re.compile(r"(?<=[)\]}])\s*-\s*(?=\\\{)")
_OLD_ROMAN = re.compile(r"\{\s*\\rm(?![A-Za-z])([^{}]+)\}|\\rm\s*\{([^{}]+)\}")
_LAST_ROW = re.compile(r"(?:\\\\\s*)+$")
_REPEATING = re.compile(
    r"(\.\d*)((?:\\(?:overline|bar)\s*(?:\d|\{\d+\}))|\\dot\s*(?:\d|\{\d\})(?:\d*\\dot\s*(?:\d|\{\d\}))?)"
)
# 0.1(6) alone; but 7.(0) is not 7, because `rewards.arrays` reads the brackets as a factor.
_PERIOD = re.compile(r"^\s*(-?\d+\.\d*)\((?!0+\)|9+\))(\d+)\)\s*$")
_PRIMES = re.compile(r"\s*\^\s*(?:\\prime(?![A-Za-z])|\{\s*(?:\\prime(?![A-Za-z])\s*)+\})")
_EXTREME = re.compile(r"_\s*\{?\s*\\(max|min)(?![A-Za-z])\s*\}?")
_MODULO = re.compile(
    r"\s*(?:\\[pb]?mod(?![A-Za-z])\s*(?:\{([^{}]*)\}|(\d+|[A-Za-z](?![A-Za-z])))|\(\s*(?:\\[pb]?)?mod(?![A-Za-z])\s*([^(){}]*)\))"
)
_RAISED_O = re.compile(r"(?<=\d)\s*\^\s*(?:\{\s*o\s*\}|o(?![A-Za-z]))")
_ORDINAL = re.compile(r"^\s*(\d+)\s*(?:\^\s*)?(?:\{\s*)?(?:st|nd|rd|th)\s*\}?\s*\.?\s*$")
_AM_PM = re.compile(r"(?<=\d)(?:\s*[ap]\.\s?m|\s+[ap]m|(?<=:\d\d)[ap]m)(?![A-Za-z])\.?", re.IGNORECASE)
_ANSWER = re.compile(
    r"^(?:the )?(?:final )?answer(?: ?:| is:?) ?(?=[-+.\d\\({\[|¤]|[A-Za-z] ?=)", re.IGNORECASE
)
_FAMILY = re.compile(
    r"(?P<body>[^|]*[^|,;(\s])\s*(?:[,;]\s*|\(\s*|(?=for |where ))(?:(?:for|where) )?(?:all |any )?"
    r"(?P<name>[a-z])\s*\\in\s*(?:\\mathbb\s*)?\{?\s*(?P<numbers>[NZ])\s*\}?\s*(?P<positive>[_^]\s*\{?\s*[*+]\s*\}?)?\s*\)?"
)
_INTEGERS = re.compile(  # x = n\pi for any integer n; where n is an integer; (n is an integer)
    r"[,;]? ?\(?(?:(?:for|where|some|any|all|every|each) )*"
    r"(?:(?P<p>positive )?integers? (?P<after>[a-z])"
    r"|(?P<before>[a-z]) (?:is )?an(?:y| arbitrary)? (?P<q>positive )?integer) ?\)?$"
)
_EVERY = (
    r"[,;]? ?(?:for (?:all|every|any|\(-\\infty,\\infty\))|\\forall) "
    r"(?:(?:real|rational|positive|natural|integers?|numbers?|reals) )*"
)
_IN_NUMBERS = (
    r" ?\\in ?(?:\((?:-\\infty|0),\\infty\)|(?:\\mathbb ?)?\{? ?[NZQ] ?\}?"
    r"(?: ?[_^] ?\{? ?(?:[*+]|> ?0) ?\}?)?)"
)
_FOR_ALL = re.compile(  # f(x) = x for all real x
    r"(?P<function>[A-Za-z]\( ?(?P<name>[a-z]) ?\) ?=.*[^,; ])"
    rf"(?:{_EVERY}(?P=name)(?:{_IN_NUMBERS})?|[,;] ?(?P=name){_IN_NUMBERS})"
)
_CONSTANT = r"(?:(?:arbitrary|fixed|constants?|numbers?|reals?) ?)"
_REAL = r" ?\\in ?\(-\\infty,\\infty\)"
_FOR_CONSTANT = re.compile(  # f(x) = cx for some constant c; where c is any real number; c \in \mathbb{R}
    r"(?P<function>[A-Za-z]\( ?(?P<name>[a-z]) ?\) ?=.*?[^,;( ])[,;]? ?\(?(?:"
    rf"(?:for|where|with) (?:(?:some|any|all|every|an?) )?{_CONSTANT}*(?P<a>[A-Za-z])(?:, ?[A-Za-z])*(?:{_REAL})?"
    r"|(?:where|with|and) (?P<b>[A-Za-z])(?:(?:, ?| and )[A-Za-z])* (?:is|are|being) (?:(?:some|any|an?) )?"
    rf"{_CONSTANT}+|(?<=[,; (])(?P<c>[A-Za-z])(?:, ?[A-Za-z])*{_REAL})\)?"
)
_ELLIPSIS = re.compile(r"(?:,|(,[^,.]+))\s*\.\.\.(?=\s*(?:,|$))")
_PRICE = re.compile(r"\A(\s*(?:-\s*)?)\$(?=[^$]*\Z)")
_BRACED = r"[^{}]*"  # a text with braces, down to three levels
for _ in range(3):
    _BRACED = rf"[^{{}}]*(?:\{{{_BRACED}\}}[^{{}}]*)*"
_WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|sc|up|normal|md)?|math(?:rm|bf|it|sf|tt|cal|normal)|[mhf]box|boxed|bold(?:symbol)?|bm|emph"
    rf"|underline)(?![A-Za-z])\s*\{{({_BRACED})\}}"
)
_LOGIC = re.compile(  # between statements, p \lor q; x<1 \lor x>2 are two answers
    r"(?<=[A-Za-z)])\s*\\(?:(?P<both>land|wedge)|lor|vee)(?![A-Za-z])"
    r"(?=\s*\(?\s*(?:\\(?:neg|lnot|sim)\s*)?[A-Za-z]\s*(?:$|[)$]|\\[lvw]))"
)
_BOLD_SET = re.compile(  # a C alone is a choice
    r"(\\in\s*|^\s*\$?\s*(?!\\mathbf\s*\{\s*C))\\mathbf\s*\{\s*([NZQRC])\s*\}(?!\s*[=(])"
)
_COMMAND = re.compile(
    r"\\\\|\\(?:left|right)\.|(?P<styling>\\(?:[hv]space\*?|phantom|(?:text)?color)\{[^{}]*\})"
    r"|\\operatorname\*?\s*\{\s*(?P<operator>[A-Za-z]+)\s*\}"
    r"|(?P<reals>\\mathbb\s*(?:\{\s*R\s*\}|R(?![A-Za-z]))(?P<positive>\s*[_^]\s*(?:\+|\{\s*(?:\+|>\s*0)\s*\}))?)"
    r"|\\[A-Za-z]+|\\[^A-Za-z]|~"
)
_PLAIN_WORD = re.compile(rf"(?<![\\A-Za-z])(?:{'|'.join(_PLAIN)})(?![A-Za-z])", re.IGNORECASE | re.ASCII)
_TIMES_TEN = re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)")
_COMMA_IN_NUMBER = re.compile(r"(?<=\d)(?:(?P<thousands>\{,\}(?=\d{3}(?!\d))|,\s?(?=!))|\{,\})(?=\d)")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,] )(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d| \d)")
_NO_SUCH = re.compile(
    r"\s*(?:there (?:is|are) )?(no (?:(?:real|integer|positive|such) )*(?:solution|root|value|integer|function|number))"
    r"s?(?: exists?)?\s*\.?\s*\Z",
    re.IGNORECASE,
)
_ORDER = re.compile(r"[<>]|\\(?:le|ge|ne)(?![A-Za-z])")
_COMPARISONS = {"<=": " \\le ", ">=": " \\ge ", "=<": " \\le ", "!=": " \\ne ", "==": "="}
_COMPARISON = re.compile(r"<=|>=|=<|(?<![\d)}])!=|==")  # 5!=120 contains a factorial
_LETTER_CHOICE = re.compile(r"^\(?([A-Z])[).:]$")
_OPTION = re.compile(
    r"(?:(?:option|choice|answer):? \(?(?P<named>[A-J])\)?[.:]?(?![A-Za-z])|\(?(?P<marked>[A-J])(?:\)|[.:](?= )))"
    r"(?:(?: |(?=\\))(?P<text>(?![-+] |[\^_+*/=<>!|',;).&]"
    r"|\\(?:cdot|times|div|pm|cup|cap|le|ge|ne|in)(?![A-Za-z])).+))?"
    r"|(?P<lone>(?-i:[A-J]))",
    re.IGNORECASE,
)
_SECOND_OPTION = re.compile(
    r"\([A-J]\)|(?<![A-Za-z\\])[A-J][).:](?: |$)|^[A-J]$|^(?:and|or)(?![A-Za-z])"
    r"|(?:and|or|[,/&]) \(?[A-J]\)?(?![A-Za-z])|(?<![A-Za-z])(?:wrong|incorrect)(?![A-Za-z])",
    re.IGNORECASE,
)
_PARTS = {"half": 2, "halves": 2, "third": 3, "fourth": 4, "fifth": 5, "sixth": 6, "eighth": 8, "tenth": 10}
_PARTS |= {f"{word}s": below for word, below in _PARTS.items() if word.endswith(("th", "rd"))}
_WORD_FORMS = {word: f"{{}}/{below}" for word, below in _PARTS.items()}
_WORD_FORMS |= {"squared": "{}^2", "cubed": "{}^3", "factorial": "{}!"}
_WORDED = re.compile(rf"(?P<count>\d+) (?P<word>{'|'.join(_WORD_FORMS)})")
_NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve"
_NUMERALS = dict(zip(_NUMBER_WORDS.split(), map(str, range(13))))
_RATIO = re.compile(r"^(\d+) to (\d+)$")
_EMPTY_SPACE = re.compile(r"(?<!\d) (?=\d)|(?<![A-Za-z]) (?=[A-Za-z])| (?![A-Za-z\d])")
