"""Lanes over rungs: requests move to longer caches as they grow, wait there, or give their lane up and go on later.

What a request gets is the same in all these cases. The engine has an accelerator's settings here, forced on CPU.
"""

import dataclasses
import itertools

import numpy as np
import pytest
from kit import (
    CONFIG,
    SETTINGS,
    ask,
    assert_same_but_for_near_ties,
    compilations,
    make_adapters,
    prompt,
    same_bits,
    serve,
    warm_up,
    with_adapters,
)

from marl_jax.sampling import Engine, Features
from marl_jax.sampling.rungs import Places, apportion, best_lengths


def over_rungs(*lanes_at, lengths=(16, 32, 48, 64), **options):
    chosen = {"widths": (sum(lanes_at),), "lanes_at": lanes_at, "lengths": lengths, **options}
    return dataclasses.replace(SETTINGS, **chosen)


PLENTY = over_rungs(12, 12, 12, 12)
SHORT = over_rungs(12, 2, 1, 1)  # of long lanes: requests that grow have to wait for them


def crowd(count=40):
    """Prompts and completions of all lengths, some of them shared."""
    options = ({}, {"temperature": 0.0}, {"top_p": 0.8, "min_new_tokens": 3, "stop_tokens": (1, 2, 3)})
    return [ask(prompt(1 + i % 8 * 5, i % 11), i, new=1 + i * 7 % 24, **options[i % 3]) for i in range(count)]


@pytest.fixture(scope="module")
def alone(params):
    """What each request of the crowd gets in an engine of one cache."""
    return serve(Engine(params, CONFIG, SETTINGS, measured=True), crowd())


# ---------------------------------------------------------------- what a request gets


@pytest.mark.long
def test_a_request_that_moves_gets_what_one_gets_that_does_not(params, alone):
    engine = Engine(params, CONFIG, PLENTY)
    moved = serve(engine, crowd())
    assert engine.stats.moved > 10 and engine.stats.given_up == 0
    assert_same_but_for_near_ties(params, crowd(), alone, moved)


@pytest.mark.long
def test_a_request_that_gave_its_lane_up_goes_on_as_if_it_had_not(params, alone):
    """Tokens and log-probs, each recorded once: those from before the break are the ones that were sampled then."""
    engine = Engine(params, CONFIG, SHORT)
    tickets = [engine.submit(request) for request in crowd()]
    before, done = {}, {}
    while engine.pending:
        done.update(engine.step())
        for waiting in itertools.chain(*engine._admission._queues):
            if waiting.sampled is not None:
                before[waiting.ticket] = waiting.sampled
    broken = [done[ticket] for ticket in tickets]
    assert engine.stats.given_up >= len(before) > 3 and engine.stats.recomputed_tokens > 0
    assert_same_but_for_near_ties(params, crowd(), alone, broken)
    for ticket, said in before.items():
        completion, count = done[ticket], len(said.tokens)
        assert completion.tokens[:count] == list(said.tokens)
        assert completion.logprobs[:count] == said.logprobs
        assert len(completion.logprobs) == len(completion.tokens)


@pytest.mark.long
def test_adapters_and_kept_sets_go_on_with_a_request(params):
    served, features = with_adapters(make_adapters()), Features(truncate=True, candidates=8)
    requests = [
        ask(prompt(1 + i % 8 * 5, i), i, new=5 + i * 7 % 20, policy="abc"[i % 3], top_k=1 + i % 8)
        for i in range(30)
    ]
    whole = Engine(params, CONFIG, dataclasses.replace(SETTINGS, features=features), measured=True, **served)
    engine = Engine(params, CONFIG, dataclasses.replace(SHORT, features=features), **served)
    expected, broken = serve(whole, requests), serve(engine, requests)
    assert engine.stats.given_up > 0
    for one, other in zip(expected, broken):
        if one.tokens == other.tokens:
            assert [set(row) for row in one.kept.tolist()] == [set(row) for row in other.kept.tolist()]
    assert sum(one.tokens == other.tokens for one, other in zip(expected, broken)) >= 28


@pytest.mark.long
def test_later_turns_go_on_from_histories_of_any_rung(params):
    asked = [ask(prompt(1 + i % 7 * 5, i), i, new=6 + i % 9, keep=True) for i in range(12)]
    plain, engine = (
        Engine(params, CONFIG, dataclasses.replace(settings, prefixes=16), measured=True)
        for settings in (SETTINGS, SHORT)
    )
    first, same = serve(plain, asked), serve(engine, asked)
    assert_same_but_for_near_ties(params, asked, first, same)
    later = [ask((*r.tokens, *done.tokens, 3, 4), i, new=4) for i, (r, done) in enumerate(zip(asked, first))]
    before = engine.stats.reused_tokens
    assert_same_but_for_near_ties(params, later, serve(plain, later), serve(engine, later))
    assert engine.stats.reused_tokens > before


@pytest.mark.long
def test_two_engines_of_the_same_settings_give_the_same_bits(params):
    one, two = (serve(Engine(params, CONFIG, SHORT), crowd()) for _ in range(2))
    assert all(map(same_bits, one, two))


def test_nothing_is_compiled_after_warm_up(params):
    engine = Engine(params, CONFIG, SHORT)
    warm_up(engine)
    with compilations() as counted:
        serve(engine, crowd())
        serve(engine, crowd(3))
    assert counted == [0] and engine.stats.moved and engine.stats.given_up
    assert len(SHORT.shapes) == 4


def test_short_requests_attend_no_long_rung(params, monkeypatch):
    from marl_jax.sampling import programs

    decode, seen = programs.decode, []
    monkeypatch.setattr(
        programs,
        "decode",
        lambda p, a, rungs, *r, **k: (seen.append(len(rungs)), decode(p, a, rungs, *r, **k))[1],
    )
    serve(Engine(params, CONFIG, SHORT), [ask(prompt(3, i), i, new=8) for i in range(5)])
    assert set(seen) == {1}


def test_an_engine_that_was_abandoned_serves_as_a_new_one(params):
    expected = serve(Engine(params, CONFIG, SHORT), crowd())
    engine = Engine(params, CONFIG, SHORT)
    for request in crowd():
        engine.submit(request)
    for _ in range(5):
        engine.step()
    engine.abandon()
    assert not engine.pending
    assert all(map(same_bits, serve(engine, crowd()), expected))


# ---------------------------------------------------------------- who has which lane


@pytest.mark.parametrize("seed", range(30))
def test_every_request_has_a_rung_that_is_long_enough_or_is_held_where_it_was(seed):
    rng = np.random.default_rng(seed)
    lanes_at = rng.integers(1, 9, rng.integers(1, 6)).tolist()
    places, longest = Places(lanes_at), len(lanes_at) - 1
    needs: dict[int, int] = {}  # by ticket

    def moved(before, swaps):
        """Where the tickets are once these lanes have changed places."""
        for lower, upper in swaps:
            assert places.rung[upper] == places.rung[lower] + 1  # neighbours alone
            before[[lower, upper]] = before[[upper, lower]]
        return before

    for ticket in range(150):
        need = int(rng.integers(longest + 1))
        others = {rung: sum(n >= rung for n in needs.values()) for rung in range(need + 1)}
        room = all(count < sum(lanes_at[rung:]) for rung, count in others.items())
        assert (need <= places.room) == room
        if room:
            before = places.tickets.copy()
            after = moved(before, places.enter(ticket, need))
            assert np.flatnonzero(after != places.tickets).tolist() == [places.lane_of(ticket)]
            needs[ticket] = need
        assert all(places.rung[places.lane_of(one)] >= need for one, need in needs.items())
        for one in [one for one in needs if rng.random() < 0.15]:
            places.leave(places.lane_of(one))
            del needs[one]
        for one in needs:
            needs[one] += int(rng.random() < 0.3 and needs[one] < longest)
            places.need[places.lane_of(one)] = needs[one]
        places.hold_excess()
        left = set(places.tickets[places.taken].tolist())
        held = set(places.tickets[places.held].tolist())
        gone = set(needs) - left
        assert len(held) <= sum(lanes_at) // 10 and all(a < b for a in held for b in gone)
        before = places.tickets.copy()
        assert moved(before, places.settle()).tolist() == places.tickets.tolist()
        needs = {one: int(places.need[places.lane_of(one)]) if one in held else needs[one] for one in left}
        assert all(places.rung[places.lane_of(one)] >= need for one, need in needs.items())


def test_the_youngest_are_held_and_the_youngest_of_these_give_up():
    """Ten short lanes and ten long ones, worked out by hand: two lanes of twenty may be held."""
    places = Places([10, 10])
    for ticket in range(20):  # the first ten enter short lanes
        assert places.enter(ticket, 0) == []

    def grow(*tickets):
        for ticket in tickets:
            places.need[places.lane_of(ticket)] = 1

    grow(*range(12))
    assert places.hold_excess() == []
    # Tickets 10 and 11 have long lanes; of the ten others eight find one.
    assert set(places.tickets[places.held].tolist()) == {8, 9}
    places.settle()
    assert set(places.tickets[10:].tolist()) == {*range(8), 10, 11}
    grow(8, 9, 12, 13)
    assert places.hold_excess() and set(places.tickets[places.held].tolist()) == {8, 9}
    assert not {12, 13} & set(places.tickets.tolist())
    places.leave(places.lane_of(0))
    grow(8, 9)
    assert places.hold_excess() == [] and set(places.tickets[places.held].tolist()) == {9}  # 8 is older


# ---------------------------------------------------------------- how many of which length


def test_lengths_are_those_that_take_the_least_memory():
    """Against all choices of two lengths below the longest, by brute force."""
    calls = [(3, 40), (20, 10), (33, 5), (50, 14), (2, 60)]
    lengths, shares = best_lengths(calls, 64, multiple=8, steps=4, most=3)
    needs = [p - 1 + min(n, t - t % 4 + 4) for p, n in calls for t in range(n)]

    def memory(chosen):
        return sum(min(length for length in chosen if length >= need) for need in needs)

    least = min(memory((a, b, 64)) for a in range(8, 64, 8) for b in range(a + 8, 64, 8))
    assert memory(lengths) == least and lengths[-1] == 64
    counted = [sum(low < need <= high for need in needs) for low, high in itertools.pairwise((0, *lengths))]
    np.testing.assert_allclose(shares, np.array(counted) / len(needs))


def test_lanes_are_dealt_in_the_shares_that_calls_need_and_the_longest_has_one():
    assert apportion(11, np.array([0.5, 0.3, 0.2, 0.0])) == (5, 3, 2, 1)
    assert apportion(1, np.array([0.7, 0.3])) == (0, 1)
    for lanes in range(1, 40):
        assert sum(apportion(lanes, np.array([0.41, 0.33, 0.26]))) == lanes
