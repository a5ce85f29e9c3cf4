"""What the table shows episode by episode: calls in order, who read whom, tools, and how each path ended.

    Episode    one run of a workflow on a task, or one path of it where it forks
    CallRecord one call: what was shown, what was said, what was read in it
    ToolRecord the result of one tool
    Leaf       how one path ended

Rewards, workflows that are replayed and transcripts read these; numbers are read in `marl_jax.table`.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from marl_jax.task import Task

__all__ = ["CallRecord", "Episode", "Leaf", "ToolRecord", "ends_of", "path_of", "places_of"]


@dataclasses.dataclass(frozen=True)
class CallRecord:
    """One call as it happened: a row of the table."""

    role: str  # who was asked
    policy: str  # which one answered
    slot: int  # which of the role's parallel calls
    turn: int  # how many calls of the same (role, slot) came before in the episode
    prompt_tokens: tuple[int, ...]  # what it was shown
    tokens: tuple[int, ...]  # sampled, including the stop token
    logprobs: tuple[float, ...]  # of the distribution sampled from
    text: str  # what it said, as words
    finish_reason: str  # "stop" | "length"
    answer: str | None  # as the call's reader, or the task's parser, read it; None when unreadable
    reads: tuple[int, ...] = ()  # indices of the calls whose outputs the prompt showed
    after: int | None = None  # index of the call whose history this one continues
    version: int = 0  # update count of the policy that sampled it
    cut: int = 0  # tokens taken out of the prompt's middle so that it fits
    temperature: float = 1.0  # that it was sampled at
    # Per token, the ids that top-k/top-p left, if they cut any.
    kept: tuple[tuple[int, ...], ...] | None = None
    kind: str = "team"  # what its role's own work is, one of KINDS
    about: Task | None = None  # the task that it answers, where that is not its episode's
    path: tuple[int, ...] = ()  # the branches taken before it, fork by fork
    labels: Mapping[str, Any] | None = None  # given by the workflow, for groups


@dataclasses.dataclass(frozen=True)
class ToolRecord:
    """The result of one tool; a replay uses it instead of running the tool."""

    name: str  # of the function
    result: Any  # JSON-like
    error: str | None = None  # "timeout", or the exception's text
    after_call: int = -1  # index of the last call issued before it
    path: tuple[int, ...] = ()  # the branches taken before it

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", tuple(self.path))  # JSON has lists


@dataclasses.dataclass(frozen=True)
class Leaf:
    """How one path through the forks of an episode ended."""

    path: tuple[int, ...]  # the branches taken
    answer: str | None  # what the workflow returned there
    error: str | None = None  # the exception that ended it early, if one did
    outcome: Any = None  # grade of the answer; None until it is graded


@dataclasses.dataclass(frozen=True)
class Episode:
    """One run of a workflow on one task: its calls in order, and once it is graded what they came to.

    One that forks is a tree. It is seen path by path: each is an episode as it would be without its sisters. Places of
    calls (`reads`, `after`, `after_call`) count on the path.
    """

    task: Task  # the problem
    sample: int  # which of the task's episodes
    workflow: str  # its name
    calls: tuple[CallRecord, ...]  # in the order in which they were made
    answer: str | None  # what the workflow returned
    tools: tuple[ToolRecord, ...] = ()  # results of its tools, in the same order
    error: str | None = None  # the exception that ended it early, if one did
    seconds: float = 0.0  # wall time; the only field that two equal runs may not share
    key: tuple[int, ...] = ()  # (run seed, step, task, sample): root of all its randomness
    outcome: Any = None  # grade of the answer, between 0 and 1; None until it is graded
    # By call, the grade of a solver's own answer (0 if unreadable); None for others.
    answers: tuple[float | None, ...] = ()
    path: tuple[int, ...] = ()  # the branches taken at its forks
    leaves: tuple[Leaf, ...] = ()  # of a tree: how its paths ended; its `outcome` is their mean

    @property
    def episode(self) -> "Episode":
        """Itself: rewards of one's own may say `graded.episode.calls` or `graded.calls`."""
        return self

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each call."""
        return tuple(call.kind for call in self.calls)


def ends_of(episode: Episode, call: CallRecord) -> list[Any]:
    """The paths that a call is on; the episode itself where it does not fork."""
    return [leaf for leaf in episode.leaves if leaf.path[: len(call.path)] == call.path] or [episode]


def places_of(episode: Episode) -> Iterable[int]:
    """Where each call stands on its path."""
    if not episode.leaves:
        return range(len(episode.calls))
    sizes = collections.Counter(call.path for call in episode.calls)
    before = {path: sum(sizes[path[:depth]] for depth in range(len(path))) for path in sizes}
    count: collections.Counter[tuple[int, ...]] = collections.Counter()
    places = []
    for call in episode.calls:
        places.append(before[call.path] + count[call.path])
        count[call.path] += 1
    return places


def path_of(bare: Episode, leaf: Leaf) -> Episode:
    """The path to a leaf as an episode that does not fork, without its calls."""
    tools = tuple(tool for tool in bare.tools if leaf.path[: len(tool.path)] == tool.path)
    ending = {"path": leaf.path, "answer": leaf.answer, "error": leaf.error, "outcome": leaf.outcome}
    return dataclasses.replace(bare, tools=tools, leaves=(), **ending)
