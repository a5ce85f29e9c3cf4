"""The page a person reads about a run: `report.html`, in one file that loads nothing, and its curves as PNG and SVG.

    config.json, metrics.jsonl, eval.jsonl ──► Run ──► tables of words ──► page/run.html ──┐
                                                └────► panels ──┐                          ├──► report.html
    episodes/ ──► recorded ──► JSON in the page ────────────────┴──► page/page.js, uPlot ──┘

The texts of models are treated as hostile: templates escape them, scripts handle them as text, and the page's content
security policy allows no request and no scripts but these two, by their hashes. A folder of runs, or of their compact
results, gets a page over all of them, with the questions of the study.
"""

import base64
import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marl_jax.rewards.grading import RIGHT
from marl_jax.run_folder.files import write_atomically
from marl_jax.run_folder.folder import FolderError, output_folder, path_errors
from marl_jax.run_folder.json_lines import read_lines
from marl_jax.study import cliffs, record, run_sentences, run_tables, seed_tables
from marl_jax.study.page_episodes import Recorded, inert, recorded
from marl_jax.study.questions import findings, paper
from marl_jax.study.questions.bars import NOT_RUN
from marl_jax.study.record import ODD, Run
from marl_jax.study.report import cell_map, curves, drawing
from marl_jax.study.report.curves import Panel
from marl_jax.study.results import Study
from marl_jax.study.seeds import by_cell, uncounted

ELSEWHERE = "give --out=DIR to write the page elsewhere"
PAGE = Path(__file__).with_name("page")


def write_report(workdir: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write `report.html`, `.png` and `.svg` into a run's folder, or into `out`; returns the path of the page.

    Evaluations that `experiments.evaluate --out` wrote there are on the page, too.
    """
    run = record.read_run(workdir)
    place = run.folder if out is None else output_folder(out)
    try:
        if out is not None:
            here = os.path.realpath(run.folder)  # one folder may have evaluations of several runs
            more = tuple(line for line in read_lines(place / "eval.jsonl") if line.get("run", here) == here)
            run = record.sound(dataclasses.replace(run, evaluations=run.evaluations + more))
        return _write_run(run, place)
    except ODD as error:
        raise FolderError(_odd(run, error)) from error


def write_overview(study: Study, out: str | os.PathLike[str] | None = None) -> tuple[Path, Study]:
    """Write the pages of all runs of a study, and `report.html`, `.png` and `.svg` over all of them at its root.

    Returns the path of the page, and the study without the runs that could get no page. With `out`, all pages are
    written there, in folders of the same names.
    """
    place = study.root if out is None else output_folder(out)
    runs, unread = dict[str, Run](), [*study.unread]
    for name, run in study.runs.items():
        try:
            with path_errors(place / name, ELSEWHERE):
                (place / name).mkdir(parents=True, exist_ok=True)
            _write_run(run, place / name)
            runs[name] = run
        except FolderError as error:
            unread.append(str(error))
        except ODD as error:  # the other runs still get their pages
            unread.append(_odd(run, error))
    unread += uncounted(runs)
    together = [curves.overlay(runs, title) for title in curves.OVERVIEW]
    panels = [panel for panel in together if panel.lines]
    accuracies = [
        dataclasses.replace(panel, title=cell.label, how="A line for each run.")
        for cell in by_cell(list(runs.values()))
        if (
            panel := curves.overlay({f"seed {r.config['seed']}": r for r in cell.runs}, curves.ACCURACY)
        ).lines
    ]
    with path_errors(place, ELSEWHERE):
        drawing.images(accuracies, place, study.root.name, wide_first=False)
    answered = findings.answers(list(runs.values()))
    # Runs of a user's project are about other questions.
    any_answer = any(one.answer != NOT_RUN for one in answered.findings)
    page = _write_page(
        place,
        "overview.html",
        title=study.root.name,
        compact=False,
        runs=runs,
        panels=panels,
        data=_data(panels),
        map=cell_map.cell_map(runs),
        problems=_problems(list(runs.values())),
        unread=unread,
        findings=answered.findings if len(runs) > 1 and any_answer else [],
        paper=paper.agreement(answered),
        tests=answered.tests,
        together=seed_tables.tables_of(list(runs.values())),
        cliff=cliffs.CLIFF if any(map(cliffs.course, runs.values())) else "",
    )
    return page, dataclasses.replace(study, runs=runs, unread=unread)


def _odd(run: Run, error: BaseException) -> str:
    return f"'{run.folder}' has no page, because a value in it is not usable: {error!r}"


def _problems(runs: Sequence[Run]) -> dict[str, str]:
    """The number of problems of each split that accuracies are means over."""
    val = [one for run in runs for one in record.trained(run)]
    test = [one for run in runs if (pair := record.held_out(run)) for one in pair]
    counted = lambda records: curves.spread([one["problems"] for one in records if one.get("problems")])
    return {"val": counted(val), "test": counted(test)}


def _title(run: Run) -> str:
    """The name of the run's folder of seeds if it extends the cell's name, else the cell's name; and its seed."""
    place = run.folder.parent.name
    name = place if place.startswith(run.cell) else run.cell
    return f"{name}, seed {run.config['seed']}" if "seed" in run.config else name


def _write_run(run: Run, place: Path) -> Path:
    """Write the page of a run, and its pictures unless it is a compact result, of which a study has a hundred."""
    panels = curves.panels(run)
    if not run.compact:
        with path_errors(place, ELSEWHERE):
            drawing.images(panels, place, f"{_title(run)}: {run_sentences.status(run)}")
    episodes = recorded(run)
    return _write_page(
        place,
        "run.html",
        title=_title(run),
        run=run,
        compact=run.compact,
        panels=panels,
        said=episodes,
        data=_data(panels, episodes, breaks=run_sentences.breaks(run), roles=run.roles),
        config=json.dumps(run.about, indent=1, ensure_ascii=False),
    )


@functools.cache
def _environment() -> Any:
    import jinja2
    import markupsafe

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    scripts = [PAGE.joinpath(name).read_text(encoding="utf-8") for name in ("uplot.js", "page.js")]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    environment.globals.update(
        legend=drawing.legend,
        words=run_sentences,
        tables=run_tables,
        scripts=list(map(markupsafe.Markup, scripts)),
        allowed=" ".join(f"'sha256-{one}'" for one in hashes),
    )
    return environment


def _data(
    panels: Sequence[Panel],
    episodes: Recorded | None = None,
    *,
    breaks: Sequence[Any] = (),
    roles: Sequence[str] = (),
) -> Any:
    """The data that the page's script draws, as JSON that is inert inside an element of the page."""
    import markupsafe

    values = {
        "panels": [_panel(panel) for panel in panels],
        "said": dataclasses.asdict(episodes) if episodes else None,
        "breaks": breaks,
        "roles": roles,
        "colours": len(drawing.COLOURS),
        "right": RIGHT,
    }
    return markupsafe.Markup(inert(values))


def _panel(panel: Panel) -> dict[str, Any]:
    """A panel for the script, with null for NaN."""
    numbers = lambda values: [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]

    def counted(line: curves.Line) -> dict[str, Any]:
        known = dict(zip(*line.count.known)) if line.count else {}
        return {"n": [known.get(step) for step in line.series.steps], "of": line.of} if known else {}

    lines = [
        {
            "name": line.name,
            "colour": line.colour,
            "on": line.on,
            "steps": list(map(int, line.series.steps)),
            "values": numbers(line.series.values),
            "window": drawing.window(panel, line.series),
            **({"low": numbers(line.band[0]), "high": numbers(line.band[1])} if line.band else {}),
            **counted(line),
        }
        for line in panel.lines
    ]
    rest = {
        name: getattr(panel, name)
        for name in ("title", "percent", "unit", "points", "logarithmic", "level", "bounds")
    }
    return rest | {"lines": lines}


def _write_page(directory: Path, template: str, **values: Any) -> Path:
    """Write `report.html` into a directory, from a template and its values."""
    page = _environment().get_template(template).render(values)
    with path_errors(directory, ELSEWHERE):
        # "replace": half of a surrogate pair cannot be encoded.
        write_atomically(directory / "report.html", page.encode("utf-8", "replace"), shared=True)
    return directory / "report.html"
