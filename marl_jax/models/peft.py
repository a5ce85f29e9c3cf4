"""One adapter in and out in the PEFT library's layout: `adapter_model.safetensors`, `adapter_config.json`.

Its matrices are [out, in]: lora_A is [r, in] and lora_B [out, r], one pair per layer and linear module.
"""

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from marl_jax.models.hf import read_json, write_json
from marl_jax.models.lora import LINEAR, num_adapters
from marl_jax.models.model_config import ModelConfig
from marl_jax.models.tensor_file import save_tensors, tensors
from marl_jax.models.weight_table import Tree, Weight, table

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
# Settings that would change what is computed, with the value under which they do not.
_PLAIN = {
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
    "lora_bias": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
}


def save_peft(
    directory: str | os.PathLike[str],
    config: ModelConfig,
    adapters: Tree,
    index: int,
    *,
    alpha: float,
    base_model: str = "",
) -> None:
    """Write adapter `index` of a stack; `base_model` is the name or directory that PEFT loads it onto."""
    if not 0 <= index < num_adapters(adapters):
        raise ValueError(f"adapter index {index} is not among the {num_adapters(adapters)} adapters")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    layers = table(config)["layers"]
    rank = adapters["q"]["a"].shape[-1]
    matrices: dict[str, np.ndarray] = {}
    for module in LINEAR:
        columns = [np.asarray(adapters[module][part][index]) for part in "ab"]
        for layer, (a, b) in enumerate(zip(*columns)):
            name_a, name_b = _names(layers[module], layer)
            matrices[name_a] = np.ascontiguousarray(a.reshape(-1, rank).T)
            matrices[name_b] = np.ascontiguousarray(b.reshape(rank, -1).T)
    save_tensors(directory / WEIGHTS, matrices)
    write_json(
        directory / CONFIG,
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": 0.0,
            "target_modules": sorted(layers[module].hf.split(".")[-2] for module in LINEAR),
            "inference_mode": True,
            **_PLAIN,
        },
    )


def load_peft(
    directory: str | os.PathLike[str], config: ModelConfig, *, dtype: str | None = None
) -> tuple[Tree, float]:
    """Read one adapter -> (a stack of one, alpha). A module that the adapter leaves out is zero in it."""
    directory = Path(directory)
    rank, alpha = _read_config(directory / CONFIG)
    if not (directory / WEIGHTS).exists():
        raise FileNotFoundError(f"{directory / WEIGHTS} is missing; is this the directory of a PEFT adapter?")
    found = tensors(directory / WEIGHTS)
    layers = table(config)["layers"]
    adapters: Tree = {}
    for module, axes in LINEAR.items():
        weight = layers[module]
        split = 1 + len(axes.split("->")[0])
        inner, outer = weight.shape[1:split], weight.shape[split:]
        rows, columns = weight.published_shape
        names = [_names(weight, layer) for layer in range(config.num_hidden_layers)]
        used = any(name in found for pair in names for name in pair)
        stacked: dict[str, list[np.ndarray]] = {"a": [], "b": []}
        for pair in names:
            for part, name, shape in zip("ab", pair, [(rank, columns), (rows, rank)]):
                if not used:
                    stacked[part].append(np.zeros(shape[::-1], np.float32))
                    continue
                if name not in found:
                    raise ValueError(f"{directory / WEIGHTS} lacks {name}")
                tensor = found.pop(name)
                if tensor.shape != shape:
                    stated = list(tensor.shape)
                    raise ValueError(f"{directory / WEIGHTS}: {name} has shape {stated}, not {list(shape)}")
                stacked[part].append(tensor.read().T)
        kind = dtype or config.dtype
        adapters[module] = {
            "a": jnp.asarray(np.stack(stacked["a"]).reshape(1, -1, *inner, rank), kind),
            "b": jnp.asarray(np.stack(stacked["b"]).reshape(1, -1, rank, *outer), kind),
        }
    if found:
        raise ValueError(
            f"{directory / WEIGHTS} has {next(iter(found))}, which no linear layer of Qwen3 takes"
        )
    return adapters, alpha


def _read_config(path: Path) -> tuple[int, float]:
    stated = read_json(path, "is this the directory of a PEFT adapter?")
    if stated.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type is {stated.get('peft_type')!r}; only 'LORA' is supported")
    for name, plain in _PLAIN.items():
        if stated.get(name) and stated[name] != plain:
            raise ValueError(f"{path}: {name} is {stated[name]!r}; it is not supported")
    rank, alpha = stated.get("r"), stated.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ValueError(f"{path}: r is {rank!r} and lora_alpha {alpha!r}; both must be numbers")
    return rank, float(alpha)


def _names(weight: Weight, layer: int) -> tuple[str, str]:
    stem = "base_model.model." + weight.hf.format(layer=layer).removesuffix("weight")
    return stem + "lora_A.weight", stem + "lora_B.weight"
