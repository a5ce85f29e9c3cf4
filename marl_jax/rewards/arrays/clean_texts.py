"""The content of a box as a clean text: without dollars, repeated blanks, closing marks and brackets around all of it.

chars, start..end ──compact──► UInt8[width] ──clean──► text, length ──unwrap──► text for the scan of the answer
"""

import functools

import jax
import jax.numpy as jnp

from marl_jax.models.scatter import UNIQUE, distinct
from marl_jax.rewards.arrays.boxed_spans import is_blank, is_digit, strip
from marl_jax.rewards.arrays.texts import among, following, part, place_before

ALPHABET = b"0123456789+-*/.,;:=(){}x$ \t\n"
BLANK = 32


def compact(chars: jax.Array, start: jax.Array, end: jax.Array, width: int) -> tuple[jax.Array, ...]:
    """(content without dollars and repeated blanks UInt8[width], whether it is a price, whether it is beyond)."""
    place = jnp.arange(len(chars), dtype=jnp.int32)
    inside = (place >= start) & (place < end)
    dollar = inside & (chars == ord("$"))
    first = jnp.min(jnp.where(dollar, place, len(chars)))
    blank = is_blank(chars)
    ahead = inside & (place < first) & ~blank
    price = (jnp.sum(dollar) == 1) & (jnp.sum(ahead) <= 1) & jnp.all(~ahead | (chars == ord("-")))
    kept = inside & ~dollar
    before = jnp.pad(place_before(kept), (1, 0), constant_values=-1)[:-1]
    kept &= ~(blank & ((before < 0) | blank[before]))
    foreign = jnp.any(inside & ~among(chars, ALPHABET))
    into = distinct(jnp.where(kept, jnp.cumsum(kept) - 1, width), width)
    text = (
        jnp.zeros(width, jnp.uint8).at[into].set(jnp.where(blank, BLANK, chars).astype(jnp.uint8), **UNIQUE)
    )
    return text, price, foreign | (jnp.sum(kept) > width)


def clean(text: jax.Array, price: jax.Array) -> tuple[jax.Array, ...]:
    """(text without parts that a clean answer leaves out, its length, whether it is wrong, whether it is beyond)."""
    before, after = following(text, -1), following(text)
    digit = is_digit(text)
    thousand = functools.reduce(jnp.logical_and, (following(digit, k) for k in (1, 2, 3))) & ~following(
        digit, 4
    )
    thousand &= is_digit(before)
    bracket = among(text, b"({")
    beyond = jnp.any(
        ((text == ord("*")) & (after == ord("*")))
        | ((before == ord("{")) & (after == ord("}")) & among(text, b",:"))
        | (thousand & (text == BLANK))
        | (thousand & (text == ord(",")) & ~bracket.any())
    )
    # Each pair == means =.
    equals = text == ord("=")
    place = jnp.arange(len(text), dtype=jnp.int32)
    odd = equals & ((place - place_before(~equals)) % 2 == 0)
    text = jnp.where(odd, BLANK, text).astype(jnp.uint8)

    used = jnp.max(jnp.where(text != 0, place + 1, 0))
    edge = (text == BLANK) | (text == ord("="))
    start, end = strip(text, jnp.int32(0), used, edge, edge)
    start = jnp.where(price, 0, start)  # the sign of a price comes before an =
    dots = functools.reduce(
        jnp.logical_and, (text.at[end - k].get(mode="clip") == ord(".") for k in (1, 2, 3))
    )
    comma, further = (text.at[jnp.maximum(end - k, 0)].get() == ord(",") for k in (4, 5))
    gap = text.at[jnp.maximum(end - 4, 0)].get() == BLANK
    goes_on = (end >= 4) & dots & (comma | (gap & further & (end >= 5)))  # 1, 2, ...
    tail = among(text, b" .,;:")
    _, end = strip(text, start, end, jnp.zeros_like(tail), tail)
    cleaned = part(text, start, end)
    return cleaned.chars, cleaned.length, goes_on, beyond


def unwrap(text: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The text without pairs of brackets around all of it, and whether its brackets are unbalanced."""
    place = jnp.arange(len(text), dtype=jnp.int32)
    inside = place < length
    opens, closes = among(text, b"({"), among(text, b")}")
    depth = jnp.cumsum(opens.astype(jnp.int32) - closes)
    total = depth.at[jnp.maximum(length - 1, 0)].get()
    unbalanced = jnp.any(inside & (depth < 0)) | (total != 0)
    blank = text == BLANK
    head = jnp.min(jnp.where(inside & ~(opens | blank), place, length))  # the first character that is neither
    tail = jnp.max(jnp.where(inside & ~(closes | blank), place + 1, 0))
    opened, closed = jnp.cumsum(opens), jnp.cumsum((closes & inside)[::-1])[::-1]
    leading = jnp.sum(opens & (place < head))
    trailing = jnp.sum(closes & inside & (place >= tail))
    floor = jnp.min(jnp.where((place >= head - 1) & (place < tail), depth, leading))
    wraps = jnp.maximum(jnp.minimum(jnp.minimum(leading, trailing), floor), 0)
    wrapping = (opens & (place < head) & (opened <= wraps)) | (closes & (place >= tail) & (closed <= wraps))
    return jnp.where(wrapping & inside, BLANK, text).astype(jnp.uint8), unbalanced
