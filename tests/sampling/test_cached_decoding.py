"""What cached decoding samples and logs is what the uncached forward pass computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kit import CONFIG, SETTINGS, ask, kept64, logits64, make_params, prompt, sampled_from, serve

from marl_jax.models import forward
from marl_jax.sampling import Engine, Features, generate

LENGTHS = (1, 2, 8, 9, 17, 25, 33, 40)  # the largest chunk is 16; the first cache length 32
PLAIN = dataclasses.replace(SETTINGS, lengths=(64,), chunks=(16,), features=Features())
# Grouped-query attention with an untied output; every head its own keys; bfloat16.
VARIANTS = {
    "tied": CONFIG,
    "untied": dataclasses.replace(CONFIG, tie_word_embeddings=False, num_key_value_heads=1),
    "bfloat16": dataclasses.replace(CONFIG, dtype="bfloat16"),
}
forward = jax.jit(forward, static_argnums=1)


def uncached(params, config, request, completion):
    """float32 logits [tokens,V] that the forward pass gives for each sampled token."""
    tokens = (*request.tokens, *completion.tokens)
    row = np.zeros((1, 64), np.int32)  # padded on the right, which changes nothing
    row[0, : len(tokens)] = tokens
    return np.asarray(forward(params, config, jnp.array(row)))[0, len(request.tokens) - 1 : len(tokens) - 1]


def check(params, config, requests, completions, tolerance):
    for request, completion in zip(requests, completions):
        assert len(completion.tokens) == request.max_new_tokens
        logits = uncached(params, config, request, completion)
        for n, (row, token, logprob) in enumerate(zip(logits, completion.tokens, completion.logprobs)):
            probs = sampled_from(row, request, n)
            assert probs[token] > 0
            assert abs(np.log(probs[token]) - logprob) < tolerance


@pytest.mark.parametrize(
    "name", ["tied", *(pytest.param(name, marks=pytest.mark.long) for name in VARIANTS if name != "tied")]
)
def test_recorded_logprobs_and_greedy_tokens_are_those_of_the_forward_pass(name):
    config, settings = VARIANTS[name], SETTINGS if name == "tied" else PLAIN
    params = make_params(config)
    greedy = [ask(prompt(n), new=24, temperature=0) for n in LENGTHS]
    heated = [ask(prompt(n), n, new=24, temperature=0.7) for n in LENGTHS]
    completions = serve(Engine(params, config, settings), greedy + heated)
    # Two float32 paths differ in the order of their sums. bfloat16 rounds each activation to 8 bits, a logit of 4
    # by up to 0.016: several such steps over two layers.
    tolerance = 0.08 if name == "bfloat16" else 2e-5
    check(params, config, greedy + heated, completions, tolerance)
    for request, completion in zip(greedy, completions):
        logits = uncached(params, config, request, completion)
        if name == "bfloat16":
            short = logits.max(1) - logits[np.arange(24), completion.tokens]
            assert short.max() < tolerance
            assert (short == 0).mean() >= 0.9
        else:
            assert completion.tokens == logits.argmax(1).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 0.8, "top_p": 0.7},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 500, "top_p": 1e-45},
        {"temperature": 1.0, "min_new_tokens": 24, "stop_tokens": (3, 84, 95, 0)},
        {"temperature": 1.0, "min_new_tokens": 24, "stop_tokens": (84, 3), "top_k": 3},
    ],
    ids=str,
)
def test_logprobs_renormalise_over_what_truncation_and_barred_stops_leave(params, engine, options):
    requests = [ask(prompt(n), n, new=24, **options) for n in LENGTHS]
    check(params, CONFIG, requests, serve(engine, requests), 2e-5)


def test_the_engine_computes_what_float64_numpy_computes(params, engine):
    request = ask(prompt(25), 3, new=24)
    completion = serve(engine, [request])[0]
    logits = logits64(params, (*request.tokens, *completion.tokens))[24:-1]
    wanted = [np.log(sampled_from(row, request, 0)[t]) for row, t in zip(logits, completion.tokens)]
    np.testing.assert_allclose(completion.logprobs, wanted, atol=2e-5)


def test_greedy_is_greedy_whatever_truncation_says(params, engine):
    plain, cut = (ask(prompt(9), temperature=0, **options) for options in ({}, {"top_k": 2, "top_p": 0.1}))
    a, b = serve(engine, [plain, cut])
    assert a == b


def test_recorded_kept_sets_are_those_that_sorting_finds(params):
    prompts = [prompt(n) for n in (1, 5, 12, 20)]
    top_k, top_p = [1, 4, 12, 200], [1.0, 1.0, 0.6, 0.9]
    completions = generate(
        params,
        CONFIG,
        prompts,
        max_new_tokens=12,
        temperature=1.4,
        top_k=top_k,
        top_p=top_p,
        seed=5,
        record_kept=True,
        lanes=8,
    )
    for tokens, k, p, completion in zip(prompts, top_k, top_p, completions):
        assert completion.kept.shape == (12, 96)
        request = ask(tokens, temperature=1.4, top_k=k, top_p=p)
        logits = uncached(params, CONFIG, request, completion)
        for row, token, logprob, kept in zip(logits, completion.tokens, completion.logprobs, completion.kept):
            ids = kept[kept >= 0]
            assert len(ids) == len(set(ids.tolist()))
            np.testing.assert_array_equal(np.sort(ids), np.flatnonzero(kept64(row / 1.4, k, p)))
            assert token in ids
            over_kept = np.float64(row[ids]) / 1.4
            assert abs(row[token] / 1.4 - np.log(np.exp(over_kept).sum()) - logprob) < 2e-5


def test_prompts_of_different_lengths_prefilled_together_never_see_their_padding(params, engine):
    requests = [ask(prompt(n), n) for n in (3, 5, 8, 2, 7, 1, 16, 11)]
    together = serve(engine, requests)
    for request, completion in zip(requests, together):
        assert serve(engine, [request])[0] == completion


@pytest.mark.parametrize("garbage", [1e30, -1e30])
def test_cache_columns_that_were_never_written_are_never_attended(params, engine, garbage):
    requests = [ask(prompt(n), n, new=24) for n in (1, 3, 12, 25, 40)]
    clean = serve(engine, requests)
    poisoned = Engine(params, CONFIG, SETTINGS)
    fill = lambda cache: jax.tree.map(lambda leaf: jnp.full_like(leaf, garbage), cache)
    poisoned._banks[0].rungs[:] = map(fill, poisoned._banks[0].rungs)
    poisoned._prefix_cache = fill(poisoned._prefix_cache)
    assert serve(poisoned, requests) == clean
