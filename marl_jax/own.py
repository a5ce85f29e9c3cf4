"""User code named in a config as `module:attribute`: workflows, rewards, estimators, losses and data sets."""

import functools
import hashlib
import importlib
import inspect
import traceback
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from marl_jax.errors import UserError


class OwnError(UserError, ValueError):
    """What user code gives cannot be used: it raised, or returned something else; the text is one line."""


def is_own(name: str) -> bool:
    """Whether a name has the form `module:attribute`, not that of a built-in."""
    return isinstance(name, str) and ":" in name


def load_own(name: str, what: str) -> Any:
    """The attribute of that name, or a ValueError in one line; `what` is the kind of object, for the message."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        near = "; give a module, not a file: 'package.module:name'" if "/" in name or ".py:" in name else ""
        reason = error if isinstance(error, ImportError | ValueError) else _at_import(error)
        raise ValueError(f"{what} '{name}': cannot import module '{module_name}': {reason}{near}") from error
    if not hasattr(module, attribute):
        raise ValueError(f"{what} '{name}': module '{module_name}' has no '{attribute}'")
    return getattr(module, attribute)


def own_function(name: str, what: str) -> Callable[..., Any]:
    """The function of that name; other objects are refused."""
    function = load_own(name, what)
    if not callable(function):
        raise ValueError(f"{what} '{name}' is a {type(function).__name__}, not a function")
    return function


def as_static(name: str | None, what: str) -> Callable[..., Any] | None:
    """The function as a static argument of a program: another function under its name is another program.

    None for one that has no hash: there, the first that was compiled stays.
    """
    function = own_function(name, what) if name is not None and is_own(name) else None
    return function if isinstance(function, Hashable) else None


def digest_own(name: str) -> str:
    """A digest of the module's source file: it changes when the user's code does."""
    module = importlib.import_module(name.partition(":")[0])
    try:
        source = inspect.getsourcefile(module)
        return hashlib.sha256(Path(source).read_bytes() if source else b"").hexdigest()
    except (OSError, TypeError):  # of a notebook, or of standard input
        raise OwnError(
            f"'{name}' is in no file that can be read, and a run keeps a digest of it: write it into a file, such as "
            "mine.py, and name that, such as mine:function"
        ) from None


def called(function: Callable[..., Any], who: str, *args: Any) -> Any:
    """Call a user's function; its errors become an `OwnError` of one line with the error and its place in the file."""
    try:
        return function(*args)
    except (Exception, SystemExit) as error:
        raise OwnError(f"{who} raised {told(error, home_of(function))}") from error


def say(error: BaseException) -> str:
    """An exception as records hold it: its type and text, or the type alone where `str` of it raises."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except BaseException:
        return name


def told(error: BaseException, home: str | None = None) -> str:
    """An exception of user code in one line, with its place: the last frame in the file `home`, else the last one."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = [frame for frame in frames if frame.filename == home][-1:] or frames[-1:]
    where = f" (in {frame[0].name}, line {frame[0].lineno})" if frame else ""
    return " ".join(say(error).split()) + where


def _at_import(error: BaseException) -> str:
    """The exception of an import in one line; the text of a SyntaxError already holds the place."""
    return " ".join(say(error).split()) if isinstance(error, SyntaxError) else told(error)


def without_partial(function: Any) -> Any:
    """The function whose code runs, behind `functools.partial`."""
    return without_partial(function.func) if isinstance(function, functools.partial) else function


def home_of(function: Callable[..., Any]) -> str | None:
    """The file that a function is written in; None where it is unknown."""
    code = getattr(inspect.unwrap(without_partial(function)), "__code__", None)
    return None if code is None else code.co_filename
