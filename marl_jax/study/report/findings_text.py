"""docs/findings.md: the answers of `findings` as Markdown, with a figure for each, between two marks of a page.

Text outside of the marks is written by hand and kept. Two more pages, of the same name with `-tests` and `-runs`, have
all tests; and the runs that were made, and those that are missing.
"""

import collections
import functools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from marl_jax.config.run_config import config_module, sets_of
from marl_jax.packaged import resolve_path
from marl_jax.run_folder.files import write_atomically
from marl_jax.run_folder.folder import FolderError, path_errors
from marl_jax.study.cliffs import CLIFF, fell, form_of
from marl_jax.study.contrasts import machine_of
from marl_jax.study.questions import findings
from marl_jax.study.questions.bars import Finding
from marl_jax.study.questions.paper import agreement
from marl_jax.study.record import Run
from marl_jax.study.report import drawing
from marl_jax.study.results import Study
from marl_jax.study.seeds import Cell
from marl_jax.study.wording import NONE, Table, in_one_line

BEGIN, END = "<!-- made by make page -->", "<!-- end -->"
PARTS = "configs/findings.py"  # the cells that the study plans to run
REST = "the rest of the map"  # the study's cells that no part contains
REGIME = "the rest of the map, under the original's regime"
MOST = 8  # rows of a table below a figure; longer tables are on the page of tests
COMMAND = f"python -m experiments.matrix --config={PARTS} --cells=agents --seeds={findings.SEEDS} --root=DIR"


def write_findings(study: Study, page: str | os.PathLike[str]) -> None:
    """Write the numbers of a page anew from the compact results of a study; its figures and other pages next to it."""
    path = Path(os.path.expanduser(page))
    compact = [run for run in study.runs.values() if run.compact]
    if not compact:
        raise FolderError(f"there is no result of a run in or below '{study.root}': see experiments.collect")
    with path_errors(path, f"give --findings a page with the marks '{BEGIN}' and '{END}'"):
        text = path.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise FolderError(f"'{page}' lacks the marks '{BEGIN}' and '{END}', between which the numbers go")
    answered = findings.answers(compact)
    beside = [path.with_name(f"{path.stem}-{name}.md") for name in ("tests", "runs")]
    with path_errors(path, "choose another --findings"):  # figures are written next to it
        sections = [_section(k, one, path) for k, one in enumerate(answered.findings, 1)]
    parts = [markdown(agreement(answered)), *sections]
    links = [f"[{name}]({other.name})" for name, other in zip(("the tests", "the runs"), beside)]
    parts.append(f"Pages of their own have {links[0]}; and {links[1]}, with those that are missing.")
    before, _, rest = text.partition(BEGIN)
    long = (table for finding in answered.findings for table in finding.tables if len(table.rows) > MOST)
    pages = {
        "The tests behind the findings": (answered.tests, *long),
        "The runs behind the findings": (_made(answered.cells), _lacking(answered.cells)),
    }
    texts = [
        [f"# {title}\n\nMade by `make page`, like the numbers of [{path.name}]({path.name})."]
        + [markdown(table) for table in tables if table.rows]
        for title, tables in pages.items()
    ]
    texts[-1] += ["\n".join(f"- Left out: {why}" for why in study.unread)] * bool(study.unread)
    with path_errors(path, "choose another --findings"):
        body = "\n\n".join(parts)
        write_atomically(
            path, f"{before}{BEGIN}\n\n{body}\n\n{END}{rest.partition(END)[2]}".encode(), shared=True
        )
        for other, page_parts in zip(beside, texts):
            write_atomically(other, ("\n\n".join(page_parts) + "\n").encode(), shared=True)


def markdown(table: Table, level: int = 2) -> str:
    """A table as Markdown, with its title and explanation."""
    return f"{'#' * level} {table.title}\n\n{table.how}\n\n{_grid(table.head, table.rows)}"


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [[in_one_line(cell).replace("|", "/") for cell in row] for row in (head, *rows)]
    lines.insert(1, ["---"] * len(head))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _section(number: int, finding: Finding, page: Path) -> str:
    parts = [f"## {number}. {finding.question}", finding.answer]
    if finding.bars:
        name = f"{page.stem}-{number}"
        drawing.bars(finding, page.with_name(name))
        parts.append(f"![{finding.question}]({name}.svg)")
        if finding.against == "zero":  # differences; other numbers have tables of their own
            parts.append(_differences(finding, f"{page.stem}-tests.md"))
    parts += [_table(table, f"{page.stem}-tests.md") for table in finding.tables]
    return "\n\n".join([*parts, f"What would change our mind: {finding.doubt}"])


def _table(table: Table, tests_page: str) -> str:
    """A table of a question, or a link to it if it is long."""
    if len(table.rows) <= MOST:
        return markdown(table, 3)
    anchor = table.title.lower().replace(" ", "-")
    return f"[{table.title}]({tests_page}#{anchor}): {len(table.rows)} rows."


def _differences(finding: Finding, tests_page: str) -> str:
    """The numbers of a figure, or a link to them if they are many."""
    if len(finding.bars) > MOST:
        return f"The numbers of these {len(finding.bars)} differences are in [the table of tests]({tests_page}#tests)."
    rows = []
    for bar in finding.bars:
        mean, low, high = map(finding.number, bar.value)
        ends = f"{low} – {high}" if np.isfinite(bar.value.low) else NONE  # one run has no interval
        rows.append((bar.label, mean, ends, str(len(bar.runs)), bar.verdict or NONE))
    return _grid(("", finding.unit, "95%", "seeds", "verdict"), rows)


def _made(cells: Sequence[Cell]) -> Table:
    """The runs of each cell: seeds, steps, hours, how they ended, and where and by which code they were made."""
    rows = []
    for cell in cells:
        hours = sum(float(run.part("made").get("seconds") or 0) for run in cell.runs) / 3600
        machines = sorted(set(map(_machine, cell.runs)))
        code = sorted({str(run.part("versions").get("code", NONE))[:8] for run in cell.runs})
        seeds = ", ".join(str(run.config["seed"]) for run in cell.runs)
        steps = sorted(
            {str(run.steps) if run.finished else f"{run.step} of {run.steps}" for run in cell.runs}
        )
        known = [verdict for run in cell.runs if (verdict := fell(run)) is not None]
        fallen = f"{sum(known)} of {len(known)}" if known else NONE
        words = (form_of(cell.runs), "; ".join(machines), ", ".join(code), seeds, ", ".join(steps))
        rows.append((cell.label, *words, f"{hours:.2f}", _pace(cell.runs), fallen))
    how = (
        f"The command of each row is `{COMMAND}`, where `agents` stands for the set of that file with the row's cell, "
        "and `--seeds` is the row's number of seeds; on an H200 or H100 add `--config.seeds=3`. "
        "`python -m experiments.collect` kept the results. Code: how `versions.code` in config.json begins. Hours and "
        "seconds include evaluations, and the delay by whatever else ran on the machine. Form: how the roles' texts "
        "changed from the first recorded step to the last ones: less readable, another length, cut off more "
        f"(truncation), more repetition; kept: none of these. Fell: how many runs fell off a cliff. {CLIFF}"
    )
    head = ("", "form", "machine", "code", "seeds", "steps", "hours", "seconds a step", "fell")
    return Table("Runs", rows, head, how, words=4)


def _lacking(cells: Sequence[Cell]) -> Table:
    """The runs of each part that are missing, and the hours that they need, by the steps that were timed."""
    seeds_run = {cell.folder or cell.label: len(cell.runs) for cell in cells if cell.finished}
    usual_runs: dict[str, list[Run]] = {}  # {kind of cell: runs on the machine of most runs}
    machines = collections.Counter(_machine(run) for cell in cells for run in cell.runs)
    usual = max(machines, key=lambda machine: machines[machine], default=NONE)
    for cell in cells:
        usual_runs.setdefault(_kind(cell.name), []).extend(run for run in cell.runs if _machine(run) == usual)
    rows = []
    for part, names in _parts().items():
        seeds = {name: findings.SEEDS - seeds_run.get(name, 0) for name in names}
        lacking = {name: count for name, count in seeds.items() if count > 0}
        paces = {name: _pace(usual_runs.get(_kind(name), ())) for name in lacking}
        timed = {name: float(pace) for name, pace in paces.items() if pace != NONE}
        hours = sum(lacking[name] * _steps(name) * pace / 3600 for name, pace in timed.items())
        cells_left = [
            name.replace("+", " + ") + (f" ({count} of {findings.SEEDS})" if count < findings.SEEDS else "")
            for name, count in lacking.items()
        ]
        if lacking:
            total = str(sum(lacking.values()))
            untimed = sum(count for name, count in lacking.items() if name not in timed)
            more = f"{untimed} runs" if timed and untimed else NONE
            rows.append((part, ", ".join(cells_left), total, f"{hours:.1f}" if timed else "unknown", more))
    how = (
        f"Runs that are still needed for claims over {findings.SEEDS} seeds. Hours are their steps times the mean "
        f"seconds of a step in runs of the same workflow, scale and task on {usual}, whatever follows the plus signs, "
        "although more agents or rounds take longer, and unknown without such a run. [The two "
        "roads](measured.md#the-two-roads) has times of a few steps for most cells of the map without the regime."
    )
    return Table("Not run", rows, ("part", "cells", "runs", "hours", "not in the hours"), how, words=2)


def _parts() -> dict[str, Sequence[str]]:
    """The cells of each part of the study; the last parts are the cells of its map that no other part has."""
    parts = dict(sets_of(str(resolve_path(PARTS))))
    planned = {name for names in parts.values() for name in names}
    left = {REST: _module().micro.SETS["study"]}
    left[REGIME] = [f"{name}+regime" for name in left[REST]]
    return parts | {part: [name for name in names if name not in planned] for part, names in left.items()}


@functools.cache
def _module():  # type: ignore[no-untyped-def]
    return config_module(resolve_path(PARTS))


@functools.cache
def _steps(name: str) -> int:
    return int(_module().get_config(name).steps)


def _kind(name: str) -> str:
    """The workflow, scale and task in a cell's name."""
    parts = name.partition("+")[0].split("-")
    return "-".join([parts[0], *parts[2:]])


def _machine(run: Run) -> str:
    return machine_of(run) or NONE


def _pace(runs: Sequence[Run]) -> str:
    """Mean seconds of a step, with evaluations; all steps count the same, however many a run has."""
    made = [(run.part("made").get("seconds"), run.step) for run in runs]
    known = [(float(seconds), steps) for seconds, steps in made if seconds and steps]
    return f"{np.divide(*np.sum(known, axis=0)):.2f}" if known else NONE
