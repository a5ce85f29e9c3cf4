"""Prefill and decoding of a batch in loops: each prompt is prefilled once, then all lanes that share it decode.

    stem [G, P]  keys and values of each prompt without its last token        prefilled in blocks by length
    own [W, M]   keys and values of each lane, W = G x S: the prompt's last token, then the samples

All lanes write the same column in each turn, until all have ended; once at most a quarter is active, these lanes are
gathered into a batch of that size. A token's noise depends on its lane's key and its number, as in the engine.

The axis of the K key-value heads is merged with that of prompts or lanes. If it were separate (one entry in small
models), XLA on a CPU would copy every cache in every turn of the loop: it writes into one copy and reads another.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marl_jax.compiled.widths import in_blocks, ladder, over_seeds
from marl_jax.models import qwen3
from marl_jax.models.attention import self_attention
from marl_jax.models.decode import unstack, unstack_lora
from marl_jax.models.lora import LayerLora
from marl_jax.models.model_config import ModelConfig
from marl_jax.models.scatter import UNIQUE
from marl_jax.models.weight_table import Tree
from marl_jax.sampling.programs import Features, Lanes, advanced, sample

BLOCK = 32  # prompts that are prefilled together
LEAST_LANES = 128  # batches with fewer lanes are not gathered into a smaller one


@dataclasses.dataclass(frozen=True)
class Static:
    """The static settings of decoding."""

    model: ModelConfig
    scale: float | None  # of the adapter; None: no adapter
    features: Features
    max_new: int
    seeds_axis: str | None = None


class Stem(NamedTuple):
    """Keys and values of each prompt, which its lanes attend to before their own."""

    keys: tuple[jax.Array, ...]  # [G x K, D, P] per layer
    values: tuple[jax.Array, ...]  # [G x K, P, D]
    length: jax.Array  # [G]


class LaneCache(NamedTuple):
    """Keys and values of each lane's own tokens."""

    keys: tuple[jax.Array, ...]  # [W x K, D, M] per layer
    values: tuple[jax.Array, ...]  # [W x K, M, D]


class Samples(NamedTuple):
    """The samples of a batch."""

    tokens: jax.Array  # [W, M], padded with 0
    logprobs: jax.Array  # [W, M]
    length: jax.Array  # [W]


class _Weights(NamedTuple):
    params: Tree
    layers: list[Tree]
    adapter: Tree | None

    def lora(self, rows: int, static: Static) -> list[LayerLora | None]:
        index = jnp.zeros(rows, jnp.int32)
        return unstack_lora(self.adapter, index, static.scale or 1.0, static.model)


@qwen3.full_precision
def decode(
    static: Static,
    params: Tree,
    adapter: Tree | None,  # without a policy axis
    tokens: jax.Array,  # [G, P] the prompts
    length: jax.Array,  # [G]
    lanes: Lanes,  # [W] in the order of the prompts; token, position and generated are set here
) -> Samples:
    """The completions of all active lanes."""
    stacked = None if adapter is None else jax.tree.map(lambda leaf: leaf[None], adapter)
    if adapter is None:
        params = {**params, "layers": jax.vmap(qwen3.fused)(params["layers"])}
    weights = _Weights(params, unstack(params, static.model), stacked)
    active = lanes.active.reshape(len(tokens), -1)
    prefilled = jnp.where(active.any(axis=1), length - 1, 0)
    stem = _prefill(static, weights, tokens, prefilled)
    share = active.shape[1]
    last = jnp.take_along_axis(tokens, (length - 1)[:, None], axis=1)[:, 0]
    lanes = dataclasses.replace(
        lanes, token=jnp.repeat(last, share), position=jnp.repeat(length - 1, share), generated=None
    )
    return _decode(static, weights, stem, lanes)


def _prefill(static: Static, weights: _Weights, tokens: jax.Array, length: jax.Array) -> Stem:
    """Keys and values of the first `length` [G] tokens of each prompt."""
    config, width = static.model, tokens.shape[1]

    def block(rows: jax.Array, width_here: int) -> Any:
        fed = tokens.at[rows].get(mode="clip")[:, :width_here]
        x = qwen3.embed(weights.params, fed)
        angles = qwen3.rotation(config, jnp.broadcast_to(jnp.arange(width_here), fed.shape))
        padding = ((0, 0), (0, 0), (0, 0), (0, width - width_here))

        def step(x: jax.Array, weights_of_layer: tuple[Tree, LayerLora | None]) -> tuple[jax.Array, Any]:
            layer, lora = weights_of_layer
            q, k, v = qwen3.project_qkv(layer, config, x, angles, lora)
            x = x + qwen3.project_out(layer, self_attention(q, k, v), lora)
            x = x + qwen3.mlp(layer, config, x, lora)
            keys = jnp.pad(jnp.transpose(k, (0, 2, 3, 1)), padding)
            return x, (keys, jnp.pad(jnp.transpose(v, (0, 2, 1, 3)), (*padding[:2], padding[3], padding[2])))

        lora = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights.lora(len(rows), static))
        layers = weights.params["layers"], lora
        keys, values = jax.lax.scan(step, x, layers, unroll=jax.default_backend() != "cpu")[1]
        return tuple(keys), tuple(values)

    # Prefill is a small part of a step: a CPU compiles one layer. A single block has one width, several have two.
    widths = ladder(width) if len(tokens) > BLOCK else (width,)
    blocks = in_blocks(length, BLOCK, widths, block, static.seeds_axis)
    keys, values = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), blocks)
    return Stem(keys, values, length)


class _Loop(NamedTuple):
    step: jax.Array  # []
    lanes: Lanes
    own: LaneCache
    out: Samples


def _decode(static: Static, weights: _Weights, stem: Stem, lanes: Lanes) -> Samples:
    config, count, most = static.model, len(lanes.token), static.max_new
    kv, dim, layers = config.num_key_value_heads, config.head_dim, config.num_hidden_layers
    zeros = lambda *more: tuple(jnp.zeros((count * kv, *more), config.dtype) for _ in range(layers))
    own = LaneCache(zeros(dim, most), zeros(most, dim))
    tokens, logprobs = jnp.zeros((count, most), jnp.int32), jnp.zeros((count, most), jnp.float32)
    out = Samples(tokens, logprobs, jnp.zeros(count, jnp.int32))
    loop = _Loop(jnp.zeros((), jnp.int32), lanes, own, out)
    few = count // 4 if count >= LEAST_LANES else 0

    def run(start: _Loop, stem: Stem, more_than: int) -> _Loop:
        def goes_on(loop: _Loop) -> jax.Array:
            active = over_seeds(jnp.sum(loop.lanes.active), static.seeds_axis)
            return (loop.step < most) & (active > more_than)

        return jax.lax.while_loop(goes_on, lambda loop: _step(static, weights, stem, loop), start)

    def gathered(loop: _Loop) -> Samples:
        lane = jnp.argsort(~loop.lanes.active, stable=True)[:few]
        prompt = lane // (count // len(stem.length))
        take = functools.partial(jax.tree.map, lambda x: x[lane])
        heads = lambda rows: (rows[:, None] * kv + jnp.arange(kv)).reshape(-1)
        own = jax.tree.map(lambda x: x[heads(lane)], loop.own)
        keys, values = jax.tree.map(lambda x: x[heads(prompt)], (stem.keys, stem.values))
        stem_of_lane = Stem(keys, values, stem.length[prompt])
        end = run(_Loop(loop.step, take(loop.lanes), own, take(loop.out)), stem_of_lane, 0)
        return jax.tree.map(lambda old, new: old.at[lane].set(new, **UNIQUE), loop.out, end.out)

    loop = run(loop, stem, few)
    if few:
        left = over_seeds(jnp.sum(loop.lanes.active), static.seeds_axis)
        return jax.lax.cond((loop.step < most) & (left > 0), gathered, lambda loop: loop.out, loop)
    return loop.out


def _step(static: Static, weights: _Weights, stem: Stem, loop: _Loop) -> _Loop:
    """Decode one token in every lane."""
    step, lanes, config = loop.step, loop.lanes, static.model
    x = qwen3.embed(weights.params, lanes.token)
    angles = qwen3.rotation(config, lanes.position)
    keys, values = list(loop.own.keys), list(loop.own.values)
    lora = weights.lora(len(lanes.token), static)
    for i, layer in enumerate(weights.layers):
        q, k, v = qwen3.project_qkv(layer, config, x, angles, lora[i])
        k, v = (x.reshape(-1, x.shape[-1]) for x in (k, v))
        keys[i] = jax.lax.dynamic_update_slice_in_dim(keys[i], k[:, :, None], step, axis=2)
        values[i] = jax.lax.dynamic_update_slice_in_dim(values[i], v[:, None], step, axis=1)
        mixed = _attend(q, (stem.keys[i], stem.values[i], stem.length), (keys[i], values[i]), step)
        x = x + qwen3.project_out(layer, mixed, lora[i])
        x = x + qwen3.mlp(layer, config, x, lora[i])
    hidden = qwen3.rms_norm(x, weights.params["final_norm"], config.rms_norm_eps)
    logits = qwen3.unembed(weights.params, config, hidden)
    lanes = dataclasses.replace(lanes, generated=jnp.full_like(lanes.position, step))
    token, logprob, _ = sample(logits, lanes, static.features)
    put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=step, axis=1)
    out = Samples(
        put(loop.out.tokens, jnp.where(lanes.active, token, 0)),
        put(loop.out.logprobs, jnp.where(lanes.active, logprob, 0.0)),
        loop.out.length + lanes.active.astype(jnp.int32),
    )
    lanes = dataclasses.replace(advanced(lanes, token), generated=None)
    return _Loop(step + 1, lanes, LaneCache(tuple(keys), tuple(values)), out)


def _attend(
    q: jax.Array,  # [W, N, D]
    stem: tuple[jax.Array, jax.Array, jax.Array],
    own: tuple[jax.Array, jax.Array],
    step: jax.Array,
) -> jax.Array:
    """Each lane attends to its prompt's stem and its own columns up to `step`, under one softmax in float32."""
    stem_keys, stem_values, length = stem
    own_keys, own_values = own
    lanes, heads, dim = q.shape
    prompts, (merged, _, width) = len(length), stem_keys.shape
    kv = merged // prompts
    share, group = lanes // prompts, heads // kv
    # All lanes of a prompt are rows of one product, so that its keys are read once.
    by_prompt = lambda x: (
        x.reshape(prompts, share, kv, group, -1).swapaxes(1, 2).reshape(merged, share * group, -1)
    )
    by_lane = lambda x: x.reshape(prompts, kv, share, group, -1).swapaxes(1, 2).reshape(lanes * kv, group, -1)
    queries = q.reshape(lanes * kv, group, dim)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    stem_scores = product("xqd,xdp->xqp", by_prompt(queries), stem_keys)
    padding = jnp.arange(width) >= jnp.repeat(length, kv)[:, None]
    stem_scores = jnp.where(padding[:, None], -jnp.inf, stem_scores * dim**-0.5)
    own_scores = product("xqd,xdm->xqm", queries, own_keys)
    own_scores = jnp.where(jnp.arange(own_keys.shape[2]) > step, -jnp.inf, own_scores * dim**-0.5)
    scores = jnp.concatenate([by_lane(stem_scores), own_scores], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(own_values.dtype)
    out = by_lane(jnp.einsum("xqp,xpd->xqd", by_prompt(weights[..., :width]), stem_values))
    out = out + jnp.einsum("xqm,xmd->xqd", weights[..., width:], own_values)
    return out.reshape(q.shape)
