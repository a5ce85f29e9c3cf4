"""The training run: opening it, the loop over both roads, its state, evaluations and phases, measures, and stopping."""

from typing import TYPE_CHECKING

from marl_jax import late

if TYPE_CHECKING:
    from marl_jax.runs.loop import train

__all__ = ["train"]

__getattr__ = late(__name__, {"loop": ("train",)})
