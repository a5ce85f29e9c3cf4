"""Completions behind a shared prompt are computed exactly as if each row stood alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import close, close_trees
from learning_rows import TINY, as_table, log_probs, make_rows

from marl_jax.learning import prefix
from marl_jax.learning.batching import BatchConfig, make_batches
from marl_jax.learning.network import Qwen3
from marl_jax.learning.packs import make_packs
from marl_jax.models import attention, qwen3
from marl_jax.models.lora import init_lora

CONFIG = BatchConfig(buckets=(4, 8, 16, 32, 64), token_budget=128)


def batched_log_probs(params, arrays, adapter=None, lora_scale=None, remat="none", attention=None):
    trained = (params, None) if adapter is None else (adapter, params)
    hidden = Qwen3(TINY, lora_scale, remat, attention).hidden(*trained, arrays)
    hidden = jnp.take_along_axis(hidden, arrays.source[..., None], axis=1)
    log_p = jax.nn.log_softmax(qwen3.unembed(params, TINY, hidden))
    return jnp.take_along_axis(log_p, arrays.targets[..., None], axis=-1)[..., 0]


@pytest.mark.parametrize("kernel", ["blocks", "cudnn"])  # as rows there: the kernel itself is not called
@pytest.mark.parametrize("remat", ["none", pytest.param("layer", marks=pytest.mark.long)])
def test_trees_equal_each_row_alone(monkeypatch, kernel, remat):
    monkeypatch.setattr(prefix, "chosen_here", lambda *_: kernel)
    rows = make_rows(np.random.default_rng(1), prompts=2, samples=5, prompt=(5, 9), lengths=(2, 9))
    batches = make_batches(as_table(rows), [0] * len(rows), CONFIG)
    assert any(b.arrays.prefix for b in batches)
    assert_equal_each_row_alone(rows, batches, remat)


@pytest.mark.parametrize(
    "kernel", ["blocks", *(pytest.param(k, marks=pytest.mark.long) for k in ("cudnn", "splash"))]
)
@pytest.mark.parametrize(
    "prompt", [pytest.param((8, 9), marks=pytest.mark.long), (5, 9)]
)  # that fill their part of a tree, and that do not
def test_trees_without_masks_equal_each_row_alone(monkeypatch, kernel, prompt):
    monkeypatch.setattr(prefix, "chosen_here", lambda *_: kernel)
    rows = make_rows(np.random.default_rng(1), prompts=3, samples=4, prompt=prompt, lengths=(6, 10))
    batches = make_batches(as_table(rows), [0] * len(rows), CONFIG)
    assert all(b.arrays.prefix == 8 and b.arrays.unmasked for b in batches)
    assert prompt[0] == 8 or len({len(row.prompt) for row in rows}) > 1
    assert_equal_each_row_alone(rows, batches)


@pytest.mark.parametrize("share", [True, False])
def test_a_named_attention_is_taken_whatever_the_platform_has(monkeypatch, share):
    rows = make_rows(np.random.default_rng(1), prompts=1, samples=4, prompt=(8, 9), lengths=(6, 10))
    batch, *_ = make_batches(as_table(rows), [0] * 4, BatchConfig(CONFIG.buckets, 128, share_prompts=share))
    assert bool(batch.arrays.prefix) == share
    fastest = batched_log_probs(qwen3.init(0, TINY), batch.arrays)
    for module in (prefix, attention):
        monkeypatch.setattr(module, "chosen_here", lambda *_: "cudnn")  # which a CPU does not have
    named = batched_log_probs(qwen3.init(0, TINY), batch.arrays, attention="plain")
    np.testing.assert_allclose(named, fastest, rtol=1e-5, atol=1e-5)


def test_padding_goes_last_and_back():
    there, back = prefix.padding_last(jnp.array([2, 4, 1]), 4, 7)
    assert there.tolist() == [[0, 1, 4, 5, 6, 2, 3], [0, 1, 2, 3, 4, 5, 6], [0, 4, 5, 6, 1, 2, 3]]
    x = jnp.arange(21.0).reshape(3, 7)
    np.testing.assert_array_equal(prefix.permuted(prefix.permuted(x, there, back), back, there), x)


@pytest.mark.parametrize("remat", ["none", pytest.param("layer", marks=pytest.mark.long)])
@pytest.mark.parametrize("share", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("prompt", "lengths", "pairs"),
    [
        pytest.param((5, 40), (1, 40), 1 << 20, id="in their order"),
        pytest.param((300, 350), (1, 90), 1 << 20, id="by what they see", marks=pytest.mark.long),
        pytest.param((300, 350), (1, 90), 1 << 12, id="in parts", marks=pytest.mark.long),
    ],
)
def test_packs_equal_each_row_alone(monkeypatch, prompt, lengths, pairs, share, remat):
    monkeypatch.setattr(prefix, "MOST_PAIRS", pairs)
    rows = make_rows(np.random.default_rng(1), prompts=3, samples=4, prompt=prompt, lengths=lengths)
    batches = make_packs(as_table(rows), [0] * len(rows), BatchConfig(share_prompts=share, slice_tokens=512))
    assert {len(batch.arrays.table) for batch in batches} == {1 if prompt[0] == 5 else 4}
    for piece in batches[0].arrays.table:
        assert pairs == 1 << 20 or prefix.part_count(*piece.shape) > 1
    assert_equal_each_row_alone(rows, batches, remat)


@pytest.mark.parametrize("bucket", [16, 64])
def test_rows_equal_each_row_alone_packed_or_not(bucket):
    rows = make_rows(np.random.default_rng(1), prompts=2, samples=5, prompt=(6, 9), lengths=(4, 9))
    batches = make_batches(as_table(rows), [0] * len(rows), BatchConfig((bucket,), 128, share_prompts=False))
    assert all(b.arrays.unmasked == (bucket == 16) for b in batches)  # two of them are 18 tokens or more
    assert_equal_each_row_alone(rows, batches)


def assert_equal_each_row_alone(rows, batches, remat="none"):
    """Log-probs and the gradient of a random mixture of them."""
    rng, params = np.random.default_rng(2), qwen3.init(0, TINY)
    width = max(len(row.tokens) for row in rows)
    weights = rng.normal(size=(len(rows), width)) * (
        np.arange(width) < np.array([[len(r.tokens)] for r in rows])
    )

    def packed(params):
        total = 0.0
        for batch in batches:
            logp = batched_log_probs(params, batch.arrays, remat=remat)
            total += sum(
                logp[p.sequence, p.start : p.stop] @ weights[p.row, : p.stop - p.start]
                for p in batch.placements
            )
        return total

    def alone(params):
        terms = log_probs(params, rows) * weights
        return jnp.sum(terms), jnp.sum(jnp.abs(terms))

    got = jax.jit(jax.value_and_grad(packed))(params)
    (value, size), gradient = jax.jit(jax.value_and_grad(alone, has_aux=True))(params)
    close(got[0], value, of=size)
    close_trees(got[1], gradient)


def test_adapters_act_in_trees_as_in_plain_sequences():
    rng = np.random.default_rng(2)
    rows = make_rows(rng, prompts=1, samples=4)
    params, adapters = qwen3.init(0, TINY), init_lora(1, TINY, rank=2, num_adapters=1)
    adapters = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape[1:]) * 0.3, jnp.float32), adapters)
    found = []
    for make, share in ((make_batches, True), (make_packs, True), (make_batches, False)):
        found.append({})
        for batch in make(as_table(rows), [0] * 4, BatchConfig(CONFIG.buckets, 128, share_prompts=share)):
            assert bool(batch.arrays.prefix or batch.arrays.table) == share
            logp = jax.jit(batched_log_probs)(params, batch.arrays, adapters, 0.5)
            found[-1] |= {p.row: np.asarray(logp[p.sequence, p.start : p.stop]) for p in batch.placements}
    base = log_probs(params, rows)
    for row in range(4):
        np.testing.assert_allclose(found[0][row], found[2][row], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found[1][row], found[2][row], rtol=1e-5, atol=1e-5)
        assert np.max(np.abs(found[0][row] - base[row, : len(rows[row].tokens)])) > 1e-2
