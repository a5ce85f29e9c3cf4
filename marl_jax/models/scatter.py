"""Writing values to places that all differ, in a way that is the same and right on every device.

With deterministic kernels, XLA on a GPU makes any other scatter sequential, over flattened indices: a place out of
range of its row, which JAX drops, becomes one of the next row and overwrites it (seen on an H200 with JAX 0.11.2).
"""

from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["ONCE", "apart"]

# Options of `x.at[places].set(values)`.
ONCE: dict[str, Any] = {"mode": "drop", "unique_indices": True}


def apart(places: jax.Array, size: int) -> jax.Array:
    """Places along an axis of `size` entries, those beyond its end all different along the last axis."""
    return jnp.where(places < size, places, size + jnp.arange(places.shape[-1]))
