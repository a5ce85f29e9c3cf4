"""What a training step did, as one flat line of numbers; and the episodes that are kept to be read.

reward, reward/ROLE, credit/ROLE/COMPONENT, own/ROLE, groups/ROLE/..., drift/ROLE/...
policy/..., role/..., gradient/..., cosine/... from the learner's report;  time/... is all that may differ
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from marl_jax.learning import Report, ResampleCounts, Row
from marl_jax.learning.groups import GroupCounts
from marl_jax.learning.role_statistics import form_drift
from marl_jax.rewards.credit import by_role, own_work, totals
from marl_jax.rewards.crediting import Worth
from marl_jax.rewards.grading import Graded
from marl_jax.rollouts import write_episodes
from marl_jax.runs.files import disk_errors, write_atomically
from marl_jax.runs.metrics import plain

FORM = ("length", "truncated_share", "unreadable_share")


class Clock:
    """Seconds by phase of one step, added up."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began

    def measures(self, tokens: int) -> dict[str, float]:
        whole = time.perf_counter() - self.began
        spent = {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        return {**spent, "time/step": whole, "time/tokens_per_second": tokens / whole}


def of_step(
    worth: Sequence[Worth],
    rows: Sequence[Row],
    groups: Mapping[str, GroupCounts],
    draws: ResampleCounts | None,  # of dynamic sampling, where it is on
    report: Report,
    base_form: Mapping[str, Mapping[str, float]],
    clock: Clock,
) -> dict[str, Any]:
    """The line of a step for `metrics.jsonl`, but for its number."""
    graded, components = [one.graded for one in worth], [one.components for one in worth]
    episodes = [one.episode for one in graded]
    calls = [call for episode in episodes for call in episode.calls]
    tokens = sum(len(call.tokens) for call in calls)
    values: dict[str, Any] = {
        "reward": float(np.mean([one.outcome for one in graded])),
        "episodes": len(episodes),
        "calls": len(calls),
        "tokens": tokens,
        "failed": sum(episode.error is not None for episode in episodes),
        "prompts_cut": sum(call.cut > 0 for call in calls),
        "tools_failed": sum(tool.error is not None for episode in episodes for tool in episode.tools),
    }
    if draws is not None:
        values |= {f"draws/{name}": value for name, value in dataclasses.asdict(draws).items()}
    for role, earned in by_role(episodes, components).items():
        total, count = earned.pop("reward")
        values[f"reward/{role}"] = total / count
        values |= {f"credit/{role}/{name}": part / n for name, (part, n) in earned.items()}
    values |= _own_work(graded)
    for role, counts in groups.items():
        values |= {f"groups/{role}/{name}": value for name, value in dataclasses.asdict(counts).items()}
    now = form(rows)
    for role in (role for role in now if role in base_form):
        values |= {
            f"drift/{role}/{name}": value for name, value in form_drift(now[role], base_form[role]).items()
        }
    values |= report.flat()
    if report.warnings:
        values["warnings"] = list(report.warnings)
    return values | clock.measures(tokens)


def form(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """{role: length and readability of what it says}, to be compared with what it said at first."""
    found = {}
    for role in dict.fromkeys(row.role for row in rows):
        own = [row for row in rows if row.role == role]
        shares = (
            np.mean([len(row.tokens) for row in own]),
            np.mean([row.truncated for row in own]),
            np.mean([not row.readable for row in own]),
        )
        found[role] = dict(zip(FORM, map(float, shares)))
    return found


def write_episodes_of(
    folder: Path, step: int, worth: Sequence[Worth], rows: Sequence[Row], count: int
) -> None:
    """The first `count` episodes, and beside them a line for each of what it and every call of it earned."""
    advantages = iter(rows)
    lines = []
    for (one, _), earned in zip(worth, totals(one.components for one in worth)):
        own = [next(advantages).advantage if call.tokens else None for call in one.episode.calls]
        lines.append(json.dumps(plain({"outcome": one.outcome, "rewards": earned, "advantages": own})) + "\n")
    with disk_errors(folder):
        write_episodes(folder / f"step-{step:06d}.jsonl.gz", [one.graded.episode for one in worth[:count]])
    write_atomically(folder / f"step-{step:06d}.rewards.jsonl", "".join(lines[:count]))


def _own_work(graded: Sequence[Graded]) -> dict[str, float]:
    """Mean worth of every role's own work, where there was something to get right."""
    worth: dict[str, list[float]] = {}
    for one in graded:
        if one.episode.error is None:
            for call, value in zip(one.episode.calls, own_work(one)):
                if value is not None:
                    worth.setdefault(call.role, []).append(value)
    return {f"own/{role}": float(np.mean(values)) for role, values in worth.items()}
