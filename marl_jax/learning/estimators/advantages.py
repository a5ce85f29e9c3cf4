"""Advantages: how much better a row did than the rows it is compared with.

    A_i = (r_i - mean_g) / (std_g + eps)          GRPO; the other estimators change the mean or the scale

A group of one has no baseline: its advantage is 0, or its reward with `singleton="reward"` (the study's
preset). All functions work under jit and vmap with integer groups. Outside, groups may be any hashables, and numpy
computes: the number of rows changes from step to step, and XLA would compile for each number.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np

from marl_jax.fields import require
from marl_jax.learning.estimators.groups import Groups, as_rewards, keys_of, precision
from marl_jax.own import OwnError, call_user_function, in_words, is_own, own_function
from marl_jax.table import dense

Estimator = str  # one of ESTIMATORS, or a user's own as "module:function"
ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
Std = Literal["unbiased", "biased"]
Singleton = Literal["zero", "reward"]  # the advantage of a group of one
Over = Literal["task", "role"]  # the calls that an agent-wise mean or scale is taken over
DDOF = {"unbiased": 1, "biased": 0}


def group_advantages(
    rewards: jax.Array | np.ndarray | Sequence[float],  # [B]
    groups: Groups,  # [B]
    *,
    estimator: Estimator = "grpo",
    std: Std = "unbiased",
    eps: float = 1e-6,
    singleton: Singleton = "zero",
) -> jax.Array:
    """Advantages [B].

    grpo: (r - mean_g) / (std_g + eps). dr_grpo: r - mean_g. rloo: r minus the mean of the others, which is
    n / (n - 1) (r - mean_g). reinforce_pp_baseline: (r - mean_g) / (std of the batch's rewards + eps). A user's own
    estimator maps `function(rewards, groups)`, arrays [B] with groups as integers below B, to advantages [B].
    """
    check_estimator(estimator)
    _check_scale(std, eps)
    known = get_args(Singleton)
    require(singleton in known, f"singleton {singleton!r} is unknown; use one of {known}")
    xp, values, ids = _inputs(rewards, eps, groups)
    if is_own(estimator):
        return _own(estimator, values, ids)
    size, centred = _centre(xp, values, ids)
    if estimator == "grpo":
        advantages = _scaled(xp, centred, _spread(xp, centred, size, ids, std), eps)
    elif estimator == "rloo":
        advantages = centred * size / xp.maximum(size - 1, 1)
    elif estimator == "reinforce_pp_baseline":
        batch = xp.zeros_like(ids)
        advantages = _scaled(xp, centred, _spread(xp, *_centre(xp, values, batch)[::-1], batch, std), eps)
    else:
        advantages = centred
    advantages = xp.where(size == 1, values, advantages) if singleton == "reward" else advantages
    return jax.device_put(advantages.astype(values.dtype))


def check_estimator(name: str, *more: str) -> None:
    """Refuse a name that is neither built in (or in `more`) nor "module:function"."""
    known = (*ESTIMATORS, *more)
    if is_own(name):
        own_function(name, "estimator")
    elif name not in known:
        raise ValueError(
            f"estimator {name!r} is unknown; use one of {known}, or your own as 'module:function'"
        )


def agent_advantages(
    rewards: jax.Array | np.ndarray | Sequence[float],  # [B]
    tasks: Groups,  # [B]
    roles: Groups,  # [B]
    *,
    mean: Over = "role",
    scale: Over = "role",
    std: Std = "unbiased",
    eps: float = 1e-6,
) -> jax.Array:
    """Dr.MAS [B]: mean and standard deviation, each over all calls of the task, or over those of the role."""
    for name, over in (("mean", mean), ("scale", scale)):
        require(over in get_args(Over), f"{name} {over!r} is unknown; use one of {get_args(Over)}")
    _check_scale(std, eps)
    xp, values, task, role = _inputs(rewards, eps, tasks, roles)
    ids = {"task": task, "role": _pairs(xp, task, role)}
    centred = _centre(xp, values, ids[mean])[1]
    size, scale_centred = _centre(xp, values, ids[scale])
    spread = _spread(xp, scale_centred, size, ids[scale], std)
    # If all rewards of a role are equal, its standard deviation is 0. Dividing by eps alone would make an advantage of
    # a million when the mean is taken over other roles, too.
    advantages = xp.where(spread == 0, 0.0, _scaled(xp, centred, spread, eps))
    return jax.device_put(advantages.astype(values.dtype))


def overlong_penalty(lengths: jax.Array | np.ndarray, *, max_length: int, buffer: int) -> jax.Array:
    """DAPO's soft overlong punishment, added to the reward: 0, down to -1 over the last `buffer` tokens."""
    require(0 < buffer <= max_length, f"overlong buffer {buffer} must lie in 1..max_length={max_length}")
    xp = jnp if isinstance(lengths, jax.Array) else np
    over = xp.asarray(lengths, float) - (max_length - buffer)
    return jax.device_put(xp.clip(-over / buffer, -1.0, 0.0).astype(xp.float32))


def _check_scale(std: str, eps: float | jax.Array) -> None:
    require(std in DDOF, f"std {std!r} is unknown; use one of {tuple(DDOF)}")
    if not (isinstance(eps, jax.core.Tracer) or 0 <= eps < math.inf):
        raise ValueError(f"eps {eps} must be finite and not negative")


def _inputs(rewards: Any, eps: Any, *groups: Groups) -> tuple[Any, ...]:
    """(array module, float rewards [B], integer groups [B], ...); the module is jax.numpy if anything is traced."""
    is_traced = lambda x: isinstance(x, jax.core.Tracer)
    xp = jnp if any(map(is_traced, (rewards, eps, *groups))) else np
    rewards = rewards.astype(precision(rewards.dtype)) if is_traced(rewards) else as_rewards(rewards)
    chex.assert_rank(rewards, 1)
    ids = [_dense(xp, keys) if is_traced(keys) else xp.asarray(dense(keys_of(keys))) for keys in groups]
    chex.assert_equal_shape([rewards, *ids])
    return xp, rewards, *ids


def _dense(xp: Any, ids: Any) -> Any:
    """Integers [B] mapped to integers below B, equal ones to equal ones; `jnp.unique` would scatter."""
    return xp.searchsorted(xp.sort(ids), ids)


def _pairs(xp: Any, first: Any, second: Any) -> Any:
    """Pairs of integers below B mapped to integers below B, equal pairs to equal integers."""
    # Without 64 bits, the product of two ids would overflow.
    order = xp.lexsort((second, first))
    first, second = first[order], second[order]
    is_new = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    return xp.concatenate([xp.zeros(1, int), xp.cumsum(is_new)])[xp.argsort(order)]


def _centre(xp: Any, rewards: Any, ids: Any) -> tuple[Any, Any]:
    """Group size and reward minus group mean, both [B].

    The group's lowest reward is subtracted first: equal rewards then give exactly zero, not a rounding
    error that a division by a tiny standard deviation would blow up.
    """
    if xp is jnp:
        lowest: Any = jax.ops.segment_min(rewards, ids, rewards.shape[0])
    else:
        lowest = np.full(rewards.shape, np.inf, rewards.dtype)
        np.minimum.at(lowest, ids, rewards)
    size = _total(xp, xp.ones_like(rewards), ids)
    above_lowest = rewards - lowest[ids]
    return size, above_lowest - _total(xp, above_lowest, ids) / size


def _own(name: str, rewards: Any, ids: Any) -> jax.Array:
    label = f"estimator '{name}'"
    advantages = call_user_function(own_function(name, "estimator"), label, rewards, ids)
    is_number = jnp.isdtype(getattr(advantages, "dtype", object), ("integral", "real floating"))
    if getattr(advantages, "shape", None) != rewards.shape or not is_number:
        raise OwnError(
            f"{label} returned {in_words(advantages)} for {len(rewards)} rewards; return an array of as many numbers"
        )
    if not isinstance(advantages, jax.core.Tracer) and not np.isfinite(np.asarray(advantages)).all():
        raise OwnError(f"{label} returned advantages that are not finite")
    return jax.device_put(advantages.astype(rewards.dtype))


def _scaled(xp: Any, centred: Any, spread: Any, eps: float) -> Any:
    """Divide by spread + eps; unchanged where the spread is 0, because the centred values are 0 there, too."""
    return centred / xp.where(spread == 0, 1.0, spread + eps)


def _spread(xp: Any, centred: Any, size: Any, ids: Any, std: str) -> Any:
    variance = _total(xp, centred**2, ids) / xp.maximum(size - DDOF[std], 1)
    zero = variance == 0  # the root has no derivative at 0
    return xp.where(zero, 0.0, xp.sqrt(xp.where(zero, 1.0, variance)))


def _total(xp: Any, values: Any, ids: Any) -> Any:
    """The sum over each row's group [B], in float64 on the host, and under `jit` if JAX has it enabled."""
    count = values.shape[0]
    if xp is np:
        return np.bincount(ids, values, count)[ids]
    return jax.ops.segment_sum(values.astype(precision(np.float64)), ids, count)[ids]
