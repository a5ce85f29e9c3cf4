"""The caller's side of a zygote: start it, run each job in a new isolated process, notice when it is lost."""

import contextlib
import dataclasses
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from marl_jax.errors import UserError
from marl_jax.rewards.sandbox import zygote

_START_S = 30.0  # a zygote that is silent for this long has failed to start
_GRACE_S = 10.0  # a zygote that is silent this long after a job's deadline is dead
_NEEDED_TO_START = ("LD_LIBRARY_PATH",)  # some installations find libpython there; wiped before programs run
_CHUNK = 1 << 16  # capacity of a pipe
_TRIAL = {"mode": "call", "source": "def f():\n    return 7", "call": "f", "args": []}
_TRIAL_RESULT = b"\0\0\0\x08" + b'["ok",7]'


class SandboxUnavailable(UserError, RuntimeError):
    """This machine cannot isolate programs; the message says why, and how to accept the risk."""


class ZygoteLost(RuntimeError):
    """The zygote ended or went silent in the middle of a job, or could not set up a process."""


class ZygoteGone(ZygoteLost):
    """The zygote ended before a program of this job began."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Resource limits of one process."""

    time_s: float  # wall clock
    memory_bytes: int  # address space, in addition to the zygote's
    file_bytes: int = 64 << 20  # size of all its files together; if it is not isolated, of each file
    stdout_bytes: int = 1 << 20  # size of printed text
    result_bytes: int = 1 << 16  # size of returned values


@dataclasses.dataclass(frozen=True)
class Ended:
    """The result of one process."""

    status: int  # as wait(2) returns it
    in_time: bool
    stdout: bytes = b""
    result: bytes = b""
    overflow: bool = False  # stdout or result outgrew its limit


class Zygote:
    """One zygote process; not for use by two threads at once."""

    def __init__(self, isolated: bool = True):
        if not sys.executable:
            raise SandboxUnavailable("sys.executable is empty: there is no Python to start a sandbox with")
        self._last_error = ""
        # Spawned, not forked: nothing of this process (JAX, its threads, its environment) is inherited.
        options = ("-S", "-s", "-P", "-B", "-X", "utf8")
        environment = {name: os.environ[name] for name in _NEEDED_TO_START if name in os.environ}
        with contextlib.ExitStack() as opened:
            try:
                self._errors = opened.enter_context(tempfile.TemporaryFile())
                self.control, theirs = socket.socketpair()
                opened.enter_context(self.control)
                with theirs:
                    arguments = (str(theirs.fileno()), "isolated" if isolated else "unsafe")
                    self._process = subprocess.Popen(
                        [sys.executable, *options, zygote.__file__, *arguments],
                        env={**environment, "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"},
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=self._errors,
                        pass_fds=[theirs.fileno()],
                        cwd="/",
                        start_new_session=True,  # so that Ctrl-C reaches only the caller
                    )
            except OSError as error:
                raise SandboxUnavailable(f"the sandbox did not start: {error}") from None
            opened.pop_all()
        self.control.settimeout(_START_S)
        try:
            greeting = self.control.recv(4096)
        except OSError:
            greeting = b""
        if greeting != zygote.READY:
            self.close()
            raise SandboxUnavailable(
                greeting.decode(errors="replace") or f"the sandbox did not start: {self._last_error}"
            )
        # Half of the isolation is set up for each program, so only a trial program shows that it works.
        try:
            answered = self.run(_TRIAL, Limits(_START_S, 1 << 28)).result == _TRIAL_RESULT
            why = "a trial program gave no answer"
        except ZygoteLost as error:
            answered, why = False, str(error)
        if not answered:
            self.close()
            raise SandboxUnavailable(f"the sandbox runs no programs: {self._last_error or why}")

    def run(self, job: Mapping[str, Any], limits: Limits) -> Ended:
        """Run one job to its end; `ZygoteLost` if the zygote ends first."""
        with Process(self, job, limits) as process:
            return process.finish()

    def close(self) -> None:
        """End the zygote and the process that it runs."""
        self.control.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.seek(0)
        self._last_error = self._errors.read().decode(errors="replace").strip().rpartition("\n")[2]
        self._errors.close()


class Process:
    """One isolated process while it runs; leaving the `with` block kills it if it has not ended."""

    def __init__(self, owner: Zygote, job: Mapping[str, Any], limits: Limits, commands: bool = False):
        self._control = owner.control
        self._deadline = time.monotonic() + limits.time_s + _GRACE_S
        self._reply: tuple | None = None
        self._overflow = False
        self._set_up = False
        self._stdout, self._result = bytearray(), bytearray()
        self._streams: dict[int, tuple[bytearray, int]] = {}
        self._poll = select.poll()
        self._commands = -1
        data = json.dumps(job).encode()
        request = zygote.REQUEST.pack(zygote.RUN, limits.time_s, limits.memory_bytes, limits.file_bytes)
        try:
            with contextlib.ExitStack() as theirs:
                ends = [self._pipe(theirs, self._stdout, limits.stdout_bytes)]
                ends.append(self._pipe(theirs, self._result, limits.result_bytes))
                if commands:
                    command_end, self._commands = os.pipe()
                    theirs.callback(os.close, command_end)
                    ends.append(command_end)
                    os.set_blocking(self._commands, False)
                file = theirs.enter_context(_memory_file())
                file.write(data)
                file.seek(0)
                socket.send_fds(self._control, [request], [file.fileno(), *ends])
        except OSError as error:  # no descriptors or no memory left here, or the zygote has ended
            self._close()
            kind = ZygoteGone if isinstance(error, ConnectionError) else ZygoteLost
            raise kind(str(error)) from None
        self._poll.register(self._control.fileno(), select.POLLIN)

    def _pipe(self, theirs: contextlib.ExitStack, buffer: bytearray, limit: int) -> int:
        """Open a pipe whose content goes to `buffer`; returns its write end, which `theirs` closes."""
        ours, end = os.pipe()
        self._streams[ours] = (buffer, limit)
        self._poll.register(ours, select.POLLIN)
        theirs.callback(os.close, end)
        return end

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._reply is None and not (kind and issubclass(kind, ZygoteLost)):
                self.kill()
                self._wait()
        finally:
            self._close()

    def finish(self) -> Ended:
        """Wait for the end and return the result. `ZygoteLost` if the program never began to run."""
        status, in_time = self._wait()
        self._read_all()  # the process has ended, so all its output is in the pipe by now
        if not self._set_up:
            raise ZygoteLost(self._result.decode(errors="replace") or "a process ended before it was set up")
        return Ended(status, bool(in_time), bytes(self._stdout), bytes(self._result), self._overflow)

    def receive(self) -> bytes | None:
        """The next frame that the process sends; None if it ends first."""
        while (frame := first_frame(self._result)) is None:
            if self._reply is not None:
                return None
            self._pump()
        del self._result[: 4 + len(frame)]
        return frame

    def send(self, data: bytes) -> None:
        """Send a frame; a process that does not read it runs into its time limit."""
        rest = memoryview(len(data).to_bytes(4, "big") + data)  # a view, so that slices are not copied
        poll = select.poll()
        poll.register(self._commands, select.POLLOUT)
        while rest and self._reply is None:
            poll.poll(50)
            try:
                rest = rest[os.write(self._commands, rest) :]
            except BlockingIOError:
                self._pump(wait_ms=0)
            except BrokenPipeError:
                return

    def kill(self) -> None:
        """Have the zygote kill the process."""
        try:
            self._control.send(zygote.REQUEST.pack(zygote.KILL, 0, 0, 0))
        except OSError as error:
            raise ZygoteLost(str(error)) from None

    def _wait(self) -> tuple:
        while self._reply is None:
            self._pump()
        return self._reply

    def _pump(self, wait_ms: float | None = None) -> None:
        left_ms = (self._deadline - time.monotonic()) * 1000
        if left_ms <= 0:
            raise ZygoteLost("silent past the deadline")
        for fd, _ in self._poll.poll(left_ms if wait_ms is None else wait_ms):
            if fd in self._streams:
                self._read(fd)
            elif fd == self._control.fileno():
                try:
                    message = self._control.recv(zygote.REPLY.size)
                except OSError:
                    message = b""
                if len(message) != zygote.REPLY.size:
                    self._read_all()  # whether the program has begun
                    raise (ZygoteLost if self._set_up else ZygoteGone)("ended in the middle of a job")
                self._reply = zygote.REPLY.unpack(message)

    def _read_all(self) -> None:
        for fd in list(self._streams):
            os.set_blocking(fd, False)
            while fd in self._streams and self._read(fd):
                pass

    def _read(self, fd: int) -> bool:
        """Read from a stream; False if it is empty or at its end."""
        buffer, limit = self._streams[fd]
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        more = bool(data)
        if buffer is self._result and not self._set_up and data.startswith(zygote.SET_UP):
            self._set_up, data = True, data[len(zygote.SET_UP) :]
        buffer += data[: limit - len(buffer) + 1]
        if not more or len(buffer) > limit:
            self._close_stream(fd)
            if more and not self._overflow:
                self._overflow = True
                if self._reply is None:
                    self.kill()
        return more

    def _close_stream(self, fd: int) -> None:
        self._poll.unregister(fd)
        del self._streams[fd]
        os.close(fd)

    def _close(self) -> None:
        for fd in list(self._streams):
            self._close_stream(fd)
        if self._commands >= 0:
            os.close(self._commands)
            self._commands = -1


def first_frame(data: bytes | bytearray) -> bytes | None:
    """The frame at the start of `data` (four bytes of length, then the body); None if it is incomplete."""
    if len(data) < 4:
        return None
    end = 4 + int.from_bytes(data[:4], "big")
    return bytes(data[4:end]) if len(data) >= end else None


def _memory_file():
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("job"), "wb")
    return tempfile.TemporaryFile()
