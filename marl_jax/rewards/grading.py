"""Grading of the answers of workflows and of solvers: the columns grade and outcome of the table.

    a finished episode --Grader.start--> work under way --grade--> table with grade [N] and outcome [N]

Each distinct answer to a task is graded once. An episode that ended in an error is worth 0.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from marl_jax.episodes import Episode
from marl_jax.own import OwnError, in_words
from marl_jax.rewards.families import start_answer
from marl_jax.table import SOLVER, Table
from marl_jax.task import Task

RIGHT = 0.5  # answers graded at least this are right

_Pair = tuple[str, ...]  # a task and an answer to it, whoever gave it


class Grader:
    """Grades answers by the tasks' families; programs and algebra begin to run at `start`."""

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        """`check` is called before every grade; an exception in it ends the grading."""
        self._check = check
        self._started: dict[_Pair, Callable[[], float]] = {}

    def start(self, episode: Episode) -> None:
        """Start grading every answer of a finished episode; does not wait."""
        ends = [end for end in episode.leaves or (episode,) if end.error is None]
        solvers = [call for call in episode.calls if ends and call.kind == "solver"]
        answers = [(episode.task, end.answer) for end in ends]
        answers += [(call.about or episode.task, call.answer) for call in solvers]
        for task, answer in answers:
            if answer is not None:
                self.begin(task, answer)

    def begin(self, task: Task, answer: str) -> Callable[[], float]:
        """Start to grade an answer, unless that is under way; the returned function waits for the grade."""
        pair = _pair(task, answer)
        if pair not in self._started:
            self._started[pair] = start_answer(task, answer)
        return self._started[pair]

    def __call__(self, task: Task, answer: str) -> float:
        """The grade of an answer; waits for it."""
        self._check()
        return self.begin(task, answer)()


def grade(table: Table, by: Callable[[Task, str], float] | None = None) -> Table:
    """The table with every solver's grade and every outcome; `by(task, answer)` is called once for each distinct pair.

    The outcome of an episode that forks is the mean over its paths, that of a call the mean over the paths it is on.

    With `by` None or a `Grader`, programs and algebra are graded in parallel.
    """
    table.need_episodes()
    by = by or Grader()
    pairs = {_pair(task, answer): (task, answer) for task, answer in _answers(table)}
    if isinstance(by, Grader):
        for pair in pairs.values():
            by.begin(*pair)
    grades = {key: finite(by(*pair), f"the grade of task {key[0]!r}") for key, pair in pairs.items()}

    def grade_of(task: Task, answer: str | None, sound: bool) -> float:
        return grades[_pair(task, answer)] if sound and answer is not None else 0.0

    def with_outcome(bare: Episode) -> Episode:
        if not bare.leaves:
            return dataclasses.replace(bare, outcome=grade_of(bare.task, bare.answer, bare.error is None))
        values = [grade_of(bare.task, leaf.answer, leaf.error is None) for leaf in bare.leaves]
        leaves = tuple(dataclasses.replace(leaf, outcome=value) for leaf, value in zip(bare.leaves, values))
        return dataclasses.replace(bare, leaves=leaves, outcome=sum(values) / len(values))

    episodes = tuple(map(with_outcome, table.bare_episodes))
    solvers = [
        grade_of(table.task_of(row), table.answer[row], sound) if kind == SOLVER else math.nan
        for row, (kind, sound) in enumerate(zip(table.kind.tolist(), table.sound.tolist()))
    ]
    outcome = np.array([episodes[number].outcome for number in table.episode.tolist()], np.float64)
    graded = table.replace(grade=np.array(solvers, np.float64), outcome=outcome, bare_episodes=episodes)
    if table.forked:
        flat, rows = graded.paths()
        graded = graded.replace(outcome=np.bincount(rows, flat.outcome) / np.bincount(rows))
    return graded


def _answers(table: Table) -> Iterator[tuple[Task, str]]:
    """The answers that need a grade: those of the episodes and of their solvers."""
    for bare in table.bare_episodes:
        for end in bare.leaves or (bare,):
            if end.error is None and end.answer is not None:
                yield bare.task, end.answer
    for row in np.flatnonzero((table.kind == SOLVER) & table.sound).tolist():
        if (answer := table.answer[row]) is not None:
            yield table.task_of(row), answer


def _pair(task: Task, answer: str) -> _Pair:
    return task.id, task.family, task.question, task.gold, task.tests_digest, answer


def finite(value: Any, what: str) -> float:
    """The number that user code returned; OwnError if it is not a finite number."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise OwnError(f"{what} is {in_words(value)}; it must be a finite number")
    return number
