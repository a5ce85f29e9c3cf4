"""Seconds by part of what an object does: engines and learners count them, and the clock of a run reads them.

    with watch("decode"): ...          watch.seconds == {"decode": 1.5}

Only time that the caller spends is counted, where it waits anyway: no program is waited for that would not be.
"""

import contextlib
import time
from collections.abc import Iterator

__all__ = ["Stopwatch"]


class Stopwatch:
    """Parts that are never inside one another."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - began
