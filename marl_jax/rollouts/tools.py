"""Tools run on threads next to the hot path; a tool's result, error or time-out becomes its record."""

import dataclasses
import json
import operator
import os
import pathlib
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from marl_jax.episodes import ToolRecord
from marl_jax.own import error_text
from marl_jax.threads import Workers
from marl_jax.workflows.api import Tool

TIMEOUT = "timeout"  # the error of a tool that did not end in time
MAX_RESULT = 1 << 20  # bytes of JSON: results are recorded, shown and kept on disk


def run_tool(tool: Tool, after_call: int = -1) -> ToolRecord:
    """Run a tool; returns its record, with the result as JSON reads it back, or the error."""
    try:
        text = json.dumps(tool.fn(*tool.args))
        if len(text) > MAX_RESULT:
            raise ValueError(f"the result is {len(text)} bytes of JSON; at most {MAX_RESULT} are allowed")
        return ToolRecord(tool.name, json.loads(text), None, after_call)
    except BaseException as error:  # a SystemExit, too, must not end the thread silently
        return ToolRecord(tool.name, None, error_text(error), after_call)


class ToolLog:
    """Tool results on disk: a step that runs again after a kill sees the same results (such as a time-out)."""

    def __init__(self, path: str | os.PathLike[str], others: Sequence[pathlib.Path] = ()):
        """New results are written to `path`; those in the files `others` are known, too."""
        self._path = pathlib.Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = self._path.read_bytes() if self._path.exists() else b""
        end = text.rfind(b"\n") + 1
        self._known: dict[tuple[int, ...], ToolRecord] = {}
        for other in (file for file in others if file != self._path):
            self._known |= self._read(other.read_bytes().rpartition(b"\n")[0], other)
        self._known |= self._read(text[:end], self._path)
        if end < len(text):  # a line was being written when the process died
            os.truncate(self._path, end)

    def get(self, key: tuple[int, ...]) -> ToolRecord | None:
        """The recorded result of a tool, if there is one."""
        return self._known.get(key)

    def put(self, key: tuple[int, ...], record: ToolRecord) -> None:
        """Record the result of a tool."""
        if key in self._known:
            return
        line = json.dumps({"key": key, "record": vars(record)}) + "\n"
        try:
            with self._path.open("a") as file:
                file.write(line)
        except OSError as error:
            what = f"the result of a tool cannot be written ({error.strerror})"
            raise OSError(error.errno, what, str(self._path)) from error
        self._known[key] = record

    def _read(self, text: bytes, path: pathlib.Path) -> dict[tuple[int, ...], ToolRecord]:
        known = {}
        for number, line in enumerate(text.splitlines(), 1):
            try:
                entry = json.loads(line)
                known[tuple(map(operator.index, entry["key"]))] = ToolRecord(**entry["record"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"'{path}' cannot be read as tool results, line {number}: {error_text(error)}; "
                    "without the file the tools run again"
                ) from error
        return known


@dataclasses.dataclass(frozen=True)
class ToolJob:
    """A tool that a path of an episode waits for."""

    due: int  # the dispatch before which its result re-enters
    running: Any  # the path that called the tool
    position: int  # in its batch
    key: tuple[int, ...]  # key of its record
    future: Future[ToolRecord]  # the result, once there is one
    timeout: ToolRecord  # the record if the tool takes too long

    @property
    def record(self) -> ToolRecord:
        """The tool's result or error, once it has ended."""
        return self.timeout if self.future.exception() else self.future.result()


class ToolJobs:
    """The tools under way, in the order of their calls."""

    def __init__(self, pool: Workers, log: ToolLog | None, delay: int, free: bool):
        self.pool, self.log, self.delay, self.free = pool, log, delay, free
        self.jobs: list[ToolJob] = []

    def send(
        self, tool: Tool, now: int, running: Any, position: int, key: tuple[int, ...], after: int
    ) -> None:
        """Start a tool, or take its recorded result."""
        known = self.log.get(key) if self.log else None
        future: Future[ToolRecord] = Future()
        if known:
            future.set_result(known)
        else:
            future = self.pool.submit(run_tool, tool, after, limit_s=tool.timeout_s)
        timeout = ToolRecord(tool.name, None, TIMEOUT, after)
        self.jobs.append(ToolJob(now + self.delay, running, position, key, future, timeout))

    def due_results(self, now: int) -> list[ToolJob]:
        """Remove and return the jobs whose results enter now."""
        if self.free:
            self.pool.give_up()
        else:
            for job in self.jobs:
                if job.due <= now:
                    self.pool.wait([job.future])
        due: list[ToolJob] = []
        later: list[ToolJob] = []
        for job in self.jobs:  # each is checked once: a free tool may end at any moment
            (due if (job.future.done() if self.free else job.due <= now) else later).append(job)
        self.jobs = later
        if self.log:
            for job in due:
                self.log.put(job.key, job.record)
        return due

    def next_due(self) -> int:
        """If nothing can be decoded: the dispatch before which the next result enters. In mode free, waits for one."""
        if self.free:
            self.pool.wait([job.future for job in self.jobs])
        return self.jobs[0].due
