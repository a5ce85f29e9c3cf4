"""The page a person reads about a run: `report.html`, in one file that loads nothing, and `report.png`.

    config.json, metrics.jsonl, eval.jsonl, episodes/ ──► Run ──► pictures, tables, transcripts ──► run.html ──► page

What models wrote is hostile: the templates escape all of it, and the page's own policy forbids scripts and requests.
A folder of runs gets a page with one row and one section for each, and each run its own page.
"""

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

from marl_jax.run_folder.files import write_atomically
from marl_jax.run_folder.folder import FolderError, path_errors
from marl_jax.study import curves, drawing, record, run_tables, seeds
from marl_jax.study.record import Run

LONGEST = 6000  # characters shown of one text; the middle of a longer one is left out


def write_report(workdir: str | os.PathLike[str]) -> Path:
    """Write `report.html` and `report.png` into a run's folder; where the page is."""
    return _write_run(record.read_run(workdir))


def write_overview(root: str | os.PathLike[str]) -> Path:
    """Write the pages of all runs below a directory, and `report.html` and `report.png` over all of them there."""
    directory = Path(root).expanduser().absolute()
    folders = record.find_runs(directory)
    if not folders:
        raise FolderError(
            f"there is no run in or below '{root}': give --root=DIR, the folder that holds run folders"
        )
    if directory in folders:
        raise FolderError(f"'{root}' is itself a run: give --workdir={root}")
    runs, unread = {}, []
    for folder in folders:
        try:
            run = record.read_run(folder)
            _write_run(run)
            runs[folder.relative_to(directory).as_posix()] = run
        except FolderError as error:
            unread.append(str(error))
    panels = {
        name: [panel for panel in curves.panels(run) if panel.title in curves.OVERVIEW]
        for name, run in runs.items()
    }
    accuracies = [
        dataclasses.replace(panel, title=name)
        for name, shown in panels.items()
        for panel in shown
        if panel.title == curves.ACCURACY
    ]
    with path_errors(directory):
        drawing.png(accuracies, directory / "report.png", directory.name, wide_first=False)
    return _write_page(
        directory,
        "overview.html",
        title=directory.name,
        runs=runs,
        panels=panels,
        unread=unread,
        together=seeds.tables_of(list(runs.values())),
        cliff=run_tables.CLIFF if any(map(record.stability, runs.values())) else "",
    )


def _write_run(run: Run) -> Path:
    panels = curves.panels(run)
    with path_errors(run.folder):
        drawing.png(panels, run.folder / "report.png", f"{run.cell}: {run_tables.status(run)}")
    samples, unread = record.samples(run)
    return _write_page(
        run.folder,
        "run.html",
        title=run.cell,
        run=run,
        panels=panels,
        samples=samples,
        tones={role: f"c{place % len(drawing.COLOURS)}" for place, role in enumerate(run.roles)},
        unread=unread,
        config=json.dumps(run.about, indent=1, ensure_ascii=False),
    )


def shortened(said: Any) -> str:
    """A text for the page, without the middle of a very long one."""
    text = "" if said is None else str(said)  # a task of one's own may hold any value
    if len(text) <= LONGEST:
        return text.strip() or "(nothing)"
    half = LONGEST // 2
    return f"{text[:half]}\n\n[… {len(text) - 2 * half:,} characters left out …]\n\n{text[-half:]}"


@functools.cache
def _environment() -> Any:
    import jinja2
    import markupsafe

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["shortened"] = shortened
    svg = lambda *about: markupsafe.Markup(drawing.svg(*about))
    environment.globals.update(svg=svg, legend=drawing.legend, words=run_tables)
    return environment


def _write_page(directory: Path, template: str, **values: Any) -> Path:
    """`report.html` in a directory, from a template and what it shows."""
    page = _environment().get_template(template).render(values)
    with path_errors(directory):
        # Half of a surrogate pair is no text.
        write_atomically(directory / "report.html", page.encode("utf-8", "replace"))
    return directory / "report.html"
