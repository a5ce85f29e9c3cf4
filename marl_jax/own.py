"""A user's own code, named in a config as `module:attribute`: a workflow, reward, estimator, loss or data set."""

import hashlib
import importlib
import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["called", "digest_own", "home_of", "is_own", "load_own", "own_function", "say", "told"]


def is_own(name: str) -> bool:
    """Whether a name is of this form, not that of something built in."""
    return ":" in name


def load_own(name: str, what: str) -> Any:
    """The attribute; what cannot be found is a ValueError of one line that says `what` it was to be."""
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
    """The function of that name; what cannot be called is refused."""
    found = load_own(name, what)
    if not callable(found):
        raise ValueError(f"{what} '{name}' is a {type(found).__name__}, not a function")
    return found


def digest_own(name: str) -> str:
    """Of the file that the module was read from: changes when the user's code does."""
    source = inspect.getsourcefile(importlib.import_module(name.partition(":")[0]))
    return hashlib.sha256(Path(source).read_bytes() if source else b"").hexdigest()


def called(function: Callable[..., Any], who: str, refusal: type[Exception], *args: Any) -> Any:
    """What a user's function returns; whatever it raises is one line that names it and the place in its file."""
    try:
        return function(*args)
    except (Exception, SystemExit) as error:
        raise refusal(f"{who} raised {told(error, home_of(function))}") from error


def say(error: BaseException) -> str:
    """An exception as records put it: its type and its text; the type alone where asking for the text raises."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except BaseException:
        return name


def told(error: BaseException, home: str | None = None) -> str:
    """What a user's code raised, in one line, and where: the last place in the file `home`, else the last of all."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = [frame for frame in frames if frame.filename == home][-1:] or frames[-1:]
    where = f" (in {frame[0].name}, line {frame[0].lineno})" if frame else ""
    return " ".join(say(error).split()) + where


def _at_import(error: BaseException) -> str:
    """What a module raised; where a file cannot be parsed, the text says the place."""
    return " ".join(say(error).split()) if isinstance(error, SyntaxError) else told(error)


def home_of(function: Callable[..., Any]) -> str | None:
    """The file that a function is written in; None where that cannot be said."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else code.co_filename
