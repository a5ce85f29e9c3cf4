"""The learner's interface to a model: hidden states of a micro-batch, and the output head.

Any hashable object with these two methods can be trained; `Qwen3` is the only one so far. Trained parameters are
float32; they are cast to the model's dtype for computation.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from marl_jax.learning import prefix
from marl_jax.learning.batching import MicroBatch
from marl_jax.models import qwen3
from marl_jax.models.lora import LayerLora
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
        """Hidden states [G, S, H] of a micro-batch, equal to computing every row alone."""
        config, trains_all = self.config, self.lora_scale is None
        # The table stays float32, because the gradient of its rows is summed over their tokens in the table's dtype.
        embedding = {"embed": trained["embed"]} if trains_all else {}
        trained = jax.tree.map(lambda x: x.astype(config.dtype), trained) | embedding
        params, adapter = (trained, None) if trains_all else (frozen, trained)
        shape = batch.tokens.shape
        # All but attention runs on a flat array of tokens: products with one leading axis have the fastest gradients.
        flat = lambda x: x.reshape(batch.tokens.size, *x.shape[2:])
        by_sequence = lambda x: x.reshape(*shape, *x.shape[1:])
        angles = qwen3.rotation(config, flat(batch.positions))

        def step(x: jax.Array, layer_and_adapter: tuple[Any, Any]) -> tuple[jax.Array, None]:
            layer, weights = layer_and_adapter
            lora = None
            if self.lora_scale is not None:
                select = jnp.full((len(x), weights["q"]["a"].shape[-1]), self.lora_scale, jnp.float32)
                lora = LayerLora(weights, select)
            elif qwen3.unrolled(config, self.remat) > 1:
                # A scan over single layers compiles only one layer, and would stack the fused weights for the gradient.
                layer = qwen3.fused(layer)
            q, k, v = map(by_sequence, qwen3.project_qkv(layer, config, x, angles, lora))
            attended = prefix.attention(q, k, v, batch, self.attention)
            x = x + qwen3.project_out(layer, flat(attended), lora)
            return x + qwen3.mlp(layer, config, x, lora), None

        x = flat(qwen3.embed(params, batch.tokens).astype(config.dtype))
        x = qwen3.through_layers(step, x, (params["layers"], adapter), config, self.remat)
        return by_sequence(qwen3.rms_norm(x, params["final_norm"], config.rms_norm_eps))

    def head(self, trained: Tree, frozen: Tree) -> jax.Array:
        """The matrix [H, V] from hidden states to logits."""
        params = trained if self.lora_scale is None else frozen
        return params["embed"].T if self.config.tie_word_embeddings else params["lm_head"]
