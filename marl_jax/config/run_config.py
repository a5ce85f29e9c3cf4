"""The configuration of a run: frozen dataclasses, from a config file's cell and typed overrides.

    --config=configs/micro.py:voting-isolated-s-math --config.sampling.temperature=0.7 --config.steps=50
    --config=micro:voting-isolated-s-math       the packaged file of that name, where there is no such file

All mistakes are reported together, before anything is compiled. It is passed whole to the run, and taken apart
there; `to_json` writes it, `from_json` reads it back equal.
"""

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
from marl_jax.own import home_of, told
from marl_jax.packaged import config_file, config_names

# The groups of fields are here, too, for config files.
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
    "current",
    "from_argv",
    "load_base",
    "load_config",
    "load_file",
    "sets_of",
    "split_argv",
]

SCHEMA = 1  # changes when a field changes its meaning; a new field's default keeps the former behaviour
RETIRED = ("learner.interventions.mixing.clip_roles",)  # fields that other fields made redundant
T = TypeVar("T")


class ConfigError(UserError, ValueError):
    """The mistakes in a configuration, one line each."""

    def __init__(self, problems: Sequence[str]):
        self.problems = list(problems)
        super().__init__("the configuration cannot be used:\n" + "\n".join(f"  {line}" for line in problems))


@dataclasses.dataclass(frozen=True)
class RunConfig(RunFields):
    """All of a run. What cannot be is refused when it is built, every reason at once; values of a wrong type first."""

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


def current(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The JSON of a configuration as this version writes it, where an earlier one of its schema wrote it."""
    if value.get("schema") != SCHEMA:
        return value
    value = copy.deepcopy(dict(value))
    for path in RETIRED:
        *groups, name = path.split(".")
        holder: Any = value
        for group in groups:
            holder = holder.get(group) if isinstance(holder, dict) else None
        if isinstance(holder, dict):
            holder.pop(name, None)
    return fields.filled(RunConfig, value)


# ---------------------------------------------------------------- from the command line


def from_argv(argv: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """The configuration of --config and --config.* of a command line, and the rest of the line for absl."""
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
    """FILE:CELL, with fields set from texts. Every mistake in the texts is in the one error."""
    base = load_base(spec, "get_config", RunConfig, texts)
    config, problems = fields.change(base, texts)
    problems = [*problems, *config_checks.asked_in_vain(config, [name for name, _ in texts])]
    if problems:
        raise ConfigError(problems)
    return config


def load_base(spec: str, entry: str, cls: type[T], texts: Sequence[tuple[str, str | None]] = ()) -> T:
    """The result of the function `entry` of FILE for the name behind the colon.

    Where it refuses the name, mistakes in the texts that show without it are reported as well.
    """
    make, name = load_file(spec, entry)
    try:
        made = make(name)
    except ValueError as error:
        refused = getattr(error, "problems", [str(error)])
        raise ConfigError([*refused, *fields.read_texts(cls, texts)[1]]) from None
    except Exception as error:
        raise ConfigError(
            [f"--config={spec}: {entry}({name!r}) raised {told(error, home_of(make))}"]
        ) from None
    if not isinstance(made, cls):
        raise ConfigError(
            [f"--config={spec}: {entry} gives a {type(made).__name__}: return a {cls.__name__}"]
        )
    return made


def load_file(spec: str, entry: str = "get_config") -> tuple[Callable[[str], Any], str]:
    """(the function `entry` of FILE, the name behind the colon)."""
    module, file, cell = _load_module(spec)
    make = getattr(module, entry, None)
    if make is None or not _takes_a_name(make):
        raise ConfigError([f"--config={spec}: '{file}' defines no {entry}(name)"])
    return make, cell


def cells_of(spec: str) -> list[str]:
    """The names that FILE has in `CELLS`, for folders, too; none where it has no such list."""
    module, file, _ = _load_module(spec)
    names = list(getattr(module, "CELLS", ()))
    if isinstance(getattr(module, "CELLS", ()), str) or not all(map(_is_cell, names)):
        raise ConfigError([f"--config={spec}: CELLS of '{file}' must be a list of names without '/'"])
    return names


def sets_of(spec: str) -> dict[str, list[str]]:
    """Cells by the name of their set, as FILE has them in `SETS`; a matrix runs the first by default."""
    return {name: list(cells) for name, cells in getattr(_load_module(spec)[0], "SETS", {}).items()}


def _is_cell(name: Any) -> bool:
    return isinstance(name, str) and bool(name.strip(". ")) and not set(name) & {"/", "\0", ","}


def _load_module(spec: str) -> tuple[ModuleType, str, str]:
    """(FILE as a module, its path, the name behind the colon)."""
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
        raise ConfigError([f"--config={spec}: '{file}' raised {told(error, str(path))}"]) from None


def config_module(path: Path) -> ModuleType:
    """A file of cells as a module; for files that build on others beside them, too."""
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
