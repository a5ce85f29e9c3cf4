"""A stop is asked for by the signals that end things, once; a process that outlives its terminal does so here, too."""

import os
import signal

import pytest

from marl_jax.runs.stopping import Stop, Stopped


@pytest.fixture(params=[signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def number(request):
    before = signal.getsignal(request.param)
    yield request.param
    signal.signal(request.param, before)


def test_a_signal_asks_once_and_the_next_one_does_what_it_always_did(number):
    heard = []
    signal.signal(number, lambda *_: heard.append(number))
    with Stop() as stop:
        stop.check()
        os.kill(os.getpid(), number)
        assert stop.asked and not heard
        with pytest.raises(Stopped):
            stop.check()
        os.kill(os.getpid(), number)
        assert heard == [number]
    os.kill(os.getpid(), number)
    assert heard == [number] * 2


def test_who_was_told_to_outlive_its_terminal_does():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.asked
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
