"""The words a workflow is written in: Call, Tool, Completion, and the `@workflow` decorator.

A workflow is a generator function `(task, prompts, *, rng, **settings)`; `rng` is optional. It yields one
`Call` or `Tool`, or a list of parallel ones, and receives the results in the same shape; it returns
the final answer.

    @workflow(roles=("generator", "aggregator"))
    def voting(task, prompts, *, votes=3):
        ask = prompts.generator(question=task.question)
        drafts = yield [Call("generator", ask, slot=i) for i in range(votes)]
        ask = prompts.aggregator(question=task.question, candidates=drafts)
        choice = yield Call("aggregator", ask, reads=drafts, read=lambda text: pick(text, votes))
        return drafts[int(choice.answer or 1) - 1]
"""

import dataclasses
import inspect
import numbers
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal

Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant", "content": text}
Reader = Callable[[str], str | None]

SPEAKERS = ("system", "user", "assistant")


@dataclasses.dataclass(frozen=True)
class Completion:
    """What came back for one call: the text, its tokens, and the answer read in it."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    answer: (
        str | None
    )  # what the call's reader found (boxed answer, last code block...), None when unreadable
    call: int  # index of the call in its episode

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Call:
    """One request to a role."""

    role: str
    messages: Sequence[Message]
    slot: int = 0  # which of several parallel calls of the role this is
    after: Completion | None = None  # go on in the history that ended there: `messages` are appended to it.
    # Usually the role's own history; another role's makes a conversation that both share.
    reads: Sequence[Completion] = ()  # whose outputs the prompt shows: the edges of the episode's graph
    keep: bool = False  # a later call will go on `after` this one: its cache is worth keeping
    read: Reader | None = None  # what `Completion.answer` is for this call; None: the task's own parser

    def __post_init__(self) -> None:
        if not _whole(self.slot) or self.slot < 0:
            raise ValueError(
                f"slot of a call to '{self.role}' is {self.slot!r}; it must be an integer from 0 on"
            )
        if not isinstance(self.messages, list | tuple) or not self.messages:
            raise ValueError(
                f"messages of a call to '{self.role}' must be a non-empty list of role/content mappings"
            )
        for message in self.messages:
            if not _is_message(message):
                raise ValueError(
                    f"a message to '{self.role}' needs 'role' and 'content' (text), got {message!r:.80}"
                )
            if message["role"] not in SPEAKERS:
                known = ", ".join(SPEAKERS)
                raise ValueError(
                    f"a message to '{self.role}' is of {message['role']!r:.80}; its role must be one of: {known}"
                )


@dataclasses.dataclass(frozen=True)
class Tool:
    """A Python function run off the hot path; the workflow receives its (JSON-like) result.

    If it raises, times out or returns something that JSON cannot hold, `ToolError` is raised at the `yield`.
    """

    fn: Callable[..., Any]
    args: Sequence[Any] = ()
    timeout_s: float = 30.0  # math.inf: as long as it takes

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ValueError(f"fn of a tool is {self.fn!r:.80}; it must be a function")
        if not isinstance(self.args, tuple | list):
            raise ValueError(f"args of tool '{self.name}' are {self.args!r:.80}; they must be a tuple")
        seconds = self.timeout_s
        if not isinstance(seconds, numbers.Real) or isinstance(seconds, bool) or not seconds > 0:
            raise ValueError(
                f"timeout_s of tool '{self.name}' is {seconds!r:.80}; it must be a number above 0"
            )

    @property
    def name(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)


class ToolError(RuntimeError):
    """A tool failed; the text says how ("timeout", or the exception's own)."""


class ToolTimeout(ToolError):
    """A tool had not ended within its `timeout_s`."""


Script = Generator[Any, Any, Any]


@dataclasses.dataclass(frozen=True)
class Workflow:
    """A generator function, the roles that talk in it, and its settings."""

    name: str
    roles: tuple[str, ...]
    fn: Callable[..., Script]
    settings: Mapping[str, Any]  # every keyword of `fn` but rng, with the value it will get
    families: tuple[str, ...] = ("math", "code")
    counts: tuple[str, ...] = ()  # settings that are whole numbers from 1 on

    def __call__(self, task: Any, prompts: Any, *, rng: Any = None, **settings: Any) -> Script:
        """Begin it on one task. Inside another workflow: `answer = yield from voting(task, prompts)`."""
        chosen = dict(self.bind(**settings).settings)
        if "rng" in inspect.signature(self.fn).parameters:
            chosen["rng"] = rng
        return self.fn(task, prompts, **chosen)

    def bind(self, **settings: Any) -> "Workflow":
        """The same workflow under other settings."""
        for name in settings:
            if name not in self.settings:
                known = ", ".join(self.settings) or "none"
                raise ValueError(f"workflow '{self.name}' has no setting '{name}'; it has: {known}")
        for name in (name for name in self.counts if name in settings):
            value = settings[name]
            left_open = value is None and self.settings[name] is None
            if not left_open and not (_whole(value) and value >= 1):
                raise ValueError(
                    f"setting '{name}' of workflow '{self.name}' is {value!r:.80}; it must be an integer from 1 on"
                )
        return dataclasses.replace(self, settings={**self.settings, **settings})


def workflow(
    roles: Sequence[str],
    families: Sequence[str] = ("math", "code"),
    name: str | None = None,
    counts: Sequence[str] = (),
) -> Callable[[Callable[..., Script]], Workflow]:
    """Declare a generator function to be a workflow of these roles; settings in `counts` must be 1 or more."""
    named = not isinstance(roles, str) and all(isinstance(role, str) and role for role in roles)
    if not named or not roles or len(set(roles)) != len(roles):
        raise ValueError(f"roles must be a non-empty sequence of distinct names, got {roles!r}")
    if slashed := [role for role in roles if "/" in role]:
        raise ValueError(
            f"role '{slashed[0]}' has a '/', which stands between a role and its slot: rename it"
        )

    def wrap(fn: Callable[..., Script]) -> Workflow:
        title = name or fn.__name__
        if not inspect.isgeneratorfunction(fn):
            raise ValueError(f"workflow '{title}' must be a generator function: yield its calls")
        parameters = list(inspect.signature(fn).parameters.values())[2:]
        missing = [p.name for p in parameters if p.default is p.empty and p.name != "rng"]
        if missing:
            raise ValueError(f"settings of workflow '{title}' need default values: {', '.join(missing)}")
        settings = {p.name: p.default for p in parameters if p.name != "rng"}
        made = Workflow(title, tuple(roles), fn, settings, tuple(families), tuple(counts))
        return made.bind(**{setting: settings.get(setting) for setting in counts})

    return wrap


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_message(value: Any) -> bool:
    fields = set(value) if isinstance(value, Mapping) else set()
    return fields == {"role", "content"} and isinstance(value["content"], str)
