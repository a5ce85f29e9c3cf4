"""The work of a step for one policy: its rows, their mini-batches, and the units that its gradient is split by."""

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

    policy: str  # its name
    frozen: Tree | None  # the weights under its adapter
    rows: Table  # the rows that it learns from
    row_indices: np.ndarray  # indices of the rows in the table of the step
    mini_batches: list[np.ndarray]  # indices into `rows`, one optimiser step each
    # By row, the log-probs that the ratio is taken against; None if the gradient's own log-probs are used.
    old: list[np.ndarray] | None
    ref: list[np.ndarray] | None  # by row, log-probs under the reference; None if nothing uses them
    units: list[Any]  # keys of the parts of the gradient
    unit_roles: list[str]  # role of each unit
    per_role: PerRole | None  # inputs of interventions
    aim: Aim | None  # what an objective of whole sequences learns from
    mismatched: Table | None  # kto: the rows with mismatched prompts
    mismatched_ref: Sequence[np.ndarray]  # kto: their log-probs under the reference


def mini_batches_of(
    config: LearnerConfig, policy: str, count: int, step: int, together: np.ndarray | None = None
) -> list[np.ndarray]:
    """Row indices of each optimiser step, in order; rows with equal numbers in `together` are in the same step."""
    by_sequences = -(-count // config.sequences_per_update)
    number = {"one": 1, "fixed": config.updates_fixed, "sequences": by_sequences}[config.updates]
    item_of_row = np.arange(count) if together is None else np.unique(together, return_inverse=True)[1]
    items = count if together is None else int(item_of_row.max(initial=-1)) + 1
    number = min(number, items)
    if number == 1:
        return [np.arange(count)] * config.epochs
    rng = np.random.default_rng([config.seed, step, zlib.crc32(policy.encode())])
    shuffled = [rng.permutation(items) for _ in range(config.epochs)]
    mini_batches = [part for order in shuffled for part in np.array_split(order, number)]
    return [np.flatnonzero(np.isin(item_of_row, part)) for part in mini_batches]


def units_of(
    config: LearnerConfig, roles: list[str], calls: Iterable[tuple[str, int]]
) -> tuple[list[Any], list[str]]:
    """(keys of the parts of a gradient, the role of each key); one key None without a role if gradients are not split.

    `calls` are the (role, slot) of the policy's calls.
    """
    if config.gradients == "slots":
        slots = sorted({*calls}, key=lambda unit: (roles.index(unit[0]), unit[1]))
        return slots, [role for role, _ in slots]
    return (roles, roles) if config.split_by_role else ([None], [])


def calls_by_slot(roles: Sequence[str], rows: Table) -> np.ndarray:
    """Int[R, S]: the number of rows of each role in each slot."""
    slots, slot = np.unique(rows.slot, return_inverse=True)
    return np.stack([np.bincount(slot[rows.having(role=role)], minlength=len(slots)) for role in roles])


def per_role_of(
    config: LearnerConfig, roles: Sequence[str], calls: Array, unit_roles: Sequence[str]
) -> PerRole | None:
    """Inputs of interventions for the roles of a policy; None if none needs them. `calls`: see `calls_by_slot`."""
    if not config.interventions.needs_roles:
        return None
    limits = config.interventions.role_clip
    return PerRole(
        # Calls of all slots / calls of the slot with the most; 1 for a role without calls.
        multiplicity=(calls.sum(1) / calls.max(1, initial=1)).clip(1).astype(np.float32),
        mixed=np.array([config.interventions.mixing.acts_on(role) for role in roles]),
        clip=np.array([limits.get(role, np.inf) for role in roles], np.float32) if limits else None,
        membership=gradients.role_matrix(unit_roles, roles).astype(np.float32),
    )
