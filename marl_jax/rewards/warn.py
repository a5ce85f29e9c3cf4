"""Warnings that may concern thousands of answers: each kind is logged at most once a minute."""

import logging
import math
import time

__all__ = ["warn"]

EVERY_S = 60.0

_said: dict[str, float] = {}  # message -> when


def warn(message: str, *details: object) -> None:
    """Log the message with its details, unless it was logged within the last minute."""
    now = time.monotonic()
    if now - _said.get(message, -math.inf) >= EVERY_S:
        _said[message] = now
        logging.getLogger("marl_jax").warning(message, *details)
