"""Costs of programs, counted from shapes: activations kept for a backward pass, its scratch memory, operations.

The activations of a token are traced: they are the residuals of the learner's own log-probs. Those of attention grow
with pairs of tokens and are a formula; so is scratch memory, which is an upper bound. The formulas follow XLA's buffers
on a CPU, where they are tested; an accelerator's compiler may fuse more.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from marl_jax.learning import update_programs
from marl_jax.learning.batching import BLOCK
from marl_jax.learning.logprobs import width_of
from marl_jax.learning.losses import LossConfig
from marl_jax.learning.network import Qwen3
from marl_jax.learning.prefix import part_count, takes_rows
from marl_jax.models import ModelConfig
from marl_jax.models.attention import block_size, choose
from marl_jax.models.lora import init_lora
from marl_jax.models.weight_table import abstract, share_per_device
from marl_jax.planning.workload import Shape

ONE_BLOCK = 64  # tokens of a row whose attention is one block


@dataclasses.dataclass(frozen=True)
class Model:
    """The model's properties that its costs depend on."""

    config: ModelConfig
    platform: str = "cpu"
    capability: str = ""
    remat: str = "none"
    attention: str | None = None
    lora_rank: int = 0  # 0: all weights are trained

    @property
    def heads(self) -> int:
        """Width of all query heads together."""
        return self.config.num_attention_heads * self.config.head_dim

    @property
    def kv_heads(self) -> int:
        """Width of all key heads together."""
        return self.config.num_key_value_heads * self.config.head_dim

    @property
    def layer(self) -> int:
        """Weights of one layer's matrices."""
        c = self.config
        return c.hidden_size * (2 * self.heads + 2 * self.kv_heads + 3 * c.intermediate_size)

    @property
    def head(self) -> int:
        """Weights of the matrix that makes logits."""
        return self.config.hidden_size * self.config.vocab_size

    @property
    def weights(self) -> int:
        """Bytes of the model as it is stored."""
        return size(abstract(self.config))

    @property
    def width(self) -> int:
        """Bytes per number of an activation; a CPU computes bfloat16 in float32."""
        return 4 if self.platform == "cpu" else jnp.dtype(self.config.dtype).itemsize

    @property
    def widened(self) -> bool:
        """Whether the programs hold copies of weights and caches in float32."""
        return self.platform == "cpu" and self.config.dtype == "bfloat16"

    @property
    def trained(self) -> int:
        """How many numbers one policy trains."""
        return size(trained_tree(self.config, self.lora_rank)) // 4

    def per_device(self, devices: int) -> float:
        """The part of what is trained that each of the devices along "model" holds; adapters are whole on each."""
        return 1.0 if self.lora_rank else share_per_device(self.config, devices)

    def kept(self, remat: str) -> float:
        """How many numbers all layers together keep per token for the backward pass."""
        config = dataclasses.replace(self.config, dtype="float32")
        network = Qwen3(config, 1.0 if self.lora_rank else None, remat, "blocks")
        fewer, more = (_residuals(network, self.lora_rank, rows) for rows in (8, 16))
        return (more - fewer) / (8 * ONE_BLOCK)


def size(tree: Any) -> int:
    """Bytes of a tree of arrays or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@functools.lru_cache
def trained_tree(config: ModelConfig, lora_rank: int) -> Any:
    """The shapes of the weights that one policy trains, in float32."""
    config = dataclasses.replace(config, dtype="float32")
    if not lora_rank:
        return abstract(config)
    first = lambda leaf: leaf[0]
    return jax.eval_shape(lambda: jax.tree.map(first, init_lora(0, config, lora_rank, 1)))


@functools.lru_cache
def _residuals(network: Qwen3, lora_rank: int, rows: int) -> int:
    """How many numbers the backward pass of `rows` rows of one block takes, weights and inputs not counted."""
    settings = update_programs.Settings(network, LossConfig(), chunk=4096, sampler_weights=True)
    frozen = abstract(network.config) if lora_rank else None

    def backward(tree: Any, frozen: Any, batch: Any) -> Any:
        return jax.tree.leaves(
            jax.vjp(lambda tree: update_programs.score(settings, tree, frozen, batch), tree)[1]
        )

    batch = Shape(rows, 0, ONE_BLOCK, 1, ONE_BLOCK).arrays()
    traced = jax.make_jaxpr(backward)(trained_tree(network.config, lora_rank), frozen, batch).jaxpr
    inputs = {id(variable) for variable in traced.invars}
    residuals = {id(variable): variable.aval for variable in traced.outvars if id(variable) not in inputs}
    return sum(aval.size * aval.dtype.itemsize for aval in residuals.values()) // 4  # type: ignore[attr-defined]


# ---------------------------------------------------------------- attention


@dataclasses.dataclass(frozen=True)
class Attention:
    """How a layer attends over a micro-batch: plain causal rows, and queries whose scores are written out."""

    rows: int  # of plain causal attention
    length: int
    flash: bool  # in a kernel that writes no scores
    scored: int  # pairs of a query in a branch or pack and a key that it sees
    copied: int = 0  # keys that are copied side by side for these queries
    parts: int = 1  # of these scores; if several, scores are computed again for the backward pass

    @property
    def causal(self) -> float:
        """Pairs of a query and a key in plain rows, without those that blocks skip."""
        return self.rows * self.length * (self.length + min(block_size(self.length), self.length)) / 2


def attention(model: Model, shape: Shape) -> Attention:
    """How a layer attends over a micro-batch of this shape."""
    c = model.config

    def kernel(rows: int, length: int) -> str:
        queries = (rows, length, c.num_attention_heads, c.head_dim)
        return model.attention or choose(model.platform, queries, c.dtype, model.capability)

    if shape.seen:
        parts = max(part_count(shape.rows, *piece) for piece in shape.seen)
        copied = shape.rows * BLOCK * sum(blocks * seen for blocks, seen in shape.seen)
        return Attention(0, 0, False, copied * BLOCK, copied, parts)
    rows, length, scored = shape.rows, shape.prefix or shape.length, 0
    if shape.prefix:
        separate = shape.rows * shape.branches, shape.prefix + shape.length
        if takes_rows(kernel(*separate), shape.prefix, shape.length, unmasked=False):
            rows, length = separate
        else:
            scored = separate[0] * shape.length * separate[1]
    flash = kernel(rows, length) in ("cudnn", "splash")
    return Attention(rows, length, flash, scored, scored // shape.length)


# ---------------------------------------------------------------- bytes of the update


def kept(model: Model, shape: Shape) -> int:
    """Bytes kept for the backward pass: the activations of all layers, and the head."""
    c, attn = model.config, attention(model, shape)
    if model.remat == "none":
        layers = c.num_hidden_layers * _layer_kept(model, shape)
    else:
        layers = int(model.kept(model.remat) * shape.tokens) * model.width
        if model.remat == "dots" and attn.flash and model.platform == "gpu":  # outputs of cuDNN's kernel
            layers += c.num_hidden_layers * attn.rows * attn.length * model.heads * model.width
    return layers + model.head * model.width


def working(model: Model, shape: Shape, chunk: int) -> int:
    """Other bytes of the backward pass: at its start logits of a chunk, later one layer and the gradient so far."""
    c, attn = model.config, attention(model, shape)
    at_once = shape.rows * width_of(shape.rows, shape.sampled, chunk)
    logits = 2 * at_once * c.vocab_size * 4
    plain, tree = 4 * c.num_attention_heads * attn.causal, 4 * c.num_attention_heads * attn.scored
    tree //= attn.parts
    if attn.flash:
        # The mask, also as a bias: an overestimate if no row needs one.
        plain = 3 * attn.rows * attn.length**2 if model.platform == "gpu" else 0
    recomputed = 0 if model.remat == "none" else _layer_kept(model, shape)
    mlp = shape.tokens * (2 * c.intermediate_size + c.hidden_size) * model.width
    layer = recomputed + plain + tree + max(mlp, 2 * plain + tree)
    return int(max(logits, layer + 4 * model.trained))


def _layer_kept(model: Model, shape: Shape) -> int:
    """Bytes that one layer keeps if it computes nothing again."""
    attn = attention(model, shape)
    numbers = model.kept("none") / model.config.num_hidden_layers * shape.tokens
    if not attn.flash:  # keys and values in front of each block, half of them on average; one block is traced
        numbers += attn.rows * model.kv_heads * max(0, attn.length**2 / block_size(attn.length) - attn.length)
    if attn.scored and attn.parts == 1:  # copied keys and values, and unnormalised outputs
        numbers += 2 * attn.copied * model.kv_heads + shape.rows * shape.branches * shape.length * model.heads
    elif shape.prefix:  # queries, keys, values and outputs of the rows
        numbers += attn.rows * attn.length * 2 * (model.heads + model.kv_heads)
    scores = attn.scored if attn.parts == 1 else 0
    return int(numbers * model.width) + 4 * model.config.num_attention_heads * scores


# ---------------------------------------------------------------- operations


def forward_operations(model: Model, shape: Shape) -> int:
    """Operations for the hidden states and the log-probs of one micro-batch."""
    attn = attention(model, shape)
    layers = _layers_forward(model, shape.tokens, attn.causal + attn.scored)
    return int(layers) + 2 * shape.rows * shape.sampled * model.head


def update_operations(model: Model, shape: Shape) -> int:
    """Operations of forward, recomputation and backward (twice forward); frozen weights have no gradient."""
    times = 4 if model.remat == "layer" else 3
    head = 2 * shape.rows * shape.sampled * model.head
    # Logits are computed twice, and so are scores that are not kept.
    attn = attention(model, shape)
    recomputed = head + int(_layers_forward(model, 0, attn.causal + (attn.scored if attn.parts > 1 else 0)))
    full = times * forward_operations(model, shape) + recomputed
    if not model.lora_rank:
        return full
    frozen = head + int(_layers_forward(model, shape.tokens, 0))
    return full - frozen + times * 2 * shape.tokens * model.trained


def serving_operations(model: Model, tokens: float, seen: float, adapters: int) -> float:
    """Operations of layers for tokens that see `seen` tokens on average, through adapters of `adapters` numbers."""
    return _layers_forward(model, tokens, tokens * seen) + 2 * tokens * adapters


def _layers_forward(model: Model, tokens: float, pairs: float) -> float:
    """Operations of all matrices, and of two products for each pair of a query and a key."""
    return model.config.num_hidden_layers * (2 * tokens * model.layer + 4 * model.heads * pairs)
