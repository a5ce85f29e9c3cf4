"""Writing values to distinct places of an array, correctly on every device.

With deterministic kernels, XLA on a GPU makes a scatter sequential, over flattened indices, unless `unique_indices` is
set. In the sequential scatter, an index beyond the end of its row, which JAX drops, becomes one of the next row and
overwrites it (seen on an H200 with JAX 0.11.2). Additions whose indices are all in range are right either way.
"""

from typing import Any

import jax
import jax.numpy as jnp

# Options of `x.at[places].set(values)`: the caller promises that all places differ, even those out of range.
UNIQUE: dict[str, Any] = {"mode": "drop", "unique_indices": True}


def distinct(places: jax.Array, size: int) -> jax.Array:
    """Indices into an axis of `size` entries, where those beyond its end are made distinct along the last axis."""
    return jnp.where(places < size, places, size + jnp.arange(places.shape[-1], dtype=places.dtype))
