"""Records of evaluations as a table for a terminal: one line per checkpoint, then one per role and checkpoint.

    checkpoint  accuracy   95% interval  over base, points     95% interval  pass@4
    base           42.1%  38.0 .. 46.2%                                       63.2%
    100            61.0%  56.8 .. 65.1%              +18.9  +14.0 .. +23.8*   71.9%

A star marks an interval that excludes zero. Columns that do not fit go below.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
WIDTH, GAP = 80, 2  # characters of a terminal's line, and between columns


def table(records: Sequence[Record]) -> str:
    """The table of records on the same problems; the others are compared with the first."""
    played = records[-1]
    title = "{split}: {problems} problems x {samples} samples, mode {mode}, seed {seed}".format(**played)
    title += "".join(f", {name} {played[name]}" for name in ("role", "generator_from") if name in played)
    sizes = [k for k in played["pass_at_k"] if k != "1"]
    head = ["checkpoint", "accuracy", "95% interval", "over base, points", "95% interval"]
    head += [*(f"pass@{k}" for k in sizes), "any right", "calls", "tokens", "errors"]
    lines = [[_name(record), *_numbers(record, sizes)] for record in records]
    roles = dict.fromkeys(role for record in records for role in record["roles"])
    work = [
        [role, _name(record), _work(record["roles"][role])]
        for role in roles
        for record in records
        if role in record["roles"]
    ]
    parts = [filled(title), aligned([head, *lines], left=1)]
    if work:
        parts.append(aligned([["role", "checkpoint", "own work"], *work], left=3))
    if any(record["difference"] and _star(record["difference"]) == "*" for record in records):
        parts.append("* this interval excludes zero")
    return "\n\n".join(parts)


def _name(record: Record) -> str:
    """The checkpoint, with the mode if the cast is not the run's."""
    plain = record["mode"] in ("trained", "base")
    name = str(record.get("checkpoint", record["step"] or "base"))
    return name if plain else f"{name} {record['mode']}"


def _numbers(record: Record, sizes: Sequence[str]) -> list[str]:
    by = record["difference"]
    return [
        share(record["accuracy"]),
        f"{share(record['ci_low'], '')} .. {share(record['ci_high'])}",
        "" if by is None else f"{100 * by['mean']:+.1f}",
        "" if by is None else f"{100 * by['low']:+.1f} .. {100 * by['high']:+.1f}{_star(by)}",
        *(share(record["pass_at_k"][k]) for k in sizes),
        share(record["any_correct"]),
        f"{record['calls_per_episode']:.1f}",
        f"{record['tokens_per_episode']:.1f}",
        str(record["errors"]),
    ]


def _work(role: Record) -> str:
    match role["kind"]:
        case "judge":
            text = (
                f"{share(role['accuracy'])} of {role['verdicts']} verdicts right; 'Correct': precision "
                f"{share(role['precision'])} of {role['said_correct']}, recall {share(role['recall'])} of "
                f"{role['was_correct']}"
            )
        case "picker":
            text = f"picks a right answer in {share(role['pick_when_possible'])} of {role['possible']} cases with one"
        case "planner":
            text = f"{share(role['mean'])} of the answers after {role['calls']} plans right"
        case _:
            text = f"{share(role['accuracy'])} of {role['calls']} answers right"
    return f"{text}; unreadable {share(role['unreadable'])}"


def share(value: float | None, unit: str = "%") -> str:
    """A share in percent."""
    return "-" if value is None else f"{100 * value:.1f}{unit}"


def _star(interval: Record) -> str:
    return "*" if interval["low"] > 0 or interval["high"] < 0 else " "


def aligned(rows: Sequence[Sequence[str]], left: int) -> str:
    """Rows in columns, of which the first `left` are left-aligned; at most WIDTH wide, as far as words allow.

    Columns that do not fit go below the others, with the first column repeated. If that column is wide or does not
    distinguish the rows, they are numbered. A last column of words is wrapped. The first row is the head.
    """
    columns = [list(column) for column in zip(*rows)]
    if len(columns) == left:
        return _wrapped(columns, [max(map(len, column)) for column in columns])
    width = sum(max(map(len, column)) + GAP for column in columns) - GAP
    names = columns[0][1:]
    if width > WIDTH and (len({*names}) < len(names) or max(map(len, names)) > WIDTH // 2):
        columns, left = [["", *(str(i + 1) for i in range(len(names)))], *columns], left + 1
    widths = [max(map(len, column)) for column in columns]
    first, blocks = 1, list[str]()
    while first < len(columns):
        used, last = widths[0] + GAP, first
        while last < len(columns) and (last == first or used + widths[last] <= WIDTH):
            used, last = used + widths[last] + GAP, last + 1
        shown, first = [0, *range(first, last)], last
        blocks.append(
            _block([columns[i] for i in shown], [widths[i] for i in shown], sum(i < left for i in shown))
        )
    return "\n\n".join(blocks)


def printable(text: str) -> str:
    """A text in one line, without control characters."""
    return "".join(c if c.isprintable() else " " for c in text)


def filled(text: str, width: int = WIDTH, **options: Any) -> str:
    """A text wrapped to the width of a terminal; no word is broken."""
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False, **options)


def _block(columns: Sequence[Sequence[str]], widths: Sequence[int], left: int) -> str:
    sides = "<" * left + ">" * (len(widths) - left)
    form = (" " * GAP).join(f"{{:{side}{width}}}" for side, width in zip(sides, widths))
    return "\n".join(form.format(*row).rstrip() for row in zip(*columns))


def _wrapped(columns: Sequence[Sequence[str]], widths: Sequence[int]) -> str:
    """Columns of words; the last one is wrapped into further lines if it is too wide."""
    indent = sum(widths[:-1]) + GAP * (len(widths) - 1)
    lines = []
    for *before, text in zip(*columns):
        head = "".join(f"{cell:<{size + GAP}}" for cell, size in zip(before, widths))
        body = filled(text, max(WIDTH, indent + 24), initial_indent=head, subsequent_indent=" " * indent)
        lines.append(body or head.rstrip())
    return "\n".join(lines)
