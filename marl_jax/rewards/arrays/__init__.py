"""Reading and grading as pure functions over arrays, for the texts of micro models; all work under jit, vmap and scan.

    text = Text(*alphabet.spell(...))                          of B rows, see `compiled.alphabet`
    solved = read_answers(text)                                -> ReadAnswer: readable, start, end, key
    verdict = grade_integers(text, solved, gold, width=T)      gold Int[B] -> right Bool[B], beyond Bool[B]
    tests = pack_tests(tasks)                                  once, on the host: Tests, a pytree with leading [B]
    verdict, solved = grade_programs(text, tests)              programs of micro_code, by running them on the tests

The readers agree with the hosted ones (`rewards.families`, but see `boxed_spans`); `grade_integers` agrees with
`rewards.math`, and `grade_programs` with the sandbox, except on answers that they call beyond (see `integer_answers`
and `chain_programs`). These are graded 0 and counted; `readable` may be false for a program that is beyond.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from marl_jax.rewards.arrays.boxed_spans import answer_span
from marl_jax.rewards.arrays.chain_programs import Tests, grade_program, pack_tests
from marl_jax.rewards.arrays.integer_answers import Verdict, grade_answer
from marl_jax.rewards.arrays.texts import Text, part

__all__ = [
    "ReadAnswer",
    "Tests",
    "Text",
    "Verdict",
    "grade_integers",
    "grade_programs",
    "pack_tests",
    "read_answers",
]


@flax.struct.dataclass
class ReadAnswer:
    """The answer of each row: the content of its box, or its program."""

    readable: jax.Array  # Bool[B]
    start: jax.Array  # Int32[B], its first character
    end: jax.Array  # Int32[B], one past its last
    key: jax.Array  # UInt32[B 2]: equal for equal answers


@jax.enable_x64(False)
@jax.vmap
def read_answers(text: Text) -> ReadAnswer:
    """The last complete box of each row, as `extract_boxed` reads it."""
    (start, end), readable = answer_span(text.chars)
    return _read_answer(text.chars, start, end, readable)


@jax.enable_x64(False)
def grade_integers(text: Text, solved: ReadAnswer, gold: jax.Array, *, width: int) -> Verdict:
    """Whether each answer equals its gold integer; an answer of more than `width` characters is beyond."""
    grade = functools.partial(grade_answer, width=min(width, text.chars.shape[1]))
    return jax.vmap(grade)(text.chars, solved.start, solved.end, gold)


@jax.enable_x64(False)
@jax.vmap
def grade_programs(text: Text, tests: Tests) -> tuple[Verdict, ReadAnswer]:
    """Whether the program of each row passes all tests of its task, and where the program is."""
    verdict, readable, (start, end) = grade_program(text.chars, text.length, tests)
    return verdict, _read_answer(text.chars, start, end, readable)


def _read_answer(chars: jax.Array, start: jax.Array, end: jax.Array, readable: jax.Array) -> ReadAnswer:
    keys = jnp.asarray(_keys(len(chars)))  # random numbers for each place: equal sums mean equal texts
    answer = part(chars, start, end).chars.astype(jnp.uint32)
    return ReadAnswer(readable, start, end, jnp.sum(answer[:, None] * keys, axis=0))


@functools.cache
def _keys(width: int) -> np.ndarray:
    """UInt32 [width, 2]: odd random numbers."""
    return np.random.default_rng(20).integers(0, 2**32, (width, 2), dtype=np.uint32) | np.uint32(1)
