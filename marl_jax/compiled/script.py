"""The script of a workflow: a dry run of its hosted generator on placeholders, call by call.

    task and completions are marks ──generator, prompts, chat template──► texts with marks ──► pieces of each prompt

So the Markdown of the prompts is their only source. A piece is a text in codes, or a field that an episode fills: the
question, an earlier completion, or one part of it.
"""

import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marl_jax.compiled.alphabet import Alphabet
from marl_jax.compiled.refusal import NoArrayForm
from marl_jax.rollouts import Chat
from marl_jax.task import Family, Task
from marl_jax.workflows.api import Call, Completion, Workflow
from marl_jax.workflows.render import Prompts

PARTS = 32  # of one call's text, that prompts may show
_FIRST, _LAST = 0xF0000, 0xFFFFD  # marks are characters of a private plane
_MARK = re.compile(f"([{chr(_FIRST)}-{chr(_LAST)}])")


@dataclasses.dataclass(frozen=True)
class Field:
    """A place of a prompt that is filled for every episode."""

    call: int | None = None  # the call of the text, counted in the order of the script; None: the question
    part: int | None = None  # of that text; None: all of it


@dataclasses.dataclass(frozen=True)
class Text:
    """A part of a prompt that is always the same."""

    codes: bytes
    tokens: int  # that it is by itself


Piece = Text | Field


@dataclasses.dataclass(frozen=True)
class Cue:
    """One call of the script."""

    role: str
    slot: int
    turn: int
    call: int  # its number in the episode
    pieces: tuple[Piece, ...]  # of the prompt, or of the part appended to the history
    reads: tuple[int, ...]
    after: int | None
    read: Callable[[str], str | None] | None


def mark(call: int | None = None, part: int | None = None) -> str:
    """The character that stands for a field in a dry run."""
    if part is not None and part >= PARTS:
        raise NoArrayForm(f"a text of more than {PARTS} parts has no form in arrays")
    number = 0 if call is None else 1 + call * (PARTS + 1) + (0 if part is None else part + 1)
    return chr(_FIRST + number)


def dry_run(
    workflow: Workflow,
    prompts: Prompts,
    chat: Chat,
    alphabet: Alphabet,
    family: Family,
    texts: Mapping[int, str],
) -> list[list[Cue]]:
    """The calls of an episode by batch. `texts` are completions in place of marks, by the number of their call."""
    if "rng" in inspect.signature(workflow.fn).parameters:
        raise NoArrayForm(f"workflow '{workflow.name}' draws at random, which has no form in arrays")
    script = workflow(Task("a task", family, mark()), prompts)
    calls, turns = itertools.count(), dict[tuple[str, int], int]()
    batches: list[list[Cue]] = []
    reply: Any = None
    while True:
        try:
            yielded = script.send(reply)
        except StopIteration:
            return batches
        items = yielded if isinstance(yielded, list | tuple) else [yielded]
        batch, replies = list[Cue](), list[Completion]()
        for item in items:
            if not isinstance(item, Call):
                what = type(item).__name__
                raise NoArrayForm(f"workflow '{workflow.name}' yields a {what}, which has no form in arrays")
            if item.about is not None or item.labels:
                raise NoArrayForm(
                    f"a call of '{item.role}' has labels or is about another task, which has no form in arrays"
                )
            number, seat = next(calls), (item.role, item.slot)
            batch.append(
                Cue(
                    item.role,
                    item.slot,
                    turns.get(seat, 0),
                    number,
                    _pieces(chat.texts(item.messages, after=item.after is not None), alphabet, item.role),
                    tuple(read.call for read in item.reads),
                    None if item.after is None else item.after.call,
                    item.read,
                )
            )
            turns[seat] = turns.get(seat, 0) + 1
            text = texts.get(number, mark(number))
            replies.append(Completion(text, (), (), "stop", None, number))
        batches += [batch] if batch else []
        reply = replies if isinstance(yielded, list | tuple) else replies[0]


def _pieces(texts: Sequence[str], alphabet: Alphabet, role: str) -> tuple[Piece, ...]:
    if len(texts) > 1:
        raise NoArrayForm(f"a prompt of role '{role}' spells out a control word of the chat template")
    pieces: list[Piece] = []
    for part in _MARK.split(texts[0]):
        if _MARK.fullmatch(part):
            pieces.append(_field(ord(part) - _FIRST))
        elif part:
            pieces.append(Text(alphabet.codes(part, control=True).tobytes(), alphabet.count(part)))
    return tuple(pieces)


def _field(number: int) -> Field:
    if number == 0:
        return Field()
    call, part = divmod(number - 1, PARTS + 1)
    return Field(call, part - 1 if part else None)
