"""The pool of math workers in the parent process: started when first needed, replaced when they die, ended at exit.

Any thread may compare. It waits for a free worker and sends one line; a worker that stays silent `LATE_LIMIT_S` after
its time is killed. Nothing is forked from this process, which may have loaded JAX. Workers start in the background, and
no thread waits for a start while another worker is up. The first question's wait for the start counts against its time
limit, but leaves it `AFTER_START_S`: enough for ordinary algebra, however slow the start was.
"""

import atexit
import contextlib
import functools
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from marl_jax import user_cache
from marl_jax.rewards.math.expressions import Tree
from marl_jax.threads import Workers

START_LIMIT_S = 120.0  # loading the library on a slow disk is no verdict about an answer
AFTER_START_S = 0.5  # part of its time limit that a question keeps while no worker is up
MAX_WORKERS = 4
LATE_LIMIT_S = 5.0  # a worker that is silent this much longer hangs; on a busy machine it may merely be late
# Attempts at a question whose workers die: all idle ones may have been killed from outside, which is no verdict.
TRIES = MAX_WORKERS + 2

_WORKER = Path(__file__).with_name("math_worker.py")  # run by its path, because its package loads much else


class WorkerDied(Exception):
    """The worker ended before it answered."""


class Verdict(NamedTuple):
    """A worker's verdict on two expressions, and its cost."""

    same: bool | None  # None if the time ran out or the worker died, which says nothing about the answer
    cpu_s: float  # spent on algebra
    wall_s: float  # the part of the given limit that was spent


def equal(answer: Tree, gold: Tree, cpu_s: float, wall_s: float) -> Verdict:
    """Whether two expressions are equal by algebra; not equal if that takes more than `cpu_s` of work.

    Waiting for a free worker counts against `wall_s`. A worker that dies or hangs is replaced; if it died, the
    question is asked again.
    """
    return _pool.equal(answer, gold, cpu_s, wall_s)


def start() -> None:
    """Start the workers now, so that the first question need not wait for them."""
    _pool.start()


def ask(compare: Callable[..., bool], *texts: str) -> "Future[bool]":
    """Compare on a thread. As many comparisons run at a time as there are workers; the others wait in a queue."""
    return _pool.askers.submit(compare, *texts)


def close() -> None:
    """End every worker; a later question starts new ones."""
    _pool.close()


class _Worker:
    """One worker process, and the pipe to it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            bufsize=0,
        )
        self.ready = False
        self._received = b""  # the part of the awaited reply that has come

    def wait_until_ready(self) -> None:
        self.ready = self.reply(START_LIMIT_S) == b"ready\n"
        if not self.ready:
            raise WorkerDied

    def ask(self, question: list, limit_s: float) -> tuple[bool | None, float]:
        """The verdict and the CPU time that it took. After a TimeoutError the reply is still to come."""
        line = json.dumps([*question, 0.9 * limit_s], default=_wire).encode() + b"\n"
        try:
            self.process.stdin.write(line)  # type: ignore[union-attr]
        except OSError as error:
            raise WorkerDied from error
        verdict, cpu_s = self.reply(limit_s).split()
        return {b"1": True, b"0": False}.get(verdict), float(cpu_s)

    def reply(self, limit_s: float) -> bytes:
        pipe = self.process.stdout
        assert pipe is not None
        poll, deadline = select.poll(), time.monotonic() + limit_s
        poll.register(pipe, select.POLLIN)
        while not self._received.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            if not (part := pipe.read(64)):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(1.0)  # its end follows that of its pipe, and says why
                raise WorkerDied
            self._received += part
        reply, self._received = self._received, b""
        return reply

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class _Pool:
    def __init__(self) -> None:
        self.size = min(MAX_WORKERS, user_cache.cores())
        self.askers = Workers("math-answer", self.size)
        self.waiters = Workers("math-worker", self.size)  # one thread for each worker that starts or is late
        self.changed = threading.Condition()
        self.idle: list[_Worker] = []
        self.all: set[_Worker] = set()  # including those that start and those that are late
        self.failure: RuntimeError | None = None  # why the latest start failed
        self.killed = 0  # starts in a row that a signal ended

    def start(self) -> None:
        with self.changed:
            for _ in range(self.size - len(self.all)):
                self._start_one()

    def equal(self, answer: Tree, gold: Tree, cpu_s: float, wall_s: float) -> Verdict:
        left_s = wall_s
        for _ in range(TRIES):
            worker, waited_s = self._take(left_s)
            left_s -= waited_s
            if worker is None:
                break
            begun = time.monotonic()
            try:
                same, spent_s = worker.ask([answer, gold, cpu_s], left_s)
            except WorkerDied:
                self._drop(worker)
                left_s -= time.monotonic() - begun
            except TimeoutError:
                self._wait_for(worker, functools.partial(worker.reply, LATE_LIMIT_S))
                left_s = 0.0
                break
            except BaseException:  # an interrupted exchange cannot be resumed
                self._drop(worker)
                raise
            else:
                self._give_back(worker)
                return Verdict(same, spent_s, wall_s - left_s + time.monotonic() - begun)
        return Verdict(None, 0.0, wall_s - left_s)

    def _take(self, limit_s: float) -> tuple[_Worker | None, float]:
        """A ready worker, or None if none was free in time; and the seconds of the limit that were spent."""
        waited_s = 0.0
        with self.changed:
            for worker in [it for it in self.idle if it.process.poll() is not None]:  # killed from outside
                self.idle.remove(worker)
                self._drop(worker)
            if not self.idle and len(self.all) < self.size:
                self._start_one()
            while not self.idle:
                if waited_s >= limit_s:
                    return None, waited_s
                if not self.all:
                    if self.failure is not None:
                        raise self.failure
                    self._start_one()  # the others died or were closed
                begun, left_s = time.monotonic(), limit_s - waited_s
                kept_s = 0.0 if any(worker.ready for worker in self.all) else min(left_s, AFTER_START_S)
                self.changed.wait(left_s)
                waited_s += min(time.monotonic() - begun, left_s - kept_s)
            return self.idle.pop(), waited_s

    def _start_one(self) -> None:
        self.failure = None
        try:
            worker = _Worker()
        except OSError as error:
            self.failure = RuntimeError(f"no math worker could be started: {error}")
        else:
            self.all.add(worker)
            self._wait_for(worker, worker.wait_until_ready)

    def _wait_for(self, worker: _Worker, wait: Callable[[], object]) -> None:
        """Call `wait` in the background to read the worker's answer, then give the worker back, or else end it."""

        def finish() -> None:
            try:
                wait()
            except (WorkerDied, TimeoutError, OSError, ValueError):  # the last two: it was closed meanwhile
                self._drop(worker)
            else:
                self.killed = 0
                self._give_back(worker)

        self.waiters.submit(finish)

    def close(self) -> None:
        with self.changed:
            workers, self.all, self.idle = self.all, set(), []
            self.changed.notify_all()
        for worker in workers:
            worker.kill()

    def _give_back(self, worker: _Worker) -> None:
        with self.changed:
            if worker in self.all:  # else the pool was closed
                self.idle.append(worker)
                self.changed.notify()

    def _drop(self, worker: _Worker) -> None:
        killed = (worker.process.poll() or 0) < 0  # from outside, for memory perhaps: another one may start
        worker.kill()
        with self.changed:
            if not worker.ready:
                self.killed = self.killed + 1 if killed else 0
            if worker in self.all and not worker.ready and not 0 < self.killed < TRIES:
                self.failure = RuntimeError(
                    f"the math worker did not start (exit status {worker.process.returncode}): "
                    f"run `{sys.executable} -m marl_jax.rewards.math.math_worker` to see why"
                )
            self.all.discard(worker)
            self.changed.notify_all()


def _wire(number: Fraction) -> str:
    """A number as JSON: hexadecimal, since decimal digits are limited."""
    return f"{number.numerator:x}/{number.denominator:x}"


def _forget() -> None:
    """A forked copy of this process must not talk to its parent's workers."""
    global _pool
    _pool = _Pool()


_pool = _Pool()
atexit.register(close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
