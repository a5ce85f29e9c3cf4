"""Banks take turns: what one has sampled is looked at while the others decode, and nobody can tell from the tokens."""

import contextlib
import dataclasses
import gc
import itertools
import random
import threading
import time

import jax
import pytest
from kit import CONFIG, SETTINGS, ask, compilations, make_params, prompt, serve, warm_up
from slow import slowed

from marl_jax.sampling import Engine, programs

TWO = dataclasses.replace(SETTINGS, widths=(4,), banks=2, prefixes=8)


@pytest.fixture(scope="module")
def params():
    return make_params()


def crowd(count=30):
    """Prompts and answers of all lengths, some shared, some to go on from."""
    return [ask(prompt(1 + i % 7 * 5, i % 11), i, new=1 + i * 7 % 23, keep=i % 3 == 0) for i in range(count)]


@pytest.mark.long
def test_requests_get_the_bits_in_two_banks_that_they_get_in_one(params):
    one = Engine(params, CONFIG, dataclasses.replace(TWO, banks=1))
    two = Engine(params, CONFIG, dataclasses.replace(one.settings, banks=2), measured=True)
    requests = crowd()
    first = serve(one, requests)
    assert serve(two, requests) == first
    later = [
        ask((*r.tokens, *done.tokens, 3, 4), i, new=4)
        for i, (r, done) in enumerate(zip(requests, first))
        if r.keep
    ]
    assert serve(two, later) == serve(one, later)


@pytest.mark.long
def test_what_comes_out_when_does_not_depend_on_which_bank_is_ready_first(params, monkeypatch):
    def history(delays):
        with monkeypatch.context() as patch:
            decode = programs.decode
            patch.setattr(programs, "decode", lambda *a, **k: (time.sleep(next(delays)), decode(*a, **k))[1])
            engine, steps = Engine(params, CONFIG, TWO), []
            for request in crowd():
                engine.submit(request)
            while engine.pending:
                steps.append(engine.step())
        return steps

    undisturbed = history(itertools.repeat(0.0))
    for seed in range(3):
        rng = random.Random(seed)
        assert history(iter(lambda rng=rng: rng.choice((0.0, 0.01, 0.03)), None)) == undisturbed


@pytest.mark.long
def test_both_banks_decode_at_once(params, monkeypatch):
    together, decode = threading.Barrier(2, timeout=60), programs.decode
    engine = Engine(params, CONFIG, TWO)
    requests = [ask(prompt(5, i), i, new=12) for i in range(8)]
    serve(engine, requests)  # compiles
    monkeypatch.setattr(programs, "decode", lambda *a, **k: (together.wait(), decode(*a, **k))[1])
    serve(engine, requests)  # a broken barrier is an error


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("part", ["prefill", "decode"])
def test_waiting_for_a_slow_program_is_time_of_that_program(params, monkeypatch, part, count):
    engine = Engine(params, CONFIG, dataclasses.replace(TWO, banks=count), measured=True)
    serve(engine, [ask(prompt(5, 1), 0, new=3)])  # compiles
    before, dispatches = dict(engine.watch.seconds), engine.stats.dispatches
    with monkeypatch.context() as patch:
        patch.setattr(programs, part, slowed(getattr(programs, part), 0.3))
        serve(engine, [ask(prompt(5, 2), 0, new=4)])  # in one dispatch
    assert engine.stats.dispatches == dispatches + 1
    assert engine.watch.seconds[part] - before[part] >= 0.3


def test_a_few_requests_are_dealt_to_all_banks(params):
    engine = Engine(params, CONFIG, dataclasses.replace(TWO, widths=(8, 4)), measured=True)
    for i in range(8):
        engine.submit(ask(prompt(5, i), i, new=8))
    engine.step()
    assert engine.stats.lane_steps == 4 * TWO.steps  # a narrow one, where all of them would fill a wide one
    assert [len(bank.requests) for bank in engine._banks] == [4, 4]
    while engine.pending:
        engine.step()


def test_a_program_that_fails_in_one_bank_is_heard_of_and_the_engine_serves_again(params, monkeypatch):
    requests = crowd(12)
    expected = serve(Engine(params, CONFIG, TWO), requests)
    engine, calls, decode = Engine(params, CONFIG, TWO), itertools.count(), programs.decode

    def failing(*args, **kwargs):
        if next(calls) == 3:
            raise MemoryError("no room")
        return decode(*args, **kwargs)

    monkeypatch.setattr(programs, "decode", failing)
    for request in requests:
        engine.submit(request)
    with pytest.raises(MemoryError, match="no room"):
        while engine.pending:
            engine.step()
    engine.abandon()
    assert not engine.pending
    assert serve(engine, requests) == expected


def test_an_interrupt_while_a_dispatch_is_handed_over_leaves_no_trace(params, monkeypatch):
    requests = crowd(12)
    expected = serve(Engine(params, CONFIG, TWO), requests)
    engine, ended, decode = Engine(params, CONFIG, TWO), [], programs.decode

    def slow(*args, **kwargs):
        time.sleep(0.1)
        ended.append(decode(*args, **kwargs))
        return ended[-1]

    def interrupted(work, submit=engine._banks[1]._worker.submit):
        submit(work)
        raise KeyboardInterrupt

    for request in requests:
        engine.submit(request)
    monkeypatch.setattr(programs, "decode", slow)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine._banks[1]._worker, "submit", interrupted)
        engine.step()
    engine.abandon()
    assert len(ended) == 2  # nobody writes to caches any more
    assert serve(engine, requests) == expected


def test_a_wait_that_was_interrupted_is_taken_up_again_at_the_same_bank(params, monkeypatch):
    requests = crowd(12)
    expected = serve(Engine(params, CONFIG, TWO), requests)
    engine, read, done, waits = Engine(params, CONFIG, TWO), jax.device_get, {}, itertools.count()

    def interrupted(tree):
        if next(waits) % 2:
            raise KeyboardInterrupt
        return read(tree)

    monkeypatch.setattr(jax, "device_get", interrupted)
    tickets = [engine.submit(request) for request in requests]
    while engine.pending:
        with contextlib.suppress(KeyboardInterrupt):
            done.update(engine.step())
    assert [done[ticket] for ticket in tickets] == expected


def test_nothing_is_compiled_after_warm_up(params):
    engine = Engine(params, CONFIG, dataclasses.replace(TWO, widths=(4, 2)))
    warm_up(engine)
    with compilations() as counted:
        serve(engine, crowd())
        serve(engine, crowd(3))
    assert counted == [0]


def test_threads_go_with_their_engine(params):
    before = set(threading.enumerate())
    engine = Engine(params, CONFIG, TWO)
    serve(engine, crowd(8))
    mine = set(threading.enumerate()) - before
    assert len(mine) == 2
    del engine
    gc.collect()
    for thread in mine:
        thread.join(timeout=60)
        assert not thread.is_alive()
