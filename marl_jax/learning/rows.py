"""Rows: what the learner knows of a call. Numbers, and the names it is grouped and routed by."""

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np

from marl_jax.learning.advantages import (
    DDOF,
    ESTIMATORS,
    OVER,
    SINGLETON,
    Estimator,
    agent_advantages,
    group_advantages,
    overlong_penalty,
)
from marl_jax.learning.groups import (
    FIELDS,
    PRESETS,
    GroupCounts,
    as_rewards,
    count_groups,
    group_ids,
    group_key,
)
from marl_jax.rollouts.episodes import CallRecord, Episode


@dataclasses.dataclass(frozen=True)
class Row:
    """One call."""

    policy: str
    role: str
    task: Hashable
    slot: int
    turn: int
    prompt: Sequence[int]
    tokens: Sequence[int]  # sampled, including the stop token
    logprobs: Sequence[float]  # of the distribution sampled from, one per token
    reward: float
    advantage: float = 0.0
    truncated: bool = False
    readable: bool = True
    temperature: float = 1.0  # that they were sampled at
    penalty: float | None = None  # for its length, on top of the reward; None where there is none to pay
    kept: np.ndarray | None = None  # [tokens, K] ids that top-k or top-p left, -1 filling up


@dataclasses.dataclass(frozen=True)
class AdvantageConfig:
    """How rewards become advantages; `AdvantageConfig.study()` is the original's."""

    group: str = "role"  # a preset of `groups`, or fields such as "task,role,turn"
    estimator: Estimator | Literal["agent"] = "grpo"
    std: Literal["unbiased", "biased"] = "unbiased"
    singleton: Literal["zero", "reward"] = "zero"
    eps: float = 1e-6
    agent_mean: Literal["task", "role"] = (
        "role"  # of the estimator "agent" (Dr.MAS), which has its own groups
    )
    agent_scale: Literal["task", "role"] = "role"
    overlong: tuple[int, int] | None = None  # DAPO's (max_length, buffer) of the soft punishment for length

    def __post_init__(self) -> None:
        if self.estimator not in (*ESTIMATORS, "agent"):
            raise ValueError(f"estimator {self.estimator!r} is unknown; use one of {(*ESTIMATORS, 'agent')}")
        for name, allowed in (
            ("std", tuple(DDOF)),
            ("singleton", SINGLETON),
            ("agent_mean", OVER),
            ("agent_scale", OVER),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} {getattr(self, name)!r} is unknown; use one of {allowed}")
        if self.group != "study":
            group_key(self.group)
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"eps {self.eps} must be finite and not negative")
        if self.overlong is not None and not 0 < self.overlong[1] <= self.overlong[0]:
            raise ValueError(
                f"overlong {self.overlong} must be (max_length, buffer) with 0 < buffer <= max_length"
            )

    @classmethod
    def study(cls) -> "AdvantageConfig":
        return cls(group="study", singleton="reward")


def rows_of(episodes: Sequence[Episode], rewards: Sequence[Sequence[float]]) -> list[Row]:
    """One row per call that sampled something; `rewards` holds one number per call of each episode."""
    return [
        Row(
            policy=call.policy,
            role=call.role,
            task=episode.task.id,
            slot=call.slot,
            turn=call.turn,
            prompt=call.prompt_tokens,
            tokens=call.tokens,
            logprobs=call.logprobs,
            reward=float(reward),
            truncated=call.finish_reason == "length",
            readable=call.answer is not None,
            temperature=call.temperature,
            kept=_kept(call),
        )
        for episode, earned in zip(episodes, rewards, strict=True)
        for call, reward in zip(episode.calls, earned, strict=True)
        if call.tokens
    ]


def with_advantages(
    rows: Sequence[Row], config: AdvantageConfig, workflow: str | None = None
) -> tuple[list[Row], dict[str, GroupCounts]]:
    """The rows with their advantages, and per role the groups that could not teach it."""
    if not rows:
        return [], {}
    ids = row_groups(rows, config, workflow)
    roles = [row.role for row in rows]
    rows = penalised(rows, config)
    rewards = shaped(rows)
    if config.estimator == "agent":
        advantages = agent_advantages(
            rewards,
            [row.task for row in rows],
            roles,
            mean=config.agent_mean,
            scale=config.agent_scale,
            std=config.std,
            eps=config.eps,
        )
    else:
        advantages = group_advantages(
            rewards,
            ids,
            estimator=config.estimator,
            std=config.std,
            eps=config.eps,
            singleton=config.singleton,
        )
    counts = count_groups(rewards, ids, roles)
    done = [dataclasses.replace(row, advantage=float(a)) for row, a in zip(rows, np.asarray(advantages))]
    return done, counts


def penalised(rows: Sequence[Row], config: AdvantageConfig) -> list[Row]:
    """The rows with what they pay for their length, where `config` says so."""
    if config.overlong is None:
        return list(rows)
    lengths = np.array([len(row.tokens) for row in rows])
    penalties = np.asarray(
        overlong_penalty(lengths, max_length=config.overlong[0], buffer=config.overlong[1])
    )
    return [dataclasses.replace(row, penalty=float(p)) for row, p in zip(rows, penalties)]


def shaped(rows: Sequence[Row]) -> np.ndarray:
    """What advantages are made of, [B]: rewards with their penalties, in the precision of the device."""
    return as_rewards([row.reward + (row.penalty or 0.0) for row in rows])


def row_groups(rows: Sequence[Row], config: AdvantageConfig, workflow: str | None = None) -> np.ndarray:
    """Int[B]: which rows are compared with each other."""
    if config.estimator == "agent":
        key = PRESETS["task" if config.agent_mean == config.agent_scale == "task" else "role"]
    else:
        key = group_key(config.group, workflow)
    columns = {name: [getattr(row, name) for row in rows] for name in FIELDS}
    return group_ids(key, **columns)


def _kept(call: CallRecord) -> np.ndarray | None:
    """Int[tokens, K], rows of different length filled up with -1."""
    if call.kept is None:
        return None
    width = max(map(len, call.kept))
    return np.array([(*ids, *[-1] * (width - len(ids))) for ids in call.kept], np.int32)
