"""A pool of zygotes that runs many programs' tests at once, first tests first, so that failing programs leave early.

A program is a list of steps, one per test; its steps run one after the other and stop at the first that fails, so a
verdict does not depend on what else is running. Threads only wait here: the work is in the sandboxed processes.
"""

import atexit
import contextlib
import dataclasses
import itertools
import os
import queue
import resource
import socket
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

from marl_jax import user_cache
from marl_jax.rewards.sandbox.verdicts import Verdict, Verdicts
from marl_jax.rewards.sandbox.worker import SandboxUnavailable, Zygote, ZygoteGone, ZygoteLost
from marl_jax.rewards.warn import warn
from marl_jax.threads import Workers

UNSAFE_FLAG = "MARL_JAX_UNSAFE_CODE"


class Seat:
    """The zygotes of the step that is running: one, or two for code that must not share a process."""

    def __init__(self, open_zygote: Callable[[], Zygote]):
        self._open = open_zygote
        self._zygotes: list[Zygote] = []

    def zygotes(self, count: int) -> list[Zygote]:
        """`count` zygotes, all idle."""
        while len(self._zygotes) < count:
            self._zygotes.append(self._open())
        return self._zygotes[:count]

    def clear(self) -> None:
        """End the zygotes; the next step gets new ones."""
        while self._zygotes:
            self._zygotes.pop().close()

    def forget(self) -> None:
        """Close our ends of the sockets, without a message to the zygotes."""
        for zygote in self._zygotes:
            zygote.control.close()

    def interrupt(self) -> None:
        """Make a running step end with `ZygoteLost`; can be called from any thread."""
        for zygote in list(self._zygotes):
            with contextlib.suppress(OSError):  # the zygote may have ended by itself
                zygote.control.shutdown(socket.SHUT_RDWR)


Step = Callable[[Seat], str | None]  # returns None if the test passed, else why it failed


@dataclasses.dataclass
class _Program:
    steps: Sequence[Step]
    future: "Future[Verdict]"
    at: int = 0  # index of the next step


def _open_more(files: int) -> None:
    """Raise this process's limit of open files, as far as allowed: a seat has ten, and more while it sends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        most = soft + files if hard == resource.RLIM_INFINITY else min(soft + files, hard)
        with contextlib.suppress(OSError, ValueError):  # a Mac has a second limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Pool:
    """Worker threads with their zygotes, as many as there are cores; usable from any thread, closed at exit."""

    def __init__(self, workers: int | None = None):
        workers = user_cache.cores() if workers is None else workers
        if workers < 1:
            raise ValueError(f"workers={workers}: a pool needs at least one")
        _open_more(16 * workers)
        self.verdicts = Verdicts()  # shared by equal submissions
        self._isolated = True
        self._seats = [Seat(lambda: Zygote(self._isolated)) for _ in range(workers)]
        self._open_first()
        self._queue: queue.PriorityQueue[tuple[float, int, _Program | None]] = queue.PriorityQueue()
        self._tickets = itertools.count()
        self._lock = threading.Lock()
        self._closed = False
        threads = Workers("sandbox", workers)
        self._idle = self._seats[::-1]  # taken from the end
        self._loops = [threads.submit(self._work) for _ in self._seats]
        _alive.add(self)

    def submit(self, steps: Sequence[Step]) -> "Future[Verdict]":
        """Run a program's steps in order, up to the first that fails."""
        program = _Program(steps, Future())
        program.future.set_running_or_notify_cancel()  # shared between callers, so no caller may cancel it
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._queue.put((0, next(self._tickets), program))
        return program.future

    def close(self) -> None:
        """End all processes; programs still waiting get an error."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in self._loops:
                self._queue.put((-1, next(self._tickets), None))
        for seat in self._seats:
            seat.interrupt()
        wait(self._loops)
        for seat in self._seats:
            seat.clear()
        while not self._queue.empty():
            _, _, program = self._queue.get()
            if program is not None:
                program.future.set_exception(RuntimeError("the pool was closed"))

    def __len__(self) -> int:
        return len(self._seats)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's zygotes, which only the parent may use."""
        self._closed = True
        for seat in self._seats:
            seat.forget()

    def _open_first(self) -> None:
        """Open a zygote, unisolated if the machine cannot isolate and the flag allows it (`docs/threat-model.md`)."""
        try:
            self._seats[0].zygotes(1)
        except SandboxUnavailable as error:
            if os.environ.get(UNSAFE_FLAG) != "1":
                raise SandboxUnavailable(
                    f"cannot isolate model-written programs here ({error}); "
                    f"{UNSAFE_FLAG}=1 would run them unsafe"
                ) from None
            warnings.warn(f"running model-written programs unsafe: {error}", stacklevel=3)
            self._isolated = False
            self._seats[0].zygotes(1)

    def _work(self) -> None:
        while (program := self._queue.get()[2]) is not None:
            seat = self._idle.pop()  # the seat used last: its zygotes are up
            verdict = self._advance(program, seat)
            self._idle.append(seat)
            if verdict is None:
                self._queue.put((program.at, next(self._tickets), program))
            elif isinstance(verdict, Verdict):
                program.future.set_result(verdict)
            else:
                program.future.set_exception(verdict)

    def _advance(self, program: _Program, seat: Seat) -> Verdict | BaseException | None:
        """Run the program's next test; None if more tests follow."""
        try:
            try:
                failure = program.steps[program.at](seat)
            except ZygoteGone:
                # Killed while it was idle: this process has not begun, so the test is run again.
                if self._closed:  # it was `close` that ended it
                    raise
                seat.clear()
                failure = program.steps[program.at](seat)
        except (ZygoteLost, SandboxUnavailable) as error:
            seat.clear()
            # Logged, because from rewards alone a failing machine looks like failing programs.
            warn("a program lost its sandbox: %s", error)
            return Verdict(False, f"test {program.at}: the sandbox was lost: {error}", lost=True)
        except BaseException as error:
            seat.clear()
            return error
        if failure is not None:
            return Verdict(False, f"test {program.at}: {failure}")
        program.at += 1
        if program.at < len(program.steps):
            return None
        return Verdict(True, f"passed {program.at} of {program.at}")


_alive: "weakref.WeakSet[Pool]" = weakref.WeakSet()
_default: list[Pool] = []
_default_lock = threading.Lock()


def default_pool() -> Pool:
    """The pool of this process, opened at first use."""
    with _default_lock:
        if not _default:
            _default.append(Pool())
        return _default[0]


@atexit.register
def _close_all() -> None:
    for pool in list(_alive):
        pool.close()


def _after_fork() -> None:
    global _default_lock
    _default_lock = threading.Lock()  # its holder may not exist here
    for pool in list(_alive):
        pool.abandon()
    _alive.clear()
    _default.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
