"""Views of the table by episode: calls in order, which call read which, tools, and how each path ended.

    Episode    one run of a workflow on a task, or one path of it if it forks
    CallRecord one call: its prompt, its completion and the answer read from it
    ToolRecord the result of one tool
    Leaf       how one path ended

Rewards, replays of workflows and transcripts read these; numeric work uses `marl_jax.table`.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from marl_jax.task import Task


@dataclasses.dataclass(frozen=True)
class CallRecord:
    """One call as it happened: a row of the table."""

    role: str  # the role that was called
    policy: str  # the policy that answered
    slot: int  # which of the role's parallel calls
    turn: int  # how many calls of the same (role, slot) came before in the episode
    prompt_tokens: tuple[int, ...]  # the prompt
    tokens: tuple[int, ...]  # the sampled tokens, including the stop token
    logprobs: tuple[float, ...]  # log-probs of `tokens` under the distribution sampled from
    text: str  # the completion as text
    finish_reason: str  # "stop" | "length"
    answer: str | None  # read by the call's reader, or the task's parser; None when unreadable
    reads: tuple[int, ...] = ()  # indices of the calls whose outputs the prompt showed
    after: int | None = None  # index of the call whose history this one continues
    version: int = 0  # update count of the policy that sampled it
    cut: int = 0  # tokens removed from the middle of a prompt that was too long
    temperature: float = 1.0  # sampling temperature
    # Per token, the ids that top-k/top-p kept; None if they removed none.
    kept: tuple[tuple[int, ...], ...] | None = None
    kind: str = "team"  # kind of its role, one of KINDS
    about: Task | None = None  # the task that it answers, if it is not its episode's
    path: tuple[int, ...] = ()  # the branch taken at each fork before it
    labels: Mapping[str, Any] | None = None  # the workflow's labels of the call, for keys of groups


@dataclasses.dataclass(frozen=True)
class ToolRecord:
    """The result of one tool; a replay uses it instead of running the tool."""

    name: str  # name of the function
    result: Any  # what it returned, JSON-like
    error: str | None = None  # "timeout", or the exception's text
    after_call: int = -1  # index of the last call issued before it
    path: tuple[int, ...] = ()  # the branch taken at each fork before it

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", tuple(self.path))  # JSON has lists


@dataclasses.dataclass(frozen=True)
class Leaf:
    """How one path through the forks of an episode ended."""

    path: tuple[int, ...]  # the branch taken at each fork
    answer: str | None  # returned by the workflow on this path
    error: str | None = None  # the exception that ended it early, if one did
    outcome: Any = None  # grade of the answer; None until it is graded


@dataclasses.dataclass(frozen=True)
class Episode:
    """One run of a workflow on one task: its calls in order, and the grades once it is graded.

    An episode that forks is a tree; each of its paths can be viewed as an episode without forks. Indices of calls
    (`reads`, `after`, `after_call`) count along the path.
    """

    task: Task  # the problem
    sample: int  # which of the task's episodes
    workflow: str  # name of the workflow
    calls: tuple[CallRecord, ...]  # in the order in which they were made
    answer: str | None  # returned by the workflow
    tools: tuple[ToolRecord, ...] = ()  # results of its tools, in the order in which they were called
    error: str | None = None  # the exception that ended it early, if one did
    seconds: float = 0.0  # wall time; the only field that may differ between two equal runs
    key: tuple[int, ...] = ()  # (run seed, step, task, sample): root of all its randomness
    outcome: Any = None  # grade of the answer, between 0 and 1; None until it is graded
    # For each call, the grade of a solver's answer (0 if unreadable); None for other kinds.
    answers: tuple[float | None, ...] = ()
    path: tuple[int, ...] = ()  # the branch taken at each fork
    leaves: tuple[Leaf, ...] = ()  # how its paths ended, if it forks; its `outcome` is their mean

    @property
    def episode(self) -> "Episode":
        """The episode itself, so that a reward may use `graded.episode.calls` or `graded.calls`."""
        return self

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each call."""
        return tuple(call.kind for call in self.calls)


def ends_of(episode: Episode, call: CallRecord) -> list[Any]:
    """The leaves of the paths through a call; [episode] if the episode does not fork."""
    return [leaf for leaf in episode.leaves if leaf.path[: len(call.path)] == call.path] or [episode]


def indices_on_path(episode: Episode) -> Iterable[int]:
    """The index of each call on its path."""
    if not episode.leaves:
        return range(len(episode.calls))
    sizes = collections.Counter(call.path for call in episode.calls)
    before = {path: sum(sizes[path[:depth]] for depth in range(len(path))) for path in sizes}
    count: collections.Counter[tuple[int, ...]] = collections.Counter()
    indices = []
    for call in episode.calls:
        indices.append(before[call.path] + count[call.path])
        count[call.path] += 1
    return indices


def path_of(bare: Episode, leaf: Leaf | Episode) -> Episode:
    """The path to a leaf as an episode without forks; its calls are left out."""
    tools = tuple(tool for tool in bare.tools if leaf.path[: len(tool.path)] == tool.path)
    ending = {"path": leaf.path, "answer": leaf.answer, "error": leaf.error, "outcome": leaf.outcome}
    return dataclasses.replace(bare, tools=tools, leaves=(), **ending)
