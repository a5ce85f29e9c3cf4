"""The objects of the training loop: the constant parts of a run, its roads, and the results of a step.

Run, State ──Road──► Result: the table of a step, the learner's report, and the policies after it
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from marl_jax.alarms.watch import Watch
from marl_jax.config.phase_fields import PhasePosition
from marl_jax.config.run_config import RunConfig
from marl_jax.learning import LearnerState, Report
from marl_jax.learning.estimators.groups import GroupCounts
from marl_jax.planning.step_times import Pace
from marl_jax.policies import Tree
from marl_jax.rollouts import Player
from marl_jax.run_folder.boards import Board
from marl_jax.run_folder.checkpoints import Checkpoints
from marl_jax.runs.loading.parts import Parts
from marl_jax.runs.phases import Phases
from marl_jax.runs.state import State
from marl_jax.runs.step_metrics import Clock
from marl_jax.runs.stopping import Stop
from marl_jax.table import Table
from marl_jax.tasks import Task, TaskIterator
from marl_jax.terminal.live import Live


@dataclasses.dataclass(frozen=True)
class Run:
    """The objects that steps need and that are the same from step to step."""

    config: RunConfig
    parts: Parts
    folder: Path
    problems: TaskIterator
    watched: list[Task]  # the problems of evaluations; empty: never evaluated
    about: dict[str, Any]  # fields that mark the run's lines in `eval.jsonl`
    phases: Phases
    checkpoints: Checkpoints
    watch: Watch  # the alarms of metrics and evaluations
    boards: list[Board]
    live: Live
    stop: Stop
    pace: Pace


@dataclasses.dataclass(frozen=True)
class Result:
    """The results of a step of one run."""

    table: Table  # with the columns reward, advantage and trains
    groups: Mapping[str, GroupCounts]  # by role
    counts: Mapping[str, float]  # of the road: draws of dynamic sampling, answers beyond the arrays
    report: Report
    trees: dict[str, Tree]
    learner: dict[str, LearnerState]
    failure: str = ""  # why the run ends after this step


class Road(Protocol):
    """A way to make steps; the runs given to it are at the same step, and differ only in their seed."""

    def serve(self, state: State) -> Player:
        """A player, with the policies of this state in its engines."""

    def step(
        self, runs: Sequence[Run], states: Sequence[State], at: PhasePosition, clock: Clock
    ) -> list[Result]:
        """The results of the next step of each run."""
