"""Prefill and decoding of a whole batch in loops: each prompt once, then the lanes that share it.

    stem [G, P]  keys and values of each prompt but its last token            prefilled in blocks by length
    own [W, M]   those of each lane, W = G x S: the prompt's last token, then the samples

All lanes write the same column at the same time. The loop ends when all lanes have; when few are left, they are
gathered into a quarter. The noise of a token follows from the lane's key and its number, as in the engine.

The K heads of keys and values are merged with prompts and lanes. As a separate axis, of one entry in small
models, XLA on a CPU copies every cache in every turn of the loop: it writes into one copy and reads another.
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
from marl_jax.sampling.programs import Features, Lanes, sample

BLOCK = 32  # prompts that are prefilled together
LEAST_LANES = 128  # below, finished lanes are not left out


@dataclasses.dataclass(frozen=True)
class Voice:
    """The static settings of the model that decodes."""

    model: ModelConfig
    scale: float | None  # of its adapter; None: no adapter
    features: Features
    max_new: int
    seeds_axis: str | None = None


class Stem(NamedTuple):
    """The keys and values that lanes of a prompt attend to before their own."""

    keys: tuple[jax.Array, ...]  # [G x K, D, P] per layer
    values: tuple[jax.Array, ...]  # [G x K, P, D]
    length: jax.Array  # [G]


class Own(NamedTuple):
    """What each lane has added."""

    keys: tuple[jax.Array, ...]  # [W x K, D, M] per layer
    values: tuple[jax.Array, ...]  # [W x K, M, D]


class Out(NamedTuple):
    """The samples of a batch."""

    tokens: jax.Array  # [W, M], 0 behind the end
    logprobs: jax.Array  # [W, M]
    length: jax.Array  # [W]


class _Weights(NamedTuple):
    params: Tree
    layers: list[Tree]
    adapter: Tree | None

    def lora(self, rows: int, voice: Voice) -> list[LayerLora | None]:
        index = jnp.zeros(rows, jnp.int32)
        return unstack_lora(self.adapter, index, voice.scale or 1.0, voice.model)


@qwen3.full_precision
def speak(
    voice: Voice,
    params: Tree,
    adapter: Tree | None,  # without a policy axis
    tokens: jax.Array,  # [G, P] the prompts
    length: jax.Array,  # [G]
    lanes: Lanes,  # [W] in the order of the prompts; token, position and generated are set here
    forced: jax.Array | None = None,  # [W, M] forced tokens, in place of samples
) -> Out:
    """The completions of all active lanes."""
    stacked = None if adapter is None else jax.tree.map(lambda leaf: leaf[None], adapter)
    if adapter is None:
        params = {**params, "layers": jax.vmap(qwen3.fused)(params["layers"])}
    weights = _Weights(params, unstack(params, voice.model), stacked)
    each = lanes.active.reshape(len(tokens), -1)
    wanted = jnp.where(each.any(axis=1), length - 1, 0)
    stem = _prefill(voice, weights, tokens, wanted)
    share = each.shape[1]
    last = jnp.take_along_axis(tokens, (length - 1)[:, None], axis=1)[:, 0]
    lanes = dataclasses.replace(
        lanes, token=jnp.repeat(last, share), position=jnp.repeat(length - 1, share), generated=None
    )
    return _decode(voice, weights, stem, lanes, forced)


def _prefill(voice: Voice, weights: _Weights, tokens: jax.Array, length: jax.Array) -> Stem:
    """Keys and values of the first `length` [G] tokens of each prompt."""
    config, width = voice.model, tokens.shape[1]

    def block(rows: jax.Array, width_here: int) -> Any:
        fed = tokens.at[rows].get(mode="clip")[:, :width_here]
        x = qwen3.embed(weights.params, fed)
        angles = qwen3.rotation(config, jnp.broadcast_to(jnp.arange(width_here), fed.shape))
        room = ((0, 0), (0, 0), (0, 0), (0, width - width_here))

        def step(x: jax.Array, one: tuple[Tree, LayerLora | None]) -> tuple[jax.Array, Any]:
            layer, lora = one
            q, k, v = qwen3.project_qkv(layer, config, x, angles, lora)
            x = x + qwen3.project_out(layer, self_attention(q, k, v), lora)
            x = x + qwen3.mlp(layer, config, x, lora)
            keys = jnp.pad(jnp.transpose(k, (0, 2, 3, 1)), room)
            return x, (keys, jnp.pad(jnp.transpose(v, (0, 2, 1, 3)), (*room[:2], room[3], room[2])))

        lora = jax.tree.map(lambda *of: jnp.stack(of), *weights.lora(len(rows), voice))
        layers = weights.params["layers"], lora
        keys, values = jax.lax.scan(step, x, layers, unroll=jax.default_backend() != "cpu")[1]
        return tuple(keys), tuple(values)

    # Prefilling is little of a step: on a CPU one layer to compile, and one width for a single block, two for many.
    widths = ladder(width) if len(tokens) > BLOCK else (width,)
    blocks = in_blocks(length, BLOCK, widths, block, voice.seeds_axis)
    keys, values = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), blocks)
    return Stem(keys, values, length)


class _Loop(NamedTuple):
    step: jax.Array  # []
    lanes: Lanes
    own: Own
    out: Out


def _decode(voice: Voice, weights: _Weights, stem: Stem, lanes: Lanes, forced: jax.Array | None) -> Out:
    config, count, most = voice.model, len(lanes.token), voice.max_new
    kv, dim, layers = config.num_key_value_heads, config.head_dim, config.num_hidden_layers
    zeros = lambda *more: tuple(jnp.zeros((count * kv, *more), config.dtype) for _ in range(layers))
    own = Own(zeros(dim, most), zeros(most, dim))
    out = Out(
        jnp.zeros((count, most), jnp.int32),
        jnp.zeros((count, most), jnp.float32),
        jnp.zeros(count, jnp.int32),
    )
    loop = _Loop(jnp.zeros((), jnp.int32), lanes, own, out)
    few = count // 4 if count >= LEAST_LANES else 0

    def run(here: _Loop, stem: Stem, forced: jax.Array | None, more_than: int) -> _Loop:
        def goes_on(now: _Loop) -> jax.Array:
            active = over_seeds(jnp.sum(now.lanes.active), voice.seeds_axis)
            return (now.step < most) & (active > more_than)

        return jax.lax.while_loop(goes_on, lambda now: _one(voice, weights, stem, now, forced), here)

    def gathered(loop: _Loop) -> Out:
        seat = jnp.argsort(~loop.lanes.active, stable=True)[:few]
        prompt = seat // (count // len(stem.length))
        take = functools.partial(jax.tree.map, lambda x: x[seat])
        heads = lambda rows: (rows[:, None] * kv + jnp.arange(kv)).reshape(-1)
        own = jax.tree.map(lambda x: x[heads(seat)], loop.own)
        keys, values = jax.tree.map(lambda x: x[heads(prompt)], (stem.keys, stem.values))
        behind = Stem(keys, values, stem.length[prompt])
        here = run(_Loop(loop.step, take(loop.lanes), own, take(loop.out)), behind, take(forced), 0)
        return jax.tree.map(lambda old, new: old.at[seat].set(new, **UNIQUE), loop.out, here.out)

    loop = run(loop, stem, forced, few)
    if few:
        left = over_seeds(jnp.sum(loop.lanes.active), voice.seeds_axis)
        return jax.lax.cond((loop.step < most) & (left > 0), gathered, lambda loop: loop.out, loop)
    return loop.out


def _one(voice: Voice, weights: _Weights, stem: Stem, now: _Loop, forced: jax.Array | None) -> _Loop:
    """One token in every lane."""
    step, lanes, config = now.step, now.lanes, voice.model
    x = qwen3.embed(weights.params, lanes.token)
    angles = qwen3.rotation(config, lanes.position)
    keys, values = list(now.own.keys), list(now.own.values)
    lora = weights.lora(len(lanes.token), voice)
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
    given = None if forced is None else jax.lax.dynamic_index_in_dim(forced, step, axis=1, keepdims=False)
    token, logprob, _ = sample(logits, lanes, voice.features, given)
    ends = jnp.any(token[:, None] == lanes.stops, axis=1) | (step + 1 >= lanes.max_new)
    moved = lanes.active.astype(jnp.int32)
    put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=step, axis=1)
    out = Out(
        put(now.out.tokens, jnp.where(lanes.active, token, 0)),
        put(now.out.logprobs, jnp.where(lanes.active, logprob, 0.0)),
        now.out.length + moved,
    )
    lanes = dataclasses.replace(
        lanes,
        token=jnp.where(lanes.active, token, lanes.token),
        position=lanes.position + moved,
        active=lanes.active & ~ends,
        generated=None,
    )
    return _Loop(step + 1, lanes, Own(tuple(keys), tuple(values)), out)


def _attend(
    q: jax.Array,  # [W, N, D]
    stem: tuple[jax.Array, jax.Array, jax.Array],
    own: tuple[jax.Array, jax.Array],
    step: jax.Array,
) -> jax.Array:
    """Each lane over the stem of its prompt and its own columns up to `step`, under one softmax in float32."""
    stem_keys, stem_values, length = stem
    own_keys, own_values = own
    lanes, heads, dim = q.shape
    prompts, (merged, _, width) = len(length), stem_keys.shape
    kv = merged // prompts
    share, group = lanes // prompts, heads // kv
    # All lanes of a prompt are rows of one product: its keys are read once.
    by_prompt = lambda x: (
        x.reshape(prompts, share, kv, group, -1).swapaxes(1, 2).reshape(merged, share * group, -1)
    )
    by_lane = lambda x: x.reshape(prompts, kv, share, group, -1).swapaxes(1, 2).reshape(lanes * kv, group, -1)
    queries = q.reshape(lanes * kv, group, dim)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    seen = product("xqd,xdp->xqp", by_prompt(queries), stem_keys)
    hidden = jnp.arange(width) >= jnp.repeat(length, kv)[:, None]
    seen = jnp.where(hidden[:, None], -jnp.inf, seen * dim**-0.5)
    mine = product("xqd,xdm->xqm", queries, own_keys)
    mine = jnp.where(jnp.arange(own_keys.shape[2]) > step, -jnp.inf, mine * dim**-0.5)
    weights = jax.nn.softmax(jnp.concatenate([by_lane(seen), mine], axis=-1), axis=-1).astype(
        own_values.dtype
    )
    out = by_lane(jnp.einsum("xqp,xpd->xqd", by_prompt(weights[..., :width]), stem_values))
    out = out + jnp.einsum("xqm,xmd->xqd", weights[..., width:], own_values)
    return out.reshape(q.shape)
