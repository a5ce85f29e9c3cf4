"""Chunked log-probs equal plain ones, values and gradients, in memory that forgets how long the batch is."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import close
from traced import all_highest

from marl_jax.learning.logprobs import token_logprobs

B, T, H, V = 3, 10, 8, 23
KEYS = jax.random.split(jax.random.key(0), 5)
HIDDEN, HEAD = jax.random.normal(KEYS[0], (B, T, H)), jax.random.normal(KEYS[1], (H, V))
TARGETS = jax.random.randint(KEYS[2], (B, T), 0, V)
WEIGHTS = jax.random.normal(KEYS[3], (2, B, T))
KEPT = jnp.concatenate([TARGETS[..., None], jax.random.randint(KEYS[4], (B, T, 5), -1, V)], axis=-1)


def plain(hidden, head, targets, temperature=1.0, kept=None):
    z = jnp.einsum("bth,hv->btv", hidden, head, precision="highest") / jnp.reshape(temperature, (-1, 1, 1))
    if kept is not None:
        z = jnp.where((kept[..., None] == jnp.arange(head.shape[1])).any(-2), z, -1e30)
    log_p = jax.nn.log_softmax(z)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    return jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0], entropy


def value_and_grads(fn, *args, **kwargs):
    """logp and entropy, and the gradient of an arbitrary weighting of both."""
    total = lambda hidden, head: sum(
        jnp.sum(w * x) for w, x in zip(WEIGHTS, fn(hidden, head, *args, **kwargs))
    )
    return fn(HIDDEN, HEAD, *args, **kwargs), jax.grad(total, argnums=(0, 1))(HIDDEN, HEAD)


def test_every_product_asks_for_full_precision():
    """Also where nobody around it does, as in a loop of one's own on an accelerator."""
    total = lambda hidden, head: token_logprobs(hidden, head, TARGETS)[0].sum()
    assert all_highest(jax.grad(total, (0, 1)), HIDDEN, HEAD, more_than=2)


@pytest.mark.parametrize("chunk", [1, 12, 21, 4096])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"temperature": jnp.array([0.5, 1.0, 2.0])}, {"kept": KEPT}]
)
def test_values_and_gradients_equal_the_plain_form(chunk, options):
    got = value_and_grads(token_logprobs, TARGETS, chunk=chunk, **options)
    want = value_and_grads(plain, TARGETS, **options)
    jax.tree.map(lambda g, w: close(g, w, of=np.max(np.abs(w))), got, want)


def test_of_a_length_just_above_the_chunk_little_is_padding():
    """The logits of 10 tokens in chunks of up to 8 are 2 x 5, not 2 x 8."""
    scored = lambda chunk: jax.jit(token_logprobs, static_argnames="chunk").lower(
        HIDDEN[:1], HEAD, TARGETS[:1], chunk=chunk
    )
    shapes = re.findall(r"tensor<1x(\d+)x23xf32>", scored(8).as_text())
    assert {*shapes} == {"5"}


def test_a_target_outside_its_kept_set_is_impossible():
    kept = jnp.where(TARGETS[..., None] == KEPT, (TARGETS[..., None] + 1) % V, KEPT)
    assert np.all(token_logprobs(HIDDEN, HEAD, TARGETS, kept=kept)[0] == -np.inf)


def test_padding_without_a_kept_set_stays_finite():
    values, grads = value_and_grads(token_logprobs, TARGETS, kept=jnp.full((B, T, 2), -1))
    assert all(np.all(np.isfinite(x)) for x in (*values, *grads))


@pytest.mark.parametrize("tied", [False, True])  # to the embedding, [V, H]
@pytest.mark.parametrize("chunk", [64, 4096])  # XLA lays the products of a single chunk out differently
def test_the_head_gradient_is_summed_in_float32_under_bfloat16(chunk, tied):
    # Without the float32 sum, thousands of small bfloat16 terms lose about 1%.
    rows, tokens, vocab = 2, 2048, 16
    hidden = jax.random.normal(KEYS[0], (rows, tokens, H)).astype(jnp.bfloat16)
    head = jax.random.normal(KEYS[1], (H, vocab)).astype(jnp.bfloat16).astype(jnp.float32)
    targets = jax.random.randint(KEYS[2], (rows, tokens), 0, vocab)
    weights, as_head = (head.T, jnp.transpose) if tied else (head, lambda w: w)

    @functools.partial(jax.jit, static_argnums=2)
    @functools.partial(jax.grad, argnums=(0, 1))
    def grads(weights, hidden, fn):
        return jnp.sum(fn(hidden, as_head(weights), targets)[0])

    got, _ = grads(weights, hidden, functools.partial(token_logprobs, chunk=chunk))
    want, _ = grads(weights, hidden.astype(jnp.float32), plain)
    assert got.dtype == jnp.float32
    assert jnp.linalg.norm(got - want) / jnp.linalg.norm(want) < 1e-3


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    def temporary_bytes(length, vocab=4096):
        loss = lambda hidden, head, targets: jnp.sum(token_logprobs(hidden, head, targets, chunk=128)[0])
        shape = jax.ShapeDtypeStruct
        args = (
            shape((1, length, H), jnp.float32),
            shape((H, vocab), jnp.float32),
            shape((1, length), jnp.int32),
        )
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    grown = temporary_bytes(8192) - temporary_bytes(1024)
    assert grown < 7168 * (H + 16) * 4 * 2  # hidden states and a few numbers per token, not 4,096 logits


@pytest.mark.parametrize("temperature", [0.7, 0.01, 1e-10])
def test_small_temperatures_lose_no_precision_and_leave_no_log_prob_above_zero(temperature):
    hidden, head = 10 * HIDDEN, 10 * HEAD
    logp, entropy = token_logprobs(hidden, head, TARGETS, temperature=temperature)
    exact = np.einsum("bth,hv->btv", np.float64(hidden), np.float64(head)) / np.float64(
        np.float32(temperature)
    )
    exact -= exact.max(-1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    wanted = np.take_along_axis(exact, np.asarray(TARGETS)[..., None], axis=-1)[..., 0]
    # What is left is the product's own rounding, which a temperature divides.
    np.testing.assert_allclose(logp, wanted, rtol=1e-5, atol=1e-5)
    assert (np.asarray(logp) <= 0).all() and np.isfinite(entropy).all()


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_nothing_has_no_logprobs(shape):
    logp, entropy = token_logprobs(jnp.zeros((*shape, H)), HEAD, jnp.zeros(shape, int))
    assert logp.shape == entropy.shape == shape
