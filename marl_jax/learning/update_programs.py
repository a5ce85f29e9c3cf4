"""The compiled programs of the update: score rows, add up a role's gradient, take an optimiser step.

    score:      micro-batch -> log-probs and entropy of its tokens
    zero_carry: -> the first carry of `accumulate`, (parts, denominator), all 0
    accumulate: micro-batch -> parts[unit] += d numerator / d weights,  denominator += its own      (donated)
    apply:      parts / denominator -> Gram matrix -> interventions -> clip -> optimiser -> weights  (donated)

On a mesh, each device scores and differentiates its own sequences and has a carry of its own. The carries have a
leading axis that is sharded over "data", and devices along "data" exchange nothing before `apply` adds the carries up.
The programs are jitted here once, with hashable settings, so that all learners with equal settings share them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from marl_jax.learning.batching import MicroBatch
from marl_jax.learning.by_role import gradients, interventions
from marl_jax.learning.learner_config import LearnerConfig, StepSettings
from marl_jax.learning.logprobs import token_logprobs
from marl_jax.learning.losses import OBJECTIVES, LossConfig, policy_loss
from marl_jax.learning.network import Network
from marl_jax.learning.objectives import surrogate
from marl_jax.learning.optimiser import clip_factor, transformation
from marl_jax.models.qwen3 import full_precision
from marl_jax.models.weight_table import Tree
from marl_jax.own import as_static


@dataclasses.dataclass(frozen=True)
class Settings:
    """The static settings of `score` and `accumulate`."""

    network: Network  # computes hidden states and logits
    loss: LossConfig  # which loss
    chunk: int  # tokens whose logits exist at one time; at least one of each sequence
    sampler_weights: bool  # correct for the sampler: weights of tokens, masked sequences
    mesh: Mesh | None = None  # the sequences of a micro-batch are sharded over its axis "data"
    together: bool = False  # loops end on all "data" devices at once: weights are sharded over "model"
    own: Any = None  # the function of a custom loss, whose name is in `loss`

    @classmethod
    def of(cls, network: Network, config: LearnerConfig, mesh: Mesh | None = None) -> "Settings":
        """The settings of a learner. Objectives get no sampler weights: their texts may not have been sampled."""
        loss = config.loss
        weights = loss.kind not in OBJECTIVES and config.old_logprobs == "trainer" and loss.corrects_sampler
        own = as_static(loss.kind, "loss")
        return cls(network, surrogate(loss), config.logprob_chunk, weights, mesh, own=own)

    @property
    def on_device(self) -> "Settings":
        """The settings of one device along "data"."""
        assert self.mesh is not None
        return dataclasses.replace(self, mesh=None, together=self.mesh.shape.get("model", 1) > 1)


@functools.partial(jax.jit, static_argnums=0)
@full_precision
def score(settings: Settings, tree: Tree, frozen: Tree, batch: MicroBatch) -> tuple[jax.Array, jax.Array]:
    """Log-prob and entropy, [G, M] each."""
    if settings.mesh is not None:
        local = functools.partial(score, settings.on_device)
        return _on_each(local, settings.mesh, "--d")(tree, frozen, batch)
    if batch.table is not None and len(batch.tokens) > 1:
        score_pack = lambda nothing, pack: (nothing, score(settings, tree, frozen, pack))
        return jax.tree.map(lambda x: x[:, 0], _over_packs(score_pack, (), batch, settings.together)[1])
    hidden = settings.network.hidden(tree, frozen, batch)
    hidden = jnp.take_along_axis(hidden, batch.source[..., None], axis=1)
    head = settings.network.head(tree, frozen)
    return token_logprobs(
        hidden, head, batch.targets, temperature=batch.temperature, kept=batch.kept, chunk=settings.chunk
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def zero_carry(
    tree: Tree, units: int, shardings: tuple[NamedSharding, ...] | None = None, mesh: Mesh | None = None
) -> tuple[Tree, jax.Array]:
    """The carry of zeros that `accumulate` starts from, one per device along "data"; `shardings` are the parts'."""
    leading = () if mesh is None else (mesh.shape["data"],)
    leaves, structure = jax.tree.flatten(tree)
    parts = [jnp.zeros((*leading, units, *leaf.shape), jnp.float32) for leaf in leaves]
    denominator = jnp.zeros(leading, jnp.float32)
    if shardings is not None:
        parts = list(map(jax.lax.with_sharding_constraint, parts, shardings))
    if mesh is not None:
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        denominator = jax.lax.with_sharding_constraint(denominator, sharding)
    return jax.tree.unflatten(structure, parts), denominator


@functools.partial(jax.jit, static_argnums=0, static_argnames=("anchored", "on_policy"), donate_argnums=1)
@full_precision
def accumulate(
    settings: Settings,
    carry: tuple[Tree, jax.Array],  # parts with leading axis [K], denominator []; over a mesh [D, K] and [D]
    tree: Tree,
    frozen: Tree,
    batch: MicroBatch,
    unit: jax.Array,  # [] index of the part that the micro-batch adds to
    *,
    anchored: bool,  # the loss has a KL to the reference
    on_policy: bool,  # the ratio is taken against the weights that are differentiated
) -> tuple[tuple[Tree, jax.Array], Any]:
    """The carry with the micro-batch added, and (loss, log-probs, entropy); on a mesh, one loss per device [D]."""
    if settings.mesh is not None:
        local = functools.partial(accumulate, settings.on_device, anchored=anchored, on_policy=on_policy)

        def on_device(carry: Any, tree: Tree, frozen: Tree, batch: MicroBatch, unit: jax.Array) -> Any:
            carry, batch = jax.tree.map(lambda x: x[0], (carry, batch))
            carry, (loss, *outputs) = local(carry, tree, frozen, batch, unit)
            return *jax.tree.map(lambda x: x[None], (carry, loss)), outputs

        pieces = _slices(batch, settings.mesh.shape["data"])
        carry, loss, outputs = _on_each(on_device, settings.mesh, "d--d-")(carry, tree, frozen, pieces, unit)
        return carry, (loss, *outputs)
    parts, denominator = carry

    def numerator(tree: Tree, batch: MicroBatch) -> tuple[jax.Array, Any]:
        logp, entropy = score(settings, tree, frozen, batch)
        bounds = {"clip_low": batch.clip_low, "clip_high": batch.clip_high}
        clip_bounds = {name: bound for name, bound in bounds.items() if bound is not None}  # of each token
        loss = policy_loss(
            logp,
            jax.lax.stop_gradient(logp) if on_policy else batch.old_logp,
            batch.advantages,
            batch.mask,
            sampler_logp=batch.sampler_logp if settings.sampler_weights else None,
            ref_logp=batch.ref_logp if anchored else None,
            kl_coef=batch.kl_coef if anchored else 0.0,
            entropy=entropy,
            sequences=batch.sequences,
            **{**vars(settings.loss), **clip_bounds},
        )
        return loss.numerator, (loss, logp, entropy)

    def add(total: Tree, batch: MicroBatch) -> tuple[Tree, Any]:
        gradient, out = jax.grad(numerator, has_aux=True)(tree, batch)
        return jax.tree.map(jnp.add, total, gradient), jax.lax.stop_gradient(out)

    take_part = functools.partial(jax.lax.dynamic_index_in_dim, index=unit, keepdims=False)
    put_part = functools.partial(jax.lax.dynamic_update_index_in_dim, index=unit, axis=0)
    if batch.table is None or len(batch.tokens) == 1:
        part, out = add(jax.tree.map(take_part, parts), batch)
    else:
        part, (losses, *values) = _over_packs(add, jax.tree.map(take_part, parts), batch, settings.together)
        out = (jax.tree.map(lambda x: x.sum(0), losses), *(x[:, 0] for x in values))
    return (jax.tree.map(put_part, parts, part), denominator + out[0].denominator), out


def _over_packs(step: Callable[..., Any], carry: Any, batch: MicroBatch, together: bool) -> Any:
    """Like `lax.scan` of `step(carry, pack [1, ...]) -> (carry, value)`, but without the empty packs at the end.

    Pack by pack, because on a CPU the buffers of one pack stay in cache, and mapped memory is reused. `together`: all
    "data" devices iterate as often as the fullest one: if weights are sharded, XLA syncs them in every iteration.
    """
    packs = _slices(batch, len(batch.tokens))
    pack_at = lambda i: jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), packs)
    shapes = jax.eval_shape(step, carry, pack_at(0))[1]
    values = jax.tree.map(lambda x: jnp.zeros((len(batch.tokens), *x.shape), x.dtype), shapes)

    def body(i: jax.Array, carry_and_values: tuple[Any, Any]) -> tuple[Any, Any]:
        carry, value = step(carry_and_values[0], pack_at(i))
        put_value = functools.partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
        return carry, jax.tree.map(put_value, carry_and_values[1], value)

    filled = jnp.sum(jnp.any(batch.segments != 0, axis=1))
    filled = jax.lax.pmax(filled, "data") if together else filled
    return jax.lax.fori_loop(0, filled, body, (carry, values))


def _slices(batch: MicroBatch, count: int) -> MicroBatch:
    """Every array [G, ...] as [count, G / count, ...]; `sequences` count from 0 in each slice."""
    batch = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
    valid = batch.mask != 0
    first = jnp.min(batch.sequences, axis=(1, 2), where=valid, initial=batch.sequences.size, keepdims=True)
    return dataclasses.replace(batch, sequences=jnp.where(valid, batch.sequences - first, 0))


def _on_each(act: Callable[..., Any], mesh: Mesh, cut: str) -> Callable[..., Any]:
    """`act` on each device along "data", with its shard of the arguments marked d in `cut`; others are replicated."""
    specs = tuple(PartitionSpec("data") if mark == "d" else PartitionSpec() for mark in cut)
    # With check_vma, a gradient with respect to replicated weights would be summed over all devices.
    return jax.shard_map(
        act, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("data"), axis_names={"data"}, check_vma=False
    )


@functools.partial(jax.jit, static_argnames="settings", donate_argnums=(0, 1, 2))
@full_precision
def apply(
    tree: Tree,
    state: Any,
    damping: Tree | None,
    carry: tuple[Tree, jax.Array],  # the last carry of `accumulate`
    rate: jax.Array,  # [] learning rate
    roles: interventions.PerRole | None,  # None if no intervention weights the roles
    *,
    settings: StepSettings,
) -> tuple[Tree, Any, Tree | None, dict[str, Any]]:
    """New weights, optimiser state and damping average, unchanged if the gradient is not finite; outputs to report."""
    config, mixing, by_role = settings.optimiser, settings.mixing, settings.split_by_role
    parts, denominator = carry
    if denominator.ndim:
        parts, denominator = jax.tree.map(lambda x: x.sum(0), carry)
    parts = jax.tree.map(lambda x: x / jnp.where(denominator == 0, 1.0, denominator), parts)
    out: dict[str, Any] = {}
    gradient = jax.tree.map(lambda x: x.sum(0), parts)
    if by_role:
        out["gram"] = gram = gradients.gram_matrix(parts)
        out["weight"] = jnp.ones(gram.shape[0], jnp.float32)
    if roles is not None:
        role_gram = roles.membership @ gram @ roles.membership.T
        out["weight"] = weight = interventions.coefficients(mixing, role_gram, roles) @ roles.membership
        gradient = jax.tree.map(lambda x: jnp.einsum("k,k...->...", weight, x), parts)
    new_damping = damping
    if damping is not None:
        gradient, new_damping, out["damping_cosine"] = interventions.damp(
            gradient, damping, strength=mixing.damping, window=mixing.damping_window
        )
        if by_role:
            out["weight"] = out["weight"] * interventions.damp_factor(out["damping_cosine"], mixing.damping)
    norm = optax.tree.norm(gradient)
    factor = clip_factor(norm, config.grad_clip)
    clipped = jax.tree.map(lambda g: g * factor, gradient)
    direction, new_state = transformation(config).update(clipped, state, tree)
    change = jax.tree.map(lambda d: rate * d, direction)
    finite = jnp.isfinite(norm)
    out |= {
        "finite": finite,
        "grad_norm": norm,
        "clip_factor": factor,
        "update_norm": jnp.where(finite, optax.tree.norm(change), 0.0),
    }
    if settings.layer_norms:
        out["layers"] = gradients.layer_norms(parts)
    new_tree = jax.tree.map(lambda p, c: (p + c).astype(p.dtype), tree, change)
    keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
    return keep(new_tree, tree), keep(new_state, state), keep(new_damping, damping), out
