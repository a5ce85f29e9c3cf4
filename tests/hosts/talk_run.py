"""Run by test_hosts.py, as one of several processes: COORDINATOR PROCESS HOSTS WHAT."""

import sys
import threading
import time

import numpy as np

from marl_jax import hosts
from marl_jax.errors import UserError


def talk():
    """Every way of telling, of small values and large ones, and of errors."""
    me = hosts.index()
    assert hosts.count() == int(HOSTS) and hosts.is_first() == (me == 0)
    assert hosts.from_all(lambda: ("process", me)) == [("process", k) for k in range(int(HOSTS))]
    large = hosts.from_all(lambda: np.arange(3000 * (me + 1), dtype=np.float64) / 7)
    assert [len(one) for one in large] == [3000 * (k + 1) for k in range(int(HOSTS))]
    np.testing.assert_array_equal(large[-1], np.arange(3000 * int(HOSTS)) / 7)
    weird = hosts.from_first(lambda: np.array([-0.0, np.nan, 5e-324]))
    assert weird.tobytes() == np.array([-0.0, np.nan, 5e-324]).tobytes()
    assert hosts.any_of(me == 1) and not hosts.any_of(False)
    assert hosts.share(range(5)) == list(range(5))[me :: int(HOSTS)]
    for attempt in (
        lambda: hosts.from_all(lambda: refused(me == 1)),
        lambda: hosts.from_first(lambda: refused(True)),
    ):
        try:
            attempt()
        except UserError as error:
            assert str(error) == "the disk of this process is full"
        else:
            raise AssertionError("an error of one process is an error of all")
    try:
        with hosts.sharing_errors():
            if me == 1:
                refused(True)
            hosts.from_first(lambda: 1)
    except UserError:
        print("all told")


def refused(now):
    if now:
        raise UserError("the disk of this process is full")


def wait():
    """For a signal, or for ever."""
    print("waiting", flush=True)
    time.sleep(120)


def stop():
    """Process 1 is asked to stop, and all hear."""
    heard = threading.Event()
    hosts.on_stop(heard.set)
    hosts.from_all(lambda: None)
    if hosts.index() == 1:
        hosts.request_stop()
    assert heard.wait(20)
    hosts.from_all(lambda: None)
    print("heard")


def fail():
    """Process 1 fails in a program of all devices, where nobody would hear."""
    if hosts.index() == 1:
        raise UserError("a failure of process 1 alone")
    wait()


def all_fail():
    """All fail for the same reason, and each says so itself."""
    raise UserError("a failure of all")


COORDINATOR, PROCESS, HOSTS, WHAT = sys.argv[1:]
if __name__ == "__main__":
    try:
        where = (
            (None, None) if COORDINATOR == "-" else (COORDINATOR, int(PROCESS))
        )  # or what a cluster announces
        with hosts.joined(int(HOSTS), *where, wait_s=60.0):
            globals()[WHAT]()
    except UserError as error:
        print(error)
        sys.exit(2)
