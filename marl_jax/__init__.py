"""marl_jax: RL training of multi-agent LLM workflows in pure-functional JAX.

Every room is imported by its own name (`from marl_jax import models`), so that importing the package costs
nothing and each part can be used alone.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
