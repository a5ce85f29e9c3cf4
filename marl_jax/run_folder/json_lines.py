"""Metrics of a run: one JSON object per line, keyed by `step`; a run that was killed and resumed writes the same file.

    log = JsonLines(folder / "metrics.jsonl")
    log.rewind(step)                    on resume: lines after the restored checkpoint are removed
    log.write(step, {"accuracy": 0.5, "time/step": 1.2})

Everything under `time/` may differ between equal runs, nothing else.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from marl_jax.run_folder.files import append, disk_errors, sync_directory, write_atomically
from marl_jax.run_folder.folder import FolderError, path_errors


class JsonLines:
    """A file of JSON lines that is appended to; every line is on the disk when `write` returns."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens the file; an incomplete last line, left by a kill, is removed."""
        self.path = path = Path(path)
        with path_errors(path), disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115
            size = self._file.seek(0, os.SEEK_END)
            if size and (complete := path.read_bytes().rfind(b"\n") + 1) < size:
                self._file.truncate(complete)
                os.fsync(self._file.fileno())
            sync_directory(path.parent)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append {"step": step, **values}; NaN and infinities become null."""
        line = json.dumps(plain({"step": step, **values}), allow_nan=False) + "\n"
        with disk_errors(self.path):
            append(self._file, line.encode(), sync=True)

    def rewind(self, step: int, checkpoint: str | None = None) -> list[dict[str, Any]]:
        """Remove all lines of later steps except those of `checkpoint`; returns the removed lines."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept, removed = list[bytes](), list[dict[str, Any]]()
        for line in lines:
            entry = _parse(line, self.path)
            if entry["step"] <= step or (checkpoint and entry.get("checkpoint") == checkpoint):
                kept.append(line)
            else:
                removed.append(entry)
        if removed:
            self._file.close()
            write_atomically(self.path, b"".join(kept).decode())
            self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115
        return removed

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class NoLines(JsonLines):
    """The same file in a process that does not write it, because another process does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Do nothing."""

    def rewind(self, step: int, checkpoint: str | None = None) -> list[dict[str, Any]]:
        """Do nothing."""
        return []

    def close(self) -> None:
        """Do nothing."""


def read_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines, which may still be written to; each must have an integer `step`."""
    path = Path(path)
    if path.exists():
        with path_errors(path):
            lines = path.read_bytes().split(b"\n")[:-1]
        for line in lines:
            yield _parse(line, path)


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


def _parse(line: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if isinstance(value, dict) and isinstance(value.get("step"), int):
        return value
    raise FolderError(
        f"'{path}' holds a line that is no JSON object with a step: {line[:60]!r}; restore it, or remove it"
    )
