"""A stop is asked for by the signals that end things, once; a process that outlives its terminal does so here, too."""

import os
import signal
import subprocess
import sys
import time
import types

import pytest

from marl_jax.runs import stopping
from marl_jax.runs.stopping import TOGETHER_S, Stop, Stopped


@pytest.fixture(
    params=[
        signal.SIGTERM,
        *(pytest.param(one, marks=pytest.mark.long) for one in (signal.SIGINT, signal.SIGHUP)),
    ]
)
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
        time.sleep(TOGETHER_S)
        os.kill(os.getpid(), number)
        assert heard == [number]
    os.kill(os.getpid(), number)
    assert heard == [number] * 2


def test_a_request_during_an_exchange_between_processes_counts_at_the_next_check(monkeypatch):
    def exchange(flag):
        os.kill(os.getpid(), signal.SIGTERM)
        return flag

    with Stop() as stop:
        with monkeypatch.context() as patch:
            patch.setattr(stopping.hosts, "any_of", exchange)
            assert not stop.requested_of_any()
        assert stop.requested_of_any()


def test_signals_that_come_together_are_one_request(monkeypatch):
    """As systemd's at the end of a login, or the shell's and the kernel's when a terminal closes."""
    clock = iter([0.0, 0.9 * TOGETHER_S, 1.1 * TOGETHER_S])
    monkeypatch.setattr(stopping, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    before, heard = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}, []
    try:
        for number in before:
            signal.signal(number, lambda number, frame: heard.append(number))
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.asked and not heard
            os.kill(os.getpid(), signal.SIGHUP)
            assert heard == [signal.SIGHUP]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
import hashlib
from marl_jax.runs.stopping import Stop
with Stop(PATIENCE) as stop:
    stop.farewell = lambda: print("farewell", flush=True)
    print("there", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000_000)  # no Python runs in the main thread meanwhile
"""
LATE = """
import time
from marl_jax.runs.stopping import Stop
with Stop(0.5) as stop:
    stop.farewell = lambda: 1 / 0
    print("there", flush=True)
    time.sleep(4)
    print("heeded" if stop.requested() else "not asked", flush=True)
"""
EARLY = """
import time
from marl_jax.runs.stopping import Stop
with Stop(5.0) as stop:
    stop.farewell = lambda: print("farewell", flush=True)
    print("there", flush=True)
    while not stop.requested():
        time.sleep(0.01)
    time.sleep(6)
print("ended by itself", flush=True)
"""


@pytest.fixture
def child(number):
    """Starts a program, and ends it in the end."""
    signal.signal(number, signal.SIG_DFL)  # which children take over
    running = []

    def start(program):
        command = [sys.executable, "-c", program]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        assert running[0].stdout.readline() == "there\n"
        return running[0]

    yield start
    for process in running:
        process.kill()


@pytest.mark.long
@pytest.mark.parametrize(
    "program, said",
    [
        (STUCK.replace("PATIENCE", "0.5"), "farewell\n"),
        (LATE, "the step under way is finished first (division by zero)\nheeded\n"),
        (EARLY, "ended by itself\n"),
    ],
    ids=["stuck", "late", "early"],
)
def test_patience_ends_where_the_main_thread_heeds_nothing_and_all_is_saved(number, child, program, said):
    process = child(program)
    process.send_signal(number)
    assert process.communicate(timeout=120)[0] == said and process.returncode == 0


def test_a_second_signal_ends_a_process_at_once_whose_main_thread_is_stuck(number, child):
    process = child(STUCK.replace("PATIENCE", "600"))
    time.sleep(1)  # until it is stuck: before that, it is Python's handlers that hear
    process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(number)
    assert process.wait(60) == 128 + number


@pytest.mark.long
def test_a_second_signal_ends_a_process_at_once_that_is_being_saved(number, child):
    saving = """lambda: (print("saving", flush=True), threading.Event().wait(600))"""
    stuck = STUCK.replace("PATIENCE", "0.5").replace("""lambda: print("farewell", flush=True)""", saving)
    process = child("import threading" + stuck)
    time.sleep(1)
    process.send_signal(number)
    assert process.stdout.readline() == "saving\n"
    process.send_signal(number)
    assert process.wait(60) == 128 + number


@pytest.mark.long
def test_a_second_signal_after_the_patience_ends_a_process_without_an_error_of_python(number, child):
    process = child(EARLY.replace("5.0", "0.2"))
    process.send_signal(number)
    time.sleep(2)
    process.send_signal(number)
    assert "Exception ignored" not in process.communicate(timeout=120)[0] and process.returncode == -number
