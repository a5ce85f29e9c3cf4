"""Programs of the chain language of micro_code, read and run in arrays; functions of one row, for `vmap`.

    ```python            each line:       x=E, and at last return E, indented by one blank
    def f(x):            E from inside:   x, then the operations around it, step by step: the forms in `_FORMS`
     x=x+7
     return max(x,3)*2
    ```

A program runs while it is read: each step extends the innermost expression outwards by one operation, on all tests at
once. Constants have at most nine digits. A program of this form gets the sandbox's verdict. Any other program is
*beyond* the arrays: it is wrong here and counted, as is a program whose integers pass 2**30, or that repeats a list.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from marl_jax.rewards.arrays.boxed_spans import Span, is_digit, is_word
from marl_jax.rewards.arrays.chain_values import LARGEST, Value, apply, same
from marl_jax.rewards.arrays.integer_answers import Verdict
from marl_jax.rewards.arrays.texts import among, following, next_place, place_before, starts
from marl_jax.task import Task

ITEMS = 8  # longest list of a test
_DIGITS = 9
_HEADER = "def f(x):\n"
_ATOM, _PRODUCT, _SUM = 3, 2, 1  # precedence of the outermost operation of an expression
# The forms around an expression E with constants C and D, those that bind most tightly first: (the loosest precedence
# of E, the precedence of the form, the operation of each form).
_FORMS = (
    (_ATOM, _ATOM, {"E[:C]": "first", "E[C:]": "drop", "E[::-1]": "reverse"}),
    (_ATOM, _PRODUCT, {"E*E": "square", "-E": "negate"}),
    (_PRODUCT, _PRODUCT, {"E*C": "times", "E%C": "modulo", "E//C": "floor"}),
    (_SUM, _SUM, {"E+C": "add", "E-C": "subtract"}),
    (_SUM, _ATOM, {"(E)": "none", "abs(E)": "absolute", "max(E,C)": "least", "min(E,C)": "most"}),
    (_SUM, _ATOM, {"sorted(E)": "sort", "sum(E)": "sum", "len(E)": "count"}),
    (_SUM, _ATOM, {"max(E,default=0)": "largest", "min(E,default=0)": "smallest"}),
    (_SUM, _ATOM, {"[i+C for i in E]": "add each", "[i-C for i in E]": "subtract each"}),
    (_SUM, _ATOM, {"[i*C for i in E]": "times each", "[i for i in E if i%C==D]": "remainder"}),
    (_SUM, _ATOM, {"[i for i in E if i>C]": "above", "[i for i in E if i<C]": "below"}),
)


@flax.struct.dataclass
class Tests:
    """Inputs and expected results: leaves [B, K, ...], or [K, ...] for one task."""

    inputs: Value
    expected: Value


def pack_tests(tasks: Sequence[Task]) -> Tests:
    """The hidden tests of tasks as arrays; tests of another form are refused."""
    counts = {len(task.tests) for task in tasks}
    if len(counts) != 1:
        raise ValueError(f"the tasks have {sorted(counts)} tests: arrays need the same number for each task")
    rows = [[_values(task, test) for test in task.tests] for task in tasks]
    inputs, expected = ([[pair[side] for pair in row] for row in rows] for side in (0, 1))
    stack = lambda values: jax.tree.map(lambda *leaves: np.stack(leaves), *values)
    return Tests(*(stack([stack(row) for row in side]) for side in (inputs, expected)))


def _values(task: Task, test: Any) -> tuple[Value, Value]:
    match test:
        case {"call": "f", "args": [given], "expected": expected}:
            return _value(task, given), _value(task, expected)
    raise ValueError(f"a test of task {task.id!r} is {test!r:.80}: arrays run f(x) of one argument only")


def _value(task: Task, value: Any) -> Value:
    is_list = isinstance(value, list)
    numbers = value if is_list else [value]
    if len(numbers) > ITEMS or not all(type(n) is int and abs(n) <= LARGEST for n in numbers):
        raise ValueError(
            f"a test of task {task.id!r} has the value {value!r:.80}: arrays hold integers and lists of up to {ITEMS}"
        )
    items = np.zeros(ITEMS, np.int32)
    if is_list:
        items[: len(numbers)] = numbers
    number, size = (0, len(numbers)) if is_list else (value, 0)
    leaves: Any = (np.bool_(is_list), np.int32(number), items, np.int32(size), np.False_, np.False_)
    return Value(*leaves)


# ---------------------------------------------------------------- where the program is


def program_span(chars: jax.Array, length: jax.Array) -> tuple[Span, jax.Array, jax.Array]:
    """(start, end) of the fenced program, whether there is one, and whether its fences are beyond the arrays.

    The arrays read responses without a fence, and those with a fence at the very start and at most one more, which ends
    the text: alone on its line, or behind code, if there is no quote or comment anywhere.
    """
    place = jnp.arange(len(chars), dtype=jnp.int32)
    fence = starts(chars, "```")
    any_fence = fence.any() | starts(chars, "~~~").any()
    newline = chars == ord("\n")
    first_line = jnp.min(jnp.where(newline, place, length))
    opened = (
        fence[0] & ~jnp.any((chars == ord("`")) & (place >= 3) & (place < first_line)) & (first_line < length)
    )
    last = jnp.max(jnp.where(fence, place, 0))
    alone = chars.at[last - 1].get(mode="clip") == ord("\n")
    # The last character before the last fence that is no blank or tab.
    code = jnp.max(jnp.where((place < last) & ~among(chars, b" \t"), place, 0))
    behind = (chars[code] != ord("\n")) & ~jnp.any(among(chars, b"#'\"") & (place < length))
    shut = (last > 0) & (last == length - 3) & (alone | behind)
    ticks = jnp.sum(chars == ord("`"))
    plain = opened & (ticks == jnp.where(shut, 6, 3))
    start, end = first_line + 1, jnp.where(shut, jnp.where(alone, last - 1, code + 1), length)
    begun = ~among(chars.at[start].get(mode="fill", fill_value=0), b"\0\t\n ")
    plain &= begun & (end > start)  # neither empty nor indented
    return (jnp.where(plain, start, 0), jnp.where(plain, end, 0)), plain, any_fence & ~plain


# ---------------------------------------------------------------- one program


@flax.struct.dataclass
class _Progress:
    """How far reading and running have come."""

    value: Value  # [K]: values of the expression that is read so far
    start: jax.Array  # the expression is start..end
    end: jax.Array
    binds: jax.Array  # precedence of the expression's outermost operation
    line: jax.Array  # where the expression of this line begins
    returns: jax.Array  # whether this line is the last
    done: jax.Array
    beyond: jax.Array


@flax.struct.dataclass
class _Source:
    """A program with facts about each place in it."""

    chars: jax.Array
    digits_end: jax.Array  # one past the run of digits that contains each place
    digits_start: jax.Array
    sums: jax.Array  # UInt32: sums of digits times their powers of ten, up to each place
    variable: jax.Array  # the next x that is a complete name, from each place

    def char(self, at: jax.Array) -> jax.Array:
        return self.chars.at[jnp.maximum(at, 0)].get(mode="fill", fill_value=0)

    def has(self, at: jax.Array, text: str) -> jax.Array:
        return functools.reduce(jnp.logical_and, (self.char(at + k) == ord(c) for k, c in enumerate(text)))

    def repeats(self, start: jax.Array, end: jax.Array, at: jax.Array) -> jax.Array:
        """Whether the text start..end comes again at a place."""
        place = jnp.arange(len(self.chars))
        again = self.chars.at[place + at - start].get(mode="fill", fill_value=0)
        return jnp.all((self.chars == again) | (place < start) | (place >= end))

    def literal(self, at: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(whether a number begins here, its value, where it ends)."""
        found = is_digit(self.char(at))
        end = jnp.where(found, self.digits_end.at[at].get(mode="clip"), at)
        return found, (self.sums.at[end].get(mode="clip") - self.sums[at]).astype(jnp.int32), end

    def literal_before(self, at: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(whether a number ends here, its value, where it begins)."""
        found = is_digit(self.char(at - 1)) & (at > 0)
        start = jnp.where(found, self.digits_start[jnp.maximum(at - 1, 0)], at)
        return found, (self.sums.at[at].get(mode="clip") - self.sums[start]).astype(jnp.int32), start


def grade_program(chars: jax.Array, length: jax.Array, tests: Tests) -> tuple[Verdict, jax.Array, Span]:
    """Whether the program of a response passes the tests, whether there is a program, and where it is."""
    (start, end), readable, strange = program_span(chars, length)
    place = jnp.arange(len(chars), dtype=jnp.int32)
    chars = jnp.where((place >= start) & (place < end), chars, 0)
    source, odd = _prepared(chars)
    body = start + len(_HEADER)
    initial = _Progress(
        jax.tree.map(jnp.asarray, tests.inputs),
        *(jnp.int32(0),) * 2,
        jnp.int32(_ATOM),
        jnp.int32(0),
        *(jnp.bool_(False),) * 2,
        strange | odd | ~source.has(start, _HEADER),
    )
    initial = _begin_line(source, initial, body)
    grow = functools.partial(_grow, source)
    final = jax.lax.while_loop(lambda state: ~(state.done | state.beyond) & readable, grow, initial)
    beyond = strange | (readable & (final.beyond | jnp.any(final.value.strange & ~final.value.failed)))
    right = readable & final.done & ~beyond & jnp.all(jax.vmap(same)(final.value, tests.expected))
    return Verdict(right, beyond), readable, (start, end)


def _prepared(chars: jax.Array) -> tuple[_Source, jax.Array]:
    """The source, and whether a number or power in it puts it beyond the arrays."""
    width = len(chars)
    place = jnp.arange(width, dtype=jnp.int32)
    digit = is_digit(chars)
    digits_end, digits_start = next_place(~digit), place_before(~digit) + 1
    size = digits_end - digits_start
    leading_zero = digit & (place == digits_start) & (chars == ord("0")) & (size > 1)
    power = jnp.asarray(10 ** np.arange(_DIGITS), jnp.uint32)[
        jnp.clip(digits_end - 1 - place, 0, _DIGITS - 1)
    ]
    figure = jnp.where(digit, chars - ord("0"), 0).astype(jnp.uint32)
    sums = jnp.pad(jnp.cumsum(figure * power, dtype=jnp.uint32), (1, 0))
    named = is_word(chars)
    alone = (chars == ord("x")) & ~following(named, -1) & ~following(named)
    odd = jnp.any(leading_zero | (digit & (size > _DIGITS)) | starts(chars, "**"))
    return _Source(chars, digits_end, digits_start, sums, next_place(alone)), odd


def _begin_line(source: _Source, state: _Progress, line: jax.Array) -> _Progress:
    """Start at the first variable of a line; the value is already that of x."""
    assigns, returns = source.has(line, " x="), source.has(line, " return ")
    expression = line + jnp.where(returns, len(" return "), len(" x="))
    at = source.variable.at[expression].get(mode="fill", fill_value=len(source.chars))
    return replace(
        state,
        start=at,
        end=at + 1,
        binds=jnp.int32(_ATOM),
        line=expression,
        returns=returns,
        beyond=state.beyond | ~(assigns | returns) | (at >= len(source.chars)),
    )


def _grow(source: _Source, state: _Progress) -> _Progress:
    """Extend the expression by one operation, or end its line."""
    forms = [
        (name, state.binds >= inside, *_match(source, state, form), binds)
        for inside, binds, operations in _FORMS
        for form, name in operations.items()
    ]
    fits = jnp.stack([tight & found for _, tight, found, *_ in forms])
    chosen = jnp.argmax(fits)  # the first form that fits: it binds most tightly
    pick = lambda i: jnp.stack([jnp.asarray(form[i], jnp.int32) for form in forms])[chosen]
    c, d, start, end, binds = map(pick, range(3, 8))
    is_op = {name: chosen == i for i, (name, *_) in enumerate(forms)}
    value = jax.vmap(apply, in_axes=(None, None, None, 0))(is_op, c, d, state.value)
    grown = replace(state, value=value, start=start, end=end, binds=binds)

    after = source.char(state.end)
    ends = (state.start == state.line) & ((after == ord("\n")) | (after == 0))
    last = (after == 0) | (source.char(state.end + 1) == 0)
    done = ends & state.returns & last
    goes_on = ends & ~state.returns & (after == ord("\n"))
    beyond = ~fits.any() & ~(done | goes_on)
    next_line = _begin_line(source, state, state.end + 1)
    state = jax.tree.map(
        lambda stay, grow, begin: jnp.where(goes_on, begin, jnp.where(fits.any(), grow, stay)),
        state,
        grown,
        next_line,
    )
    return replace(state, done=done, beyond=state.beyond | beyond)


def _match(source: _Source, state: _Progress, form: str) -> tuple[Any, ...]:
    """(whether the form is around the expression, its C and D, its start, its end), read from inside outwards."""
    left, right = (filter(None, re.split("([CDE])", side)) for side in form.split("E", 1))
    fits, start, end = jnp.bool_(True), state.start, state.end
    constants: dict[str, Any] = {"C": 0, "D": 0}
    for piece in right:
        if piece == "E":
            found, end = source.repeats(state.start, state.end, end), end + state.end - state.start
        elif piece in constants:
            found, constants[piece], end = source.literal(end)
        else:
            found, end = source.has(end, piece), end + len(piece)
        fits &= found
    for piece in reversed(list(left)):
        if piece in constants:
            found, constants[piece], start = source.literal_before(start)
        else:
            start -= len(piece)
            found = source.has(start, piece)
        fits &= found
    if not form.startswith("E"):  # else the end of a longer name, a subscript, or a minus with two sides
        before = source.char(start - 1)
        fits &= ~(is_word(before) | among(before, b")]."))
    return fits, *constants.values(), start, end
