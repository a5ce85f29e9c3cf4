"""From prompts to sampled tokens with exact log-probabilities: methods, caches, the engine."""

from marl_jax.sampling.engine import Engine
from marl_jax.sampling.generate import generate
from marl_jax.sampling.programs import Features
from marl_jax.sampling.requests import Completion, Request
from marl_jax.sampling.shapes import EngineSettings, Load, plan

__all__ = ["Completion", "Engine", "EngineSettings", "Features", "Load", "Request", "generate", "plan"]
