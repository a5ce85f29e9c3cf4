"""From prompts to sampled tokens with exact log-probabilities: methods, caches, the engine."""

from typing import TYPE_CHECKING

from marl_jax import late
from marl_jax.sampling.requests import Completion, Request
from marl_jax.sampling.shapes import EngineSettings, Load, plan

if TYPE_CHECKING:
    from marl_jax.sampling.engine import Engine
    from marl_jax.sampling.generation import generate
    from marl_jax.sampling.programs import Features

__all__ = ["Completion", "Engine", "EngineSettings", "Features", "Load", "Request", "generate", "plan"]

__getattr__ = late(__name__, {"engine": ("Engine",), "generation": ("generate",), "programs": ("Features",)})
