"""The learner's interface to a model: hidden states of a micro-batch, and the output head.

Any hashable object with these two methods can be trained; `Qwen3` is the only one so far. Trained parameters are
float32; they are cast to the model's dtype for computation.
"""

import dataclasses
from typing import Protocol

import jax

from marl_jax.learning import prefix
from marl_jax.learning.batching import MicroBatch
from marl_jax.models.model_config import ModelConfig
from marl_jax.models.weight_table import Tree


class Network(Protocol):
    """The methods that the update needs: hidden states of a micro-batch, and the matrix from them to logits."""

    def hidden(self, trained: Tree, frozen: Tree, batch: MicroBatch) -> jax.Array:
        """[G, S, H]"""

    def head(self, trained: Tree, frozen: Tree) -> jax.Array:
        """[H, V]"""


@dataclasses.dataclass(frozen=True)
class Qwen3:
    """Trains all weights (`frozen` is None), or one adapter (no policy axis) on a frozen base."""

    config: ModelConfig  # the model's shape
    lora_scale: float | None = None  # alpha / rank; None trains all weights
    remat: str = "none"  # none, layer or dots, see `models.qwen3.hidden_states`
    attention: str | None = None  # an implementation of `models.attention`; None: the fastest on the platform

    def hidden(self, trained: Tree, frozen: Tree, batch: MicroBatch) -> jax.Array:
        """Hidden states [G, S, H] of a micro-batch."""
        trains_all = self.lora_scale is None
        # The table stays float32, because the gradient of its rows is summed over their tokens in the table's dtype.
        embedding = {"embed": trained["embed"]} if trains_all else {}
        trained = jax.tree.map(lambda x: x.astype(self.config.dtype), trained) | embedding
        params, adapter = (trained, None) if trains_all else (frozen, trained)
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
