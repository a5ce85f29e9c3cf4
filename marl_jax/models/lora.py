"""Low-rank adapters on every linear layer, many at once: y = x W + scale (x A) B, stacked on a leading axis.

A batch with mixed adapters is a dense masked product: x is multiplied with the A of all adapters side by side, ranks of
other adapters than the row's own are set to 0, and the result is multiplied with all B. No row gathers its weights.

    adapters = {"q": {"a": [P,L,H,r], "b": [P,L,r,N,D]}, ..., "o": {"a": [P,L,N,D,r], "b": [P,L,r,H]}, ...}
"""

import functools
import itertools
import math
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp

from marl_jax.fields import is_whole
from marl_jax.models.model_config import ModelConfig
from marl_jax.models.weight_table import Tree, table

# Axes of each linear layer, input -> output: h hidden, n heads, k KV heads, d head_dim, m MLP.
LINEAR = {
    "q": "h->nd",
    "k": "h->kd",
    "v": "h->kd",
    "o": "nd->h",
    "gate": "h->m",
    "up": "h->m",
    "down": "m->h",
}


@flax.struct.dataclass
class LayerLora:
    """The adapters of one layer, with their R = P r ranks side by side, and the ranks that each row of a batch uses."""

    weights: dict[str, Any]  # {"q": {"a": [*in,R], "b": [R,*out]}, ...}
    select: jax.Array  # [B,R] float32: the scale at the ranks of the row's own adapter, 0 elsewhere


def init_lora(key: jax.Array | int, config: ModelConfig, rank: int, num_adapters: int) -> Tree:
    """`num_adapters` fresh adapters in the model's dtype; b is zero, so that each leaves the base model unchanged."""
    if rank < 1 or num_adapters < 1:
        raise ValueError(f"rank is {rank} and num_adapters {num_adapters}; both must be at least 1")
    key = jax.random.key(int(key)) if is_whole(key) else key
    return _fresh(key, config, rank, num_adapters)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _fresh(key: jax.Array, config: ModelConfig, rank: int, num_adapters: int) -> Tree:
    layers = table(config)["layers"]
    shapes = {}
    for name in LINEAR:
        depth, *dims = layers[name].shape
        inner, outer = dims[: layers[name].inputs], dims[layers[name].inputs :]
        shapes[name] = (num_adapters, depth, *inner, rank), (num_adapters, depth, rank, *outer)
    # One draw for all adapters: each separate draw would be compiled separately.
    offsets = list(itertools.accumulate(math.prod(a) for a, _ in shapes.values()))
    noise = jnp.split(jax.random.normal(key, offsets[-1:], jnp.float32), offsets[:-1])
    adapters = {}
    for values, (name, (a, b)) in zip(noise, shapes.items()):
        scale = (3 * math.prod(a[2:-1])) ** -0.5  # PEFT's initial standard deviation
        adapters[name] = {
            "a": (scale * values.reshape(a)).astype(config.dtype),
            "b": jnp.zeros(b, config.dtype),
        }
    return adapters


def num_adapters(adapters: Tree) -> int:
    """The number of stacked adapters."""
    return adapters["q"]["a"].shape[0]


def select_rows(adapter_index: jax.Array, adapters: Tree, scale: float) -> jax.Array:
    """adapter_index [B] -> [B,R]: `scale` at the ranks of the row's adapter; an index of -1 is the base model."""
    chex.assert_rank(adapter_index, 1)
    one_hot = jax.nn.one_hot(adapter_index, num_adapters(adapters), dtype=jnp.float32)
    return scale * jnp.repeat(one_hot, adapters["q"]["a"].shape[-1], axis=-1)


def by_layer(adapters: Tree) -> Tree:
    """Layers first, ranks side by side: a [L,*in,R], b [L,R,*out], ready for a scan or a slice of one layer."""

    def join(pair: Tree) -> Tree:
        a, b = jnp.moveaxis(pair["a"], 0, -2), jnp.moveaxis(pair["b"], 0, 1)
        return {"a": a.reshape(*a.shape[:-2], -1), "b": b.reshape(len(b), -1, *b.shape[3:])}

    return {name: join(pair) for name, pair in adapters.items()}


def delta(name: str, x: jax.Array, lora: LayerLora) -> jax.Array:
    """The term that the selected adapters add to linear layer `name`: x [B,...,*in] -> [B,...,*out]."""
    inner, outer = LINEAR[name].split("->")
    weights = lora.weights[name]
    low = jnp.einsum(f"...{inner},{inner}r->...r", x, weights["a"])
    select = lora.select.reshape(x.shape[0], *(1,) * (low.ndim - 2), -1)
    scaled = (low * select).astype(low.dtype)  # in float32: most scales, such as 16/6, are not bfloat16
    return jnp.einsum(f"...r,r{outer}->...{outer}", scaled, weights["b"])


def merge(params: Tree, adapter: Tree, scale: float) -> Tree:
    """The parameters with one adapter, a [L,*in,r] and b [L,r,*out], added to the weights; summed in float32."""
    layers = dict(params["layers"])
    for name, axes in LINEAR.items():
        inner, outer = axes.split("->")
        a, b = (adapter[name][part].astype(jnp.float32) for part in "ab")
        update = jnp.einsum(f"l{inner}r,lr{outer}->l{inner}{outer}", a, b, precision="highest")
        weight = layers[name]
        layers[name] = (weight.astype(jnp.float32) + scale * update).astype(weight.dtype)
    return {**params, "layers": layers}
