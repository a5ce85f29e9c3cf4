"""Qwen3 as plain functions over one table of weights: forward, decode, published weights, LoRA."""

from marl_jax.models.hf import load_hf, save_hf
from marl_jax.models.model_config import ModelConfig
from marl_jax.models.qwen3 import forward, init

__all__ = ["ModelConfig", "forward", "init", "load_hf", "save_hf"]
