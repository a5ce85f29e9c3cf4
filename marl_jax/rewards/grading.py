"""Grading: what the workflow's answer, and every solver's own, is worth: the columns grade and outcome of the table.

    a finished episode --Grader.start--> work under way --grade--> table with grade [N] and outcome [N]

Each distinct answer to a task is graded once. An episode that ended in an error is worth 0.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from marl_jax.rewards.families import start_answer
from marl_jax.table import SOLVER, Episode, Table
from marl_jax.task import Task

RIGHT = 0.5  # answers graded at least this are right

_Pair = tuple[str, ...]  # an answer to a task, whoever gave it


class Grader:
    """The grades that the tasks' own families give; programs and algebra are worked on from `start` on."""

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        """`check` is called before every grade; what it raises ends the grading."""
        self._check = check
        self._started: dict[_Pair, Callable[[], float]] = {}

    def start(self, episode: Episode) -> None:
        """Start grading every answer of a finished episode; does not wait."""
        solved = [call.answer for call in episode.calls if call.kind == "solver"]
        for answer in (episode.answer, *solved) if episode.error is None else ():
            if answer is not None:
                self.begin(episode.task, answer)

    def begin(self, task: Task, answer: str) -> None:
        pair = _pair(task, answer)
        if pair not in self._started:
            self._started[pair] = start_answer(task, answer)

    def __call__(self, task: Task, answer: str) -> float:
        """The grade of an answer; waits for it."""
        self._check()
        self.begin(task, answer)
        return self._started[_pair(task, answer)]()


def grade(table: Table, by: Callable[[Task, str], float] | None = None) -> Table:
    """The table with every solver's grade and every outcome; `by(task, answer)` is asked once for each distinct pair.

    With `by` None or a `Grader`, programs and algebra are graded side by side.
    """
    table.need_episodes()
    by = by or Grader()
    wanted = {_pair(task, answer): (task, answer) for task, answer in _answers(table)}
    if isinstance(by, Grader):
        for pair in wanted.values():
            by.begin(*pair)
    grades = {key: finite(by(*pair), f"the grade of task {key[0]!r}") for key, pair in wanted.items()}

    def of(head: Episode, answer: str | None) -> float:
        return 0.0 if answer is None or head.error is not None else grades[_pair(head.task, answer)]

    heads = tuple(dataclasses.replace(head, outcome=of(head, head.answer)) for head in table.heads)
    owners = [heads[number] for number in table.episode.tolist()]
    own = [
        of(head, answer) if kind == SOLVER else math.nan
        for head, answer, kind in zip(owners, table.answer, table.kind.tolist())
    ]
    outcome = np.array([head.outcome for head in owners], np.float64)
    return table.replace(grade=np.array(own, np.float64), outcome=outcome, heads=heads)


def _answers(table: Table) -> Iterator[tuple[Task, str]]:
    """The answers that need a grade: those of the episodes and of their solvers, episode by episode."""
    solved: list[list[str | None]] = [[] for _ in table.heads]
    for row in np.flatnonzero(table.kind == SOLVER).tolist():
        solved[table.episode[row]].append(table.answer[row])
    for head, own in zip(table.heads, solved):
        for answer in (head.answer, *own) if head.error is None else ():
            if answer is not None:
                yield head.task, answer


def _pair(task: Task, answer: str) -> _Pair:
    return task.id, task.question, task.gold, answer


def is_right(grade: float | None) -> bool:
    """Whether an answer of this grade is right; one that has none is not."""
    return grade is not None and grade >= RIGHT


def finite(value: Any, what: str, refusal: type[ValueError] = ValueError) -> float:
    """A number that came from outside; a one-line error if it is none, or not finite."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise refusal(f"{what} is {value!r}; it must be a finite number")
    return number
