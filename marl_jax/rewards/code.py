"""Grading of programs: the kinds of tests, how each runs in the sandbox, and how its result is judged outside.

Three kinds of test: `{"stdin", "stdout"}` runs the program as a script; `{"call", "args", "expected"}` imports it and
calls a function (or a method of its class `Solution`); `{"check"}` (optionally with `"functions"` and `"setup"`) is
test code in a second process, which uses the program's functions and objects through a pipe. Every test runs in new
processes.
"""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from marl_jax.rewards.asserts import check_functions, free_functions
from marl_jax.rewards.compare import same_output, same_packed
from marl_jax.rewards.sandbox import plain
from marl_jax.rewards.sandbox.pool import Pool, Seat, default_pool
from marl_jax.rewards.sandbox.verdicts import Verdict, resolved
from marl_jax.rewards.sandbox.worker import Ended, Limits, Process, Zygote, first_frame

TIME_LIMIT_S = 6.0  # per test, as in LiveCodeBench
MEMORY_LIMIT_MB = 1024.0
PARSED = 256  # problems whose parsed tests are cached
_PASSED = b'["ok",null]'  # message of test code that ran to its end
_ERROR_BYTES = 1 << 13  # no error message of the harness is longer
_NO_TEXT = "an error without words"
_ROOM = 16  # an output longer than this many times the expected one, plus a constant, is wrong


def run_program(
    source: str | None,
    tests: Sequence[Mapping[str, Any]],
    *,
    time_limit_s: float = TIME_LIMIT_S,
    memory_limit_mb: float = MEMORY_LIMIT_MB,
    pool: Pool | None = None,
) -> Verdict:
    """Whether a program (not a response) passes every test, and if not, which failed first and why.

    The time limit is wall-clock time per test. ValueError names a malformed test by its number, from 1. Verdicts
    number tests from 0, because the micro bases were trained on that form.
    """
    return submit_program(
        source, tests, time_limit_s=time_limit_s, memory_limit_mb=memory_limit_mb, pool=pool
    ).result()


def submit_program(
    source: str | None,
    tests: Sequence[Mapping[str, Any]],
    *,
    time_limit_s: float = TIME_LIMIT_S,
    memory_limit_mb: float = MEMORY_LIMIT_MB,
    pool: Pool | None = None,
    digest: str | None = None,
) -> "Future[Verdict]":
    """Start `run_program` and return its future, so that many can be submitted; equal submissions run once.

    Tests with a `digest` are parsed once for all programs.
    """
    if source is not None and not isinstance(source, str):
        raise TypeError(
            f"source is {type(source).__name__}, expected the program's text (or None: no program found)"
        )
    limits = _limits(time_limit_s, memory_limit_mb)
    prepared, prepared_digest = _prepared(tests, digest)
    source = source and source.removeprefix("\ufeff")  # Python skips this mark in files only
    if source is None or not source.strip():
        return resolved(Verdict(False, "no program"))
    pool = default_pool() if pool is None else pool
    submission = repr((source, prepared_digest, limits)).encode("utf-8", "surrogatepass")
    return pool.verdicts.get(
        hashlib.sha256(submission).digest(),
        lambda: pool.submit([functools.partial(test.run, source, limits) for test in prepared]),
    )


@dataclasses.dataclass(frozen=True)
class Computed:
    """The value returned by a program's function, or the reason for none."""

    value: Any = None  # text, a number, a boolean, None, or lists of these
    reason: str = ""  # empty if there is a value


def compute(
    source: str,
    function: str,
    args: Sequence[Any] = (),
    *,
    time_limit_s: float = TIME_LIMIT_S,
    memory_limit_mb: float = MEMORY_LIMIT_MB,
    pool: Pool | None = None,
) -> Computed:
    """The value that a function of a program returns in each of two processes, for problems that models write.

    Text, finite numbers, ints below 2**63, booleans, None and lists of these are values. Random numbers are the same in
    every process of the sandbox, so programs that draw them are accepted; programs that return a clock's time or an
    address are refused.
    """
    test = CallTest(function, _packed(1, "args", list(args)), "null")
    limits, values = _limits(time_limit_s, memory_limit_mb), list[Any]()

    def run_once(number: int, seat: Seat) -> str | None:
        failure, answer = test.answer(source, limits, seat.zygotes(2)[number])
        values.extend(answer or ())
        return failure

    # In two zygotes, because all processes of one have the same addresses.
    runs = [functools.partial(run_once, number) for number in range(2)]
    verdict = (pool or default_pool()).submit(runs).result()
    if not verdict.passed:
        return Computed(reason=verdict.reason.partition(": ")[2] or verdict.reason)
    allowed = "text, finite numbers, ints below 2**63, booleans, None and lists of these"
    refusal = Computed(reason=f"it returns other things than {allowed}")
    try:
        (first, second), is_plain = map(plain.dumps, values), _is_plain(values[0])
    except (ValueError, RecursionError):  # an infinite number, or lists too deep, in a forged answer
        return refusal
    if first != second:
        return Computed(reason="two runs return different values")
    return Computed(values[0]) if is_plain else refusal


def parse_tests(tests: Sequence[Mapping[str, Any]]) -> "tuple[Test, ...]":
    """The checked tests; ValueError names the first malformed one, or states that there are none."""
    if not isinstance(tests, Sequence) or isinstance(tests, str | bytes):
        raise ValueError(f"tests is {type(tests).__name__}, expected a list of tests")
    if not tests:
        raise ValueError("no tests: a program cannot be graded without any")
    return tuple(_parse(number, test) for number, test in enumerate(tests, start=1))


@dataclasses.dataclass(frozen=True)
class StdinTest:
    """Run the program as a script: its output must agree, and it must not fail."""

    stdin: str  # input of the program
    stdout: str  # expected output

    def run(self, source: str, limits: Limits, seat: Seat) -> str | None:
        """None if the program passes, else why it fails."""
        (zygote,) = seat.zygotes(1)
        job = {"mode": "stdin", "source": source, "stdin": self.stdin}
        room = limits.stdout_bytes + _ROOM * len(self.stdout)
        files = limits.file_bytes + 4 * len(self.stdin)
        ended = zygote.run(job, dataclasses.replace(limits, stdout_bytes=room, file_bytes=files))
        failure = _failure(ended, limits)
        if failure is None and not same_output(ended.stdout.decode("utf-8", "replace"), self.stdout):
            return "wrong answer"
        return failure


@dataclasses.dataclass(frozen=True)
class CallTest:
    """Call one function: the value that it returns must equal the expected one."""

    call: str  # name of the function
    args: str  # packed, as JSON
    expected: str  # the value that it must return, packed as JSON

    def run(self, source: str, limits: Limits, seat: Seat) -> str | None:
        """None if the program passes, else why it fails."""
        failure, answer = self.answer(source, limits, *seat.zygotes(1))
        if answer is None:
            return failure
        return None if same_packed(answer[0], plain.loads(self.expected)) else "wrong answer"

    def answer(self, source: str, limits: Limits, zygote: Zygote) -> tuple[str | None, list[Any] | None]:
        """(why the call has no value, None); or (None, the packed value that it returned, in a list)."""
        job = {"mode": "call", "source": source, "call": self.call, "args": plain.loads(self.args)}
        room = limits.result_bytes + _ROOM * len(self.expected)
        ended = zygote.run(job, dataclasses.replace(limits, result_bytes=room))
        answer = _answer(ended.result)
        failure = _failure(ended, limits) or ("ended without an answer" if answer is None else None)
        return failure, None if failure else answer


@dataclasses.dataclass(frozen=True)
class CheckTest:
    """Run test code that uses the program's functions and classes from another process."""

    check: str  # test code that may use the program's functions
    functions: tuple[str, ...]  # names of these functions
    setup: str = ""  # code that runs before the check
    # Whether the test lists its functions; listed functions replace definitions of their names in the setup.
    named: bool = True

    def run(self, source: str, limits: Limits, seat: Seat) -> str | None:
        """None if the test code runs to its end, else why it does not."""
        program_zygote, check_zygote = seat.zygotes(2)
        limits = dataclasses.replace(limits, result_bytes=limits.file_bytes)
        check: dict[str, Any] = {"mode": "check", "source": self.check, "setup": self.setup}
        check |= {"names": self.functions, "named": self.named}
        used = False
        with (
            Process(program_zygote, {"mode": "serve", "source": source}, limits, commands=True) as program,
            Process(check_zygote, check, limits, commands=True) as checker,
        ):
            while (message := checker.receive()) is not None:
                if message == _PASSED:
                    return None if used else "the check called no function of the program"
                if not message.startswith(b'["ask"'):
                    return f"check failed: {_error(message) or _NO_TEXT}"
                used = True
                program.send(message)
                answer = program.receive()
                if answer is None:
                    return _failure(program.finish(), limits) or "ended before it answered"
                if answer.startswith(b'["error"'):
                    return _error(answer) or _NO_TEXT
                checker.send(answer)
            return _failure(checker.finish(), limits) or "the test code ended early"


Test = StdinTest | CallTest | CheckTest


def _limits(time_limit_s: float, memory_limit_mb: float) -> Limits:
    for name, value in (("time_limit_s", time_limit_s), ("memory_limit_mb", memory_limit_mb)):
        if value is None or isinstance(value, str) or not 0 < value <= 1e6:
            raise ValueError(f"{name}={value!r}: expected a positive number, at most a million")
    return Limits(float(time_limit_s), int(float(memory_limit_mb) * 2**20))


_parsed: dict[str, tuple[tuple[Test, ...], bytes]] = {}  # {task's digest: (parsed tests, their digest)}


def _prepared(tests: Sequence[Mapping[str, Any]], digest: str | None) -> tuple[tuple[Test, ...], bytes]:
    """The parsed tests and their digest. Cached: a task may have megabytes of tests, and thousands of programs."""
    if digest is not None and (cached := _parsed.get(digest)):
        return cached
    prepared = parse_tests(tests)
    parsed = prepared, hashlib.sha256(repr(prepared).encode("utf-8", "surrogatepass")).digest()
    if digest is not None:
        while len(_parsed) >= PARSED:
            _parsed.pop(next(iter(_parsed), ""), None)
        _parsed[digest] = parsed
    return parsed


def _parse(number: int, test: Any) -> Test:
    if not isinstance(test, Mapping):
        raise ValueError(f"test {number} is {type(test).__name__}, expected a dict")
    keys = set(test)
    if keys == {"stdin", "stdout"}:
        _expect(number, test, str, "stdin", "stdout")
        try:
            test["stdin"].encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise ValueError(f"test {number}: stdin holds half a surrogate pair, which no file can") from None
        return StdinTest(test["stdin"], test["stdout"])
    if keys == {"call", "args", "expected"}:
        _expect(number, test, str, "call")
        _expect(number, test, list | tuple, "args")
        if not test["call"].isidentifier():
            raise ValueError(f"test {number}: call={test['call']!r} is not the name of a function")
        return CallTest(
            test["call"],
            _packed(number, "args", list(test["args"])),
            _packed(number, "expected", test["expected"]),
        )
    if {"check"} <= keys <= {"check", "functions", "setup"}:
        test = {"setup": "", "functions": (), **test}
        _expect(number, test, str, "check", "setup")
        _expect(number, test, list | tuple, "functions")
        code, setup = test["check"], test["setup"]
        try:
            functions = tuple(map(str, test["functions"])) or free_functions(code, setup)
            for part in (code, setup):
                compile(part, "check", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"test {number}: the check is not Python: {error}") from None
        try:
            check_functions(functions, code, setup)
        except ValueError as error:
            raise ValueError(f"test {number}: {error}") from None
        return CheckTest(code, functions, setup, named=bool(test["functions"]))
    raise ValueError(
        f"test {number} has the keys {sorted(map(str, keys))}, "
        "expected stdin and stdout, or call, args and expected, or check"
    )


def _expect(number: int, test: Mapping[str, Any], kind: Any, *names: str) -> None:
    for name in names:
        if not isinstance(test[name], kind):
            raise ValueError(
                f"test {number}: {name} is {type(test[name]).__name__}, expected {'str' if kind is str else 'list'}"
            )


def _packed(number: int, name: str, value: Any) -> str:
    try:
        return plain.dumps(plain.pack(value))
    except ValueError as error:
        raise ValueError(f"test {number}: {name} holds {error}, expected plain data") from None


def _failure(ended: Ended, limits: Limits) -> str | None:
    """Why a process failed: from how it ended, or else from the error that it sent. None if it ended well."""
    if not ended.in_time:
        return f"time limit of {limits.time_s:g} s"
    if ended.overflow:
        return "output limit"
    if os.WIFSIGNALED(ended.status):
        return f"killed by signal {os.WTERMSIG(ended.status)}"
    frame = first_frame(ended.result)
    if frame is not None and (error := _error(frame)) is not None:
        return error
    if ended.status:
        return f"exit status {os.WEXITSTATUS(ended.status)}"
    return None


def _error(frame: bytes) -> str | None:
    """The text of an error message, None for any other message. Programs can forge it in any size."""
    kind, text = _message(frame) if len(frame) <= _ERROR_BYTES else (None, None)
    return (str(text)[:500] or _NO_TEXT) if kind == "error" else None


def _answer(result: bytes) -> list[Any] | None:
    """The packed value of a call's single message, in a list; None for any other output."""
    frame = first_frame(result)
    kind, value = _message(frame) if frame is not None and len(result) == 4 + len(frame) else (None, None)
    return [value] if kind == "ok" else None


def _message(frame: bytes) -> tuple[Any, Any]:
    """The kind and the content of a message; (None, None) for bytes that are no message."""
    try:
        kind, content = plain.loads(frame)
    except (ValueError, TypeError):
        return None, None
    return kind, content


def _is_plain(packed: Any) -> bool:
    """Whether a value and its packed form are the same: it has no tuple, set, dict or wide number."""
    return all(map(_is_plain, packed)) if isinstance(packed, list) else not isinstance(packed, dict)
