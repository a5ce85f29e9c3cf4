"""Export of a policy of a run for other libraries: a Hugging Face directory, or a PEFT adapter on its base.

hf     weights, adapters summed in (float32, then rounded once), config.json, tokenizer
peft   the adapter as it was trained, adapter_config.json with the base's directory, tokenizer

The tokenizer's files are the base's to the byte, so that a run may start policies from the export beside that base.
"""

import contextlib
import dataclasses
import os
from pathlib import Path

import jax

from marl_jax.config.run_config import RunConfig
from marl_jax.fields import nearest
from marl_jax.models import ModelConfig
from marl_jax.models.hf import CONFIG as MODEL_FILE
from marl_jax.models.hf import load_config, save_hf
from marl_jax.models.peft import CONFIG as ADAPTER_FILE
from marl_jax.models.peft import save_peft
from marl_jax.models.tokenizer import FILES as TOKENIZER_FILES
from marl_jax.models.tokenizer import save_tokenizer
from marl_jax.packaged import located
from marl_jax.policies import PolicySpec, policy_names
from marl_jax.rollouts.history import Chat
from marl_jax.run_folder.files import disk_errors
from marl_jax.run_folder.folder import FolderError, path_errors, run_around
from marl_jax.runs.loading.parts import digests, load_parts
from marl_jax.runs.loading.stored import (
    check_unchanged,
    config_of,
    on_one_device,
    path_of,
    policies_at,
    read_which,
    whole_weights,
)

FORMATS = ("hf", "peft")
DTYPES = ("float32", "bfloat16")
# How the names of written files begin.
_WRITTEN = ("config.json", "generation_config.json", "model", "adapter_")


@dataclasses.dataclass(frozen=True)
class Exported:
    """The result of an export."""

    directory: Path
    policy: str
    roles: tuple[str, ...]  # that it answers for
    step: int
    format: str
    dtype: str
    note: str = ""  # on the type of its numbers and on how it is asked, if there is anything to say

    def __str__(self) -> str:
        roles = ", ".join(self.roles)
        where = f"{self.format}, {self.dtype}: {self.directory}"
        return "\n".join(
            filter(None, [f"policy {self.policy} ({roles}) after step {self.step}, {where}", self.note])
        )


def export(
    workdir: str | os.PathLike[str],
    policy: str,
    out: str | os.PathLike[str],
    *,
    checkpoint: str = "latest",
    format: str = "hf",
    dtype: str | None = None,
    accept_changes: bool = False,
    overwrite: bool = False,
) -> Exported:
    """Write a policy at a checkpoint (latest, best, base or a step) to the directory `out`.

    `dtype` is float32 or bfloat16. None: full weights and adapters, trained in float32, stay so; an
    adapter's sum with its base, and a policy that was not trained, are as the base is stored, float16 as float32. Files
    of a model that is there already are refused, or with `overwrite` replaced.
    """
    path = path_of(workdir)
    which = read_which(checkpoint, "--checkpoint")
    for name, text, known in (("format", format, FORMATS), ("dtype", dtype or DTYPES[0], DTYPES)):
        if text not in known:
            raise FolderError(f"--{name}={text} is unknown{nearest(text, known)}")
    config = on_one_device(config_of(path))
    named = policy_names(config.policies.map)
    if policy not in named:
        raise FolderError(f"--policy is '{policy}', which is no policy of this run{nearest(policy, named)}")
    directory = _directory(out, format, config, overwrite)
    parts = load_parts(config)
    spec = parts.specs[policy]
    if format == "peft" and not spec.lora:
        kept = "a frozen copy of its base" if spec.frozen else "trained in all its weights"
        raise FolderError(f"policy '{policy}' is {kept}, so there is no adapter: use --format=hf")
    if not accept_changes:
        check_unchanged(path, digests(config, parts, {}))
    stored = policies_at(path, config, parts, which)
    trained = not spec.frozen and stored.step > 0
    kept = "float32"
    if format == "hf" and (spec.lora or not trained):
        with contextlib.suppress(ValueError):  # it is stored in a type that is not written here
            kept = load_config(spec.base).dtype
    chat, model = Chat(parts.tokenizers[spec.base]), parts.models[spec.base]
    note = "\n".join(
        filter(None, [_note(dtype or kept, kept, spec, trained, format), *_served(chat, model, format)])
    )
    dtype = dtype or kept
    tree = stored.trees[policy]
    with path_errors(directory, "choose another --out"), disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        if format == "hf":
            # What ended its turns here ends them elsewhere; a base that never saw a chat does not list it.
            if chat.end_of_turn not in model.stop_tokens:
                model = dataclasses.replace(model, eos_token_id=(chat.end_of_turn, *model.stop_tokens))
            model = dataclasses.replace(model, dtype=dtype)
            save_hf(directory, model, whole_weights(parts, policy, tree, dtype), spec.base)
        else:
            adapter = jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
            base, alpha = str(located(spec.base).absolute()), config.policies.lora_alpha
            save_peft(directory, parts.models[spec.base], adapter, alpha=alpha, base_model=base)
            save_tokenizer(directory, spec.base)
    roles = tuple(role for role, name in config.policies.map.items() if name == policy)
    return Exported(directory, policy, roles, stored.step, format, dtype, note)


def _served(chat: Chat, model: ModelConfig, format: str) -> list[str]:
    """What a server must be asked, so that the policy answers as it did here."""
    told = []
    if "enable_thinking" in (getattr(chat.tokenizer, "chat_template", None) or ""):
        told.append(
            'It was asked with thinking off: ask with chat_template_kwargs {"enable_thinking": false}.'
        )
    if format == "peft" and chat.end_of_turn not in model.stop_tokens:
        end = chat.end_of_turn
        told.append(
            f"Its turns end with token {end}, where its base does not stop: ask with stop_token_ids [{end}]."
        )
    return told


def _note(dtype: str, kept: str, spec: PolicySpec, trained: bool, format: str) -> str:
    """Why the weights have this type, where they were of more bits once."""
    if dtype == "float32" or format == "peft":
        return ""
    if kept == "float32":
        return f"The weights were trained in float32 and are rounded to {dtype}, as it was asked for."
    if spec.lora and trained:
        return (
            f"The adapter was added to its base in float32, and the sum is rounded to {dtype}, as the base is stored: "
            "--dtype=float32 keeps it whole."
        )
    return ""


def _directory(out: str | os.PathLike[str], format: str, config: RunConfig, overwrite: bool) -> Path:
    """The output folder; not over a base, in a run, or for a model beside an adapter, which would load together."""
    if not os.fspath(out):
        raise FolderError("--out is missing: give the directory to write")
    directory = Path(os.path.expanduser(out)).absolute()
    bases = [config.policies.base, *config.policies.bases.values()]
    if directory.resolve() in {located(base).resolve() for base in bases}:
        raise FolderError(f"'{directory}' is a base of the run: choose another --out")
    if (run := run_around(directory)) is not None:
        raise FolderError(f"'{directory}' belongs to the run in '{run}': choose another --out")
    other = ADAPTER_FILE if format == "hf" else MODEL_FILE
    if (directory / other).exists():
        raise FolderError(
            f"'{directory}' holds {other}, of another format than {format}: choose another --out"
        )
    there = [] if overwrite or not directory.is_dir() else sorted(directory.glob("*"))
    if replaced := [
        path.name for path in there if path.name in TOKENIZER_FILES or path.name.startswith(_WRITTEN)
    ]:
        raise FolderError(
            f"'{directory}' holds {replaced[0]}, which would be replaced: choose another --out, or replace it with "
            "--overwrite"
        )
    return directory
