"""The hidden states of a micro-batch: plain packed sequences, or trees of completions behind a shared prompt.

A completion's token attends to the prompt and to its own completion under one softmax, written out over the two
score blocks. (Two attentions joined afterwards by a log-sum-exp need the gradient through it; this has no seam.)
"""

from typing import Any

import jax
import jax.numpy as jnp

from marl_jax.models import lora as lora_lib
from marl_jax.models import qwen3
from marl_jax.models.attention import causal_mask, self_attention
from marl_jax.models.config import ModelConfig

REMAT = {
    "layer": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def hidden_states(
    params: Any,
    config: ModelConfig,
    tokens: jax.Array,  # [G, S], S = prefix + branches * length
    *,
    positions: jax.Array,  # [G, S]
    segment_ids: jax.Array,  # [G, S]
    prefix: int,
    branches: int,
    adapter: Any = None,
    adapter_scale: float = 1.0,
    remat: str = "none",
) -> jax.Array:
    """[G, S, H], equal to computing every row alone. `adapter`, without a policy axis, acts on every row."""
    if remat != "none" and remat not in REMAT:
        raise ValueError(f"remat is {remat!r}; it must be one of none, {', '.join(REMAT)}")
    trees, length = tokens.shape
    # All but attention runs on a flat list of tokens: products with one leading axis have the fastest gradients.
    flat = lambda x: x.reshape(trees * length, *x.shape[2:])
    apart = lambda x: x.reshape(trees, length, *x.shape[1:])

    def step(x: jax.Array, layer_and_adapter: tuple[Any, Any]) -> tuple[jax.Array, None]:
        layer, weights = layer_and_adapter
        lora = None
        if weights is not None:
            stack_of_one = jax.tree.map(lambda w: w[None], weights)
            lora = lora_lib.LayerLora(stack_of_one, jnp.full((trees * length, 1), adapter_scale, jnp.float32))
        q, k, v = map(apart, qwen3.project_qkv(layer, config, x, flat(positions), lora))
        if prefix:
            attended = tree_attention(q, k, v, segment_ids, prefix=prefix, branches=branches)
        else:
            attended = self_attention(q, k, v, segment_ids)
        x = x + qwen3.project_out(layer, flat(attended), lora)
        return x + qwen3.mlp(layer, config, x, lora), None

    if remat != "none":
        step = jax.checkpoint(step, policy=REMAT[remat], prevent_cse=False)
    x, _ = jax.lax.scan(step, flat(qwen3.embed(params, tokens)), (params["layers"], adapter))
    return apart(qwen3.rms_norm(x, params["final_norm"], config.rms_norm_eps))


def tree_attention(
    q: jax.Array,  # [G, S, N, D]
    k: jax.Array,  # [G, S, K, D]
    v: jax.Array,  # [G, S, K, D]
    segment_ids: jax.Array,  # [G, S]
    *,
    prefix: int,
    branches: int,
) -> jax.Array:
    """Causal attention of the prompt with itself, and of each completion with the prompt and itself."""
    trees, _, heads, dim = q.shape
    groups, scale, float32 = k.shape[2], dim**-0.5, jnp.float32
    stem = lambda x: x[:, :prefix]
    branch = lambda x: x[:, prefix:].reshape(trees, branches, -1, *x.shape[2:])
    prompt = self_attention(stem(q), stem(k), stem(v), stem(segment_ids))

    # Axes: g trees, b branches, t queries, k KV heads, h heads of one, p prompt keys, s own keys. Each block of
    # scores keeps the layout of its product; only what is reduced over keys is moved from one to the other.
    queries = branch(q).reshape(trees, branches, -1, groups, heads // groups, dim)
    keys, values, segments = branch(k), branch(v), branch(segment_ids)
    length = keys.shape[2]
    seen = scale * jnp.einsum("gbtkhd,gpkd->gkbthp", queries, stem(k), preferred_element_type=float32)
    own = scale * jnp.einsum("gbtkhd,gbskd->gbkths", queries, keys, preferred_element_type=float32)
    lowest = jnp.finfo(float32).min
    seen = jnp.where((stem(segment_ids) != 0)[:, None, None, None, None, :], seen, lowest)
    mask = causal_mask(length, segments.reshape(-1, length)).reshape(trees, branches, 1, length, 1, length)
    own = jnp.where(mask, own, lowest)
    across = lambda x: jnp.swapaxes(x, 1, 2)  # g k b ... <-> g b k ...
    top = jnp.maximum(across(seen.max(-1)), own.max(-1))
    top = jax.lax.stop_gradient(top)  # [g, b, k, t, h]; softmax does not depend on it
    seen, own = jnp.exp(seen - across(top)[..., None]), jnp.exp(own - top[..., None])
    total = across(seen.sum(-1)) + own.sum(-1)
    out = across(
        jnp.einsum("gkbthp,gpkd->gkbthd", seen.astype(v.dtype), stem(v), preferred_element_type=float32)
    )
    out = out + jnp.einsum(
        "gbkths,gbskd->gbkthd", own.astype(v.dtype), values, preferred_element_type=float32
    )
    out = jnp.moveaxis(out / total[..., None], 2, 3).astype(v.dtype)  # [g, b, t, k, h, d]
    return jnp.concatenate([prompt, out.reshape(trees, -1, heads, dim)], axis=1)
