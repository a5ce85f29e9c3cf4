"""Requests to stop: SIGTERM (preemption), Ctrl-C and a terminal that goes away end a run with everything saved."""

import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from marl_jax import hosts
from marl_jax.rollouts import Progress
from marl_jax.threads import Workers

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TOGETHER_S = 0.25  # signals that come so soon after the first are the same request


class Stopped(Exception):
    """The step under way was abandoned because a stop was requested."""

    gives_way = True  # to the error of another process, where several share the run


class Stop:
    """While open, the first signal sets `asked`; a later one has its usual effect.

    Whoever ends a process often asks twice at once: a shell and the kernel when a terminal closes, systemd by SIGTERM
    and SIGHUP. What comes within TOGETHER_S of the first is the same request.

    The main thread cannot heed it while XLA compiles. With `patience`, that is waited for so many seconds; then
    `farewell` is called on another thread, and where it succeeds, the process ends with exit code 0. It may take its
    time to save: a third thread hears signals meanwhile.
    """

    def __init__(self, patience: float | None = None, heard: Callable[[], object] = lambda: None) -> None:
        """`heard` is called in the first signal's handler."""
        self.asked, self._heard = False, heard
        self.farewell: Callable[[], None] = lambda: None
        self.patience = patience
        self._heeded = threading.Event()
        self._leaving = threading.Lock()
        self._began = math.inf  # when it was asked for
        self._before: dict[int, Any] = {}
        self._alarm: tuple[int, socket.socket] | None = None  # wake-up descriptor before, and now

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # elsewhere signals are somebody else's
            outlives = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # as set by nohup
            wanted = (number for number in SIGNALS if not (outlives and number == signal.SIGHUP))
            if self.patience is not None:
                self._set_alarm()
            self._before = {number: signal.signal(number, self._on_signal) for number in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()
        with self._leaving:
            self._heeded.set()
        if self._alarm is not None:
            before, writer = self._alarm
            signal.set_wakeup_fd(before)
            writer.close()
            self._alarm = None

    def heed(self) -> bool:
        """Whether a stop is requested, which the main thread handles from here on."""
        if self.asked and threading.current_thread() is threading.main_thread():
            with self._leaving:  # for good, where the process is ending already
                self._heeded.set()
        return self.asked

    def check(self) -> None:
        """Raise `Stopped` once a stop is requested."""
        if self.heed():
            raise Stopped

    def heed_together(self) -> bool:
        """The same of all processes that share the run, which all call it."""
        self.asked = hosts.any_of(self.heed())
        return self.heed()

    def check_together(self) -> None:
        """Raise `Stopped` once a stop is requested of one of the processes; all call it."""
        if self.heed_together():
            raise Stopped

    def hear(self) -> None:
        """A stop was requested of another process of the run."""
        self.asked = True

    def watch(self, callback: Callable[[Progress], None]) -> Callable[[Progress], None]:
        """The callback of a rollout; it raises once a stop is requested."""

        def progress(done: Progress) -> None:
            self.check()
            callback(done)

        return progress

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._began < math.inf:
            if time.monotonic() >= self._began + TOGETHER_S:
                self._give_back()
                signal.raise_signal(number)
                # The first process of a container does not die of a signal without a handler.
                if signal.getsignal(number) is signal.SIG_DFL:
                    os._exit(128 + number)
            return
        self._began = time.monotonic()
        self.asked = True
        self._heard()
        hosts.tell_stop()

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _set_alarm(self) -> None:
        """Have signals wake a thread at once: handlers written in Python wait for the main thread."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._alarm = before, writer
        self._workers = Workers("stop", 2)
        self._workers.submit(self._hear_all, reader)

    def _hear_all(self, reader: socket.socket) -> None:
        """Have the process end in the place of a main thread that does not end it."""
        with reader:
            heard, patience = _hear(reader, None), self.patience
            began = time.monotonic()
            while heard != 0:
                heard = _hear(reader, patience)
                if self._heeded.is_set():
                    return
                # A second signal while the main thread has handled neither.
                if heard and not self.asked and time.monotonic() >= began + TOGETHER_S:
                    os._exit(128 + heard)
                if heard is None:
                    self._workers.submit(self._leave)
                    patience = None

    def _leave(self) -> None:
        with self._leaving:
            if self._heeded.is_set():
                return
            try:
                self.farewell()
            except Exception as error:  # such as when the running step has donated weights
                print(f"the step under way is finished first ({error})", file=sys.stderr, flush=True)
            else:
                os._exit(0)


def _hear(reader: socket.socket, patience: float | None) -> int | None:
    """The next of the signals; 0 when there will be none, None when there was none for so many seconds."""
    reader.settimeout(patience)
    try:
        while (heard := reader.recv(1)) and heard[0] not in SIGNALS:
            pass
    except TimeoutError:
        return None
    return heard[0] if heard else 0
