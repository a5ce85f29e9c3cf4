"""Static widths for varying sizes: a switch over a few widths, and blocks of sorted rows that each take one width.

    rows by length ─sort─► blocks of R rows ─scan─► each block in the smallest of a few widths that holds it

A switch stays a switch only if its index is not batched: under `vmap`, all seeds take the width of the largest.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from marl_jax.models.scatter import UNIQUE

T = TypeVar("T")


def ladder(longest: int) -> tuple[int, ...]:
    """Half of the longest, rounded up to a multiple of 8, and the longest. Each width is a program.

    `longest` adds up the largest lengths of all texts, and most texts take a third to a half of theirs.
    """
    half = -(-longest // 16) * 8
    return (half, longest) if half < longest else (longest,)


def over_seeds(value: jax.Array, seeds_axis: str | None) -> jax.Array:
    """The largest value of the seeds that are mapped by `vmap`: one number for all of them."""
    return value if seeds_axis is None else jax.lax.pmax(value, seeds_axis)


def by_width(need: jax.Array, widths: Sequence[int], of: Callable[[int], T], seeds_axis: str | None) -> T:
    """`of(width)` for the smallest width that is at least `need` []; all must return the same shapes."""
    if len(widths) == 1:
        return of(widths[0])
    which = jnp.searchsorted(jnp.asarray(widths), over_seeds(need, seeds_axis))
    branches = [lambda _, width=width: of(width) for width in widths]
    return jax.lax.switch(jnp.minimum(which, len(widths) - 1), branches, None)


def in_blocks(
    length: jax.Array,  # [N], 0 for rows that need nothing
    rows: int,
    widths: Sequence[int],
    of: Callable[[jax.Array, int], Any],
    seeds_axis: str | None,
) -> Any:
    """`of(rows [R], width) -> values [R, ...]` over all rows, block by block: values [N, ...].

    Blocks are padded with row indices from N on. Blocks of rows that need nothing are skipped; their values are 0.
    """
    count = len(length)
    rows = min(rows, count)
    blocks = -(-count // rows)
    order = jnp.concatenate([jnp.argsort(length, stable=True), jnp.arange(count, blocks * rows)])
    order = order.reshape(blocks, rows)
    shapes = jax.eval_shape(lambda indices: of(indices, widths[0]), order[0])
    nothing = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def block(values: Any, indices: jax.Array) -> tuple[Any, None]:
        need = jnp.max(length.at[indices].get(mode="fill", fill_value=0))
        of_width = lambda width: of(indices, width) if width else nothing()
        results = by_width(need, (0, *widths), of_width, seeds_axis)
        return jax.tree.map(lambda x, new: x.at[indices].set(new, **UNIQUE), values, results), None

    # All rows are overwritten below. The zeros depend on an input: XLA would make constants first and keep them.
    zero = jnp.minimum(length[0], 0)
    values = jax.tree.map(lambda x: jnp.full((count, *x.shape[1:]), zero, x.dtype), shapes)
    return jax.lax.scan(block, values, order)[0]
