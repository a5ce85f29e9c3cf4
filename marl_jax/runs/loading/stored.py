"""Stored policies of a run folder: at their start, or from a checkpoint.

    DIR/config.json ──► configuration, parts        DIR/checkpoints/STEP + parts ──► {policy: tree}

For evaluation and export, which read the files of training. The inputs of a run must be unchanged: adapters belong
to the weights that they were trained on.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

import jax
import jax.numpy as jnp
from absl import logging

from marl_jax.config.run_config import MeshConfig, RunConfig
from marl_jax.fields import nearest
from marl_jax.models.lora import merge
from marl_jax.packaged import resolve_path
from marl_jax.policies import Tree
from marl_jax.run_folder import folder
from marl_jax.run_folder.checkpoints import Which, restore
from marl_jax.run_folder.folder import FolderError, read_config
from marl_jax.runs.loading.parts import Parts, PartsError

WhichCheckpoint = Which | Literal["base"]
NAMED = ("latest", "best", "base")


@dataclasses.dataclass(frozen=True)
class Stored:
    """All policies of a run after some step."""

    step: int
    trees: dict[str, Tree]
    updates: dict[str, int]  # optimiser updates of each policy

    @property
    def name(self) -> str:
        """Its name in a flag."""
        return str(self.step) if self.step else "base"


def read_which(text: str, flag: str, also: Sequence[str] = ()) -> WhichCheckpoint:
    """The parsed flag: latest, best, base or a step. `also` lists other values of the flag, for the error message."""
    if text in NAMED:
        return cast(WhichCheckpoint, text)
    if text.isdecimal():
        return int(text) or "base"
    raise FolderError(f"{flag}={text} is unknown{nearest(text, (*also, *NAMED, 'a step'))}")


def path_of(workdir: str | os.PathLike[str]) -> Path:
    """The folder of a run that was started."""
    if not os.fspath(workdir):
        raise FolderError("--workdir is missing: give the directory of the run")
    folder.read(path := Path(os.path.expanduser(workdir)).absolute())
    return path


def config_of(path: Path) -> RunConfig:
    """The configuration of a run, whose bases must exist; no flag of a command can name others."""
    config = read_config(path)
    for base in dict.fromkeys(spec.base for spec in config.policies.specs.values()):
        if not (directory := resolve_path(base)).is_dir():
            hint = "" if directory.is_absolute() else ", or start in the folder where the run was trained"
            raise PartsError(f"there is no model in '{base}', which the run began with: put it back{hint}")
    return config


def on_these_devices(config: RunConfig) -> RunConfig:
    """The configuration, over the mesh of the training if there are enough devices, else on one device."""
    needed, available = config.mesh.data * config.mesh.model, len(jax.local_devices())
    if needed <= available:
        return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, hosts=1))
    logging.warning(
        "the run's mesh has %d devices and %d are here: one of them is used, numbers may differ in their last bits",
        needed,
        available,
    )
    return on_one_device(config)


def on_one_device(config: RunConfig) -> RunConfig:
    """The configuration without a mesh."""
    return dataclasses.replace(config, mesh=MeshConfig())


def check_unchanged(path: Path, now: Mapping[str, str]) -> None:
    """Refuse a base, tokenizer, prompts, data or user code with other digests than at the start of the run."""
    began = folder.read(path).get("digests", {})
    both = [name for name in now if name in began]
    if lines := folder.differences({name: began[name] for name in both}, {name: now[name] for name in both}):
        raise FolderError(
            f"what the run in '{path}' began with is no longer there ({'; '.join(lines)}): "
            "put it back, or accept the change with --accept_changes"
        )


def policies_at(path: Path, config: RunConfig, parts: Parts, which: WhichCheckpoint) -> Stored:
    """All policies: trained ones from the checkpoint, frozen ones from their bases."""
    start = parts.start(config.seed)
    if which == "base":
        return Stored(0, start, dict.fromkeys(parts.specs, 0))
    template = {"policies": {name: start[name] for name in parts.trained}}
    trees, data = restore(path / "checkpoints", which, template)
    updates = dict.fromkeys(parts.specs, 0) | data.get("updates", {})
    return Stored(int(data["step"]), start | trees["policies"], updates)


def whole_weights(parts: Parts, policy: str, tree: Tree, dtype: str) -> Tree:
    """A policy as one model: its weights, or its base plus adapter, summed in float32."""
    spec = parts.specs[policy]
    if spec.lora:
        base = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), parts.bases[spec.base])
        assert parts.lora_scale is not None
        tree = merge(base, tree, parts.lora_scale)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
