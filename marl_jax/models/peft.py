"""Write one adapter in the PEFT library's layout: `adapter_model.safetensors`, `adapter_config.json`.

PEFT's matrices are [out, in]: lora_A is [r, in] and lora_B [out, r], one pair per layer and linear module.
"""

import os
from pathlib import Path

import numpy as np

from marl_jax.models.hf import write_json
from marl_jax.models.lora import LINEAR
from marl_jax.models.model_config import ModelConfig
from marl_jax.models.tensor_file import save_tensors
from marl_jax.models.weight_table import Tree, table

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def save_peft(
    directory: str | os.PathLike[str], config: ModelConfig, adapter: Tree, *, alpha: float, base_model: str
) -> None:
    """Write one adapter, a [L,*in,r] and b [L,r,*out]. `base_model` is the name or directory of its base model."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    layers = table(config)["layers"]
    rank = adapter["q"]["a"].shape[-1]
    matrices: dict[str, np.ndarray] = {}
    for module in LINEAR:
        arrays = [np.asarray(adapter[module][part]) for part in "ab"]
        for layer, (a, b) in enumerate(zip(*arrays)):
            stem = "base_model.model." + layers[module].hf.format(layer=layer).removesuffix("weight")
            matrices[stem + "lora_A.weight"] = np.ascontiguousarray(a.reshape(-1, rank).T)
            matrices[stem + "lora_B.weight"] = np.ascontiguousarray(b.reshape(rank, -1).T)
    # The config of an older adapter goes first, so that a directory is no adapter if the process is killed midway.
    (directory / CONFIG).unlink(missing_ok=True)
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
            # Options that would change the arithmetic are off.
            "bias": "none",
            "fan_in_fan_out": False,
            "use_rslora": False,
            "use_dora": False,
            "lora_bias": False,
            "rank_pattern": {},
            "alpha_pattern": {},
            "modules_to_save": None,
        },
    )
