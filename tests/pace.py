"""Limits in seconds that follow the machine: how much slower than the one they were set on it is at the moment."""

import time

QUIET_S = 0.08  # what the loop below takes of a core of that machine, with nothing else to do


def slowness(clock=time.thread_time):
    """1 or more. By the CPU's time how slow the machine is; by the wall's (`time.monotonic`) also how busy."""
    begun, total = clock(), 0
    for n in range(1_000_000):
        total += n * n
    return max(1.0, (clock() - begun) / QUIET_S)
