"""Background threads: jobs wait in a queue, threads run them, errors are raised in the caller that waits for a job.

    submit(call) ──► queue ──► a thread ──► Future: its result or its error ──► the waiting caller

The threads are daemons: a run that is stopped does not wait for a tool or a reward service that hangs.
`concurrent.futures.ThreadPoolExecutor` joins its threads when the interpreter ends. For JAX programs that is right,
because a daemon thread that is inside XLA at that moment aborts the process: pools that run them set `finish`.
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

LOOK_S = 0.1  # seconds between two checks for other reasons to end a wait
AT_ONCE = min(32, (os.cpu_count() or 1) + 4)  # threads of `run_parallel`; the default of ThreadPoolExecutor

_T = TypeVar("_T")


class Workers:
    """A pool that runs at most `threads` jobs at a time; jobs submitted by one thread start in their order."""

    def __init__(self, name: str, threads: int = 1, *, finish: bool = False):
        """`finish`: at its end, the interpreter waits for the running jobs."""
        if threads < 1:
            raise ValueError(f"{name} threads are {threads}; at least 1 is needed")
        self._name, self._threads, self._started = name, threads, 0
        self._queue: queue.SimpleQueue[tuple[_Job, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._jobs: set[_Job] = set()  # queued or running
        self._closed, self._finish = False, finish
        # Threads refer to the queue and not to this object, so that they end when it is garbage-collected.
        weakref.finalize(self, self._queue.put, None)

    def submit(self, call: Callable[..., _T], *args: Any, limit_s: float = math.inf) -> "Future[_T]":
        """Queue a call. If it runs for longer than `limit_s`, its future raises a TimeoutError."""
        if self._closed:
            raise RuntimeError(f"the {self._name} threads are closed")
        job = _Job(limit_s)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        if self._finish:  # also if the pool is gone by then, as after a Ctrl-C
            _finishing.add(job)
            job.add_done_callback(_finishing.discard)
        if self._started < self._threads:
            self._started += 1
            self._start()
        self._queue.put((job, functools.partial(call, *args)))
        return job

    def wait(self, jobs: Sequence["Future[Any]"], check: Callable[[], None] = lambda: None) -> None:
        """Wait until one of the jobs is done. `check` is called again and again; an exception in it ends the wait."""
        while not any(job.done() for job in jobs):
            check()
            self.give_up()
            wait_for(jobs, LOOK_S, FIRST_COMPLETED)

    def give_up(self) -> None:
        """Fail the jobs that are past their time limits. A thread cannot be killed, so a new one replaces each."""
        now = time.monotonic()
        for job in list(self._jobs):
            if now >= job.deadline and job.end(error=TimeoutError("over its limit")):
                self._start()

    def close(self, seconds: float | None = 0.0) -> None:
        """Cancel the jobs that have not started, and wait this long for the others; None: without limit."""
        self._closed = True
        for job in list(self._jobs):
            job.cancel()
        self._queue.put(None)
        wait_for(list(self._jobs), seconds)

    def _start(self) -> None:
        threading.Thread(target=_work, args=(self._queue,), name=self._name, daemon=True).start()


def run_parallel(name: str, call: Callable[..., _T], *items: Iterable[Any]) -> list[_T]:
    """The results of parallel calls, each started as soon as its item is available; calls may run JAX programs.

    When this returns, or raises an error of a call or an item, all calls have ended, except after a KeyboardInterrupt.
    """
    workers, wait = Workers(name, AT_ONCE, finish=True), None
    try:
        jobs = [workers.submit(call, *args) for args in zip(*items, strict=True)]
        return [job.result() for job in jobs]
    except KeyboardInterrupt:  # in a run it is the second Ctrl-C, so do not wait
        wait = 0.0
        raise
    finally:
        workers.close(wait)


def join_all(seconds: float | None = None) -> bool:
    """Cancel what pools with `finish` have not started; returns whether the running jobs end in time (None: any)."""
    jobs = list(_finishing)
    for job in jobs:
        job.cancel()
    return not wait_for(jobs, seconds).not_done


class _Job(Future[Any]):
    """A call in the queue and its future."""

    def __init__(self, limit_s: float):
        super().__init__()
        self._limit_s = min(limit_s, threading.TIMEOUT_MAX)
        self.deadline = math.inf  # set when it starts: time in the queue does not count

    def run(self, call: Callable[[], Any]) -> bool:
        """Run the call; False if the job was ended meanwhile, so that this thread was replaced and must end."""
        if not self.set_running_or_notify_cancel():
            return True
        self.deadline = time.monotonic() + self._limit_s
        try:
            result = call()
        except BaseException as error:  # also a SystemExit: it is raised in the caller that waits for the job
            return self.end(error=error)
        if time.monotonic() >= self.deadline:  # also if `give_up` has not been called since
            return self.end(error=TimeoutError("over its limit"))
        return self.end(result)

    def end(self, result: Any = None, error: BaseException | None = None) -> bool:
        """Set the result or the error; False if the job had already ended."""
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
        if not job.run(call):
            return
        del item, job, call  # so that an idle thread keeps no result alive
    jobs.put(None)  # for the next thread


_finishing: set[_Job] = set()  # jobs that the interpreter waits for


# As `concurrent.futures` does. `atexit` would be too late: if JAX is imported after this, its clean-up runs first.
threading._register_atexit(join_all)  # type: ignore[attr-defined]
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_finishing.clear)  # threads do not exist in a forked child
