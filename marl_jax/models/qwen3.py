"""Qwen3 as plain functions: a tree of weights and tokens in, logits out.

Training and scoring scan over the stacked layers (`unrolled` layers per iteration). The building blocks (`rms_norm`,
`rotation`, `project_qkv`, `project_out`, `mlp`) are shared with cached decoding.

    x += o(attention(rope(q_norm(q x)), rope(k_norm(k x)), v x));   x += down(silu(gate x) * up x)
"""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from marl_jax.fields import is_whole
from marl_jax.models import lora as lora_lib
from marl_jax.models import weight_table
from marl_jax.models.attention import deterministic_kernels, self_attention
from marl_jax.models.lora import LINEAR, LayerLora
from marl_jax.models.model_config import ModelConfig
from marl_jax.models.weight_table import Tree

UNROLLED = 8  # a CPU unrolls models with at most this many layers, see `unrolled`
Rotation = tuple[jax.Array, jax.Array]  # cosines and sines, see `rotation`

_random = jax.jit(weight_table.random, static_argnums=1)


def _dots(primitive: Any, *args: Any, **params: Any) -> Any:
    """Whether a value is saved: the outputs of products without batch axes, and of cuDNN's attention kernel, are."""
    if "dot_product_attention_fwd" in primitive.name:
        return True
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *args, **params)


# Policies for the values that a layer keeps for its backward pass; all other values are recomputed.
REMAT = {"layer": jax.checkpoint_policies.nothing_saveable, "dots": _dots}


def full_precision(fn: Callable) -> Callable:
    """Trace a function with true float32 products on every platform, and with JAX's default promotion rules.

    By default, GPUs (TF32) and TPUs (bfloat16 passes) round the factors. 16-bit products are not affected, and the
    backward pass inherits the settings of the forward pass. A caller's `jax_numpy_rank_promotion` and
    `jax_numpy_dtype_promotion` apply only to the caller's own code.
    """

    @functools.wraps(fn)
    def traced(*args: Any, **kwargs: Any) -> Any:
        ranks, dtypes = jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard")
        with jax.default_matmul_precision("highest"), ranks, dtypes:
            return fn(*args, **kwargs)

    return traced


def init(key: jax.Array | int, config: ModelConfig) -> Tree:
    """Random parameters from a PRNG key or an integer seed."""
    return _random(jax.random.key(int(key)) if is_whole(key) else key, config)


def forward(params: Tree, config: ModelConfig, tokens: ArrayLike, **kwargs: Any) -> jax.Array:
    """tokens [B,T] -> logits [B,T,V] in float32; keywords as in `hidden_states`."""
    weight_table.check_params(config, params, dtypes=False)
    return unembed(params, config, hidden_states(params, config, tokens, **kwargs))


@full_precision
def hidden_states(
    params: Tree,
    config: ModelConfig,
    tokens: ArrayLike,
    *,
    positions: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    adapters: Tree | None = None,
    adapter_index: ArrayLike | None = None,
    adapter_scale: float = 1.0,
    remat: str = "none",
    attention: str | None = None,
) -> jax.Array:
    """tokens [B,T] -> the final normed hidden states [B,T,H].

    positions [B,T] default to 0..T-1. segment_ids [B,T] mark the sequences of a packed row, 0 being padding;
    rows padded on the right need none, because no token sees a later one. adapters with adapter_index [B]
    (-1: none) add `adapter_scale` = alpha / rank times the adapter. remat is "none", "layer" (keep only the
    input of each layer) or "dots" (keep the matrix products). attention names an implementation of
    `models.attention`; the default is the platform's fastest.

    Token ids cannot be checked inside jit, so callers check them on the host: an id beyond the vocabulary makes its
    row NaN, at the latest from its position on; a negative id counts from the end of the vocabulary.
    """
    tokens = jnp.asarray(tokens)
    chex.assert_rank(tokens, 2)
    if not tokens.shape[1]:
        raise ValueError(f"tokens has shape {list(tokens.shape)}; a row needs at least one token")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"tokens are {tokens.dtype}; token ids are integers")
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    positions = jnp.asarray(positions)
    segment_ids = None if segment_ids is None else jnp.asarray(segment_ids)
    chex.assert_equal_shape([tokens, positions] + ([] if segment_ids is None else [segment_ids]))
    select = None
    if adapters is not None and adapter_index is not None:
        adapter_index = jnp.asarray(adapter_index)
        chex.assert_shape(adapter_index, tokens.shape[:1])
        select = lora_lib.select_rows(adapter_index, adapters, adapter_scale)
        adapters = lora_lib.by_layer(adapters)
    elif adapters is not None or adapter_index is not None:
        raise ValueError("adapters and adapter_index come together: which adapter does each row use?")

    angles = rotation(config, positions)

    def step(x: jax.Array, layer_and_adapters: tuple[Tree, Tree | None]) -> tuple[jax.Array, None]:
        layer, weights = layer_and_adapters
        lora = None if weights is None or select is None else LayerLora(weights, select)
        q, k, v = project_qkv(layer, config, x, angles, lora)
        x = x + project_out(layer, self_attention(q, k, v, segment_ids, attention), lora)
        return x + mlp(layer, config, x, lora), None

    x = through_layers(step, embed(params, tokens), (params["layers"], adapters), config, remat)
    return rms_norm(x, params["final_norm"], config.rms_norm_eps)


def through_layers(step: Callable, x: jax.Array, layers: Any, config: ModelConfig, remat: str) -> jax.Array:
    """x after `step(x, layer) -> (x, None)` for every layer of the stack; `remat` as in `hidden_states`."""
    count = unrolled(config, remat)
    if remat != "none":
        if remat not in REMAT:
            raise ValueError(f"remat is {remat!r}; it must be one of none, {', '.join(REMAT)}")
        # XLA merges equal computations of unrolled layers (but not of a loop's body): it would keep the first result
        # instead of recomputing it, and save no memory.
        step = jax.checkpoint(step, policy=REMAT[remat], prevent_cse=count > 1)
    return jax.lax.scan(step, x, layers, unroll=count)[0]


def unrolled(config: ModelConfig, remat: str) -> int:
    """The number of layers in a scan's body: all on a GPU, all of a small model with remat "none" on a CPU, else one.

    Unrolled layers take longer to compile, but need not copy values for the backward pass into a stack and out
    again. With deterministic GPU kernels, a 16-bit model scans one layer at a time: XLA fails on two equal calls of
    cuDNN's backward attention in one program, because it looks up the graph of one by another key (openxla/xla#46500).
    """
    match jax.default_backend():
        case "gpu":
            unroll = config.dtype == "float32" or not deterministic_kernels()
        case "cpu":
            unroll = config.num_hidden_layers <= UNROLLED and remat == "none"
        case _:
            unroll = False
    return config.num_hidden_layers if unroll else 1


def embed(params: Tree, tokens: jax.Array) -> jax.Array:
    """tokens [...] -> [...,H]"""
    return jnp.take(params["embed"], tokens, axis=0)


@full_precision
def unembed(params: Tree, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """hidden [...,H] -> logits [...,V] in float32."""
    if config.tie_word_embeddings:
        return jnp.einsum("...h,vh->...v", hidden, params["embed"], preferred_element_type=jnp.float32)
    return jnp.einsum("...h,hv->...v", hidden, params["lm_head"], preferred_element_type=jnp.float32)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight over the last axis, computed in float32 for all dtypes."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (normed * weight.astype(jnp.float32)).astype(x.dtype)


def rotation(config: ModelConfig, positions: jax.Array) -> Rotation:
    """Cosines and sines [...,1,D] of positions [...], for all heads and layers."""
    # Each step is rounded to float32 once, as in the reference implementation: one unit in the last place of
    # a frequency is 0.002 radians at position 40,000.
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    power = np.power(config.rope_theta, exponent.astype(np.float64)).astype(np.float32)
    angle = positions.astype(jnp.float32)[..., None, None] * (np.float32(1) / power)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    joined = lambda low, high: jnp.concatenate([low, high], axis=-1)
    # Without the barrier, the compiler would recompute them wherever they are used.
    return jax.lax.optimization_barrier((joined(cos, cos), joined(-sin, sin)))


def rope(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotate x [...,heads,D]: dimension i pairs with i + D/2."""
    cos, sin = rotation
    x32 = x.astype(jnp.float32)
    return (x32 * cos + _swap_halves(x32) * sin).astype(x.dtype)


def _swap_halves(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    if jax.default_backend() == "cpu":
        # A concatenation is a scalar loop on a CPU; a product with 0 and 1 is exact.
        return x @ np.roll(np.eye(2 * half, dtype=np.float32), half, axis=1)
    return jnp.roll(x, half, axis=-1)


def fused(layer: Tree) -> Tree:
    """The weights of a layer without an adapter; on a CPU, weights that read the same input are joined into one array,
    so that a third fewer products are compiled.
    """
    if jax.default_backend() != "cpu":
        return layer
    join = lambda *names: jnp.concatenate([layer[name] for name in names], axis=1)
    norms = [jnp.broadcast_to(layer[f"{name}_norm"], layer[name].shape[1:]) for name in "qk"]
    new = {"qkv": join("q", "k", "v"), "qk_norm": jnp.concatenate(norms), "gate_up": join("gate", "up")}
    return {name: layer[name] for name in ("attn_norm", "o", "mlp_norm", "down")} | new


def project_qkv(
    layer: Tree, config: ModelConfig, x: jax.Array, rotation: Rotation, lora: LayerLora | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x [B,...,H] -> q [B,...,N,D] and k [B,...,K,D], rotated by their positions, and v [B,...,K,D]."""
    eps = config.rms_norm_eps
    x = rms_norm(x, layer["attn_norm"], eps)
    if "qkv" in layer:
        assert lora is None, "fused weights take no adapter"
        y, heads = jnp.einsum("...h,hnd->...nd", x, layer["qkv"]), len(layer["qk_norm"])
        qk = rope(rms_norm(y[..., :heads, :], layer["qk_norm"], eps), rotation)
        q, k = jnp.split(qk, [config.num_attention_heads], axis=-2)
        return q, k, y[..., heads:, :]
    q = rms_norm(_linear("q", layer, x, lora), layer["q_norm"], eps)
    k = rms_norm(_linear("k", layer, x, lora), layer["k_norm"], eps)
    return rope(q, rotation), rope(k, rotation), _linear("v", layer, x, lora)


def project_out(layer: Tree, attended: jax.Array, lora: LayerLora | None = None) -> jax.Array:
    """attended [B,...,N,D] -> the output of attention, added to the residual stream, [B,...,H]."""
    return _linear("o", layer, attended, lora)


def mlp(layer: Tree, config: ModelConfig, x: jax.Array, lora: LayerLora | None = None) -> jax.Array:
    """x [B,...,H] -> the output of the gated MLP, added to the residual stream, [B,...,H]."""
    x = rms_norm(x, layer["mlp_norm"], config.rms_norm_eps)
    if "gate_up" in layer:
        assert lora is None, "fused weights take no adapter"
        gate, up = jnp.split(jnp.einsum("...h,hf->...f", x, layer["gate_up"]), 2, axis=-1)
    else:
        gate, up = _linear("gate", layer, x, lora), _linear("up", layer, x, lora)
    gated = jax.nn.silu(gate) * up
    return _linear("down", layer, gated, lora)


def _linear(name: str, layer: Tree, x: jax.Array, lora: LayerLora | None) -> jax.Array:
    # Every backend sums bfloat16 products in float32 and rounds once at the end. Asking for a float32 result
    # would change nothing here, but it would turn the backward pass into float32 products.
    inner, outer = LINEAR[name].split("->")
    y = jnp.einsum(f"...{inner},{inner}{outer}->...{outer}", x, layer[name])
    return y if lora is None else y + lora_lib.delta(name, x, lora)
