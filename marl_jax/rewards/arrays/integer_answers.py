r"""Boxed answers against integer references: `rewards.math.equivalent` for answers written in a small alphabet.

    box ──clean──► digits + - * / . , ; : = ( ) { } x and blanks ──scan──► values joined by = ──► right or wrong

The scan computes in exact fractions: 7.0, 14/2, -(-7), 6 3/3, x=7, x=21/3=7 and 3+4=7 are 7; 3+4 and 7*1 are sums and
products left undone, which are no answer; lists, ratios and divisions by zero are wrong. `x` stands for a large integer
that the rest of an answer cannot equal, so 0x is 0 and x-x+7 is 7, as in `rewards.math`.

An answer is *beyond* the arrays if it has another character, or a form that `rewards.math` reads by its layout:
1,234 and 1 234 as thousands, ** as a power, a sign where a number should be (which is a variable there), a bracket
closed by the other kind, an equation inside an equation, a label with commas, two mixed numbers in a row, brackets or
text too deep or too long. It earns nothing here and is counted; in `rewards.math` it may be right (7\%,
\frac{14}{2}, 7 apples).
"""

import functools
from dataclasses import replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from marl_jax.rewards.arrays import fractions_mod as fractions
from marl_jax.rewards.arrays.boxed_spans import is_digit
from marl_jax.rewards.arrays.clean_texts import BLANK, clean, compact, unwrap
from marl_jax.rewards.arrays.fractions_mod import Fraction, choose
from marl_jax.rewards.arrays.texts import among, next_place, starts

_DEPTH = 8  # open brackets that the scan keeps at most
_LABEL = 40  # characters of the longest label
_LETTERS = 4  # the longest run of x that is a product; a longer one is a word


@flax.struct.dataclass
class Verdict:
    """The verdict on an answer; `right` is false if it is beyond the arrays."""

    right: jax.Array  # Bool
    beyond: jax.Array  # Bool


def grade_answer(chars: jax.Array, start: jax.Array, end: jax.Array, gold: jax.Array, width: int) -> Verdict:
    """The verdict on the content start..end of one row; an answer of more than `width` characters is beyond."""
    text, price, beyond = compact(chars, start, end, width)
    text, length, wrong, strange = clean(text, price)
    beyond |= strange
    text, unbalanced = unwrap(text, length)
    last = next_place(text == ord("=")) == len(text)  # the part behind the last =
    wrong |= unbalanced | (length == 0) | jnp.any(last & starts(text, "x" * (_LETTERS + 1)))
    scanned = jax.lax.while_loop(lambda state: state.at < length, functools.partial(_read, text), _begin())
    right, odd = _judge(scanned, gold, price)
    beyond |= odd
    return Verdict(right & ~wrong & ~beyond, beyond & (end > start))


# ---------------------------------------------------------------- the scan


_NO, _YES, _ZERO = np.bool_(False), np.bool_(True), np.int32(0)
_FACTOR, _ABOVE, _BELOW, _NOTHING, _SLASH = range(5)


@flax.struct.dataclass
class _Term:
    """State of the sum that is read at one depth."""

    sum: Fraction  # sum of the earlier terms
    product: Fraction  # product of the earlier factors, with the sign of the term
    negative: Any = _NO  # whether the term began with a minus
    divides: Any = _NO  # whether the next factor divides
    factors: Any = _ZERO  # Int32: factors of this term


@flax.struct.dataclass
class _Number:
    """The literal that is being read."""

    value: Fraction
    active: Any = _NO  # whether a literal is being read
    dotted: Any = _NO
    whole: Any = _YES  # whether only zeros follow its point
    use: Any = _ZERO  # _FACTOR, _ABOVE or _BELOW


@flax.struct.dataclass
class _State:
    """State of the scan; a field with a default begins with it."""

    term: _Term
    number: _Number
    stack: Any  # _Term, each leaf with a leading axis of _DEPTH
    above: Fraction  # numerator of the rest of a mixed number
    step: Fraction  # the value of the earlier steps
    at: Any = _ZERO
    depth: Any = _ZERO
    kinds: Any = np.uint32(0)  # a bit for each open bracket, 1 for a brace
    expects: Any = _YES  # a factor must follow
    counted: Any = _NO  # whether the last token was a number
    mixable: Any = _NO  # the term is one whole number, which a fraction may follow
    mixed: Any = _NO  # the last number closed a mixed number
    next: Any = np.int32(_NOTHING)  # _NOTHING, _SLASH or _BELOW: what must follow in a mixed number
    # State of the part between two =.
    invalid: Any = _NO
    undone: Any = _NO  # it has a sum or product left undone
    has_x: Any = _NO
    # State of the complete answer.
    first: Any = _YES  # no = has come
    label: Any = _ZERO  # state of the automaton of labels
    span: Any = (np.int32(-1), np.int32(-1))  # places of the first and last non-blank of the first part
    stepped: Any = _NO
    wrong: Any = _NO
    chained: Any = _NO  # an = has come
    nested: Any = _NO  # an = has come inside brackets
    commas: Any = _NO  # the first part has a comma
    beyond: Any = _NO


# The automaton of labels, and of sums and differences of names: next state, by the class of a character.
_CLASSES = b"x {}()+="  # x, blank, {, }, (, ), + or -, = and others
_LABELS = (
    (3, 0, 1, 9, 9, 9, 9, 9, 9),  # 0 nothing yet
    (2, 2, 9, 9, 9, 9, 9, 9, 9),  # 1 after {
    (2, 2, 9, 4, 5, 9, 9, 9, 9),  # 2 in names
    (2, 3, 9, 4, 5, 9, 7, 9, 9),  # 3 one name
    (9, 6, 9, 9, 5, 9, 9, 9, 9),  # 4 after }
    (5, 5, 5, 5, 9, 6, 5, 9, 5),  # 5 in arguments
    (9, 6, 9, 9, 9, 9, 9, 9, 9),  # 6 at the end
    (8, 7, 9, 9, 9, 9, 9, 9, 9),  # 7 after + or -
    (9, 8, 9, 9, 9, 9, 7, 9, 9),  # 8 a sum
    (9, 9, 9, 9, 9, 9, 9, 9, 9),
)
_ENDS, _SUM = (2, 3, 4, 6), 8  # states in which a label may end; a sum of names
_X = 0x9E37_79B9_7F4A_7C15  # the value of x


def _fresh() -> _Term:
    return _Term(fractions.constant(0), fractions.constant(1))


def _begin() -> _State:
    zero, term = fractions.constant(0), _fresh()
    stack = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (_DEPTH, *jnp.shape(leaf))), term)
    return _State(term, _Number(zero), stack, zero, zero)


def _read(text: jax.Array, state: _State) -> _State:
    """The state after one more character."""
    char = text[state.at]
    after = text.at[state.at + 1].get(mode="fill", fill_value=0)
    before = state
    state = _read_number(_follow_label(state, char), char, after)
    for read in (_read_x, _read_bracket, _read_sign, _read_equals):
        state = read(state, char)
    stray = among(char, b",;:")
    top = before.depth == 0
    # A factor, a bracket or a sign has come: no number is beside the next one.
    beside = ~among(char, b"x(){}+-*/")
    return replace(
        state,
        at=before.at + 1,
        counted=state.counted & beside,
        mixable=state.mixable & beside,
        invalid=state.invalid | stray,
        wrong=state.wrong | (stray & top),
        commas=state.commas | (before.first & (char == ord(","))),
        beyond=state.beyond | (before.expects & (char == ord(","))),
    )


def _follow_label(state: _State, char: jax.Array) -> _State:
    classes, known = jnp.asarray(list(_CLASSES), jnp.uint8), jnp.where(char == ord("-"), ord("+"), char)
    kind = jnp.min(jnp.where(classes == known, jnp.arange(len(_CLASSES)), len(_CLASSES)))
    ends = state.first & (char == ord("=")) & (state.depth == 0)
    moves = state.first & ~ends
    solid = moves & (char != BLANK)
    begun, ended = state.span
    return replace(
        state,
        label=jnp.where(moves, jnp.asarray(_LABELS)[state.label, kind], state.label),
        span=(jnp.where(solid & (begun < 0), state.at, begun), jnp.where(solid, state.at, ended)),
    )


def _read_number(state: _State, char: jax.Array, after: jax.Array) -> _State:
    number, digit, dot = state.number, is_digit(char), char == ord(".")
    goes_on = number.active & (digit | (dot & ~number.dotted))
    begins = ~goes_on & (digit | (dot & is_digit(after)))
    stray = dot & ~goes_on & ~begins

    # The use of a literal that begins here: a factor, or a part of a mixed number.
    second = ~state.expects & state.counted  # two numbers side by side
    use = jnp.where(state.next == _BELOW, _BELOW, jnp.where(second, _ABOVE, _FACTOR))
    joined = begins & ~state.expects & (use == _FACTOR)  # 2(3)4
    bad = stray | (begins & dot & ~state.expects) | (begins & (use == _ABOVE) & ~state.mixable)
    beyond = begins & (use == _ABOVE) & state.mixed & (state.term.factors == 1)

    ten, figure = (
        jnp.where(digit, 10, 1).astype(jnp.uint32),
        jnp.where(digit, char - ord("0"), 0).astype(jnp.uint32),
    )
    value = choose(begins, fractions.constant(0), number.value)
    dotted = jnp.where(begins, dot, number.dotted | (goes_on & dot))
    value = Fraction(
        (value.above * ten + figure) % fractions.PRIMES,
        value.below * jnp.where(digit & dotted, ten, 1) % fractions.PRIMES,
    )
    used = goes_on | begins
    whole = jnp.where(begins, True, number.whole) & ~(dotted & digit & (figure != 0))
    use = jnp.where(begins, use, number.use)
    number = choose(used, _Number(value, used, dotted, whole, use), number)
    ends = used & ~(is_digit(after) | ((after == ord(".")) & ~dotted))
    state = replace(
        state,
        number=replace(number, active=used & ~ends),
        undone=state.undone | joined,
        term=replace(state.term, divides=state.term.divides & ~joined),
        invalid=state.invalid | bad | (begins & (state.next == _SLASH)),
        beyond=state.beyond | beyond,
    )
    as_factor, as_above, as_below = (ends & (number.use == use) for use in (_FACTOR, _ABOVE, _BELOW))
    state = _factor(state, as_factor, value)
    is_zero = fractions.is_zero(value)
    rest = fractions.divide(state.above, choose(is_zero, fractions.constant(1), value))
    product = fractions.add(state.term.product, fractions.signed(state.term.negative, rest))
    return replace(
        state,
        term=replace(state.term, product=choose(as_below, product, state.term.product)),
        above=choose(as_above, value, state.above),
        next=jnp.where(as_above, _SLASH, jnp.where(as_below, _NOTHING, state.next)),
        counted=state.counted | ends,
        mixable=jnp.where(as_factor, number.whole & (state.term.factors == 1), state.mixable | as_below),
        mixed=jnp.where(as_factor, False, state.mixed | as_below),
        invalid=state.invalid | ((as_above | as_below) & number.dotted) | (as_below & is_zero),
    )


def _factor(state: _State, here: jax.Array, value: Fraction) -> _State:
    """The state with the value as the next factor of the term, if `here`."""
    term = state.term
    is_zero = term.divides & fractions.is_zero(value)
    value = choose(is_zero, fractions.constant(1), value)
    turned = choose(term.divides, Fraction(value.below, value.above), value)
    term = replace(
        term,
        product=choose(here, fractions.multiply(term.product, turned), term.product),
        divides=term.divides & ~here,
        factors=term.factors + here,
    )
    return replace(state, term=term, expects=state.expects & ~here, invalid=state.invalid | (here & is_zero))


def _joins(state: _State, here: jax.Array) -> _State:
    """The state before a factor that begins `here`; if no operator precedes it (2x, 2(3)), a product is left undone."""
    joined = here & ~state.expects
    return replace(
        state, undone=state.undone | joined, invalid=state.invalid | (here & (state.next != _NOTHING))
    )


def _read_x(state: _State, char: jax.Array) -> _State:
    here = char == ord("x")
    state = _factor(_joins(state, here), here, fractions.constant(_X))
    return replace(state, has_x=state.has_x | here)


def _read_bracket(state: _State, char: jax.Array) -> _State:
    opens, closes = among(char, b"({"), among(char, b")}")
    brace = (char == ord("{")) | (char == ord("}"))
    level = jnp.arange(_DEPTH)

    # Opening a bracket pushes the term on the stack.
    state = _joins(state, opens)
    here = opens & (level == state.depth)
    stack = jax.tree.map(
        lambda old, new: jnp.where(here.reshape(-1, *[1] * new.ndim), new, old), state.stack, state.term
    )
    term = choose(opens, _fresh(), state.term)

    # Closing a bracket makes its sum a factor of the term on the stack.
    total = fractions.add(term.sum, term.product)
    outer = jax.tree.map(lambda leaf: leaf[jnp.clip(state.depth - 1, 0, _DEPTH - 1)], stack)
    term = choose(closes, outer, term)
    strange = (
        (opens & (state.depth >= _DEPTH)) | (closes & ((state.kinds & 1) != brace)) | (closes & state.expects)
    )
    kinds = jnp.where(opens, state.kinds << 1 | brace, jnp.where(closes, state.kinds >> 1, state.kinds))
    state = replace(
        state,
        term=term,
        stack=stack,
        kinds=kinds.astype(jnp.uint32),
        depth=state.depth + opens - closes,
        expects=state.expects | opens,
        invalid=state.invalid | (closes & (state.next != _NOTHING)),
        beyond=state.beyond | strange,
    )
    return _factor(state, closes, total)


def _read_sign(state: _State, char: jax.Array) -> _State:
    plus, minus, times, over = (char == ord(sign) for sign in "+-*/")
    sum_sign, slash = plus | minus, over & (state.next == _SLASH)
    operator = (times | over) & ~slash
    term = state.term
    ends = sum_sign & ~state.expects
    begun = replace(_fresh(), sum=fractions.add(term.sum, term.product))
    term = choose(ends, begun, term)
    product = fractions.signed(minus, term.product)
    term = replace(
        term,
        product=product,
        negative=term.negative ^ (minus & (term.factors == 0)),
        divides=jnp.where(operator, over, term.divides),
    )
    pending = state.next != _NOTHING
    return replace(
        state,
        term=term,
        expects=state.expects | ends | operator,
        next=jnp.where(slash, _BELOW, state.next),
        undone=state.undone | ends | times,
        invalid=state.invalid | ((sum_sign | operator) & pending),
        beyond=state.beyond | (operator & state.expects),
    )


def _read_equals(state: _State, char: jax.Array) -> _State:
    equals = char == ord("=")
    here, inner = equals & (state.depth == 0), equals & (state.depth > 0)
    value, unread = _part(state)
    short = state.span[1] - state.span[0] < _LABEL
    label = state.first & ((short & jnp.isin(state.label, jnp.asarray(_ENDS))) | (state.label == _SUM))
    step = here & ~label
    wrong = step & (unread | (state.stepped & ~fractions.equal(value, state.step)))
    beyond = here & state.first & ~label & state.commas
    begun = _begin()
    state = replace(
        state,
        step=choose(step & ~state.stepped, value, state.step),
        stepped=state.stepped | step,
        wrong=state.wrong | wrong,
        beyond=state.beyond | beyond,
        invalid=state.invalid | inner,
        nested=state.nested | inner,
        chained=state.chained | here,
        first=state.first & ~here,
    )
    part = ("term", "expects", "counted", "mixable", "mixed", "next", "invalid", "undone", "has_x")
    old, new = ({name: getattr(s, name) for name in part} for s in (state, begun))
    return replace(state, **choose(here, new, old))


def _part(state: _State) -> tuple[Fraction, jax.Array]:
    """The value of the part that ends here, and whether it has no value."""
    value = fractions.add(state.term.sum, state.term.product)
    return value, state.invalid | state.expects | (state.next != _NOTHING)


def _judge(state: _State, gold: jax.Array, price: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether the answer is right, and whether it is beyond."""
    value, unread = _part(state)
    undone = state.undone & ~state.has_x
    right = fractions.equal(value, fractions.integer(gold)) & ~(unread | undone | state.wrong)
    right &= ~state.stepped | fractions.equal(value, state.step)
    right &= ~(price & (state.chained | state.nested))
    return right, state.beyond | (state.chained & state.nested)
