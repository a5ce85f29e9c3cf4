"""The work of a step for one policy: its rows, their mini-batches, and the units whose gradients are kept apart."""

import dataclasses
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from marl_jax.learning.by_role import gradients
from marl_jax.learning.by_role.interventions import Array, PerRole
from marl_jax.learning.learner_config import LearnerConfig
from marl_jax.learning.objectives import Aim
from marl_jax.models.weight_table import Tree
from marl_jax.table import Table


@dataclasses.dataclass(frozen=True)
class Work:
    """The rows of one policy, and the log-probs that they are compared with."""

    policy: str
    frozen: Tree | None  # the weights under its adapter
    rows: Table
    places: np.ndarray  # of the rows among those of the step
    mini_batches: list[np.ndarray]  # indices of rows, one optimiser step each
    # Log-probs by row, for ratios; None where the only mini-batch computes them itself.
    old: list[np.ndarray] | None
    ref: list[np.ndarray] | None  # log-probs by row under the reference; None where nothing uses it
    units: list[Any]  # the keys by which gradients are kept apart
    unit_roles: list[str]
    per_role: PerRole | None
    aim: Aim | None = None  # of an objective of whole sequences
    other: Table | None = None  # kto: the rows with mismatched prompts,
    other_ref: Sequence[np.ndarray] = ()  # and their log-probs under the reference


def mini_batches_of(
    config: LearnerConfig, policy: str, count: int, step: int, together: np.ndarray | None = None
) -> list[np.ndarray]:
    """Indices of `count` rows for every optimiser step, in order; rows with equal numbers in `together` are in one."""
    parts = {"one": 1, "fixed": config.updates_fixed}.get(
        config.updates, -(-count // config.sequences_per_update)
    )
    members = np.arange(count) if together is None else np.unique(together, return_inverse=True)[1]
    items = count if together is None else int(members.max(initial=-1)) + 1
    parts = min(parts, items)
    if parts == 1:
        return [np.arange(count)] * config.epochs
    rng = np.random.default_rng([config.seed, step, zlib.crc32(policy.encode())])
    shuffled = [rng.permutation(items) for _ in range(config.epochs)]
    split = [part for order in shuffled for part in np.array_split(order, parts)]
    return [np.flatnonzero(np.isin(members, part)) for part in split]


def units_of(
    config: LearnerConfig, roles: list[str], calls: Iterable[tuple[str, int]]
) -> tuple[list[Any], list[str]]:
    """The keys by which gradients are kept apart: (units, the role of each); one unit without a role if not apart.

    `calls` are the roles and slots of a policy's calls.
    """
    if config.gradients == "slots":
        slots = sorted({*calls}, key=lambda unit: (roles.index(unit[0]), unit[1]))
        return slots, [role for role, _ in slots]
    return (roles, roles) if config.apart else ([None], [])


def calls_by_slot(roles: Sequence[str], rows: Table) -> np.ndarray:
    """Int[R, S]: the number of rows that are calls of each role in each slot."""
    slots, slot = np.unique(rows.slot, return_inverse=True)
    return np.stack([np.bincount(slot[rows.having(role=role)], minlength=len(slots)) for role in roles])


def per_role_of(
    config: LearnerConfig, roles: Sequence[str], calls: Array, unit_roles: Sequence[str]
) -> PerRole | None:
    """Inputs of interventions for the roles of a policy; None without intervention. `calls` are by slot."""
    if not config.interventions.needs_roles:
        return None
    limits = config.interventions.role_clip
    return PerRole(
        # The calls of all slots over those of the slot that has most; 1 for a role without calls.
        multiplicity=(calls.sum(1) / calls.max(1, initial=1)).clip(1).astype(np.float32),
        mixed=np.array([config.interventions.mixing.acts_on(role) for role in roles]),
        clip=np.array([limits.get(role, np.inf) for role in roles], np.float32) if limits else None,
        membership=gradients.role_matrix(unit_roles, roles).astype(np.float32),
    )
