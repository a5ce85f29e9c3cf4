"""Jobs beside the main thread: so many at a time, errors where they are waited for, no wait for a job that hangs."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError

import pytest

from marl_jax.threads import Workers, join_all, run_parallel

WAIT_S = 20.0


def fail(error):
    raise error


def test_pools_of_programs_are_waited_for_so_long():
    workers, done = Workers("test", finish=True), threading.Event()
    job, later = workers.submit(done.wait), workers.submit(len, "never begun")
    while not job.running():
        time.sleep(0.01)
    assert not join_all(0.1) and later.cancelled()
    done.set()
    assert join_all(WAIT_S) and job.done()


def test_a_program_that_a_ctrl_c_left_behind_is_known_though_its_pool_is_gone():
    begun, done = threading.Event(), threading.Event()

    def items():
        yield None
        begun.wait()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_parallel("test", lambda _: begun.set() or done.wait(), items())
    gc.collect()
    assert not join_all(0)
    done.set()
    assert join_all(WAIT_S)


def test_results_and_errors_come_to_whoever_waits():
    workers = Workers("test")
    assert workers.submit(divmod, 7, 2).result(WAIT_S) == (3, 1)
    for error in (ValueError("broken"), SystemExit(3)):
        with pytest.raises(type(error)) as raised:
            workers.submit(fail, error).result(WAIT_S)
        assert raised.value is error
    assert workers.submit(len, "on it goes").result(WAIT_S) == 10


def test_jobs_start_in_order_and_at_most_so_many_work_at_a_time():
    together, started = threading.Barrier(2), []

    def job(number):
        started.append(number)
        together.wait(WAIT_S)  # broken, and so an error, unless two jobs meet
        return threading.current_thread()

    workers = Workers("test", 2)
    jobs = [workers.submit(job, number) for number in range(6)]
    assert len({one.result(WAIT_S) for one in jobs}) == 2
    assert [sorted(started[i : i + 2]) for i in (0, 2, 4)] == [[0, 1], [2, 3], [4, 5]]


def test_calls_side_by_side_come_in_order_and_none_is_under_way_when_one_fails():
    together, ended = threading.Barrier(2), []

    def job(number, fails):
        together.wait(WAIT_S)
        if fails:
            raise ValueError(number)
        time.sleep(0.05)
        ended.append(number)
        return number

    assert run_parallel("test", job, (1, 2), (False, False)) == [1, 2]
    with pytest.raises(ValueError, match="3"):
        run_parallel("test", job, (3, 4), (True, False))
    assert sorted(ended) == [1, 2, 4]


def test_no_thread_is_an_error_by_name():
    with pytest.raises(ValueError, match="tool threads are 0; at least 1 is needed"):
        Workers("tool", 0)


def test_a_wait_ends_with_the_first_job_that_is_done_or_with_what_the_check_raises():
    release, checks = threading.Event(), []
    workers = Workers("test", 2)
    slow, quick = workers.submit(release.wait, WAIT_S), workers.submit(len, "")
    workers.wait([slow, quick])
    assert quick.done() and not slow.done()

    def check():
        checks.append(1)
        if len(checks) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        workers.wait([slow], check)
    release.set()


def test_a_job_over_its_limit_is_given_up_and_the_next_one_gets_a_thread():
    release = threading.Event()
    workers = Workers("test")
    hung = workers.submit(release.wait, WAIT_S, limit_s=0.2)
    after = workers.submit(len, "ab", limit_s=WAIT_S)
    workers.wait([after])
    assert after.result() == 2
    with pytest.raises(TimeoutError):
        hung.result(0)
    release.set()
    places = [workers.submit(threading.current_thread) for _ in range(4)]
    assert len({one.result(WAIT_S) for one in places}) == 1  # the thread that hung did not come back


def test_the_time_in_the_queue_does_not_count_and_a_late_result_is_none():
    workers = Workers("test")
    late = workers.submit(time.sleep, 0.4, limit_s=0.3)  # nobody looks before it is done
    queued = workers.submit(len, "ab", limit_s=0.3)
    assert queued.result(WAIT_S) == 2
    with pytest.raises(TimeoutError):
        late.result(0)


def test_closing_drops_what_has_not_started_and_waits_as_long_as_it_is_told():
    begun, release = threading.Event(), threading.Event()

    def job():
        begun.set()
        release.wait(WAIT_S)

    workers = Workers("test")
    running, waiting = workers.submit(job), workers.submit(len, "")
    assert begun.wait(WAIT_S)
    workers.close(0.1)
    assert not running.done()
    with pytest.raises(CancelledError):
        waiting.result(0)
    with pytest.raises(RuntimeError, match="the test threads are closed"):
        workers.submit(len, "")
    threading.Timer(0.1, release.set).start()
    workers.close(None)
    assert running.done()


def test_threads_end_with_their_workers_and_keep_no_result_alive():
    class Result:
        pass

    before = set(threading.enumerate())
    workers = Workers("test", 2)
    result = weakref.ref(workers.submit(Result).result(WAIT_S))
    workers.submit(len, "").result(WAIT_S)
    until = time.monotonic() + WAIT_S
    while result() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert result() is None
    mine = set(threading.enumerate()) - before
    assert mine
    del workers
    gc.collect()
    for thread in mine:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_a_forked_child_does_not_wait_for_jobs_of_its_parent():
    program = """
import os, sys, time
from marl_jax.threads import Workers
workers = Workers("test", finish=True)
job = workers.submit(time.sleep, 3.0)
while not job.running():
    time.sleep(0.01)
if not os.fork():
    sys.exit()
os.wait()
print(job.done())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


ENDING = """
import sys, time
import jax, jax.numpy as jnp
from marl_jax.threads import Workers

@jax.jit
def long(x):
    return jax.lax.fori_loop(0, 2_000_000, lambda i, x: jnp.sin(x), x)

def work():
    print("begun", flush=True)
    KIND
    print("done", flush=True)

workers = Workers("test", finish=FINISH)
jobs = [workers.submit(work) for _ in range(2)]
while not jobs[0].running():
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("kind", "finish", "said"),
    [
        ("time.sleep(600)", False, "begun\n"),  # a process does not wait for what hangs
        ("long(jnp.ones(100)).block_until_ready()", True, "begun\ndone\n"),  # nor die of a program of JAX
    ],
)
def test_the_end_of_a_process_waits_for_the_jobs_under_way_only_if_asked_to(kind, finish, said):
    program = ENDING.replace("KIND", kind).replace("FINISH", str(finish))
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
    assert time.monotonic() - began < 60
