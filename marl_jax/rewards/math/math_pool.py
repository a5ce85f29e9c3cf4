"""The math worker in the parent process: started when first needed, replaced when it dies, ended at exit.

    equal ──► a place, as many as there are cores ──► a line to the worker ──► a thread reads its reply ──► Verdict

Any thread may compare. If a reply is `LATE_LIMIT_S` late, the worker hangs: it is killed, and another one answers what
it was asked. Nothing is forked from this process, which may have loaded JAX. The wait for the worker's start counts
against a question's time limit, but leaves it `AFTER_START_S`: enough for ordinary algebra, however slow the start was.
"""

import atexit
import itertools
import json
import math
import os
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
AFTER_START_S = 0.5  # part of its time limit that a question keeps while the worker starts
MAX_AT_ONCE = 4  # comparisons
LATE_LIMIT_S = 5.0  # a worker that is silent this much longer hangs; on a busy machine it may merely be late
TRIES = (
    3  # attempts at a question whose worker dies: it may have been killed from outside, which is no verdict
)

_WORKER = Path(__file__).with_name("math_worker.py")  # run by its path, because its package loads much else
_READY = 0  # the first ticket: the worker replies when it is up


class WorkerDied(Exception):
    """The worker ended before it answered."""


class Verdict(NamedTuple):
    """The worker's verdict on two expressions, and its cost."""

    same: bool | None  # None if the time ran out or the worker died, which says nothing about the answer
    cpu_s: float  # spent on algebra
    wall_s: float  # the part of the given limit that was spent


class _Worker:
    """The worker process, and the replies that are to come."""

    def __init__(self) -> None:
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONHASHSEED": "0"},
                bufsize=0,
            )
        except OSError as error:
            raise RuntimeError(f"no math worker could be started: {error}") from error
        self.tickets, self.writing = itertools.count(_READY + 1), threading.Lock()
        self.ready: Future[tuple] = Future()
        self.awaited = {_READY: (self.ready, math.inf)}  # ticket -> (reply, when the worker hangs without it)
        threading.Thread(target=self._listen, name="math-worker", daemon=True).start()

    def wait_until_up(self) -> None:
        try:
            self.ready.result(START_LIMIT_S)
        except TimeoutError:
            self.process.kill()
            self.ready.result()  # raises the error of a worker that did not start

    def ask(self, question: list, limit_s: float) -> tuple[bool | None, float]:
        """The verdict and the CPU time that it took."""
        ticket, reply = next(self.tickets), Future[tuple]()
        self.awaited[ticket] = reply, time.monotonic() + limit_s + LATE_LIMIT_S
        line = json.dumps([ticket, *question, 0.9 * limit_s], default=_wire).encode() + b"\n"
        try:
            with self.writing:
                self.process.stdin.write(line)  # type: ignore[union-attr]
        except (OSError, ValueError) as error:  # it ended; `_listen` may have closed the pipe
            raise WorkerDied from error
        return reply.result(limit_s)

    def is_lost(self) -> bool:
        """Whether it has ended or hangs."""
        return self.process.poll() is not None or any(
            time.monotonic() > latest for _, latest in list(self.awaited.values())
        )

    def _listen(self) -> None:
        with self.process:
            for line in self.process.stdout:  # type: ignore[union-attr]
                ticket, verdict, cpu_s = line.split()
                reply, _ = self.awaited.pop(int(ticket))
                reply.set_result(({b"1": True, b"0": False}.get(verdict), float(cpu_s)))
        if self.awaited.pop(_READY, None):
            self.ready.set_exception(
                RuntimeError(
                    f"the math worker did not start (exit status {self.process.returncode}): "
                    f"run `{sys.executable} -m marl_jax.rewards.math.math_worker` to see why"
                )
            )
        for reply, _ in list(self.awaited.values()):
            reply.set_exception(WorkerDied())


class _Pool:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin without a worker: a forked copy of this process must not talk to its parent's."""
        size = min(MAX_AT_ONCE, user_cache.cores())
        self.askers, self.places = Workers("math-answer", size), threading.Semaphore(size)
        self.worker: _Worker | None = None
        self.changing = threading.Lock()

    def start(self) -> _Worker:
        """The worker, which may still start; called ahead, so that the first question need not wait for it."""
        with self.changing:
            if self.worker is not None and self.worker.is_lost():
                self.worker.process.kill()
                self.worker = None
            self.worker = self.worker or _Worker()
            return self.worker

    def close(self) -> None:
        """End the worker; a later question starts a new one."""
        with self.changing:
            worker, self.worker = self.worker, None
        if worker is not None:
            worker.process.kill()
            worker.process.wait()

    def ask(self, compare: Callable[..., bool], *texts: str) -> "Future[bool]":
        """Compare on a thread. As many comparisons run at a time as there are places; the others wait in a queue."""
        return self.askers.submit(compare, *texts)

    def equal(self, answer: Tree, gold: Tree, cpu_s: float, wall_s: float) -> Verdict:
        """Whether two expressions are equal by algebra; not equal if that takes more than `cpu_s` of work.

        Waiting for a place counts against `wall_s`. A question is asked again if the worker dies or hangs.
        """
        left_s, same, spent_s = wall_s, None, 0.0
        for _ in range(TRIES):
            worker, begun = self.start(), time.monotonic()
            worker.wait_until_up()
            left_s -= min(time.monotonic() - begun, max(left_s - AFTER_START_S, 0.0))
            begun = time.monotonic()
            if self.places.acquire(timeout=max(left_s, 0.0)):
                try:
                    same, spent_s = worker.ask([answer, gold, cpu_s], left_s - (time.monotonic() - begun))
                except WorkerDied:
                    continue
                except TimeoutError:
                    pass
                finally:
                    self.places.release()
                    left_s -= time.monotonic() - begun
            break
        return Verdict(same, spent_s, wall_s - left_s)


def _wire(number: Fraction) -> str:
    """A number as JSON: hexadecimal, since decimal digits are limited."""
    return f"{number.numerator:x}/{number.denominator:x}"


_pool = _Pool()
start, close, ask, equal = _pool.start, _pool.close, _pool.ask, _pool.equal
atexit.register(close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.reset)
