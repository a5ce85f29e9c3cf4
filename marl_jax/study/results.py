"""Runs as compact JSON files to keep with the code: all evaluations, thinned metrics, no weights and no texts.

    run folder ──collect──► CELL/seed-N.run.json ──read──► Run

A file contains `config.json`, the accelerator that made the run (for a CPU run: the machine that collected it) and the
seconds of all steps; every line of `eval.jsonl`; the alarms; and at most STEPS steps of `metrics.jsonl`, as columns of
the keys that the findings use. It is read back as a `Run` with fewer steps of metrics and no episodes. A study is all
runs below a directory, whether they are run folders or such files.
"""

import dataclasses
import json
import math
import os
import re
from pathlib import Path
from typing import Any

from marl_jax.run_folder.files import write_atomically
from marl_jax.run_folder.folder import FolderError, output_folder, path_errors
from marl_jax.study.record import ODD, Record, Run, find_runs, read_run, sound
from marl_jax.user_cache import machine

SUFFIX = ".run.json"
SCHEMA = 1
STEPS = 40  # steps of the metrics that are stored, evenly spaced, with the first and the last
DIGITS = 4  # significant digits of a stored metric
KEPT = re.compile(
    r"step|reward|reward/.*|draws/first_reward|episodes|calls|tokens|failed|alarms|copied/.*|repeated/.*"
    r"|cosine/.*|groups/.*|gradient/.*"
    r"|policy/[^/]+/(steps|updates|learning_rate|grad_norm|update_norm|clip_factor|approx_kl|skipped)"
    r"|role/[^/]+/(entropy|length|truncated_share|unreadable_share|reward|advantage_zero_share|approx_kl|rows)"
    r"|time/step"
)


@dataclasses.dataclass(frozen=True)
class Study:
    """The runs below a directory, each read once."""

    root: Path
    runs: dict[str, Run]  # by their paths relative to the root
    unread: list[str]  # a line for each run that could not be read


def read_study(root: str | os.PathLike[str]) -> Study:
    """All runs below a directory, each from its folder if that can be read, else from its result file.

    A directory without runs, or one that is itself a run, is refused.
    """
    top, runs, unread = Path(os.path.expanduser(root)).absolute(), dict[str, Run](), list[str]()
    paths = [*find_runs(top, unread), *sorted(top.rglob(f"*{SUFFIX}"))]
    if not paths:
        why = f"there is no run in or below '{root}': give --root=DIR, the folder that holds run folders"
        raise FolderError("; ".join([*unread, why]))
    if top in paths:
        raise FolderError(f"'{root}' is itself a run: give --workdir={root}")
    for path in paths:
        name = path.relative_to(top).as_posix().removesuffix(SUFFIX)
        if name in runs:
            continue  # already read from its run folder; this is its result file
        try:
            name.encode()  # the page contains it
            runs[name] = read_result(path) if path.is_file() else read_run(path)
        except UnicodeEncodeError:
            unread.append(f"'{os.fsencode(name).decode(errors='replace')}' is no name in UTF-8: rename it")
        except FolderError as error:
            unread.append(str(error))
    return Study(top, runs, unread)


def collect(
    root: str | os.PathLike[str], out: str | os.PathLike[str], *, unfinished: bool = False
) -> tuple[list[Path], list[str]]:
    """Write the finished runs below a directory, each at its relative path; the files, and why other runs have none."""
    top, target = Path(os.path.expanduser(root)).absolute(), output_folder(out)
    written, unread = list[Path](), list[str]()
    for folder in find_runs(top, unread):
        try:
            run = read_run(folder)
            if not (run.finished or unfinished):
                continue
            result = compact(run)
        except FolderError as error:
            unread.append(str(error))
            continue
        except ODD as error:  # the other runs still get their results
            unread.append(f"'{folder}' has no result, because a value in it is not usable: {error!r}")
            continue
        place = target / folder.relative_to(top.parent if folder == top else top)
        path = place.with_name(place.name + SUFFIX)
        with path_errors(path, "choose another --out"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(result, separators=(",", ":")).encode(), shared=True)
        written.append(path)
    if not written and not unread:
        raise FolderError(f"there is no {'' if unfinished else 'finished '}run in or below '{root}'")
    return written, unread


def compact(run: Run) -> dict[str, Any]:
    """The contents of a run's result file."""
    lines = _thinned(run.metrics)
    keys = dict.fromkeys(key for line in lines for key in line if KEPT.fullmatch(key))
    return {
        "schema": SCHEMA,
        "about": {**run.about, "made": {"machine": _machine(run), "seconds": _seconds(run)}},
        "evaluations": list(run.evaluations),
        "alarms": [alarm.to_json() | {"until": alarm.until} for alarm in run.watch.alarms],
        "metrics": {key: [_short(line.get(key)) for line in lines] for key in keys},
    }


def read_result(path: str | os.PathLike[str]) -> Run:
    """The run that a result file was made from."""
    file = Path(path)
    try:
        result = json.loads(file.read_text())
        columns = result["metrics"]
        if len({len(column) for column in columns.values()}) > 1:
            raise ValueError("its columns of metrics have different lengths")
        lines = tuple(dict(zip(columns, row)) for row in zip(*columns.values()))
        if result["schema"] != SCHEMA:
            raise ValueError(f"its schema is {result['schema']}, this version reads {SCHEMA}")
        if type(result["about"]["config"]["seed"]) is not int:
            raise ValueError("config.seed is not an integer")
        return sound(
            Run(
                file.with_name(file.name.removesuffix(SUFFIX)),
                result["about"],
                lines,
                tuple(result["evaluations"]),
                tuple(result["alarms"]),
            )
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FolderError(f"'{file}' is no result of a run: {error}") from None


def _machine(run: Run) -> str:
    """Number and kind of accelerators as the run recorded them; for CPUs, whose kind is not recorded, this machine."""
    device, mesh = str(run.about.get("versions", {}).get("device", "cpu")), run.config.get("mesh", {})
    count = math.prod(mesh.get(axis, 1) for axis in ("data", "model", "hosts"))
    return machine() if device == "cpu" else f"{run.about['settled'].get('devices', count)} x {device}"


def _seconds(run: Run) -> float:
    """Seconds of all steps, with evaluations and checkpoints; if seeds trained side by side, this seed's share."""
    steps = sum(line.get("time/wall") or line.get("time/step") or 0.0 for line in run.metrics)
    return round(steps / run.config.get("seeds", 1), 1)


def _thinned(lines: tuple[Record, ...]) -> list[Record]:
    indices = {round(k * (len(lines) - 1) / (STEPS - 1)) for k in range(STEPS)}
    return [line for i, line in enumerate(lines) if i in indices]


def _short(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
