"""The training run: configuration, folder, checkpoints, metrics, statistics, the loop, evaluation and export."""

from typing import TYPE_CHECKING

from marl_jax import late

if TYPE_CHECKING:
    from marl_jax.runs.loop import train

__all__ = ["train"]

__getattr__ = late(__name__, {"loop": ("train",)})
