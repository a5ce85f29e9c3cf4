"""Declarations in the code as text: file and line of an object, and type, default and comment of a field."""

import ast
import dataclasses
import functools
import inspect
import io
import textwrap
import tokenize
import types
import typing
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt

from marl_jax.packaged import HOME

_LIMITS = {Ge: "at least {}", Gt: "more than {}", Le: "at most {}", Lt: "less than {}"}


def place(thing: Any) -> str:
    """The file of a module, or file and line of a function; the path begins with the package."""
    file = Path(inspect.getsourcefile(thing) or "").relative_to(HOME.parent).as_posix()
    return file if inspect.ismodule(thing) else f"{file}:{inspect.getsourcelines(thing)[1]}"


def default_of(field: Any) -> str:
    """The default of a field, as the command line writes it."""
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return "required"
    return {"None": "none", "True": "true", "False": "false"}.get(str(value), str(value) or "-")


def typed(hint: Any, bounds: Any) -> str:
    """The type of a field and the bounds of its annotation."""
    limits = [
        _LIMITS[type(bound)].format(*dataclasses.astuple(bound)) for bound in bounds if type(bound) in _LIMITS
    ]
    return ", ".join([_type(hint), *limits])


def _type(hint: Any) -> str:
    options = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(map(_type, options))
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(str, options))
    name = (
        "none"
        if hint is type(None)
        else hint.__name__
        if isinstance(hint, type) and not options
        else str(hint)
    )
    return name.replace("typing.", "").replace("collections.abc.", "")


def declared(cls: Any, name: str) -> tuple[str, str]:
    """(file and line of a field, the comment next to or above it), in the class that declares the field."""
    for owner in cls.__mro__:
        fields = _fields_of(owner) if "__dataclass_fields__" in vars(owner) else {}
        if name in fields:
            return fields[name]
    return "", ""


@functools.cache
def _fields_of(cls: type) -> dict[str, tuple[str, str]]:
    """{field: (file and line, comment)} for the fields that a class declares itself."""
    source, first = inspect.getsourcelines(cls)
    file = Path(inspect.getsourcefile(cls) or "").relative_to(HOME.parent).as_posix()
    text = textwrap.dedent("".join(source))
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    (body,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    fields = {}
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            inline = [
                comments[line] for line in range(node.lineno, (node.end_lineno or 0) + 1) if line in comments
            ]
            above: list[str] = []
            line = node.lineno - 1
            while line in comments and text.split("\n")[line - 1].lstrip().startswith("#"):
                above.insert(0, comments[line])
                line -= 1
            fields[node.target.id] = (f"{file}:{first + node.lineno - 1}", " ".join([*above, *inline]))
    return fields
