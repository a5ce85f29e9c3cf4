"""The hidden states of a micro-batch: plain packed sequences, or trees of completions behind a shared prompt.

A token of a completion attends to the prompt and to its own completion under one softmax. With a flash kernel, each
branch is a row behind a copy of the prompt's queries, keys and values: the prompt's attention is computed once for
each branch, everything else once. Otherwise the softmax is written out over the two blocks of scores. (Joining two
attentions by their log-sum-exp would need the gradient through it.)
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from marl_jax.learning.batching import MicroBatch
from marl_jax.models import lora as lora_lib
from marl_jax.models import qwen3
from marl_jax.models.attention import causal_mask, chosen_here, self_attention
from marl_jax.models.model_config import ModelConfig

__all__ = [
    "attend_rows",
    "attend_scores",
    "hidden_states",
    "padding_last",
    "permuted",
    "takes_rows",
    "tree_attention",
]


def hidden_states(
    params: Any,
    config: ModelConfig,
    batch: MicroBatch,
    *,
    adapter: Any = None,
    adapter_scale: float = 1.0,
    remat: str = "none",
    attention: str | None = None,  # an implementation of `models.attention`; None: the fastest one
) -> jax.Array:
    """[G, S, H], equal to computing every row alone. `adapter`, without a policy axis, acts on every row."""
    trees, length = batch.tokens.shape
    # All but attention runs on a flat list of tokens: products with one leading axis have the fastest gradients.
    flat = lambda x: x.reshape(trees * length, *x.shape[2:])
    apart = lambda x: x.reshape(trees, length, *x.shape[1:])
    angles = qwen3.rotation(config, flat(batch.positions))

    def step(x: jax.Array, layer_and_adapter: tuple[Any, Any]) -> tuple[jax.Array, None]:
        layer, weights = layer_and_adapter
        lora = None
        if weights is not None:
            rank = weights["q"]["a"].shape[-1]
            lora = lora_lib.LayerLora(weights, jnp.full((trees * length, rank), adapter_scale, jnp.float32))
        q, k, v = map(apart, qwen3.project_qkv(layer, config, x, angles, lora))
        if batch.prefix:
            layout: dict[str, Any] = {
                "prefix": batch.prefix,
                "branches": batch.branches,
                "unmasked": batch.unmasked,
            }
            attended = tree_attention(q, k, v, batch.segments, **layout, implementation=attention)
        else:
            attended = self_attention(q, k, v, None if batch.unmasked else batch.segments, attention)
        x = x + qwen3.project_out(layer, flat(attended), lora)
        return x + qwen3.mlp(layer, config, x, lora), None

    x = flat(qwen3.embed(params, batch.tokens))
    x = qwen3.through_layers(step, x, (params["layers"], adapter), config, remat)
    return apart(qwen3.rms_norm(x, params["final_norm"], config.rms_norm_eps))


def tree_attention(
    q: jax.Array,  # [G, S, N, D]
    k: jax.Array,  # [G, S, K, D]
    v: jax.Array,  # [G, S, K, D]
    segment_ids: jax.Array,  # [G, S]
    *,
    prefix: int,
    branches: int,
    unmasked: bool = False,  # see `MicroBatch`
    implementation: str | None = None,
) -> jax.Array:
    """Causal attention of the prompt with itself, and of each completion with the prompt and itself."""
    trees, total, heads, dim = q.shape
    length = (total - prefix) // branches
    kernel = implementation or chosen_here((trees * branches, prefix + length, heads, dim), q.dtype)
    if takes_rows(kernel, prefix, length, unmasked):
        return attend_rows(q, k, v, segment_ids, prefix=prefix, branches=branches, unmasked=unmasked)
    return attend_scores(
        q, k, v, segment_ids, prefix=prefix, branches=branches, implementation=implementation
    )


def takes_rows(kernel: str, prefix: int, length: int, unmasked: bool) -> bool:
    """Whether a kernel takes rows [prompt, branch], and should be faster than scores written out.

    Rows hold about (prefix + length) / (2 length) times as many pairs of query and key, where `length` is of a branch,
    and on an H100 a pair took an eighth of the time.
    """
    takes = kernel == "cudnn" or (kernel == "splash" and unmasked)
    return takes and prefix + length <= 16 * length


def attend_rows(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    *,
    prefix: int,
    branches: int,
    unmasked: bool = False,
) -> jax.Array:
    """`tree_attention` with each branch as a row of its own, [prompt, branch].

    If each branch holds one row, padding behind the prompt is moved to the row's end, where no token sees it, and the
    kernel needs no mask.
    """
    trees, total = q.shape[0], prefix + (q.shape[1] - prefix) // branches

    def rows(x: jax.Array) -> jax.Array:
        branch = x[:, prefix:].reshape(trees, branches, -1, *x.shape[2:])
        stem = jnp.broadcast_to(x[:, None, :prefix], (trees, branches, prefix, *x.shape[2:]))
        return jnp.concatenate([stem, branch], axis=2).reshape(trees * branches, -1, *x.shape[2:])

    if unmasked:
        filled = jnp.repeat(jnp.sum(segment_ids[:, :prefix] != 0, axis=1), branches)
        there, back = padding_last(filled, prefix, total)
        q, k, v = (permuted(rows(x), there, back) for x in (q, k, v))
        out = permuted(self_attention(q, k, v), back, there)
    else:
        out = self_attention(rows(q), rows(k), rows(v), rows(segment_ids), stem=prefix)
    out = out.reshape(trees, branches, -1, *q.shape[2:])
    return jnp.concatenate([out[:, 0, :prefix], out[:, :, prefix:].reshape(trees, -1, *q.shape[2:])], axis=1)


def padding_last(filled: jax.Array, prefix: int, total: int) -> tuple[jax.Array, jax.Array]:
    """The order [B, total] that puts columns `filled` [B] to `prefix` behind all others, and the order back."""
    start, column = filled[:, None], jnp.arange(total)
    turned = lambda by: jnp.where(column < start, column, start + (column - start + by) % (total - start))
    return turned(prefix - start), turned(start - prefix)


@jax.custom_vjp
def permuted(x: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
    """x [B, T, ...] with its columns in another order [B, T]; the gradient is permuted back, not scattered."""
    return jax.vmap(lambda row, columns: row[columns])(x, order)


def _permuted_forward(x, order, back):  # type: ignore[no-untyped-def]
    return permuted(x, order, back), (order, back)


def _permuted_backward(saved, gradient):  # type: ignore[no-untyped-def]
    order, back = saved
    return permuted(gradient, back, order), None, None


permuted.defvjp(_permuted_forward, _permuted_backward)


def attend_scores(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    *,
    prefix: int,
    branches: int,
    implementation: str | None = None,  # of the prompt's attention
) -> jax.Array:
    """`tree_attention` with one softmax written out over the scores with the prompt and those with the branch."""
    trees, _, heads, dim = q.shape
    kv, scale, float32 = k.shape[2], dim**-0.5, jnp.float32
    group = heads // kv
    stem = lambda x: x[:, :prefix]
    branch = lambda x: x[:, prefix:].reshape(trees, branches, -1, *x.shape[2:])
    # Causal: no token of the prompt sees the padding behind it.
    prompt = self_attention(stem(q), stem(k), stem(v), implementation=implementation)

    # Axes: g trees, k KV heads, b branches, q queries of one KV head (all heads of a position, then the next), p prompt
    # keys, s own keys. The small arrays are transposed to the order of the scores, so that the scores are not.
    queries = branch(q).reshape(trees, branches, -1, kv, group, dim)
    length = queries.shape[2]
    queries = jnp.transpose(queries, (0, 3, 1, 2, 4, 5)).reshape(trees, kv, branches, length * group, dim)
    keys, values = (jnp.transpose(branch(x), (0, 3, 1, 2, 4)) for x in (k, v))  # [g, k, b, s, d]
    mask = causal_mask(length, branch(segment_ids).reshape(-1, length))
    mask = jnp.repeat(mask.reshape(trees, 1, branches, length, length), group, axis=3)
    product = functools.partial(jnp.einsum, preferred_element_type=float32)
    seen = scale * product("gkbqd,gpkd->gkbqp", queries, stem(k))
    own = scale * product("gkbqd,gkbsd->gkbqs", queries, keys)
    seen = seen + _bias(stem(segment_ids) != 0)[:, None, None, None]
    own = own + _bias(mask)
    top = jnp.maximum(seen.max(-1), own.max(-1))[..., None]
    top = jax.lax.stop_gradient(top)  # softmax does not depend on it
    seen, own = jnp.exp(seen - top), jnp.exp(own - top)
    total = seen.sum(-1) + own.sum(-1)
    out = jnp.einsum("gkbqp,gpkd->gkbqd", seen.astype(v.dtype), stem(v)).astype(float32)
    out = out + jnp.einsum("gkbqs,gkbsd->gkbqd", own.astype(v.dtype), values)
    out = (out / total[..., None]).astype(v.dtype).reshape(trees, kv, branches, length, group, dim)
    out = jnp.transpose(out, (0, 2, 3, 1, 4, 5)).reshape(trees, -1, heads, dim)
    return jnp.concatenate([prompt, out], axis=1)


def _bias(mask: jax.Array) -> jax.Array:
    """To be added to scores: 0 where the mask is true, the lowest number elsewhere."""
    return jnp.where(mask, 0.0, jnp.finfo(jnp.float32).min)
