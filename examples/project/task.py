"""Sums of two-digit numbers that carry."""

import random

from marl_jax.tasks import Task

SPLITS = {"test": slice(0, 256), "val": slice(256, 512), "train": slice(512, None)}


def carries(split):
    """The problems of a split: train, val or test."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100) if a % 10 + b % 10 > 9]
    random.Random(0).shuffle(pairs)
    return [Task(f"carries/{a}+{b}", "math", f"{a}+{b}=?", gold=str(a + b)) for a, b in pairs[SPLITS[split]]]
