"""Stops, prompts prefilled once, later turns, adapters, new weights: what the engine does between two dispatches."""

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kit import (
    CONFIG,
    SCALE,
    SETTINGS,
    ask,
    assert_same_but_for_near_ties,
    compilations,
    logits64,
    make_adapters,
    make_params,
    prompt,
    same_bits,
    sampled_from,
    serve,
    warm_up,
    with_adapters,
)

from marl_jax.errors import UserError
from marl_jax.models import forward, init, lora
from marl_jax.models.tokenizer import build_micro_tokenizer
from marl_jax.sampling import Engine, Features, Load, generate, plan, programs


@pytest.fixture(scope="module")
def adapters():
    return make_adapters(CONFIG)


# -- stops ------------------------------------------------------------------------------------------------------


def test_nothing_is_generated_past_a_stop_token(engine):
    free = serve(engine, [ask(prompt(n), n, new=24) for n in range(1, 17)])
    stops = (free[0].tokens[5], free[3].tokens[9], free[7].tokens[0])
    stopped = serve(engine, [ask(prompt(n), n, new=24, stop_tokens=stops) for n in range(1, 17)])
    reasons = set()
    for a, b in zip(free, stopped):
        first = next((i for i, token in enumerate(a.tokens) if token in stops), None)
        end = 24 if first is None else first + 1
        assert b.tokens == a.tokens[:end]  # the stop token is included
        assert b.logprobs == a.logprobs[:end]
        assert b.finish_reason == ("length" if first is None else "stop")
        reasons.add(b.finish_reason)
    assert reasons == {"stop", "length"}


def test_a_stop_token_in_the_last_place_is_a_stop(engine):
    free = serve(engine, [ask(prompt(5), new=6)])[0]
    last = serve(engine, [ask(prompt(5), new=6, stop_tokens=(free.tokens[-1],))])[0]
    assert last.finish_reason == "stop"
    assert last.tokens == free.tokens[: free.tokens.index(free.tokens[-1]) + 1]


def test_every_request_has_its_own_limit(engine):
    completions = serve(engine, [ask(prompt(4), n, new=n) for n in (1, 2, 4, 5, 8, 24)])
    assert [len(c.tokens) for c in completions] == [1, 2, 4, 5, 8, 24]
    assert {c.finish_reason for c in completions} == {"length"}


def test_stop_tokens_are_barred_until_enough_is_said(engine):
    stops = tuple(serve(engine, [ask(prompt(6), temperature=0, new=4)])[0].tokens)
    for least in (0, 1, 3, 9):
        completion = serve(
            engine, [ask(prompt(6), temperature=0, new=12, stop_tokens=stops, min_new_tokens=least)]
        )[0]
        assert len(completion.tokens) >= max(1, least)
        assert not set(completion.tokens[:least]) & set(stops)


class Spelling:
    """Token i is the letter chr(i + 32)."""

    def decode(self, tokens):
        return "".join(chr(32 + token) for token in tokens)


def test_a_stop_string_ends_the_text_where_it_is_complete(params):
    engine = Engine(params, CONFIG, SETTINGS, to_text=Spelling().decode)
    free = serve(engine, [ask(prompt(n), n, new=24) for n in range(1, 9)])
    for i, completion in enumerate(free):
        text = Spelling().decode(completion.tokens)
        wanted = text[6 + i : 8 + i]
        request = ask(prompt(i + 1), i + 1, new=24, stop_strings=("never seen", wanted))
        stopped = serve(engine, [request])[0]
        end = text.index(wanted) + 2
        assert stopped.finish_reason == "stop"
        assert stopped.tokens == completion.tokens[:end]
        assert stopped.logprobs == completion.logprobs[:end]
        # Only one that ends with or after the first tokens that are asked for.
        least = serve(engine, [dataclasses.replace(request, min_new_tokens=end)])[0]
        assert least == stopped
        later = text.find(wanted, end - 1)
        later = later + 2 if later >= 0 else len(text)
        least = serve(engine, [dataclasses.replace(request, min_new_tokens=end + 1)])[0]
        assert least.tokens == completion.tokens[:later]


def test_a_character_that_is_complete_with_the_last_barred_token_ends_a_stop_string(params):
    to_text = lambda tokens: bytes((0xC3, 0xA9)[token % 2] for token in tokens).decode(errors="replace")
    engine = Engine(params, CONFIG, SETTINGS, to_text=to_text)
    (free,) = serve(engine, [ask(prompt(5), new=24)])
    end = next(n for n in range(4, 24) if to_text(free.tokens[:n]).endswith("é"))
    (stopped,) = serve(engine, [ask(prompt(5), new=24, stop_strings=("é",), min_new_tokens=end)])
    assert stopped.tokens == free.tokens[:end]


def test_looking_for_a_stop_string_decodes_the_end_of_a_long_text(params):
    """All of it is decoded once it is there, or the text has ended, and not after every dispatch."""
    decoded = []

    def to_text(tokens):
        decoded.append(len(tokens))
        return Spelling().decode(tokens)

    engine = Engine(params, CONFIG, SETTINGS, to_text=to_text)
    (done,) = serve(engine, [ask(prompt(1), 1, new=40, stop_strings=("never seen",))])
    assert len(done.tokens) == 40 and decoded.count(40) == 1
    assert len(decoded) >= 40 / SETTINGS.steps
    decoded.clear()
    wanted = Spelling().decode(done.tokens[-6:-4])
    (stopped,) = serve(engine, [ask(prompt(1), 1, new=40, stop_strings=(wanted,))])
    assert Spelling().decode(stopped.tokens).find(wanted) == len(stopped.tokens) - 2


def test_stop_strings_work_through_a_tokenizer(params):
    tokenizer = build_micro_tokenizer(words=("def ",), characters="".join(map(chr, range(33, 120))))
    options = {"max_new_tokens": 12, "seed": 2, "lanes": 8}
    free = generate(params, CONFIG, [prompt(5)], **options)[0]
    text = tokenizer.decode(free.tokens[3:5])
    stopped = generate(params, CONFIG, [prompt(5)], stop_strings=text, tokenizer=tokenizer, **options)[0]
    assert stopped.tokens == free.tokens[: len(stopped.tokens)]
    assert stopped.finish_reason == "stop"
    assert tokenizer.decode(stopped.tokens).endswith(text)


# -- prompts prefilled once -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lanes", "prefixes"), [(8, 4), (2, 1)])
def test_a_prompt_that_samples_share_is_prefilled_once(params, lanes, prefixes):
    settings = dataclasses.replace(SETTINGS, widths=(lanes,), prefixes=prefixes, lengths=(64,))
    engine = Engine(params, CONFIG, settings)
    requests = [ask(prompt(20, p), 8 * p + i, new=5) for p in range(3) for i in range(8)]
    completions = serve(engine, requests)
    assert (
        engine.stats.prefilled_tokens == 3 * 19
    )  # the last token of a prompt is fed by the first decode step
    assert engine.stats.reused_tokens == 3 * 7 * 19
    assert len({tuple(c.tokens) for c in completions}) > 12


def later_turns(engine, first, first_requests):
    tails = [prompt(3 + i, 50 + i) for i in range(len(first))]
    return [
        ask((*r.tokens, *c.tokens, *tail), 100 + i, new=6, policy=r.policy)
        for i, (r, c, tail) in enumerate(zip(first_requests, first, tails))
    ]


@pytest.mark.parametrize(("lanes", "prefixes"), [(8, 8), (2, 1), (1, 1)])
def test_a_later_turn_prefills_only_what_is_new(params, lanes, prefixes):
    settings = dataclasses.replace(SETTINGS, widths=(lanes,), prefixes=prefixes, lengths=(64,))
    engine = Engine(params, CONFIG, settings)
    count = min(4, prefixes)
    requests = [ask(prompt(6 + i, i), i, new=7, keep=True, stop_tokens=(84,)) for i in range(count)]
    first = serve(engine, requests)
    before = engine.stats.prefilled_tokens
    turns = later_turns(engine, first, requests)
    second = serve(engine, turns)
    # The last token of the first turn was sampled but not fed, the last of the second is fed by decoding.
    assert engine.stats.prefilled_tokens - before == sum(3 + i for i in range(count))
    for request, completion in zip(turns, second):
        logits = logits64(params, (*request.tokens, *completion.tokens))[len(request.tokens) - 1 : -1]
        wanted = [np.log(sampled_from(row, request, 0)[t]) for row, t in zip(logits, completion.tokens)]
        np.testing.assert_allclose(completion.logprobs, wanted, atol=2e-5)
    fresh = serve(Engine(params, CONFIG, settings), turns)
    assert_same_but_for_near_ties(params, turns, second, fresh)


def test_a_prompt_seen_by_chance_before_it_is_kept_is_still_kept(params):
    engine = Engine(params, CONFIG, SETTINGS)
    first = ask(prompt(6), new=5, keep=True)
    completion = serve(Engine(params, CONFIG, SETTINGS), [first])[0]
    serve(engine, [ask((*first.tokens, *completion.tokens), 3)])  # the same prefix, kept by nobody
    assert serve(engine, [first])[0] == completion
    before = engine.stats.prefilled_tokens
    serve(engine, [ask((*first.tokens, *completion.tokens, 7, 8), 4)])
    assert engine.stats.prefilled_tokens - before == 2


# -- adapters and weights ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_batch_of_several_adapters_is_each_alone_and_each_merged(params, adapters):
    index = [2, 0, -1, 1, 2, 2]
    prompts = [prompt(9)] * 3 + [prompt(14), prompt(1), prompt(9)]
    options = {"max_new_tokens": 12, "seed": 4, "lanes": 8}
    served = {"adapters": adapters, "adapter_scale": SCALE}
    together = generate(params, CONFIG, prompts, adapter_index=index, **served, **options)
    assert len({tuple(c.tokens) for c in together[:3]}) == 3
    for i, (tokens, which, completion) in enumerate(zip(prompts, index, together)):
        alone = generate(
            params, CONFIG, [tokens], adapter_index=[which], request_ids=[i], **served, **options
        )
        assert alone[0].tokens == completion.tokens
        np.testing.assert_allclose(alone[0].logprobs, completion.logprobs, atol=2e-5)
        one = jax.tree.map(lambda leaf, which=which: leaf[which], adapters)
        merged = params if which < 0 else lora.merge(params, one, SCALE)
        plain = generate(merged, CONFIG, [tokens], request_ids=[i], **options)
        request = dataclasses.replace(ask(tokens, new=12), key=(4, i))
        assert_same_but_for_near_ties(merged, [request], [completion], plain)


@pytest.mark.long
def test_adapters_at_zero_are_the_base(params):
    fresh, settings = lora.init_lora(3, CONFIG, 4, 2), dataclasses.replace(SETTINGS, lengths=(64,))
    engine = Engine(params, CONFIG, settings, adapters=fresh, adapter_scale=SCALE, policies=("a", "b"))
    requests = [ask(prompt(n), n, policy=("a", "b", None)[n % 3]) for n in (1, 5, 12, 17, 30, 40)]
    plain = [dataclasses.replace(request, policy=None) for request in requests]
    base = serve(Engine(params, CONFIG, settings), plain)
    assert_same_but_for_near_ties(params, plain, base, serve(engine, requests))


def test_no_policy_meets_a_prompt_that_another_one_cached(params, adapters):
    def fresh():
        return Engine(params, CONFIG, SETTINGS, **with_adapters(adapters))

    engine = fresh()
    requests = [ask(prompt(20), 1, policy=policy, keep=True) for policy in ("a", "b", None, "c")]
    one_by_one = [serve(engine, [request])[0] for request in requests]
    assert engine.stats.reused_tokens == 0
    assert all(same_bits(c, serve(fresh(), [r])[0]) for r, c in zip(requests, one_by_one))
    follow = ask((*requests[0].tokens, *one_by_one[0].tokens, 5), 2, policy="b")
    serve(engine, [follow])
    assert engine.stats.reused_tokens == 0  # the history was kept by "a"


def test_an_update_reaches_the_very_next_sample(params, adapters):
    engine = Engine(params, CONFIG, SETTINGS, **with_adapters(adapters))
    requests = [ask(prompt(20), 1, policy="a", keep=True), ask(prompt(20), 1)]
    old = serve(engine, requests)
    other_params = make_params() | {"final_norm": make_params()["final_norm"] * 0.8}
    turned = jax.tree.map(lambda leaf: leaf[::-1], adapters)  # "a" gets what "c" had
    engine.update(params=other_params, adapters=turned)
    new = serve(engine, requests)
    expected = serve(Engine(other_params, CONFIG, SETTINGS, **with_adapters(turned)), requests)
    assert all(same_bits(a, b) for a, b in zip(new, expected))
    assert all(a.logprobs != b.logprobs for a, b in zip(old, new))
    assert engine.stats.reused_tokens == 0  # the old prompts were forgotten


# -- programs and transfers -------------------------------------------------------------------------------------


def test_nothing_is_compiled_after_warm_up_and_each_dispatch_is_read_once(params, monkeypatch):
    with compilations() as cold:
        # Whether all of these widths give the same bits is not asked here.
        settings = dataclasses.replace(SETTINGS, widths=(8, 4, 2), steps=3, prefixes=5)
        engine = Engine(params, CONFIG, settings, measured=True)
        warm_up(engine)
    assert cold[0] > len(engine.settings.lengths)  # the counter counts
    assert len(engine.settings.widths) * len(engine.settings.lengths) <= 12
    rng = np.random.default_rng(9)
    requests = [
        ask(
            prompt(int(rng.integers(1, 41)), i),
            i,
            new=int(rng.integers(1, 25)),
            temperature=float(rng.choice([0, 0.7, 1.2])),
            top_k=int(rng.choice([0, 5])),
            top_p=float(rng.choice([1, 0.8])),
            stop_tokens=tuple(rng.integers(0, 96, rng.integers(0, 3)).tolist()),
            keep=bool(rng.integers(2)),
        )
        for i in range(200)
    ]
    reads, dispatches, read = [], engine.stats.dispatches, jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: reads.append(tree) or read(tree))
    other = init(5, CONFIG)
    with compilations() as counted:
        completions = serve(engine, requests[:150])
        turns = [
            ask((*r.tokens, *c.tokens, 1), 900, new=3)
            for r, c in zip(requests, completions)
            if r.keep and len(r.tokens) + len(c.tokens) < 60
        ]
        serve(engine, turns)
        engine.update(params=other)
        serve(engine, requests[150:])
    assert counted == [0]
    assert len(reads) == engine.stats.dispatches - dispatches > 0


def test_progress_is_told_after_every_dispatch(params):
    heard = []
    prompts = [prompt(n) for n in (1, 5, 12, 20)]
    generate(params, CONFIG, prompts, max_new_tokens=12, seed=1, lanes=8, progress=lambda *n: heard.append(n))
    assert heard[-1] == (4, 4)
    steps = plan(CONFIG, Load(20, 12)).steps
    assert len(heard) == -(-12 // steps)
    assert generate(params, CONFIG, [], max_new_tokens=3, seed=0) == []


def test_a_wait_that_was_interrupted_is_taken_up_again(params, monkeypatch):
    requests = [ask(prompt(5, i), i, new=9) for i in range(20)]
    expected = serve(Engine(params, CONFIG, SETTINGS), requests)
    engine, waits, done = Engine(params, CONFIG, SETTINGS), [], {}

    def interrupted(tree):
        waits.append(tree)
        if len(waits) % 2:
            raise KeyboardInterrupt
        return read(tree)

    read = jax.device_get
    monkeypatch.setattr(jax, "device_get", interrupted)
    tickets = [engine.submit(request) for request in requests]
    while engine.pending:
        with contextlib.suppress(KeyboardInterrupt):
            done.update(engine.step())
    assert [done[ticket] for ticket in tickets] == expected
    assert engine.stats.dispatches == len(waits) // 2


# -- who is served when -----------------------------------------------------------------------------------------


def test_a_prefill_with_rows_left_takes_prompts_that_still_wait(params, monkeypatch):
    """Four prompts fit into one prefill, two lanes are there: the next two prompts need no prefill of their own."""
    settings = dataclasses.replace(SETTINGS, widths=(2,), lengths=(64,), prefixes=8)
    assert settings.prefill_rows(8) == 4
    engine = Engine(params, CONFIG, settings)
    requests = [ask(prompt(7, i), i, new=5) for i in range(8)]
    calls, prefill = [], programs.prefill
    monkeypatch.setattr(programs, "prefill", lambda *a, **k: calls.append(k) or prefill(*a, **k))
    together = serve(engine, requests)
    assert len(calls) == 2
    assert (engine.stats.prefilled_tokens, engine.stats.reused_tokens) == (8 * 6, 0)
    apart = []
    for request in requests:
        engine.update()
        apart += serve(engine, [request])
    assert together == apart


def test_prompts_are_prefilled_early_only_into_rows_of_no_other_use(params):
    """One of two rows holds a history that a later turn goes on from: prompts that wait must not take it."""
    settings = dataclasses.replace(SETTINGS, widths=(1,), lengths=(64,), prefixes=2)
    engine = Engine(params, CONFIG, settings)
    first = ask(prompt(6), new=7, keep=True)
    history = serve(engine, [first])[0]
    fed = engine.stats.prefilled_tokens
    later = ask((*first.tokens, *history.tokens, 1, 2, 3), 1)
    serve(engine, [ask(prompt(7, 1), 1), *(ask(prompt(7, i), i) for i in range(2, 6)), later])
    assert engine.stats.prefilled_tokens - fed == 5 * 6 + 3


def test_requests_that_need_a_longer_cache_wait_for_the_shorter_ones(params):
    engine = Engine(params, CONFIG, SETTINGS, measured=True)  # two lengths, whatever their bits are here
    short = [ask(prompt(4, i), i, new=12) for i in range(24)]
    long = [ask(prompt(40, i), i, new=12) for i in range(24)]
    for pair in zip(long, short):
        for request in pair:
            engine.submit(request)
    lengths, done = [], 0
    while engine.pending:
        done += len(engine.step())
        lengths.append(engine._banks[0].rungs[0].length)
    assert done == 48
    # 12 tokens are three dispatches, for eight lanes at a time; each step leaves the next one under way.
    assert lengths == [32] * 8 + [64] * 10


def test_weights_that_are_not_finite_are_named_and_not_sampled_from(params):
    broken = {**params, "final_norm": params["final_norm"] * np.nan}
    with pytest.raises(FloatingPointError, match="weights finite"):
        serve(Engine(broken, CONFIG, SETTINGS), [ask(prompt(3))])


def test_an_update_of_other_shapes_is_refused(params, adapters):
    engine = Engine(params, CONFIG, SETTINGS)
    with pytest.raises(ValueError, match="adapters differ in shape"):
        engine.update(adapters=adapters)
    with pytest.raises(ValueError, match="params differ in shape"):
        engine.update(params=jax.tree.map(lambda leaf: leaf[..., :1], params))


def test_abandoned_requests_leave_an_engine_that_serves_as_before(params):
    engine = Engine(params, CONFIG, SETTINGS)
    requests = [ask(prompt(5, i), i, new=20) for i in range(12)]
    expected = serve(engine, requests)
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.abandon()
    assert engine.pending == 0
    engine.update()
    assert serve(engine, requests) == expected


def test_starting_over_takes_no_new_memory_unless_the_old_is_in_doubt(params):
    engine = Engine(params, CONFIG, SETTINGS)
    request = ask(prompt(5), new=4)
    expected = serve(engine, [request])
    rows = engine._prefix_cache.keys[0]
    engine.abandon()
    assert engine._prefix_cache.keys[0] is rows
    engine.submit(request)
    engine.abandon()  # with something under way: nobody looked at what it wrote
    assert engine._prefix_cache.keys[0] is not rows
    rows = engine._prefix_cache.keys[0]
    rows.delete()  # as a copy that was interrupted leaves it
    engine.abandon()
    assert not engine._prefix_cache.keys[0].is_deleted()
    assert serve(engine, [request]) == expected


def test_a_greedy_request_among_recorded_kept_sets_logs_the_whole_distribution(params):
    settings = dataclasses.replace(SETTINGS, features=Features(truncate=True, candidates=4))
    greedy, sampled = serve(
        Engine(params, CONFIG, settings),
        [ask(prompt(5, 0), 0, new=6, temperature=0, top_k=0), ask(prompt(5, 1), 1, new=6, top_k=4)],
    )
    plain = serve(Engine(params, CONFIG, SETTINGS), [ask(prompt(5, 0), 0, new=6, temperature=0)])[0]
    assert greedy.tokens == plain.tokens
    np.testing.assert_allclose(greedy.logprobs, plain.logprobs, atol=1e-5)
    assert (greedy.kept == -1).all() and (sampled.kept >= 0).all()


def even_ids(logits):
    """A sampler of one's own: tokens of odd ids are never drawn."""
    return jnp.where(jnp.arange(logits.shape[-1]) % 2 == 0, logits, -jnp.inf)


def test_a_sampler_of_ones_own_cuts_tokens_off_and_the_logged_distribution_is_what_is_left(params):
    features = Features(truncate=True, candidates=64, sampler=f"{__name__}:even_ids")
    requests = [ask(prompt(7, n), n, new=12, top_k=64) for n in range(4)]
    for request, done in zip(
        requests, serve(Engine(params, CONFIG, dataclasses.replace(SETTINGS, features=features)), requests)
    ):
        assert not np.any(np.asarray(done.tokens) % 2)
        logits = np.asarray(
            forward(params, CONFIG, np.array([[*request.tokens, *done.tokens]]))[0], np.float64
        )
        at = logits[len(request.tokens) - 1 : -1] / request.temperature
        even = np.where(np.arange(CONFIG.vocab_size) % 2 == 0, at, -np.inf)
        left = np.where(even >= np.sort(even, axis=-1)[:, -64:-63], even, -np.inf)
        logp = left - np.log(np.exp(left).sum(-1, keepdims=True))
        np.testing.assert_allclose(done.logprobs, logp[np.arange(len(at)), done.tokens], atol=1e-4)
        assert {i for row in done.kept for i in row if i >= 0} <= set(range(0, CONFIG.vocab_size, 2))


def unlikeliest(logits):
    return jnp.where(logits == logits.min(axis=-1, keepdims=True), logits, -jnp.inf)


def test_top_k_is_taken_among_the_tokens_that_a_sampler_leaves(params):
    features = Features(truncate=True, candidates=1, sampler=f"{__name__}:unlikeliest")
    settings = dataclasses.replace(SETTINGS, features=features)
    (done,) = serve(Engine(params, CONFIG, settings), [ask(prompt(7, 0), 0, new=4, top_k=1)])
    assert [*done.logprobs] == [0.0] * len(done.tokens)


def test_a_sampler_that_is_written_anew_is_the_one_that_is_called(params, monkeypatch):
    """As in a notebook: under the name of a program that was compiled."""
    settings = dataclasses.replace(SETTINGS, features=Features(sampler=f"{__name__}:chosen"))
    for rest in (0, 1):
        keep = lambda logits, rest=rest: jnp.where(jnp.arange(logits.shape[-1]) % 2 == rest, logits, -jnp.inf)
        monkeypatch.setitem(globals(), "chosen", keep)
        (done,) = serve(Engine(params, CONFIG, settings), [ask(prompt(7, 0), 0, new=12)])
        assert {token % 2 for token in done.tokens} == {rest}


def large_negative(logits):
    return jnp.where(jnp.arange(logits.shape[-1]) % 2 == 0, logits, -1e9)


def test_a_token_that_a_sampler_makes_impossible_is_not_among_the_kept(params):
    ask_one = [ask(prompt(7, 0), 0, new=12, top_k=64)]
    done = [
        serve(
            Engine(
                params,
                CONFIG,
                dataclasses.replace(
                    SETTINGS, features=Features(truncate=True, candidates=64, sampler=f"{__name__}:{name}")
                ),
            ),
            ask_one,
        )[0]
        for name in ("even_ids", "large_negative")
    ]
    assert done[0].tokens == done[1].tokens and done[0].logprobs == done[1].logprobs
    np.testing.assert_array_equal(done[0].kept, done[1].kept)


def test_a_greedy_token_is_the_likeliest_that_a_sampler_leaves_and_logs_the_whole_distribution(params):
    settings = dataclasses.replace(SETTINGS, features=Features(sampler=f"{__name__}:even_ids"))
    request = ask(prompt(7, 0), 0, new=12, temperature=0)
    (done,) = serve(Engine(params, CONFIG, settings), [request])
    logits = np.asarray(forward(params, CONFIG, np.array([[*request.tokens, *done.tokens]]))[0], np.float64)
    at = logits[len(request.tokens) - 1 : -1]
    assert list(done.tokens) == (2 * np.argmax(at[:, ::2], axis=-1)).tolist()
    logp = at - np.log(np.exp(at).sum(-1, keepdims=True))
    np.testing.assert_allclose(done.logprobs, logp[np.arange(len(at)), done.tokens], atol=1e-4)


SAMPLERS = {
    "masking": (lambda logits: logits > 0, "returned an array [8, 96] of bool; return logits [8, 96]"),
    "raising": (lambda logits: {}[0], "raised KeyError: 0"),
    "nothing": (lambda logits: None, "returned None; return logits [8, 96]"),
    "narrow": (lambda logits: logits[:, 1:], "returned an array [8, 95] of float32; return logits [8, 96]"),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_that_makes_no_logits_is_one_line(params, monkeypatch, name):
    sampler, told = SAMPLERS[name]
    monkeypatch.setitem(globals(), name, sampler)
    settings = dataclasses.replace(SETTINGS, features=Features(sampler=f"{__name__}:{name}"))
    with pytest.raises(UserError, match=re.escape(f"sampler '{__name__}:{name}' {told}")):
        serve(Engine(params, CONFIG, settings), [ask(prompt(5, 0), 0, new=6)])


def test_prompts_of_about_the_same_length_share_their_programs():
    params = init(0, CONFIG)
    one = lambda length: generate(params, CONFIG, [[1] * length], max_new_tokens=4, temperature=0, seed=0)
    one(33)
    with compilations() as counted:
        for length in range(34, 65):
            one(length)
    assert counted[0] <= 2  # a prefill of another length
