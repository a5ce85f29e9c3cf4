"""How often a base is right before any RL: a workflow over held-out micro problems, through the real engine."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from marl_jax.models import ModelConfig
from marl_jax.models.weight_table import Tree
from marl_jax.policies import SamplingSettings, shared
from marl_jax.rewards.families import parse
from marl_jax.rewards.grading import grade
from marl_jax.table import Table
from marl_jax.tasks import micro
from marl_jax.workflows import Workflow, load_prompts

__all__ = ["accuracy", "play_held_out"]

NEW_TOKENS = 64  # of a completion, at most
MAX_PROMPT = 448  # of a history
LANES = 64  # few, because a short measurement is mostly compilation


def play_held_out(
    params: Tree,
    config: ModelConfig,
    tokenizer: Any,
    flow: Workflow,
    kind: str,
    *,
    levels: Sequence[int],
    split: str = "val",
    problems: int = 256,
    samples: int = 4,
    seed: int = 0,
    max_prompt: int = MAX_PROMPT,
) -> Table:
    """The graded table of episodes at temperature 1, all roles on one policy; those of a problem stand together."""
    from marl_jax.rollouts import rollout
    from marl_jax.sampling import Engine, plan

    tasks = list(micro.take(kind, split, problems, levels=levels))
    shapes = plan(config, max_prompt=max_prompt, max_new=NEW_TOKENS, lanes=LANES)
    table = rollout(
        flow,
        tasks,
        Engine(params, config, shapes, policies=("p0",)),
        tokenizer,
        shared(flow.roles),
        prompts=load_prompts(tasks[0].family, "micro"),
        parse=parse,
        samples=samples,
        seed=seed,
        settings=SamplingSettings(max_new_tokens=NEW_TOKENS),
    )
    return grade(table)


def accuracy(table: Table, problems: int) -> tuple[float, float]:
    """(mean outcome, standard error over problems)."""
    by_problem = np.array([bare.outcome for bare in table.bare_episodes]).reshape(problems, -1).mean(1)
    return float(by_problem.mean()), float(by_problem.std(ddof=1) / np.sqrt(problems))
