"""Streams: the same sum whichever is ready first, one compilation, and an end when asked."""

import threading
import time

import jax.numpy as jnp
import pytest

from marl_jax import compile_cache
from marl_jax.learning.streams import Streams, stream_count


def slow(delays):
    """A step that adds and says where it ran, and takes as long as it is told."""

    def step(carry, item):
        time.sleep(delays[item % len(delays)])
        return carry + jnp.float32(0.1) * item, threading.current_thread().name

    return step


def add_up(count, delays=(0.0,), items=9, check=None, step=None):
    streams = Streams(count)
    start = lambda: jnp.zeros(())
    return streams.run(step or slow(delays), start, range(items), program=lambda _: 0, check=check)


def test_there_are_two_on_one_cpu_and_one_elsewhere():
    assert [stream_count(*where, on_cpu=2) for where in (("cpu", 1), ("cpu", 4), ("gpu", 1))] == [2, 1, 1]


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_to_do_is_where_it_began(count):
    carry, said = add_up(count, items=0)
    assert float(carry) == 0 and said == []


@pytest.mark.parametrize("items", [1, 2, 3, 9])
def test_the_sum_does_not_depend_on_who_is_ready_first(items):
    sums = {
        float(add_up(2, delays, items)[0])
        for delays in ((0.0,), (0.01, 0.0), (0.0, 0.01), (0.0, 0.003, 0.006))
    }
    assert len(sums) == 1
    assert sums.pop() == pytest.approx(float(add_up(1, items=items)[0]), rel=1e-6)


def test_micro_batches_go_to_two_threads_in_turn_and_what_they_say_keeps_its_order():
    _, said = add_up(2, items=4)
    assert said[0] == said[2] != said[1] == said[3]


def test_both_work_at_once():
    both = threading.Barrier(2, timeout=30)
    streams, run = Streams(2), []

    def step(carry, item):
        if item:
            both.wait()
        return carry + item, run.append(item)

    # The first is waited for alone, because its program is new.
    streams.run(step, lambda: 0, [0], program=lambda _: "p", check=None)
    assert streams.run(step, lambda: 0, [1, 2], program=lambda _: "p", check=None)[0] == 3


def test_a_program_is_compiled_once():
    compiling, most = 0, 0

    def step(carry, item):
        nonlocal compiling, most
        compiling, most = compiling + 1, max(most, compiling + 1)
        time.sleep(0.02)
        compiling -= 1
        return carry, item

    Streams(2).run(step, lambda: 0, range(4), program=lambda item: item, check=None)
    assert most == 1  # each is a program of its own: never two at once


def test_one_stream_makes_room_before_it_begins(monkeypatch):
    order = []
    monkeypatch.setattr(compile_cache, "make_room", lambda: order.append("room"))
    Streams(1).run(lambda carry, item: (carry, order.append(item)), lambda: 0, [1, 2], program=lambda _: 0)
    assert order == ["room", 1, 2]


def test_no_program_runs_while_programs_are_dropped(monkeypatch):
    running, seen = set(), []
    begun, looked = threading.Event(), threading.Event()

    def step(carry, item):
        running.add(item)
        if item == 1:
            begun.set()
            assert looked.wait(60)
            time.sleep(0.1)  # still running, if it is not waited for
        running.discard(item)
        return carry + item, item

    def dropped(wait):
        assert begun.wait(60)
        seen.append({1} & running)  # item 0 may have ended
        looked.set()
        wait()
        seen.append(set(running))
        return True

    streams = Streams(2)
    streams.run(step, lambda: 0, [0], program=lambda item: item // 2)
    monkeypatch.setattr(compile_cache, "make_room", dropped)
    # Item 1 is of a known program and still runs as that of item 2 is new.
    assert streams.run(step, lambda: 0, [0, 1, 2], program=lambda item: item // 2) == (3, [0, 1, 2])
    assert seen == [{1}, set()]
    assert not streams._compiled


@pytest.mark.parametrize("count", [1, 2])
def test_a_check_that_raises_ends_it_and_little_is_done_after(count):
    done, calls = [], []

    def check():
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt

    def step(carry, item):
        done.append(item)
        return carry, item

    with pytest.raises(KeyboardInterrupt):
        add_up(count, items=50, check=check, step=step)
    assert len(done) <= 4


def test_an_error_in_a_stream_is_raised():
    def step(carry, item):
        if item == 3:
            raise ValueError("broken")
        return carry, item

    with pytest.raises(ValueError, match="broken"):
        add_up(2, step=step)
