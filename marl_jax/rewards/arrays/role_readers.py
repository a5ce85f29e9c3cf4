"""Readers for the supervising roles, equal to those of `workflows.parse`: a pick, a verdict, a majority, strategies.

Functions of one row of characters, for `vmap`.
"""

import functools

import jax
import jax.numpy as jnp

from marl_jax.models.scatter import UNIQUE, distinct
from marl_jax.rewards.arrays.boxed_spans import answer_span, is_digit, is_letter, is_word
from marl_jax.rewards.arrays.texts import Text, among, following, next_place, part, place_before, starts
from marl_jax.table import VERDICTS

_AROUND = 20  # most characters before and after a boxed number
_KEYWORD = "strategy"


def pick(chars: jax.Array, n: int) -> jax.Array:
    """The chosen candidate 1..n, n below 10: the boxed number, else the first digit 1..n anywhere; -1 for neither."""
    place = jnp.arange(len(chars), dtype=jnp.int32)
    (start, end), _ = answer_span(chars)
    inside = (place >= start) & (place < end)
    digit = is_digit(chars)
    figure = jnp.where(digit, chars.astype(jnp.int32) - ord("0"), 0)
    first = jnp.min(jnp.where(inside & digit, place, end))
    last = jnp.max(jnp.where(inside & digit, place, first - 1))
    count = jnp.sum(inside & digit)
    one_run = (count > 0) & (count == last - first + 1)
    boxed = jnp.sum(jnp.where(inside, figure, 0))  # zeros, then one digit that is not zero
    zeros = jnp.all(~inside | ~digit | (place == last) | (figure == 0))
    near = (first - start <= _AROUND) & (end - 1 - last <= _AROUND)
    sound = one_run & zeros & near & (boxed >= 1) & (boxed <= n)
    eligible = (figure >= 1) & (figure <= n)
    anywhere = jnp.where(eligible.any(), figure[jnp.argmax(eligible)], -1)
    return jnp.where(sound, boxed, anywhere)


def verdict(chars: jax.Array) -> jax.Array:
    """The verdict as in `table.VERDICTS`, or -1: the word in the last box, with any characters around its letters."""
    place = jnp.arange(len(chars), dtype=jnp.int32)
    (start, end), _ = answer_span(chars)
    inside = (place >= start) & (place < end)
    chars = jnp.where(inside, chars, 0)
    letter = is_letter(chars)
    lower = jnp.where(letter, chars | 32, chars)
    word = is_word(chars)
    begins = place_before(~word) + 1  # the start of the word that contains each character
    marks = [starts(lower, command) for command in ("\\text", "\\math", "\\boxed")]
    commands = following(functools.reduce(jnp.logical_or, marks), -1)
    # A command, with the letters, digits and underscores that follow it directly.
    styling = word & commands.at[begins].get(mode="fill", fill_value=False)
    kept = letter & ~styling
    rank, total = jnp.cumsum(kept) - 1, jnp.sum(kept)

    def says(wanted: str) -> jax.Array:
        expected = jnp.asarray(list(wanted.encode()), jnp.uint8)
        agrees = lower == expected[jnp.clip(rank, 0, len(wanted) - 1)]
        return (total == len(wanted)) & jnp.all(~kept | agrees)

    choices = [jnp.where(says(name.lower()), choice, -1) for name, choice in VERDICTS.items()]
    return functools.reduce(jnp.maximum, choices)


def majority(keys: jax.Array, readable: jax.Array) -> jax.Array:
    """Index of the first answer among the most frequent readable ones, given keys [n, K]; 0 when none can be read."""
    same = jnp.all(keys[:, None] == keys[None], axis=-1) & readable[None] & readable[:, None]
    return jnp.argmax(jnp.sum(same, axis=1))


def strategies(chars: jax.Array, length: jax.Array, limit: int) -> tuple[Text, jax.Array]:
    """The contents of the first `limit` lines `STRATEGY k: ...`, as texts [limit, N], and how many there are."""
    width = len(chars)
    place = jnp.arange(width, dtype=jnp.int32)
    newline = chars == ord("\n")
    line_end = jnp.minimum(next_place(newline), length)
    before = following(chars, -1)
    begins = (place == 0) | (before == ord("\n"))

    def run(marks: jax.Array) -> jax.Array:  # the first unmarked place at or after each place
        return next_place(~marks)

    def at(places: jax.Array, where: jax.Array) -> jax.Array:
        return places.at[where].get(mode="fill", fill_value=width)

    tab = (chars == 32) | (chars == 9)
    bullet = tab | (chars == ord("*"))
    keyword = run(bullet | among(chars, b"#>-"))  # place of the keyword, for each start of a line
    lower = jnp.where(is_letter(chars), chars | 32, chars)
    named = starts(lower, _KEYWORD).at[keyword].get(mode="fill", fill_value=False)
    number = at(run(tab), keyword + len(_KEYWORD))
    past = at(run(is_digit(chars)), number)
    colon = at(run(bullet), past)
    ended = chars.at[colon].get(mode="fill", fill_value=0) == ord(":")
    found = begins & (place < length) & named & (past > number) & ended

    # The content behind the colon, without blanks and asterisks around it; a line without content is no strategy.
    stripped = tab | (chars == 13) | (chars == ord("*"))
    start = at(run(stripped), colon + 1)
    end = at(line_end, jnp.minimum(colon, width - 1))
    solid = place_before(~stripped & ~newline & (chars != 0))
    stop = jnp.where(end > 0, at(solid, jnp.maximum(end - 1, 0)) + 1, 0)
    found &= (start < end) & (stop > start)
    rank = distinct(jnp.where(found, jnp.cumsum(found) - 1, limit), limit)
    starts_at, ends_at = (
        jnp.zeros(limit, jnp.int32).at[rank].set(bound, **UNIQUE) for bound in (start, stop)
    )
    count = jnp.minimum(jnp.sum(found), limit)
    return jax.vmap(part, in_axes=(None, 0, 0))(chars, starts_at, ends_at), count
