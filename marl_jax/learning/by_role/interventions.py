"""Interventions on the roles' gradients: mostly coefficients that depend only on their Gram matrix.

    gradient = sum_i c_i g_i,    c = 1 for no intervention

A projection of one part on another is a combination of parts too, so even conflict projection needs only K x K
numbers and no pass over the weights. Only damping reads a moving average of gradients; frozen roles have no
rows. All functions are pure, jitted with the update, and applied in the order of this file, before clipping.
The KL anchor (I1) is a term of the loss: `kl_coef` per role.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from annotated_types import Ge, Gt, Le

from marl_jax import fields
from marl_jax.fields import Count, Positive
from marl_jax.models.weight_table import Tree

Array = jax.Array | np.ndarray
Coefficient = Annotated[float, Ge(0), Le(float(np.finfo(np.float32).max))]


@dataclasses.dataclass(frozen=True)
class Mixing:
    """Interventions on the roles' parts of the gradient; every switch is off by default."""

    normalise_multiplicity: bool = False  # divide a role's part by its number of parallel calls
    balance: Literal["off", "equalise", "cap"] = "off"  # changes the roles' shares of gradient mass
    max_share: Annotated[float, Gt(0), Le(1)] = 0.5  # largest share under balance "cap"
    project_conflicts: bool = False  # PCGrad between roles
    damping: Annotated[float, Ge(0), Le(0.3)] = 0.0  # lambda of coherence damping (I6)
    damping_window: Count = 32  # window of the moving average that damping compares with
    roles: tuple[str, ...] = ()  # roles whose parts these switches change; empty: all roles

    def __post_init__(self) -> None:
        fields.check(self)

    @property
    def changes_weights(self) -> bool:
        """Whether the roles' parts get different coefficients."""
        return self.normalise_multiplicity or self.balance != "off" or self.project_conflicts

    def acts_on(self, role: str) -> bool:
        """Whether the role's part of a gradient is changed."""
        return not self.roles or role in self.roles


@dataclasses.dataclass(frozen=True)
class InterventionConfig:
    """Interventions on roles; every switch is off by default."""

    # How the roles' parts of a gradient are weighted.
    mixing: Mixing = dataclasses.field(default_factory=Mixing)
    # {role: weight of the KL to the reference of its policy}; 0 measures the KL without a loss. The study's I1.
    kl_coef: Mapping[str, Coefficient] = dataclasses.field(default_factory=dict)
    role_clip: Mapping[str, Positive] = dataclasses.field(default_factory=dict)  # {role: largest norm}
    freeze: tuple[str, ...] = ()  # roles whose calls do not train
    alternate: tuple[str, ...] = ()  # roles that are trained in turn
    alternate_every: Count = 1  # steps of each turn

    def __post_init__(self) -> None:
        fields.check(self)
        if both := sorted({*self.freeze} & {*self.alternate}):
            raise ValueError(f"{both} are both frozen and alternated; choose one")
        turns = self.alternate
        if turns and not len({*turns}) == len(turns) > 1:
            raise ValueError(f"alternate is {', '.join(turns)}; it must name two roles or more, each once")

    @property
    def needs_roles(self) -> bool:
        """Whether gradients must be split by role even without diagnostics."""
        return self.mixing.changes_weights or bool(self.role_clip)

    def damps(self, role: str) -> bool:
        """Whether the role's part is damped."""
        return self.mixing.damping > 0 and self.mixing.acts_on(role)

    @property
    def named(self) -> dict[str, tuple[str, ...]]:
        """{setting: roles that it names}."""
        own = {name: tuple(getattr(self, name)) for name in ("kl_coef", "role_clip", "freeze", "alternate")}
        return own | {"mixing.roles": self.mixing.roles}

    def trains(self, role: str, step: Any) -> Any:
        """Whether `role` is trained in this step (0, 1, 2, ...), not frozen; a traced value if the step is traced."""
        if role in self.alternate:
            return step // self.alternate_every % len(self.alternate) == self.alternate.index(role)
        return role not in self.freeze


class PerRole(NamedTuple):
    """Inputs of `coefficients` about each role of a policy."""

    multiplicity: Array  # [R] mean number of parallel calls
    mixed: Array  # [R] whether `Mixing` acts on the role
    clip: Array | None  # [R] largest norm, infinite for a role without a limit; None without `role_clip`
    membership: Array  # [R, K] 1 where one of the K parts of the gradient is the role's


def coefficients(config: Mixing, gram: Array, roles: PerRole) -> jax.Array:
    """[R]: the weight of each role's part, from their Gram matrix [R, R], after all interventions but damping."""
    # Row i: role i's new part as a combination of the original parts.
    mix = jnp.eye(gram.shape[0], dtype=jnp.float32)
    if config.normalise_multiplicity:
        mix = mix / jnp.where(roles.mixed, roles.multiplicity, 1.0)[:, None]
    if config.balance != "off":
        cap = config.max_share if config.balance == "cap" else None
        mix = balance(mix @ gram @ mix.T, cap, roles.mixed)[:, None] * mix
    if config.project_conflicts:
        stripped = project_conflicts(mix @ gram @ mix.T) @ mix
        mix = jnp.where(roles.mixed[:, None], stripped, mix)
    if roles.clip is not None:
        mix = clip(mix @ gram @ mix.T, roles.clip)[:, None] * mix
    return mix.sum(axis=0)


def balance(gram: Array, max_share: float | None, mixed: Array | bool = True) -> jax.Array:
    """[R] factors that give every role the mean norm (None), or leave none more than `max_share` of the mass.

    Roles that are not `mixed` [R] count in the mass, and their factor is 1.
    """
    norms = _norms(gram)
    mixed_norms = jnp.where(mixed, norms, 0.0)
    rest_mass = jnp.where(mixed, 0.0, norms).sum()  # mass of the roles that are not mixed
    if max_share is None:
        target = norms.sum() / jnp.maximum((norms > 0).sum(), 1)
        return jnp.where(mixed_norms > 0, target / jnp.where(mixed_norms > 0, mixed_norms, 1.0), 1.0)
    # Cutting the k largest norms to one level gives level = max_share * (k * level + tail_mass). The smallest k is
    # taken for which no other norm is above that level. If the other roles have no mass, the level is at least the
    # smallest norm, because a further cut would change no share; with too few roles for the cap, all get that norm.
    ordered = jnp.sort(mixed_norms)[::-1]
    tail_mass = jnp.cumsum(ordered[::-1])[::-1] + rest_mass  # without the k largest; k from 0
    room = 1 - jnp.arange(norms.size) * max_share
    levels = jnp.where(room > 1e-6, max_share * tail_mass / jnp.maximum(room, 1e-6), 0.0)
    fits = levels >= ordered * (1 - 1e-6)
    smallest = jnp.where(rest_mass > 0, 0.0, jnp.min(jnp.where(mixed_norms > 0, mixed_norms, jnp.inf)))
    level = jnp.where(fits.any(), jnp.maximum(levels[jnp.argmax(fits)], smallest), smallest)
    return jnp.where(mixed_norms > level, level / jnp.where(mixed_norms > 0, mixed_norms, 1.0), 1.0)


def project_conflicts(gram: Array) -> jax.Array:
    """PCGrad: [R, R] mixing that removes from each part its component against each other part, in order."""
    size = gram.shape[0]
    rows = []
    for i in range(size):
        row = jnp.eye(size, dtype=jnp.float32)[i]
        for j in range(size):
            if i != j:
                along = (row @ gram[:, j]) / jnp.where(gram[j, j] > 0, gram[j, j], 1.0)
                row = row.at[j].add(-jnp.minimum(along, 0.0))
        rows.append(row)
    return jnp.stack(rows)


def clip(gram: Array, limits: Array) -> jax.Array:
    """[R] factors that reduce every norm to its limit."""
    norms = _norms(gram)
    return jnp.where(norms > limits, limits / jnp.where(norms > 0, norms, 1.0), 1.0)


def damp(gradient: Tree, ema: Tree, *, strength: float, window: int) -> tuple[Tree, Tree, jax.Array]:
    """I6, coherence damping: (g (1 - lambda max(0, cos(g, ema))), the new average of damped gradients, the cosine).

    The average starts at the first gradient that is not 0, so that this gradient is scaled by 1 - lambda.
    """
    begun = jnp.stack([jnp.any(x != 0) for x in jax.tree.leaves(ema)]).any()
    ema = jax.tree.map(lambda e, g: jnp.where(begun, e, g), ema, gradient)
    # Both are normalised first: the square of a small norm may underflow in float32.
    cosine = jnp.clip(_dot(_unit(gradient), _unit(ema)), -1.0, 1.0)
    damped = jax.tree.map(lambda g: g * damp_factor(cosine, strength), gradient)
    ema = jax.tree.map(lambda e, g: e + (g - e) / window, ema, damped)
    return damped, ema, cosine


def damp_factor(cosine: jax.Array, strength: float) -> jax.Array:
    """The factor by which damping scales a gradient."""
    return 1 - strength * jnp.maximum(cosine, 0.0)


def _norms(gram: Array) -> jax.Array:
    return jnp.sqrt(jnp.maximum(jnp.diagonal(gram), 0.0))


def _unit(tree: Tree) -> Tree:
    """The tree scaled to norm 1; a tree of zeros is unchanged."""
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in jax.tree.leaves(tree)]))
    scaled = jax.tree.map(lambda x: x / jnp.where(largest > 0, largest, 1.0), tree)
    norm = optax.tree.norm(scaled)
    return jax.tree.map(lambda x: x / jnp.where(norm > 0, norm, 1.0), scaled)


def _dot(a: Tree, b: Tree) -> jax.Array:
    return sum(jax.tree.leaves(jax.tree.map(lambda x, y: jnp.sum(x * y), a, b)), jnp.zeros((), jnp.float32))
