"""The forward pass: shapes, packing, rematerialisation, and the blocks it is made of."""

import dataclasses
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import close, close_trees

from marl_jax.models import ModelConfig, forward, init, qwen3
from marl_jax.models.lora import init_lora
from marl_jax.models.weight_table import abstract
from marl_jax.sampling import generate

forward = jax.jit(forward, static_argnums=1, static_argnames="remat")
CONFIG = ModelConfig.preset("xs")


@pytest.fixture(scope="module")
def params():
    return init(0, CONFIG)


def tokens(*shape, seed=0):
    return jnp.array(np.random.default_rng(seed).integers(0, CONFIG.vocab_size, shape))


def test_a_token_never_sees_a_later_one(params):
    row = tokens(1, 12)
    changed = row.at[0, 8:].set((row[0, 8:] + 1) % CONFIG.vocab_size)
    a, b = forward(params, CONFIG, row), forward(params, CONFIG, changed)
    np.testing.assert_array_equal(a[:, :8], b[:, :8])
    assert np.abs(a[:, 8:] - b[:, 8:]).max() > 1e-3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_hidden_layers": 1}, "the config says"),
        ({"tie_word_embeddings": not CONFIG.tie_word_embeddings}, "disagree on .*lm_head"),
        ({"vocab_size": CONFIG.vocab_size + 1}, "the config says"),
    ],
)
def test_weights_of_another_config_are_refused(params, change, told):
    other = dataclasses.replace(CONFIG, **change)
    with pytest.raises(ValueError, match=told):
        forward(params, other, tokens(1, 4))
    with pytest.raises(ValueError, match=told):
        generate(params, other, [[1, 2]], max_new_tokens=2, temperature=0)


def test_packed_sequences_compute_what_each_computes_alone(params):
    first, second = tokens(1, 7), tokens(1, 5, seed=1)
    packed = jnp.concatenate([first, second, tokens(1, 3, seed=2)], axis=1)
    segments = jnp.array([[1] * 7 + [2] * 5 + [0] * 3])
    logits = forward(params, CONFIG, packed, segment_ids=segments)
    assert np.isfinite(logits).all()
    size = np.max(np.abs(logits))  # each has been through two layers
    close(logits[:, :7], forward(params, CONFIG, first), of=size, roundings=32)
    close(logits[:, 7:12], forward(params, CONFIG, second), of=size, roundings=32)


@pytest.mark.parametrize("form", [np.ndarray.tolist, np.asarray, lambda row: row.astype(np.uint8)])
def test_tokens_may_be_lists_or_numpy_arrays(params, form):
    row = np.array(tokens(2, 5))
    logits = qwen3.forward(params, CONFIG, form(row))
    np.testing.assert_array_equal(logits, qwen3.forward(params, CONFIG, jnp.array(row)))


def test_positions_segments_and_adapters_of_rows_may_be_lists(params):
    adapters = init_lora(0, CONFIG, rank=1, num_adapters=1)
    of_rows = {"positions": [[0, 1, 0]], "segment_ids": [[1, 1, 2]], "adapter_index": [0]}
    arrays = {name: np.array(rows) for name, rows in of_rows.items()}
    logits = qwen3.forward(params, CONFIG, [[1, 2, 3]], adapters=adapters, **of_rows)
    np.testing.assert_array_equal(
        logits, qwen3.forward(params, CONFIG, [[1, 2, 3]], adapters=adapters, **arrays)
    )


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ([[1.0, 2.0]], TypeError, "tokens are float32; token ids are integers"),
        ([[True]], TypeError, "tokens are bool; token ids are integers"),
        ([[], []], ValueError, r"tokens has shape \[2, 0\]; a row needs at least one token"),
    ],
)
def test_what_is_no_row_of_tokens_is_refused(params, wrong, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        qwen3.forward(params, CONFIG, wrong)


def test_an_id_beyond_the_vocabulary_turns_its_own_row_into_nan(params):
    rows = tokens(3, 6).at[1, 0].set(CONFIG.vocab_size)
    logits = forward(params, CONFIG, rows)
    assert np.isnan(logits[1]).all()
    np.testing.assert_array_equal(logits[::2], forward(params, CONFIG, tokens(3, 6))[::2])


@pytest.mark.parametrize("remat", ["layer", "dots"])
def test_rematerialisation_changes_no_gradient(params, remat):
    row = tokens(2, 9)
    loss = lambda p, how: jax.nn.log_softmax(forward(p, CONFIG, row, remat=how))[..., 0].sum()
    plain, saved = jax.grad(loss)(params, "none"), jax.grad(loss)(params, remat)
    close_trees(saved, plain)


def test_unknown_remat_is_refused(params):
    with pytest.raises(ValueError, match="remat is 'some'; it must be one of none, layer, dots"):
        forward(params, CONFIG, tokens(1, 4), remat="some")


def test_logits_are_float32_whatever_the_parameters():
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    params = init(0, config)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    logits = forward(params, config, tokens(1, 6))
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, forward(init(0, CONFIG), CONFIG, tokens(1, 6)), atol=0.05)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_heads_are_turned_by_their_positions_alike_on_every_platform(platform, monkeypatch):
    config = dataclasses.replace(ModelConfig.preset("xs"), head_dim=8, rope_theta=100.0)
    x = np.random.default_rng(0).normal(size=(3, 2, 8)).astype(np.float32)
    positions = np.array([0, 1, 7])
    angle = positions[:, None, None] * 100.0 ** (-np.arange(4) / 4)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle)  # dimension i pairs with i + D/2
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    got = qwen3.rope(jnp.asarray(x), qwen3.rotation(config, jnp.asarray(positions)))
    size = np.abs(x[..., :4]) + np.abs(x[..., 4:])
    close(got, np.concatenate([turned.real, turned.imag], axis=-1), of=np.concatenate([size, size], axis=-1))


def test_layers_are_unrolled_on_gpus_and_where_a_small_model_keeps_everything_on_cpu(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    small = dataclasses.replace(ModelConfig.preset("xs"), num_hidden_layers=qwen3.UNROLLED)
    large = dataclasses.replace(small, num_hidden_layers=qwen3.UNROLLED + 1)
    counts = {}
    for platform in ("cpu", "gpu", "tpu"):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        counts[platform] = [qwen3.unrolled(small, "none"), qwen3.unrolled(large, "none")]
        counts[platform].append(qwen3.unrolled(small, "dots"))
    few, many = small.num_hidden_layers, large.num_hidden_layers
    assert counts == {"cpu": [few, 1, 1], "gpu": [few, many, few], "tpu": [1, 1, 1]}


def test_deterministic_kernels_of_a_gpu_take_a_layer_at_a_time(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    counts = {}
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        for dtype in ("float32", "bfloat16"):
            config = dataclasses.replace(ModelConfig.preset("xs"), dtype=dtype)
            counts[platform, dtype] = qwen3.unrolled(config, "none")
    layers = config.num_hidden_layers
    alone = counts.pop(("gpu", "bfloat16"))  # which cuDNN's attention takes
    assert alone == 1 < layers and set(counts.values()) == {layers}


def backward_calls(program):
    """How often the lowered program calls cuDNN's backward attention, where a loop's body counts once."""
    bodies, name, entry = {}, "", ""
    for line in program.as_text("hlo").splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.-]+)[^=]*\{$", line):
            name = head[2]
            entry = name if head[1] else entry
        bodies.setdefault(name, []).append(line)

    def count(name):
        own = sum(bool(re.search(r'"__cudnn\$fmha\w*Backward"', line)) for line in bodies[name])
        called = re.findall(r"(?:to_apply|body)=%?([\w.-]+)", "\n".join(bodies[name]))
        return own + sum(map(count, called))

    return count(entry)


@pytest.mark.parametrize("remat", ["none", "dots", "layer"])
def test_a_loop_over_layers_calls_cudnns_backward_attention_once(remat, monkeypatch):
    """Lowered for CUDA, where no GPU need be: more than one such call is what XLA fails on, see `unrolled`."""
    kernel = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(kernel, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(kernel, "check_compute_capability", lambda _: True)
    config = dataclasses.replace(ModelConfig.preset("xs"), dtype="bfloat16", num_hidden_layers=3)
    params = abstract(config)

    def calls(count):
        monkeypatch.setattr(qwen3, "unrolled", lambda *_: count)
        loss = lambda params: qwen3.forward(
            params, config, tokens(2, 64), remat=remat, attention="cudnn"
        ).var()
        return backward_calls(jax.jit(jax.grad(loss)).trace(params).lower(lowering_platforms=("cuda",)))

    assert (calls(1), calls(3)) == (1, 3)


@pytest.mark.parametrize(
    "remat", ["none", *(pytest.param(remat, marks=pytest.mark.long) for remat in ("dots", "layer"))]
)
def test_unrolled_layers_have_the_values_and_gradients_of_a_loop(remat, monkeypatch):
    params, some = init(0, CONFIG), tokens(2, 7)

    def out(count):
        monkeypatch.setattr(qwen3, "unrolled", lambda *_: count)
        loss = lambda params: qwen3.forward(params, CONFIG, some, remat=remat).var()  # no trace of it is kept
        return jax.jit(jax.value_and_grad(loss))(params)

    (one, ones), (all_, alls) = out(1), out(CONFIG.num_hidden_layers)
    close(all_, one, of=one)  # a variance, in which nothing cancels
    close_trees(alls, ones)
