"""A policy of a run as others load it: a Hugging Face directory, or a PEFT adapter on its base.

hf     weights, adapters summed in (float32, then rounded once), config.json, tokenizer
peft   the adapter as it was trained, adapter_config.json with the base's directory, tokenizer

The tokenizer's files are the base's to the byte, so that a run may start policies from the export beside that base.
"""

import dataclasses
import os
from pathlib import Path

import jax

from marl_jax.config.run_config import RunConfig
from marl_jax.fields import nearest
from marl_jax.models.hf import CONFIG as MODEL_FILE
from marl_jax.models.hf import load_config, save_hf
from marl_jax.models.peft import CONFIG as ADAPTER_FILE
from marl_jax.models.peft import save_peft
from marl_jax.models.tokenizer import save_tokenizer
from marl_jax.policies import policy_names
from marl_jax.run_folder.files import disk_errors
from marl_jax.run_folder.folder import FolderError, read_config, run_around
from marl_jax.runs.parts import digests, load_parts
from marl_jax.runs.stored import (
    check_unchanged,
    on_one_device,
    path_of,
    policies_at,
    read_which,
    whole_weights,
)

FORMATS = ("hf", "peft")
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Exported:
    """What was written."""

    directory: Path
    policy: str
    roles: tuple[str, ...]  # that it speaks for
    step: int
    format: str
    dtype: str

    def __str__(self) -> str:
        roles = ", ".join(self.roles)
        return f"policy {self.policy} ({roles}) after step {self.step}, {self.format}, {self.dtype}: {self.directory}"


def export(
    workdir: str | os.PathLike[str],
    policy: str,
    out: str | os.PathLike[str],
    *,
    checkpoint: str = "latest",
    format: str = "hf",
    dtype: str | None = None,
    accept_changes: bool = False,
) -> Exported:
    """Write a policy at a checkpoint (latest, best, base or a step) to the directory `out`.

    `dtype` is float32 or bfloat16; None: weights as the base is stored, an adapter in float32 as it is trained.
    """
    path = path_of(workdir)
    which = read_which(checkpoint, "--checkpoint")
    for name, text, known in (("format", format, FORMATS), ("dtype", dtype or DTYPES[0], DTYPES)):
        if text not in known:
            raise FolderError(f"--{name}={text} is unknown{nearest(text, known)}")
    config = on_one_device(read_config(path))
    named = policy_names(config.policies.map)
    if policy not in named:
        raise FolderError(f"--policy is '{policy}', which is no policy of this run{nearest(policy, named)}")
    directory = _directory(out, format, config)
    parts = load_parts(config)
    spec = parts.specs[policy]
    if format == "peft" and not spec.lora:
        kept = "a frozen copy of its base" if spec.frozen else "trained in all its weights"
        raise FolderError(f"policy '{policy}' is {kept}, so there is no adapter: use --format=hf")
    if not accept_changes:
        check_unchanged(path, digests(config, parts, {}))
    stored = policies_at(path, config, parts, which)
    dtype = dtype or (load_config(spec.base).dtype if format == "hf" else "float32")
    tree = stored.trees[policy]
    try:
        with disk_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            if format == "hf":
                model = dataclasses.replace(parts.model, dtype=dtype)
                save_hf(directory, model, whole_weights(parts, policy, tree, dtype), spec.base)
            else:
                adapter = jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
                base, alpha = str(Path(spec.base).absolute()), config.policies.lora_alpha
                save_peft(directory, parts.model, adapter, alpha=alpha, base_model=base)
                save_tokenizer(directory, spec.base)
    except OSError as error:
        raise FolderError(
            f"'{directory}' cannot be written ({error.strerror}): choose another --out"
        ) from None
    roles = tuple(role for role, name in config.policies.map.items() if name == policy)
    return Exported(directory, policy, roles, stored.step, format, dtype)


def _directory(out: str | os.PathLike[str], format: str, config: RunConfig) -> Path:
    """Where to write; not over a base, not into a run, and not a model beside an adapter, which would load as one."""
    if not os.fspath(out):
        raise FolderError("--out is missing: give the directory to write")
    directory = Path(out).expanduser().absolute()
    bases = [config.policies.base, *config.policies.bases.values()]
    if directory.resolve() in {Path(base).resolve() for base in bases}:
        raise FolderError(f"'{directory}' is a base of the run: choose another --out")
    if (run := run_around(directory)) is not None:
        raise FolderError(f"'{directory}' belongs to the run in '{run}': choose another --out")
    other = ADAPTER_FILE if format == "hf" else MODEL_FILE
    if (directory / other).exists():
        raise FolderError(
            f"'{directory}' holds {other}, of another format than {format}: choose another --out"
        )
    return directory
