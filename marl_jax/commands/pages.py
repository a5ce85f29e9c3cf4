"""The documentation in a terminal: the pages, and the reference from docstrings and comments at fields.

name ──► a page of docs/, its `::: MODULE` lines filled in
     ├─► a file of examples/, unchanged
     └─► an object of the library: its docstring, and every field with its comment
"""

import ast
import dataclasses
import functools
import inspect
import io
import json
import pydoc
import re
import textwrap
import tokenize
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.typing
import numpy.typing
from annotated_types import Ge, Gt, Le, Lt

from marl_jax.errors import UserError
from marl_jax.fields import nearest
from marl_jax.packaged import HOME, packaged
from marl_jax.terminal.tables import filled

TOP = ("README", "BUILD_NOTES")  # pages next to docs/
EXAMPLES = "examples"
_LIMITS = {Ge: "at least {}", Gt: "more than {}", Le: "at most {}", Lt: "less than {}"}


def pages() -> dict[str, Path]:
    """{name: file}: the README first, then pages by name, then the reference, and BUILD_NOTES last."""
    home = packaged("docs")
    inside = {
        path.relative_to(home / "docs").with_suffix("").as_posix(): path for path in home.glob("docs/**/*.md")
    }
    names = sorted(inside, key=lambda name: ("/" in name, name))
    return {
        TOP[0]: home / "README.md",
        **{name: inside[name] for name in names},
        TOP[1]: home / "BUILD_NOTES.md",
    }


def examples() -> dict[str, Path]:
    """{name: file} of the examples; files of the project that `marl-jax new` copies come last."""
    home = packaged("docs")
    files = (path for kind in ("py", "ipynb", "md") for path in home.glob(f"{EXAMPLES}/**/*.{kind}"))
    names = {path.relative_to(home).as_posix(): path for path in files}
    return {name: names[name] for name in sorted(names, key=lambda name: (name.count("/"), name))}


def page(name: str) -> str:
    """The page or example of that name, or the reference of `workflows.Call` or another object, as Markdown."""
    files, programs = pages(), examples()
    if name.rstrip("/") == EXAMPLES:
        lines = [
            filled(f"- `{program}`: {first_words(file)}", subsequent_indent="  ")
            for program, file in programs.items()
        ]
        return "\n".join([*lines, "", f"`marl-jax docs {next(iter(programs))} > mine.py` copies one.", ""])
    if program := programs.get(name) or programs.get(f"{name}.py"):
        return program.read_text(encoding="utf-8")
    name = name.removeprefix("docs/").removesuffix(".md")
    if name in files:
        text = files[name].read_text(encoding="utf-8")
        return re.sub(r"^::: (\S+)$", lambda line: reference(line[1]), text, flags=re.MULTILINE)
    if "." in name or name == "marl_jax":
        return reference(name)
    near = nearest(name, [*files, EXAMPLES, *programs])
    raise UserError(f"there is no page or object '{name}' (objects are named as workflows.Call is){near}")


def first_words(file: Path) -> str:
    """The title of a page or notebook, the first line of a program's docstring."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        text = "".join(json.loads(text)["cells"][0]["source"])
    elif file.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    return text.partition("\n")[0].lstrip("# ")


def reference(name: str) -> str:
    """The reference of a module, class or function, as Markdown."""
    full = name if name.startswith("marl_jax") else f"marl_jax.{name}"
    try:
        thing = pydoc.locate(full)
    except pydoc.ErrorDuringImport as error:  # it needs an extra that is not installed
        thing, name = None, f"{name} ({error.value})"
    if thing is None:
        raise UserError(f"the library has no '{name}': give a page, or an object such as workflows.Call")
    return "\n".join(_described(thing, full)).rstrip() + "\n"


# ---------------------------------------------------------------- details


def _described(thing: Any, name: str) -> Iterator[str]:
    if isinstance(thing, types.ModuleType):
        yield from (f"## {name}", "", inspect.getdoc(thing) or "", "")
        defined = [
            key
            for key, member in vars(thing).items()
            if getattr(getattr(member, "fn", member), "__module__", "") == thing.__name__
        ]
        for key in getattr(thing, "__all__", [key for key in defined if not key.startswith("_")]):
            member = getattr(thing, key)
            if callable(member) and not isinstance(member, types.GenericAlias):
                yield from _described(member, key)
        return
    function = getattr(thing, "fn", thing)  # a workflow has its function as `fn`
    signature = _signature(function) if inspect.isfunction(function) else ""
    yield from (f"### {name.rpartition('.')[2]}{signature}", "", inspect.getdoc(function) or "", "")
    if inspect.isclass(thing):
        yield from _parts(thing)


def _parts(cls: Any) -> Iterator[str]:
    """A list item for each field of a dataclass and each method of a class."""
    lines: list[str] = []
    if dataclasses.is_dataclass(cls):
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            facts = f"{typed(hints[field.name], ())}; {default_of(field)}"
            lines.append(_item(f"`{field.name}` ({facts})", declared(cls, field.name)[1]))
    for name, member in vars(cls).items():
        method = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(method) and method.__doc__:
            heading = name if isinstance(member, property) else f"{name}{_signature(method)}"
            lines.append(_item(f"`{heading}`", inspect.getdoc(method) or ""))
    yield from (*lines, "")


def _item(name: str, words: str) -> str:
    text = " ".join(words.split())
    return textwrap.fill(f"- {name}: {text}", 120, subsequent_indent="  ", break_long_words=False)


def _signature(function: Callable[..., Any]) -> str:
    text = _plain(str(inspect.signature(function)))
    for union in (numpy.typing.ArrayLike, jax.typing.ArrayLike):  # printed with all of their members
        for optional in ("", " | None"):
            annotation = union | None if optional else union
            text = text.replace(inspect.formatannotation(annotation), f"ArrayLike{optional}")
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", text)


def _plain(text: str) -> str:
    """Values by their names alone: `<module 'jax.numpy' from ...>` is jax.numpy, `<function f at 0x7f...>` is f."""
    return re.sub(r"<(?:class|module|(?:built-in )?function) '?((?:<lambda>|[\w.])+)[^>]*>", r"\1", text)


# ---------------------------------------------------------------- declarations in the code


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
    return {"None": "none", "True": "true", "False": "false"}.get(str(value), _plain(str(value)) or "-")


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
    if hint is type(None):
        return "none"
    name = hint.__name__ if isinstance(hint, type) and not options else str(hint)
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
