"""Warnings that may concern thousands of answers: each kind is logged once a minute at most; answers are counted."""

import collections
import logging
import math
import time

EVERY_S = 60.0

_logged_at: dict[str, float] = {}  # message -> time of its last log entry
_ungraded: collections.deque[None] = collections.deque()  # an entry for each answer


def warn(message: str, *details: object) -> None:
    """Log the message with its details, unless it was logged within the last minute."""
    now = time.monotonic()
    if now - _logged_at.get(message, -math.inf) >= EVERY_S:
        _logged_at[message] = now
        logging.getLogger("marl_jax").warning(message, *details)


def ungraded(message: str, *details: object) -> None:
    """Warn of an answer that earns 0 because it could not be graded, and count it."""
    _ungraded.append(None)
    warn(message, *details)


def newly_ungraded() -> int:
    """The number of answers that could not be graded since the last call of this function."""
    count = len(_ungraded)
    for _ in range(count):
        _ungraded.popleft()
    return count
