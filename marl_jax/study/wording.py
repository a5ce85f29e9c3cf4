"""Tables of texts, and numbers as texts, without markup, for all pages and the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass

from marl_jax.study.intervals import Interval
from marl_jax.study.record import Record
from marl_jax.terminal.tables import aligned, printable

NONE = "–"


@dataclass(frozen=True)
class Table:
    """Rows of texts; the first `words` columns are words, the others numbers. A text may have a second line."""

    title: str
    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()
    how: str = ""
    words: int = 1
    facts: bool = False  # rows are names and their values, not columns to compare
    links: Sequence[str] = ()  # the target of each row's first text


def plain(table: Table) -> str:
    """The table for a terminal."""
    rows = [[printable(in_one_line(text)) for text in row] for row in table.rows]
    head = [[printable(text) for text in table.head]] if table.head else []
    return f"{printable(table.title)}\n\n{aligned([*head, *rows], left=table.words)}"


def in_one_line(text: str) -> str:
    """A text with its second line in brackets."""
    above, _, beneath = text.partition("\n")
    return f"{above} ({beneath})" if beneath else above


# ---------------------------------------------------------------- numbers as words


def short_number(value: float) -> str:
    """Three digits, or a whole number."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def percent(value: float | None) -> str:
    """A share in percent; a dash for None."""
    return NONE if value is None else f"{value:.1%}"


def p_text(p: float | None) -> str:
    """A p value; a dash if there is none."""
    return NONE if p is None or p != p else f"{p:.2g}"


def interval(record: Record) -> str:
    """The ends of the interval of an accuracy."""
    low, high = record.get("ci_low"), record.get("ci_high")
    return NONE if low is None or high is None else f"{100 * low:.1f} – {high:.1%}"


def gain(record: Record | None) -> Interval | None:
    """The paired difference to the base, if the evaluation has one."""
    by = (record or {}).get("difference") or {}
    return None if None in map(by.get, Interval._fields) else Interval(**by)


def share(of: Interval) -> str:
    """An accuracy, with its interval on a second line."""
    return f"{of.mean:.1%}\n{100 * of.low:.1f} – {100 * of.high:.1f}"


def points(by: Interval | None) -> str:
    """A difference of accuracies, with its interval on a second line."""
    return f"{100 * by.mean:+.1f}\n{100 * by.low:+.1f} to {100 * by.high:+.1f}" if by else NONE
