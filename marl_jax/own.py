"""A user's own code, named in a config as `module:attribute`: a workflow, reward, estimator, loss or data set."""

import hashlib
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any


def is_own(name: str) -> bool:
    """Whether a name is of this form, not that of something built in."""
    return ":" in name


def load_own(name: str, what: str) -> Any:
    """The attribute; what cannot be found is a ValueError of one line that says `what` it was to be."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        near = "; give a module, not a file: 'package.module:name'" if "/" in name or ".py:" in name else ""
        raise ValueError(f"{what} '{name}': cannot import module '{module_name}': {error}{near}") from error
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
