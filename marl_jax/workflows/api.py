"""The parts of a workflow: Call, Tool, Fork, Completion, the kinds of roles, and the `@workflow` decorator.

A workflow is a generator function `(task, prompts, *, rng, **settings)`; `rng` is optional. It yields one
`Call` or `Tool`, or a list of parallel ones, and receives the results in the same shape; it returns
the final answer. A `Fork` plays the rest of the workflow several times.

`workflows/voting.py` is a short, complete example.
"""

import dataclasses
import dis
import inspect
import itertools
import numbers
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Literal

from marl_jax.fields import is_whole
from marl_jax.own import without_partial
from marl_jax.table import KINDS
from marl_jax.task import Task

Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant", "content": text}
Reader = Callable[[str], str | None]

SPEAKERS = ("system", "user", "assistant")


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a role does, for its credit; `solver(slots="votes")` names the setting that counts its parallel calls."""

    name: Literal["solver", "judge", "picker", "planner", "team"]  # only calls of a solver have a grade
    # Name of the setting that counts the role's parallel calls; None: it makes one at a time.
    slots: str | None = None

    def __call__(self, *, slots: str) -> "Kind":
        return dataclasses.replace(self, slots=slots)


solver = Kind("solver")  # an answer to the task
judge = Kind("judge")  # a verdict on the last answer it read
picker = Kind("picker")  # a choice among the answers it read
planner = Kind("planner")  # guidance for the calls that read it
team = Kind("team")  # graded by the outcome of the episode


@dataclasses.dataclass(frozen=True)
class Completion:
    """The completion of one call: the text, its tokens, and the answer read from it."""

    text: str  # without special tokens; stop strings and ordinary stop tokens are part of it
    tokens: tuple[int, ...]  # the sampled tokens, including the stop token
    logprobs: tuple[float, ...]  # log-probs of `tokens` under the distribution sampled from
    finish_reason: Literal["stop", "length"]  # length: cut at max_new_tokens
    # Read from the text by the call's reader (boxed answer, last code block, ...); None when unreadable.
    answer: str | None
    call: int  # index of the call in its episode

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Call:
    """One request to a role."""

    role: str  # one of the declared roles
    messages: Sequence[Message]  # the new messages; `prompts.ROLE(...)` makes them
    slot: int = 0  # which of several parallel calls of the role this is
    # Continue the history that ends with this completion: `messages` are appended to it. Usually it is the role's
    # own history; with another role's, both share one conversation.
    after: Completion | None = None
    reads: Sequence[Completion] = ()  # completions that the prompt shows: the edges of the episode's graph
    keep: bool = False  # a later call will continue `after` this one, so its cache should be kept
    read: Reader | None = None  # reads `Completion.answer` from the text; None: the task's parser
    about: Task | None = None  # the task that it answers, for its grade and group; None: the episode's
    labels: Mapping[str, Any] | None = None  # labels for the keys of groups: "call.type" is labels["type"]

    def __post_init__(self) -> None:
        if not is_whole(self.slot) or not 0 <= self.slot < 2**31:
            raise ValueError(
                f"slot of a call to '{self.role}' is {self.slot!r}; it must be an integer from 0 on, below 2**31"
            )
        object.__setattr__(self, "slot", int(self.slot))
        if not isinstance(self.after, Completion | None):
            raise ValueError(
                f"after of a call to '{self.role}' is {self.after!r:.80}; it must be a completion, or None"
            )
        if not isinstance(self.messages, list | tuple) or not self.messages:
            raise ValueError(
                f"messages of a call to '{self.role}' must be a non-empty list of role/content mappings"
            )
        if isinstance(self.reads, str) or not isinstance(self.reads, Iterable):
            raise ValueError(
                f"reads of a call to '{self.role}' are {self.reads!r:.80}; they must be a list of completions"
            )
        object.__setattr__(self, "reads", tuple(self.reads))  # an iterator could be read only once
        if self.read is not None and not callable(self.read):
            raise ValueError(
                f"read of a call to '{self.role}' is {self.read!r:.80}; it must be a function of the text"
            )
        if not isinstance(self.about, Task | None):
            raise ValueError(
                f"about of a call to '{self.role}' is {self.about!r:.80}; it must be a Task with an id, a family, a "
                "question, and gold or tests to grade answers by"
            )
        if self.about is not None and (wrong := self.about.fault):
            raise ValueError(f"about of a call to '{self.role}' cannot be used: {wrong}")
        for message in self.messages:
            if not _is_message(message):
                raise ValueError(
                    f"a message to '{self.role}' needs 'role' and 'content' (text), got {message!r:.80}"
                )
            if message["role"] not in SPEAKERS:
                known = ", ".join(SPEAKERS)
                raise ValueError(
                    f"a message to '{self.role}' has the role {message['role']!r:.80}; it must be one of: {known}"
                )
        if self.labels is not None:
            if not _are_labels(self.labels):
                raise ValueError(
                    f"labels of a call to '{self.role}' are {self.labels!r:.80}; they must map names to texts or "
                    "numbers"
                )
            object.__setattr__(self, "labels", {name: _plain(label) for name, label in self.labels.items()})


@dataclasses.dataclass(frozen=True)
class Tool:
    """A Python function run off the hot path; the workflow receives its (JSON-like) result.

    If it raises, times out or returns something that JSON cannot hold, `ToolError` is raised at the `yield`.
    """

    fn: Callable[..., Any]  # called on a thread
    args: Sequence[Any] = ()  # its positional arguments
    timeout_s: float = 30.0  # limit in seconds; math.inf: none

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ValueError(f"fn of a tool is {self.fn!r:.80}; it must be a function")
        if inspect.iscoroutinefunction(self.fn):
            raise ValueError(
                f"fn of tool '{self.name}' is async: give a function that runs it with asyncio.run"
            )
        if not isinstance(self.args, tuple | list):
            raise ValueError(f"args of tool '{self.name}' are {self.args!r:.80}; they must be a tuple")
        seconds = self.timeout_s
        if not isinstance(seconds, numbers.Real) or isinstance(seconds, bool) or not seconds > 0:
            raise ValueError(
                f"timeout_s of tool '{self.name}' is {seconds!r:.80}; it must be a number above 0"
            )

    @property
    def name(self) -> str:
        """Name of the function."""
        return getattr(self.fn, "__name__", type(self.fn).__name__)


@dataclasses.dataclass(frozen=True)
class Fork:
    """The rest of the workflow is played `ways` times, each time after the same calls and results.

    `branch = yield Fork(4)` is 0, 1, 2 and 3. To bring each branch to the fork, the workflow is started again and
    receives the same results; so what it yields must depend only on its task, its results and `rng`.
    """

    ways: int  # number of branches

    def __post_init__(self) -> None:
        if not is_whole(self.ways) or self.ways < 1:
            raise ValueError(f"ways of a fork are {self.ways!r:.80}; they must be an integer from 1 on")
        object.__setattr__(self, "ways", int(self.ways))


class ToolError(RuntimeError):
    """A tool failed; the text says how ("timeout", or the text of an exception)."""

    results: Sequence[Any] = ()  # all results of the `yield`, in order; for a failed tool, its error


class ToolTimeout(ToolError):
    """A tool did not end within its `timeout_s`."""


Script = Generator[Any, Any, Any]


@dataclasses.dataclass(frozen=True)
class Workflow:
    """A generator function, the roles that it calls, and its settings."""

    name: str  # its name in configurations and records
    roles: tuple[str, ...]  # in the order of their declaration
    fn: Callable[..., Script]  # the generator function
    settings: Mapping[str, Any]  # every keyword argument of `fn` but rng, with its value
    families: tuple[str, ...] = ("math", "code")  # families of tasks that it can play
    counts: tuple[str, ...] = ()  # settings that must be integers from 1 on
    # {role: its kind}; empty if roles were declared by their names alone.
    kinds: Mapping[str, Kind] = dataclasses.field(default_factory=dict)
    # {preset of `advantages.group`: fields that calls of one group have in common}.
    groups: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    in_arrays: Callable[..., Any] | None = None  # the workflow in arrays, for the compiled road, see `arrays`

    def arrays(self, form: Callable[..., Any]) -> Callable[..., Any]:
        """A decorator for the workflow in arrays: `form(stage, **settings)` issues its calls, see `compiled.stage`."""
        object.__setattr__(self, "in_arrays", form)
        return form

    def __call__(self, task: Any, prompts: Any, *, rng: Any = None, **settings: Any) -> Script:
        """Start it on one task. Inside another workflow: `answer = yield from voting(task, prompts)`."""
        chosen = dict(self.bind(**settings).settings)
        if "rng" in inspect.signature(self.fn).parameters:
            chosen["rng"] = rng
        return self.fn(task, prompts, **chosen)

    def kind_of(self, role: str) -> str:
        """The name of a role's kind; "team" if none is declared."""
        return self.kinds.get(role, team).name

    @property
    def may_fork(self) -> bool:
        """Whether its module, or that of a generator that it uses, has `Fork`; even so it may never yield one."""
        return _may_fork(without_partial(self.fn), set())

    @property
    def answers(self) -> bool:
        """Whether its code has a `return` of anything but a plain None; the value is only known when it is played."""

        def returns(before: dis.Instruction, now: dis.Instruction) -> bool:
            if now.opname == "RETURN_CONST":  # some versions of Python have it instead of the two below
                return now.argval is not None
            none = before.opname in ("LOAD_CONST", "LOAD_COMMON_CONSTANT") and before.argrepr == "None"
            return now.opname == "RETURN_VALUE" and (not none or now.is_jump_target)

        return any(
            itertools.starmap(returns, itertools.pairwise(dis.get_instructions(without_partial(self.fn))))
        )

    def slots_of(self, role: str, settings: Mapping[str, Any] | None = None) -> Any:
        """How many parallel calls a role makes under these settings, by its declaration."""
        setting = self.kinds.get(role, team).slots
        return 1 if setting is None else {**self.settings, **(settings or {})}[setting]

    def bind(self, **settings: Any) -> "Workflow":
        """The same workflow with these settings changed."""
        for name, value in settings.items():
            if name not in self.settings:
                known = ", ".join(self.settings) or "none"
                raise ValueError(f"workflow '{self.name}' has no setting '{name}'; it has: {known}")
            left_open = value is None and self.settings[name] is None
            if name not in self.counts or left_open:
                continue
            if not (is_whole(value) and value >= 1):
                raise ValueError(
                    f"setting '{name}' of workflow '{self.name}' is {value!r:.80}; it must be an integer from 1 on"
                )
            settings[name] = int(value)
        return dataclasses.replace(self, settings={**self.settings, **settings})


def workflow(
    roles: Mapping[str, Kind] | Sequence[str],
    families: Sequence[str] = ("math", "code"),
    name: str | None = None,
    counts: Sequence[str] = (),
    groups: Mapping[str, Sequence[str]] | None = None,
) -> Callable[[Callable[..., Script]], Workflow]:
    """Declare a generator function to be a workflow with these roles.

    Args:
      roles: {role: its kind}. Names alone suffice if calls are rewarded by the outcome of their episode.
      families: families of tasks that it can play.
      name: name of the workflow; by default that of the function.
      counts: settings that must be integers from 1 on.
      groups: {preset: fields, such as ("task", "role")}: which calls a preset of `advantages.group` compares.
    """
    if inspect.isfunction(roles):
        raise ValueError(f"@workflow above '{roles.__name__}' has no roles: write @workflow(roles=...)")
    if not isinstance(groups, Mapping | None):
        raise ValueError(
            f"groups is {groups!r:.80}; it must be a dictionary, such as {{'wide': ('task', 'role')}}"
        )
    # Policies are numbered by the order of their roles, which a set does not keep.
    named = isinstance(roles, Iterable) and not isinstance(roles, str | set | frozenset)
    roles = roles if isinstance(roles, Mapping) or not named else tuple(roles)
    named = named and all(isinstance(role, str) and role for role in roles)
    if not named or not roles or len(set(roles)) != len(roles):
        raise ValueError(f"roles must be a non-empty sequence of distinct names, got {roles!r}")
    presets = {f"group '{preset}'": fields for preset, fields in (groups or {}).items()}
    for argument, names in {"families": families, "counts": counts, **presets}.items():
        if isinstance(names, str):
            raise ValueError(
                f"{argument} is the text {names!r}; give a sequence of names, such as ({names!r},)"
            )
    if slashed := [role for role in roles if "/" in role]:
        raise ValueError(f"role '{slashed[0]}' has a '/', which separates a role from its slot: rename it")
    kinds = dict(roles) if isinstance(roles, Mapping) else {}
    for role, kind in kinds.items():
        if not isinstance(kind, Kind):
            raise ValueError(
                f"the kind of role '{role}' is {kind!r:.80}; it must be one of: {', '.join(KINDS)}, as imported from "
                "marl_jax.workflows"
            )

    def wrap(fn: Callable[..., Script]) -> Workflow:
        title = str(name or getattr(without_partial(fn), "__name__", type(fn).__name__))
        if not inspect.isgeneratorfunction(fn):
            is_async = inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn)
            how = "write def, not async def, and yield its calls" if is_async else "yield its calls"
            raise ValueError(f"workflow '{title}' must be a generator function: {how}")
        signature = inspect.signature(fn)
        try:
            signature.bind_partial(None, None)
        except TypeError:
            raise ValueError(
                f"workflow '{title}' takes {signature}; it must take (task, prompts, ...)"
            ) from None
        parameters = list(signature.parameters.values())[2:]
        missing = [p.name for p in parameters if p.default is p.empty and p.name != "rng"]
        if missing:
            raise ValueError(f"settings of workflow '{title}' need default values: {', '.join(missing)}")
        settings = {p.name: p.default for p in parameters if p.name != "rng"}
        for role, kind in kinds.items():
            if kind.slots is not None and kind.slots not in settings:
                known = ", ".join(settings) or "none"
                raise ValueError(
                    f"slots of role '{role}' name '{kind.slots}', which is no setting; there is: {known}"
                )
        fields_of = {preset: tuple(fields) for preset, fields in (groups or {}).items()}
        flow = Workflow(title, tuple(roles), fn, settings, tuple(families), tuple(counts), kinds, fields_of)
        return flow.bind(**{setting: settings.get(setting) for setting in counts})

    return wrap


def _may_fork(function: Callable[..., Any], seen: set[Any]) -> bool:
    used = inspect.getclosurevars(function)
    values = [*used.globals.values(), *used.nonlocals.values()]
    modules = [value for value in values if inspect.ismodule(value)]
    values += [getattr(module, name, None) for module in modules for name in used.unbound]
    if any(value is Fork for value in (*values, *function.__globals__.values())):  # type: ignore[attr-defined]
        return True
    seen.add(function)
    inner = [without_partial(value.fn if isinstance(value, Workflow) else value) for value in values]
    return any(_may_fork(f, seen) for f in inner if inspect.isgeneratorfunction(f) and f not in seen)


def _are_labels(value: Any) -> bool:
    named = isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    labels = map(_plain, value.values()) if named else ()
    # NaN is not equal to itself, so it would make each call a group of its own.
    return named and all(isinstance(label, str | int | float) and label == label for label in labels)


def _plain(label: Any) -> Any:
    """A numpy scalar, such as `rng` draws, as a Python number."""
    return label.item() if getattr(label, "ndim", None) == 0 else label


def _is_message(value: Any) -> bool:
    fields = set(value) if isinstance(value, Mapping) else set()
    return fields == {"role", "content"} and isinstance(value["content"], str)
