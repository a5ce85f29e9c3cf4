"""Credit as pure functions over arrays, under jit: what `rewards.credit` computes from episodes.

    calls of a batch, flat [C] ──own_work──► value, known [C] ──► rewards [C] ──► `learning.group_advantages`

Components are added up: a reward is one number per call. Calls of an episode that ended in an error earn 0.
"""

from collections.abc import Sequence
from typing import NamedTuple, get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np

from marl_jax.rewards.grading import RIGHT, Graded, Kind

KINDS: tuple[Kind, ...] = get_args(Kind)  # a call's kind is its place here
_SOLVER, _JUDGE, _PICKER, _PLANNER, _TEAM = map(KINDS.index, ("solver", "judge", "picker", "planner", "team"))


class Calls(NamedTuple):
    """The calls of a batch of episodes."""

    outcome: jax.Array  # Float[C], of the call's episode
    sound: jax.Array  # Bool[C], whether the episode ended without an error
    kind: jax.Array  # Int[C], into KINDS
    grade: jax.Array  # Float[C], of a solver's own answer
    readable: jax.Array  # Bool[C]
    said: jax.Array  # Int[C]: a judge's 1 for Correct, 0 for Incorrect; a picker's number, from 1; else -1
    reads: jax.Array  # Int[C R], the calls whose outputs its prompt showed, padded with -1
    length: jax.Array  # Int[C], sampled tokens


def calls_of(graded: Sequence[Graded]) -> Calls:
    """The arrays of graded episodes."""
    rows: list[tuple[float | bool, ...]] = []
    reads: list[list[int]] = []
    first = 0
    for one in graded:
        for call, own, kind in zip(one.episode.calls, one.answers, one.kinds):
            said = {"Correct": 1, "Incorrect": 0}.get(call.answer or "", -1)
            if kind == "picker" and call.answer is not None and call.answer.isdecimal():
                said = min(int(call.answer), 1 << 30)
            readable = call.answer is not None
            sound = one.episode.error is None
            rows.append((one.outcome, sound, KINDS.index(kind), own or 0.0, readable, said, len(call.tokens)))
            reads.append([first + i for i in call.reads])
        first += len(one.episode.calls)
    types = (np.float32, bool, np.int32, np.float32, bool, np.int32, np.int32)
    *columns, length = (jnp.asarray(np.array(c, t)) for c, t in zip(zip(*rows) if rows else [()] * 7, types))
    padded = np.full((len(reads), max([1, *map(len, reads)])), -1, np.int32)
    for row, read in zip(padded, reads):
        row[: len(read)] = read
    return Calls._make((*columns, jnp.asarray(padded), length))


def outcome(calls: Calls) -> jax.Array:
    """Every call earns what the workflow's answer is worth."""
    return jnp.where(calls.sound, calls.outcome, 0.0)


def voting_rubric(calls: Calls) -> jax.Array:
    """The study's rubric: voters by their own and the final answer, the aggregator by its pick.

    It has no rule for other calls: ValueError, or under jit, where no value can be refused, a reward of NaN.
    """
    ruled = ~calls.sound | (calls.kind == _SOLVER) | (calls.kind == _PICKER)
    if not isinstance(ruled, jax.core.Tracer) and not ruled.all():
        kind = KINDS[int(calls.kind[jnp.argmin(ruled)])]
        raise ValueError(f"credit 'voting_rubric' has no rule for a {kind}; use it for voting workflows")
    value, known = own_work(calls)
    right = calls.grade >= RIGHT
    voter = 0.5 * right + 0.5 * (calls.outcome >= RIGHT) - 1.0 * (calls.readable & ~right)
    picker = jnp.where(known, 2 * value - 1, 0.0)
    reward = jnp.where(calls.sound, jnp.where(calls.kind == _SOLVER, voter, picker), 0.0)
    return jnp.where(ruled, reward, jnp.nan)


def own_correctness(calls: Calls) -> jax.Array:
    """Every call earns what its own work is worth, 0 where that cannot be said."""
    value, known = own_work(calls)
    return jnp.where(calls.sound & known, value, 0.0)


def team_and_local(calls: Calls, alpha: float) -> jax.Array:
    """alpha times the outcome, plus the call's own work."""
    return alpha * outcome(calls) + own_correctness(calls)


def length_penalty(calls: Calls, weight: float, free: int, limit: int) -> jax.Array:
    """0 up to `free` sampled tokens, then down to -weight at `limit`."""
    over = jnp.clip((calls.length - free) / (limit - free), 0.0, 1.0)
    return jnp.where(calls.sound, -weight * over, 0.0)


def format_penalty(calls: Calls, weight: float) -> jax.Array:
    """-weight for a call that cannot be read."""
    return jnp.where(calls.sound & ~calls.readable, -weight, 0.0)


def own_work(calls: Calls) -> tuple[jax.Array, jax.Array]:
    """What each call's own work is worth [C], and whether there was something to get right [C]."""
    chex.assert_rank(list(calls), [1, 1, 1, 1, 1, 1, 2, 1])
    chex.assert_equal_shape([*calls[:6], calls.length])
    read = calls.reads >= 0
    solved = read & (calls.kind[calls.reads] == _SOLVER)
    seen = jnp.where(solved, calls.grade[calls.reads], 0.0)  # [C, R]

    # A judge: its verdict on the last answer it read.
    place = jnp.arange(calls.reads.shape[1])
    last = jnp.max(jnp.where(solved, place, -1), axis=1)
    judged = jnp.take_along_axis(seen, jnp.maximum(last, 0)[:, None], axis=1)[:, 0] >= RIGHT
    # A picker: its pick, the first where that cannot be read.
    pick = jnp.where((calls.said >= 1) & (calls.said <= read.sum(axis=1)), calls.said - 1, 0)
    picked = jnp.take_along_axis(seen, pick[:, None], axis=1)[:, 0] >= RIGHT
    # A planner: the mean of the solvers that read it.
    leads = read & (calls.kind == _SOLVER)[:, None]
    led = (
        jnp.zeros((2, len(calls.kind)))
        .at[:, calls.reads]
        .add(jnp.stack([jnp.where(leads, calls.grade[:, None], 0.0), leads.astype(jnp.float32)]))
    )
    kinds = (_SOLVER, _JUDGE, _PICKER, _PLANNER, _TEAM)
    is_kind = [calls.kind == kind for kind in kinds]
    value = jnp.select(
        is_kind,
        [calls.grade, calls.said == judged, picked, led[0] / jnp.maximum(led[1], 1), calls.outcome],
    )
    always = jnp.ones_like(picked)
    known = jnp.select(is_kind, [always, solved.any(axis=1), (seen >= RIGHT).any(axis=1), always, always])
    return value, known
