"""Work beside the main thread: jobs in a queue, threads that do them, errors raised where a job is waited for.

    submit(call) ──► queue ──► a thread ──► Future: its result or its error ──► the waiting caller

The threads are daemons: a run that is stopped does not wait for a tool or a reward service that hangs.
`concurrent.futures.ThreadPoolExecutor` joins its threads when the interpreter ends. For programs of JAX that is
right, because a daemon thread that is inside XLA at that moment aborts the process: their pools set `finish`.
"""

import functools
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError
from concurrent.futures import wait as wait_for
from typing import Any, TypeVar

LOOK_S = 0.1  # between two checks of what else may end a wait
AT_ONCE = min(32, (os.cpu_count() or 1) + 4)  # calls of `side_by_side`: as a ThreadPoolExecutor has

_T = TypeVar("_T")


class Workers:
    """At most `threads` jobs at a time, started in the order in which one thread submits them."""

    def __init__(self, name: str, threads: int = 1, *, finish: bool = False):
        """`finish`: the interpreter does not end before the jobs under way have."""
        if threads < 1:
            raise ValueError(f"{name} threads are {threads}; at least 1 is needed")
        self._name, self._threads, self._started = name, threads, 0
        self._queue: queue.SimpleQueue[tuple[_Job, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._jobs: set[_Job] = set()  # not done yet
        self._closed = False
        # Threads refer to the queue and not to this object, so that they end when it is collected.
        weakref.finalize(self, self._queue.put, None)
        if finish:
            _finishing.add(self)

    def submit(self, call: Callable[..., _T], *args: Any, limit_s: float = math.inf) -> "Future[_T]":
        """Queue a call. One that takes longer than `limit_s`, from when it starts, ends in a TimeoutError."""
        if self._closed:
            raise RuntimeError(f"the {self._name} threads are closed")
        job = _Job(limit_s)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        if self._started < self._threads:
            self._started += 1
            self._start()
        self._queue.put((job, functools.partial(call, *args)))
        return job

    def wait(self, jobs: Sequence["Future[Any]"], check: Callable[[], None] = lambda: None) -> None:
        """Until one of the jobs is done. `check` is called meanwhile; an exception in it ends the wait."""
        while not any(job.done() for job in jobs):
            check()
            self.give_up()
            wait_for(jobs, LOOK_S, FIRST_COMPLETED)

    def give_up(self) -> None:
        """End the jobs that are past their limits. A thread cannot be killed: a fresh one takes its place."""
        now = time.monotonic()
        for job in list(self._jobs):
            if now >= job.deadline and job.end(error=TimeoutError("over its limit")):
                self._start()

    def close(self, seconds: float | None = 0.0) -> None:
        """Cancel the jobs that have not started, and wait so long for the others; None: without limit."""
        self._closed = True
        for job in list(self._jobs):
            job.cancel()
        self._queue.put(None)
        wait_for(list(self._jobs), seconds)

    def _start(self) -> None:
        threading.Thread(target=_work, args=(self._queue,), name=self._name, daemon=True).start()


def side_by_side(name: str, call: Callable[..., _T], *items: Iterable[Any]) -> list[_T]:
    """The results of `call` for the items, each begun as soon as its item is there; for programs of JAX, too.

    No call is under way any more when this returns, or raises the error of a call or an item; but for an interruption.
    """
    workers, wait = Workers(name, AT_ONCE, finish=True), None
    try:
        jobs = [workers.submit(call, *some) for some in zip(*items, strict=True)]
        return [job.result() for job in jobs]
    except KeyboardInterrupt:  # whoever asks twice does not wait
        wait = 0.0
        raise
    finally:
        workers.close(wait)


class _Job(Future[Any]):
    """A call in the queue and its future."""

    def __init__(self, limit_s: float):
        super().__init__()
        self._limit_s = min(limit_s, threading.TIMEOUT_MAX)
        self.deadline = math.inf  # set when it starts: waiting in the queue costs no time

    def do(self, call: Callable[[], Any]) -> bool:
        """Run the call; False if the job was given up meanwhile, so that this thread must end."""
        if not self.set_running_or_notify_cancel():
            return True
        self.deadline = time.monotonic() + self._limit_s
        try:
            result = call()
        except BaseException as error:  # a SystemExit, too, is raised where the job is waited for
            return self.end(error=error)
        if time.monotonic() >= self.deadline:  # whether or not the limit was checked by then
            return self.end(error=TimeoutError("over its limit"))
        return self.end(result)

    def end(self, result: Any = None, error: BaseException | None = None) -> bool:
        """Whether this ended it; it may have ended before."""
        try:
            if error is None:
                self.set_result(result)
            else:
                self.set_exception(error)
        except InvalidStateError:
            return False
        return True


def _work(jobs: "queue.SimpleQueue[tuple[_Job, Callable[[], Any]] | None]") -> None:
    while (item := jobs.get()) is not None:
        job, call = item
        if not job.do(call):
            return
        del item, job, call  # an idle thread keeps no result alive
    jobs.put(None)  # for the next thread


_finishing: "weakref.WeakSet[Workers]" = weakref.WeakSet()


def ended(seconds: float) -> bool:
    """Cancel what pools with `finish` have not begun; whether their jobs under way end within so many seconds."""
    jobs = [job for workers in list(_finishing) for job in list(workers._jobs)]
    for job in jobs:
        job.cancel()
    return not wait_for(jobs, seconds).not_done


def _finish() -> None:
    for workers in list(_finishing):
        workers.close(None)


# As `concurrent.futures` does; `atexit` would be too late where JAX, which cleans up there, was imported after this.
threading._register_atexit(_finish)  # type: ignore[attr-defined]
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_finishing.clear)  # threads do not exist in a forked child
