"""The table of a step: one row per call, from the end of a rollout to the gradient and the report.

    identity  episode path task call role slot turn policy version  added by the rollout
    sampled   prompt tokens logprobs kept (ragged), temperature     the rollout
    read      text answer kind choice; grade outcome                the rollout; `rewards.grading`
    credit    components reward; group advantage penalty; trains    `rewards.credit`; `learning.estimators`; the run

Each later stage is a function that adds columns or reads them. Columns of numbers are numpy arrays, or JAX arrays under
`jit`; texts and records of episodes stay on the host. `Table.episodes()` shows the same rows episode by episode.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from marl_jax.episodes import CallRecord, Episode, ends_of, indices_on_path, path_of
from marl_jax.errors import RunError
from marl_jax.ragged import Ragged, concat, dense, floats, ints, kept_sets, padded, take, unpadded
from marl_jax.task import Task

KINDS = ("solver", "judge", "picker", "planner", "team")  # kinds of roles, see `workflows.Kind`
SOLVER, JUDGE, PICKER, PLANNER, TEAM = range(len(KINDS))
VERDICTS = {"Correct": 1, "Incorrect": 0}


class SharedId(RunError, ValueError):
    """Two problems have one id."""


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """Columns of N calls; but for `take`, the calls of an episode are adjacent and in order. NaN is a missing number.

    A call before a fork is one row, shared by all paths that continue from it; `paths` gives each path rows of its own.
    """

    # Identity
    episode: Any  # Int[N], its episode, an index into `bare_episodes`
    task: Any  # Int[N], a number of its task, equal for calls about the same task
    path: Any  # Int[N, D], the branch taken at each fork before it, padded with -1
    call: Any  # Int[N], its index on its path
    role: Any  # Int[N], index into `roles`
    slot: Any  # Int[N], which of the role's parallel calls
    turn: Any  # Int[N], number of calls of the same role and slot before it in the episode
    policy: Any  # Int[N], index into `policies`
    version: Any  # Int[N], update count of the policy
    reads: Any  # Int[N, R], indices on its path of the calls whose outputs its prompt shows, padded with -1
    after: Any  # Int[N], index on its path of the call whose history it continues; -1 for none
    # Sampled
    prompt: Any  # Ragged Int: the tokens of the prompt
    tokens: Any  # Ragged Int: the sampled tokens, including the stop token
    logprobs: Any  # Ragged Float: log-probs of `tokens` under the distribution sampled from
    kept: Any  # Ragged Int[T, K] like `tokens`: ids that top-k or top-p kept, padded with -1; None: all ids
    length: Any  # Int[N], number of sampled tokens
    temperature: Any  # Float[N], sampling temperature
    truncated: Any  # Bool[N], it reached max_new_tokens without a stop
    cut: Any  # Int[N], tokens removed from a prompt that was too long
    # Read
    kind: Any  # Int[N], kind of its role, index into KINDS
    readable: Any  # Bool[N], an answer could be read from the completion
    choice: Any  # Int[N]: a judge's verdict (1 Correct, 0 Incorrect), a picker's number from 1; else -1
    sound: Any  # Bool[N], its episode, or at least one path through the call, ended without an error
    grade: Any = None  # Float[N], grade of a solver's answer, 0 if unreadable; NaN for other kinds
    outcome: Any = None  # Float[N], grade of its episode's answer; the mean over the paths through the call
    # Credit
    components: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # {name: Float[N]}, of the reward
    reward: Any = None  # Float[N], the sum of its components
    penalty: Any = None  # Float[N], of `advantages.overlong`; groups compare reward + penalty; None: not set
    group: Any = None  # Int[N], the group whose rewards it is compared with; -1 for no group
    advantage: Any = None  # Float[N], how much better it did than its group
    weight: Any = None  # Float[N], a factor of its advantage in the loss; None: 1
    clip_low: Any = None  # Float[N], its ratio is clipped below 1 - this; None: that of the loss
    clip_high: Any = None  # Float[N], its ratio is clipped above 1 + this; None: that of the loss
    spoken: Any = None  # Ragged Bool like `tokens`: whether the token counts in the loss; None: all do
    trains: Any = None  # Bool[N], False: its policy does not learn from it
    # On the host
    roles: tuple[str, ...] = ()  # names that `role` indexes
    policies: tuple[str, ...] = ()  # names that `policy` indexes
    text: tuple[str, ...] = ()  # [N], the completion as text
    answer: tuple[str | None, ...] = ()  # [N], read from the text; None if unreadable
    # [N], the call's task where it differs from its episode's, else None; () if no call has such a task.
    about: tuple[Task | None, ...] = ()
    labels: tuple[Mapping[str, Any] | None, ...] = ()  # [N], the workflow's labels of each call
    bare_episodes: tuple[Episode, ...] = ()  # the episodes, without their calls

    def __len__(self) -> int:
        return len(self.role)

    def __repr__(self) -> str:
        return f"Table({len(self)} calls, {len(self.bare_episodes)} episodes, roles={self.roles})"

    @classmethod
    def of(cls, episodes: Sequence[Episode]) -> "Table":
        """The table of these episodes, with their grades if all are graded."""
        calls = [call for episode in episodes for call in episode.calls]
        owners = [episode for episode in episodes for _ in episode.calls]
        ends = [ends_of(episode, call) for episode, call in zip(owners, calls)]
        has_outcomes = all(episode.outcome is not None for episode in episodes)
        graded = has_outcomes and all(len(episode.answers) == len(episode.calls) for episode in episodes)
        table = cls.make(
            **{name: [getattr(call, name) for call in calls] for name in OF_RECORDS},
            prompt=[call.prompt_tokens for call in calls],
            task=[(call.about or episode.task).id for call, episode in zip(calls, owners)],
            truncated=[call.finish_reason == "length" for call in calls],
            readable=[call.answer is not None for call in calls],
        )
        return table.replace(
            episode=_owners([len(episode.calls) for episode in episodes]),
            path=padded([call.path for call in calls]),
            call=ints(index for episode in episodes for index in indices_on_path(episode)),
            reads=padded([call.reads for call in calls]),
            after=ints(-1 if call.after is None else call.after for call in calls),
            kind=ints(KINDS.index(call.kind) for call in calls),
            choice=ints(_choice(call.kind, call.answer) for call in calls),
            sound=np.array([any(end.error is None for end in call_ends) for call_ends in ends], bool),
            grade=floats(grade for episode in episodes for grade in episode.answers) if graded else None,
            outcome=floats(sum(end.outcome for end in e) / len(e) for e in ends) if has_outcomes else None,
            text=tuple(call.text for call in calls),
            answer=tuple(call.answer for call in calls),
            about=_about_column(call.about for call in calls),
            labels=tuple(call.labels for call in calls),
            bare_episodes=tuple(dataclasses.replace(episode, calls=(), answers=()) for episode in episodes),
            reward=None,
            advantage=None,
        )

    @classmethod
    def make(
        cls,
        *,
        role: Sequence[str],
        policy: Sequence[str],
        prompt: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]],
        kept: Sequence[Any] | None = None,
        **columns: Any,
    ) -> "Table":
        """A table with the columns that a learner reads, from lists of N; `columns` sets further columns by name."""
        count = len(role)
        lengths = ints(len(row) for row in tokens)
        columns = {name: values for name, values in columns.items() if values is not None}
        lists = {"policy": policy, "prompt": prompt, "tokens": tokens, "logprobs": logprobs, **columns}
        for name, values in ({**lists, "kept": kept} if kept else lists).items():
            if len(values) != count:
                raise ValueError(f"{name} has {len(values)} rows, and there are {count} roles")
        if len(short := np.flatnonzero(lengths != ints(map(len, logprobs)))):
            row = short[0]
            raise ValueError(f"row {row} has {lengths[row]} tokens and {len(logprobs[row])} log-probs")
        zeros = np.zeros(count, np.int32)
        if "task" in columns:
            columns["task"] = dense(columns["task"])
        if "spoken" in columns:
            columns["spoken"] = Ragged.of(columns["spoken"], bool)
        texts = {name: tuple(columns.pop(name)) for name in TEXTS if name in columns}
        arrays = {
            name: values if isinstance(values, Ragged) else np.asarray(values, DTYPES.get(name, np.int32))
            for name, values in columns.items()
        }
        roles, policies = tuple(dict.fromkeys(role)), tuple(dict.fromkeys(policy))
        table = cls(
            episode=zeros, task=zeros, call=zeros, slot=zeros, turn=zeros, version=zeros, cut=zeros,
            role=ints(map(roles.index, role)),
            policy=ints(map(policies.index, policy)),
            path=np.full((count, 1), -1, np.int32),
            reads=np.full((count, 1), -1, np.int32),
            after=zeros - 1,
            prompt=Ragged.of(prompt, np.int32),
            tokens=Ragged.of(tokens, np.int32),
            logprobs=Ragged.of(logprobs, np.float32),
            kept=kept_sets(kept or ()),
            length=lengths,
            temperature=np.ones(count),
            truncated=np.zeros(count, bool),
            kind=zeros + TEAM,
            readable=np.ones(count, bool),
            choice=zeros - 1,
            sound=np.ones(count, bool),
            reward=np.zeros(count),
            advantage=np.zeros(count),
            trains=np.ones(count, bool),
            roles=roles,
            policies=policies,
        )  # fmt: skip
        return table.replace(**arrays, **texts)

    def replace(self, **columns: Any) -> "Table":
        """The same table with these columns; lists in columns of `DTYPES` become arrays."""
        arrays = {n: np.asarray(columns[n], DTYPES[n]) for n in DTYPES if isinstance(columns.get(n), list)}
        return dataclasses.replace(self, **columns | arrays)

    def take(self, rows: Any) -> "Table":
        """These rows (indices, or a mask), in this order; `call`, `reads` and `after` still count in complete episodes.

        This is for the learner; credit and views need complete episodes, see `of_episodes`.
        """
        rows = np.asarray(rows)
        rows = np.arange(len(self))[rows] if rows.dtype == bool else rows.astype(np.int64)
        columns = {name: take(getattr(self, name), rows) for name in COLUMNS}
        components = {name: values[rows] for name, values in self.components.items()}
        texts = {
            name: tuple(map(getattr(self, name).__getitem__, rows)) for name in TEXTS if getattr(self, name)
        }
        return self.replace(**columns, **texts, components=components)

    def of_episodes(self, numbers: Sequence[int]) -> "Table":
        """All rows of these episodes, in this order."""
        self.need_episodes()
        rows_of = self._rows_by_episode()
        rows = [rows_of[number] for number in numbers]
        bare_episodes = tuple(self.bare_episodes[number] for number in numbers)
        table = self.take(np.concatenate([*rows, np.zeros(0, np.int64)]))
        return table.replace(episode=_owners(map(len, rows)), bare_episodes=bare_episodes)

    def _rows_by_episode(self) -> list[np.ndarray]:
        """The indices of the rows of each episode."""
        first = np.searchsorted(self.episode, np.arange(len(self.bare_episodes) + 1))
        return [np.arange(*ends) for ends in itertools.pairwise(first)]

    @staticmethod
    def concat(tables: Sequence["Table"]) -> "Table":
        """The tables one below the other; roles, policies and tasks are matched by name, episodes and groups not."""
        first = tables[0]
        if len(tables) == 1:
            return first
        if not all(len(table.bare_episodes) or not len(table) for table in tables):
            raise ValueError("a table without episodes cannot be joined to another: its tasks have no names")
        tables = _with_equal_columns(tables)
        joined = {name: concat([getattr(table, name) for table in tables]) for name in COLUMNS}
        for name, names in (("role", "roles"), ("policy", "policies")):
            known = tuple(dict.fromkeys(n for table in tables for n in getattr(table, names)))
            codes = [ints(map(known.index, getattr(table, names)))[getattr(table, name)] for table in tables]
            joined |= {name: np.concatenate(codes), names: known}
        offsets = np.cumsum([0, *(len(table.bare_episodes) for table in tables)])
        joined["episode"] = np.concatenate([t.episode + k for t, k in zip(tables, offsets)]).astype(np.int32)
        if all(table.group is not None for table in tables):
            groups_before = np.cumsum([0, *(table.group.max(initial=-1) + 1 for table in tables)])
            groups = [np.where(t.group < 0, t.group, t.group + k) for t, k in zip(tables, groups_before)]
            joined["group"] = np.concatenate(groups).astype(first.group.dtype)
        bare_episodes = tuple(bare for table in tables for bare in table.bare_episodes)
        if bare_episodes:
            tasks = (table.task_of(row) for table in tables for row in range(len(table)))
            joined["task"] = dense([task.id for task in tasks])
        components = {}
        for name in dict.fromkeys(name for table in tables for name in table.components):
            parts = [table.components.get(name, np.full(len(table), np.nan)) for table in tables]
            components[name] = np.concatenate(parts)
        texts = {name: tuple(entry for table in tables for entry in getattr(table, name)) for name in TEXTS}
        texts["about"] = _about_column(texts["about"])
        result = first.replace(**joined, **texts, components=components, bare_episodes=bare_episodes)
        result.need_own_ids()
        return result

    def numbers(self) -> "Table":
        """The columns that may enter `jit`; `rewards.credit` registers tables as pytrees."""
        if self.forked:
            raise ValueError("this table has episodes that fork: call paths().numbers()")
        no_ragged = dict.fromkeys(("prompt", "tokens", "logprobs", "kept", "spoken"))
        return self.replace(**dict.fromkeys(TEXTS, ()), bare_episodes=(), **no_ragged)

    def need(self, **columns: str) -> None:
        """Raise if the table lacks one of these columns, {column: the function that adds it}."""
        for column, adder in columns.items():
            if getattr(self, column) is None:
                raise ValueError(f"the table has no column {column!r}: {adder}() adds it")

    def need_episodes(self) -> None:
        """Raise if the table was built by `make`, so that its calls belong to no episodes."""
        if len(self) and not self.bare_episodes:
            raise ValueError(
                "this table has calls without episodes: it can be learned from, not graded, stored or shown"
            )

    def need_own_ids(self, others: Iterable[Task] = ()) -> None:
        """Raise if two different problems, here or among `others`, have one id: groups and files would mix them up."""
        known = {task.id: task for task in others}
        for task in (*(bare.task for bare in self.bare_episodes), *filter(None, self.about)):
            first = known.setdefault(task.id, task)
            if first != task and _problem(first) != _problem(task):
                raise SharedId(
                    f"two tasks have the id {task.id!r:.80}, with the questions {first.question!r:.60} and "
                    f"{task.question!r:.60}: give each an id of its own, made from its content"
                )

    @property
    def forked(self) -> bool:
        """Whether some episode forks."""
        return any(bare.leaves for bare in self.bare_episodes)

    @property
    def parent(self) -> np.ndarray:
        """Int[N]: a number of the last fork before the call, equal in all its branches; -1 without a fork."""
        owners = zip(self.episode.tolist(), unpadded(self.path))
        return dense([None, *((number, path[:-1]) if path else None for number, path in owners)])[1:] - 1

    @property
    def branch(self) -> np.ndarray:
        """Int[N]: the branch that the call is in at its `parent` fork; -1 without a fork."""
        return ints(path[-1] if path else -1 for path in unpadded(self.path))

    def paths(self) -> tuple["Table", np.ndarray]:
        """(a table in which each path is an episode of its own, for each of its rows the row in self)."""
        return self._paths if self.forked else (self, np.arange(len(self)))

    @functools.cached_property
    def _paths(self) -> tuple["Table", np.ndarray]:
        """Cached, since a step needs them for credit, signs and metrics."""
        flat_episodes: list[Episode] = []
        rows: list[np.ndarray] = []
        for bare, indices in zip(self.bare_episodes, self._rows_by_episode()):
            for leaf in bare.leaves or (bare,):
                flat_episodes.append(path_of(bare, leaf))
                rows.append(indices[_on_path(self.path[indices], leaf.path)])
        row_in_self = np.concatenate([*rows, np.zeros(0, np.int64)])
        owners = _owners(map(len, rows))
        ends = [flat_episodes[owner] for owner in owners.tolist()]
        flat = self.take(row_in_self).replace(
            episode=owners,
            bare_episodes=tuple(flat_episodes),
            sound=np.array([end.error is None for end in ends], bool),
            outcome=None if self.outcome is None else floats(end.outcome for end in ends),
        )
        return flat, row_in_self

    def role_of(self, row: int) -> str:
        """Name of a row's role."""
        return self.roles[self.role[row]]

    @property
    def callers(self) -> list[tuple[str, int, str]]:
        """[N] (role, slot, policy) of each call."""
        codes = zip(self.role.tolist(), self.slot.tolist(), self.policy.tolist())
        return [(self.roles[role], slot, self.policies[policy]) for role, slot, policy in codes]

    def counted(self, row: int) -> np.ndarray:
        """Bool[T]: the tokens of a row that count in the loss."""
        return np.ones(self.length[row], bool) if self.spoken is None else self.spoken[row]

    def task_of(self, row: int) -> Task:
        """The task of the call: its `Call.about` if it has one, else its episode's task."""
        about = self.about[row] if self.about else None
        return about or self.bare_episodes[self.episode[row]].task

    def present(self, column: Literal["role", "policy"] = "role") -> list[str]:
        """The names of the roles, or policies, that have rows, in order of appearance."""
        names = self.roles if column == "role" else self.policies
        return [names[code] for code in dict.fromkeys(getattr(self, column).tolist())]

    def having(self, *, role: str | None = None, policy: str | None = None) -> np.ndarray:
        """Bool[N]: the rows of this role, or of this policy."""
        chosen = np.ones(len(self), bool)
        for codes, names, name in ((self.role, self.roles, role), (self.policy, self.policies, policy)):
            if name is not None:
                chosen &= codes == (names.index(name) if name in names else -1)
        return chosen

    def episodes(self) -> list[Episode]:
        """Views by episode, one per path: calls in order, texts, which call read which, and grades if present."""
        self.need_episodes()
        if self.forked:
            return self.paths()[0].episodes()
        calls: list[list[CallRecord]] = [[] for _ in self.bare_episodes]
        for row, number in enumerate(self.episode.tolist()):
            calls[number].append(self._record(row))
        grades: list[list[float | None]] = [[] for _ in self.bare_episodes]
        if self.grade is not None:
            for number, grade in zip(self.episode.tolist(), self.grade.tolist()):
                grades[number].append(None if grade != grade else grade)
        return [
            dataclasses.replace(bare, calls=tuple(episode_calls), answers=tuple(episode_grades))
            for bare, episode_calls, episode_grades in zip(self.bare_episodes, calls, grades)
        ]

    def _record(self, row: int) -> CallRecord:
        kept = self.kept is not None and self.kept.lengths[row] > 0
        after = int(self.after[row])
        return CallRecord(
            role=self.role_of(row),
            policy=self.policies[self.policy[row]],
            prompt_tokens=tuple(self.prompt[row].tolist()),
            tokens=tuple(self.tokens[row].tolist()),
            logprobs=tuple(self.logprobs[row].tolist()),
            text=self.text[row],
            finish_reason="length" if self.truncated[row] else "stop",
            answer=self.answer[row],
            reads=unpadded(self.reads[[row]])[0],
            after=None if after < 0 else after,
            temperature=float(self.temperature[row]),
            kept=tuple(unpadded(self.kept[row])) if kept else None,
            kind=KINDS[self.kind[row]],
            about=self.about[row] if self.about else None,
            path=unpadded(self.path[[row]])[0],
            labels=self.labels[row] if self.labels else None,
            **{name: int(getattr(self, name)[row]) for name in ("slot", "turn", "version", "cut")},
        )


TEXTS = ("text", "answer", "about", "labels")
# Columns whose values a `CallRecord` has under the same name.
OF_RECORDS = ("role", "policy", "tokens", "logprobs", "kept", "slot", "turn", "version", "cut", "temperature")
META = ("roles", "policies", *TEXTS, "bare_episodes")
COLUMNS = tuple(f.name for f in dataclasses.fields(Table) if f.name not in (*META, "components"))
DTYPES = {
    **dict.fromkeys(("temperature", "grade", "outcome", "reward", "penalty", "advantage"), np.float64),
    **dict.fromkeys(("weight", "clip_low", "clip_high"), np.float64),
    **dict.fromkeys(("truncated", "readable", "sound", "trains"), bool),
}


def _about_column(tasks: Iterable[Task | None]) -> tuple[Task | None, ...]:
    """The column `about`; () if every call is about its episode's task."""
    column = tuple(tasks)
    return column if any(column) else ()


def _problem(task: Task) -> tuple[str, ...]:
    """The fields by which a task is shown and graded, as a key. Lists and tuples in tests are equal, as in a file."""
    tests = json.dumps([task.tests, task.public_tests], sort_keys=True, default=repr)
    return task.family, task.question, task.gold, tests


def _owners(sizes: Iterable[int]) -> np.ndarray:
    """Int[N]: the index of each row's owner, from the number of rows of each owner: [2, 3] -> 0 0 1 1 1."""
    counts = ints(sizes)
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)


def _on_path(paths: np.ndarray, leaf: tuple[int, ...]) -> np.ndarray:
    """Bool[n]: whether the calls with these paths [n, D] are on the path to this leaf."""
    branches = np.full(max(paths.shape[1], len(leaf)), -1)
    branches[: len(leaf)] = leaf
    return ((paths == branches[: paths.shape[1]]) | (paths < 0)).all(axis=1)


def _choice(kind: str, answer: str | None) -> int:
    if kind == "judge":
        return VERDICTS.get(answer or "", -1)
    readable = kind == "picker" and answer is not None and answer.isdecimal()
    return min(int((answer or "0")[:10]), 1 << 30) if readable else -1


def _with_equal_columns(tables: Sequence[Table]) -> list[Table]:
    """The tables with the columns that some of them have; a missing column becomes the value that it stands for."""
    if len({(table.clip_low is None, table.clip_high is None) for table in tables}) > 1:
        raise ValueError(
            "some tables have clip ranges of their own and some do not: set them in all, or in none"
        )
    stands_for: dict[str, Callable[[Table], Any]] = {
        "weight": lambda table: np.ones(len(table)),
        "penalty": lambda table: np.zeros(len(table)),
        "spoken": lambda table: Ragged.of([*map(table.counted, range(len(table)))], bool),
        "kept": lambda table: Ragged(np.zeros((0, 1), np.int32), *np.zeros((2, len(table)), np.int64)),
        "about": lambda table: (None,) * len(table),
        "labels": lambda table: (None,) * len(table),
    }
    missing = lambda column: column is None or (isinstance(column, tuple) and not column)
    lacking = {name: [missing(getattr(table, name)) for table in tables] for name in stands_for}
    partial = [name for name, lacks in lacking.items() if any(lacks) and not all(lacks)]
    return [
        table.replace(**{name: stands_for[name](table) for name in partial if lacking[name][k]})
        for k, table in enumerate(tables)
    ]
