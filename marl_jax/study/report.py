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
from marl_jax.run_folder.folder import FolderError, outside, path_errors
from marl_jax.run_folder.metrics import read_lines
from marl_jax.study import cliffs, curves, drawing, record, run_tables, seeds
from marl_jax.study.record import Run

__all__ = ["shortened", "write_overview", "write_report"]

ELSEWHERE = "give --out=DIR to write the page elsewhere"
LONGEST = 6000  # characters shown of one text; the middle of a longer one is left out


def write_report(workdir: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write `report.html` and `report.png` into a run's folder, or into `out`; where the page is.

    Evaluations that `experiments.evaluate --out` left there are on the page, too.
    """
    run = record.read_run(workdir)
    if out is None:
        return _write_run(run, run.folder)
    place = outside(out)
    more = tuple(read_lines(place / "eval.jsonl"))
    return _write_run(dataclasses.replace(run, evaluations=run.evaluations + more), place)


def write_overview(root: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the pages of all runs below a directory, and `report.html` and `report.png` over all of them there.

    With `out`, all of them are written there, in folders of the same names.
    """
    directory = Path(root).expanduser().absolute()
    folders = record.find_runs(directory)
    if not folders:
        raise FolderError(
            f"there is no run in or below '{root}': give --root=DIR, the folder that holds run folders"
        )
    if directory in folders:
        raise FolderError(f"'{root}' is itself a run: give --workdir={root}")
    place = directory if out is None else outside(out)
    runs, unread = {}, []
    for folder in folders:
        name = folder.relative_to(directory)
        try:
            run = record.read_run(folder)
            with path_errors(place / name, ELSEWHERE):
                (place / name).mkdir(parents=True, exist_ok=True)
            _write_run(run, place / name)
            runs[name.as_posix()] = run
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
    with path_errors(place, ELSEWHERE):
        drawing.png(accuracies, place / "report.png", directory.name, wide_first=False)
    return _write_page(
        place,
        "overview.html",
        title=directory.name,
        runs=runs,
        panels=panels,
        unread=unread,
        together=seeds.tables_of(list(runs.values())),
        cliff=cliffs.CLIFF if any(map(cliffs.course, runs.values())) else "",
    )


def _write_run(run: Run, place: Path) -> Path:
    panels = curves.panels(run)
    with path_errors(place, ELSEWHERE):
        drawing.png(panels, place / "report.png", f"{run.cell}: {run_tables.status(run)}")
    samples, unread = record.samples(run)
    return _write_page(
        place,
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
    with path_errors(directory, ELSEWHERE):
        # Half of a surrogate pair is no text.
        write_atomically(directory / "report.html", page.encode("utf-8", "replace"))
    return directory / "report.html"
