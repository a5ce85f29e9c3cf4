"""The page a person reads about a run: `report.html`, in one file that loads nothing, and `report.png`.

    config.json, metrics.jsonl, eval.jsonl, episodes/ ──► Run ──► pictures, tables, transcripts ──► run.html ──► page

What models wrote is hostile: the templates escape all of it, and the page's own policy forbids scripts and requests.
A folder of runs gets a page with one row and one section for each, and each run its own page.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marl_jax.runs.files import write_atomically
from marl_jax.runs.folder import FolderError, path_errors
from marl_jax.study import curves, drawing, record, run_tables, seeds
from marl_jax.study.record import Run, Sample
from marl_jax.table import CallRecord, Episode, ToolRecord

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
    runs, unread = [], []
    for folder in folders:
        try:
            run = record.read_run(folder)
            _write_run(run)
            runs.append(run)
        except FolderError as error:
            unread.append(str(error))
    found = [(run, panel) for run in runs if (panel := curves.accuracy(run)) is not None]
    named = [dataclasses.replace(panel, title=_place(run, directory)) for run, panel in found]
    with path_errors(directory):
        drawing.png(named, directory / "report.png", directory.name, wide_first=False)
    page = _page(
        "overview.html",
        title=directory.name,
        unread=unread,
        together=seeds.tables_of(runs),
        head=(
            "",
            "cell",
            "steps",
            "base",
            "final",
            "best",
            "terminal",
            "final over base,\npoints",
            "warnings",
        ),
        cliff=run_tables.CLIFF if any(record.stability(run) for run in runs) else "",
        rows=[_row(run, directory, f"run-{number}") for number, run in enumerate(runs)],
    )
    with path_errors(directory):
        write_atomically(directory / "report.html", page)
    return directory / "report.html"


def _write_run(run: Run) -> Path:
    pictures = curves.panels(run)
    with path_errors(run.folder):
        drawing.png(pictures, run.folder / "report.png", f"{run.cell}: {run_tables.status(run)}")
    samples, unread = record.samples(run)
    page = _page(
        "run.html",
        title=run.cell,
        folder=str(run.folder),
        status=run_tables.status(run),
        key=run_tables.key_numbers(run),
        said=run_tables.in_words(run),
        pictures=_pictures(pictures, "p", wide_first=True),
        legend=curves.legend(pictures),
        tables=run_tables.tables(run),
        warnings=run_tables.warnings(run),
        episodes=[_episode(sample, run.roles) for sample in samples],
        unread=unread,
        config=json.dumps(run.about, indent=1, ensure_ascii=False),
    )
    with path_errors(run.folder):
        write_atomically(run.folder / "report.html", page)
    return run.folder / "report.html"


def _row(run: Run, directory: Path, anchor: str) -> dict[str, Any]:
    """A run in the page over many: its line, and its section."""
    along, end = record.trained(run), record.stability(run)
    last = along[-1] if along else None
    by = run_tables.gain(last)
    shown = [panel for panel in curves.panels(run) if panel.title in curves.OVERVIEW]
    return {
        "anchor": anchor,
        "name": _place(run, directory),
        "page": (run.folder / "report.html").relative_to(directory).as_posix(),
        "cell": run.cell,
        "status": run_tables.status(run),
        "cells": [  # each with what stands beneath it
            (f"{run.step}/{run.steps}", ""),
            *map(_accuracy, (record.base(run), last, record.best(along) if along else None)),
            (run_tables.percent(end.terminal), "cliff" if end.cliff else "no cliff")
            if end
            else (run_tables.NONE, ""),
            (f"{100 * by['mean']:+.1f}", run_tables.difference_interval(by)) if by else (run_tables.NONE, ""),
            (str(len(run_tables.warnings(run)) or run_tables.NONE), ""),
        ],
        "said": run_tables.in_words(run) if not along else [],
        "pictures": _pictures(shown, anchor),
        "legend": curves.legend(shown),
    }


def _accuracy(evaluation: record.Record | None) -> tuple[str, str]:
    return (
        (run_tables.percent(evaluation["accuracy"]), run_tables.interval(evaluation))
        if evaluation
        else (run_tables.NONE, "")
    )


def _pictures(panels: Sequence[curves.Panel], name: str, wide_first: bool = False) -> list[dict[str, Any]]:
    from markupsafe import Markup

    return [
        {
            "title": panel.title,
            "how": panel.how,
            "svg": Markup(drawing.svg(panel, wide=wide_first and place == 0, name=f"{name}-{place}")),
        }
        for place, panel in enumerate(panels)
    ]


def _place(run: Run, directory: Path) -> str:
    return run.folder.relative_to(directory).as_posix()


# ---------------------------------------------------------------- transcripts


def _episode(sample: Sample, roles: Sequence[str]) -> dict[str, Any]:
    """An episode in the order it happened: the task, every call and tool result, the answer."""
    episode = sample.episode
    ending, kind = {True: ("right", "good"), False: ("wrong", "bad"), None: ("not graded", "muted")}[
        sample.right
    ]
    parts, tools = [], list(episode.tools)
    for index, call in enumerate(episode.calls):
        while tools and tools[0].after_call < index:
            parts.append(_tool(tools.pop(0)))
        parts.append(_call(index, call, sample, roles))
    parts += map(_tool, tools)
    gold = f" Wanted: {_shortened(episode.task.gold)}." if episode.task.gold else ""
    error = f" Ended by an error: {episode.error}." if episode.error else ""
    return {
        "step": sample.step,
        "ending": ending,
        "kind": kind,
        "facts": _facts(episode, sample),
        "question": _shortened(episode.task.question),
        "parts": parts,
        "answer": f"Answer: {_shortened(episode.answer) if episode.answer is not None else 'none'}.{gold}{error}",
    }


def _facts(episode: Episode, sample: Sample) -> str:
    outcome = "" if sample.outcome is None else f", outcome {sample.outcome:g}"
    return f"task {episode.task.id}, sample {episode.sample}, workflow {episode.workflow}{outcome}"


def _call(index: int, call: CallRecord, sample: Sample, roles: Sequence[str]) -> dict[str, str]:
    facts = [f"slot {call.slot}, turn {call.turn}", f"policy {call.policy}", f"{len(call.tokens)} tokens"]
    facts += ["cut off"] if call.finish_reason == "length" else []
    facts += [f"prompt cut by {call.cut}"] if call.cut else []
    facts += [f"reads {', '.join(map(str, call.reads))}"] if call.reads else []
    facts += ["unreadable"] if call.answer is None else []
    for name, values in (("reward", sample.rewards), ("advantage", sample.advantages)):
        if index < len(values) and (value := values[index]) is not None:
            facts.append(f"{name} {value:+.2f}")
    tone = f"c{roles.index(call.role) % len(drawing.COLOURS)}" if call.role in roles else "muted"
    return {
        "who": f"[{index}] {call.role}",
        "facts": " · ".join(facts),
        "text": _shortened(call.text),
        "tone": tone,
    }


def _tool(tool: ToolRecord) -> dict[str, str]:
    text = f"error: {tool.error}" if tool.error else str(tool.result)
    return {"who": f"[tool] {tool.name}", "facts": "", "text": _shortened(text), "tone": "muted"}


def _shortened(said: Any) -> str:
    text = "" if said is None else str(said)  # an older task of one's own holds whatever it was given
    if len(text) <= LONGEST:
        return text.strip() or "(nothing)"
    half = LONGEST // 2
    return f"{text[:half]}\n\n[… {len(text) - 2 * half:,} characters left out …]\n\n{text[-half:]}"


# ---------------------------------------------------------------- templates


@functools.cache
def _environment() -> Any:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )


def _page(template: str, **values: Any) -> str:
    from markupsafe import Markup

    style = Markup((Path(__file__).parent / "style.css").read_text(encoding="utf-8"))
    page = _environment().get_template(template).render(style=style, **values)
    return page.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair is no text
