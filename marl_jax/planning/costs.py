"""What programs cost, counted from shapes: what a backward pass keeps, its scratch memory, operations.

What a token keeps is traced: the residuals of the learner's own log-probs. What attention keeps and computes besides
grows with pairs of tokens and is a formula; so is scratch memory. They follow XLA's buffers on a CPU, where they are
tested; an accelerator's compiler may fuse more.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from marl_jax.learning import compiled
from marl_jax.learning.losses import LossConfig
from marl_jax.learning.network import Qwen3
from marl_jax.learning.prefix import rows_pay
from marl_jax.models import ModelConfig
from marl_jax.models.attention import choose
from marl_jax.models.lora import init_lora
from marl_jax.models.weight_table import abstract, num_parameters
from marl_jax.planning.workload import Shape

ONE_BLOCK = 64  # tokens of a row whose attention is one block


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of a model that costs are made of."""

    config: ModelConfig
    platform: str = "cpu"
    capability: str = ""
    remat: str = "none"
    attention: str | None = None
    lora_rank: int = 0  # 0: all weights are trained

    @property
    def heads(self) -> int:
        return self.config.num_attention_heads * self.config.head_dim

    @property
    def kv_heads(self) -> int:
        return self.config.num_key_value_heads * self.config.head_dim

    @property
    def layer(self) -> int:
        """Weights of one layer's matrices."""
        c = self.config
        return c.hidden_size * (2 * self.heads + 2 * self.kv_heads + 3 * c.intermediate_size)

    @property
    def head(self) -> int:
        return self.config.hidden_size * self.config.vocab_size

    @property
    def weights(self) -> int:
        """Bytes of the model as it is stored."""
        return num_parameters(self.config) * jnp.dtype(self.config.dtype).itemsize

    @property
    def layers(self) -> int:
        """Bytes of all layers' matrices."""
        return self.config.num_hidden_layers * self.layer * jnp.dtype(self.config.dtype).itemsize

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
        """Numbers of one policy that learns."""
        return size(trained_tree(self.config, self.lora_rank)) // 4

    def kept(self, remat: str) -> float:
        """Numbers that a token leaves for the backward pass, of all layers."""
        config = dataclasses.replace(self.config, dtype="float32")
        network = Qwen3(config, 1.0 if self.lora_rank else None, remat, "blocks")
        some, more = (_residuals(network, self.lora_rank, rows) for rows in (8, 16))
        return (more - some) / (8 * ONE_BLOCK)


def size(tree: Any) -> int:
    """Bytes of a tree of arrays or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@functools.lru_cache
def trained_tree(config: ModelConfig, lora_rank: int) -> Any:
    """The shapes of what one policy trains, in float32."""
    config = dataclasses.replace(config, dtype="float32")
    if not lora_rank:
        return abstract(config)
    first = lambda leaf: leaf[0]
    return jax.eval_shape(lambda: jax.tree.map(first, init_lora(0, config, lora_rank, 1)))


@functools.lru_cache
def _residuals(network: Qwen3, lora_rank: int, rows: int) -> int:
    """How many numbers the backward pass of so many rows of one block takes, weights and inputs not counted."""
    settings = compiled.Settings(network, LossConfig(), chunk=4096, sampler_weights=True)
    frozen = abstract(network.config) if lora_rank else None

    def backward(tree: Any, frozen: Any, batch: Any) -> Any:
        return jax.tree.leaves(jax.vjp(lambda tree: compiled.score(settings, tree, frozen, batch), tree)[1])

    batch = Shape(rows, 0, ONE_BLOCK, 1, ONE_BLOCK).arrays()
    traced = jax.make_jaxpr(backward)(trained_tree(network.config, lora_rank), frozen, batch).jaxpr
    given = {id(one) for one in traced.invars}
    found = {id(one): one.aval for one in traced.outvars if id(one) not in given}
    return sum(aval.size * aval.dtype.itemsize for aval in found.values()) // 4  # type: ignore[attr-defined]


# ---------------------------------------------------------------- attention


@dataclasses.dataclass(frozen=True)
class Attention:
    """How a layer attends over a micro-batch: plain causal rows, and branches whose scores are written out."""

    rows: int  # of plain causal attention
    length: int
    blocks: int  # of queries
    flash: bool  # in a kernel that writes no scores
    by_rows: (
        bool  # each branch of a tree is a row of its own (`prefix.attend_rows`); on TPUs never counted so
    )
    scored: int  # pairs of a query in a branch and what it sees

    @property
    def causal(self) -> float:
        """Pairs of a query and a key in plain rows, without those that blocks leave out."""
        return self.rows * self.length**2 * (self.blocks + 1) / (2 * self.blocks)


def attention(model: Model, shape: Shape) -> Attention:
    c = model.config

    def flash(rows: int, length: int) -> bool:
        chosen = (rows, length, c.num_attention_heads, c.head_dim)
        kernel = model.attention or choose(model.platform, chosen, c.dtype, model.capability)
        return kernel in ("cudnn", "splash")

    rows, length = shape.rows, shape.prefix or shape.length
    apart = shape.rows * shape.branches, shape.prefix + shape.length
    by_rows = bool(shape.prefix) and model.platform == "gpu" and flash(*apart)
    by_rows = by_rows and rows_pay(shape.prefix, shape.length)
    if by_rows:
        rows, length = apart
    kernel = flash(rows, length)
    blocks = -(-length // min(max(64, length // 8), 512))
    scored = apart[0] * shape.length * apart[1] if shape.prefix and not by_rows else 0
    return Attention(rows, length, blocks, kernel, by_rows, scored)


# ---------------------------------------------------------------- bytes of the update


def kept(model: Model, shape: Shape) -> int:
    """Activations that wait for the backward pass, of all layers, and what stands around them."""
    c, how = model.config, attention(model, shape)
    if model.remat == "none":
        layers = c.num_hidden_layers * _layer_kept(model, shape)
    else:
        layers = int(model.kept(model.remat) * shape.tokens) * model.width
        if model.remat == "dots" and how.flash and model.platform == "gpu":  # what cuDNN's kernel returns
            layers += c.num_hidden_layers * how.rows * how.length * model.heads * model.width
    own = how.scored and shape.rows * shape.branches * shape.length**2
    mask = 4 * own * c.num_attention_heads // c.num_key_value_heads  # one for all layers
    return layers + model.head * model.width + mask


def working(model: Model, shape: Shape, chunk: int) -> int:
    """What the backward pass holds besides: at its start logits of a chunk, later one layer and the gradient so far."""
    c, how, tokens = model.config, attention(model, shape), shape.tokens
    at_once = shape.rows * min(shape.sampled, max(1, chunk // shape.rows))
    logits = 2 * at_once * c.vocab_size * 4
    plain, tree = 4 * c.num_attention_heads * how.causal, 4 * c.num_attention_heads * how.scored
    if how.flash:
        # The mask, and as a bias: too much where no row needs one.
        plain = 3 * how.rows * how.length**2 if model.platform == "gpu" else 0
    again = 0 if model.remat == "none" else _layer_kept(model, shape) - tree
    mlp = again + tokens * (2 * c.intermediate_size + c.hidden_size) * model.width + plain + tree
    held = max(0, again - 6 * tokens * c.intermediate_size * model.width)
    attending = held + 3 * plain + (2 if model.remat == "none" else 3) * tree
    return int(max(logits, max(mlp, attending) + 4 * model.trained))


def _layer_kept(model: Model, shape: Shape) -> int:
    """What one layer keeps that computes nothing again."""
    how = attention(model, shape)
    numbers = model.kept("none") / model.config.num_hidden_layers * shape.tokens
    if not how.flash:  # of keys and of values the first half of all blocks, on average; one block is traced
        numbers += how.rows * how.length * model.kv_heads * (how.blocks - 1)
    if how.by_rows:  # queries, keys and values behind their prompts, and what they attended
        numbers += how.rows * how.length * 2 * (model.heads + model.kv_heads)
    elif shape.prefix:  # what each branch attended to, before it is divided by the sum of its weights
        numbers += shape.rows * shape.branches * shape.length * model.heads
    return int(numbers * model.width) + 4 * model.config.num_attention_heads * how.scored


# ---------------------------------------------------------------- operations


def forward_operations(model: Model, shape: Shape) -> int:
    """Of the hidden states and the log-probs of one micro-batch."""
    layers = model.config.num_hidden_layers * (2 * shape.tokens * model.layer + _attending(model, shape))
    return layers + 2 * shape.rows * shape.sampled * model.head


def update_operations(model: Model, shape: Shape) -> int:
    """Forward, recomputation and backward."""
    again, adapter = int(model.remat == "layer"), model.trained if model.lora_rank else 0
    linear = 2 * shape.tokens * model.layer * ((2 if adapter else 3) + again)
    # The backward pass of attention is two forward ones, and computes the scores of plain blocks again.
    plain = not attention(model, shape).scored
    attending = _attending(model, shape) * (3 + again + plain)
    head = 2 * shape.rows * shape.sampled * model.head * (3 if adapter else 4)
    layers = model.config.num_hidden_layers * (linear + attending)
    return layers + head + 2 * shape.tokens * adapter * (3 + again)


def serving_operations(model: Model, tokens: int, seen: float, adapters: int) -> float:
    """Of the layers, for tokens that see so many on average; `adapters` is the size of all that are multiplied."""
    layers = model.config.num_hidden_layers * (2 * model.layer + 4 * model.heads * seen)
    return tokens * (layers + 2 * adapters)


def _attending(model: Model, shape: Shape) -> int:
    """Of one layer: two products per pair."""
    how = attention(model, shape)
    return int(4 * model.heads * (how.causal + how.scored))
