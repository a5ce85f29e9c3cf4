"""What programs cost, counted from shapes: operations of matrix products, and bytes that are alive at the peak.

Per token and layer the backward pass keeps, without recomputation (I: MLP, H: hidden, N and K: heads and KV heads
times head_dim), besides the keys and values that each block of queries attends to:

    6 I + 5 H + 3 N + 2 K + 2 head_dim   numbers;   remat "dots": 2 I + 2 H + N + 2 K
    (and N of every row that cuDNN's kernel attends);   remat "layer": H

The counts follow XLA's buffers on a CPU, where they are tested; an accelerator's compiler may fuse more.
"""

import dataclasses

import jax.numpy as jnp

from marl_jax.learning.prefix import rows_pay
from marl_jax.models import ModelConfig
from marl_jax.models.attention import choose
from marl_jax.models.decode import cache_bytes
from marl_jax.models.weight_table import num_parameters
from marl_jax.planning.workload import Shape


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of a model that costs are made of."""

    config: ModelConfig
    platform: str = "cpu"
    capability: str = ""
    remat: str = "none"
    attention: str | None = None

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
    def width(self) -> int:
        """Bytes per number of an activation; a CPU computes bfloat16 in float32."""
        return 4 if self.platform == "cpu" else jnp.dtype(self.config.dtype).itemsize

    @property
    def widened(self) -> bool:
        """Whether the programs hold copies of weights and caches in float32."""
        return self.platform == "cpu" and self.config.dtype == "bfloat16"

    def rank_one(self) -> int:
        """Numbers of an adapter, per rank."""
        c = self.config
        inner_and_outer = (
            2 * (c.hidden_size + self.heads)
            + 2 * (c.hidden_size + self.kv_heads)
            + 3 * (c.hidden_size + c.intermediate_size)
        )
        return c.num_hidden_layers * inner_and_outer


# ---------------------------------------------------------------- bytes of the update


def kept(model: Model, shape: Shape) -> int:
    """Activations that wait for the backward pass, of all layers, and what stands around them."""
    c, tokens = model.config, shape.tokens
    tree = _scores(model, shape)[1] if model.remat == "none" else 0
    # What cuDNN's kernel returns is kept, too; of TPUs' nothing is.
    parts = _plain_parts(model, shape) if model.platform == "gpu" else []
    returned = sum(rows * length for rows, length in parts if _flash(model, rows, length))
    per_layer = {
        "none": _layer_kept(model, shape) + tree,
        "dots": model.width
        * (
            tokens * (2 * c.intermediate_size + 2 * c.hidden_size + model.heads + 2 * model.kv_heads)
            + returned * model.heads
        ),
        "layer": tokens * c.hidden_size * model.width,
    }[model.remat]
    # Embedded tokens, the last layer's output and its norm; hidden states of what was sampled, and the head turned.
    ends = (2 * tokens + shape.rows * shape.sampled) * c.hidden_size + model.head
    own = shape.rows * shape.branches * shape.length * shape.length if _scored(model, shape) else 0
    mask = 4 * own * c.num_attention_heads // c.num_key_value_heads  # one for all layers
    return c.num_hidden_layers * per_layer + ends * model.width + mask


def working(model: Model, shape: Shape, chunk: int, trained: int) -> int:
    """What the backward pass holds besides: at its start logits of a chunk, later one layer and the gradient so far.

    `trained` is the number of weights that the gradient is of.
    """
    c, tokens = model.config, shape.tokens
    at_once = shape.rows * min(shape.sampled, max(1, chunk // shape.rows))
    logits = 2 * at_once * c.vocab_size * 4
    plain, tree = _scores(model, shape)
    again = 0 if model.remat == "none" else _layer_kept(model, shape)
    mlp = again + tokens * (2 * c.intermediate_size + c.hidden_size) * model.width + plain + tree
    held = max(0, again - 6 * tokens * c.intermediate_size * model.width)
    attention = held + 3 * plain + (2 if model.remat == "none" else 3) * tree
    return max(logits, max(mlp, attention) + 4 * trained)


def _layer_kept(model: Model, shape: Shape) -> int:
    c = model.config
    numbers = 6 * c.intermediate_size + 5 * c.hidden_size + 3 * model.heads + 2 * model.kv_heads
    numbers += 2 * c.head_dim  # cosines and sines
    total = shape.tokens * numbers
    for rows, length in _plain_parts(model, shape):
        blocks = 1 if _flash(model, rows, length) else _blocks(length)
        total += (
            rows * length * model.kv_heads * (blocks + 1)
        )  # of keys, and of values: (blocks + 1) / 2 each
    if _by_rows(model, shape):  # queries, keys and values behind their prompts, and what they attended
        row_tokens = shape.rows * shape.branches * (shape.prefix + shape.length)
        total += row_tokens * 2 * (model.heads + model.kv_heads)
    elif shape.prefix:  # queries, keys and values in the order of the branches, and what they attended
        branches = shape.rows * shape.branches * shape.length
        total += branches * (3 * model.heads + 4 * model.kv_heads)
    return total * model.width


def _scores(model: Model, shape: Shape) -> tuple[int, int]:
    """Bytes of attention scores of one layer: (those of plain causal attention, those of branches behind a prompt)."""
    heads = model.config.num_attention_heads
    plain = 0
    for rows, length in _plain_parts(model, shape):
        if _flash(model, rows, length):
            # The mask, and as a bias: too much where no row needs one.
            plain += 3 * rows * length * length if model.platform == "gpu" else 0
        else:
            plain += int(4 * rows * heads * length * length * (_blocks(length) + 1) / (2 * _blocks(length)))
    own = shape.rows * shape.branches * shape.length
    return plain, 4 * heads * own * (shape.prefix + shape.length) if _scored(model, shape) else 0


def _by_rows(model: Model, shape: Shape) -> bool:
    """Whether each branch of a tree is a row of its own (`prefix.attend_rows`); on TPUs always counted as scored."""
    if not shape.prefix or model.platform != "gpu":
        return False
    row = (shape.rows * shape.branches, shape.prefix + shape.length)
    return _flash(model, *row) and rows_pay(shape.prefix, shape.length)


def _scored(model: Model, shape: Shape) -> bool:
    """Whether the scores of branches with their prompt are written out (`prefix.attend_scores`)."""
    return bool(shape.prefix) and not _by_rows(model, shape)


def _plain_parts(model: Model, shape: Shape) -> list[tuple[int, int]]:
    """(rows, length) of plain causal attention: of whole rows, or of the shared prompts alone."""
    if _by_rows(model, shape):
        return [(shape.rows * shape.branches, shape.prefix + shape.length)]
    return [(shape.rows, shape.prefix or shape.length)]


def _blocks(length: int) -> int:
    return -(-length // min(max(64, length // 8), 512))


def _flash(model: Model, rows: int, length: int) -> bool:
    c = model.config
    shape = (rows, length, c.num_attention_heads, c.head_dim)
    chosen = model.attention or choose(model.platform, shape, c.dtype, model.capability)
    return chosen in ("cudnn", "splash")


# ---------------------------------------------------------------- bytes of sampling


def decode_working(model: Model, lanes: int, attended: int) -> int:
    """Of one decode step: the layers cut apart, and four arrays of logits while a token is drawn."""
    return _cut_out(model, cache_bytes(model.config, lanes, attended)) + 16 * lanes * model.config.vocab_size


def prefill_working(model: Model, rows: int, chunk: int, attended: int) -> int:
    """Of a prefill: its rows apart, and the scores beside their softmax, or the MLP, of one layer."""
    c = model.config
    scores = rows * chunk * attended * (8 * c.num_attention_heads + 1)
    mlp = rows * chunk * 2 * (c.intermediate_size + c.hidden_size) * model.width
    part = cache_bytes(c, rows, attended)
    return _cut_out(model, part) + part + max(scores, mlp)


def _cut_out(model: Model, cache: int) -> int:
    """The weights of every layer on their own; where bfloat16 is widened, these and the cache in float32."""
    layers = model.config.num_hidden_layers * model.layer * jnp.dtype(model.config.dtype).itemsize
    return 3 * layers + 2 * cache if model.widened else layers


# ---------------------------------------------------------------- operations


def forward_operations(model: Model, shape: Shape) -> int:
    """Of the hidden states and the log-probs of one micro-batch."""
    c = model.config
    layers = c.num_hidden_layers * (2 * shape.tokens * model.layer + _attention_operations(model, shape))
    return layers + 2 * shape.rows * shape.sampled * model.head


def update_operations(model: Model, shape: Shape, adapter: int) -> int:
    """Forward, recomputation and backward; `adapter` is the size of what is trained over a frozen base, or 0."""
    c = model.config
    again = 1 if model.remat == "layer" else 0
    linear = 2 * shape.tokens * model.layer * ((2 if adapter else 3) + again)
    # The backward pass of attention is two forward ones, and computes the scores of plain blocks again.
    attention = _attention_operations(model, shape) * (3 + again + (0 if _scored(model, shape) else 1))
    head = 2 * shape.rows * shape.sampled * model.head * (3 if adapter else 4)
    return c.num_hidden_layers * (linear + attention) + head + 2 * shape.tokens * adapter * (3 + again)


def decode_operations(model: Model, attended: int, adapters: int) -> int:
    """Of one sampled token that attends to so many; `adapters` is the size of all that are multiplied."""
    c = model.config
    layers = c.num_hidden_layers * (2 * model.layer + 4 * model.heads * attended)
    return layers + 2 * model.head + 2 * adapters


def prefill_operations(model: Model, fed: int, prompt: int, adapters: int) -> int:
    """Of `fed` tokens at the end of a prompt."""
    c = model.config
    seen = prompt - fed / 2
    return int(fed * (c.num_hidden_layers * (2 * model.layer + 4 * model.heads * seen) + 2 * adapters))


def _attention_operations(model: Model, shape: Shape) -> int:
    """Of one layer: two products per score."""
    scores = 0.0
    for rows, length in _plain_parts(model, shape):
        scores += rows * length * length * (_blocks(length) + 1) / (2 * _blocks(length))
    if _scored(model, shape):
        scores += shape.rows * shape.branches * shape.length * (shape.prefix + shape.length)
    return int(4 * model.heads * scores)


def weights(config: ModelConfig) -> int:
    """Bytes of the model as it is stored."""
    return num_parameters(config) * jnp.dtype(config.dtype).itemsize
