"""A data set of one's own: sums of two-digit numbers that carry, answered by one generator.

python -m examples.own_task [WORKDIR] [--config.steps=200 ...]
"""

import random

from marl_jax.commands import cli
from marl_jax.tasks import Task

SPLITS = {"test": slice(0, 256), "val": slice(256, 512), "train": slice(512, None)}


def carries(split):
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100) if a % 10 + b % 10 > 9]
    random.Random(0).shuffle(pairs)
    return [Task(f"carries/{a}+{b}", "math", f"{a}+{b}=?", gold=str(a + b)) for a, b in pairs[SPLITS[split]]]


if __name__ == "__main__":
    cli.train(
        "runs/own_task",
        "--config=configs/micro.py:single-shared-s-math",
        "--config.data.name=__main__:carries",
        "--config.cell=carries",
        "--config.steps=50",
        "--config.data.problems=16",
    )
