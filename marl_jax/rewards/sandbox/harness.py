"""The harness inside an isolated process: it runs one program, once, in one of four modes.

`stdin`: the program is the main module, its standard output is the answer. `call`: it is imported, one function is
called, the returned value is the answer. `serve`: it is imported and answers the requests of a check. `check`: test
code is the main module, and names that it does not define are those of a program in a `serve` process. No verdict is
made here: answers may be forged, and are compared outside with values that never enter this process.
"""

import atexit
import builtins
import contextlib
import functools
import gc
import importlib
import io
import os
import random
import sys
import threading
import types
from typing import Any

import plain
import remote

RESULT, COMMANDS = 3, 4  # file descriptors, next to the standard three
_TURN = threading.Lock()  # threads of test code ask one after the other
_ERROR_CHARS = 500
_RECURSION_LIMIT = 50_000  # nested calls
_FILES = {io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom}  # what `open` makes to write
_MANY = 1_000_000  # memory blocks that would take long to free
_Namespace = dict[str, Any]
# Modules that answers to LeetCode's problems use without imports, like all public names of these modules.
_BUILTIN_MODULES = (
    "typing collections math heapq bisect itertools functools operator string re random datetime copy statistics"
    " sys json io"
)


def run(job: dict) -> None:
    """Run the job to its end; never returns."""
    mode, source = job["mode"], job["source"]
    if mode == "stdin":
        _run_script(source)
    os.dup2(2, 1)  # nobody reads what is printed
    namespace = _fresh_module("__main__" if mode == "check" else "solution")
    try:
        if mode in ("call", "serve"):
            _add_builtins()
        if mode == "check":
            link = remote.Link(_exchange)
            functions = {name: link.named(name) for name in job["names"]}
            namespace.update({**link.helpers(), **functions})
            setup, source = map(remote.identified, (job["setup"], source))
            exec(compile(setup, "setup.py", "exec", dont_inherit=True), namespace)
            # Named functions replace stubs in the setup. Guessed ones do not, because an `import *` may define them.
            if job["named"]:
                namespace.update(functions)
        exec(compile(source, "solution.py", "exec", dont_inherit=True), namespace)
        if mode == "call":
            answer = ["ok", plain.pack(_function(namespace, job["call"])(*plain.unpack(job["args"])))]
        elif mode == "serve":
            _serve(namespace)
        else:
            answer = ["ok", None]
    except BaseException as error:
        answer = ["error", _text_of(error)]
    _send(answer)
    os._exit(0)


def _add_builtins() -> None:
    """Make these modules and their names builtins, which names of the program and of Python hide. Raise the recursion
    limit, as graders of this data do: a plain recursive answer needs a call for each of its items.
    """
    sys.setrecursionlimit(_RECURSION_LIMIT)
    for name in _BUILTIN_MODULES.split():
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None) or [n for n in dir(module) if not n.startswith("_")]
        for word in (name, *public):
            builtins.__dict__.setdefault(word, module if word == name else getattr(module, word))


def _fresh_module(name: str) -> _Namespace:
    """Set up the state of a new interpreter for a script or module; returns the module's namespace."""
    module = types.ModuleType(name)
    module.__dict__.update(__builtins__=builtins, __file__="solution.py")
    sys.modules[name] = module
    sys.argv, sys.orig_argv = ["solution.py"], ["python", "solution.py"]
    for stream, file, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        text = open(file, mode, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        setattr(sys, stream, text)
        setattr(sys, f"__{stream}__", text)
    sys.set_int_max_str_digits(0)
    random.seed(0)  # so that answers are reproducible; forks would share the state anyway
    gc.enable()
    return module.__dict__


def _run_script(source: str) -> None:
    """Run and exit as `python solution.py` would: wait for threads, run exit handlers, flush, exit with the status."""
    status = 0

    def play() -> None:
        namespace = _fresh_module("__main__")
        exec(compile(source, "solution.py", "exec", dont_inherit=True), namespace)

    for part in (play, threading._shutdown, atexit._run_exitfuncs, _end):  # type: ignore[attr-defined]
        try:
            part()
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except BaseException as error:
            status = 1
            _send(["error", _text_of(error)])
    os._exit(status & 0xFF)


def _end() -> None:
    """Free the program's objects, then flush its output: files that the objects hold are written when they close."""
    if sys.getallocatedblocks() < _MANY:
        sys.modules.pop("__main__", None)
        gc.collect()
    else:  # too many to free: write the files that are open
        with contextlib.suppress(MemoryError):
            for file in filter(lambda one: type(one) in _FILES, gc.get_objects()):
                with contextlib.suppress(Exception):
                    file.flush()
    for stream in (sys.stdout, sys.__stdout__):
        with contextlib.suppress(ValueError):  # the stream is closed, or detached from its buffer
            if stream is not None:
                stream.flush()


def _serve(namespace: _Namespace) -> None:
    table = remote.Table(functools.partial(_function, namespace))
    while True:
        _, *request = plain.loads(_read_frame())
        try:
            answer = ["ok", table.answer(*request)]
        except BaseException as error:
            answer = ["raise", *remote.described(error)]
        _send(answer)


def _exchange(message: list) -> Any:
    with _TURN:
        _send(message)
        return plain.loads(_read_frame())


def _function(namespace: _Namespace, name: str):
    """The method of a new `Solution`, or else the function or class of that name."""
    solution = namespace.get("Solution")
    if isinstance(solution, type) and hasattr(solution, name):
        return getattr(solution(), name)
    if name in namespace:
        return namespace[name]
    raise NameError(f"the program defines no {name}")


def _text_of(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")[:_ERROR_CHARS]
    except BaseException:
        return "an exception without words"


def _send(message: list) -> None:
    data = plain.dumps(message).encode()
    data = len(data).to_bytes(4, "big") + data
    while data:
        data = data[os.write(RESULT, data) :]


def _read_frame() -> bytes:
    return _read(int.from_bytes(_read(4), "big"))


def _read(size: int) -> bytes:
    parts = []
    while size:
        part = os.read(COMMANDS, min(size, 1 << 20))
        if not part:
            os._exit(0)  # the caller has closed the pipe
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
