"""Groups: which rows are compared with each other when rewards become advantages.

A group is all rows with the same key. The config names the key, as a preset or as a list of fields:
`"role"`, `"study"`, `"task,role,turn"`.

    task role slot turn    the problem, the role, its parallel call and its turn
    path                   the episode and the branches taken in it: equal for parallel candidates from one state
    parent branch          the fork that the call is below, and its branch there; equal for all calls before any fork
    task.NAME call.NAME    an attribute: `level` or an entry of `meta` of the task, an entry of `labels` of the call
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marl_jax.own import OwnError
from marl_jax.table import dense

FIELDS = ("task", "role", "slot", "turn", "path", "parent", "branch")
OWNERS = ("task.", "call.")  # prefixes of attributes
LARGEST = 1e18  # largest reward: the sum of squares of a group still fits into a float32
PRESETS = {
    "task": ("task",),  # all calls for a problem
    "role": ("task", "role"),  # Dr.MAS
    "role_turn": ("task", "role", "turn"),  # AT-GRPO, where all calls of a turn have one state
    "state": ("task", "role", "turn", "path"),  # AT-GRPO: parallel candidates from one state
    "siblings": ("task", "role", "turn", "parent"),  # the branches of one fork; before it, all samples
}


@dataclasses.dataclass(frozen=True)
class GroupCounts:
    """The numbers of a role's groups, and of those that teach it nothing."""

    groups: int  # all groups
    singletons: int  # groups of one member: nothing to compare with
    zero_variance: int  # groups of several members with equal rewards


Groups = Sequence[Hashable] | np.ndarray | jax.Array


def group_key(
    name: str | Sequence[str], declared: Mapping[str, Sequence[str]] | None = None
) -> tuple[str, ...]:
    """The fields of a preset, of a preset that the workflow has `declared`, or of an explicit list of fields."""
    if reserved := PRESETS.keys() & (declared or {}):
        raise ValueError(f"group '{min(reserved)}' is built in: give the workflow's own group another name")
    presets = {**PRESETS, **(declared or {})}
    if isinstance(name, str):
        if name in presets:
            return group_key(presets[name])
        if name == "study":
            raise ValueError(
                "this workflow declares no group 'study', as the study's workflows do: name fields, such as task,role, "
                "or declare it with @workflow(..., groups={'study': ('task', 'role')}); in a loop of one's own, give "
                "with_advantages the workflow's groups: with_advantages(table, config, voting.groups)"
            )
        name = [field.strip() for field in name.split(",")]
    if not name or any(field not in FIELDS and not is_attribute(field) for field in name):
        raise ValueError(
            f"group key {','.join(name)!r} is no preset ({', '.join(presets)}) and names no fields "
            f"({', '.join(FIELDS)}, or attributes such as task.level, with commas between)"
        )
    attributes = dict.fromkeys(field for field in name if field not in FIELDS)
    return (*(field for field in FIELDS if field in name), *attributes)


def is_attribute(field: str) -> bool:
    """Whether a field of a key is "task.NAME" or "call.NAME"."""
    return field.startswith(OWNERS) and len(field) > len("task.")


def group_ids(key: Sequence[str], **columns: Sequence[Hashable]) -> np.ndarray:
    """Int[B]: rows with equal ids are one group, numbered in order of appearance; `columns` by key field."""
    return dense(list(zip(*(columns[field] for field in group_key(key)), strict=True)))


def keys_of(groups: Groups) -> list[Hashable]:
    """[B]: the key of each row's group, as a hashable."""
    keys = groups.tolist() if hasattr(groups, "tolist") else groups
    # Keys may be scalars or rows of JAX or numpy.
    keys = [key.tolist() if hasattr(key, "tolist") else key for key in keys]
    return [tuple(key) if isinstance(key, list) else key for key in keys]


def as_rewards(rewards: Any) -> np.ndarray:
    """Rewards in the precision of the device, so that those that are equal there are equal here.

    Rewards that are not finite in it, or too large to be squared, are refused.
    """
    values = np.asarray(rewards)
    if not jnp.isdtype(values.dtype, ("bool", "integral", "real floating")):
        raise OwnError(f"rewards are {rewards!r:.80}; they must be numbers")
    with np.errstate(over="ignore"):
        rewards = values.astype(precision(values.dtype))
    bad = np.flatnonzero(~np.isfinite(rewards))
    if bad.size:
        raise OwnError(
            f"reward {values.flat[bad[0]]} in row {bad[0]} is not finite in {rewards.dtype}; fix the reward"
        )
    if (large := np.flatnonzero(abs(rewards) > LARGEST)).size:
        raise OwnError(
            f"reward {values.flat[large[0]]} in row {large[0]} is beyond {LARGEST:g}; scale the reward"
        )
    return rewards


def precision(dtype: Any) -> Any:
    """The dtype that numbers of `dtype` have on the device: float32, or for float64 also that if JAX has it enabled."""
    return jax.dtypes.canonicalize_dtype(np.float64 if dtype == np.float64 else np.float32)


def informative(rewards: Sequence[float] | np.ndarray, groups: Groups) -> np.ndarray:
    """Bool[B]: the rewards of the row's group differ, so that the group moves the policy; -1 means no group."""
    keys, values = keys_of(groups), as_rewards(rewards)
    ids = dense(keys)
    low, high = np.full(len(ids), np.inf), np.full(len(ids), -np.inf)
    np.minimum.at(low, ids, values)
    np.maximum.at(high, ids, values)
    return (high > low)[ids] & _grouped(keys)


def count_groups(
    rewards: Sequence[float] | np.ndarray, groups: Groups, roles: Sequence[str]
) -> dict[str, GroupCounts]:
    """Per role, the number of groups that it has rows in, and how many are singletons or have zero variance.

    Rows of group -1, such as calls without tokens, do not count.
    """
    keys = keys_of(groups)
    ids, flat, grouped = dense(keys), ~informative(rewards, keys), _grouped(keys)
    sizes = np.bincount(ids)
    counts = {}
    for role in dict.fromkeys(np.asarray(roles)[grouped].tolist()):
        rows = np.flatnonzero(grouped & (np.asarray(roles) == role))
        role_ids, first = np.unique(ids[rows], return_index=True)
        single = sizes[role_ids] == 1
        counts[role] = GroupCounts(len(role_ids), int(single.sum()), int((flat[rows[first]] & ~single).sum()))
    return counts


def _grouped(keys: Sequence[Hashable]) -> np.ndarray:
    """Bool[B]: the rows that have a group."""
    return np.array([key != -1 for key in keys], bool)
