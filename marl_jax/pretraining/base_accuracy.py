"""Accuracy of a base before any RL: a workflow over held-out micro problems, through the real engine."""

import os
from collections.abc import Sequence

import numpy as np

from marl_jax.rewards.grading import grade
from marl_jax.rollouts.player import player_for
from marl_jax.table import Table
from marl_jax.tasks import micro
from marl_jax.workflows import Workflow

MAX_PROMPT = 448  # tokens of a history
LANES = 64  # few, because a short measurement is mostly compilation


def play_held_out(
    base: str | os.PathLike[str],
    flow: Workflow,
    kind: str,
    *,
    levels: Sequence[int],
    split: str = "val",
    problems: int = 256,
    samples: int = 4,
    max_prompt: int = MAX_PROMPT,
) -> Table:
    """The graded table of episodes at temperature 1, all roles on one policy; episodes of a problem are adjacent."""
    player = player_for(flow, base, max_prompt=max_prompt, lanes=LANES)
    return grade(player.play(list(micro.take(kind, split, problems, levels=levels)), samples=samples))


def accuracy(table: Table, problems: int) -> tuple[float, float]:
    """(mean outcome, standard error over problems)."""
    by_problem = np.array([bare.outcome for bare in table.bare_episodes]).reshape(problems, -1).mean(1)
    return float(by_problem.mean()), float(by_problem.std(ddof=1) / np.sqrt(problems))
