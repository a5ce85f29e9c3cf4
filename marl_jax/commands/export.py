"""Export of a policy of a run for other libraries: a Hugging Face directory, or a PEFT adapter on its base.

hf     weights, adapters summed in (float32, then rounded once), config.json, tokenizer
peft   the adapter as it was trained, adapter_config.json with the base's directory, tokenizer

The tokenizer's files are byte for byte those of the base, so that policies of one run may start from both.
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
from marl_jax.packaged import resolve_path
from marl_jax.policies import PolicySpec, SamplingSettings, policy_names
from marl_jax.rollouts.history import Chat
from marl_jax.run_folder.files import disk_errors
from marl_jax.run_folder.folder import FolderError, enclosing_run, path_errors
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
# Prefixes of the names of written files.
_WRITTEN = ("config.json", "generation_config.json", "model", "adapter_")


@dataclasses.dataclass(frozen=True)
class Exported:
    """The result of an export."""

    directory: Path
    policy: str
    roles: tuple[str, ...]  # roles that it answers for
    step: int
    format: str
    dtype: str
    note: str = ""  # about its dtype and how a server must be asked; empty if there is nothing to say

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

    `dtype` is float32 or bfloat16. None: full weights and adapters stay in float32, in which they were trained; an
    adapter's sum with its base, and an untrained policy, get the dtype of the stored base (float32 for float16). Files
    of a model that are already in `out` are an error, or with `overwrite` are replaced.
    """
    path = path_of(workdir)
    which = read_which(checkpoint, "--checkpoint")
    for name, text, known in (("format", format, FORMATS), ("dtype", dtype or DTYPES[0], DTYPES)):
        if text not in known:
            raise FolderError(f"--{name}={text} is unknown{nearest(text, known)}")
    config = on_one_device(config_of(path))
    names = policy_names(config.policies.map)
    if policy not in names:
        raise FolderError(f"--policy is '{policy}', which is no policy of this run{nearest(policy, names)}")
    directory = _directory(out, format, config, overwrite)
    parts = load_parts(config)
    spec = parts.specs[policy]
    if format == "peft" and not spec.lora:
        what = "a frozen copy of its base" if spec.frozen else "trained in all its weights"
        raise FolderError(f"policy '{policy}' is {what}, so there is no adapter: use --format=hf")
    if not accept_changes:
        check_unchanged(path, digests(config, parts, {}))
    stored = policies_at(path, config, parts, which)
    trained = not spec.frozen and stored.step > 0
    default = "float32"
    if format == "hf" and (spec.lora or not trained):
        with contextlib.suppress(ValueError):  # the base has a dtype that is not written here
            default = load_config(spec.base).dtype
    chat, model = Chat(parts.tokenizers[spec.base]), parts.models[spec.base]
    dtype = dtype or default
    roles = tuple(role for role, name in config.policies.map.items() if name == policy)
    notes = [_note(dtype, default, spec, trained, format), *_how_to_ask(chat, model, format)]
    sampled: dict[str, list[str]] = {}
    for role in roles:
        sampled.setdefault(_how_sampled(config.role_settings[role.partition("/")[0]]), []).append(role)
    notes += [f"{'It' if len(sampled) == 1 else ', '.join(names)} {how}" for how, names in sampled.items()]
    tree = stored.trees[policy]
    with path_errors(directory, "choose another --out"), disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        if format == "hf":
            # The token that ended its turns here must end them elsewhere; a base for plain text does not list it.
            if chat.end_of_turn not in model.stop_tokens:
                model = dataclasses.replace(model, eos_token_id=(chat.end_of_turn, *model.stop_tokens))
            model = dataclasses.replace(model, dtype=dtype)
            save_hf(directory, model, whole_weights(parts, policy, tree, dtype), spec.base)
        else:
            adapter = jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
            base, alpha = str(resolve_path(spec.base).absolute()), config.policies.lora_alpha
            save_peft(directory, parts.models[spec.base], adapter, alpha=alpha, base_model=base)
            save_tokenizer(directory, spec.base)
    return Exported(directory, policy, roles, stored.step, format, dtype, "\n".join(filter(None, notes)))


def _how_to_ask(chat: Chat, model: ModelConfig, format: str) -> list[str]:
    """How a server must be asked, so that the policy answers as it did here."""
    notes = []
    if "enable_thinking" in str(chat.tokenizer.chat_template):  # a text, or texts by name
        notes.append(
            'The run had thinking off: send requests with chat_template_kwargs {"enable_thinking": false}.'
        )
    if format == "peft" and chat.end_of_turn not in model.stop_tokens:
        end = chat.end_of_turn
        notes.append(
            f"Its turns end with token {end}, no stop token of its base: send requests with stop_token_ids [{end}]."
        )
    return notes


def _how_sampled(settings: SamplingSettings) -> str:
    """Servers take what a request leaves open from the defaults of the base, which the export keeps."""
    return (
        f"was sampled with temperature {settings.temperature:g}, top_p {settings.top_p:g} and "
        f"{f'top_k {settings.top_k}' if settings.top_k else 'no top_k'}: send these with requests."
    )


def _note(dtype: str, default: str, spec: PolicySpec, trained: bool, format: str) -> str:
    """Why the weights have this dtype, if they once had more bits."""
    if dtype == "float32" or format == "peft":
        return ""
    if default == "float32":
        return f"The weights are in float32 and are rounded to {dtype}, the given --dtype."
    if spec.lora and trained:
        return (
            f"The adapter was added to its base in float32, and the sum is rounded to {dtype}, as the base is stored: "
            "--dtype=float32 keeps it exact."
        )
    return ""


def _directory(out: str | os.PathLike[str], format: str, config: RunConfig, overwrite: bool) -> Path:
    """The output folder; not a base, not in a run, and no model next to an adapter, because both would be loaded."""
    if not os.fspath(out):
        raise FolderError("--out is missing: give the directory to write")
    directory = Path(os.path.expanduser(out)).absolute()
    bases = [config.policies.base, *config.policies.bases.values()]
    if directory.resolve() in {resolve_path(base).resolve() for base in bases}:
        raise FolderError(f"'{directory}' is a base of the run: choose another --out")
    if (run := enclosing_run(directory)) is not None:
        raise FolderError(f"'{directory}' belongs to the run in '{run}': choose another --out")
    other = ADAPTER_FILE if format == "hf" else MODEL_FILE
    if (directory / other).exists():
        raise FolderError(
            f"'{directory}' holds {other}, of another format than {format}: choose another --out"
        )
    files = [] if overwrite or not directory.is_dir() else sorted(directory.glob("*"))
    if replaced := [
        path.name for path in files if path.name in TOKENIZER_FILES or path.name.startswith(_WRITTEN)
    ]:
        raise FolderError(
            f"'{directory}' holds {replaced[0]}, which would be replaced: choose another --out, or replace it with "
            "--overwrite"
        )
    return directory
