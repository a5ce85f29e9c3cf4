"""Grading: what the workflow's answer, and every solver's own, is worth.

    finished episodes --Grader.start--> work under way --grade_episodes--> Graded: outcome, answers, kinds of the calls

Each distinct answer to a task is graded once. An episode that ended in an error is worth 0.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from marl_jax.rollouts.episodes import Episode
from marl_jax.tasks.families import start_answer
from marl_jax.tasks.task import Task

Kind = Literal["solver", "judge", "picker", "planner", "team"]

RIGHT = 0.5  # an answer graded at least so is right

# What each role's own work is: an answer, a verdict on the answer it read, a pick among those it read, guidance
# for the calls that read it, or the episode's outcome (also of roles that are not named here).
KINDS: Mapping[str, Kind] = {
    "generator": "solver",
    "worker": "solver",
    "debater": "solver",
    "coder": "solver",
    "evaluator": "judge",
    "aggregator": "picker",
    "orchestrator": "planner",
    "planner": "planner",
    "synthesizer": "team",
}


@dataclasses.dataclass(frozen=True)
class Graded:
    """An episode and what the grader said of it, between 0 and 1."""

    episode: Episode
    outcome: float  # of the workflow's answer
    answers: tuple[float | None, ...]  # of each solver's own answer (0 if unreadable); None for other calls
    kinds: tuple[Kind, ...]  # of the calls


_Pair = tuple[str, ...]  # an answer to a task, whoever gave it


class Grader:
    """The grades that the tasks' own families give; programs and algebra are worked on from `start` on."""

    def __init__(self, kinds: Mapping[str, Kind] = KINDS):
        self._kinds = kinds
        self._started: dict[_Pair, Callable[[], float]] = {}

    def start(self, episode: Episode) -> None:
        """Begin with all that the grade of a finished episode will ask for; does not wait."""
        for pair, (task, answer) in _wanted(episode, self._kinds).items():
            if pair not in self._started:
                self._started[pair] = start_answer(task, answer)

    def __call__(self, task: Task, answer: str) -> float:
        """The grade of an answer that an episode brought; waits for it."""
        return self._started[_pair(task, answer)]()


def grade_episodes(
    episodes: Sequence[Episode],
    grade: Callable[[Task, str], float] | None = None,
    kinds: Mapping[str, Kind] = KINDS,
) -> list[Graded]:
    """Every outcome and every solver's answer, graded; `grade(task, answer)` sees each distinct pair once.

    Without a `grade` of one's own, or with a `Grader` that may have begun, programs and algebra run side by side.
    """
    grade = grade or Grader(kinds)
    if isinstance(grade, Grader):
        for episode in episodes:
            grade.start(episode)
    wanted: dict[_Pair, tuple[Task, str]] = {}
    for episode in episodes:
        wanted |= _wanted(episode, kinds)
    grades = {key: finite(grade(*pair), f"the grade of task {key[0]!r}") for key, pair in wanted.items()}

    def of(episode: Episode, answer: str | None) -> float:
        return 0.0 if answer is None or episode.error is not None else grades[_pair(episode.task, answer)]

    return [
        Graded(
            episode,
            of(episode, episode.answer),
            tuple(
                of(episode, call.answer) if kind == "solver" else None
                for call, kind in zip(episode.calls, _kinds_of(episode, kinds))
            ),
            _kinds_of(episode, kinds),
        )
        for episode in episodes
    ]


def _kinds_of(episode: Episode, kinds: Mapping[str, Kind]) -> tuple[Kind, ...]:
    return tuple(kinds.get(call.role, "team") for call in episode.calls)


def _wanted(episode: Episode, kinds: Mapping[str, Kind]) -> dict[_Pair, tuple[Task, str]]:
    """The answers of an episode that need a grade: its outcome's and its solvers'."""
    solved = [call.answer for call, kind in zip(episode.calls, _kinds_of(episode, kinds)) if kind == "solver"]
    answers = (episode.answer, *solved) if episode.error is None else ()
    return {_pair(episode.task, answer): (episode.task, answer) for answer in answers if answer is not None}


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
