"""Being asked to stop: SIGTERM (preemption), Ctrl-C and a terminal that goes away end a run with everything saved."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from marl_jax.rollouts import Progress

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(Exception):
    """The step under way was abandoned because the run was asked to stop."""


class Stop:
    """While open, the first signal sets `asked`; the second does what it always did."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # elsewhere signals are somebody else's
            outlives = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # as nohup asks for
            wanted = (number for number in SIGNALS if not (outlives and number == signal.SIGHUP))
            self._before = {number: signal.signal(number, self._on_signal) for number in wanted}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()

    def check(self) -> None:
        """Give up what is under way, once a stop is asked for."""
        if self.asked:
            raise Stopped

    def watch(self, callback: Callable[[Progress], None]) -> Callable[[Progress], None]:
        """The callback of a rollout, which is given up once a stop is asked for."""

        def progress(done: Progress) -> None:
            self.check()
            callback(done)

        return progress

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._give_back()

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
