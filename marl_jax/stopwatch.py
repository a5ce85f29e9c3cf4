"""Seconds spent in each part of an object's work: engines and learners count them, and a run reads them.

    with watch("decode"): ...          watch.seconds == {"decode": 1.5}

Only time during which the caller waits anyway is counted: timing never waits for a program.
"""

import contextlib
import time
from collections.abc import Iterator


class Stopwatch:
    """Seconds by part; parts are not nested."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - began
