"""Array forms of the readers that calls have on the hosted road: those of `workflows.parse`, and of task answers.

codes uint8 [B, N] (padded with 0) ──► Read: the answers of B texts

A solver's answer is compared with its gold integer; a program must pass the tests of its task.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marl_jax.compiled.refusal import NoArrayForm
from marl_jax.own import without_partial
from marl_jax.rewards import arrays
from marl_jax.rewards.arrays import Text, role_readers
from marl_jax.rewards.arrays.boxed_spans import is_blank
from marl_jax.task import Family
from marl_jax.workflows import Workflow, parse


class Read(NamedTuple):
    """The answers read from B texts."""

    readable: jax.Array  # Bool[B]
    choice: jax.Array  # Int[B], as in the table: a verdict, a pick, else -1
    right: jax.Array  # Bool[B], the answer is right
    beyond: jax.Array  # Bool[B], arrays cannot tell whether the answer is right
    key: jax.Array  # uint32 [B, 2], equal for equal answers
    parts: jax.Array  # uint8 [B, K, N], the parts of a plan
    count: jax.Array  # type: ignore[assignment]  # Int[B], number of parts


Reader = Callable[[Text, Any], Read]  # texts, references [B, ...]


def answer(text: Text, gold: jax.Array) -> Read:
    """The boxed answer, and whether it is the gold integer."""
    solved = arrays.read_answers(text)
    return _judged(text, solved, arrays.grade_integers(text, solved, gold, width=text.chars.shape[1]))


def program(text: Text, tests: arrays.Tests) -> Read:
    """The program of a response, and whether it passes the tests."""
    verdict, solved = arrays.grade_programs(text, tests)
    return _judged(text, solved, verdict)


def _judged(text: Text, solved: arrays.ReadAnswer, verdict: arrays.Verdict) -> Read:
    right = solved.readable & verdict.right
    return _blank(text)._replace(readable=solved.readable, right=right, beyond=verdict.beyond, key=solved.key)


def stripped(text: Text, _: jax.Array) -> Read:
    """`parse.stripped`."""
    return _blank(text)._replace(readable=jnp.any((text.chars != 0) & ~is_blank(text.chars), axis=1))


def choice(choose: Callable[..., jax.Array], text: Text, _: jax.Array, **settings: Any) -> Read:
    """`parse.pick` or `parse.verdict`, whose form for one text is `choose`."""
    chosen = jax.vmap(functools.partial(choose, **settings))(text.chars)
    return _blank(text)._replace(readable=chosen >= 0, choice=chosen)


def plan(text: Text, _: jax.Array, *, limit: int) -> Read:
    """`parse.plan_of`."""
    parts, count = jax.vmap(functools.partial(role_readers.strategies, limit=limit))(text.chars, text.length)
    return _blank(text)._replace(readable=count > 0, parts=parts.chars, count=count)


FORMS: dict[Callable[..., Any], Callable[..., Read]] = {
    parse.pick: functools.partial(choice, role_readers.pick),
    parse.verdict: functools.partial(choice, role_readers.verdict),
    parse.plan_of: plan,
    parse.stripped: stripped,
}
ANSWERS: dict[Family, Reader] = {"math": answer, "code": program}
CHOOSERS = {"judge": parse.verdict, "picker": parse.pick}  # {kind of role: the reader of its choices}


def check_chooser(reader: Callable[..., Any] | None, role: str, workflow: Workflow) -> None:
    """Refuse a judge or picker with another reader: on the hosted road its choice follows from any answer."""
    chooser = CHOOSERS.get(kind := workflow.kind_of(role))
    if chooser and without_partial(reader) is not chooser:
        raise NoArrayForm(
            f"role '{role}', a {kind} that does not read with {chooser.__name__}, has no form in arrays"
        )


def form_of(reader: Callable[..., Any] | None, role: str, family: Family) -> Reader:
    """The array form of a call's hosted reader; None reads the answer of a task of this family."""
    if reader is None:
        return ANSWERS[family]
    inner = without_partial(reader)
    if inner not in FORMS:
        raise NoArrayForm(f"role '{role}' reads with {inner!r:.60}, which has no form in arrays")
    settings = getattr(reader, "keywords", {})
    if settings.get("n", 0) > 9:
        raise NoArrayForm(f"role '{role}' picks among more than 9 answers, which has no form in arrays")
    return functools.partial(FORMS[inner], **settings)


def same_reader(reader: Any) -> Any:
    """A key that is equal for readers that do the same."""
    return (
        (reader.func, *sorted(reader.keywords.items())) if isinstance(reader, functools.partial) else reader
    )


def _blank(text: Text) -> Read:
    rows = len(text.chars)
    false, no_choice = jnp.zeros(rows, bool), jnp.full(rows, -1, jnp.int32)
    key, parts = jnp.zeros((rows, 2), jnp.uint32), jnp.zeros((rows, 0, text.chars.shape[1]), jnp.uint8)
    return Read(false, no_choice, false, false, key, parts, jnp.zeros(rows, jnp.int32))
