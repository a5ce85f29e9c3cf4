"""What there is, from its own declarations: each by its name, with one line of what it is, and where it stands."""

import ast
import dataclasses
import functools
import inspect
import io
import sys
import textwrap
import tokenize
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from annotated_types import Ge, Gt, Le, Lt

from marl_jax import fields
from marl_jax.config.cells import of_study
from marl_jax.config.run_config import ConfigError, RunConfig, cells_of, load_config
from marl_jax.packaged import HOME, config_names
from marl_jax.policies import policy_names
from marl_jax.pretraining.taught import warning_of
from marl_jax.rewards import credit
from marl_jax.runs.parts import words
from marl_jax.tasks import datasets, micro
from marl_jax.workflows import BUILT_IN, Workflow

__all__ = ["KINDS", "Entry", "Kind", "listing"]

WIDTH, NAME = 80, 24
_LIMITS = {Ge: "at least {}", Gt: "more than {}", Le: "at most {}", Lt: "less than {}"}


class Entry(NamedTuple):
    """A line of the list."""

    name: str
    what: str
    where: str


def listing(kind: str = "", word: str = "") -> str:
    """The list of a kind, for a terminal; with a word, the entries that hold it; without a kind, what there is."""
    if not kind:
        return "\n".join(f"marl-jax list {name:<10}  {kind.about}" for name, kind in KINDS.items())
    if kind not in KINDS:
        raise ConfigError([f"what to list is '{kind}'{fields.nearest(kind, KINDS)}"])
    if kind == "cells" and not word:
        return "\n".join(line for entry in _families() for line in _shown(entry, True))
    found = [entry for entry in KINDS[kind].entries() if word in " ".join(entry)]
    if not found:
        raise ConfigError([f"no entry of '{kind}' holds '{word}': leave the word out to see all"])
    lines, where = [], None
    for entry in found:
        if kind == "cells" and entry.where != where:  # many of one file
            where = entry.where
            lines.append(f"{where}:")
        lines += _shown(entry, where is None)
    return "\n".join(lines)


def _shown(entry: Entry, placed: bool) -> list[str]:
    text = f"{entry.what} [{entry.where}]" if placed else entry.what
    body = textwrap.wrap(text, WIDTH - NAME, break_long_words=False, break_on_hyphens=False) or [""]
    head = (
        [f"{entry.name:<{NAME}}{body[0]}"] if len(entry.name) < NAME else [entry.name, " " * NAME + body[0]]
    )
    return [line.rstrip() for line in (*head, *(" " * NAME + line for line in body[1:]))]


# ---------------------------------------------------------------- kinds


def _workflows() -> Iterator[Entry]:
    for name, flow in BUILT_IN.items():
        settings = ", ".join(f"{key}={value}" for key, value in flow.settings.items() if not callable(value))
        facts = [f"for {' and '.join(flow.families)}", f"roles {', '.join(flow.roles)}"]
        facts += [f"settings {settings}"] * bool(settings)
        yield Entry(name, f"{_title(flow)} ({'; '.join(facts)})", _place(flow.fn))


def _tasks() -> Iterator[Entry]:
    for name, module in micro.KINDS.items():
        levels = f"levels {', '.join(map(str, module.LEVELS))}"
        yield Entry(name, f"{_first(module)} ({levels})", _place(module))
    for name, source in datasets.SOURCES.items():
        where = next((places[0] for places in source.urls.values()), "data.directory")
        yield Entry(name, f"{source.what} (for {source.family or 'math or code'})", where)


def _rewards() -> Iterator[Entry]:
    for name, function in {**credit.NAMED, "team_and_local": credit.team_and_local}.items():
        yield Entry(name, _first(function), _place(function))
    for name, part in (("format_penalty", credit.format_penalty), ("length_penalty", credit.length_penalty)):
        yield Entry(name, f"{_first(part)} Added to any of the others: --config.rewards.{name}", _place(part))


def _cells() -> Iterator[Entry]:
    for file in config_names():
        for cell in cells_of(file):
            yield Entry(f"{file}:{cell}", _cell(file, cell), f"configs/{file}.py")


def _families() -> Iterator[Entry]:
    """Of each file with cells, their names by parts; a line for each cell would be hundreds."""
    for file in config_names():
        parts = [list(dict.fromkeys(column)) for column in zip(*(cell.split("-") for cell in cells_of(file)))]
        flows, policies, scales, tasks = map(", ".join, parts)
        what = (
            f"WORKFLOW-POLICY-SCALE-TASK; workflow {flows}; policy {policies}; scale {scales}; task {tasks}."
        )
        more = f"Such as --config={file}:{cells_of(file)[0]}. All: marl-jax list cells {file}"
        yield Entry(f"{file}:CELL", f"{what} {more}", f"configs/{file}.py")


def _cell(file: str, cell: str) -> str:
    config = load_config(f"{file}:{cell}")
    count = len(policy_names(config.policies.map))
    said = f"{count} polic{'y' if count == 1 else 'ies'} from {config.policies.base}, on {config.data.name}"
    notes = ["" if of_study(cell) else "not of the study", warning_of(config, words(config))]
    return "; ".join(filter(None, [said, *notes]))


def _fields() -> Iterator[Entry]:
    return _of_class(RunConfig, "")


def _of_class(cls: Any, prefix: str) -> Iterator[Entry]:
    """The fields of a dataclass, and of those that are its fields."""
    hints, bounded = fields.annotations(cls), typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        name, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _of_class(hint, f"{name}.")
            continue
        line, comment = _declared(cls, field.name)
        bounds = getattr(bounded[field.name], "__metadata__", ())
        facts = [_typed(hint, bounds), f"default {_default(field)}"]
        yield Entry(name, "; ".join(filter(None, [comment, *facts])), line)


class Kind(NamedTuple):
    """Something that can be listed."""

    about: str
    entries: Callable[[], Iterator[Entry]]


KINDS = {
    "workflows": Kind("who talks to whom: --config.workflow.name", _workflows),
    "tasks": Kind("data sets: --config.data.name", _tasks),
    "rewards": Kind("what a call can earn: --config.rewards.name", _rewards),
    "cells": Kind("configurations to begin with: --config", _cells),
    "fields": Kind("what can be set: --config.FIELD=VALUE", _fields),
}


# ---------------------------------------------------------------- declarations


def _title(flow: Workflow) -> str:
    """The first line of its module, or of its function where a module holds several."""
    module = sys.modules[flow.fn.__module__]
    several = sum(each.fn.__module__ == flow.fn.__module__ for each in BUILT_IN.values()) > 1
    return _first(flow.fn if several else module)


def _first(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def _place(thing: Any) -> str:
    """The file of a module, or file and line of a function, from the package on."""
    file = Path(inspect.getsourcefile(thing) or "").relative_to(HOME.parent).as_posix()
    return file if inspect.ismodule(thing) else f"{file}:{inspect.getsourcelines(thing)[1]}"


def _default(field: Any) -> str:
    made = field.default
    if field.default_factory is not dataclasses.MISSING:
        made = field.default_factory()
    if made is dataclasses.MISSING:
        return "required"
    return {"None": "none", "True": "true", "False": "false"}.get(str(made), str(made) or "-")


def _typed(hint: Any, bounds: Any) -> str:
    """What may stand there: a type, and the bounds of its annotation."""
    said = [
        _LIMITS[type(bound)].format(*dataclasses.astuple(bound)) for bound in bounds if type(bound) in _LIMITS
    ]
    return ", ".join([_type(hint), *said])


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


def _declared(cls: Any, name: str) -> tuple[str, str]:
    """(file and line of a field, the comment beside or above it); of an inherited one where it is declared."""
    for owner in cls.__mro__:
        found = _fields_of(owner) if "__dataclass_fields__" in vars(owner) else {}
        if name in found:
            return found[name]
    return "", ""


@functools.cache
def _fields_of(cls: type) -> dict[str, tuple[str, str]]:
    """{field: (file and line, comment)} of those that a class declares itself."""
    source, first = inspect.getsourcelines(cls)
    file = Path(inspect.getsourcefile(cls) or "").relative_to(HOME.parent).as_posix()
    text = textwrap.dedent("".join(source))
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    (body,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    found = {}
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            beside = [
                comments[line] for line in range(node.lineno, (node.end_lineno or 0) + 1) if line in comments
            ]
            above: list[str] = []
            line = node.lineno - 1
            while line in comments and text.split("\n")[line - 1].lstrip().startswith("#"):
                above.insert(0, comments[line])
                line -= 1
            found[node.target.id] = (f"{file}:{first + node.lineno - 1}", " ".join([*above, *beside]))
    return found
