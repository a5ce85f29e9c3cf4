"""Attention in a micro-batch: plain sequences, trees of completions behind a shared prompt, or packs.

A token of a completion attends to the prompt and to its own completion under one softmax. In a pack, each block of
queries gets copies of the blocks of keys and values that it may see. In a tree, each branch gets a copy of the prompt's
keys and values, and for a flash kernel of its queries, too: then the prompt's attention is computed once per branch,
everything else once. (Joining two attentions by their log-sum-exp would need a gradient through the log-sum-exp.)
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from marl_jax.learning.batching import BLOCK, STEM, MicroBatch
from marl_jax.models.attention import attend, causal_mask, chosen_here, self_attention

MOST_PAIRS = 1 << 20  # pairs of query and key in packs whose scores exist at a time


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, batch: MicroBatch, implementation: str | None = None
) -> jax.Array:
    """q [G,S,N,D], k and v [G,S,K,D] -> [G,S,N,D], for every row as if it stood alone.

    `implementation` is one of `models.attention`; the default is the platform's fastest.
    """
    if batch.table is not None:
        return pack_attention(q, k, v, batch)
    if batch.prefix:
        return tree_attention(q, k, v, batch, implementation)
    return self_attention(q, k, v, None if batch.unmasked else batch.segments, implementation)


def tree_attention(
    q: jax.Array,  # [G, S, N, D]
    k: jax.Array,  # [G, S, K, D]
    v: jax.Array,  # [G, S, K, D]
    batch: MicroBatch,
    implementation: str | None = None,
) -> jax.Array:
    """Causal attention of the prompt with itself, and of each completion with the prompt and itself."""
    trees, total, heads, dim = q.shape
    length = (total - batch.prefix) // batch.branches
    rows = trees * batch.branches, batch.prefix + length, heads, dim
    kernel = implementation or chosen_here(rows, q.dtype)
    if takes_rows(kernel, batch.prefix, length, batch.unmasked):
        return _attend_rows(q, k, v, batch)
    return _attend_branches(q, k, v, batch, implementation)


def takes_rows(kernel: str, prefix: int, length: int, unmasked: bool) -> bool:
    """Whether a kernel can attend in rows [prompt, branch], and should be faster than scores in memory.

    Rows have about (prefix + length) / (2 length) times as many pairs of query and key, where `length` is that of a
    branch, and on an H100 a pair took an eighth of the time.
    """
    has_kernel = kernel == "cudnn" or (kernel == "splash" and unmasked)
    return has_kernel and prefix + length <= 16 * length


def _attend_rows(q: jax.Array, k: jax.Array, v: jax.Array, batch: MicroBatch) -> jax.Array:
    """`tree_attention` with each branch as a separate row [prompt, branch].

    If `unmasked` (one row per branch), padding behind the prompt is moved to the end, where no token sees it, so that
    the kernel needs no mask.
    """
    prefix, branches = batch.prefix, batch.branches
    trees, total = q.shape[0], prefix + (q.shape[1] - prefix) // branches
    rows = lambda x: _rows(x, prefix, branches)
    if batch.unmasked:
        filled = jnp.repeat(jnp.sum(batch.segments[:, :prefix] != 0, axis=1), branches)
        order, back = padding_last(filled, prefix, total)
        q, k, v = (permuted(rows(x), order, back) for x in (q, k, v))
        out = permuted(self_attention(q, k, v), back, order)
    else:
        out = self_attention(rows(q), rows(k), rows(v), rows(batch.segments), stem=prefix)
    out = out.reshape(trees, branches, -1, *q.shape[2:])
    return jnp.concatenate([out[:, 0, :prefix], out[:, :, prefix:].reshape(trees, -1, *q.shape[2:])], axis=1)


def padding_last(filled: jax.Array, prefix: int, total: int) -> tuple[jax.Array, jax.Array]:
    """(the order [B, total] that moves columns `filled` [B] to `prefix` to the end, the inverse order)."""
    start, column = filled[:, None], jnp.arange(total)
    rolled = lambda by: jnp.where(column < start, column, start + (column - start + by) % (total - start))
    return rolled(prefix - start), rolled(start - prefix)


@jax.custom_vjp
def permuted(x: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
    """x [B, T, ...] with its columns in the order [B, T]; `back`, its inverse, permutes the gradient (no scatter)."""
    return jax.vmap(lambda row, columns: row[columns])(x, order)


def _permuted_forward(x, order, back):  # type: ignore[no-untyped-def]
    return permuted(x, order, back), (order, back)


def _permuted_backward(saved, gradient):  # type: ignore[no-untyped-def]
    order, back = saved
    return permuted(gradient, back, order), None, None


permuted.defvjp(_permuted_forward, _permuted_backward)


def _attend_branches(
    q: jax.Array, k: jax.Array, v: jax.Array, batch: MicroBatch, implementation: str | None
) -> jax.Array:
    """`tree_attention` with the scores of all branches in memory at once; the prompt attends to itself only once."""
    prefix, branches = batch.prefix, batch.branches
    stem = lambda x: x[:, :prefix]
    rows = lambda x: _rows(x, prefix, branches)
    # Causal: no token of the prompt sees the padding behind it.
    prompt = self_attention(stem(q), stem(k), stem(v), implementation=implementation)
    queries = q[:, prefix:].reshape(len(q) * branches, -1, *q.shape[2:])
    ids = rows(batch.segments)
    mask = causal_mask(ids.shape[1], ids, stem=prefix, start=prefix)
    out = attend(queries, rows(k), rows(v), mask)
    return jnp.concatenate([prompt, out.reshape(len(q), -1, *q.shape[2:])], axis=1)


def _rows(x: jax.Array, prefix: int, branches: int) -> jax.Array:
    """Each branch of x [G, S, ...] behind a copy of the prompt: [G * branches, prefix + length, ...]."""
    branch = x[:, prefix:].reshape(len(x), branches, -1, *x.shape[2:])
    stem = jnp.broadcast_to(x[:, None, :prefix], (len(x), branches, prefix, *x.shape[2:]))
    return jnp.concatenate([stem, branch], axis=2).reshape(len(x) * branches, -1, *x.shape[2:])


def pack_attention(q: jax.Array, k: jax.Array, v: jax.Array, batch: MicroBatch) -> jax.Array:
    """Causal attention of each block of queries to the blocks that the table of its pack lists."""
    packs, total = batch.tokens.shape
    cut = lambda x: x.reshape(packs, total // BLOCK, BLOCK, *x.shape[2:])
    q, k, v, segments, positions = map(cut, (q, k, v, batch.segments, batch.positions))
    fn = functools.partial(_attend_to_table, k, v, segments, positions)
    if len(batch.table) == 1:
        return _in_parts(fn, (q, segments, positions, *batch.table)).reshape(packs, total, *q.shape[3:])
    # No block sees a later one, so the last that it sees is the block itself.
    order = jnp.concatenate([jnp.max(piece, axis=2) for piece in batch.table], axis=1)
    back = jnp.argsort(order, axis=1)
    sorted_inputs = [permuted(x, order, back) for x in (q, segments, positions)]
    outputs, start = [], 0
    for piece in batch.table:
        span = slice(start, start := start + piece.shape[1])
        outputs.append(_in_parts(fn, (*(x[:, span] for x in sorted_inputs), piece)))
    return permuted(jnp.concatenate(outputs, axis=1), back, order).reshape(packs, total, *q.shape[3:])


def _in_parts(fn: Callable[..., jax.Array], arrays: tuple[jax.Array, ...]) -> jax.Array:
    """Apply `fn` to arrays [G, B, ...] in parts of the blocks, so that few scores exist at a time."""
    packs, blocks, seen = arrays[-1].shape
    parts = part_count(packs, blocks, seen)
    if parts == 1:
        return fn(*arrays)
    # Not unrolled: XLA would recompute the scores of several parts at the same time.
    split = lambda x: jnp.moveaxis(x.reshape(packs, parts, blocks // parts, *x.shape[2:]), 1, 0)
    part = jax.checkpoint(lambda pieces: fn(*pieces), prevent_cse=False)
    out = jax.lax.map(part, jax.tree.map(split, arrays))
    return jnp.moveaxis(out, 0, 1).reshape(packs, blocks, *out.shape[3:])


def part_count(packs: int, blocks: int, seen: int) -> int:
    """The number of parts that blocks are cut into; parts attend one after the other, so that few scores exist."""
    wanted = -(-packs * blocks * seen * BLOCK**2 // MOST_PAIRS)
    return min((parts for parts in range(wanted, blocks + 1) if blocks % parts == 0), default=blocks)


def _attend_to_table(
    k: jax.Array,  # [G, C, T, K, D]
    v: jax.Array,  # [G, C, T, K, D]
    key_segments: jax.Array,  # int[G, C, T]
    key_positions: jax.Array,  # int[G, C, T]
    q: jax.Array,  # [G, B, T, N, D]
    segments: jax.Array,  # int[G, B, T]
    positions: jax.Array,  # int[G, B, T]
    table: jax.Array,  # int[G, B, R], blocks of keys
) -> jax.Array:
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    key_blocks = flat(jnp.maximum(table, 0) + k.shape[1] * jnp.arange(len(k))[:, None, None])

    def gather(x: jax.Array) -> jax.Array:  # [G * B, R * T, ...]
        rows = jnp.take(flat(x), key_blocks, axis=0, mode="clip")
        return rows.reshape(len(key_blocks), -1, *rows.shape[3:])

    key_ids, query_ids = gather(key_segments)[:, None], flat(segments)[..., None]
    mask = ((key_ids == query_ids) | (key_ids == STEM)) & jnp.repeat(flat(table) >= 0, BLOCK, axis=1)[:, None]
    mask &= gather(key_positions)[:, None] <= flat(positions)[..., None]
    return attend(flat(q), gather(k), gather(v), mask).reshape(q.shape)
