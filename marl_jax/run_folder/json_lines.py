"""Metrics of a run: one JSON object per line, keyed by `step`; a run that was killed and resumed writes the same file.

    rewind(folder / "metrics.jsonl", step)            on resume: lines after the restored checkpoint are removed
    append_line(folder / "metrics.jsonl", step, {"accuracy": 0.5, "time/step": 1.2})

Everything under `time/` may differ between equal runs, nothing else.
"""

import contextlib
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from marl_jax.run_folder.files import append, disk_errors, sync_directory, write_atomically
from marl_jax.run_folder.folder import FolderError, check_held, path_errors


def append_line(path: str | os.PathLike[str], step: int, values: Mapping[str, Any]) -> None:
    """Append {"step": step, **values}, which is on the disk when this returns; NaN and infinities become null."""
    line = json.dumps(plain({"step": step, **values}), allow_nan=False) + "\n"
    with _opened(path := Path(path)) as file:
        append(file, line.encode(), sync=True)


def rewind(path: str | os.PathLike[str], step: int, checkpoint: str | None = None) -> list[dict[str, Any]]:
    """Remove all lines of later steps except those of `checkpoint`; returns the removed lines. It creates the file."""
    path = Path(path)
    with _opened(path):
        lines = path.read_bytes().splitlines(keepends=True)
    kept, removed = list[bytes](), list[dict[str, Any]]()
    for number, line in enumerate(lines, 1):
        entry = _parse(line, path, number)
        if entry["step"] <= step or (checkpoint and entry.get("checkpoint") == checkpoint):
            kept.append(line)
        else:
            removed.append(entry)
    if removed:
        write_atomically(path, b"".join(kept))
    return removed


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[io.FileIO]:
    """The file, created if needed; an incomplete last line, left by a kill, is removed."""
    check_held(path.parent)
    with contextlib.ExitStack() as stack:
        stack.enter_context(disk_errors(path))
        with path_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path, "a+b", buffering=0))
            size = file.seek(0, os.SEEK_END)
            if not size:
                sync_directory(path.parent)
            elif os.pread(file.fileno(), 1, size - 1) != b"\n":
                file.truncate(path.read_bytes().rfind(b"\n") + 1)
                os.fsync(file.fileno())
        yield file


def read_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines, which may still be written to; each must have an integer `step`."""
    path = Path(path)
    if path.exists():
        with path_errors(path):
            lines = path.read_bytes().split(b"\n")[:-1]
        for number, line in enumerate(lines, 1):
            yield _parse(line, path, number)


def last_complete_step(path: str | os.PathLike[str]) -> int:
    """The last step up to which every step from 1 on has a line."""
    last = 0
    for last, line in enumerate(read_lines(path), 1):
        if line["step"] != last:
            return last - 1
    return last


def missing_evaluations(evaluations: Iterable[Mapping[str, Any]], every: int, step: int) -> list[int]:
    """The steps before `step` that a run evaluates (every `every` steps) and that have no accuracy in these lines."""
    own_lines = (line for line in evaluations if "checkpoint" not in line)
    evaluated = {line["step"] for line in own_lines if isinstance(line.get("accuracy"), int | float)}
    return [due for due in range(0, step, every) if due not in evaluated] if every else []


def plain(value: Any) -> Any:
    """A value that JSON can store: numbers of arrays as numbers, exactly; NaN and infinities as None."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if hasattr(value, "tolist"):  # of numpy or JAX
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if isinstance(value, dict) and isinstance(value.get("step"), int):
        return value
    raise FolderError(
        f"'{path}' holds a line that is no JSON object with a step: line {number}, "
        f"{line[:60].decode(errors='replace')!r}; restore the line, or remove it"
    )
