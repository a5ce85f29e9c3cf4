"""The training run: configuration, folder, checkpoints, metrics, statistics, the loop, evaluation and export."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marl_jax.runs.loop import train

__all__ = ["train"]


def __getattr__(name: str) -> Any:
    if name != "train":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from marl_jax.runs.loop import train

    return train
