"""A running episode: a workflow's generator, the results that it waits for, and the record so far.

The caller (the scheduler, a replay) takes the next batch of calls and tools, fills in every result,
and continues until the batch is empty. At a fork it takes one branch; `replay.branches` makes the others.
"""

import copy
import dataclasses
import functools
import itertools
import math
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, cast

import numpy as np
from annotated_types import Ge

from marl_jax import fields
from marl_jax.episodes import CallRecord, Episode, ToolRecord
from marl_jax.fields import Count
from marl_jax.own import error_line, file_of
from marl_jax.rollouts.history import Chat, Ended, Overlong, fit
from marl_jax.rollouts.tools import TIMEOUT
from marl_jax.task import Task
from marl_jax.workflows.api import Call, Completion, Fork, Message, Tool, ToolError, ToolTimeout, Workflow

Parser = Callable[[Task, str], str | None]


@dataclasses.dataclass(frozen=True)
class Limits:
    """What ends an episode early."""

    max_calls: Count = 64  # calls, tools and forks of one episode, on one path through its forks
    max_leaves: Count = 64  # paths of one episode, if all branches forked like the one played
    context: Annotated[int | None, Ge(2)] = None  # tokens of prompt and completion together
    overlong: Literal["refuse", "truncate"] = (
        "refuse"  # what to do with a prompt that leaves its completion no room
    )

    def __post_init__(self) -> None:
        fields.check(self)


@dataclasses.dataclass(frozen=True)
class Ask:
    """A call ready for the engine."""

    call: Call
    index: int  # of the call in its episode
    turn: int
    prompt: tuple[int, ...]
    cut: int  # tokens cut from the prompt
    path: tuple[int, ...] = ()  # the branches taken before it


@dataclasses.dataclass(eq=False)
class Running:
    """The episode of one (task, sample), on one path through its forks: the branches `due` first, then branch 0."""

    task: Task
    sample: int
    key: tuple[int, ...]
    workflow: Workflow
    prompts: Any
    chat_of: Callable[[str, int], Chat]  # (role, slot) -> the chat of the policy that answers
    limits: Limits
    new_tokens: Callable[[str], int] = lambda role: 1  # role -> tokens of its longest completion
    due: tuple[int, ...] = ()  # the branches to take first

    def __post_init__(self) -> None:
        self.path: tuple[int, ...] = ()  # the branches taken so far
        self.others: list[tuple[int, ...]] = []  # paths of the other branches of the last forks
        self._leaves = 1
        self._rng = np.random.default_rng(self.key)
        self.script = self.workflow(self.task, self.prompts, rng=self._rng)
        self.calls: list[CallRecord] = []
        self.tools: list[ToolRecord] = []
        self.answer: str | None = None
        self.error: str | None = None
        self.trace = ""  # traceback of an exception
        self.refused = False  # a prompt did not fit
        self.silent = False  # the workflow returned nothing
        self.waiting = 0  # results that the current batch still lacks
        self._began = time.monotonic()
        self._batch: list[Ask | Tool] = []
        self._records: list[CallRecord | ToolRecord | None] = []
        self._single = False
        self._completions: list[Completion] = []
        self._turns: dict[tuple[str, int], int] = {}
        self._spent = 0

    def advance(self) -> list[Ask | Tool]:
        """Send the results to the workflow and run to its next yield; returns its batch, empty if the episode ended."""
        try:
            reply = self._close_batch()
            while True:
                send = self.script.throw if isinstance(reply, ToolError) else self.script.send
                yielded = send(reply)
                if isinstance(yielded, Fork):
                    reply = self._fork(yielded)
                    continue
                self._single = not isinstance(yielded, list | tuple)
                items = [yielded] if self._single else list(yielded)
                self._spend(len(items))
                if items:
                    return self._open_batch(items)
                reply = []
        except StopIteration as stop:
            self._finish(stop.value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a workflow's own exit() ends its episode, not the run
            if isinstance(error.__cause__, StopIteration):  # of a `next`; Python's RuntimeError has no place
                error = error.__cause__
            self.error = self._describe(error)
            self.refused = isinstance(error, Overlong)
            if not isinstance(error, Ended):
                self.trace = self.trace or _trace(error)
        self.close()
        return []

    def give_call(self, position: int, completion: Any, parse: Parser, **facts: Any) -> None:
        """Fill in a completion (.tokens, .logprobs, .finish_reason, .kept); `facts` go to its record."""
        ask = self._batch[position]
        assert isinstance(ask, Ask)
        call, answer = ask.call, None
        text = self.chat_of(call.role, call.slot).decode(completion.tokens)
        try:
            answer = call.read(text) if call.read else parse(call.about or self.task, text)
            if not isinstance(answer, str | None):
                raise TypeError(
                    f"the reader of '{call.role}' returned {type(answer).__name__}, not text or None"
                )
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            answer, self.error = None, self.error or self._describe(error)
            self.trace = self.trace or _trace(error)
        kept = getattr(completion, "kept", None)
        record = CallRecord(
            role=call.role,
            slot=call.slot,
            turn=ask.turn,
            prompt_tokens=ask.prompt,
            tokens=tuple(map(int, completion.tokens)),
            logprobs=tuple(np.asarray(completion.logprobs, np.float32).tolist()),
            text=text,
            finish_reason=completion.finish_reason,
            answer=answer,
            reads=tuple(read.call for read in call.reads),
            after=call.after.call if call.after else None,
            cut=ask.cut,
            kept=None if kept is None else _kept_sets(np.asarray(kept)),
            kind=self.workflow.kind_of(call.role),
            about=call.about,
            path=ask.path,
            labels=None if call.labels is None else dict(call.labels),
            **facts,
        )
        self.put(position, record)

    def put(self, position: int, record: CallRecord | ToolRecord | None) -> None:
        """Fill in the record of one result of the batch."""
        self._records[position] = record
        self.waiting -= 1

    def episode(self) -> Episode:
        """The record so far, as an episode."""
        return Episode(
            task=self.task,
            sample=self.sample,
            workflow=self.workflow.name,
            calls=tuple(self.calls),
            answer=self.answer,
            tools=tuple(self.tools),
            error=self.error,
            seconds=time.monotonic() - self._began,
            key=self.key,
            path=self.path,
        )

    def stop(self, error: str) -> None:
        """End the episode here, on the path that it was due to take."""
        self.error, self.path = error, self.due
        self.close()

    def close(self) -> None:
        """Close the generator; an error that it raises becomes the episode's, if that has none yet."""
        try:
            self.script.close()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.error = self.error or self._describe(error)

    def fail(self, position: int, error: Exception) -> None:
        """A call of the batch could not be made: the episode ends once the other results are filled in."""
        self.error = self.error or self._describe(error)
        self.put(position, None)

    def _close_batch(self) -> Any:
        """Record the batch's results; returns the reply to the workflow: a result, a list of them, or an error."""
        if not self._batch:
            return None
        results: list[Any] = []
        for record in itertools.takewhile(lambda record: record is not None, self._records):
            if isinstance(record, CallRecord):
                self.calls.append(record)
                results.append(_completion(record, len(self._completions)))
                self._completions.append(results[-1])
            elif isinstance(record, ToolRecord):
                self.tools.append(dataclasses.replace(record, path=self.path) if self.path else record)
                results.append(_result(record))
        self._batch = []
        if self.error:
            raise Ended(self.error)
        failed = [result for result in results if isinstance(result, ToolError)]
        for error in failed:
            error.results = results
        return failed[0] if failed else results[0] if self._single else results

    def _fork(self, fork: Fork) -> int:
        """The branch to take; from here on, noise follows from the path."""
        self._spend(1)
        self._leaves *= fork.ways
        if self._leaves > self.limits.max_leaves:
            raise Ended(
                f"a fork of {fork.ways} ways could give this episode {self._leaves} paths, if all branches fork alike; "
                f"at most {self.limits.max_leaves} are allowed: fork fewer ways, or raise rollout.limits.max_leaves"
            )
        branch = 0
        if len(self.path) < len(self.due):
            branch = self.due[len(self.path)]
            if branch >= fork.ways:
                raise Ended(
                    f"path {self.due} takes branch {branch}; the fork has branches 0..{fork.ways - 1}"
                )
        else:
            self.others += [(*self.path, other) for other in range(1, fork.ways)]
        self.path = (*self.path, branch)
        seeds = np.random.SeedSequence(self.key, spawn_key=self.path)
        noise: Any = self._rng.bit_generator
        noise.__setstate__((type(noise)(seeds).state, seeds))  # `rng.spawn` draws from the seeds
        return branch

    def _spend(self, items: int) -> None:
        self._spent += items or 1  # an empty list counts, or a workflow could yield them forever
        if self._spent > self.limits.max_calls:
            raise Ended(
                f"call budget of {self.limits.max_calls} exhausted: the workflow asks for more; if it should, raise "
                "rollout.limits.max_calls"
            )

    def _open_batch(self, items: list[Any]) -> list[Ask | Tool]:
        self._batch, slots = [], set()
        index = len(self.calls)
        for item in items:
            if isinstance(item, Tool):
                self._batch.append(item)
            elif isinstance(item, Call):
                if (item.role, item.slot) in slots:
                    raise Ended(
                        f"two parallel calls of '{item.role}' share slot {item.slot}: give each its own slot"
                    )
                slots.add((item.role, item.slot))
                self._batch.append(self._ask(item, index))
                index += 1
            else:
                kind, name = type(item).__name__, self.workflow.name
                where = "" if self._single else " in a list"
                raise Ended(
                    f"workflow '{name}' yielded {kind}{where}; yield a Call, a Tool, a list of them, or a Fork"
                )
        self._records = [None] * len(self._batch)
        self.waiting = len(self._batch)
        return self._batch

    def _ask(self, call: Call, index: int) -> Ask:
        if call.role not in self.workflow.roles:
            known = ", ".join(self.workflow.roles)
            raise Ended(f"workflow '{self.workflow.name}' calls '{call.role}', but declares only: {known}")
        for completion in (*call.reads, *([call.after] if call.after else [])):
            if not any(completion is known for known in self._completions):
                raise Ended(
                    f"a call to '{call.role}' refers to no completion of this episode: {completion!r:.60}"
                )
        history: tuple[int, ...] = ()
        chat = self.chat_of(call.role, call.slot)
        render: Callable[[Sequence[Message]], tuple[int, ...]] = chat.start
        if call.after:
            last = self.calls[call.after.call]
            if self.chat_of(last.role, last.slot) is not chat:
                raise Ended(
                    f"a call to '{call.role}' continues the history of '{last.role}', whose policy has another "
                    "tokenizer: show it the text in a message of its own, or give both policies one base"
                )
            history = last.prompt_tokens + last.tokens
            render = functools.partial(chat.extend, last.tokens)
        context = math.inf if self.limits.context is None else self.limits.context
        room = context - self.new_tokens(call.role) - len(history)
        added, cut = fit(call.messages, render, room, self.limits.overlong == "truncate")
        turn = self._turns.get((call.role, call.slot), 0)
        self._turns[call.role, call.slot] = turn + 1
        return Ask(call, index, turn, history + added, cut, self.path)

    def _describe(self, error: BaseException) -> str:
        """An exception in one line, with its place in the workflow's file."""
        return str(error) if isinstance(error, Ended) else error_line(error, file_of(self.workflow.fn))

    def _finish(self, answer: Any) -> None:
        self.silent = answer is None
        if isinstance(answer, Completion):
            answer = answer.answer
        if isinstance(answer, str | None):
            self.answer = answer
        else:
            self.error = (
                f"workflow '{self.workflow.name}' returned {type(answer).__name__}; "
                "return a Completion, a text or None"
            )


def _trace(error: BaseException) -> str:
    """The traceback from the workflow's code on, without the frames of this file before it."""
    frames = traceback.extract_tb(error.__traceback__)
    kept = list(itertools.dropwhile(lambda frame: frame.filename == __file__, frames))
    try:
        last = traceback.format_exception_only(error)
    except BaseException:  # the error cannot be turned into text
        last = [f"{type(error).__name__}\n"]
    return "".join(["Traceback (most recent call last):\n", *traceback.format_list(kept), *last])


def _completion(record: CallRecord, call: int) -> Completion:
    reason = cast(Literal["stop", "length"], record.finish_reason)
    return Completion(record.text, record.tokens, record.logprobs, reason, record.answer, call)


def _result(record: ToolRecord) -> Any:
    """A copy for the workflow, so that changes by the workflow do not reach the record."""
    if record.error is None:
        return copy.deepcopy(record.result)
    failure = ToolTimeout if record.error == TIMEOUT else ToolError
    return failure(f"{record.name}: {record.error}")


def _kept_sets(kept: np.ndarray) -> tuple[tuple[int, ...], ...]:  # int[tokens, width], padded with -1
    counts = (kept >= 0).sum(axis=1).tolist()
    return tuple(tuple(row[:count]) for row, count in zip(kept.tolist(), counts))
