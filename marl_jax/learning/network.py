"""The learner's interface to a model: hidden states of a micro-batch, and the output head.

Any hashable object with these two methods can be trained; `Qwen3` is the only one so far. Trained parameters are kept
in float32 and cast to the model's dtype for computation.
"""

import dataclasses
from typing import Protocol

import jax

from marl_jax.learning import prefix
from marl_jax.learning.batching import MicroBatch
from marl_jax.models.model_config import ModelConfig
from marl_jax.models.weight_table import Tree


class Network(Protocol):
    """What the update needs of a model: hidden states of a micro-batch, and the matrix that makes logits of them."""

    def hidden(self, trained: Tree, frozen: Tree, batch: MicroBatch) -> jax.Array:
        """[G, S, H]"""

    def head(self, trained: Tree, frozen: Tree) -> jax.Array:
        """[H, V]"""


@dataclasses.dataclass(frozen=True)
class Qwen3:
    """Trains all weights (`frozen` is None), or one adapter (no policy axis) on a frozen base."""

    config: ModelConfig  # the model's shape
    lora_scale: float | None = None  # alpha / rank; None trains all weights
    remat: str = "none"  # recomputed in the backward pass: none, layer or dots
    attention: str | None = None  # an implementation of `models.attention`; None: the fastest of the platform

    def hidden(self, trained: Tree, frozen: Tree, batch: MicroBatch) -> jax.Array:
        """Hidden states [G, S, H] of a micro-batch."""
        alone = self.lora_scale is None
        # The gradient of a looked-up row is a sum over its tokens, which takes the precision of the table.
        table = {"embed": trained["embed"]} if alone else {}
        trained = jax.tree.map(lambda x: x.astype(self.config.dtype), trained) | table
        params, adapter = (trained, None) if alone else (frozen, trained)
        return prefix.hidden_states(
            params,
            self.config,
            batch,
            adapter=adapter,
            adapter_scale=self.lora_scale or 1.0,
            remat=self.remat,
            attention=self.attention,
        )

    def head(self, trained: Tree, frozen: Tree) -> jax.Array:
        """The matrix [H, V] from hidden states to logits."""
        params = trained if self.lora_scale is None else frozen
        return params["embed"].T if self.config.tie_word_embeddings else params["lm_head"]
