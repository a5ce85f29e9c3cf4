r"""Readers of the completions of supervising roles: a pick, a verdict, a list of strategies, a majority.

Each reader returns a short canonical text, or None if nothing can be read; the workflow decides what follows then.
The last complete \boxed{...} of a text counts.
"""

import collections
import re
from collections.abc import Sequence

from marl_jax.rewards.math.boxed import extract_boxed

STRATEGY = re.compile(r"^[ \t*#>-]*STRATEGY[ \t]*[0-9]+[ \t*]*:(.*)$", re.MULTILINE | re.IGNORECASE)


def pick(text: str, n: int) -> str | None:
    """The chosen candidate, "1".."n": the boxed number, else the first digit 1..n in the text (if n > 9, number)."""
    number = _number(extract_boxed(text) or "", n)
    if number:
        return number
    if n < 10:
        return next((char for char in text if char in "123456789"[:n]), None)
    return next((digits for digits in re.findall(r"[0-9]+", text) if _number(digits, n)), None)


def verdict(text: str) -> str | None:
    """The evaluator's boxed word: "Correct" or "Incorrect"."""
    word = re.sub(r"\\(?:text|math|boxed)\w*|[^a-z]", "", (extract_boxed(text) or "").lower())
    return {"correct": "Correct", "incorrect": "Incorrect"}.get(word)


def strategies(text: str, limit: int) -> list[str]:
    """The contents of the `STRATEGY k: ...` lines, in order; those past the limit are dropped."""
    lines = (line.strip(" \t\r*") for line in STRATEGY.findall(text))
    return [line for line in lines if line][:limit]


def plan_of(text: str, limit: int) -> str | None:
    """The strategies, one per line."""
    return "\n".join(strategies(text, limit)) or None


def majority(answers: Sequence[str | None]) -> int:
    """Index of the first answer among the most frequent readable ones; 0 when none can be read."""
    counts = collections.Counter(answer for answer in answers if answer is not None)
    return answers.index(counts.most_common(1)[0][0]) if counts else 0


def stripped(text: str) -> str | None:
    """The text itself, without surrounding white space."""
    return text.strip() or None


def _number(text: str, n: int) -> str | None:
    match = re.fullmatch(r"\D{0,20}?0*([1-9][0-9]{0,8})\D{0,20}", text)
    return match[1] if match and int(match[1]) <= n else None
