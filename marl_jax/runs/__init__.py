"""The training run: opening its folder, the loop on either road, phases, evaluation and the metrics of a step."""

from typing import TYPE_CHECKING

from marl_jax import late

if TYPE_CHECKING:
    from marl_jax.runs.loop import train

__all__ = ["train"]

__getattr__ = late(__name__, {"loop": ("train",)})
