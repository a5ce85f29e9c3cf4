"""The processes that do the algebra: bounded, replaced when they die, gone at exit, blind to the text."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from pace import slowness

from marl_jax import user_cache
from marl_jax.rewards import grade_math
from marl_jax.rewards.math import equivalence as grader
from marl_jax.rewards.math import math_pool, start_equivalent
from marl_jax.rewards.math.latex import parse

ROOT = Path(__file__).parents[2]
HARD = (r"\ln 6", r"\ln 2 + \ln 3")  # equal, and only algebra tells


@pytest.fixture(scope="module", autouse=True)
def warm():
    math_pool.start()
    assert ask("1", "1").same
    yield
    math_pool.close()


# What a test waits for comes in a second or two, or, without what is tested, after hours or never.
AT_ONCE_S = 30.0


def ask(answer: str, gold: str, wall_s: float = 60.0) -> math_pool.Verdict:
    return math_pool.equal(parse(answer)[0], parse(gold)[0], 0.7, wall_s)


@pytest.fixture
def patient(monkeypatch):
    """Where a test is not about time, a busy machine has all of it."""
    monkeypatch.setattr(grader, "WALL_LIMIT_S", 60.0)


@contextlib.contextmanager
def nothing_collected():
    """What a test took is its own: a collection of all that others left in the process can take half a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread may end meanwhile
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def workers() -> list[int]:
    return [pid for pid in children(os.getpid()) if b"math_worker" in command_line(pid)]


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends between opening and reading
        return b""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def run(program: str, **more) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, **more)


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^9}}",
        "9!!!!!!!!!",
        "((3!)!)!",
        "10^{10^{10}}",
        "1e9999999999",
        "2^{-9^{9^9}}",
        r"\sum_{n=1}^{10^{100}} n!",
        r"\int_0^1 x^{x^{x^x}} dx",
        r"\lfloor 10^{10^{8}} \pi \rfloor",
        r"10^{10^9} \bmod 7",
        r"\binom{10^{10}}{10^9}",
        "(x+y+z+w+1)^{1000}",
        "(" * 400 + "1" + ")" * 400,
        r"\{" * 200 + "1" + r"\}" * 200,
        r"\frac" * 190,
        "9^" * 300 + "9",
        "-" * 900 + "1",
        "|" * 900,
        "," * 900,
        "x=" * 400,
        "aa " * 300 + "!",
        "5 " + "aa " * 300 + "!",
        "5(" + r"\text{a} " * 100,
        "5 for any " * 95,
        "a-" * 490,
        "x" + "'" * 900 + "=6",
        ",".join(f"x^{{{i}}}!" for i in range(100)),
        r"\begin{pmatrix}" * 60,
        r"\text{" * 150 + "a" + "}" * 150,
        "9" * 1_000_000,
        "(" * 1_000_000,
        "x^{x}" * 190,
        "\ud800\0",
    ],
    ids=lambda answer: answer[:20].encode("unicode_escape").decode(),
)
@pytest.mark.parametrize("gold", ["5", r"x^2+\sqrt{2}", "1,2,3"])
def test_a_hostile_answer_earns_nothing_at_once(answer, gold):
    with nothing_collected():
        begun = time.thread_time()
        assert grade_math(rf"\boxed{{{answer}}}", gold) == 0.0
        assert time.thread_time() - begun < 0.3 * slowness()


@pytest.mark.parametrize(
    "runaway", ["9^{9^{9^{9}}}", "(10^{8})!", r"\sin(10^{10^{8}})", r"\ln(10^{10^{9}} + 1)"]
)
def test_a_comparison_that_runs_away_ends_within_the_limit(runaway):
    begun = time.perf_counter()
    assert not ask(runaway, "5", 1.2).same
    assert time.perf_counter() - begun < AT_ONCE_S
    assert ask("x + 1", "1 + x").same


INJECTIONS = [
    "__import__('os').system('touch {}')",
    "().__class__.__base__.__subclasses__()[0]; open('{}', 'w')",
    "open('{}','w')",
    r"\text{{__import__('os').system('touch {}')}}",
    r"f(__import__('os').system('touch {}'))",
    r"\operatorname{{exec}}(open('{}','w'))",
    r"\max(open('{}','w'), 2)",
    "x_{{open('{}','w')}}",
    "5; import os; os.system('touch {}')",
    r"\input{{|touch {}}}",
    r"\write18{{touch {}}}",
    "`touch {}`",
    "$(touch {})",
]


@pytest.mark.parametrize("injection", INJECTIONS)
def test_nothing_in_an_answer_or_gold_answer_is_run(injection, tmp_path):
    canary = tmp_path / "ran"
    text = injection.format(canary)
    assert grade_math(rf"\boxed{{{text}}}", "0") == 0.0
    assert grade_math(r"\boxed{0}", text) == 0.0
    math_pool.equal(("v", text), ("v", "x0"), 1.0, 1.6)  # even where the text goes straight to the library
    assert not canary.exists()


def test_the_text_of_an_answer_never_reaches_a_worker(monkeypatch):
    seen: list[str] = []

    def equal(a: tuple, b: tuple, cpu_s: float, wall_s: float) -> math_pool.Verdict:
        seen.extend((repr(a), repr(b)))
        return math_pool.Verdict(False, 0.0, 0.0)

    monkeypatch.setattr(math_pool, "equal", equal)
    grade_math(r"\boxed{\ln(2q_{5Y}) + Z}", r"\ln 2 + \ln q_{5Y} + Z")
    assert seen
    assert not any(word in text for text in seen for word in ("q", "Y", "Z"))


@pytest.mark.long
@pytest.mark.parametrize("cores", [1, 4])
def test_workers_killed_from_outside_are_replaced(cores, monkeypatch):
    monkeypatch.setattr(user_cache, "cores", lambda: cores)
    monkeypatch.setattr(math_pool, "_pool", math_pool._Pool())
    earlier = set(workers())
    math_pool.start()
    until = time.monotonic() + AT_ONCE_S
    while len(math_pool._pool.idle) < cores and time.monotonic() < until:
        time.sleep(0.05)
    before = sorted(set(workers()) - earlier)
    assert len(before) == cores
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert ask("x + 1", "1 + x").same
    assert set(workers()) - earlier
    assert not set(workers()) & set(before)
    math_pool.close()


@pytest.mark.long
def test_workers_that_hang_hold_nobody_up_and_are_killed_and_replaced(monkeypatch):
    monkeypatch.setattr(math_pool, "LATE_LIMIT_S", 0.5)
    before = workers()
    for pid in before:
        os.kill(pid, signal.SIGSTOP)
    while any(alive(pid) for pid in before):
        begun = time.monotonic()
        verdict = ask("x + 1", "1 + x", 1.5)
        assert time.monotonic() - begun < AT_ONCE_S or verdict.same  # the latter after the start of another
    assert ask("x + 1", "1 + x").same


def test_a_worker_that_is_late_is_waited_for_in_the_background():
    assert ask("x + 1", "1 + x").same
    before = workers()
    for pid in before:
        os.kill(pid, signal.SIGSTOP)
    begun = time.monotonic()
    assert ask("x + 1", "1 + x", 0.3).same is None
    assert time.monotonic() - begun < AT_ONCE_S
    for pid in before:
        os.kill(pid, signal.SIGCONT)
    assert ask("x + 1", "1 + x").same
    assert set(workers()) >= set(before)


def test_what_the_clock_or_a_crash_cut_short_is_asked_again_and_not_remembered(monkeypatch, patient):
    pair, equal = (r"\boxed{\ln 26}", r"\ln 2 + \ln 13"), math_pool.equal
    monkeypatch.setattr(math_pool, "equal", lambda *asked: math_pool.Verdict(None, 0.0, 1.6))
    assert grade_math(*pair) == 0.0
    monkeypatch.setattr(math_pool, "equal", equal)
    assert grade_math(*pair) == 1.0


def test_algebra_that_spends_its_cpu_time_says_no_and_is_not_asked_again():
    assert math_pool.equal(parse("9^{9^{9^{9}}}")[0], parse("5")[0], 0.2, 60.0).same is False


# True and out of reach: equal at every point, so that only algebra could tell, which takes ten times as long as it has.
BOMBS = [(rf"(\sin x+\cos x)^{{{2 * n}}}-(1+\sin 2x)^{{{n}}}+{n}", f"{n}") for n in range(28, 40)]


def side_by_side(pairs: list[tuple[str, str]]) -> tuple[list[float], list[float]]:
    """Each pair graded by a thread of its own: the rewards, and the seconds each took."""
    found: dict[int, tuple[float, float]] = {}

    def grade(n: int) -> None:
        begun = time.monotonic()
        reward = grade_math(rf"\boxed{{{pairs[n][0]}}}", pairs[n][1])
        found[n] = reward, time.monotonic() - begun

    threads = [threading.Thread(target=grade, args=(n,)) for n in range(len(pairs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    rewards, seconds = zip(*(found[n] for n in range(len(pairs))))
    return list(rewards), list(seconds)


# Two seconds are for a machine that has nothing else to do; tests that run beside others may wait for a core.
@pytest.mark.parametrize("limit_s", [pytest.param(2.0, marks=pytest.mark.campaign), 5.0])
@pytest.mark.parametrize("pair", [BOMBS[0], BOMBS[-1]], ids=["smallest", "biggest"])
def test_a_hostile_answer_that_is_the_first_of_a_process_earns_nothing_within_seconds(pair, limit_s):
    done = run(rf"""
        import time
        from marl_jax.rewards import grade_math
        begun = time.monotonic()
        print(grade_math(r"\boxed{{{pair[0]}}}", r"{pair[1]}"), time.monotonic() - begun)
    """)
    assert done.returncode == 0, done.stderr
    reward, seconds = map(float, done.stdout.split())
    assert reward == 0.0
    assert seconds < limit_s * slowness(time.monotonic)


@pytest.fixture
def cold(monkeypatch):
    """No worker is up."""
    monkeypatch.setattr(math_pool, "_pool", math_pool._Pool())
    yield
    math_pool.close()


def test_the_first_question_waits_for_the_start_on_its_own_time(cold):
    begun = time.monotonic()
    verdict = ask(*HARD)
    assert verdict.same
    # The start takes a second, the comparison itself a few hundredths.
    assert (time.monotonic() - begun) / 2 < verdict.wall_s <= time.monotonic() - begun


def test_an_ordinary_first_answer_is_right_however_late_the_worker_is(cold, monkeypatch, tmp_path):
    late = tmp_path / "math_worker.py"
    late.write_text("import time; time.sleep(2.0)\n" + math_pool._WORKER.read_text())
    monkeypatch.setattr(math_pool, "_WORKER", late)
    assert grade_math(r"\boxed{\ln 46}", r"\ln 2 + \ln 23") == 1.0


@pytest.mark.parametrize("limit_s", [pytest.param(2.0, marks=pytest.mark.campaign), 5.0])
def test_a_dozen_hostile_answers_at_once_earn_nothing_each_within_seconds(limit_s, tmp_path):
    assert ask("x + 1", "1 + x").same
    injections = [(text.format(tmp_path / "ran"), "0") for text in INJECTIONS]
    deep = [
        ("9^{9^{9^9}}", "5"),
        ("(" * 400 + "1" + ")" * 400, "5"),
        ("9" * 5000, "5"),
        ("7^{4500}" * 120, "x"),
    ]
    rewards, seconds = side_by_side([*BOMBS, *deep, *injections])
    assert set(rewards) == {0.0}
    assert max(seconds) < limit_s * slowness(time.monotonic), sorted(seconds)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("limit_s", [pytest.param(2.0, marks=pytest.mark.campaign), 5.0])
def test_what_hostile_answers_crowded_out_is_right_when_asked_again(monkeypatch, limit_s):
    honest = [(rf"\ln {n} + \ln 31", rf"\ln {31 * n}") for n in range(2, 8)]
    _, seconds = side_by_side([*BOMBS, *honest])
    assert max(seconds) < limit_s * slowness(time.monotonic), sorted(seconds)
    monkeypatch.setattr(grader, "WALL_LIMIT_S", 60.0)
    assert [grade_math(rf"\boxed{{{answer}}}", gold) for answer, gold in honest] == [1.0] * 6


def test_the_answers_of_a_batch_are_worked_on_together_and_crowd_nobody_out(patient):
    honest = [(rf"\ln {n} + \ln 37", rf"\ln {37 * n}") for n in range(2, 8)]
    begun = time.monotonic()
    started = [start_equivalent(*pair) for pair in (*BOMBS[:4], *honest, ("1/2", "0.5"), ("1", "2"))]
    under_way = time.monotonic()
    assert [wait() for wait in started] == [False] * 4 + [True] * 7 + [False]
    assert under_way - begun < (time.monotonic() - begun) / 2


def test_a_batch_hears_of_workers_that_cannot_start(monkeypatch):
    monkeypatch.setattr(math_pool, "_pool", math_pool._Pool())
    monkeypatch.setattr(sys, "executable", "/bin/false")
    waiting = start_equivalent(r"\ln 2 + \ln 41", r"\ln 82")
    with pytest.raises(RuntimeError, match="the math worker did not start"):
        waiting()


def test_a_worker_that_is_killed_while_it_starts_is_replaced(monkeypatch, tmp_path):
    once = tmp_path / "python"
    once.write_text(f'#!/bin/sh\nmkdir "{tmp_path}/killed" && kill -9 $$\nexec "{sys.executable}" "$@"\n')
    once.chmod(0o755)
    monkeypatch.setattr(math_pool, "_pool", math_pool._Pool())
    monkeypatch.setattr(sys, "executable", str(once))
    assert ask(*HARD).same
    math_pool.close()


def test_a_comparison_may_not_take_the_memory():
    """In the process that compares, which is a child of the worker."""
    done = run("""
        from marl_jax.rewards.math import math_worker
        math_worker._limit(60.0, 60.0)
        try:
            bytearray(2 * math_worker.MEMORY_LIMIT)
        except MemoryError:
            print("refused")
    """)
    assert done.stdout == "refused\n", done.stderr
    assert not ask("10^{10^{9}}", "10^{10^{9}} + 1", 1.2).same


def test_any_thread_may_grade_and_all_agree(patient):
    verdicts = []
    pairs = [(rf"\boxed{{\ln {n} + \ln 5}}", rf"\ln {5 * n}") for n in range(2, 8)] + [
        (r"\boxed{\ln 2}", r"\log 2")
    ] * 2
    threads = [threading.Thread(target=lambda p=pair: verdicts.append((p, grade_math(*p)))) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(verdicts) == sorted(
        [(pair, 1.0) for pair in pairs[:6]] + [(pair, 0.0) for pair in pairs[6:]]
    )


def test_a_process_with_jax_grades_in_workers_without_it_and_leaves_none_behind():
    done = run(rf"""
        import jax, os, threading
        from pathlib import Path
        from marl_jax.rewards import grade_math
        jax.jit(lambda x: x + 1)(1).block_until_ready()
        grades = []
        thread = threading.Thread(target=lambda: grades.append(grade_math(r"\boxed{{{HARD[0]}}}", r"{HARD[1]}")))
        thread.start(); thread.join()
        def parent(pid):
            try:
                return int(Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # a process that has just ended
                return None
        pids = [p.name for p in Path("/proc").iterdir() if p.name.isdigit() and parent(p.name) == os.getpid()]
        pids = [p for p in pids if b"math_worker" in Path(f"/proc/{{p}}/cmdline").read_bytes()]
        maps = [Path(f"/proc/{{p}}/maps").read_text() for p in pids]
        print(grades, len(pids), any("jaxlib" in m for m in maps), *pids)
    """)
    assert done.returncode == 0, done.stderr
    grades, count, loaded_jax, *pids = done.stdout.split()
    assert (grades, count, loaded_jax) == ("[1.0]", "1", "False")
    assert not any(alive(int(pid)) for pid in pids)


def test_workers_end_with_a_parent_that_is_killed():
    done = run(rf"""
        import os, signal
        from marl_jax.rewards import grade_math
        from marl_jax.rewards.math import math_pool
        grade_math(r"\boxed{{{HARD[0]}}}", r"{HARD[1]}")
        print(math_pool._pool.idle[0].process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    pid = int(done.stdout)
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def test_a_forked_copy_starts_its_own_workers():
    done = run(rf"""
        import os
        from marl_jax.rewards import grade_math
        from marl_jax.rewards.math import math_pool
        grade_math(r"\boxed{{{HARD[0]}}}", r"{HARD[1]}")
        mine = math_pool._pool.idle[0].process.pid
        child = os.fork()
        if child == 0:
            right = grade_math(r"\boxed{{\ln 10}}", r"\ln 2 + \ln 5") == 1.0
            own = math_pool._pool.idle[0].process.pid != mine
            math_pool.close()
            os._exit(0 if right and own else 1)
        print(os.waitpid(child, 0)[1], grade_math(r"\boxed{{\ln 14}}", r"\ln 2 + \ln 7"))
    """)
    assert done.stdout.split() == ["0", "1.0"], done.stderr


def test_a_worker_that_cannot_start_says_how_to_find_out_why(monkeypatch):
    monkeypatch.setattr(math_pool, "_pool", math_pool._Pool())
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match=r"exit status 1\).*marl_jax.rewards.math.math_worker"):
        ask("1", "1")


def test_importing_the_graders_loads_no_jax_and_no_sympy():
    done = run(
        "import sys, marl_jax.rewards; print(any(m in sys.modules for m in ('jax', 'sympy', 'math_verify')))"
    )
    assert done.stdout.strip() == "False", done.stderr


def test_an_answer_is_graded_once(patient, monkeypatch):
    pair = (r"\boxed{\ln 22}", r"\ln 2 + \ln 11")
    assert grade_math(*pair) == 1.0
    monkeypatch.setattr(math_pool, "equal", None)  # which algebra goes through
    assert grade_math(*pair) == 1.0


@pytest.mark.long
def test_ordinary_answers_are_graded_by_the_thousand():
    speeds = []
    # The best of some, because on a shared machine CPU time passes unevenly, too.
    for first in (101, 102, 103, 104):
        numbers = range(first, 3101, 7)
        pairs = [(rf"\boxed{{\frac{{{n}}}{{7}}}}", rf"\dfrac{{{n}}}{{{7 + n % 2}}}") for n in numbers]
        begun = time.thread_time()
        right = sum(grade_math(*pair) for pair in pairs)
        speeds.append(len(pairs) / (time.thread_time() - begun))
        assert right == sum(n % 2 == 0 for n in numbers)
    assert max(speeds) * slowness() > 2000
