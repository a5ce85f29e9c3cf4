"""The script of a workflow: a dry run of its hosted generator on placeholders, call by call.

    marks as task and completions ──generator, prompts, chat template──► texts with marks ──► pieces of each prompt

So the only source of prompts is their Markdown. A piece is a constant text in codes, or a field that each episode
fills: the question, an earlier completion, or one part of it.
"""

import contextlib
import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from marl_jax.compiled.alphabet import Alphabet
from marl_jax.compiled.refusal import NoArrayForm
from marl_jax.own import error_line, file_of, without_partial
from marl_jax.rollouts import Chat
from marl_jax.task import Family
from marl_jax.workflows import parse
from marl_jax.workflows.api import Call, Completion, Workflow
from marl_jax.workflows.render import Prompts

PARTS = 32  # the most parts of one call's text that prompts may show
_FIRST, _LAST = 0xF0000, 0xFFFFD  # marks are characters of a private-use plane
CALLS = (_LAST - _FIRST) // (PARTS + 1)  # the most calls of an episode
_MARK = re.compile(f"([{chr(_FIRST)}-{chr(_LAST)}])")


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a prompt, filled in every episode."""

    call: int | None = None  # number of the call in the script whose text is shown; None: the question
    part: int | None = None  # of that text; None: all of it


@dataclasses.dataclass(frozen=True)
class Text:
    """A constant part of a prompt."""

    codes: bytes
    tokens: int  # number of tokens if the text is tokenised alone


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
    if call is not None and call >= CALLS:
        raise NoArrayForm(
            f"an episode of more than {CALLS} calls, if nothing can be read, has no form in arrays"
        )
    number = 0 if call is None else 1 + call * (PARTS + 1) + (0 if part is None else part + 1)
    return chr(_FIRST + number)


def dry_run(
    workflow: Workflow,
    prompts: Prompts,
    chat: Chat,
    alphabet: Alphabet,
    family: Family,
    texts: Mapping[int, str],
    *,
    check: bool = True,
) -> list[list[Cue]]:
    """The calls of an episode, batch by batch. `texts` {number of a call: its completion} replace marks.

    With `check`, a workflow is refused if answers of other calls change more than the end of the episode.
    """
    if "rng" in inspect.signature(workflow.fn).parameters:
        raise NoArrayForm(f"workflow '{workflow.name}' draws at random, which has no form in arrays")
    turns, numbers = dict[tuple[str, int], int](), itertools.count()
    batches, written = list[list[Cue]](), list[tuple[Call, str]]()

    said = lambda number, _: (mark(number), None)
    for items in _played(workflow, prompts, _DryTask(family, mark()), texts, said):
        batch = list[Cue]()
        for item in items:
            if not isinstance(item, Call):
                kind = type(item).__name__
                raise NoArrayForm(f"workflow '{workflow.name}' yields a {kind}, which has no form in arrays")
            if item.about is not None or item.labels:
                raise NoArrayForm(
                    f"a call of '{item.role}' has labels or is about another task, which has no form in arrays"
                )
            key, rendered = (item.role, item.slot), chat.texts(item.messages, after=item.after is not None)
            if key in {(cue.role, cue.slot) for cue in batch}:
                raise NoArrayForm(
                    f"two parallel calls of '{item.role}' that share slot {item.slot} have no form in arrays"
                )
            batch.append(
                Cue(
                    item.role,
                    item.slot,
                    turns.get(key, 0),
                    next(numbers),
                    _pieces(rendered, alphabet, item.role),
                    tuple(read.call for read in item.reads),
                    None if item.after is None else item.after.call,
                    item.read,
                )
            )
            turns[key] = turns.get(key, 0) + 1
            written.append((item, rendered[0]))
        batches += [batch] if batch else []
    if check:
        _check_other_answers(workflow, prompts, chat, family, texts, written)
    return batches


def side_by_side(scripts: Sequence[list[list[Cue]]]) -> list[list[list[Cue]]]:
    """Batch by batch, the parallel calls of each script, with places instead of the numbers of other calls.

    Parallel calls of several scripts share a place; a call's own number is kept, because its noise follows from it.
    """
    batches = list(itertools.zip_longest(*scripts, fillvalue=list[Cue]()))
    firsts = [0, *itertools.accumulate(max(map(len, batch)) for batch in batches)]

    def placed(script: list[list[Cue]], batch: list[Cue]) -> list[Cue]:
        place: dict[Any, Any] = {None: None}
        for first, cues in zip(firsts, script):
            place |= {cue.call: first + i for i, cue in enumerate(cues)}
        shown = lambda piece: Field(place[piece.call], piece.part) if isinstance(piece, Field) else piece
        return [
            dataclasses.replace(
                cue,
                pieces=tuple(map(shown, cue.pieces)),
                reads=tuple(map(place.__getitem__, cue.reads)),
                after=place[cue.after],
            )
            for cue in batch
        ]

    return [list(map(placed, scripts, batch)) for batch in batches]


@dataclasses.dataclass
class _DryTask:
    """The task of a dry run: forms in arrays know no other fields."""

    family: Family
    question: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NoArrayForm(f"a workflow that looks at task.{name} has no form in arrays")


class _DryCompletion(Completion):
    """A completion of a dry run: forms in arrays know its text and its answer only."""

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __getattribute__(self, name: str) -> Any:
        if name in ("tokens", "logprobs", "finish_reason"):
            raise NoArrayForm(f"a workflow that looks at the {name} of a completion has no form in arrays")
        return super().__getattribute__(name)


class _Failed(NoArrayForm):
    """The workflow raised an error."""


def _played(
    workflow: Workflow,
    prompts: Prompts,
    task: Any,
    texts: Mapping[int, str],
    said: Callable[[int, Call], tuple[str, str | None]],
) -> Iterator[list[Any]]:
    """The items that the workflow yields, batch by batch.

    Calls return `texts`, read by their own readers, or else the text and the answer of `said(number, call)`.
    """
    script, replies, reply = workflow(task, prompts), list[Completion](), None
    while True:
        try:
            yielded = script.send(reply)
        except StopIteration as stop:
            answers = [None, *(reply.answer for reply in replies)]
            if not isinstance(stop.value, Completion) and stop.value not in answers:
                raise NoArrayForm(
                    f"workflow '{workflow.name}', which returns no answer of a call, has no form in arrays"
                ) from None
            return
        except NoArrayForm:
            raise
        except Exception as error:
            raise _Failed(
                f"workflow '{workflow.name}', which raises {error_line(error, file_of(workflow.fn))} when no answer "
                "can be read, has no form in arrays"
            ) from None
        several = isinstance(yielded, list | tuple)
        items = list(yielded) if several else [yielded]
        yield items
        for number, call in enumerate(items, first := len(replies)):
            text, answer = said(number, call)
            if number in texts:
                text, answer = texts[number], call.read and call.read(texts[number])
            replies.append(_DryCompletion(text, (), (), "stop", answer, number))
        reply = replies[first:] if several else replies[first]


def _check_other_answers(
    workflow: Workflow,
    prompts: Prompts,
    chat: Chat,
    family: Family,
    texts: Mapping[int, str],
    written: Sequence[tuple[Call, str]],  # the calls of a dry run, and the text that each adds
) -> None:
    """Play with longer texts and with answers: there may be fewer calls, but no others, and each shows these texts."""
    filled = {mark(): f"aB {mark()} cD"}
    filled |= {mark(call): f" aB\n{mark(call)}\n{'cD ' * 400}" for call in range(len(written))}
    table, task = str.maketrans(filled), _DryTask(family, filled[mark()])
    facts = lambda call: (call.role, call.slot, [r.call for r in call.reads], call.after and call.after.call)

    def check(shift: int, unread: Sequence[None]) -> None:
        def said(number: int, call: Call) -> tuple[str, str | None]:
            answers = *_answers(call, text := filled[mark(number)]), *unread
            return text, answers[(number + shift) % len(answers)]

        again = itertools.chain.from_iterable(_played(workflow, prompts, task, texts, said))
        for item, (call, text) in zip(again, itertools.chain(written, itertools.repeat((None, "")))):
            if call is None or not isinstance(item, Call) or facts(item) != facts(call):
                raise NoArrayForm(
                    f"workflow '{workflow.name}', which makes other calls after other answers, has no form in arrays"
                )
            if chat.texts(item.messages, after=item.after is not None) != [text.translate(table)]:
                raise NoArrayForm(
                    f"a prompt of role '{call.role}' that changes a shown text, or depends on what was read, has no "
                    "form in arrays"
                )

    for shift, unread in itertools.product(range(3), ((), (None,))):
        with contextlib.suppress(_Failed):  # for example, where a workflow needs a number as answer
            check(shift, unread)


def _answers(call: Call, text: str) -> tuple[str | None, ...]:
    """Answers that the reader of a call may find, where the text does not decide."""
    reader, settings = without_partial(call.read), getattr(call.read, "keywords", {})
    if reader is parse.plan_of:
        return (parse.plan_of(text, settings.get("limit", 1)),)
    if reader is parse.stripped:
        return (parse.stripped(text),)
    if reader is parse.pick:
        return "1", str(settings.get("n", 1))
    return ("Correct", "Incorrect") if reader is parse.verdict else ("?",)


def _pieces(texts: Sequence[str], alphabet: Alphabet, role: str) -> tuple[Piece, ...]:
    if len(texts) > 1:
        raise NoArrayForm(f"a prompt of role '{role}' spells out a control word of the chat template")
    pieces: list[Piece] = []
    for part in _MARK.split(texts[0]):
        if _MARK.fullmatch(part):  # the inverse of `mark`
            number = ord(part) - _FIRST
            call, piece = divmod(number - 1, PARTS + 1)
            pieces.append(Field(call, piece - 1 if piece else None) if number else Field())
        elif part:
            pieces.append(Text(alphabet.codes(part, control=True).tobytes(), alphabet.count(part)))
    return tuple(pieces)
