"""The compiled programs of the engine: prefill, decode, and moves of cache rows.

Each is a pure function jitted over shapes alone. The host keeps the state of every lane (`Lanes`) and passes
it to each dispatch; only weights and caches stay on the device, and caches are donated from call to call.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from marl_jax.models import decode as model
from marl_jax.models import qwen3
from marl_jax.models.decode import Cache
from marl_jax.models.model_config import ModelConfig
from marl_jax.models.scatter import UNIQUE, distinct
from marl_jax.models.weight_table import Tree
from marl_jax.own import OwnError, as_static, call_user_function, in_words, own_function
from marl_jax.sampling import methods

LARGE_VOCABULARY = 4096  # from here on, selecting up to a 64th of it is faster than bisection
Array = Any  # numpy on the host, JAX inside a program


@dataclasses.dataclass(frozen=True)
class Features:
    """Optional features of the compiled decode step. Each costs time in every step, so each is off by default."""

    truncate: bool = False  # requests may use top-k and top-p
    min_new: bool = False  # stop tokens barred from a completion's first tokens
    candidates: int = 0  # C > 0: record the kept set, of at most C tokens
    # A user's "module:function" that removes tokens before top-k and top-p.
    sampler: str | None = None

    def resolved(self) -> "Features":
        """With the function of the sampler, so that another function under the same name is compiled anew."""
        return _Resolved(**vars(self), own=as_static(self.sampler, "sampler")) if self.sampler else self


@dataclasses.dataclass(frozen=True)
class _Resolved(Features):
    own: Any = None


@flax.struct.dataclass
class Lanes:
    """The state of W lanes. Arrays on the host; fields that a dispatch advances are marked *."""

    token: Array  # [W] int32 * the token to feed next
    position: Array  # [W] int32 * its position, which is the number of cached tokens
    active: Array  # [W] bool *
    generated: Array  # [W] int32 * how many tokens were sampled
    max_new: Array  # [W] int32
    min_new: Array  # [W] int32
    temperature: Array  # [W] float32, 0 is greedy
    top_k: Array  # [W] int32, 0 is off
    top_p: Array  # [W] float32, 1 is off
    stops: Array  # [W,S] int32 stop tokens, padded with -1
    noise: Array  # [W,2] uint32 the key of the request's noise
    adapter: Array  # [W] int32, -1 is the base


@flax.struct.dataclass
class Feeds:
    """Prompt tokens and their places in a cache. Arrays on the host."""

    rows: Array  # [B] int32, out of range is padding
    tokens: Array  # [B,C] int32
    start: Array  # [B] int32 the position of the first token
    adapter: Array  # [B] int32, -1 is the base


@flax.struct.dataclass
class Sampled:
    """The samples of one dispatch of n steps, the only arrays that are read back to the host."""

    token: Array  # [n,W] int32
    logprob: Array  # [n,W]
    sampled: Array  # [n,W] bool: the lane was active in this step
    active: Array  # [W] bool: the lane is active after the last step
    kept: Array | None  # [n,W,C] int32, padded with -1


@functools.partial(jax.jit, static_argnames=("config", "features", "steps", "scale"), donate_argnames="rungs")
@qwen3.full_precision
def decode(
    params: Tree,
    adapters: Tree | None,
    rungs: tuple[Cache, ...],
    lanes: Lanes,
    *,
    config: ModelConfig,
    features: Features,
    steps: int,
    scale: float,
) -> tuple[tuple[Cache, ...], Sampled]:
    """Sample up to `steps` tokens in every active lane. Lanes that end earlier idle until the dispatch ends.

    The lanes are the rows of the caches, one cache after the other; lanes after the last row are idle.
    """
    layers = model.unstack(params, config)
    lora = model.unstack_lora(adapters, lanes.adapter, scale, config)

    def step(carry: Any, _: None) -> tuple[Any, Any]:
        rungs, lanes = carry
        hidden, rungs = model.extend_rungs(
            params, layers, config, rungs, lanes.token[:, None], lanes.position, lora
        )
        logits = qwen3.unembed(params, config, hidden[:, 0])
        token, logprob, kept = sample(logits, lanes, features)
        return (rungs, advanced(lanes, token)), (token, logprob, lanes.active, kept)

    (rungs, lanes), (token, logprob, sampled, kept) = jax.lax.scan(step, (rungs, lanes), None, length=steps)
    return rungs, Sampled(token, logprob, sampled, lanes.active, kept)


def advanced(lanes: Lanes, token: jax.Array) -> Lanes:
    """The lanes after a sampled token [W]; those that are not active stay as they are."""
    ends = jnp.any(token[:, None] == lanes.stops, axis=1) | (lanes.generated + 1 >= lanes.max_new)
    moved = lanes.active.astype(jnp.int32)
    return dataclasses.replace(
        lanes,
        token=jnp.where(lanes.active, token, lanes.token),
        position=lanes.position + moved,
        generated=lanes.generated + moved,
        active=lanes.active & ~ends,
    )


def sample(
    logits: jax.Array, lanes: Lanes, features: Features
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """A token per lane from logits [W,V], its log-prob and, if `features` ask for them, the kept ids."""
    greedy = lanes.temperature == 0
    if features.min_new:
        early = (lanes.generated < lanes.min_new)[:, None]
        stop = jnp.any(lanes.stops[..., None] == jnp.arange(logits.shape[1]), axis=1)
        logits = jnp.where(early & stop, -jnp.inf, logits)
    logits = methods.temper(logits, lanes.temperature)
    if features.sampler:  # before top-k, which might leave none of the tokens that it allows
        untouched, logits = logits, _apply_sampler(features.sampler, logits)
    kept = None
    if features.truncate:
        top_k, top_p = jnp.where(greedy, 0, lanes.top_k), jnp.where(greedy, 1.0, lanes.top_p)
        if logits.shape[1] >= LARGE_VOCABULARY and 0 < features.candidates <= logits.shape[1] // 64:
            logits, kept = methods.truncate_few(logits, top_k, top_p, features.candidates)
        else:
            logits = methods.truncate(logits, top_k, top_p)
    token, logprob = methods.draw(logits, methods.noise(lanes.noise, lanes.generated), greedy)
    if features.sampler:  # greedy lanes log the distribution that nothing was removed from, as with top-k
        whole = jnp.take_along_axis(jax.nn.log_softmax(untouched), token[:, None], axis=1)[:, 0]
        logprob = jnp.where(greedy, whole, logprob)
    if features.candidates:
        kept = methods.kept_ids(logits, features.candidates) if kept is None else kept
        kept = jnp.where(greedy[:, None], -1, kept)
    return token, logprob, kept


@functools.partial(jax.jit, static_argnames=("config", "attended", "scale"), donate_argnames="cache")
def prefill(
    params: Tree,
    adapters: Tree | None,
    cache: Cache,
    feeds: Feeds,
    *,
    config: ModelConfig,
    attended: int,
    scale: float,
) -> tuple[Cache, jax.Array]:
    """Feed tokens to rows of the cache.

    The second result can be waited for even after the cache was donated to a later program.
    """
    layers = model.unstack(params, config)
    lora = model.unstack_lora(adapters, feeds.adapter, scale, config)
    cached = _cut(cache, feeds.rows, attended)
    _, part = model.extend(params, layers, config, cached, feeds.tokens, feeds.start, lora)
    return _paste(cache, feeds.rows, part, attended), jnp.sum(feeds.start)


@functools.partial(jax.jit, donate_argnames="into")
def copy_rows(source: Cache, into: Cache, from_rows: jax.Array, to_rows: jax.Array) -> Cache:
    """Copy rows from_rows [B] of source to to_rows [B] of another cache, over the shorter length.

    Rows out of range are padding.
    """
    length = min(source.length, into.length)
    return _paste(into, to_rows, _cut(source, from_rows, length), length)


@functools.partial(jax.jit, donate_argnames="cache")
def copy_rows_within(cache: Cache, from_rows: jax.Array, to_rows: jax.Array) -> Cache:
    """`copy_rows` inside one cache."""
    return _paste(cache, to_rows, _cut(cache, from_rows, cache.length), cache.length)


@functools.partial(jax.jit, donate_argnames=("lower", "upper"))
def swap_rows(lower: Cache, upper: Cache, low: jax.Array, up: jax.Array) -> tuple[Cache, Cache]:
    """Row `low` of a cache and row `up` of a longer one change places, over the shorter length."""

    def swap(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        size = (1, *map(min, zip(a.shape[1:], b.shape[1:])))
        at, to = (low, 0, 0, 0), (up, 0, 0, 0)
        short, other = jax.lax.dynamic_slice(a, at, size), jax.lax.dynamic_slice(b, to, size)
        return jax.lax.dynamic_update_slice(a, other, at), jax.lax.dynamic_update_slice(b, short, to)

    leaves, structure = jax.tree.flatten(lower)
    lows, ups = zip(*map(swap, leaves, jax.tree.leaves(upper)))
    return jax.tree.unflatten(structure, lows), jax.tree.unflatten(structure, ups)


def grow(cache: Cache, length: int) -> Cache:
    """The cache with room for `length` tokens; the old one is deleted array by array: one at a time exists twice."""
    keys = tuple(_in_place_of(k, _pad(k, length, axis=3)) for k in cache.keys)
    return Cache(keys, tuple(_in_place_of(v, _pad(v, length, axis=2)) for v in cache.values))


def take(cache: Cache, rows: Array) -> Cache:
    """The given rows [R] of a cache in that order; the old one is deleted as in `grow`."""
    return jax.tree.map(lambda x: _in_place_of(x, _take(x, rows)), cache)


def _in_place_of(old: jax.Array, new: jax.Array) -> jax.Array:
    old.delete()  # takes effect once no running program reads it
    return new


@functools.partial(jax.jit, static_argnames=("length", "axis"))
def _pad(x: jax.Array, length: int, axis: int) -> jax.Array:
    widths = [(0, length - size if i == axis else 0) for i, size in enumerate(x.shape)]
    return jnp.pad(x, widths)


@jax.jit
def _take(x: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.take(x, rows, axis=0, mode="clip")


def _cut(cache: Cache, rows: jax.Array, length: int) -> Cache:
    """The first `length` columns of the given rows."""
    keys = tuple(k.at[rows, :, :, :length].get(mode="clip") for k in cache.keys)
    return Cache(keys, tuple(v.at[rows, :, :length].get(mode="clip") for v in cache.values))


def _paste(cache: Cache, rows: jax.Array, part: Cache, length: int) -> Cache:
    """The cache with the first `length` columns of the given rows replaced; rows out of range are dropped."""
    rows = distinct(rows, len(cache.keys[0]))
    keys = tuple(k.at[rows, :, :, :length].set(p, **UNIQUE) for k, p in zip(cache.keys, part.keys))
    values = tuple(v.at[rows, :, :length].set(p, **UNIQUE) for v, p in zip(cache.values, part.values))
    return Cache(keys, values)


def _apply_sampler(name: str, logits: jax.Array) -> jax.Array:
    result = call_user_function(own_function(name, "sampler"), f"sampler '{name}'", logits)
    if jnp.shape(result) != logits.shape or not jnp.issubdtype(jnp.asarray(result).dtype, jnp.floating):
        raise OwnError(
            f"sampler '{name}' returned {in_words(result)}; return logits {list(logits.shape)}, as it was given"
        )
    # A sampler may write -1e9 for -inf, or inf for the only tokens to keep.
    result = result.astype(jnp.float32)
    gap = jnp.where(jnp.isposinf(result), 0.0, result - jnp.max(result, axis=-1, keepdims=True))
    return jnp.where(jnp.exp(gap) > 0, jnp.where(jnp.isposinf(result), 0.0, result), -jnp.inf)
