"""User code named in a config as `module:attribute`: workflows, rewards, estimators, losses and data sets."""

import functools
import hashlib
import importlib
import inspect
import os
import traceback
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from marl_jax.errors import UserError

_LIBRARY = str(Path(__file__).parent) + os.sep


class OwnError(UserError, ValueError):
    """User code raised, or returned something that cannot be used; the text is one line."""


def is_own(name: str) -> bool:
    """Whether a name has the form `module:attribute`, not that of a built-in."""
    return isinstance(name, str) and ":" in name


def load_own(name: str, what: str) -> Any:
    """Import the attribute, or raise a ValueError in one line; `what` is the kind of object, for the message."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        hint = "; give a module, not a file: 'package.module:name'" if "/" in name or ".py:" in name else ""
        reason = error if isinstance(error, ImportError | ValueError) else _import_error_line(error)
        raise ValueError(f"{what} '{name}': cannot import module '{module_name}': {reason}{hint}") from error
    if not hasattr(module, attribute):
        raise ValueError(f"{what} '{name}': module '{module_name}' has no '{attribute}'")
    return getattr(module, attribute)


def own_function(name: str, what: str) -> Callable[..., Any]:
    """Import the function; an object that is not callable is refused."""
    function = load_own(name, what)
    if not callable(function):
        raise ValueError(f"{what} '{name}' is a {type(function).__name__}, not a function")
    return function


def as_static(name: str | None, what: str) -> Callable[..., Any] | None:
    """The user's function as a static argument of `jit`: if its name comes to mean another function, jit recompiles.

    None for a built-in, and for a function without a hash, of which the version compiled first stays in use.
    """
    function = own_function(name, what) if name is not None and is_own(name) else None
    return function if isinstance(function, Hashable) else None


def digest_own(name: str) -> str:
    """A digest of the module's source file: it changes when the user's code does."""
    module = importlib.import_module(name.partition(":")[0])
    try:
        source = inspect.getsourcefile(module)
        return hashlib.sha256(Path(source).read_bytes() if source else b"").hexdigest()
    except (OSError, TypeError):  # code from a notebook or standard input
        raise OwnError(
            f"'{name}' has no source file that can be read, and a run records a digest of it: put it into a file, such "
            "as mine.py, and give its name there, such as mine:function"
        ) from None


def call_user_function(function: Callable[..., Any], who: str, *args: Any) -> Any:
    """Call a user's function; an error in it becomes an `OwnError`: one line with the error and its place."""
    try:
        return function(*args)
    except (Exception, SystemExit) as error:
        raise OwnError(f"{who} raised {error_line(error, file_of(function))}") from error


def in_words(value: Any, most: int = 60) -> str:
    """What user code returned, in one line: an array by its shape and type, anything else by its text."""
    if getattr(value, "ndim", 0):
        return f"an array {list(value.shape)} of {value.dtype}"
    return " ".join(repr(value).split())[:most]


def error_text(error: BaseException) -> str:
    """An exception as it is recorded: its type and text, or only the type if its `str` raises."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except BaseException:
        return name


def error_line(error: BaseException, home: str | None = None) -> str:
    """An exception of user code in one line, with its place: the last frame in `home`, else the user's last."""
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [frame for frame in frames if not frame.filename.startswith(_LIBRARY)]
    last = [frame for frame in frames if frame.filename == home][-1:] or of_user[-1:]
    where = f" (in {last[0].name}, line {last[0].lineno})" if last else ""
    return " ".join(error_text(error).split()) + where


def without_partial(function: Any) -> Any:
    """The function inside of `functools.partial`, also of several nested ones."""
    return without_partial(function.func) if isinstance(function, functools.partial) else function


def file_of(function: Callable[..., Any]) -> str | None:
    """The file that defines a function; None if it is unknown."""
    code = getattr(inspect.unwrap(without_partial(function)), "__code__", None)
    return None if code is None else code.co_filename


def _import_error_line(error: BaseException) -> str:
    """An exception raised by an import, in one line; the text of a SyntaxError already contains the place."""
    return " ".join(error_text(error).split()) if isinstance(error, SyntaxError) else error_line(error)
