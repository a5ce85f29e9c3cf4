"""A run as its loop has it: what stays as it is, and the road that its steps take.

Run, State ──Road──► Made: the table of a step, what the learner says of it, and the policies after it
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from marl_jax.alarms.watch import Watch
from marl_jax.config.phase_fields import Place
from marl_jax.config.run_config import RunConfig
from marl_jax.learning import LearnerState, Report
from marl_jax.learning.estimators.groups import GroupCounts
from marl_jax.planning.measured import Pace
from marl_jax.policies import Tree
from marl_jax.rollouts import Player
from marl_jax.run_folder.boards import Board
from marl_jax.run_folder.checkpoints import Checkpoints
from marl_jax.run_folder.metrics import JsonLines
from marl_jax.runs.loading.parts import Parts
from marl_jax.runs.measures import Clock
from marl_jax.runs.phases import Phases
from marl_jax.runs.state import State
from marl_jax.runs.stopping import Stop
from marl_jax.table import Table
from marl_jax.tasks import Task, TaskIterator
from marl_jax.terminal.live import Live

__all__ = ["Made", "Road", "Run"]


@dataclasses.dataclass(frozen=True)
class Run:
    """All that a step needs and that stays as it is."""

    config: RunConfig
    parts: Parts
    folder: Path
    problems: TaskIterator
    watched: list[Task]  # the problems of evaluations; none: never evaluated
    about: dict[str, Any]  # what its own lines in `eval.jsonl` say that they are of
    phases: Phases
    checkpoints: Checkpoints
    metrics: JsonLines
    evaluations: JsonLines
    watch: Watch  # the alarms that follow from both
    boards: list[Board]
    live: Live
    stop: Stop
    pace: Pace


@dataclasses.dataclass(frozen=True)
class Made:
    """What a step of one run came to."""

    table: Table  # with rewards, advantages, and what trains
    groups: Mapping[str, GroupCounts]  # by role
    counted: Mapping[str, float]  # by the road alone: draws of dynamic sampling, answers beyond the arrays
    report: Report
    trees: dict[str, Tree]
    learner: dict[str, LearnerState]
    failure: str = ""  # why the run ends after this step


class Road(Protocol):
    """What turns states into those of the next step; all runs are at the same one, and differ in their seed alone."""

    def serve(self, state: State) -> Player:
        """A player, whose engines answer by the policies of this state."""

    def step(self, runs: Sequence[Run], states: Sequence[State], at: Place, clock: Clock) -> list[Made]:
        """What the next step of each run comes to."""
