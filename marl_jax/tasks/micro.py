"""Endless procedural problems, for models of 0.1 to 2 million parameters.

    split of a problem = sha256(key of the problem) mod 10:  0 test, 1 val, 2..9 train (keys marked `taught`: train)

So the splits are disjoint for every seed, level and size. A stream is a pure function of (seed, split, levels); it
repeats problems, often in levels that have few.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from types import ModuleType

from marl_jax.fields import nearest
from marl_jax.task import Task
from marl_jax.tasks import micro_code, micro_math
from marl_jax.tasks.row_files import DataError

KINDS = {"micro_math": micro_math, "micro_code": micro_code}
_SPLITS = ("test", "val", *["train"] * 8)


def stream(kind: str, split: str, *, seed: int = 0, levels: Sequence[int] = (1, 2, 3)) -> Iterator[Task]:
    """An endless stream of problems of one split, all levels equally often."""
    if kind not in KINDS:
        raise DataError(f"there is no procedural data {kind!r}{nearest(kind, KINDS)}")
    module = KINDS[kind]
    if split not in _SPLITS:
        raise DataError(f"{kind} has the splits train, val and test, not {split!r}")
    if not levels or not set(levels) <= set(module.LEVELS):
        raise DataError(f"{kind} has the levels {', '.join(map(str, module.LEVELS))}, not {tuple(levels)}")
    rng = random.Random(f"{kind} {split} {seed}")
    while True:
        for level in levels:
            yield module.draw(rng, level, lambda key: split_of(key) == split)


def take(
    kind: str, split: str, size: int, *, seed: int = 0, levels: Sequence[int] = (1, 2, 3)
) -> Iterator[Task]:
    """The first `size` distinct problems of the stream."""
    seen: set[str] = set()
    repeats = since_new = 0  # repeated problems, in total and since the last new one
    for task in stream(kind, split, seed=seed, levels=levels):
        if len(seen) == size:
            return
        if task.id in seen:
            repeats, since_new = repeats + 1, since_new + 1
            if repeats > 4 * size + 1000 or since_new > 4 * len(seen) + 1000:
                raise DataError(
                    f"{kind} {split}: levels {tuple(levels)} have too few different problems for {size}: lower "
                    f"data.{split}_size"
                )
            continue
        since_new = 0
        seen.add(task.id)
        yield task


def split_of(key: str) -> str:
    """The split of the problems with this key."""
    if key.startswith("taught "):
        return "train"
    return _SPLITS[int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % 10]


def solution(task: Task, strategy: str | None = None) -> str:
    """A right worked answer by one of `strategies(task)`, by default the first."""
    return _module(task).solution(task, strategy or strategies(task)[0])


def mistake(task: Task, seed: int, strategy: str | None = None) -> str:
    """A plausible wrong worked answer, a pure function of (task, seed, strategy); the default strategy is random."""
    return _module(task).mistake(task, random.Random(f"{task.id} {seed}"), strategy)


def strategies(task: Task) -> tuple[str, ...]:
    """The names of the ways to solve the problem."""
    return _module(task).STRATEGIES


def _module(task: Task) -> ModuleType:
    kind = task.id.partition("/")[0]
    if kind not in KINDS:
        raise ValueError(f"task {task.id!r} is no micro task: worked answers exist for {', '.join(KINDS)}")
    return KINDS[kind]
