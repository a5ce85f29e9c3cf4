"""Texts as rows of characters, and functions for readers of one row.

A text begins at the left of its row and is followed by zeros. `compiled.alphabet` turns tokens into texts and back.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Text:
    """Rows of text, or one row inside of a function that is mapped over rows."""

    chars: jax.Array  # UInt8[B N], zeros after the end
    length: jax.Array  # Int32[B]


# ---------------------------------------------------------------- functions of one row


def starts(chars: jax.Array, word: str) -> jax.Array:
    """Bool [N]: whether the word begins at each place."""
    padded = jnp.pad(chars, (0, len(word)))
    return functools.reduce(
        jnp.logical_and, (padded[k : k + len(chars)] == ord(char) for k, char in enumerate(word))
    )


def among(chars: jax.Array, which: bytes) -> jax.Array:
    """Bool [N]: whether each character is one of these."""
    return jnp.isin(chars, jnp.asarray(list(which), jnp.uint8))


def following(chars: jax.Array, count: int = 1) -> jax.Array:
    """UInt8 [N]: the character `count` places after each place (before it, if negative); 0 past the ends."""
    if count < 0:
        return jnp.pad(chars, (-count, 0))[: len(chars)]
    return jnp.pad(chars, (0, count))[count:]


def next_place(marks: jax.Array) -> jax.Array:
    """Int32 [N]: the first marked place at or after each place; N if there is none."""
    place = jnp.arange(len(marks), dtype=jnp.int32)
    return jax.lax.cummin(jnp.where(marks, place, len(marks)), reverse=True)


def place_before(marks: jax.Array) -> jax.Array:
    """Int32 [N]: the last marked place at or before each place; -1 if there is none."""
    place = jnp.arange(len(marks), dtype=jnp.int32)
    return jax.lax.cummax(jnp.where(marks, place, -1))


def part(chars: jax.Array, start: jax.Array, end: jax.Array) -> Text:
    """The characters start..end as a separate text."""
    size = jnp.maximum(end - start, 0)
    place = jnp.arange(len(chars), dtype=jnp.int32)
    moved = chars.at[place + start].get(mode="fill", fill_value=0)
    return Text(jnp.where(place < size, moved, 0), size)
