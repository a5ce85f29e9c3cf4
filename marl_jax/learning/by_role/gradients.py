"""Diagnostics by role, computed from the Gram matrix of the roles' gradients.

Role i's part g_i is additive: the policy's gradient is sum_i g_i, exactly, whatever the loss aggregation.

    G_ij = <g_i, g_j>    contribution_i = |g_i|    coherence = |sum g| / sum |g|    amplification = |sum g| / mean |g|

Roles of different policies share no weights: their cosine is None, never 0.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marl_jax.models.weight_table import Tree


def gram_matrix(parts: Tree) -> jax.Array:
    """[K, K] inner products of K gradients stacked on the leading axis of every leaf, summed in float32."""

    def products(x: jax.Array) -> jax.Array:
        # Fused into one pass that keeps the layout of every leaf; a dot would reorder the axes first.
        x = x.astype(jnp.float32)
        return jnp.sum(x[:, None] * x[None], axis=tuple(range(2, x.ndim + 1)))

    return sum(jax.tree.leaves(jax.tree.map(products, parts)), jnp.zeros((), jnp.float32))


def layer_norms(parts: Tree) -> dict[str, jax.Array]:
    """Norms [K] of each top-level group of weights, with stacked layers split: {"embed": [K], "layers/0": [K], ...}.

    Every leaf of an adapter is a stack of layers.
    """
    squares: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(parts):
        name = path[0].key
        stacked = name == "layers" or getattr(path[-1], "key", None) in ("a", "b")
        leaf = jnp.square(leaf.astype(jnp.float32)).reshape(*leaf.shape[: 1 + stacked], -1).sum(-1)
        split = {f"layers/{i}": leaf[:, i] for i in range(leaf.shape[1])} if stacked else {name: leaf}
        for group, square in split.items():
            squares[group] = squares.get(group, 0) + square
    return {name: jnp.sqrt(total) for name, total in squares.items()}


def describe(gram: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """The diagnostics of one gradient with K parts called `names`; None for a ratio of zeros."""
    gram = np.asarray(gram, np.float64)
    norms = np.sqrt(np.maximum(np.diag(gram), 0))
    mass, resultant = float(norms.sum()), float(np.sqrt(max(gram.sum(), 0)))
    shares = norms / mass if mass > 0 else norms
    moving = int(np.sum(norms > 0))  # a part without a gradient does not count in the ratios
    positive = shares[shares > 0]
    cosines = {
        (names[i], names[j]): float(gram[i, j] / (norms[i] * norms[j]))
        for i, j in itertools.combinations(range(len(names)), 2)
        if norms[i] > 0 and norms[j] > 0
    }
    return {
        "norm": dict(zip(names, norms.tolist())),
        "share": dict(zip(names, shares.tolist() if mass > 0 else [None] * len(names))),
        "resultant": resultant,
        "coherence": resultant / mass if mass > 0 else None,
        "amplification": resultant / (mass / moving) if mass > 0 else None,
        "dominance": float(shares.max()) if mass > 0 else None,
        "effective": float(np.exp(-np.sum(positive * np.log(positive)))) if mass > 0 else None,
        "cosine": cosines,
        "conflict_rate": sum(c < 0 for c in cosines.values()) / len(cosines) if cosines else None,
    }


def role_matrix(unit_roles: Sequence[str], roles: Sequence[str]) -> np.ndarray:
    """[R, K], 1 where a unit (a role, or a slot of a role) belongs to the role, else 0."""
    return np.array([[float(unit == role) for unit in unit_roles] for role in roles])


def all_cosines(
    described: Mapping[str, Mapping[str, Any]], roles: Mapping[str, str]
) -> dict[tuple[str, str], Any]:
    """Cosine of every pair of roles; None if they have separate weights, or one had no gradient.

    `described` is {policy: describe(...)}, `roles` is the map from roles (or "role/slot") to policies. A role
    with slots in several policies appears once for each policy, under its first key there.
    """
    keys: dict[tuple[str, str], str] = {}  # {(role, policy): its name in the result}
    for key, policy in roles.items():
        keys.setdefault((key.split("/")[0], policy), key)
    pairs = {}
    for ((a, policy), x), ((b, other), y) in itertools.combinations(keys.items(), 2):
        cosines = described.get(policy, {}).get("cosine", {}) if policy == other else {}
        pairs[x, y] = cosines.get((a, b), cosines.get((b, a)))
    return pairs
