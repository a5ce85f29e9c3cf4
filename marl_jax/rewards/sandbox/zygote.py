"""A process that isolates itself once and then forks one isolated process per request, in milliseconds.

It is started as a script in a bare interpreter (`python -S -P zygote.py FD isolated`, or `unsafe` in the place of
`isolated`) and speaks fixed-size messages over one socket. Programs and inputs come in a file in memory
that only the child reads, outputs leave through pipes, so a zygote has nothing in its memory that a later child could
find there. It ends when the socket closes.
"""

import _sitebuiltins
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import math
import os
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from types import ModuleType

RUN, KILL = 1, 2
REQUEST = struct.Struct("=BdQQ")  # RUN or KILL, wall-clock seconds, memory bytes, file bytes
REPLY = struct.Struct("=iB")  # wait status, whether it ended in time
READY = b"ready"
SET_UP = b"\x06"  # a child's first byte on its result pipe; without it, the pipe contains why it never ran

# Imported before the first fork, to save time and because shared libraries are outside the new root.
_PRELOADED = """
abc array ast asyncio base64 bisect bz2 cmath collections contextlib copy csv ctypes dataclasses datetime decimal enum
fractions functools hashlib heapq io itertools lzma math operator pickle pprint queue random re secrets signal sqlite3
ssl statistics string textwrap threading traceback typing unicodedata uuid zlib
"""


def main() -> None:
    """Isolate this process, report that it is ready, and serve until the other end closes."""
    inherited = int(sys.argv[1])
    control = socket.socket(fileno=os.dup(inherited))  # a low descriptor, whatever the caller has open
    os.close(inherited)
    isolated = sys.argv[2] == "isolated"
    harness, kernel, seccomp = _siblings("harness", "kernel", "seccomp")
    os.umask(0o022)
    _preload()
    own_bytes = _prepare_memory()
    try:
        if isolated:
            kernel.isolate_zygote()
    except OSError as error:
        control.sendall(_text_of(error))
        return
    instructions = seccomp.program(alone=isolated) if seccomp.supported() else b""
    sys.argv, sys.orig_argv = [""], [""]  # the full command line tells how this process was started
    _forget_environment()
    gc.disable()
    gc.freeze()
    control.sendall(READY)
    while True:
        operation, wall_s, memory_bytes, file_bytes, fds = _receive(control)
        if operation != RUN:
            continue  # a kill that came too late
        deadline = time.monotonic() + wall_s
        box = kernel.renew(file_bytes) if isolated else tempfile.mkdtemp(prefix="marl_jax_")
        child = os.fork()
        if child == 0:
            try:
                job = _arrange(fds, box)
                try:
                    # The kernel counts threads by user, so there is no limit if the user is the caller's. Linux
                    # before 5.14 also counts the caller's threads in a user namespace.
                    threads = 128 if isolated and _kernel_version() >= (5, 14) else None
                    kernel.limit(own_bytes + memory_bytes, int(wall_s) + 2, file_bytes, threads)
                    if isolated:
                        kernel.drop_privileges()
                    else:
                        kernel.die_with_parent()
                        kernel.confine_files(box)
                    if instructions:
                        seccomp.install(instructions)
                except OSError as error:
                    os.write(harness.RESULT, _text_of(error))
                    os._exit(125)
                os.write(harness.RESULT, SET_UP)
                harness.run(job)
            finally:
                os._exit(125)
        for fd in fds:
            os.close(fd)
        status, in_time = _watch(control, child, deadline)
        if isolated:
            kernel.discard()
        else:
            with contextlib.suppress(RecursionError):  # directories that are nested too deep stay
                shutil.rmtree(box, ignore_errors=True)
        control.sendall(REPLY.pack(status, in_time))


def _text_of(error: OSError) -> bytes:
    return str(error.strerror or error).encode()


def _receive(control: socket.socket) -> tuple:
    message, fds, _, _ = socket.recv_fds(control, REQUEST.size, 4)
    if not message:
        os._exit(0)
    return (*REQUEST.unpack(message), fds)


def _watch(control: socket.socket, child: int, deadline: float) -> tuple[int, bool]:
    """Wait for the child; kill it on request or at the deadline. Returns (wait status, whether it ended in time)."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    wait_ms = 2.0
    if hasattr(os, "pidfd_open"):
        ended = os.pidfd_open(child)
        poll.register(ended, select.POLLIN)
        wait_ms = math.inf
    in_time = True
    while True:
        left_ms = (deadline - time.monotonic()) * 1000
        if left_ms <= 0 and in_time:
            in_time = False
            os.kill(child, signal.SIGKILL)
        ready = [fd for fd, _ in poll.poll(min(max(left_ms, 1) + 1, wait_ms))]
        if control.fileno() in ready:
            _receive(control)  # exits, and the child too, if the caller has closed the socket
            os.kill(child, signal.SIGKILL)
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            if wait_ms == math.inf:
                os.close(ended)
            return status, in_time


def _arrange(fds: list[int], box: str) -> dict:
    """In the child: set up files, working directory and session. Returns the job."""
    os.setsid()  # kill(0, ...) reaches a whole process group, across namespaces
    sources = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in fds]  # job, stdout, result, and commands if any
    with open(sources[0], "rb") as file:
        job = json.load(file)
    work, standard_input = f"{box}/work", f"{box}/stdin"
    os.mkdir(work)
    os.mkdir(f"{box}/tmp")
    tempfile.tempdir = f"{box}/tmp"
    os.chdir(work)
    with open(standard_input, "wb") as file:
        file.write(job.pop("stdin", "").encode("utf-8", "surrogateescape"))
    os.closerange(0, 100)
    os.open(standard_input, os.O_RDONLY)
    os.dup2(sources[1], 1)
    os.open("/dev/null", os.O_RDWR)
    for target, source in enumerate(sources[2:], 3):
        os.dup2(source, target)
    os.closerange(100, 200)
    return job


def _siblings(*names: str) -> list[ModuleType]:
    """The modules next to this file, removed from `sys.modules` so that programs cannot import them."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, here)
    modules = [importlib.import_module(name) for name in names]
    sys.path.remove(here)
    for name in (*names, "plain", "remote"):
        sys.modules.pop(name, None)
    return modules


def _preload() -> None:
    for name in _PRELOADED.split():
        with contextlib.suppress(ImportError):  # not every build of Python has every module
            importlib.import_module(name)
    for name in ("exit", "quit"):  # what `site` would have added
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D"))


def _kernel_version() -> tuple[int, ...]:
    """The version of the kernel; (0,) if it is not written in numbers."""
    numbers = os.uname().release.split(".")[:2]
    return tuple(map(int, numbers)) if all(map(str.isdecimal, numbers)) else (0,)


def _forget_environment() -> None:
    """Clear the environment's variables, and the memory that contained them."""
    environ = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), "environ")
    addresses: list[int] = []
    while (address := environ[len(addresses)]) is not None:
        addresses.append(address)
    for address in addresses:
        ctypes.memset(address, 0, len(ctypes.string_at(address)))
    os.environ.clear()


def _prepare_memory() -> int:
    """Have the kernel kill this process first if memory runs out. Returns the bytes of its address space."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 256 << 20  # no /proc, as outside Linux


if __name__ == "__main__":
    main()
