"""The sandbox isolates by the kernel or refuses, survives what happens to it, and leaves nothing behind."""

import contextlib
import ctypes
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import pytest

from marl_jax.rewards import Pool, SandboxUnavailable, run_program, submit_program
from marl_jax.rewards.sandbox.worker import Limits, Process, Zygote, ZygoteLost

ROOT = pathlib.Path(__file__).parents[2]
ECHO = [{"stdin": "7", "stdout": "7"}]


def python(code: str, arguments=(), **more) -> subprocess.CompletedProcess:
    """Run a script as a user would, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **more.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        **more,
    )


def descendants(pid: int) -> list[int]:
    """Every living process below `pid`, the youngest generation last."""
    parents: dict[int, int] = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # gone meanwhile
    found, generation = [], [pid]
    while generation := [child for child, parent in parents.items() if parent in generation]:
        found += generation
    return found


def zygote_pids(pool: Pool) -> list[int]:
    return [zygote._process.pid for seat in pool._seats for zygote in seat._zygotes]


def eventually(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return met


@pytest.fixture(scope="module")
def zygote():
    zygote = Zygote()
    yield zygote
    zygote.close()


def test_the_kernel_holds_a_program_as_it_should(zygote):
    sleeper = {"mode": "stdin", "source": "import time\ntime.sleep(60)"}
    with Process(zygote, sleeper, Limits(60, 1 << 28)):
        assert eventually(lambda: len(descendants(zygote._process.pid)) == 2)
        pid = descendants(zygote._process.pid)[-1]
        status = pathlib.Path(f"/proc/{pid}/status")
        assert eventually(lambda: "Seccomp:\t2" in status.read_text())
        lines = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
        for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert int(lines[name], 16) == 0
        assert lines["NoNewPrivs"] == "1"
        assert set(lines["Uid"].split()) != {"0"}
        assert lines["NSpid"].split()[-1] == "1"
        assert pathlib.Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
        if os.geteuid() == 0:
            for space in ("user", "pid", "net", "mnt", "ipc", "uts", "cgroup"):
                assert os.readlink(f"/proc/{pid}/ns/{space}") != os.readlink(f"/proc/self/ns/{space}")
            assert not pathlib.Path(f"/proc/{pid}/environ").read_bytes().strip(b"\0")
            mounts = pathlib.Path(f"/proc/{pid}/mounts").read_text().splitlines()
            writable = [line.split()[1] for line in mounts if "rw" in line.split()[3].split(",")]
            assert writable == ["/box"]
    assert eventually(lambda: len(descendants(zygote._process.pid)) == 1)


def test_a_zygote_holds_nothing_of_the_jobs_it_forwarded(zygote):
    secret = "SECRET-" + os.urandom(8).hex()
    looking = """
        def look():
            import ctypes, os
            read, write = os.pipe()
            libc, found = ctypes.CDLL(None), []
            middle = id(look) & ~0xFFF
            for page in range(middle - (16 << 20), middle + (16 << 20), 4096):
                if libc.write(write, ctypes.c_void_p(page), 4096) == 4096:
                    text = os.read(read, 4096)
                    at = text.find(b"SECR" + b"ET-")
                    found += [text[at + 7 : at + 23].decode("latin1")] if at >= 0 else []
            return [word for word in found if word.isalnum()]
    """
    job = {"mode": "stdin", "source": f"x = {secret!r}\nprint(input(), x * 1000)", "stdin": secret}
    limits = Limits(5, 1 << 28)
    assert secret.encode() in zygote.run(job, limits).stdout
    look = {"mode": "call", "source": textwrap.dedent(looking), "call": "look", "args": []}
    assert zygote.run(look, limits).result[4:] == b'["ok",[]]'


# Root becomes an ordinary user, to whom a runtime and a repository in root's home are shown elsewhere.
AS_ORDINARY_USER = """
    import ctypes, os, sys, tempfile
    repository, prefix, code = sys.argv[1:]
    python = os.path.relpath(os.path.realpath(sys.executable), sys.base_prefix)
    if os.getuid() == 0:
        libc = ctypes.CDLL(None)
        place = tempfile.mkdtemp(dir=prefix)
        assert libc.unshare(0x00020000) == 0
        assert libc.mount(None, b"/", None, ctypes.c_ulong(1 << 18 | 16384), None) == 0
        assert libc.mount(b"tmpfs", place.encode(), b"tmpfs", ctypes.c_ulong(0), b"mode=0755") == 0
        for name, source in (("runtime", sys.base_prefix), ("repository", repository)):
            os.mkdir(f"{place}/{name}")
            assert libc.mount(source.encode(), f"{place}/{name}".encode(), None, ctypes.c_ulong(4096), None) == 0
        for parent in (prefix, place):
            os.chmod(parent, 0o755)
        os.setgroups([])
        os.setresgid(54321, 54321, 54321)
        os.setresuid(54321, 54321, 54321)
        python, repository = f"{place}/runtime/{python}", f"{place}/repository"
    else:
        python = sys.executable
    os.execve(python, [python, "-c", code], {
        "PYTHONPATH": repository,
        "PYTHONDONTWRITEBYTECODE": "1",
        "LD_LIBRARY_PATH": os.path.dirname(os.path.dirname(python)) + "/lib",
    })
"""


# Run by a user who is root or is not; of its claims, the last is wrong.
IS_ISOLATED = """
import os
from marl_jax.rewards import run_program
assert (os.geteuid() == 0) == {root}
for claim in ("os.getuid() == 1000", "os.getpid() == 1", "not os.path.exists('/etc')", "os.geteuid() == 0"):
    source = "import os\\nassert " + claim + "\\nprint(input())"
    print(run_program(source, [{{"stdin": "7", "stdout": "7"}}]).reason)
"""
HELD = [*["passed 1 of 1"] * 3, "test 0: AssertionError"]


def test_an_ordinary_user_is_isolated_too():
    with tempfile.TemporaryDirectory(dir="/tmp") as prefix:
        done = python(AS_ORDINARY_USER, arguments=[str(ROOT), prefix, IS_ISOLATED.format(root=False)])
    assert done.stdout.splitlines() == HELD, done.stderr


# A rootless container: root of a user namespace that has a few ids, or its own alone.
AS_ROOT_OF_FEW = """
    import ctypes, os, sys
    ids, setgroups, code = sys.argv[1:]
    (we_may, tell), (they_may, told) = os.pipe(), os.pipe()
    child = os.fork()
    if child:
        os.read(they_may, 1)
        if setgroups == "deny":
            open(f"/proc/{child}/setgroups", "w").write("deny")
        for name in ("uid_map", "gid_map"):
            open(f"/proc/{child}/{name}", "w").write(ids.format(id=os.getuid() if name[0] == "u" else os.getgid()))
        os.write(tell, b".")
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert ctypes.CDLL(None).unshare(0x10000000) == 0
    os.write(told, b".")
    os.read(we_may, 1)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.execve(sys.executable, [sys.executable, "-c", code], os.environ)
"""


@pytest.mark.parametrize(
    "ids, setgroups",
    [("0 {id} 1", "deny"), *([("0 0 20", "allow"), ("0 0 65536", "deny")] if os.geteuid() == 0 else [])],
)
def test_root_of_a_rootless_container_is_isolated_too(ids, setgroups):
    done = python(AS_ROOT_OF_FEW, arguments=[ids, setgroups, IS_ISOLATED.format(root=True)])
    assert done.stdout.splitlines() == HELD, done.stderr


# A filter that refuses one system call, or one use of it, as containers, other kernels and old ones do.
REFUSE = """
    import sys
    sys.path.insert(0, "marl_jax/rewards/sandbox")
    import errno, platform, struct, seccomp
    def refuse(x86_64, aarch64, error, argument=None, value=0):
        number = {"x86_64": x86_64, "aarch64": aarch64}[platform.machine()]
        end = [(0x06, 0, 0, 0x00050000 | error), (0x06, 0, 0, 0x7FFF0000)]
        steps = [(0x20, 0, 0, 0), (0x15, 0, 1 if argument is None else 3, number), *end]
        if argument is not None:
            steps[2:2] = [(0x20, 0, 0, 16 + 8 * argument), (0x15, 0, 1, value)]
        seccomp.install(b"".join(struct.pack("=HBBI", *step) for step in steps))
"""
NO_NAMESPACES = REFUSE + "    refuse(272, 97, errno.EPERM)\n"

# Steps of the zygote, and steps that are only taken for each program.
REFUSALS = {
    "unshare": ("272, 97, errno.EPERM", "user namespaces are not allowed here: Operation not permitted"),
    "pivot_root": ("155, 41, errno.EPERM", "pivot_root: Operation not permitted"),
    "any mount": ("165, 40, errno.EPERM", "mount .*: Operation not permitted"),
    "mount of the box": ("165, 40, errno.EPERM, 3, 14", "mount tmpfs: Operation not permitted"),
    "pidfd_open": ("434, 434, errno.ENOSYS", "pidfd_open: Function not implemented"),
    "setns": ("308, 268, errno.EINVAL", "setns: Invalid argument"),
    "capset": ("126, 91, errno.EPERM", "capset: Operation not permitted"),
    "prctl, any": ("157, 167, errno.EPERM", "prctl: .*: Operation not permitted"),
    "prctl, bounding set": (
        "157, 167, errno.EPERM, 0, 24",
        "prctl: drop a capability: Operation not permitted",
    ),
    "prctl, filters": ("157, 167, errno.EINVAL, 0, 22", "prctl: no seccomp filters .*: Invalid argument"),
}
if os.geteuid() == 0:
    REFUSALS["setresuid"] = ("117, 147, errno.EPERM", "root may not become another user here: .* CAP_SETUID")


@pytest.mark.parametrize("refused", REFUSALS)
def test_a_machine_that_cannot_isolate_is_refused_by_name_of_the_step_and_the_flag(refused):
    arguments, said = REFUSALS[refused]
    code = f"""{REFUSE}
    refuse({arguments})
    from marl_jax.rewards import run_program
    run_program("print(input())", [{{"stdin": "7", "stdout": "7"}}])
    """
    done = python(code, cwd=ROOT)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "SandboxUnavailable: cannot isolate model-written programs here" in last
    assert re.search(said, last), last
    assert "MARL_JAX_UNSAFE_CODE=1 would run them unsafe" in last


def test_a_process_that_could_not_be_set_up_says_nothing_about_the_program():
    code = """
        import resource
        from marl_jax.rewards import run_program
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
        for memory_limit_mb in (1 << 14, 1 << 8):
            tests = [{"stdin": "7", "stdout": "7"}]
            verdict = run_program("print(input())", tests, memory_limit_mb=memory_limit_mb)
            print(verdict.passed, verdict.lost, verdict.reason)
    """
    lost, passed = python(code).stdout.splitlines()
    assert lost.startswith("False True test 0: the sandbox was lost: setrlimit AS: ")
    assert passed == "True False passed 1 of 1"


def open_files() -> list[int]:
    place = "/proc/self/fd"
    listed = os.listdir(place)  # itself one that is open
    return [int(name) for name in listed if os.path.lexists(f"{place}/{name}")]


@contextlib.contextmanager
def few_descriptors(more: int):
    """Within, only so many more files may be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gaps = sorted(set(range(max(open_files()))) - set(open_files()))
    fillers = [os.dup(0) for _ in gaps]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(open_files()) + 1 + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in fillers:
            os.close(descriptor)


@pytest.mark.parametrize("more", range(9))
def test_without_descriptors_a_process_is_lost_by_name_and_nothing_leaks(more, zygote):
    job, before = {"mode": "stdin", "source": "print(7)"}, open_files()
    try:
        with few_descriptors(more), Process(zygote, job, Limits(5, 1 << 28), commands=True) as process:
            ended = process.finish().stdout
    except ZygoteLost as error:
        ended = str(error)
    # three pipes and the job's file
    assert ended == (b"7\n" if more >= 7 else "[Errno 24] Too many open files")
    assert open_files() == before


@pytest.mark.parametrize("more", range(6))
def test_without_descriptors_a_zygote_does_not_start_and_nothing_leaks(more):
    before = open_files(), len(descendants(os.getpid()))
    with few_descriptors(more), pytest.raises(SandboxUnavailable, match="Too many open files"):
        Zygote()
    assert eventually(lambda: (open_files(), len(descendants(os.getpid()))) == before)


def test_a_pool_without_descriptors_says_so_and_recovers(caplog, monkeypatch):
    monkeypatch.setattr("marl_jax.rewards.warn._logged_at", {})  # what was logged in the last minute

    def submit(programs):
        return [submit_program(f"print(input() * {n})", ECHO, pool=pool) for n in programs]

    with Pool(workers=2) as pool:
        assert [future.result().passed for future in submit([1])] == [True]
        before = len(open_files())
        with few_descriptors(3):
            verdicts = [future.result(timeout=120) for future in submit(range(2, 9))]
        for verdict in verdicts:
            assert verdict.lost and not verdict.passed
            assert re.search("the sandbox was lost: .*Too many open files", verdict.reason), verdict.reason
        assert [record.getMessage()[:26] for record in caplog.records] == ["a program lost its sandbox"]
        again = [future.result(timeout=120) for future in submit([1, *range(2, 9)])]
        assert [verdict.passed for verdict in again] == [True, *[False] * 7]
        assert not any(verdict.lost for verdict in again)
        assert len(open_files()) <= before + 2  # the second worker's zygote: its socket, its last words


def test_the_flag_accepts_the_risk_with_a_warning():
    code = (
        NO_NAMESPACES
        + """
    import warnings
    from marl_jax.rewards import Pool, run_program
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        print(run_program("print(input())", [{"stdin": "7", "stdout": "7"}]).reason)
    print(len(caught), "running model-written programs unsafe: unshare" in str(caught[0].message))
    for source in ("os.fork()", "__import__('socket').socket()", "os.kill(os.getppid(), 9)", "os.chmod('/', 0)"):
        print(run_program("import os; " + source, [{"stdin": "", "stdout": ""}]).reason[:57])
    print(run_program("while True: pass", [{"stdin": "", "stdout": ""}], time_limit_s=0.3).reason)
    print(run_program("open('left-behind', 'w'); print(7)", [{"stdin": "", "stdout": "7"}]).reason)
    """
    )
    done = python(code, cwd=ROOT, env={"MARL_JAX_UNSAFE_CODE": "1"})
    denied = "test 0: PermissionError: [Errno 1] Operation not permitted"[:57]
    assert done.stdout.splitlines() == [
        *("passed 1 of 1", "1 True", denied, denied, denied, denied),
        *("test 0: time limit of 0.3 s", "passed 1 of 1"),
    ], done.stderr
    assert not list(pathlib.Path(tempfile.gettempdir()).glob("marl_jax_*/work/left-behind"))


LANDLOCK = sys.platform == "linux" and ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) > 0


@pytest.mark.skipif(not LANDLOCK, reason="this kernel has no Landlock")
def test_without_namespaces_landlock_still_keeps_the_files(tmp_path):
    zygote, limits, new = Zygote(isolated=False), Limits(9, 1 << 28), str(tmp_path / "x")
    for attempt in (f"open({__file__!r})", f"open({new!r}, 'w')", "os.listdir('/')", f"os.mkdir({new!r})"):
        ended = zygote.run({"mode": "stdin", "source": f"import os; {attempt}"}, limits)
        assert b"PermissionError: [Errno 13]" in ended.result
    allowed = "import wave\nprint(open('x', 'w').write('7'))"
    assert zygote.run({"mode": "stdin", "source": allowed}, limits).stdout == b"1\n"
    zygote.close()


@pytest.mark.parametrize("executable", ["/bin/false", "/no/such/python", ""])
def test_a_zygote_that_does_not_start_says_why(monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(SandboxUnavailable, match=r"did not start|no Python"):
        Zygote()


def test_a_process_that_has_loaded_jax_can_grade():
    code = """
        import jax, jax.numpy as jnp
        jnp.ones(3).sum().block_until_ready()
        from marl_jax.rewards import run_program
        print(run_program("print(input())", [{"stdin": "7", "stdout": "7"}]).passed)
    """
    done = python(code, env={"JAX_PLATFORMS": "cpu"})
    assert done.stdout == "True\n", done.stderr
    assert done.stderr == ""


def test_the_package_loads_without_jax():
    done = python("import sys, marl_jax.rewards\nprint('jax' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


def test_zygotes_and_programs_hold_nothing_but_the_standard_library(zygote):
    foreign = "sorted({n.partition('.')[0] for n in sys.modules} - sys.stdlib_module_names - {'__main__'})"
    ended = zygote.run({"mode": "stdin", "source": f"import sys\nprint({foreign})"}, Limits(5, 1 << 28))
    assert ended.stdout == b"[]\n"
    (inner,) = descendants(zygote._process.pid)
    mapped = pathlib.Path(f"/proc/{inner}/maps").read_text()
    assert "libc" in mapped and not any(name in mapped for name in ("jaxlib", "numpy", "site-packages"))


def test_a_program_sees_nothing_of_how_it_was_started(zygote):
    looking = """
        import os, sys
        print(sys.argv, sys.orig_argv[1:], sys.warnoptions, dict(os.environ), os.getcwd(), os.getppid())
        print(os.listdir("/proc") if os.path.exists("/proc") else None, sorted(os.listdir("/")), os.uname().nodename)
        def is_open(fd):
            try:
                return bool(os.fstat(fd))
            except OSError:
                return False
        print([fd for fd in range(1024) if is_open(fd)])
    """
    runtime = {pathlib.Path(path).parts[1] for path in sys.path if pathlib.Path(path, "os.py").exists()}
    ended = zygote.run({"mode": "stdin", "source": textwrap.dedent(looking)}, Limits(5, 1 << 28))
    said = ended.stdout.decode().splitlines()
    assert said[0] == "['solution.py'] ['solution.py'] [] {} /box/work 0"
    assert said[1] == f"None {sorted({'box', 'dev', 'tmp', *runtime})} sandbox"
    assert said[2] == "[0, 1, 2, 3]"  # the standard three, and the pipe for its result


def test_a_forked_child_opens_a_pool_of_its_own():
    code = """
        import os
        from marl_jax.rewards import run_program
        tests = [{"stdin": "7", "stdout": "7"}]
        assert run_program("print(input())", tests).passed
        child = os.fork()
        assert run_program(f"x = {child}\\nprint(input())", tests).passed
        if child == 0:
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), run_program("print(int(input()))", tests).passed)
    """
    done = python(code)
    assert done.stdout == "7 True\n", done.stderr


@pytest.mark.parametrize("end", ["pass", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "1 / 0"])
def test_nothing_outlives_the_caller_however_it_ends(end):
    code = f"""
        import os, time
        from marl_jax.rewards import Pool, submit_program
        pool = Pool(workers=2)
        tests = [{{"stdin": "", "stdout": ""}}]
        running = submit_program("import time\\ntime.sleep(600)", tests, time_limit_s=600, pool=pool)
        zygotes = lambda: [zygote._process.pid for seat in pool._seats for zygote in seat._zygotes]
        while not zygotes():
            time.sleep(0.01)
        time.sleep(0.3)  # for the program to begin
        print(*zygotes(), flush=True)
        {end}
    """
    pids = list(map(int, python(code).stdout.split()))  # a tenth of the program's time at most
    assert pids
    assert eventually(lambda: not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids))


def tasks_of(pid):
    """The threads of a process; none where it has ended."""
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


@pytest.mark.parametrize("generation", ["shell", "zygote", "program"])
def test_a_crash_fails_one_program_and_is_repaired(generation):
    with Pool(workers=2) as pool:
        quick = [submit_program(f"print(input() + '' * {n})", ECHO, pool=pool) for n in range(20)]
        assert all(future.result().passed for future in quick)
        # The last of them may still be there for a moment.
        assert eventually(lambda: not any(len(descendants(pid)) == 2 for pid in zygote_pids(pool)))
        # Its second thread shows from outside that it has begun.
        slow = (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(3,)).start()\nprint(input())"
        )
        hit = submit_program(slow, ECHO, pool=pool)
        # Looked at once: on a busy machine the program may have ended by a second look.
        families = lambda: ((pid, *descendants(pid)) for pid in zygote_pids(pool))
        begun = lambda ids: len(ids) == 3 and len(tasks_of(ids[-1])) == 2
        shell, inner, program = eventually(lambda: next(filter(begun, families()), None))
        others = [submit_program(f"print(input() + '' * {-n})", ECHO, pool=pool) for n in range(1, 20)]
        os.kill({"shell": shell, "zygote": inner, "program": program}[generation], signal.SIGKILL)
        verdict = hit.result()
        assert not verdict.passed
        assert verdict.lost == (generation != "program")
        assert all(future.result().passed for future in others)
        if verdict.lost:  # says nothing about the program, so it is not remembered
            assert run_program(slow, ECHO, pool=pool).passed
        assert eventually(lambda: not pathlib.Path(f"/proc/{program}").exists())


def test_a_zygote_that_was_killed_while_idle_is_replaced_and_fails_no_program():
    with Pool(workers=1) as pool:
        for number in range(3):
            assert run_program(f"print(input() + '' * {number})", ECHO, pool=pool).passed
            (shell,) = zygote_pids(pool)
            inner = descendants(shell)
            os.kill(shell, signal.SIGKILL)
            assert eventually(lambda: not any(pathlib.Path(f"/proc/{pid}").exists() for pid in inner))  # noqa: B023
        verdict = run_program("print(input() + '')", ECHO, pool=pool)
        assert verdict.passed and not verdict.lost


def test_failing_programs_leave_first():
    order: list[str] = []
    with Pool(workers=1) as pool:
        long = [{"stdin": str(n), "stdout": str(n)} for n in range(20)]
        futures = {
            "long": submit_program("print(input())", long, pool=pool),
            "wrong": submit_program("print(input() + 'x')", long, pool=pool),
            "broken": submit_program("print(", long, pool=pool),
        }
        for name, future in futures.items():
            future.add_done_callback(lambda _, name=name: order.append(name))
        assert [future.result().passed for future in futures.values()] == [True, False, False]
    assert order == ["wrong", "broken", "long"]


def test_results_do_not_depend_on_the_number_of_workers():
    programs = [f"n = int(input())\nprint(n if n % {k} else -1)" for k in range(2, 12)]
    tests = [{"stdin": str(n), "stdout": str(n)} for n in range(1, 9)]
    seen = []
    for workers in (1, 4):
        with Pool(workers=workers) as pool:
            seen.append(
                [future.result() for future in [submit_program(p, tests, pool=pool) for p in programs]]
            )
    assert seen[0] == seen[1]
    assert [verdict.reason for verdict in seen[0][:2]] == ["test 1: wrong answer", "test 2: wrong answer"]


def test_many_threads_share_a_pool():
    verdicts: list[bool] = []
    with Pool(workers=2) as pool:

        def grade(n):
            verdicts.append(
                run_program(
                    f"print(int(input()) + {n})", [{"stdin": "1", "stdout": str(n + 1)}], pool=pool
                ).passed
            )

        threads = [threading.Thread(target=grade, args=(n,)) for n in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert verdicts == [True] * 20


def test_a_closed_pool_refuses_and_lets_go_of_what_waits():
    pool = Pool(workers=1)
    waiting = [
        submit_program(f"import time\ntime.sleep(600 + {n})", ECHO, time_limit_s=900, pool=pool)
        for n in range(3)
    ]
    time.sleep(0.2)
    start = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - start < 60
    for future in waiting:
        assert future.exception() is not None or future.result().lost
    with pytest.raises(RuntimeError, match="closed"):
        run_program("print(1)", ECHO, pool=pool)


def test_a_pool_needs_a_worker():
    with pytest.raises(ValueError, match="workers=0"):
        Pool(workers=0)


def leave_nothing_behind(programs: int, directory: pathlib.Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    kinds = [
        "print(input())",
        "open('left', 'w').write('x' * 100_000)\nprint(input())",
        "import os\nos._exit(1)",
        "import ctypes\nctypes.string_at(0)",
        "print('x' * 3_000_000)",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()\nprint(input())",
    ]
    checks = [{"check": "assert len(f(3)) == 3"}]

    def state():
        pids = zygote_pids(pool)
        memory = sum(
            int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1])
            for pid in [*pids, *(below for pid in pids for below in descendants(pid))]
        )
        mounts = {
            len(pathlib.Path(f"/proc/{below}/mounts").read_text().splitlines())
            for pid in pids
            for below in descendants(pid)
        }
        return len(os.listdir("/proc/self/fd")), len(descendants(os.getpid())), mounts, memory

    with Pool(workers=2) as pool:

        def run(first, last):
            futures = []
            for n in range(first, last):
                if n % 10 == 9:
                    futures.append(submit_program(f"def f(n): return [{n}] * n", checks, pool=pool))
                else:
                    futures.append(submit_program(f"x = {n}\n{kinds[n % len(kinds)]}", ECHO, pool=pool))
            return [future.result() for future in futures]

        warm = 0
        while warm == 0 or any(len(seat._zygotes) < 2 for seat in pool._seats):  # a check takes two
            assert warm < 1200
            run(warm, warm := warm + 60)
        before = state()
        verdicts = run(warm, warm + programs)
        assert not any(verdict.lost for verdict in verdicts)
        assert any(verdict.passed for verdict in verdicts)
        assert eventually(lambda: state()[:3] == before[:3]), (before, state())
        pages_per_mb = 256
        assert state()[3] - before[3] < 16 * pages_per_mb
        assert list(directory.iterdir()) == []
        pids = [below for pid in zygote_pids(pool) for below in [pid, *descendants(pid)]]
    assert eventually(lambda: not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.mark.long
def test_300_programs_leave_nothing_behind(tmp_path, monkeypatch):
    leave_nothing_behind(300, tmp_path, monkeypatch)


@pytest.mark.campaign
def test_10_000_programs_leave_nothing_behind(tmp_path, monkeypatch):
    leave_nothing_behind(10_000, tmp_path, monkeypatch)
