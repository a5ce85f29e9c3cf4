"""A buffer of tasks that a run makes while it trains: bounded, sampled by learnability, and part of the run's state.

    (entries, step) ──problems_of_step──► the tasks of a step      (entries, the step's table) ──updated──► entries

A task enters when a call was about it (`Call(..., about=task)`), that is, when the workflow accepted it as valid. While
it is in the buffer, grades of solvers' answers to it are summed. Every draw is a pure function of the entries, the seed
and the step, and the entries are saved in the checkpoint.
"""

import collections
import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Le

from marl_jax import fields
from marl_jax.fields import Whole
from marl_jax.table import Table
from marl_jax.task import Task

UNTRIED = 0.25  # learnability of a task that no solver has tried: that of one solved half the time


@dataclasses.dataclass(frozen=True)
class BufferConfig:
    """How tasks that calls were about come back as problems of later steps."""

    capacity: Whole = 0  # number of newest tasks that the buffer keeps; 0: no buffer
    share: Annotated[float, Ge(0), Le(1)] = 0.5  # share of problems from the buffer, if it has enough
    draw: Literal["uniform", "newest", "learnability"] = "uniform"  # how they are chosen
    # A key of the tasks' meta, such as "type": each of its values is a stream, and gets an equal part of the draw.
    streams: str = ""
    examples: Whole = 0  # buffer tasks that each problem of the data set gets as `task.meta["examples"]`

    def __post_init__(self) -> None:
        fields.check(self)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A task and how often it was solved."""

    task: Task
    step: int  # the step at which it entered
    tries: int = 0  # graded answers of solvers
    right: float = 0.0  # the sum of their grades

    @property
    def learnability(self) -> float:
        """a (1 - a) for the mean grade a: 0 if every solver is right, or none is."""
        mean = self.right / self.tries if self.tries else 0.0
        return mean * (1 - mean) if self.tries else UNTRIED

    def to_json(self) -> dict[str, Any]:
        """The entry as JSON, for a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Entry":
        """The inverse of `to_json`."""
        return cls(**{**value, "task": Task.from_json(value["task"])})


Entries = tuple[Entry, ...]  # the oldest first


def problems_of_step(
    tasks: Sequence[Task], entries: Entries, config: BufferConfig, seed: int, step: int
) -> list[Task]:
    """The problems of a step: `tasks`, the last of which are replaced by tasks drawn from the buffer.

    The others get examples from the buffer, if `config.examples` asks for some.
    """
    if not config.capacity:
        return list(tasks)
    rng = np.random.default_rng([seed, step])
    present = {task.id for task in tasks}
    free = tuple(entry for entry in entries if entry.task.id not in present)
    drawn = _of_streams(free, math.floor(config.share * len(tasks) + 1e-9), config, rng)
    kept = list(tasks[: len(tasks) - len(drawn)])
    if config.examples:
        # Without itself, if a call was about a problem of the data set: it would show its own answer.
        others = lambda task: tuple(entry for entry in entries if entry.task.id != task.id)
        kept = [_with_examples(task, draw(others(task), config.examples, "uniform", rng)) for task in kept]
    return [*kept, *drawn]


def draw(entries: Entries, count: int, how: str, rng: np.random.Generator) -> list[Task]:
    """`count` different tasks, or all if there are fewer; by learnability, tasks of learnability 0 come last."""
    count = min(count, len(entries))
    if how == "newest":
        chosen = range(len(entries) - 1, len(entries) - 1 - count, -1)
        return [entries[i].task for i in chosen]
    weight = np.array([entry.learnability if how == "learnability" else 1.0 for entry in entries])
    # The largest values of log w + Gumbel noise are a draw without replacement in proportion to w.
    noise = rng.gumbel(size=len(entries))
    with np.errstate(divide="ignore"):
        keys = np.log(weight) + noise
    order = sorted(range(len(entries)), key=lambda i: (-keys[i], -noise[i]))
    return [entries[i].task for i in order[:count]]


def updated(
    entries: Entries, table: Table, config: BufferConfig, step: int, family: str
) -> tuple[Entries, dict[str, float]]:
    """The entries after a step, and their metrics; only tasks of the run's family can be its problems."""
    if not config.capacity:
        return entries, {}
    table.need_own_ids(entry.task for entry in entries)
    known = {entry.task.id: entry for entry in entries}
    added = 0
    for row in np.flatnonzero(table.sound).tolist():  # in other episodes even right answers have grade 0
        task = table.task_of(row)
        about = table.about and table.about[row] is not None
        if task.id not in known and about and task.family == family:
            # As read back from a checkpoint, with lists for tuples, so that a resumed run shows the same task.
            known[task.id] = Entry.from_json(json.loads(json.dumps(Entry(task, step).to_json())))
            added += 1
        if task.id in known and table.grade is not None and not np.isnan(table.grade[row]):
            entry = known[task.id]
            grades = entry.right + float(table.grade[row])
            known[task.id] = dataclasses.replace(entry, tries=entry.tries + 1, right=grades)
    kept = tuple(known.values())[-config.capacity :]
    metrics = {"size": float(len(kept)), "added": float(added)}
    if config.streams:
        counts = collections.Counter(_stream(entry.task, config) for entry in kept)
        metrics |= {f"size/{name}": float(count) for name, count in sorted(counts.items())}
    if kept:
        metrics["learnability"] = float(np.mean([entry.learnability for entry in kept]))
    return kept, {f"buffer/{name}": value for name, value in metrics.items()}


def _of_streams(entries: Entries, count: int, config: BufferConfig, rng: np.random.Generator) -> list[Task]:
    """`count` tasks, taken from each stream in turn; if a stream has too few, the others make up for it."""
    if not config.streams:
        return draw(entries, count, config.draw, rng)
    names = [_stream(entry.task, config) for entry in entries]
    turns = rng.permutation(sorted(set(names))).tolist()  # the first get one more if parts are unequal
    queues = [
        draw(tuple(e for e, name in zip(entries, names) if name == stream), count, config.draw, rng)
        for stream in turns
    ]
    in_turn = (task for turn in itertools.zip_longest(*queues) for task in turn if task is not None)
    return list(itertools.islice(in_turn, count))


def _stream(task: Task, config: BufferConfig) -> str:
    return str(task.meta.get(config.streams, ""))


def _with_examples(task: Task, examples: Sequence[Task]) -> Task:
    shown = [{"question": example.question, "answer": example.gold} for example in examples]
    return dataclasses.replace(task, meta={**task.meta, "examples": shown})
