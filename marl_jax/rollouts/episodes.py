"""The record of one episode: every call, every tool result, the final answer.

Records are plain frozen data, written compactly and read back exactly; credit assignment and the learner's
batches are pure functions of them.
"""

import dataclasses
from typing import Any

from marl_jax.tasks.task import Task

TIMEOUT = "timeout"  # the error of a tool that had not ended in time


@dataclasses.dataclass(frozen=True)
class CallRecord:
    """One call as it happened."""

    role: str
    policy: str
    slot: int  # which of the role's parallel calls
    turn: int  # how many calls of the same (role, slot) came before in the episode
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]  # sampled, including the stop token
    logprobs: tuple[float, ...]  # of the distribution sampled from
    text: str
    finish_reason: str  # "stop" | "length"
    answer: str | None  # as the call's reader, or the task's parser, read it; None when unreadable
    reads: tuple[int, ...] = ()  # indices of the calls whose outputs the prompt showed
    after: int | None = None  # index of the call whose history this one continues
    version: int = 0  # update count of the policy that sampled it
    cut: int = 0  # tokens taken out of the prompt's middle so that it fits
    temperature: float = 1.0
    kept: tuple[tuple[int, ...], ...] | None = (
        None  # per token, the ids that top-k/top-p left, if they cut any
    )


@dataclasses.dataclass(frozen=True)
class ToolRecord:
    """One tool result, replayed instead of run again."""

    name: str
    result: Any  # JSON-like
    error: str | None = None  # TIMEOUT, or the exception's text
    after_call: int = -1  # index of the last call issued before it


@dataclasses.dataclass(frozen=True)
class Episode:
    """One run of a workflow on one task."""

    task: Task
    sample: int  # which of the task's episodes
    workflow: str
    calls: tuple[CallRecord, ...]
    answer: str | None  # what the workflow returned
    tools: tuple[ToolRecord, ...] = ()
    error: str | None = None  # the exception that ended it early, if one did
    seconds: float = 0.0  # wall time; the only field that two equal runs may not share
    key: tuple[int, ...] = ()  # (run seed, step, task, sample): root of all its randomness


def say(error: BaseException) -> str:
    """An exception as records put it: its type and its text; the type alone where asking for the text raises."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except BaseException:
        return name
