"""Causal self-attention over whole rows: softmax(q k' / sqrt(D)) v, grouped-query heads, packed sequences.

`attend` is the plain form, with any mask, and the reference for the others. Whole rows (no packs, and not the engine's
prefill) go through `self_attention`: the fastest implementation on the current platform, or the one that is named:

    blocks   queries in blocks, each against the keys before its end: about half the products of a full square,
             and one block of scores in memory at a time. For CPUs, and where the kernels below do not apply.
    cudnn    flash attention on NVIDIA GPUs of compute capability 8.0 (Ampere) or later, for 16-bit types
    splash   the Pallas kernel that JAX ships for TPUs; its arithmetic is tested in interpreter mode, on a TPU
             it is untested
    plain    the full square of scores at once
"""

import os
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp

IMPLEMENTATIONS = ("blocks", "cudnn", "splash", "plain")
_LANES = 128  # the TPU kernel tiles lengths and head dimensions by this


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """The reference. q [B,T,N,D], k and v [B,S,K,D], mask [B or 1,T,S] (true: is attended) -> [B,T,N,D]."""
    chex.assert_rank([q, k, v, mask], [4, 4, 4, 3])
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    # The small arrays are transposed, so that the large scores need not be: for each KV head, queries are ordered by
    # position, then by query head.
    by_kv_head = q.reshape(batch, length, kv_heads, group, dim).swapaxes(1, 2)
    queries = by_kv_head.reshape(batch, kv_heads, length * group, dim)
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
    scores = jnp.einsum("bkqd,bksd->bkqs", queries, keys, preferred_element_type=jnp.float32) * dim**-0.5
    # A finite floor, so that a row that attends to nothing does not become NaN.
    scores = scores + jnp.repeat(jnp.where(mask, 0.0, jnp.finfo(jnp.float32).min), group, axis=1)[:, None]
    # Softmax does not depend on the subtracted value. Dividing at the end saves one pass over the scores.
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    out = jnp.einsum("bkqs,bksd->bkqd", weights.astype(v.dtype), values).astype(jnp.float32)
    out = (out / weights.sum(-1, keepdims=True)).astype(v.dtype)
    return out.reshape(batch, kv_heads, length, group, dim).swapaxes(1, 2).reshape(q.shape)


def causal_mask(
    length: int,
    segment_ids: jax.Array | None = None,
    *,
    stem: int = 0,
    start: int = 0,
    stop: int | None = None,
) -> jax.Array:
    """The mask of queries start..stop over keys 0..stop: [1 or B, stop - start, stop].

    A position attends to itself and to earlier ones; in a packed row only within its own segment, so that padding
    (segment 0) is only attended by padding. Everything after the first `stem` columns attends to these, too.
    """
    stop = length if stop is None else stop
    mask = (jnp.arange(start, stop)[:, None] >= jnp.arange(stop)[None, :])[None]
    return mask if segment_ids is None else mask & _segment_mask(segment_ids, stem, start, stop)


def _segment_mask(segment_ids: jax.Array, stem: int, start: int, stop: int) -> jax.Array:
    """The pairs of query and key that segments allow, before causality: [B, stop - start, stop]."""
    keys = segment_ids[:, None, :stop]
    same = segment_ids[:, start:stop, None] == keys
    return same | ((jnp.arange(stop) < stem) & (keys != 0)) if stem else same


def self_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None = None,
    implementation: str | None = None,
    *,
    stem: int = 0,
) -> jax.Array:
    """Causal attention of rows to themselves. q [B,T,N,D], k and v [B,T,K,D] -> [B,T,N,D].

    `segment_ids` and `stem` are those of `causal_mask`; rows without segments can use the fastest kernels.
    """
    chex.assert_rank([q, k, v], 4)
    length = q.shape[1]
    match implementation or chosen_here(q.shape, q.dtype):
        case "plain":
            return attend(q, k, v, causal_mask(length, segment_ids, stem=stem))
        case "blocks":
            return _blocks(q, k, v, segment_ids, stem)
        case "cudnn":
            # The kernel skips later positions by itself. Segments become a [T,T] bias, which costs time.
            mask = None if segment_ids is None else _segment_mask(segment_ids, stem, 0, length)[:, None]
            return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="cudnn")
        case "splash":
            if stem:
                raise ValueError("attention 'splash' takes no stem; use blocks or plain")
            return _splash(q, k, v, segment_ids)
        case other:
            raise ValueError(f"attention is {other!r}; it must be one of {', '.join(IMPLEMENTATIONS)}")


def chosen_here(shape: tuple[int, ...], dtype: Any) -> str:
    """The implementation for queries of this shape and dtype on the current device."""
    # "9.0" on an NVIDIA GPU; another name, or no such attribute, elsewhere
    capability = getattr(jax.local_devices()[0], "compute_capability", "")
    return choose(jax.default_backend(), shape, dtype, capability)


def choose(platform: str, shape: tuple[int, ...], dtype: Any, compute_capability: str = "") -> str:
    """The implementation for queries of this shape and dtype on this platform."""
    _, length, _, dim = shape
    sixteen_bit = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    major = compute_capability.partition(".")[0]
    ampere = platform == "gpu" and major.isdecimal() and int(major) >= 8
    if ampere and sixteen_bit and dim % 8 == 0 and dim <= 128 and length % 2 == 0:
        return "cudnn"
    # The TPU kernel is not partitioned over a mesh by the compiler, so it serves one device.
    if platform == "tpu" and jax.device_count() == 1 and length % _LANES == 0 and dim % _LANES == 0:
        return "splash"
    return "blocks"


def deterministic_kernels() -> bool:
    """Whether XLA_FLAGS select kernels that give the same bits every time; the last of a repeated flag counts."""
    xla_flags = os.environ.get("XLA_FLAGS", "")
    flags = {}
    for name in ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops"):
        for value in re.findall(rf"--{name}(?:=(\S*))?(?!\S)", xla_flags):
            flags[name] = value.lower() not in ("false", "0")
    return any(flags.values())


def block_size(length: int) -> int:
    """The number of queries in a block of the implementation "blocks"."""
    return min(max(64, length // 8), 512)


def _blocks(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, stem: int) -> jax.Array:
    length = q.shape[1]
    size = block_size(length)
    part = jax.checkpoint(attend)  # so that the backward pass, too, keeps the scores of only one block
    outputs = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        mask = causal_mask(length, segment_ids, stem=stem, start=start, stop=stop)
        outputs.append(part(q[:, start:stop], k[:, :stop], v[:, :stop], mask))
    return jnp.concatenate(outputs, axis=1)


def _splash(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, interpret: bool = False
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    _, length, heads, dim = q.shape
    causal = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
    run = kernel.make_splash_mha_single_device(causal, interpret=interpret)

    def row(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
        ids = None if segments is None else kernel.SegmentIds(segments, segments)
        head_major = (x.swapaxes(0, 1) for x in (q * dim**-0.5, k, v))
        return run(*head_major, ids).swapaxes(0, 1)

    return jax.vmap(row)(q, k, v, segment_ids)
