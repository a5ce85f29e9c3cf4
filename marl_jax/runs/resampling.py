"""Dynamic sampling: problems whose episodes teach nothing are sampled again, a bounded number of times.

    draw every problem -> keep those with an advantage that is not 0 -> draw the others anew -> ... -> at most `draws`

A new draw has new sample numbers, so new noise, and takes the old one's place: every problem keeps its number of
episodes, and batches their shapes.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from marl_jax.learning.worth import AdvantageConfig, Presets, with_advantages
from marl_jax.table import Table
from marl_jax.task import Task

__all__ = ["ResampleCounts", "resample"]

Sample = Callable[[Sequence[Task], int], Table]  # (tasks, first_sample), as `rollout` takes them
Reward = Callable[[Table], Table]  # adds the column reward


@dataclasses.dataclass(frozen=True)
class ResampleCounts:
    """What dynamic sampling did."""

    problems: int
    flat: int  # problems that taught nothing in the first draw
    rescued: int  # of those, the ones that did in a later one
    draws: int  # rounds of sampling, the first included
    episodes: int  # sampled over all rounds; those of the result are fewer
    first_reward: float  # mean over all calls of the first draw: what was kept is no fair sample


def resample(
    sample: Sample,
    reward: Reward,
    tasks: Sequence[Task],
    advantages: AdvantageConfig,
    *,
    draws: int,
    presets: Presets | None = None,
) -> tuple[Table, ResampleCounts]:
    """Sample every task, and up to `draws - 1` times more those that teach nothing; 1 is plain sampling.

    `advantages` and `presets` say what a group is, as in `with_advantages`. A task that stays flat to the end keeps its
    last draw. The table has the episodes to learn from, task by task.
    """
    if draws < 1:
        raise ValueError(f"draws is {draws}; a problem is sampled at least once")
    tables: list[Table] = []
    kept: dict[str, list[int]] = {}  # by task: the episodes of the draw that counts, among those of all draws
    flat, first_flat, first_reward = list(tasks), 0, 0.0
    drawn, first = 0, 0
    while flat and len(tables) < draws:
        table = reward(sample(flat, first))
        _check_draw(flat, table, first)
        kept |= {task.id: [] for task in flat}
        for number, bare in enumerate(table.bare_episodes, drawn):
            kept[bare.task.id].append(number)
        teaching = _teaching(table, advantages, presets)
        flat = [task for task in flat if task.id not in teaching]
        if not tables:
            first_flat, first_reward = len(flat), float(np.mean(table.reward)) if len(table) else 0.0
        tables.append(table)
        drawn += len(table.bare_episodes)
        first = 1 + max(bare.sample for bare in table.bare_episodes)
    counts = ResampleCounts(len(tasks), first_flat, first_flat - len(flat), len(tables), drawn, first_reward)
    if not tables:
        return Table.of([]), counts
    return Table.concat(tables).of_episodes([number for task in tasks for number in kept[task.id]]), counts


def _teaching(table: Table, advantages: AdvantageConfig, presets: Presets | None) -> set[str]:
    """The ids of tasks with an advantage that is not 0."""
    compared, _ = with_advantages(table, advantages, presets)
    rows = np.flatnonzero(np.nan_to_num(compared.advantage))
    return {table.bare_episodes[number].task.id for number in table.episode[rows].tolist()}


def _check_draw(tasks: Sequence[Task], table: Table, first: int) -> None:
    missing = {task.id for task in tasks} ^ {bare.task.id for bare in table.bare_episodes}
    if missing:
        raise ValueError(
            f"sample() was asked for {len(tasks)} tasks and differs on {sorted(missing)[0]!r}: "
            "return episodes of each of them, and of no other"
        )
    if old := [bare.sample for bare in table.bare_episodes if bare.sample < first]:
        raise ValueError(
            f"sample() returned the sample {old[0]} again where first_sample is {first}: pass first_sample on"
        )
