"""A request's tokens are its own: not its company, lane, order of arrival nor the batch's history change a bit."""

import dataclasses
import random

import jax.numpy as jnp
import numpy as np
import pytest
from kit import (
    CONFIG,
    SETTINGS,
    ask,
    assert_same_but_for_near_ties,
    make_params,
    margin,
    prompt,
    same_bits,
    sampled_from,
    serve,
)

from marl_jax.sampling import Engine, Load, generate, plan

LENGTHS = (1, 2, 7, 8, 9, 16, 17, 25, 33, 40)
REQUESTS = [
    ask(
        prompt(LENGTHS[i % 10], i),
        i,
        new=(24, 3, 1, 17)[i % 4],
        temperature=(1.0, 0.7, 0, 1.5)[i % 4],
        top_k=(0, 0, 9)[i % 3],
        top_p=(1.0, 0.9)[i % 2],
        stop_tokens=(84, 12) if i % 5 == 0 else (),
    )
    for i in range(24)
]


@pytest.fixture(scope="module")
def alone(params):
    """Each request served by itself."""
    engine = Engine(params, CONFIG, SETTINGS)
    return [serve(engine, [request])[0] for request in REQUESTS]


def assert_same_bits(ours, theirs):
    for request, a, b in zip(REQUESTS, ours, theirs, strict=True):
        assert same_bits(a, b), request


@pytest.mark.shipped
def test_company_lanes_and_refills_change_no_bit(engine, alone):
    assert len(REQUESTS) == 3 * SETTINGS.lanes  # each lane is refilled, next to longer and shorter neighbours
    assert_same_bits(serve(engine, REQUESTS), alone)


@pytest.mark.shipped
def test_the_order_of_arrival_changes_no_bit(engine, alone):
    order = random.Random(0).sample(range(24), 24)
    completions = serve(engine, [REQUESTS[i] for i in order])
    assert_same_bits([completions[order.index(i)] for i in range(24)], alone)


@pytest.mark.shipped
def test_requests_added_while_others_run_change_no_bit(engine, alone):
    tickets, done = {}, {}
    waiting = list(enumerate(REQUESTS))
    while waiting or engine.pending:
        for i, request in [waiting.pop(0) for _ in range(min(2, len(waiting)))]:
            tickets[engine.submit(request)] = i
        done.update({tickets[ticket]: completion for ticket, completion in engine.step()})
    assert_same_bits([done[i] for i in range(24)], alone)


@pytest.mark.long
def test_a_published_vocabulary_with_its_own_end_tokens_can_be_served():
    config = dataclasses.replace(CONFIG, vocab_size=6000, eos_token_id=5999)
    settings = plan(config, Load(8, 72), lanes=256, budget_bytes=1 << 30)
    settings = dataclasses.replace(settings, lengths=settings.lengths[-1:])
    assert len(settings.widths) > 1
    completion = serve(Engine(make_params(config), config, settings), [ask(prompt(5), new=4)])[0]
    assert len(completion.tokens) == 4


def test_recording_kept_sets_changes_no_token_whoever_else_asks_for_how_many(params):
    prompts = [prompt(5, i) for i in range(6)]
    shared = {"max_new_tokens": 8, "seed": 3, "lanes": 8, "temperature": 1.4}
    plain = generate(params, CONFIG, prompts, top_k=5, **shared)
    recorded = generate(params, CONFIG, prompts, top_k=5, record_kept=True, **shared)
    beside = generate(params, CONFIG, prompts, top_k=[5, 5, 5, 5, 5, 40], record_kept=True, **shared)
    assert recorded == plain
    assert beside[:5] == plain[:5]


@pytest.mark.shipped
def test_the_growth_of_the_cache_changes_no_bit(params, engine, alone):
    short = [i for i, r in enumerate(REQUESTS) if len(r.tokens) + r.max_new_tokens <= SETTINGS.lengths[0]]
    long = ask(prompt(40), 99, new=24)
    tickets = [engine.submit(long)]
    engine.step()
    tickets += [engine.submit(REQUESTS[i]) for i in short]
    done = dict(engine.step())
    assert (
        engine._banks[0].rungs[0].length == SETTINGS.context == 64
    )  # the short ones, too, look over the long one's columns
    while engine.pending:
        done.update(engine.step())
    for i, ticket in zip(short, tickets[1:]):
        assert same_bits(done[ticket], alone[i])


@pytest.mark.long
def test_other_lane_counts_give_the_same_tokens_but_for_near_ties(params, alone):
    for lanes in (1, 5):
        other = dataclasses.replace(SETTINGS, widths=(lanes,), lengths=(64,), prefixes=1)
        assert_same_but_for_near_ties(params, REQUESTS, alone, serve(Engine(params, CONFIG, other), REQUESTS))


@pytest.mark.long
def test_other_chunks_and_dispatches_give_the_same_tokens_but_for_near_ties(params, alone):
    other = dataclasses.replace(SETTINGS, lengths=(64,), chunks=(40,), prefill_tokens=80, steps=7)
    assert_same_but_for_near_ties(params, REQUESTS, alone, serve(Engine(params, CONFIG, other), REQUESTS))


def test_what_is_no_near_tie_is_not_excused(params, alone):
    request, completion = REQUESTS[0], alone[0]
    forged = dataclasses.replace(completion, tokens=[(completion.tokens[0] + 1) % 96, *completion.tokens[1:]])
    assert margin(params, request, []) > 1e-4
    with pytest.raises(AssertionError):
        assert_same_but_for_near_ties(params, [request], [completion], [forged])


def test_generate_twice_gives_the_same_bits_and_another_seed_other_tokens(params):
    prompts = [prompt(n) for n in (1, 5, 12, 20)]
    first, again, other = (
        generate(params, CONFIG, prompts, max_new_tokens=12, seed=seed, lanes=8) for seed in (1, 1, 2)
    )
    assert first == again
    assert all(a.tokens != b.tokens for a, b in zip(first, other))


def test_request_ids_key_the_noise(params):
    prompts, ids = [prompt(n) for n in (1, 5, 12, 20)], [70, 4, 9, -3]

    def sample(order, **options):
        order = list(order)
        return generate(
            params,
            CONFIG,
            [prompts[i] for i in order],
            max_new_tokens=12,
            seed=1,
            lanes=8,
            request_ids=[ids[i] for i in order],
            **options,
        )

    first = sample(range(4))
    permuted = sample([2, 0, 3, 1])
    assert [permuted[k] for k in (1, 3, 0, 2)] == first
    assert first != generate(params, CONFIG, prompts, max_new_tokens=12, seed=1, lanes=8)
    same = generate(params, CONFIG, [prompts[1]] * 2, max_new_tokens=12, seed=1, lanes=8, request_ids=[4, 5])
    assert same[0].tokens != same[1].tokens


@pytest.mark.long
def test_frequencies_through_the_engine_are_the_exact_ones(params):
    """In a model that maps every context to one distribution, sampled tokens are independent draws from it."""
    from scipy.stats import chi2

    logits = np.random.default_rng(1).normal(size=96) * 1.5
    constant = dict(params, embed=jnp.ones_like(params["embed"]))
    quiet = {name: jnp.zeros_like(params["layers"][name]) for name in ("o", "down")}
    constant["layers"] = params["layers"] | quiet
    constant["final_norm"] = jnp.ones_like(params["final_norm"])
    # hidden states are all ones: the output layer alone decides
    constant["lm_head"] = jnp.broadcast_to(jnp.array(logits / 32, jnp.float32), (32, 96))
    config = dataclasses.replace(CONFIG, tie_word_embeddings=False)
    settings = dataclasses.replace(SETTINGS, lengths=(64,), chunks=(16,))
    engine = Engine(constant, config, settings)
    for options in ({"temperature": 0.8}, {"top_k": 7}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.8}):
        requests = [ask(prompt(1 + i % 3, i), i, new=24, **options) for i in range(200)]
        completions = serve(engine, requests)
        tokens = np.concatenate([completion.tokens for completion in completions])
        probs = sampled_from(logits, requests[0], 0)
        counts, wanted = np.bincount(tokens, minlength=96), len(tokens) * probs
        assert not counts[probs == 0].any()
        common, rare = wanted >= 5, (wanted > 0) & (wanted < 5)
        bins = [(counts[i], wanted[i]) for i in np.flatnonzero(common)]
        if rare.any():
            bins.append((counts[rare].sum(), wanted[rare].sum()))
        statistic = sum((got - want) ** 2 / want for got, want in bins)
        assert statistic < chi2.ppf(0.999, len(bins) - 1), options
