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
TOGETHER_S = 0.25  # signals within this time after the first are the same request


class Stopped(Exception):
    """The step under way was abandoned because a stop was requested."""

    gives_way = True  # to the error of another process of the same run


class Stop:
    """While open, the first signal sets `asked`; a later one has its usual effect.

    Whoever ends a process often asks twice at once: a shell and the kernel when a terminal closes, systemd by SIGTERM
    and SIGHUP. A signal within TOGETHER_S of the first is the same request.

    The main thread cannot handle a request while XLA compiles. With `patience`, it has that many seconds; then
    `farewell` is called on another thread, and if it succeeds, the process ends with exit code 0. It may take
    long to save: a third thread receives signals meanwhile.
    """

    def __init__(self, patience: float | None = None, heard: Callable[[], object] = lambda: None) -> None:
        """`heard` is called in the first signal's handler."""
        self.asked, self._heard = False, heard
        self.farewell: Callable[[], None] = lambda: None
        self.patience = patience
        self._handled = threading.Event()
        self._leaving = threading.Lock()
        self._asked_at = math.inf  # time of the first request
        self._before: dict[int, Any] = {}
        self._wakeup: tuple[int, socket.socket] | None = None  # wake-up descriptor before, and now

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # other threads leave signals alone
            outlives = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # as set by nohup
            numbers = (number for number in SIGNALS if not (outlives and number == signal.SIGHUP))
            if self.patience is not None:
                self._set_wakeup()
            self._before = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore_handlers()
        with self._leaving:
            self._handled.set()
        if self._wakeup is not None:
            before, writer = self._wakeup
            signal.set_wakeup_fd(before)
            writer.close()
            self._wakeup = None

    def requested(self) -> bool:
        """Whether a stop is requested; if so, the main thread handles it from here on."""
        if self.asked and threading.current_thread() is threading.main_thread():
            with self._leaving:  # waits while another thread ends the process
                self._handled.set()
        return self.asked

    def check(self) -> None:
        """Raise `Stopped` once a stop is requested."""
        if self.requested():
            raise Stopped

    def requested_of_any(self) -> bool:
        """Whether a stop is requested of any process of the run; all of them call this."""
        if not hosts.any_of(self.requested()):
            return False  # a request that arrived meanwhile counts at the next check, on all processes alike
        self.request()
        return self.requested()

    def check_together(self) -> None:
        """Raise `Stopped` once a stop is requested of one of the processes; all call it."""
        if self.requested_of_any():
            raise Stopped

    def request(self) -> None:
        """Note that a stop was requested of another process of the run."""
        self.asked = True

    def watch(self, callback: Callable[[Progress], None]) -> Callable[[Progress], None]:
        """The callback of a rollout, which also raises `Stopped` once a stop is requested."""

        def checked(progress: Progress) -> None:
            self.check()
            callback(progress)

        return checked

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked_at < math.inf:
            if time.monotonic() >= self._asked_at + TOGETHER_S:
                self._restore_handlers()
                signal.raise_signal(number)
                # The first process of a container does not die of a signal without a handler.
                if signal.getsignal(number) is signal.SIG_DFL:
                    os._exit(128 + number)
            return
        self._asked_at = time.monotonic()
        self.asked = True
        self._heard()
        hosts.request_stop()

    def _restore_handlers(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _set_wakeup(self) -> None:
        """Have signals wake a thread at once: handlers written in Python wait for the main thread."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._wakeup = before, writer
        self._workers = Workers("stop", 2)
        self._workers.submit(self._receive, reader)

    def _receive(self, reader: socket.socket) -> None:
        """End the process if the main thread does not handle a signal."""
        with reader:
            received, patience = _next_signal(reader, None), self.patience
            began = time.monotonic()
            while received != 0:
                received = _next_signal(reader, patience)
                if self._handled.is_set():
                    patience = None  # reads on: a signal that cannot be written makes Python print an error
                    continue
                # A second signal while the main thread has handled neither.
                if received and not self.asked and time.monotonic() >= began + TOGETHER_S:
                    os._exit(128 + received)
                if received is None:
                    self._workers.submit(self._leave)
                    patience = None

    def _leave(self) -> None:
        with self._leaving:
            if self._handled.is_set():
                return
            try:
                self.farewell()
            except Exception as error:  # such as when the running step has donated weights
                print(f"the step under way is finished first ({error})", file=sys.stderr, flush=True)
            else:
                os._exit(0)


def _next_signal(reader: socket.socket, patience: float | None) -> int | None:
    """The next of `SIGNALS`; 0 if the socket was closed, None if there was none for `patience` seconds."""
    reader.settimeout(patience)
    try:
        while (received := reader.recv(1)) and received[0] not in SIGNALS:
            pass
    except TimeoutError:
        return None
    return received[0] if received else 0
