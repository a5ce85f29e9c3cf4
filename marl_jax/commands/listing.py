"""Lists of workflows, tasks, rewards, cells and fields, from their declarations: name, a line, place in the code."""

import dataclasses
import inspect
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from marl_jax import fields
from marl_jax.commands import pages
from marl_jax.commands.pages import declared, default_of, place, typed
from marl_jax.config.cells import of_study
from marl_jax.config.run_config import RunConfig, cells_of, load_config
from marl_jax.errors import UserError
from marl_jax.packaged import config_names
from marl_jax.policies import policy_names
from marl_jax.pretraining.taught import untaught_warning
from marl_jax.rewards import credit
from marl_jax.runs.loading.parts import read_prompts
from marl_jax.tasks import datasets, micro
from marl_jax.terminal.tables import filled
from marl_jax.workflows import BUILT_IN, Workflow

NAME = 24  # width of the column of names


class Entry(NamedTuple):
    """An entry of a list: its name, description and place in the code."""

    name: str
    what: str
    where: str


def listing(kind: str = "", word: str = "") -> str:
    """The list of a kind, for a terminal; with a word, only entries that contain it; without a kind, the kinds."""
    if not kind:
        return "\n".join(f"marl-jax list {name:<10}  {kind.about}" for name, kind in KINDS.items())
    if kind not in KINDS:
        raise UserError(f"there is nothing to list under '{kind}'{fields.nearest(kind, KINDS)}")
    if kind == "cells" and not word:
        return "\n".join(_shown(entry, True) for entry in _families())
    hits = [entry for entry in KINDS[kind].entries() if word in " ".join(entry)]
    if not hits:
        raise UserError(f"no entry of '{kind}' contains '{word}': leave the word out to see all")
    lines, where = [], None
    for entry in hits:
        if kind == "cells" and entry.where != where:  # many cells share a file, which is printed once
            where = entry.where
            lines.append(f"{where}:")
        lines.append(_shown(entry, where is None))
    return "\n".join(lines)


def _shown(entry: Entry, placed: bool) -> str:
    text = f"{entry.what} [{entry.where}]" if placed and entry.where else entry.what
    indent = " " * NAME
    if len(entry.name) < NAME:
        return filled(text, initial_indent=f"{entry.name:<{NAME}}", subsequent_indent=indent) or entry.name
    return f"{entry.name}\n{filled(text, initial_indent=indent, subsequent_indent=indent)}"


# ---------------------------------------------------------------- kinds


def _workflows() -> Iterator[Entry]:
    for name, flow in BUILT_IN.items():
        settings = ", ".join(f"{key}={value}" for key, value in flow.settings.items() if not callable(value))
        facts = [f"for {' and '.join(flow.families)}", f"roles {', '.join(flow.roles)}"]
        facts += [f"settings {settings}"] * bool(settings)
        yield Entry(name, f"{_title(flow)} ({'; '.join(facts)})", place(flow.fn))


def _tasks() -> Iterator[Entry]:
    for name, module in micro.KINDS.items():
        levels = f"levels {', '.join(map(str, module.LEVELS))}"
        yield Entry(name, f"{_first(module)} ({levels})", place(module))
    for name, source in datasets.SOURCES.items():
        where = next((places[0] for places in source.urls.values()), "data.directory")
        yield Entry(name, f"{source.what} (for {source.family or 'math or code'})", where)


def _rewards() -> Iterator[Entry]:
    for name, function in credit.NAMED.items():
        yield Entry(name, _first(function), place(function))
    for name, part in (("format_penalty", credit.format_penalty), ("length_penalty", credit.length_penalty)):
        yield Entry(name, f"{_first(part)} Added to any of the others: --config.rewards.{name}", place(part))


def _cells() -> Iterator[Entry]:
    for file in config_names():
        for cell in cells_of(file):
            yield Entry(f"{file}:{cell}", _cell(file, cell), f"configs/{file}.py")


def _families() -> Iterator[Entry]:
    """For each file with cells, the parts of their names; a line for each cell would be hundreds."""
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
    text = f"{count} polic{'y' if count == 1 else 'ies'} from {config.policies.base}, on {config.data.name}"
    notes = ["" if of_study(cell) else "not of the study", untaught_warning(config, read_prompts(config))]
    return "; ".join(filter(None, [text, *notes]))


def _fields(cls: Any = RunConfig, prefix: str = "") -> Iterator[Entry]:
    """The fields of a dataclass, and those of dataclasses nested in it."""
    hints, bounded = fields.annotations(cls), typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        name, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _fields(hint, f"{name}.")
            continue
        line, comment = declared(cls, field.name)
        bounds = getattr(bounded[field.name], "__metadata__", ())
        default = default_of(field)
        facts = [typed(hint, bounds), default if default == "required" else f"default {default}"]
        yield Entry(name, "; ".join(filter(None, [comment, *facts])), line)


def _docs() -> Iterator[Entry]:
    for name, file in pages.pages().items():
        yield Entry(name, pages.first_words(file), "")


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
    "docs": Kind("what there is to read: marl-jax docs PAGE", _docs),
}


def _title(flow: Workflow) -> str:
    """The first line of the docstring of its module; of its function, if the module has several workflows."""
    module = sys.modules[flow.fn.__module__]
    several = sum(other.fn.__module__ == flow.fn.__module__ for other in BUILT_IN.values()) > 1
    return _first(flow.fn if several else module)


def _first(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]
