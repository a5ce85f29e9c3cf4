"""This library and transformers' Qwen3 compute the same, on seven odd models."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import CASES, FIXTURES, NEW, PROMPT
from safetensors.numpy import load_file

from marl_jax.models import ModelConfig, forward, init, load_hf, lora, save_hf
from marl_jax.models.peft import save_peft
from marl_jax.models.tokenizer import build_micro_tokenizer, load_tokenizer
from marl_jax.sampling import generate

forward = jax.jit(forward, static_argnums=1)


def greedy(config, params, prompt, first_position):
    """Greedy tokens and their log-probs through the plain uncached forward, rows padded on the right."""
    row = np.zeros((1, PROMPT + NEW), np.int32)
    row[0, :PROMPT] = prompt
    positions = jnp.arange(row.shape[1])[None] + first_position
    step = lambda tokens: jax.nn.log_softmax(forward(params, config, tokens, positions=positions))
    logprobs = []
    for at in range(PROMPT, PROMPT + NEW):
        scores = np.asarray(step(row))[0, at - 1]
        row[0, at] = scores.argmax()
        logprobs.append(scores.max())
    return row[0, PROMPT:], np.array(logprobs)


@pytest.mark.parametrize("name", CASES)
def test_logits_greedy_tokens_and_logprobs_equal_those_of_transformers(tmp_path, name):
    case, expected = CASES[name], np.load(FIXTURES / f"{name}.npz")
    seed = int(expected["seed"])
    config, params = load_hf(case.write(tmp_path, seed))
    tokens, positions = case.inputs(seed)
    logits = forward(params, config, jnp.array(tokens), positions=jnp.array(positions))
    np.testing.assert_allclose(logits, expected["logits"], atol=2e-4, rtol=0)
    new, logprobs = greedy(config, params, tokens[0, :PROMPT], case.first_positions[0])
    assert new.tolist() == expected["greedy"].tolist()
    np.testing.assert_allclose(logprobs, expected["logprobs"], atol=1e-4, rtol=0)


FROM_ZERO = [name for name in CASES if CASES[name].first_positions[0] == 0]


@pytest.mark.parametrize(
    "name", [*FROM_ZERO[:2], *(pytest.param(n, marks=pytest.mark.long) for n in FROM_ZERO[2:])]
)
def test_cached_sampling_gives_the_greedy_tokens_and_logprobs_of_transformers(tmp_path, name):
    case, expected = CASES[name], np.load(FIXTURES / f"{name}.npz")
    seed = int(expected["seed"])
    config, params = load_hf(case.write(tmp_path, seed))
    prompt = case.inputs(seed)[0][0, :PROMPT]
    (completion,) = generate(params, config, [prompt.tolist()], max_new_tokens=NEW, temperature=0)
    assert completion.tokens == expected["greedy"].tolist()
    np.testing.assert_allclose(completion.logprobs, expected["logprobs"], atol=1e-4, rtol=0)


def theirs(directory, tokens, positions=None, **kwargs):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", **kwargs).eval()
    with torch.no_grad():
        where = None if positions is None else torch.tensor(positions)
        return model(torch.tensor(tokens), position_ids=where).logits.float().numpy()


@pytest.mark.parity
@pytest.mark.parametrize("name", CASES)
def test_live_transformers_agrees_on_weights_in_no_fixture(tmp_path, name):
    case = CASES[name]
    config, params = load_hf(case.write(tmp_path, seed=123))
    tokens, positions = case.inputs(seed=123)
    logits = forward(params, config, jnp.array(tokens), positions=jnp.array(positions))
    np.testing.assert_allclose(logits, theirs(tmp_path, tokens, positions), atol=2e-4, rtol=0)


@pytest.mark.parity
@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 50_000], ids=["single", "sharded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_what_is_saved(tmp_path, dtype, max_shard_bytes):
    case = CASES["grouped_untied"]
    config, params = load_hf(case.write(tmp_path / "a", seed=5), dtype=dtype)
    save_hf(tmp_path / "b", config, params, max_shard_bytes=max_shard_bytes)
    tokens, _ = case.inputs(seed=5)
    ours = forward(params, config, jnp.array(tokens))
    # bfloat16: both sides are computed in float32 from the rounded weights, so that rounding on the way is no matter.
    if dtype == "bfloat16":
        wide = jax.tree.map(lambda w: w.astype(jnp.float32), params)
        ours = forward(wide, dataclasses.replace(config, dtype="float32"), jnp.array(tokens))
    import torch

    np.testing.assert_allclose(ours, theirs(tmp_path / "b", tokens, dtype=torch.float32), atol=2e-4, rtol=0)


@pytest.mark.parity
@pytest.mark.parametrize("name", ["all_heads", "one_layer_one_kv_head"])
def test_what_transformers_saves_is_loaded(tmp_path, name):
    from transformers import AutoModelForCausalLM

    case = CASES[name]
    model = AutoModelForCausalLM.from_pretrained(case.write(tmp_path / "a", seed=6))
    model.save_pretrained(tmp_path / "b", max_shard_size="50KB")
    assert (tmp_path / "b" / "model.safetensors.index.json").exists()
    (config_a, a), (config_b, b) = load_hf(tmp_path / "a"), load_hf(tmp_path / "b")
    assert config_a == config_b
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parity
def test_bfloat16_stays_close_to_transformers_in_bfloat16(tmp_path):
    import torch

    case = CASES["grouped_untied"]
    config, params = load_hf(case.write(tmp_path, seed=7), dtype="bfloat16")
    tokens, _ = case.inputs(seed=7)
    exact = theirs(tmp_path, tokens, dtype=torch.float32)
    their_error = np.abs(theirs(tmp_path, tokens, dtype=torch.bfloat16) - exact).mean()
    our_error = np.abs(forward(params, config, jnp.array(tokens)) - exact).mean()
    assert our_error < 1.2 * their_error


def random_adapters(config, rank, count):
    keys = iter(jax.random.split(jax.random.key(3), 100))
    fresh = lora.init_lora(0, config, rank, count)
    return jax.tree.map(lambda leaf: 0.2 * jax.random.normal(next(keys), leaf.shape), fresh)


@pytest.mark.parity
def test_peft_computes_what_our_adapters_compute_and_saves_what_we_saved(tmp_path):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    case = CASES["grouped_untied"]
    config, params = load_hf(case.write(tmp_path / "base", seed=8))
    tokens, _ = case.inputs(seed=8)
    adapters = random_adapters(config, rank=4, count=2)
    one = jax.tree.map(lambda leaf: leaf[1], adapters)
    save_peft(tmp_path / "adapter", config, one, alpha=6.0, base_model=str(tmp_path / "base"))

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    ours = forward(
        params,
        config,
        jnp.array(tokens),
        adapters=adapters,
        adapter_index=jnp.array([1, 1, 1]),
        adapter_scale=1.5,
    )
    assert np.abs(ours - forward(params, config, jnp.array(tokens))).max() > 0.1
    np.testing.assert_allclose(ours, expected, atol=2e-4, rtol=0)

    model.save_pretrained(tmp_path / "again")
    ours, again = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "again"))
    jax.tree.map(np.testing.assert_array_equal, again, ours)
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text())["lora_alpha"] == 6.0


@pytest.mark.parity
def test_a_merged_export_computes_the_adapter_in_transformers(tmp_path):
    case = CASES["many_groups"]
    config, params = load_hf(case.write(tmp_path / "base", seed=9))
    tokens, _ = case.inputs(seed=9)
    adapters = random_adapters(config, rank=3, count=2)
    one = jax.tree.map(lambda leaf: leaf[0], adapters)
    save_hf(tmp_path / "merged", config, lora.merge(params, one, 0.5))
    ours = forward(
        params,
        config,
        jnp.array(tokens),
        adapters=adapters,
        adapter_index=jnp.array([0, 0, 0]),
        adapter_scale=0.5,
    )
    np.testing.assert_allclose(ours, theirs(tmp_path / "merged", tokens), atol=2e-4, rtol=0)


@pytest.mark.parity
def test_a_micro_model_with_its_tokenizer_generates_in_transformers(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    config = ModelConfig.preset("xs")
    save_hf(tmp_path, config, init(0, config), build_micro_tokenizer())
    tokenizer = load_tokenizer(tmp_path, config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    out = model.generate(torch.tensor([tokenizer.encode("1+1=")]), max_new_tokens=4, do_sample=False)
    assert out.shape[1] <= 8
