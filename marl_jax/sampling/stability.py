"""Widths and lengths of the batch that compute the same bits here, measured with the engine's decode programs.

A compiler may vectorise the same arithmetic differently in another shape. Compacting lanes or growing their cache
then changes log-probabilities by a rounding error, and tokens at near-ties, depending on the other requests in the
batch. So only shapes are used at which every lane was measured to get the bits of the full width and length.
"""

import contextlib
import ctypes
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from marl_jax.hosts.layout import sum_of_bits
from marl_jax.models import ModelConfig
from marl_jax.models.decode import Cache, empty_cache
from marl_jax.sampling import programs
from marl_jax.sampling.lanes import LaneTable
from marl_jax.sampling.shapes import EngineSettings

Shape = tuple[int, int]  # width and length
_digest = jax.jit(jax.vmap(sum_of_bits))  # [W,...] -> [W]: a digest per row
_MEASURED: dict[Any, EngineSettings] = {}  # cache: each process measures once


def stable_shapes(
    params: Any, adapters: Any, config: ModelConfig, settings: EngineSettings, mesh: Mesh | None, scale: float
) -> EngineSettings:
    """The settings without the widths and lengths whose bits differ from those of the largest.

    With rungs there is one width, and each length is needed: a request's tokens are then the same but for near-ties.
    Of the decode programs, this compiles those of the settings, which the engine uses, and no others.
    """
    if len(settings.widths) == len(settings.lengths) == 1 or settings.lanes_at:
        return settings
    shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves((params, adapters)))
    key = (config, settings, mesh, scale, shapes)
    if key not in _MEASURED:
        # Adapters start at zero, which would hide how they round.
        adapters = jax.tree.map(lambda leaf: 0.1 * _numbers(jnp.array(leaf), leaf.ndim - 1), adapters)

        @functools.cache
        def outcome(shape: Shape, filled: int) -> np.ndarray:
            digest = _outcome(params, adapters, config, settings, mesh, scale, shape, filled)
            _trim_memory()
            return digest

        full, context = settings.widths[0], settings.context

        def agrees(width: int, length: int) -> bool:
            largest = outcome((full, context), length)
            return np.array_equal(outcome((width, length), length), largest[:, :width])

        lengths = [n for n in settings.lengths if n == context or agrees(full, n)]
        widths = [w for w in settings.widths if w == full or all(agrees(w, n) for n in lengths)]
        _MEASURED[key] = dataclasses.replace(settings, widths=tuple(widths), lengths=tuple(lengths))
    return _MEASURED[key]


def common_shapes(measured: Sequence[EngineSettings]) -> EngineSettings:
    """The settings with only the widths and lengths that are stable in all of several engines."""
    first, *others = measured
    widths = tuple(w for w in first.widths if all(w in other.widths for other in others))
    lengths = tuple(n for n in first.lengths if all(n in other.lengths for other in others))
    return dataclasses.replace(first, widths=widths, lengths=lengths)


def _trim_memory() -> None:
    """Return freed memory to the system: glibc keeps what compilers and caches freed, over half of a process."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _outcome(
    params: Any,
    adapters: Any,
    config: ModelConfig,
    settings: EngineSettings,
    mesh: Mesh | None,
    scale: float,
    shape: Shape,
    filled: int,
) -> np.ndarray:
    """A digest [4,W] of log-probs and cache of each lane after a dispatch. Lane i gets the same input in all shapes.

    Lane 0 has `filled` columns of its cache filled at the end of the dispatch, the others at most as many.
    """
    width, length = shape
    empty = empty_cache(config, width, length, mesh)
    cache = Cache(tuple(_numbers(k, 3) for k in empty.keys), tuple(_numbers(v, 2) for v in empty.values))
    table, rows = LaneTable(width, 1, settings.stops, settings.features), np.arange(width, dtype=np.int32)
    lanes = table.lanes
    lanes.token[:] = rows % config.vocab_size
    lanes.position[:] = np.maximum(0, filled - settings.steps - rows % filled)
    lanes.active[:], lanes.max_new[:] = True, settings.steps
    lanes.noise[:] = rows[:, None]
    if adapters is not None:
        lanes.adapter[:] = rows % jax.tree.leaves(adapters)[0].shape[0]
    features, steps = settings.features.resolved(), settings.steps
    (cache,), out = programs.decode(
        params, adapters, (cache,), lanes, config=config, features=features, steps=steps, scale=scale
    )
    # The cache of the last layer depends on the attention of all other layers.
    parts = (out.token.T, out.logprob.T, cache.keys[-1][..., :filled], cache.values[-1][:, :, :filled])
    return np.stack([np.asarray(_digest(part)) for part in parts])


@functools.partial(jax.jit, static_argnames="last", donate_argnums=0)
def _numbers(x: jax.Array, last: int) -> jax.Array:
    """Numbers in -1..1 that depend only on an entry's indices, not on the size of axis `last`, which is hashed last."""
    hashed = jnp.zeros(x.shape, jnp.uint32)
    for axis in itertools.chain((i for i in range(x.ndim) if i != last), (last,)):
        hashed = (hashed ^ jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)) * jnp.uint32(0x9E3779B1)
        hashed = hashed ^ (hashed >> 15)
    return ((hashed >> 8).astype(jnp.float32) * 2.0**-23 - 1.0).astype(x.dtype)
