"""Tools run on threads beside the hot path; whatever happens to one becomes its record.

A thread cannot be killed: one whose tool outlives its time is left behind, and a fresh one takes its place.
"""

import collections
import dataclasses
import json
import math
import operator
import os
import pathlib
import threading
import time
from collections.abc import Sequence
from typing import Any

from marl_jax.table import ToolRecord
from marl_jax.workflows.api import Tool

TIMEOUT = "timeout"  # the error of a tool that had not ended in time
MAX_RESULT = 1 << 20  # bytes of JSON: results are recorded, shown and kept on disk


class Job:
    """One tool on its way; `record` is None until it has ended, one way or the other."""

    def __init__(self, tool: Tool, after_call: int, record: ToolRecord | None = None):
        self.tool, self.after_call, self.record = tool, after_call, record
        self.deadline = math.inf  # set when it begins to run: waiting in the queue costs no time

    def end(self, result: Any = None, error: str | None = None) -> None:
        self.record = ToolRecord(self.tool.name, result, error, self.after_call)


class ToolPool:
    """At most `threads` tools at a time, started in the order of submission."""

    def __init__(self, threads: int = 8):
        if threads < 1:
            raise ValueError(f"tool threads are {threads}; at least 1 is needed")
        self._threads, self._started = threads, 0
        self._changed = threading.Condition()
        self._queue: collections.deque[Job] = collections.deque()
        self._running: set[Job] = set()
        self._closed = False

    def submit(self, tool: Tool, after_call: int = -1) -> Job:
        job = Job(tool, after_call)
        with self._changed:
            self._queue.append(job)
            if self._started < self._threads:
                self._start()
            self._changed.notify_all()
        return job

    def wait(self, jobs: Sequence[Job], seconds: float = math.inf) -> None:
        """Until one of these jobs has ended, or for so many seconds."""
        until = time.monotonic() + seconds
        with self._changed:
            self._expire()
            while all(job.record is None for job in jobs) and (now := time.monotonic()) < until:
                soonest = min([until, *(running.deadline for running in self._running)])
                self._changed.wait(min(max(soonest - now, 0), threading.TIMEOUT_MAX))
                self._expire()

    def close(self) -> None:
        """Drop what waits; threads end with the tool they are in."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()

    def _start(self) -> None:
        self._started += 1
        threading.Thread(target=self._work, daemon=True, name="tool").start()

    def _expire(self) -> None:
        now = time.monotonic()
        for job in [job for job in self._running if now >= job.deadline]:
            job.end(error=TIMEOUT)
            self._running.discard(job)
            self._start()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                job = self._queue.popleft()
                job.deadline = time.monotonic() + min(job.tool.timeout_s, threading.TIMEOUT_MAX)
                self._running.add(job)
                self._changed.notify_all()  # whoever waits has a deadline to watch now
            result, error = run_tool(job.tool)
            with self._changed:
                if job not in self._running:  # it was given up, and this thread replaced
                    return
                self._running.discard(job)
                late = time.monotonic() >= job.deadline  # whether or not somebody looked by then
                job.end(None if late else result, TIMEOUT if late else error)
                self._changed.notify_all()


def run_tool(tool: Tool) -> tuple[Any, str | None]:
    """(result as JSON reads it back, error)."""
    try:
        text = json.dumps(tool.fn(*tool.args))
        if len(text) > MAX_RESULT:
            raise ValueError(f"the result is {len(text)} bytes of JSON, of at most {MAX_RESULT}")
        return json.loads(text), None
    except BaseException as error:  # its own SystemExit, too, must not take the thread along silently
        return None, say(error)


def say(error: BaseException) -> str:
    """An exception as records put it: its type and its text; the type alone where asking for the text raises."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except BaseException:
        return name


class ToolLog:
    """Tool results on disk: a step that runs again after a kill sees what it saw before (a time-out, say)."""

    def __init__(self, path: str | os.PathLike[str]):
        self._path = pathlib.Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = self._path.read_bytes() if self._path.exists() else b""
        whole = text.rfind(b"\n") + 1
        self._known = self._read(text[:whole])
        if whole < len(text):  # a line was being written when the process died
            os.truncate(self._path, whole)

    def get(self, key: tuple[int, ...]) -> ToolRecord | None:
        return self._known.get(key)

    def put(self, key: tuple[int, ...], record: ToolRecord) -> None:
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

    def _read(self, text: bytes) -> dict[tuple[int, ...], ToolRecord]:
        known = {}
        for number, line in enumerate(text.splitlines(), 1):
            try:
                entry = json.loads(line)
                known[tuple(map(operator.index, entry["key"]))] = ToolRecord(**entry["record"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"'{self._path}' cannot be read as results of tools, line {number}: {say(error)}; "
                    "without the file the tools run again"
                ) from error
        return known


@dataclasses.dataclass(frozen=True)
class Errand:
    """A tool that an episode waits for."""

    due: int  # the dispatch before which its result re-enters
    episode: int
    position: int  # in the episode's batch
    key: tuple[int, ...]
    job: Job


class Errands:
    """The tools under way, in the order of their calls."""

    def __init__(self, pool: ToolPool, log: ToolLog | None, delay: int, free: bool):
        self.pool, self.log, self.delay, self.free = pool, log, delay, free
        self.errands: list[Errand] = []

    def send(
        self, tool: Tool, now: int, episode: int, position: int, key: tuple[int, ...], after: int
    ) -> None:
        known = self.log.get(key) if self.log else None
        job = Job(tool, after, known) if known else self.pool.submit(tool, after)
        self.errands.append(Errand(now + self.delay, episode, position, key, job))

    def come(self, now: int) -> list[Errand]:
        """Those whose results enter now."""
        if self.free:
            self.pool.wait([], seconds=0)
        else:
            for errand in self.errands:
                if errand.due <= now:
                    self.pool.wait([errand.job])
        come: list[Errand] = []
        stay: list[Errand] = []
        for errand in self.errands:  # looked at once: a free one may end at any moment
            (come if (errand.job.record if self.free else errand.due <= now) else stay).append(errand)
        self.errands = stay
        for errand in come:
            if self.log and errand.job.record:
                self.log.put(errand.key, errand.job.record)
        return come

    def idle_until(self) -> int:
        """With nothing to decode: the dispatch before which the next result enters. Waits for free ones."""
        if self.free:
            self.pool.wait([errand.job for errand in self.errands])
        return self.errands[0].due
