"""Adapters: each row of a mixed batch computes its own adapter, exactly as alone and as merged."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import close
from safetensors.numpy import load_file

from marl_jax.models import ModelConfig, forward, init, lora
from marl_jax.models.peft import save_peft

forward = jax.jit(forward, static_argnums=1)
CONFIG = ModelConfig(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
)
RANK, ALPHA, ADAPTERS = 4, 8.0, 3
SCALE = ALPHA / RANK


@pytest.fixture(scope="module")
def params():
    return init(0, CONFIG)


@pytest.fixture(scope="module")
def adapters():
    """Three adapters, each far enough from zero and from the others to be told apart."""
    fresh = lora.init_lora(1, CONFIG, RANK, ADAPTERS)
    chex.assert_trees_all_equal(fresh, lora.init_lora(np.int64(1), CONFIG, RANK, ADAPTERS))
    keys = iter(jax.random.split(jax.random.key(2), 100))
    return jax.tree.map(lambda leaf: 0.3 * jax.random.normal(next(keys), leaf.shape), fresh)


TOKENS = jnp.array(np.random.default_rng(0).integers(0, 50, (5, 8)))
INDEX = jnp.array([2, 0, -1, 1, 2])


def with_adapters(params, adapters, index, tokens=TOKENS):
    return forward(params, CONFIG, tokens, adapters=adapters, adapter_index=index, adapter_scale=SCALE)


def test_a_fresh_adapter_has_the_spread_that_peft_starts_with():
    """kaiming_uniform_(a=sqrt(5)) is even within 1/sqrt(n) of n inputs: a standard deviation of 1/sqrt(3 n)."""
    fresh = lora.init_lora(0, CONFIG, 64, 8)
    for name, inputs in (("q", CONFIG.hidden_size), ("down", CONFIG.intermediate_size)):
        assert np.std(fresh[name]["a"]) * np.sqrt(3 * inputs) == pytest.approx(1, abs=0.02)


def test_a_fresh_adapter_computes_the_base_model(params):
    fresh = lora.init_lora(1, CONFIG, RANK, ADAPTERS)
    plain = forward(params, CONFIG, TOKENS)
    close(with_adapters(params, fresh, INDEX), plain, of=np.max(np.abs(plain)))
    assert all(np.abs(leaf["a"]).min(axis=(0, 1)).max() > 0 for leaf in fresh.values())


def test_a_mixed_batch_equals_each_adapter_alone_and_merged(params, adapters):
    together = with_adapters(params, adapters, INDEX)
    for row, index in enumerate(INDEX.tolist()):
        tokens = TOKENS[row : row + 1]
        if index < 0:
            alone = merged = forward(params, CONFIG, tokens)
        else:
            one = jax.tree.map(lambda leaf, i=index: leaf[i], adapters)
            alone = with_adapters(params, jax.tree.map(lambda leaf: leaf[None], one), jnp.array([0]), tokens)
            merged = forward(lora.merge(params, one, SCALE), CONFIG, tokens)
            assert np.abs(merged - forward(params, CONFIG, tokens)).max() > 0.1
        np.testing.assert_allclose(together[row : row + 1], alone, atol=1e-5)
        np.testing.assert_allclose(together[row : row + 1], merged, atol=1e-4)


def test_only_the_adapter_in_use_receives_gradient(params, adapters):
    index = jnp.array([1, 1, -1, 1, 1])
    grads = jax.grad(lambda a: (with_adapters(params, a, index) ** 2).sum())(adapters)
    for leaf in jax.tree.leaves(grads):
        assert not leaf[0].any()
        assert not leaf[2].any()
        assert np.abs(leaf[1]).max() > 0


def test_a_scale_that_bfloat16_cannot_hold_is_rounded_only_with_its_product():
    # One input, one rank, A = B = 1: the layer adds scale * x, here for every mantissa of bfloat16.
    x = np.linspace(1, 2, 128, endpoint=False, dtype=np.float32)
    one = jnp.ones((2, 1, 1), jnp.bfloat16)
    index = jnp.arange(128) % 2
    select = lora.select_rows(index, {"q": {"a": one}}, 16 / 6)
    np.testing.assert_array_equal(select, np.eye(2, dtype=np.float32)[index] * np.float32(16 / 6))
    layer = lora.LayerLora({"gate": {"a": one.reshape(1, 2), "b": one.reshape(2, 1)}}, select)
    added = lora.delta("gate", jnp.array(x, jnp.bfloat16)[:, None], layer)
    assert added.dtype == jnp.bfloat16
    expected = (x * np.float32(16 / 6)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(added)[:, 0], expected)


def test_adapters_and_their_index_come_together(params, adapters):
    with pytest.raises(ValueError, match="adapters and adapter_index come together"):
        forward(params, CONFIG, TOKENS, adapters=adapters)


PEFT = {"q": "self_attn.q", "k": "self_attn.k", "v": "self_attn.v", "o": "self_attn.o"} | {
    name: f"mlp.{name}" for name in ("gate", "up", "down")
}


def test_a_peft_adapter_holds_every_bit_under_the_names_of_the_peft_library(tmp_path, adapters):
    one = jax.tree.map(lambda leaf: np.asarray(leaf[1]), adapters)
    save_peft(tmp_path, CONFIG, one, alpha=ALPHA, base_model="base")
    written = load_file(tmp_path / "adapter_model.safetensors")
    assert len(written) == 3 * 7 * 2
    for name, published in PEFT.items():
        for layer in range(3):
            stem = f"base_model.model.model.layers.{layer}.{published}_proj.lora"
            a, b = written[f"{stem}_A.weight"], written[f"{stem}_B.weight"]
            np.testing.assert_array_equal(a, one[name]["a"][layer].reshape(-1, RANK).T)
            np.testing.assert_array_equal(b, one[name]["b"][layer].reshape(RANK, -1).T)
    a = written["base_model.model.model.layers.2.self_attn.o_proj.lora_A.weight"]
    b = written["base_model.model.model.layers.2.self_attn.q_proj.lora_B.weight"]
    assert (a.shape, b.shape) == ((RANK, 24), (24, RANK))
    assert a[3, 7] == adapters["o"]["a"][1, 2, 1, 1, 3]  # input 7 is head 1, dimension 1
    assert b[7, 3] == adapters["q"]["b"][1, 2, 3, 1, 1]
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    stated = {name: about[name] for name in ("peft_type", "r", "lora_alpha", "base_model_name_or_path")}
    assert stated == {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "base_model_name_or_path": "base"}
