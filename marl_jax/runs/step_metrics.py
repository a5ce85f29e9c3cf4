"""The metrics of a training step, as one flat dictionary of numbers.

reward, reward/ROLE, credit/ROLE/COMPONENT, own/ROLE, groups/ROLE/..., choice/ROLE/..., copied/ROLE,
repeated/ROLE, drift/ROLE/...
policy/..., role/..., gradient/..., cosine/... from the learner's report; only time/... may differ between equal runs
"""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from marl_jax.alarms.monitors import mean
from marl_jax.alarms.signs import signs
from marl_jax.learning import Report
from marl_jax.learning.by_role.role_statistics import form_drift
from marl_jax.learning.estimators.groups import GroupCounts
from marl_jax.rewards.credit import own_work
from marl_jax.table import Episode, Table


class Clock:
    """Seconds by phase, from one line of `metrics.jsonl` to the next; a phase inside another is not counted in it."""

    def __init__(self) -> None:
        self._line = self._step = self._since = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._parts: dict[str, dict[str, float]] = {}  # by phase
        self._phases = ["other"]

    @contextlib.contextmanager
    def __call__(self, phase: str, parts: Callable[[], Mapping[str, float]] = dict) -> Iterator[None]:
        """Count the time inside as that of `phase`; `parts()` returns the seconds of each of its parts so far."""
        self._count()
        self._phases.append(phase)
        before = dict(parts())
        try:
            yield
        finally:
            self._count()
            self._phases.pop()
            totals = self._parts.setdefault(phase, {})
            for part, seconds in parts().items():
                totals[part] = totals.get(part, 0.0) + seconds - before.get(part, 0.0)

    def begin(self) -> None:
        """Mark the beginning of a step."""
        self._step = time.perf_counter()

    def measures(self, tokens: int) -> dict[str, float]:
        """The values `time/NAME` of the step that ends; phases and `time/wall` count from the end of the one before."""
        now = self._count()
        step, wall, self._line = now - self._step, now - self._line, now
        spent = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        for phase, parts in self._parts.items():
            if parts:  # the remaining time is work of the host
                parts["host"] = self._seconds[phase] - sum(parts.values())
            spent |= {f"time/{phase}/{part}": seconds for part, seconds in parts.items()}
        self._seconds, self._parts = {}, {}
        return {**spent, "time/step": step, "time/wall": wall, "time/tokens_per_second": tokens / step}

    def _count(self) -> float:
        now, phase = time.perf_counter(), self._phases[-1]
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since
        self._since = now
        return now


def of_step(
    table: Table,
    groups: Mapping[str, GroupCounts],
    counted: Mapping[str, float],  # counted by the road itself
    report: Report,
    now: Mapping[str, Mapping[str, float]],  # the `form` of the table
    base_form: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """The line of a step for `metrics.jsonl`, without its number."""
    episodes = table.bare_episodes
    values: dict[str, Any] = {
        "reward": float(np.mean([bare.outcome for bare in episodes])),
        "episodes": len(episodes),
        "calls": len(table),
        "tokens": int(table.length.sum()),
        "failed": sum(bare.error is not None for bare in episodes),
        "prompts_cut": int((table.cut > 0).sum()),
        "tools_failed": sum(tool.error is not None for bare in episodes for tool in bare.tools),
    }
    values |= branching(episodes)
    values |= counted
    worth, known = own_work(table)
    for role in table.present():
        calls = table.having(role=role)
        values[f"reward/{role}"] = mean(table.reward[calls])
        for name, component in table.components.items():
            if len(earned := component[calls & ~np.isnan(component)]):
                values[f"credit/{role}/{name}"] = mean(earned)
        if len(own := worth[calls & known & table.sound]):
            values[f"own/{role}"] = float(np.mean(own))
    for role, counts in groups.items():
        values |= {f"groups/{role}/{name}": value for name, value in dataclasses.asdict(counts).items()}
    values |= signs(table)
    for role in (role for role in now if role in base_form):
        drift = form_drift(now[role], base_form[role])
        values |= {f"drift/{role}/{name}": value for name, value in drift.items()}
    values |= report.flat()
    if report.warnings:
        values["warnings"] = list(report.warnings)
    return values


def branching(episodes: Sequence[Episode]) -> dict[str, float]:
    """For episodes that fork: paths per episode, and by level the spread of outcomes over the branches of a fork."""
    if not any(bare.leaves for bare in episodes):
        return {}
    spreads: dict[int, list[float]] = collections.defaultdict(list)
    for bare in episodes:
        outcomes: dict[tuple[int, ...], list[float]] = collections.defaultdict(list)
        for leaf in bare.leaves:
            for depth in range(len(leaf.path) + 1):
                outcomes[leaf.path[:depth]].append(leaf.outcome)
        forks: dict[tuple[int, ...], list[float]] = collections.defaultdict(list)
        for path in filter(None, outcomes):
            forks[path[:-1]].append(float(np.mean(outcomes[path])))
        for fork, means in forks.items():
            spreads[len(fork) + 1].append(float(np.std(means)))
    values = {f"tree/apart/{level}": float(np.mean(spreads[level])) for level in sorted(spreads)}
    return {"tree/paths": sum(len(bare.leaves) or 1 for bare in episodes) / len(episodes), **values}


def form(table: Table) -> dict[str, dict[str, float]]:
    """{role: length and readability of its completions}, to compare with those of its first completions."""
    by_role = {}
    sampled = table.take(table.length > 0)
    for role in sampled.present():
        rows = sampled.take(sampled.having(role=role))
        values = {
            "length": rows.length,
            "truncated_share": rows.truncated,
            "unreadable_share": ~rows.readable,
        }
        by_role[role] = {name: float(np.mean(column)) for name, column in values.items()}
    return by_role
