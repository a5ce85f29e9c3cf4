"""Dynamic sampling: problems whose episodes teach nothing are sampled again, a bounded number of times.

    draw every problem -> keep those with an advantage that is not 0 -> draw the others anew -> ... -> at most `draws`

A new draw has new sample numbers, so new noise, and takes the old one's place: every problem keeps its number of
episodes, and batches their shapes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from marl_jax.learning.rows import AdvantageConfig, rows_of, with_advantages
from marl_jax.rollouts.episodes import Episode
from marl_jax.tasks.task import Task

Sample = Callable[[Sequence[Task], int], Sequence[Episode]]  # (tasks, first_sample), as `rollout` takes them
Reward = Callable[[Sequence[Episode]], Sequence[Sequence[float]]]  # one number per call of each episode


@dataclasses.dataclass(frozen=True)
class ResampleCounts:
    """What dynamic sampling did."""

    problems: int
    flat: int  # problems that taught nothing in the first draw
    rescued: int  # of those, the ones that did in a later one
    draws: int  # rounds of sampling, the first included
    episodes: int  # sampled over all rounds; those of the result are fewer
    first_reward: float  # mean over all calls of the first draw: what was kept is no fair sample


class Resampled(NamedTuple):
    """The episodes to learn from, task by task, and the reward of every call."""

    episodes: list[Episode]
    rewards: list[Sequence[float]]
    counts: ResampleCounts


def resample(
    sample: Sample,
    reward: Reward,
    tasks: Sequence[Task],
    advantages: AdvantageConfig,
    *,
    draws: int,
    workflow: str | None = None,
) -> Resampled:
    """Sample every task, and up to `draws - 1` times more those that teach nothing; 1 is plain sampling.

    `advantages` and `workflow` say what a group is, as in `with_advantages`. A task that stays flat to
    the end keeps its last draw.
    """
    if draws < 1:
        raise ValueError(f"draws is {draws}; a problem is sampled at least once")
    kept: dict[str, list[tuple[Episode, Sequence[float]]]] = {}
    flat, first_flat, first_reward = list(tasks), 0, 0.0
    drawn, rounds, first = 0, 0, 0
    while flat and rounds < draws:
        episodes = sample(flat, first)
        rewards = reward(episodes)
        _check_draw(flat, episodes, first)
        for task in flat:
            kept[task.id] = []
        for episode, earned in zip(episodes, rewards, strict=True):
            kept[episode.task.id].append((episode, earned))
        teaching = _teaching(episodes, rewards, advantages, workflow)
        flat = [task for task in flat if task.id not in teaching]
        if rounds == 0:
            first_flat, first_reward = len(flat), _mean(rewards)
        drawn, rounds = drawn + len(episodes), rounds + 1
        first = 1 + max(episode.sample for episode in episodes)
    pairs = [pair for task in tasks for pair in kept[task.id]]
    counts = ResampleCounts(len(tasks), first_flat, first_flat - len(flat), rounds, drawn, first_reward)
    return Resampled([episode for episode, _ in pairs], [earned for _, earned in pairs], counts)


def _teaching(
    episodes: Sequence[Episode],
    rewards: Sequence[Sequence[float]],
    advantages: AdvantageConfig,
    workflow: str | None,
) -> set[str]:
    """The ids of tasks with an advantage that is not 0."""
    rows, _ = with_advantages(rows_of(episodes, rewards), advantages, workflow)
    return {row.task for row in rows if row.advantage}  # type: ignore[misc]


def _check_draw(tasks: Sequence[Task], episodes: Sequence[Episode], first: int) -> None:
    missing = {task.id for task in tasks} ^ {episode.task.id for episode in episodes}
    if missing:
        raise ValueError(
            f"sample() was asked for {len(tasks)} tasks and differs on {sorted(missing)[0]!r}: "
            "return episodes of each of them, and of no other"
        )
    if old := [episode.sample for episode in episodes if episode.sample < first]:
        raise ValueError(
            f"sample() returned the sample {old[0]} again where first_sample is {first}: pass first_sample on"
        )


def _mean(rewards: Sequence[Sequence[float]]) -> float:
    flat = [earned for calls in rewards for earned in calls]
    return float(np.mean(flat)) if flat else 0.0
