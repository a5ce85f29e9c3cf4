"""The configuration of a run: frozen dataclasses, from a config file's cell and typed overrides.

    --config=configs/micro.py:voting-isolated-s-math --config.sampling.temperature=0.7 --config.steps=50
    --config=micro:voting-isolated-s-math       the packaged file of that name, if no other has this path

All mistakes are reported together, before anything is compiled. The run gets the configuration as one object, and
takes it apart; `to_json` writes it, and `from_json` reads back an equal one.
"""

import contextlib
import copy
import dataclasses
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from marl_jax import fields
from marl_jax.config import config_checks
from marl_jax.config.phase_fields import Phase
from marl_jax.config.run_fields import (
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    LogConfig,
    MeshConfig,
    PoliciesConfig,
    RolloutConfig,
    RunFields,
    VllmConfig,
    WorkflowConfig,
)
from marl_jax.errors import UserError
from marl_jax.own import error_line, file_of
from marl_jax.packaged import config_file, config_names

# The groups of fields are exported again, for config files.
__all__ = [
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "EngineConfig",
    "EvaluationConfig",
    "LogConfig",
    "MeshConfig",
    "Phase",
    "PoliciesConfig",
    "RolloutConfig",
    "RunConfig",
    "VllmConfig",
    "WorkflowConfig",
    "cells_of",
    "config_module",
    "from_argv",
    "load_base",
    "load_config",
    "load_file",
    "sets_of",
    "split_argv",
    "upgraded",
]

SCHEMA = 1  # changes when a field changes its meaning; a new field's default keeps the former behaviour
T = TypeVar("T")


class ConfigError(UserError, ValueError):
    """The mistakes in a configuration, one line each."""

    def __init__(self, problems: Sequence[str]):
        self.problems = list(problems)
        super().__init__("the configuration cannot be used:\n" + "\n".join(f"  {line}" for line in problems))


@dataclasses.dataclass(frozen=True)
class RunConfig(RunFields):
    """All settings of a run. Impossible ones are refused when it is built, with all reasons; wrong types come alone."""

    def __post_init__(self) -> None:
        values, misfits = fields.fit(self)
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if problems := misfits or config_checks.problems(self):
            raise ConfigError(problems)

    def to_json(self) -> dict[str, Any]:
        """As JSON, with the number of the schema."""
        return {"schema": SCHEMA, **fields.to_json(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "RunConfig":
        """The configuration that `to_json` wrote; another schema is refused."""
        if value.get("schema") != SCHEMA:
            raise ValueError(
                f"the configuration has schema {value.get('schema')!r}, this version reads {SCHEMA}"
            )
        return fields.from_json(cls, {name: entry for name, entry in value.items() if name != "schema"})


def upgraded(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The JSON of a configuration, brought from an earlier version of the same schema to this one."""
    if value.get("schema") != SCHEMA:
        return value
    value = copy.deepcopy(dict(value))
    with contextlib.suppress(KeyError, TypeError):  # such as a damaged group, which is refused later
        del value["learner"]["interventions"]["mixing"]["clip_roles"]  # which other fields made redundant
    return fields.with_defaults(RunConfig, value)


# ---------------------------------------------------------------- from the command line


def from_argv(argv: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """(the configuration from --config and --config.* of a command line, the other arguments for absl)."""
    spec, texts, rest = split_argv(argv)
    if spec is None:
        raise ConfigError(["--config is missing: give --config=FILE:CELL"])
    return load_config(spec, texts), rest


def split_argv(argv: Sequence[str]) -> tuple[str | None, list[tuple[str, str | None]], list[str]]:
    """(value of --config, [(path, text)] of --config.*, all other arguments)."""
    spec: str | None = None
    texts: list[tuple[str, str | None]] = []
    rest, queue = [], list(argv)
    while queue:
        argument = queue.pop(0)
        flag, equals, text = argument.partition("=")
        name = flag.lstrip("-")
        if argument == "--" or not flag.startswith("-") or name.split(".")[0] != "config":
            rest.append(argument)
            if argument == "--":
                return spec, texts, rest + queue
            continue
        value = text if equals else queue.pop(0) if queue and not queue[0].startswith("--") else None
        if name == "config":
            spec = value
        else:
            texts.append((name.removeprefix("config."), value))
    return spec, texts, rest


def load_config(spec: str, texts: Sequence[tuple[str, str | None]] = ()) -> RunConfig:
    """The configuration FILE:CELL, with fields set from texts. One error reports all mistakes in the texts."""
    base = load_base(spec, "get_config", RunConfig, texts)
    config, problems = fields.change(base, texts)
    problems = [*problems, *config_checks.without_effect(config, [name for name, _ in texts])]
    if problems:
        raise ConfigError(problems)
    return config


def load_base(spec: str, entry: str, cls: type[T], texts: Sequence[tuple[str, str | None]] = ()) -> T:
    """The result of the function `entry` of FILE for the name after the colon.

    If it refuses the name, mistakes in single texts are reported as well.
    """
    make, name = load_file(spec, entry)
    try:
        base = make(name)
    except ValueError as error:
        reasons = getattr(error, "problems", [str(error)])
        raise ConfigError([*reasons, *fields.read_texts(cls, texts)[1]]) from None
    except Exception as error:
        raise ConfigError(
            [f"--config={spec}: {entry}({name!r}) raised {error_line(error, file_of(make))}"]
        ) from None
    if not isinstance(base, cls):
        raise ConfigError(
            [f"--config={spec}: {entry} gives a {type(base).__name__}: return a {cls.__name__}"]
        )
    return base


def load_file(spec: str, entry: str = "get_config") -> tuple[Callable[[str], Any], str]:
    """(the function `entry` of FILE, the name after the colon)."""
    module, file, cell = _load_module(spec)
    make = getattr(module, entry, None)
    if make is None or not _takes_a_name(make):
        raise ConfigError([f"--config={spec}: '{file}' defines no {entry}(name)"])
    return make, cell


def cells_of(spec: str) -> list[str]:
    """The names of cells in FILE's `CELLS`, valid as names of folders; none if it has no such list."""
    module, file, _ = _load_module(spec)
    return _cells(module, file, spec)


def _cells(module: ModuleType, file: str, spec: str) -> list[str]:
    names = list(getattr(module, "CELLS", ()))
    if isinstance(getattr(module, "CELLS", ()), str) or not all(map(_is_cell, names)):
        raise ConfigError([f"--config={spec}: CELLS of '{file}' must be a list of names without '/'"])
    return names


def sets_of(spec: str) -> dict[str, list[str]]:
    """{name of a set: its cells}, from FILE's `SETS`; a matrix runs the first by default."""
    module, file, _ = _load_module(spec)
    sets = {name: list(cells) for name, cells in getattr(module, "SETS", {}).items()}
    known = _cells(module, file, spec)
    problems = [
        f"--config={spec}: SETS of '{file}' has '{cell}' in '{name}', which is none of its CELLS"
        f"{fields.nearest(cell, known)}"
        for name, cells in sets.items()
        for cell in cells
        if cell not in known
    ]
    if problems:
        raise ConfigError(problems)
    return sets


def _is_cell(name: Any) -> bool:
    return isinstance(name, str) and bool(name.strip(". ")) and not set(name) & {"/", "\0", ","}


def _load_module(spec: str) -> tuple[ModuleType, str, str]:
    """(FILE as a module, its path, the name after the colon)."""
    file, _, cell = spec.rpartition(":") if ":" in spec else (spec, "", "")
    path = config_file(file)
    if path is None:
        names = config_names()
        files = [f"configs/{name}.py" for name in names]
        near = fields.nearest(file, files if "/" in file or file.endswith(".py") else names)
        raise ConfigError([f"--config={spec}: there is no file '{file}'{near}"])
    try:
        return config_module(path), file, cell
    except SyntaxError as error:
        raise ConfigError([f"--config={spec}: line {error.lineno} of '{file}': {error.msg}"]) from None
    except ImportError as error:
        raise ConfigError([f"--config={spec}: '{file}' {error}"]) from None
    except Exception as error:
        raise ConfigError([f"--config={spec}: '{file}' raised {error_line(error, str(path))}"]) from None


def config_module(path: Path) -> ModuleType:
    """Import a file of cells as a module. A file that builds on another one next to it may use this, too."""
    module_spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise ImportError("is no Python file")
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except ImportError as error:
        raise ImportError(f"cannot be loaded: {error}") from None
    return module


def _takes_a_name(make: Callable[..., Any]) -> bool:
    """Whether it is a function of one argument."""
    try:
        inspect.signature(make).bind("")
    except TypeError:
        return False
    return True
