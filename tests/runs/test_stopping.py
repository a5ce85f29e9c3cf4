"""A stop is asked for by the signals that end things, once; a process that outlives its terminal does so here, too."""

import os
import signal
import subprocess
import sys

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


STUCK = """
import hashlib, sys
from marl_jax.runs.stopping import Stop
with Stop(patience=0.5) as stop:
    stop.farewell = lambda: print("farewell", flush=True) or SAYS
    print("there", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000_000)  # no Python runs meanwhile
"""
NOTICES = """
import time
from marl_jax.runs.stopping import Stop
with Stop(patience=0.2) as stop:
    stop.farewell = lambda: print("farewell", flush=True)
    print("there", flush=True)
    while not stop.asked:
        time.sleep(0.01)
    time.sleep(1)
print("ended by itself", flush=True)
"""


@pytest.mark.parametrize(
    "program, said",
    [
        (STUCK.replace("SAYS", "None"), "farewell\n"),
        (STUCK.replace("SAYS", "1 / 0"), "farewell\nthe last state was not saved: division by zero\n"),
        (NOTICES, "ended by itself\n"),
    ],
)
def test_patience_ends_where_the_main_thread_takes_no_notice(number, program, said):
    signal.signal(number, signal.SIG_DFL)  # which children take over
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "there\n"
        child.send_signal(number)
        assert child.communicate(timeout=20)[0] == said and child.returncode == 0
    finally:
        child.kill()
