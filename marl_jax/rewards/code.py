"""Grading of programs: which tests there are, how each is run in the sandbox, and how its outcome is judged outside.

Three kinds of test: `{"stdin", "stdout"}` runs the program as a script; `{"call", "args", "expected"}` imports it and
calls a function (or a method of its class `Solution`); `{"check"}` (optionally with `"functions"` and `"setup"`) is
test code in a process of its own, whose calls to the program's functions go through a pipe. Every test starts afresh.
"""

import dataclasses
import functools
import hashlib
import itertools
import operator
import os
import re
import textwrap
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from marl_jax.rewards.asserts import check_functions, free_functions
from marl_jax.rewards.compare import same_output, same_packed
from marl_jax.rewards.sandbox import plain
from marl_jax.rewards.sandbox.pool import Pool, Seat, Verdict, default_pool
from marl_jax.rewards.sandbox.worker import Ended, Limits, Process, first_frame

TIME_LIMIT_S = 6.0  # per test, as LiveCodeBench has it
MEMORY_LIMIT_MB = 1024.0
_CACHED_VERDICTS = 1 << 16
_ROOM = 16  # an answer longer than so many times the expected one (and a bit) is wrong, whatever it says


def run_program(
    source: str | None,
    tests: Sequence[Mapping[str, Any]],
    *,
    time_limit_s: float = TIME_LIMIT_S,
    memory_limit_mb: float = MEMORY_LIMIT_MB,
    pool: Pool | None = None,
) -> Verdict:
    """Whether a program (not a response) passes every test, and if not, which failed first and why.

    The time limit is wall-clock time per test. ValueError names a malformed test by its number, from 1.
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
) -> "Future[Verdict]":
    """`run_program` without the wait: submit a batch, then collect; equal submissions run once."""
    if source is not None and not isinstance(source, str):
        raise TypeError(
            f"source is {type(source).__name__}, expected the program's text (or None: no program found)"
        )
    for name, value in (("time_limit_s", time_limit_s), ("memory_limit_mb", memory_limit_mb)):
        if not 0 < value <= 1e6:
            raise ValueError(f"{name}={value}: expected a positive number, at most a million")
    prepared = parse_tests(tests)
    source = source and source.removeprefix("\ufeff")  # the byte order mark of a file: Python skips it there
    if source is None or not source.strip():
        return _done(Verdict(False, "no program"))
    pool = default_pool() if pool is None else pool
    limits = Limits(time_limit_s, int(memory_limit_mb * 2**20))
    return _cache_of(pool).get(
        _digest(source, prepared, limits),
        lambda: pool.submit([functools.partial(test.run, source, limits) for test in prepared]),
    )


def grade_code(response: str, tests: Sequence[Mapping[str, Any]], **limits: Any) -> float:
    """1.0 when the program in a model's response passes every test, else 0.0."""
    return float(run_program(extract_program(response), tests, **limits).passed)


def extract_program(response: str) -> str | None:
    """The last fenced block of a response that is not blank, whatever language it names; None without a block.

    Fences are those of Markdown, also inside a list, whose indentation goes. A block cut off before its end counts.
    Where it makes better sense of the fences, one may also open after text, or close after code or before a full stop.
    """
    lines = _LINE_END.split(response)
    # As Markdown has it, unless only a looser reading makes every fence find its other half.
    readings = [_read_blocks(lines, *loose) for loose in itertools.product((False, True), repeat=2)]
    _, blocks = min(readings, key=operator.itemgetter(0))
    written = [block for block in blocks if _is_written(block)] or blocks
    return _unindented("\n".join(written[-1])) if written else None


def parse_tests(tests: Sequence[Mapping[str, Any]]) -> "tuple[Test, ...]":
    """The tests, checked; ValueError names the first that is malformed, or says that there is none."""
    if not isinstance(tests, Sequence) or isinstance(tests, str | bytes):
        raise ValueError(f"tests is {type(tests).__name__}, expected a list of tests")
    if not tests:
        raise ValueError("no tests: a program cannot be graded without any")
    return tuple(_parse(number, test) for number, test in enumerate(tests, start=1))


@dataclasses.dataclass(frozen=True)
class StdinTest:
    """Run as a script: what it prints must agree, and it must not fail."""

    stdin: str
    stdout: str

    def run(self, source: str, limits: Limits, seat: Seat) -> str | None:
        """None when the program passes, else why not."""
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
    """Call one function: the value it returns must be equal."""

    call: str
    args: str  # packed, as JSON
    expected: str

    def run(self, source: str, limits: Limits, seat: Seat) -> str | None:
        """None when the program passes, else why not."""
        (zygote,) = seat.zygotes(1)
        job = {"mode": "call", "source": source, "call": self.call, "args": plain.loads(self.args)}
        room = limits.result_bytes + _ROOM * len(self.expected)
        ended = zygote.run(job, dataclasses.replace(limits, result_bytes=room))
        failure = _failure(ended, limits)
        if failure is not None:
            return failure
        answer = _answer(ended.result)
        if answer is None:
            return "ended without an answer"
        return None if same_packed(answer[0], plain.loads(self.expected)) else "wrong answer"


@dataclasses.dataclass(frozen=True)
class CheckTest:
    """Run test code that calls the program's functions from another process."""

    check: str
    functions: tuple[str, ...]
    setup: str = ""
    named: bool = (
        True  # whether the test names its functions: then they replace what its setup has by that name
    )

    def run(self, source: str, limits: Limits, seat: Seat) -> str | None:
        """None when the test code runs to its end, else why not."""
        theirs, ours = seat.zygotes(2)
        limits = dataclasses.replace(limits, result_bytes=limits.file_bytes)
        check = {
            **{"mode": "check", "source": self.check, "setup": self.setup},
            **{"names": self.functions, "named": self.named},
        }
        asked = False
        with (
            Process(theirs, {"mode": "serve", "source": source}, limits, commands=True) as program,
            Process(ours, check, limits, commands=True) as checker,
        ):
            while (message := checker.receive()) is not None:
                if not message.startswith(b'["call"'):
                    failure = _error(message)
                    if failure is not None:
                        return f"check failed: {failure}"
                    return None if asked else "the check called no function of the program"
                asked = True
                program.send(message)
                answer = program.receive()
                if answer is None:
                    return _failure(program.finish(), limits) or "ended before it answered"
                if answer.startswith(b'["error"'):
                    return _error(answer)
                checker.send(answer)
            return _failure(checker.finish(), limits) or "the test code ended early"


Test = StdinTest | CallTest | CheckTest


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
                f"test {number}: {name} is {type(test[name]).__name__}, expected {getattr(kind, '__name__', 'list')}"
            )


def _packed(number: int, name: str, value: Any) -> str:
    try:
        return plain.dumps(plain.pack(value))
    except ValueError as error:
        raise ValueError(f"test {number}: {name} holds {error}, expected plain data") from None


def _failure(ended: Ended, limits: Limits) -> str | None:
    """What went wrong with a process, whatever it said; None when it ended well."""
    if not ended.in_time:
        return f"time limit of {limits.time_s:g} s"
    if ended.overflow:
        return "output limit"
    if os.WIFSIGNALED(ended.status):
        return f"killed by signal {os.WTERMSIG(ended.status)}"
    frame = first_frame(ended.result)
    if frame is not None and (said := _error(frame)) is not None:
        return said
    if ended.status:
        return f"exit status {os.WEXITSTATUS(ended.status)}"
    return None


def _error(frame: bytes) -> str | None:
    """The text of an error message, None of any other message."""
    try:
        kind, text = plain.loads(frame)
    except (ValueError, TypeError):
        return None
    return str(text)[:500] if kind == "error" else None


def _answer(result: bytes) -> list[Any] | None:
    """The packed value of the one message a call leaves, in a list; None when it left anything else."""
    frame = first_frame(result)
    if frame is None or len(result) != 4 + len(frame):
        return None
    try:
        kind, value = plain.loads(frame)
    except (ValueError, TypeError):
        return None
    return [value] if kind == "ok" else None


_LINE_END = re.compile(r"\r\n?|\n")
_INDENT = re.compile(r"\s*(?:(?:[-*+]|\d{1,9}[.)])\s+)?")
_OPENING = re.compile(_INDENT.pattern + r"(?P<fence>`{3,}(?=[^`]*$)|~{3,})")
_CLOSING = re.compile(r"\s*(`{3,}|~{3,})\s*")
# The same after other text, in a line without the blanks at its end.
_LATE_OPENING = re.compile(r"(?<!`)(?P<fence>`{3,})\s*(?P<language>[\w+#.-]*)$")
_LATE_CLOSING = re.compile(r"(?<!`)(?P<fence>`{3,})(?:[.,;:!?)].*)?$")


def _read_blocks(lines: Sequence[str], late_close: bool, late_open: bool) -> tuple[int, list[list[str]]]:
    """The fenced blocks of a response, after a mark for how ill that reading fits: 0 where it fits."""
    blocks: list[list[str]] = []
    fence, indent, inner, strings, ill = "", 0, 0, 0, False
    for line in lines:
        late = _first_fence(_LATE_OPENING, line)
        if not fence:
            if (opening := _OPENING.match(line) or (late if late_open else None)) is not None:
                fence, indent, inner, strings = opening["fence"], _INDENT.match(line).end(), 0, 0  # type: ignore[union-attr]
                blocks.append([])
            continue
        closing = _CLOSING.fullmatch(line)
        if closing and closing[1].startswith(fence) and closing.start(1) < indent + 4:
            fence, ill = "", ill or inner % 2 == 1
            continue
        end = _first_fence(_LATE_CLOSING, line) if late_close else None
        if end and end["fence"].startswith(fence) and not strings ^ _open_strings(line[: end.start()]):
            code = line[: end.start()].rstrip()
            comment = code.lstrip().startswith("#")
            if not comment and (code or end.start() < indent + 4):
                blocks[-1].extend([code] if code else [])
                fence, ill = "", ill or inner % 2 == 1
                continue
        if late and late["fence"].startswith(fence) and not strings ^ _open_strings(line[: late.start()]):
            inner += 1  # half of a pair, as of a comment that shows an example
            ill |= bool(late["language"]) and not line[: late.start()].strip() and late.start() < indent + 4
        blocks[-1].append(line)
        strings ^= _open_strings(line)
    if not any(map(_is_written, blocks)):
        return 3, blocks
    if ill or (fence and (inner % 2 or not _is_written(blocks[-1]))):
        return 2, blocks
    return int(bool(fence)), blocks  # one that is open at the end may have been cut off


def _first_fence(pattern: re.Pattern[str], line: str) -> re.Match[str] | None:
    """Where the pattern is found, if at the line's first fence: a second one ends a piece of code in running text."""
    found = pattern.search(line.rstrip())
    return None if found is None or "```" in line[: found.start()] else found


def _open_strings(text: str) -> int:
    """A bit for each kind of triple quotes that a text opens or closes; those of many lines add up by `^`."""
    return text.count('"""') % 2 | text.count("'''") % 2 << 1


def _is_written(block: Sequence[str]) -> bool:
    return any(line.strip() for line in block)


def _unindented(program: str) -> str:
    """Without the indentation that all of its lines share, as inside a list."""
    return textwrap.dedent(program) if program.lstrip("\n")[:1].isspace() else program


class _Verdicts:
    """The latest verdicts of a pool, shared by equal submissions while they run and after."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finished future calls back at once
        self._known: OrderedDict[bytes, Future[Verdict] | Verdict] = OrderedDict()

    def get(self, key: bytes, submit: Callable[[], "Future[Verdict]"]) -> "Future[Verdict]":
        """The verdict under that key, known, awaited or asked for."""
        with self._lock:
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = submit()
                known.add_done_callback(functools.partial(self._keep, key))
                if len(self._known) > _CACHED_VERDICTS:
                    self._known.popitem(last=False)
            else:
                self._known.move_to_end(key)
            return _done(known) if isinstance(known, Verdict) else known

    def _keep(self, key: bytes, future: "Future[Verdict]") -> None:
        with self._lock:
            if self._known.get(key) is not future:
                return
            if future.exception() is None and not future.result().lost:
                self._known[key] = future.result()
            else:  # the sandbox failed: that says nothing about the program
                del self._known[key]


def _done(verdict: Verdict) -> "Future[Verdict]":
    future: Future[Verdict] = Future()
    future.set_result(verdict)
    return future


_caches: "weakref.WeakKeyDictionary[Pool, _Verdicts]" = weakref.WeakKeyDictionary()
_caches_lock = threading.Lock()


def _after_fork() -> None:
    global _caches_lock
    _caches_lock = threading.Lock()  # its holder may not exist here


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _cache_of(pool: Pool) -> _Verdicts:
    with _caches_lock:
        return _caches.setdefault(pool, _Verdicts())


def _digest(source: str, tests: "Iterable[Test]", limits: Limits) -> bytes:
    return hashlib.sha256(repr((source, tests, limits)).encode("utf-8", "surrogatepass")).digest()
