r"""The span of the last box of a text, as `rewards.math.boxed.extract_boxed` finds it: functions of a row, for `vmap`.

`answer_span` gives (start, end) of the stripped content, and whether there is a box. It agrees with `extract_boxed` on
every text, except that an argument without braces may be longer than 200 pieces here. The work grows with the number of
boxes in the row that has the most.
"""

import jax
import jax.numpy as jnp

from marl_jax.rewards.arrays.texts import among, following, next_place, place_before, starts
from marl_jax.rewards.math.boxed import MAX_BOXES

Span = tuple[jax.Array, jax.Array]
_BLANKS_AFTER = 16  # most blanks between the command and its argument


def is_blank(chars: jax.Array) -> jax.Array:
    """Bool: white space."""
    return (chars == 32) | ((chars >= 9) & (chars <= 13))


def is_letter(chars: jax.Array) -> jax.Array:
    """Bool: A to Z, a to z."""
    lower = chars | 32
    return (lower >= ord("a")) & (lower <= ord("z"))


def is_digit(chars: jax.Array) -> jax.Array:
    """Bool: 0 to 9."""
    return (chars >= ord("0")) & (chars <= ord("9"))


def is_word(chars: jax.Array) -> jax.Array:
    """Bool: a letter, a digit or an underscore."""
    return is_letter(chars) | is_digit(chars) | (chars == ord("_"))


def strip(chars: jax.Array, start: jax.Array, end: jax.Array, left: jax.Array, right: jax.Array) -> Span:
    """The span without characters marked in `left` at its start and in `right` at its end."""
    place = jnp.arange(len(chars), dtype=jnp.int32)
    inside = (place >= start) & (place < end)
    first = jnp.min(jnp.where(inside & ~left, place, end))
    last = jnp.max(jnp.where(inside & ~right, place + 1, first))
    return first, last


def answer_span(chars: jax.Array) -> tuple[Span, jax.Array]:
    """The span of the last complete box's content, and whether there is one; empty content does not count."""

    def read_inner(state: tuple) -> tuple:
        first, lo, hi, found, _ = state
        start, end, boxed, sole = _best_box(chars, lo, hi)
        goes_on = first | sole  # content that is itself one box is read again
        start, end = jnp.where(goes_on, start, lo), jnp.where(goes_on, end, hi)
        begins = chars.at[start].get(mode="fill", fill_value=0) == ord("\\")  # perhaps with a box
        return jnp.bool_(False), start, end, jnp.where(goes_on, boxed, found), goes_on & boxed & begins

    true = jnp.bool_(True)
    _, start, end, found, _ = jax.lax.while_loop(
        lambda state: state[4], read_inner, (true, jnp.int32(0), jnp.int32(len(chars)), ~true, true)
    )
    found &= end > start
    return (jnp.where(found, start, 0), jnp.where(found, end, 0)), found


def _best_box(all_chars: jax.Array, lo: jax.Array, hi: jax.Array) -> tuple:
    """Content span of the box in lo..hi that ends last, whether there is one, and whether lo..hi is just one box."""
    width = len(all_chars)
    place = jnp.arange(width, dtype=jnp.int32)
    chars = jnp.where((place >= lo) & (place < hi), all_chars, 0)
    escape = chars == ord("\\")
    # The number of backslashes just before each place.
    backslashes = place - 1 - jnp.pad(place_before(~escape), (1, 0), constant_values=-1)[:-1]
    escaped = backslashes % 2 == 1
    opens, closes = ((chars == ord(brace)) & ~escaped for brace in "{}")
    depth = jnp.cumsum(opens.astype(jnp.int32) - closes)
    blank = is_blank(chars)
    solid = next_place(~blank)

    # The characters that end an argument without braces; a group {...} inside of it belongs to it.
    special = among(chars, b"{}$\n")
    next_special = jnp.pad(next_place(special), (0, 1), constant_values=width)[1:]
    group = opens & (chars.at[next_special].get(mode="fill", fill_value=0) == ord("}"))
    after = following(chars)
    ends_bare = jnp.where(
        escape & ~escaped, is_blank(after) | (after == 0), ~escaped & (among(chars, b"${}") & ~group)
    )
    ends_bare |= blank | (chars == 0)

    boxed, framed = starts(chars, "\\boxed"), starts(chars, "\\fbox")
    named = boxed | framed
    argument = place + jnp.where(boxed, 6, 5)
    lettered = is_letter(chars.at[argument].get(mode="fill", fill_value=0))
    argument_at = solid.at[argument].get(mode="fill", fill_value=width)
    near = argument_at - argument <= _BLANKS_AFTER

    def read(command: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """(end, content start, content end, whether it is whole) for the box at a command."""
        at = argument_at[command]
        braced = chars.at[at].get(mode="fill", fill_value=0) == ord("{")
        shut = jnp.min(
            jnp.where(closes & (place > at) & (depth < depth.at[at].get(mode="clip")), place, width)
        )
        opened = place_before(group & (place >= at))
        covered = (opened >= 0) & (place <= next_special[jnp.maximum(opened, 0)])
        stop = jnp.min(jnp.where(ends_bare & ~covered & (place >= at), place, width))
        punctuation = among(chars, b".,;:!?")
        _, tail = strip(chars, at, stop, jnp.zeros(width, bool), punctuation)
        end = jnp.where(braced, shut + 1, stop)
        whole = jnp.where(braced, shut < width, stop > at) & (at < width) & near[command] & ~lettered[command]
        return end, jnp.where(braced, at + 1, at), jnp.where(braced, shut, tail), whole

    def body(state: tuple) -> tuple:
        left, command, best, span = state
        end, start, stop, whole = read(command)
        better = whole & (end > best)
        span = (jnp.where(better, start, span[0]), jnp.where(better, stop, span[1]))
        earlier = jnp.max(jnp.where(named & (place < command), place, -1))
        return left - 1, earlier, jnp.where(better, end, best), span

    nothing = jnp.int32(0)
    last = jnp.max(jnp.where(named, place, -1))
    _, _, best, (start, end) = jax.lax.while_loop(
        lambda state: (state[0] > 0) & (state[1] >= 0),
        body,
        (jnp.int32(MAX_BOXES), last, jnp.int32(-1), (nothing, nothing)),
    )
    shut, (start, end) = end, strip(chars, start, end, blank, blank)
    last = jnp.maximum(end - 1, 0)
    spaced = (start < end) & (end < shut) & escape[last] & ~escaped[last]  # a control space at the end
    start, end = strip(chars, start, end - spaced, blank, blank)
    outer_end, _, _, whole = read(lo)
    return start, end, best >= 0, named[lo] & whole & (outer_end == hi)
