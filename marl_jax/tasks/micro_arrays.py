r"""Grading of micro_math as pure functions over tokens, usable under jit.

    tokens [B, T] ──char_table──► characters [B, N] ──one scan──► last box ──► integer ──► reward [B]

It agrees with `rewards.math` where the box holds a plain integer: any signs, then one run of digits (at most nine after
leading zeros), with white space, dollars and paired braces around it and .,;: behind it. Other forms of an integer
(7.0, 14/2, x=7, 7 apples) earn 0 here. `\fbox` is not read, nor is a command or a brace in an argument without braces.
Answers of micro_code are programs, which only the sandbox can grade.
"""

from collections.abc import Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

_COMMAND = b"\\boxed"
_OPEN = 8  # nesting depth of boxes; deeper nesting forgets the outermost
_DIGITS = 9  # significant ones that fit into an int32


def char_table(texts: Sequence[str]) -> np.ndarray:
    """uint8 [V, C]: the characters of each token, padded with 0.

    A control token is given as "" and has none. A character outside ASCII becomes `?`.
    """
    spelled = [text.encode("ascii", "replace") for text in texts]
    table = np.zeros((len(spelled), max(map(len, spelled))), np.uint8)
    for row, text in zip(table, spelled):
        row[: len(text)] = list(text)
    return table


def grade_tokens(
    tokens: jax.Array,  # Int[B T]
    mask: jax.Array,  # Bool[B T], true where the response is
    gold: jax.Array,  # Int[B G], tokens of the reference answers
    gold_mask: jax.Array,  # Bool[B G]
    table: jax.Array,  # of `char_table`
) -> jax.Array:
    """Float[B]: 1.0 where the last box of the response holds the gold integer, else 0.0."""
    chex.assert_rank([tokens, mask, gold, gold_mask, table], 2)
    chex.assert_equal_shape([tokens, mask])
    chex.assert_equal_shape([gold, gold_mask])
    chars = spell(tokens, mask, table)
    start, end = jax.vmap(last_box)(chars)
    answer, readable = jax.vmap(integer)(chars, start, end)
    reference = spell(gold, gold_mask, table)
    whole = jnp.full(len(gold), reference.shape[1])
    expected, sound = jax.vmap(integer)(reference, jnp.zeros_like(whole), whole)
    return (readable & sound & (answer == expected)).astype(jnp.float32)


def spell(tokens: jax.Array, mask: jax.Array, table: jax.Array) -> jax.Array:
    """uint8 [B, T * C]: the characters of the tokens in order, with 0 where there is none."""
    chars = jnp.where(mask[:, :, None], jnp.asarray(table)[tokens], 0)
    return chars.reshape(len(tokens), -1)


class _Boxes(NamedTuple):
    """State of the scan over one response; a place is the index of a character, -1 is none."""

    matched: jax.Array  # characters of the command read so far, one more for blanks after it
    command: jax.Array  # where it starts
    escaped: jax.Array  # whether the character before is a backslash
    depth: jax.Array  # of braces
    opened: jax.Array  # number of open boxes
    stack: jax.Array  # Int[_OPEN, 4], of each: depth, command, first place inside, first non-blank inside
    bare: jax.Array  # start of an argument without braces
    last: jax.Array  # the last non-blank character
    box: jax.Array  # Int[2] start and end of the last complete box
    cover: jax.Array  # Int[2] its command and its closing brace


def last_box(chars: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Start and end of what is in the last complete box of uint8 [N]; an empty range if there is none."""
    chex.assert_rank(chars, 1)
    none = jnp.int32(-1)
    zero = jnp.int32(0)
    stack = jnp.full((_OPEN, 4), -1, jnp.int32)
    start = _Boxes(
        zero, none, jnp.bool_(False), zero, zero, stack, none, none, jnp.zeros(2, jnp.int32), stack[0, :2]
    )
    # A blank after the end closes an argument without braces.
    places = jnp.arange(len(chars) + 1, dtype=jnp.int32)
    state, _ = jax.lax.scan(_read, start, (places, jnp.append(chars, jnp.uint8(32))))
    return state.box[0], state.box[1]


def _read(state: _Boxes, step: tuple[jax.Array, jax.Array]) -> tuple[_Boxes, None]:
    place, char = step
    blank = (char == 32) | ((char >= 9) & (char <= 13))
    letter = ((char | 32) >= ord("a")) & ((char | 32) <= ord("z"))
    opens = (char == ord("{")) & ~state.escaped
    closes = (char == ord("}")) & ~state.escaped
    commanded = state.matched >= len(_COMMAND)  # above that length after a blank, where a letter may follow

    # An argument without braces ends at a blank, a dollar or a closing brace.
    stops = (state.bare >= 0) & (blank | (char == ord("$")) | (char == ord("}")))
    box = jnp.where(stops, jnp.stack([state.bare, place]), state.box)
    cover = jnp.where(stops, jnp.stack([state.command, state.last]), state.cover)
    names = letter & (state.matched == len(_COMMAND))  # a longer command
    begins = commanded & ~blank & ~names & ~jnp.isin(char, jnp.asarray(list(b"{}$\\"), jnp.uint8))
    bare = jnp.where(begins, place, jnp.where(stops | (char == ord("\\")), -1, state.bare))

    # First non-blank of the boxes that have none yet; then the innermost box that this brace closes.
    stack = state.stack.at[:, 3].set(jnp.where(~blank & (state.stack[:, 3] < 0), place, state.stack[:, 3]))
    top = stack[(state.opened - 1) % _OPEN]
    depth = state.depth + opens - closes
    shut = closes & (state.opened > 0) & (depth == top[0])
    # A box whose only content is a box: the inner one stays the result.
    only = (cover[0] >= 0) & (top[3] == cover[0]) & (state.last == cover[1])
    box = jnp.where(shut & ~only, jnp.stack([top[2], place]), box)
    cover = jnp.where(shut, jnp.stack([top[1], place]), cover)

    pushes = opens & commanded
    entry = jnp.stack([state.depth, state.command, place + 1, jnp.int32(-1)])
    stack = jnp.where(pushes, stack.at[state.opened % _OPEN].set(entry), stack)

    command = jnp.asarray(list(_COMMAND), jnp.uint8)
    goes_on = (state.matched < len(_COMMAND)) & (
        char == command[jnp.minimum(state.matched, len(_COMMAND) - 1)]
    )
    matched = jnp.where(goes_on, state.matched + 1, jnp.where(commanded & blank, len(_COMMAND) + 1, 0))
    matched = jnp.where(char == ord("\\"), 1, matched)
    new = _Boxes(
        matched,
        jnp.where(char == ord("\\"), place, state.command),
        (char == ord("\\")) & ~state.escaped,
        depth,
        state.opened + pushes - shut,
        stack,
        bare,
        jnp.where(blank, state.last, place),
        box,
        cover,
    )
    nothing = char == 0  # padding between and after tokens
    return jax.tree.map(lambda old, new: jnp.where(nothing, old, new), state, new), None


def integer(chars: jax.Array, start: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The integer that the characters start..end of uint8 [N] spell, and whether they spell one."""
    chex.assert_rank(chars, 1)
    place = jnp.arange(len(chars))
    chars = jnp.where((place >= start) & (place < end) & (chars != ord("$")), chars, 0)
    digit = (chars >= ord("0")) & (chars <= ord("9"))
    after = jnp.cumsum(digit[::-1])[::-1] - digit  # digits to the right
    before = jnp.cumsum(digit) == 0
    blank = (chars == 32) | ((chars >= 9) & (chars <= 13)) | (chars == 0)
    head = blank | jnp.isin(chars, jnp.asarray(list(b"+-{"), jnp.uint8))
    tail = blank | jnp.isin(chars, jnp.asarray(list(b".,;:}"), jnp.uint8))
    first, last = before, ~digit & (after == 0) & ~before
    sound = jnp.all(jnp.where(first, head, jnp.where(last, tail, digit | (chars == 0)))) & digit.any()

    value = jnp.where(digit, chars.astype(jnp.int32) - ord("0"), 0)
    size = jnp.max(jnp.where(value > 0, after + 1, 0))
    value = jnp.sum(jnp.where(after < _DIGITS, value * 10 ** jnp.minimum(after, _DIGITS - 1), 0))
    negative = jnp.sum(first & (chars == ord("-"))) % 2 == 1
    return jnp.where(negative, -value, value), sound & (size <= _DIGITS)
