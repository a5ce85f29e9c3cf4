"""From logits to one token per row: temperature, truncation, and a draw whose log-probability is exact.

A token is drawn by a two-level inverse CDF, first a block of the vocabulary, then a token of the block: sums stay
short, so rounding cannot push a draw past its neighbours, and the two levels use two independent uniforms.

    (logits - largest) / temperature -> top-k -> top-p -> softmax = the distribution sampled from, and logged
"""

import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from marl_jax.models.scatter import UNIQUE


class Draw(NamedTuple):
    """One sampled token per row."""

    token: jax.Array  # [B] int32
    logprob: jax.Array  # [B] of the distribution sampled from


def temper(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """(logits [B,V] - their largest) / temperature [B]; greedy rows (temperature 0) are not divided.

    The largest is subtracted first: the likeliest token is then exactly 0, and its log-prob cannot exceed 0.
    """
    chex.assert_rank([logits, temperature], [2, 1])
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    # Bounds at which the logits do not overflow to infinity and the temperature is not infinite.
    return logits / jnp.where(temperature > 0, jnp.clip(temperature, 1e-30, 1e30), 1.0)[:, None]


def truncate(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Set the logits [B,V] that top_k [B] (0: off), then top_p [B] (1: off) remove to -inf.

    top-k keeps the top_k likeliest tokens, of equal ones those with the lowest ids. Of these, top-p keeps a token if
    likelier ones have less than top_p of the mass of all; equal ones stay or go together. The thresholds are found by
    bisection over the bits of the logits: 32 passes over the row each, instead of a sort, and exact.
    """
    chex.assert_rank([logits, top_k, top_p], [2, 1, 1])
    order = _sortable(logits)
    limit = jnp.where(top_k > 0, top_k, logits.shape[-1])[:, None]
    last = _threshold(order, jnp.ones_like(logits), limit.astype(logits.dtype))
    room = limit - jnp.sum(order > last, axis=-1, keepdims=True)
    among_equals = jnp.cumsum(order == last, axis=-1)
    kept = jnp.where((order > last) | ((order == last) & (among_equals <= room)), logits, -jnp.inf)
    probs = jax.nn.softmax(kept, axis=-1)
    # A top_p that float32 rounds to 0 still keeps the likeliest token.
    nucleus = jnp.where(top_p < 1.0, jnp.maximum(top_p, 1e-30), jnp.inf)[:, None]
    return jnp.where(order >= _threshold(order, probs, nucleus), kept, -jnp.inf)


def truncate_few(
    logits: jax.Array, top_k: jax.Array, top_p: jax.Array, most: int
) -> tuple[jax.Array, jax.Array]:
    """(`truncate`, `kept_ids`) of rows with a top_k of 1 to `most`; those with 0 stay whole.

    One selection instead of 64 passes over the row: for large vocabularies.
    """
    values, ids = jax.lax.top_k(logits, most)  # of equal ones the lowest ids first
    kept = truncate(values, top_k, top_p)
    rows = jnp.arange(len(logits))[:, None]
    cut = jnp.full_like(logits, -jnp.inf).at[rows, ids].set(kept, **UNIQUE)
    ids = jnp.where(jnp.isfinite(kept), ids, -1).astype(jnp.int32)
    return jnp.where(top_k[:, None] > 0, cut, logits), ids


def draw(logits: jax.Array, uniforms: jax.Array, greedy: jax.Array) -> Draw:
    """Draw from softmax(logits [B,V]) with uniforms [B,2] in [0,1).

    Rows marked greedy [B] take the likeliest. A token of probability 0 is never returned.
    """
    chex.assert_rank([logits, uniforms, greedy], [2, 2, 1])
    peak = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - peak)  # unnormalised probabilities, the likeliest being 1
    total, drawn = inverse_cdf(weights, uniforms)
    token = jnp.where(greedy, jnp.argmax(logits, axis=-1), drawn)
    chosen = (jnp.take_along_axis(logits, token[:, None], axis=-1) - peak)[:, 0]
    return Draw(token.astype(jnp.int32), chosen - jnp.log(total))


def kept_ids(logits: jax.Array, count: int) -> jax.Array:
    """The ids [B,count] of the tokens that `truncate` kept in logits [B,V], likeliest first, padded with -1."""
    values, ids = jax.lax.top_k(logits, count)
    return jnp.where(jnp.isfinite(values), ids, -1).astype(jnp.int32)


def inverse_cdf(weights: jax.Array, uniforms: jax.Array) -> tuple[jax.Array, jax.Array]:
    """weights [B,V] >= 0 and uniforms [B,2] -> their sum [B], and an index [B] drawn in proportion to them."""
    rows, vocab = weights.shape
    size = math.isqrt(vocab - 1) + 1
    blocks = -(-vocab // size)
    table = jnp.pad(weights, ((0, 0), (0, blocks * size - vocab))).reshape(rows, blocks, size)
    mass = jnp.sum(table, axis=-1)
    block = _invert(mass, uniforms[:, 0])
    within = jnp.take_along_axis(table, block[:, None, None], axis=1)[:, 0]
    index = block * size + _invert(within, uniforms[:, 1])
    return jnp.sum(mass, axis=-1), jnp.minimum(index, vocab - 1)  # the padding, if every weight is NaN


def noise(keys: jax.Array, positions: jax.Array) -> jax.Array:
    """keys [B,2] uint32 and positions [B] -> uniforms [B,2], which depend on nothing else."""
    chex.assert_rank([keys, positions], [2, 1])

    def uniforms(key: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
        return jax.random.uniform(key, (2,), jnp.float32)

    return jax.vmap(uniforms)(keys, positions)


def _invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The first index [B] whose running sum of weights [B,N] passes uniform [B] of the total, never a zero weight."""
    sums = jnp.cumsum(weights, axis=-1)
    passed = (sums > uniform[:, None] * sums[:, -1:]) & (weights > 0)
    last = weights.shape[-1] - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)
    return jnp.where(jnp.any(passed, axis=-1), jnp.argmax(passed, axis=-1), last)


def _sortable(x: jax.Array) -> jax.Array:
    """float32 -> int32 in the same order; -0.0 counts as 0.0."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x.astype(jnp.float32)), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _threshold(order: jax.Array, weights: jax.Array, limit: jax.Array) -> jax.Array:
    """The smallest t [B,1] such that the weights of all entries with order > t [B,V] sum to less than limit [B,1]."""
    info = jnp.iinfo(jnp.int32)
    low = jnp.full(limit.shape, info.min, jnp.int32)
    high = jnp.full(limit.shape, info.max, jnp.int32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        above = jnp.sum(jnp.where(order > middle, weights, 0.0), axis=-1, keepdims=True)
        return jnp.where(above < limit, low, middle + 1), jnp.where(above < limit, middle, high)

    return jax.lax.fori_loop(0, 32, halve, (low, high))[1]
