"""Cached decoding: the layers unrolled over one pair of arrays per layer, updated in place.

One function, `extend`, both prefills and decodes: it feeds C more tokens to every row of a cache (C = 1 while
decoding), or of several caches of different lengths. Keys are stored transposed, which is how a CPU reads one query
per row fastest and no accelerator minds.

    cache row:  [ 0 .. start )  written before   [ start .. start + C )  written now   the rest: never attended
"""

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from marl_jax.models import lora as lora_lib
from marl_jax.models import qwen3
from marl_jax.models.lora import LayerLora
from marl_jax.models.model_config import ModelConfig
from marl_jax.models.scatter import UNIQUE
from marl_jax.models.weight_table import Tree


@flax.struct.dataclass
class Cache:
    """Keys and values of R rows with room for T tokens each; one array per layer, so that each stays in place."""

    keys: tuple[jax.Array, ...]  # [R,K,D,T] per layer, after RoPE
    values: tuple[jax.Array, ...]  # [R,K,T,D] per layer

    @property
    def rows(self) -> int:
        """Rows that the cache has room for."""
        return self.keys[0].shape[0]

    @property
    def length(self) -> int:
        """Tokens that each row has room for."""
        return self.keys[0].shape[-1]


def empty_cache(config: ModelConfig, rows: int, length: int, mesh: Mesh | None = None) -> Cache:
    """A cache of zeros; over a mesh, rows lie along "data" and heads along "model" where those divide them."""
    kv, dim, layers = config.num_key_value_heads, config.head_dim, config.num_hidden_layers
    sharding = None if mesh is None else NamedSharding(mesh, _partition(mesh, rows, kv))

    def zeros(shape: tuple[int, ...]) -> jax.Array:
        return jnp.zeros(shape, config.dtype, device=sharding)

    keys = tuple(zeros((rows, kv, dim, length)) for _ in range(layers))
    return Cache(keys, tuple(zeros((rows, kv, length, dim)) for _ in range(layers)))


def cache_bytes(config: ModelConfig, rows: int, length: int) -> int:
    """How much memory `empty_cache` takes."""
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return rows * length * per_token * jnp.dtype(config.dtype).itemsize


def unstack(params: Tree, config: ModelConfig) -> list[Tree]:
    """The weights of each layer; slice them outside a decoding loop, so that they are cut out once."""
    return [_layer(params["layers"], i) for i in range(config.num_hidden_layers)]


def unstack_lora(
    adapters: Tree | None, index: jax.Array, scale: float, config: ModelConfig
) -> list[LayerLora | None]:
    """The adapters of each layer, and which of them each row takes: index [B], -1 for none."""
    if adapters is None:
        return [None] * config.num_hidden_layers
    select = lora_lib.select_rows(index, adapters, scale)
    stacked = lora_lib.by_layer(adapters)
    return [LayerLora(_layer(stacked, i), select) for i in range(config.num_hidden_layers)]


def extend(
    params: Tree,
    layers: list[Tree],
    config: ModelConfig,
    cache: Cache,
    tokens: jax.Array,
    start: jax.Array,
    lora: list[LayerLora | None],
) -> tuple[jax.Array, Cache]:
    """Feed tokens [R,C] at positions start [R].. to the cache -> final normed hidden states [R,C,H], the cache.

    Tokens that would fall behind the end of the cache are dropped, so a row may be padded on the right.
    """
    hidden, (cache,) = extend_rungs(params, layers, config, (cache,), tokens, start, lora)
    return hidden, cache


@qwen3.full_precision
def extend_rungs(
    params: Tree,
    layers: list[Tree],
    config: ModelConfig,
    rungs: tuple[Cache, ...],
    tokens: jax.Array,
    start: jax.Array,
    lora: list[LayerLora | None],
) -> tuple[jax.Array, tuple[Cache, ...]]:
    """`extend` where the rows lie in several caches, one behind the other: all rows share one product with each weight.

    Rows behind the last cache attend nothing.
    """
    chex.assert_rank([tokens, start], [2, 1])
    ends = np.cumsum([cache.rows for cache in rungs]).tolist()
    positions = start[:, None] + jnp.arange(tokens.shape[1])

    def part(x: jax.Array, rung: int) -> jax.Array:
        rows = rungs[rung].rows
        return x if rows == len(x) else x[ends[rung] - rows : ends[rung]]

    places = [part(positions, rung) for rung in range(len(rungs))]
    seen = [jnp.arange(cache.length) <= at[:, :, None] for cache, at in zip(rungs, places)]  # [R,C,T]
    x = qwen3.embed(params, tokens)
    angles = qwen3.rotation(config, positions)
    written: list[list[tuple[jax.Array, jax.Array]]] = [[] for _ in rungs]
    for i, layer in enumerate(layers):
        q, k, v = qwen3.project_qkv(layer, config, x, angles, lora[i])
        mixed = []
        for rung, cache in enumerate(rungs):
            new = part(k, rung), part(v, rung)
            keys, values = _write(cache.keys[i], cache.values[i], *new, places[rung])
            written[rung].append((keys, values))
            mixed.append(_attend(part(q, rung), keys, values, seen[rung]))
        if ends[-1] < len(q):
            mixed.append(jnp.zeros_like(q[ends[-1] :]))
        x = x + qwen3.project_out(layer, mixed[0] if len(mixed) == 1 else jnp.concatenate(mixed), lora[i])
        x = x + qwen3.mlp(layer, config, x, lora[i])
    hidden = qwen3.rms_norm(x, params["final_norm"], config.rms_norm_eps)
    return hidden, tuple(Cache(*(tuple(arrays) for arrays in zip(*layers_of))) for layers_of in written)


def _layer(stacked: Tree, index: int) -> Tree:
    return jax.tree.map(lambda w: w[index], stacked)


def _write(
    keys: jax.Array, values: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Put k and v [R,C,K,D] into columns positions [R,C]."""
    rows = jnp.arange(keys.shape[0])[:, None]
    return keys.at[rows, :, :, positions].set(k, **UNIQUE), values.at[rows, :, positions].set(v, **UNIQUE)


def _attend(q: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array) -> jax.Array:
    """q [R,C,N,D] over keys [R,K,D,T] and values [R,K,T,D] where seen [R,C,T] -> [R,C,N,D]; softmax in float32."""
    rows, new, heads, dim = q.shape
    kv, group = keys.shape[1], heads // keys.shape[1]
    # All queries of a KV head as the rows of one small matrix: on CPU faster than a product of five dimensions.
    queries = q.reshape(rows, new, kv, group, dim).swapaxes(1, 2).reshape(rows, kv, new * group, dim)
    scores = jnp.einsum("rkqd,rkdt->rkqt", queries, keys, preferred_element_type=jnp.float32)
    seen = jnp.repeat(seen, group, axis=1)[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores * dim**-0.5, -jnp.inf), axis=-1).astype(values.dtype)
    out = jnp.einsum("rkqt,rktd->rkqd", weights, values)
    return out.reshape(rows, kv, new, group, dim).swapaxes(1, 2).reshape(q.shape)


def _partition(mesh: Mesh, rows: int, kv_heads: int) -> PartitionSpec:
    def fits(axis: str, size: int) -> str | None:
        return axis if axis in mesh.shape and size % mesh.shape[axis] == 0 else None

    return PartitionSpec(fits("data", rows), fits("model", kv_heads))
