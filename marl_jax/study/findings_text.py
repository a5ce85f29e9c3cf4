"""docs/findings.md: the answers of `findings` as Markdown, with a figure each, between two marks of a page.

What stands outside of the marks is written by hand and stays.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from marl_jax.config.run_config import sets_of
from marl_jax.packaged import located
from marl_jax.run_folder.files import write_atomically
from marl_jax.run_folder.folder import FolderError, path_errors
from marl_jax.study import drawing, findings, results
from marl_jax.study.bars import Finding
from marl_jax.study.record import Run
from marl_jax.study.run_tables import Table, in_one_line

__all__ = ["markdown", "write_findings"]

BEGIN, END = "<!-- made by make page -->", "<!-- end -->"
PARTS = "configs/findings.py"  # what was meant to be run


def write_findings(root: str | os.PathLike[str], page: str | os.PathLike[str]) -> None:
    """Make the numbers of a page anew from the results below a directory, and its figures beside it."""
    path, runs = Path(page), list(map(results.read_result, results.find_results(root)))
    with path_errors(path):
        text = path.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise FolderError(f"'{page}' lacks the marks '{BEGIN}' and '{END}', between which the numbers go")
    found, tests, *_ = findings.answers(runs)
    parts = [_section(number, one, path) for number, one in enumerate(found, 1)]
    parts += [markdown(table) for table in (tests, _made(runs)) if table.rows] + [_missing(runs)]
    before, _, rest = text.partition(BEGIN)
    made = "\n\n".join(part for part in parts if part)
    with path_errors(path):
        write_atomically(path, f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}".encode())


def markdown(table: Table, level: int = 2) -> str:
    """A table with its title and what it means."""
    rows = [[in_one_line(cell).replace("|", "/") for cell in row] for row in (table.head, *table.rows)]
    rows.insert(1, ["---"] * len(table.head))
    lines = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{'#' * level} {table.title}\n\n{table.how}\n\n{lines}"


def _section(number: int, finding: Finding, page: Path) -> str:
    parts = [f"## {number}. {finding.question}", finding.answer]
    if finding.bars:
        name = f"{page.stem}-{number}.svg"
        drawing.bars(finding, page.with_name(name))
        parts.append(f"![{finding.question}]({name})")
    if finding.table:
        parts.append(markdown(finding.table, 3))
    return "\n\n".join([*parts, f"What would change our mind: {finding.doubt}"])


def _made(runs: Sequence[Run]) -> Table:
    """The runs of each folder: seeds, steps, hours, and where they were made."""
    by_folder: dict[str, list[Run]] = {}
    for run in runs:
        by_folder.setdefault(run.folder.parent.name, []).append(run)
    rows = []
    for name, some in by_folder.items():
        about: list[Mapping[str, object]] = [run.about.get("made") or {} for run in some]
        hours = sum(float(str(made.get("seconds") or 0)) for made in about) / 3600
        machines = sorted({str(made.get("machine")) for made in about})
        seeds = ", ".join(str(run.config.get("seed")) for run in some)
        rows.append((name, seeds, str(some[0].steps), f"{hours:.2f}", "; ".join(machines)))
    how = "Hours are of the steps with their evaluations, with whatever else ran on the machine at that time."
    return Table("Runs", rows, ("", "seeds", "steps", "hours", "machine"), how)


def _missing(runs: Sequence[Run]) -> str:
    """A line for each part of the study with the runs that it lacks."""
    there = {run.folder.parent.name for run in runs}
    lines = []
    for part, names in sets_of(str(located(PARTS))).items():
        lacking = [name for name in names if name not in there]
        if lacking:
            lines.append(f"- `{part}`: {', '.join(re.sub('[+]', ' + ', name) for name in lacking)}")
    command = f"`python -m experiments.matrix --config={PARTS} --cells=agents --seeds=3 --root=DIR`"
    about = f"Each part is {command}, with its name for `agents`."
    return "\n".join(["## Not run", "", about, "", *lines]) if lines else ""
