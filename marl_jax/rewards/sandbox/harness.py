"""What runs inside an isolated process: one program, once, in one of four roles.

`stdin`: the program is the main module, its standard output is the answer. `call`: it is imported, one function is
called, the returned value is the answer. `serve`: it is imported and does what a check asks until it asks no more.
`check`: test code is the main module, and the names it does not define are those of a program served elsewhere.
Nothing here decides anything: an answer, forged or not, is judged outside against what never came in.
"""

import atexit
import builtins
import functools
import gc
import importlib
import os
import random
import sys
import threading
import types
from typing import Any

import plain
import remote

RESULT, COMMANDS = 3, 4  # file descriptors, next to the standard three
_ERROR_CHARS = 500
_Namespace = dict[str, Any]
# What answers to LeetCode's problems take for granted: these modules, and all their public names.
_LENT = "typing collections math heapq bisect itertools functools operator string re random datetime copy statistics"


def run(job: dict) -> None:
    """Play the job's role to its end; never returns."""
    mode, source = job["mode"], job["source"]
    namespace = _fresh_module("__main__" if mode in ("stdin", "check") else "solution")
    if mode == "stdin":
        _run_script(source, namespace)
    try:
        if mode in ("call", "serve"):
            _lend()
        if mode == "check":
            link = remote.Link(_exchange)
            functions = {name: link.named(name) for name in job["names"]}
            namespace.update({**link.helpers(), **functions})
            setup, source = map(remote.identified, (job["setup"], source))
            exec(compile(setup, "setup.py", "exec", dont_inherit=True), namespace)
            if job["named"]:  # over a stub in the setup; guessed ones give way, to `import *` for one
                namespace.update(functions)
        exec(compile(source, "solution.py", "exec", dont_inherit=True), namespace)
        if mode == "call":
            answer = ["ok", plain.pack(_function(namespace, job["call"])(*plain.unpack(job["args"])))]
        elif mode == "serve":
            _serve(namespace)
        else:
            answer = ["ok", None]
    except BaseException as error:
        answer = ["error", _say(error)]
    _send(answer)
    os._exit(0)


def _lend() -> None:
    """Let a function's file use what its site would have imported; its own names and Python's come first."""
    for name in _LENT.split():
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None) or [n for n in dir(module) if not n.startswith("_")]
        for word in (name, *public):
            builtins.__dict__.setdefault(word, module if word == name else getattr(module, word))


def _fresh_module(name: str) -> _Namespace:
    """The state a script or module would find in an interpreter of its own; returns the module's namespace."""
    module = types.ModuleType(name)
    module.__dict__.update(__builtins__=builtins, __file__="solution.py")
    sys.modules[name] = module
    sys.argv, sys.orig_argv = ["solution.py"], ["python", "solution.py"]
    for stream, file, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        text = open(file, mode, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        setattr(sys, stream, text)
        setattr(sys, f"__{stream}__", text)
    sys.set_int_max_str_digits(0)
    random.seed(0)  # the same program gives the same answer; forks would share the state anyway
    gc.enable()
    return module.__dict__


def _run_script(source: str, namespace: _Namespace) -> None:
    """As `python solution.py` would: wait for threads, run exit handlers, flush, leave with the exit status."""
    status = 0
    try:
        try:
            exec(compile(source, "solution.py", "exec", dont_inherit=True), namespace)
        finally:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.__stdout__):
                if stream is not None and not getattr(stream, "closed", False):
                    stream.flush()
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:
        status = 1
        _send(["error", _say(error)])
    os._exit(status & 0xFF)


def _serve(namespace: _Namespace) -> None:
    table = remote.Table(functools.partial(_function, namespace))
    while True:
        _, *asked = plain.loads(_read_frame())
        try:
            answer = ["ok", table.answer(*asked)]
        except BaseException as error:
            answer = ["raise", [kind.__name__ for kind in type(error).__mro__], _say(error)]
        _send(answer)


def _exchange(message: list) -> Any:
    _send(message)
    return plain.loads(_read_frame())


def _function(namespace: _Namespace, name: str):
    """The function or class of that name, or else the method of a new `Solution`."""
    if name in namespace:
        return namespace[name]
    solution = namespace.get("Solution")
    if solution is not None and hasattr(solution, name):
        return getattr(solution(), name)
    raise NameError(f"the program defines no {name}")


def _say(error: BaseException) -> str:
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
            os._exit(0)  # nobody is asking any more
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
