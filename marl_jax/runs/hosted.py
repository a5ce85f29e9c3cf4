"""The hosted road: engines play, workers grade, the learner updates; any workflow, tools and programs.

    problems ──Player──► table of calls ──BackgroundCredit──► rewards ──► advantages ──Learner──► new policies

With dynamic sampling (`rollout.draws`), problems without contrast are drawn again, under new sample numbers. Only the
last draw of each problem is learned from, so problems keep their number of episodes, and batches their shapes.
Seeds that train side by side play one after another, on the same engines; then they learn.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from marl_jax import hosts
from marl_jax.config.phase_fields import PhasePosition
from marl_jax.hosts.gathering import gathered
from marl_jax.learning import NonFiniteGradients, with_advantages
from marl_jax.learning.estimators.groups import group_key
from marl_jax.learning.estimators.worth import AdvantageConfig, Presets
from marl_jax.policies import Tree
from marl_jax.rewards.background_credit import BackgroundCredit
from marl_jax.rollouts import Player
from marl_jax.rollouts.serving import Service
from marl_jax.run_folder.files import disk_errors
from marl_jax.runs.divergence import finite
from marl_jax.runs.recording import tool_log
from marl_jax.runs.run import Result, Run
from marl_jax.runs.state import State
from marl_jax.runs.step_metrics import Clock
from marl_jax.table import Table
from marl_jax.task import Task
from marl_jax.tasks.buffer import problems_of_step


class Hosted:
    """The engines of a run: they play the steps of the hosted road, and the evaluations of either road."""

    def __init__(
        self, service: Service, player: Player, frozen: Mapping[str, Tree], trees: Mapping[str, Tree]
    ):
        """The service answers with `trees` at first; the trees of frozen policies never change."""
        self.service, self.player, self._frozen, self._served = service, player, dict(frozen), trees

    def serve(self, state: State) -> Player:
        """The player, with the policies of this state in its engines."""
        if self._served is not state.trees:
            self.service.update(self._frozen | state.trees, state.updates)
            self._served = state.trees
        return self.player

    def step(
        self, runs: Sequence[Run], states: Sequence[State], at: PhasePosition, clock: Clock
    ) -> list[Result]:
        """The results of the next step of each run; all play before the first one learns, so that a stop loses none."""
        played = list[tuple[Table, ResampleCounts | None]]()
        for run, state in zip(runs, states):
            with finite(run, state):
                played.append(self._play_and_grade(run, state, at, clock))
        # Checks for a stop before anything is donated; from then on all seeds finish the step.
        checks = [runs[0].stop.check, *(None for _ in runs[1:])]
        return [self._learn(*of_run, at, clock) for of_run in zip(runs, states, played, checks)]

    def _learn(
        self,
        run: Run,
        state: State,
        played: tuple[Table, "ResampleCounts | None"],
        check: Callable[[], None] | None,
        at: PhasePosition,
        clock: Clock,
    ) -> Result:
        config, parts, (calls, draws) = run.config, run.parts, played
        run.live.phase("learning")
        learner = run.phases.learner(at.phase)
        with clock("learn", lambda: learner.watch.seconds):
            advantages, presets = config.advantages, parts.workflow.groups
            if at.phase.flatten:  # its rows are episodes, which have no labels
                key = [f for f in group_key(advantages.group, presets) if not f.startswith("call.")]
                # Each field twice: a single "role" is the preset of that name, not the field.
                advantages = dataclasses.replace(advantages, group=",".join(key * 2) or "role")
            table, groups = with_advantages(calls, advantages, presets)
            table = table.replace(trains=run.phases.trains(at.phase, table))
            if hosts.count() > 1:  # no process may leave the others in a program that all run
                run.stop.check_together()
                check = None
            rows, failure = table.take(run.phases.reported(table)), ""
            references = run.phases.references(at.phase, state)
            try:
                with hosts.local_errors():
                    trees, learned, report = learner.step(
                        state.trees,
                        state.learner,
                        rows,
                        step=state.step,
                        bases=parts.adapter_bases(),
                        references=references,
                        check=check,
                    )
            except NonFiniteGradients as error:  # left out: the policies are good, and can be saved
                (trees, learned, report), failure = error.outcome, str(error)
        counts = {f"draws/{k}": v for k, v in dataclasses.asdict(draws).items()} if draws else {}
        return Result(table, groups, counts, report, trees, learned, failure)

    def _play_and_grade(
        self, run: Run, state: State, at: PhasePosition, clock: Clock
    ) -> tuple[Table, "ResampleCounts | None"]:
        """Problems -> episodes -> rewards, repeated for problems without contrast, with dynamic sampling.

        In a phase that does not play: the collected calls.
        """
        if (calls := run.phases.collected_calls(at, state.step)) is not None:
            return calls, None
        config, samples, number = run.config, run.config.rollout.samples, state.step + 1
        with clock("rollout"):
            player = self.serve(state)
            if hosts.count() > 1:  # waiting for other processes counts as gathering
                player = dataclasses.replace(player, combined=clock("gather")(player.combined))
            play = functools.partial(
                player.play,
                samples=samples,
                step=number,
                seed=config.seed,
                tool_log=tool_log(run.folder, f"step-{number}"),
                progress=run.stop.watch(run.live.rollout),
            )
        draws, presets = config.rollout.draws, run.parts.workflow.groups
        credit = BackgroundCredit(run.parts.credit, config.rewards, samples, run.stop.check)
        with clock("grade"), credit as background:

            def sample(batch: Sequence[Task], first: int) -> Table:
                run.live.phase("sampling")
                with (
                    clock("rollout", lambda: self.service.seconds),
                    hosts.sharing_errors(),
                    disk_errors(run.folder),
                ):
                    return play(hosts.share(batch), first_sample=first, finished=background.finished)

            def reward(table: Table) -> Table:
                run.live.phase("grading")
                with hosts.sharing_errors():
                    table = background(table)
                if hosts.count() == 1:
                    return table
                with clock("gather"):
                    return gathered(lambda: table)

            tasks = tasks_of_step(run, state)
            if draws == 1:
                return reward(sample(tasks, 0)), None

            def learns(table: Table) -> np.ndarray:
                table = table.replace(trains=run.phases.trains(at.phase, table))
                return run.phases.learner(at.phase).learns(table, state.step)

            return resample(
                sample, reward, tasks, config.advantages, draws=draws, presets=presets, learns=learns
            )


def tasks_of_step(run: Run, state: State) -> list[Task]:
    """The problems of the next step, taken from the stream of the run."""
    return problems_of_step(
        next(run.problems), state.buffer, run.config.data.buffer, run.config.seed, state.step + 1
    )


# ---------------------------------------------------------------- dynamic sampling

Sample = Callable[[Sequence[Task], int], Table]  # (tasks, first_sample), as `rollout` takes them
Reward = Callable[[Table], Table]  # adds the column reward


@dataclasses.dataclass(frozen=True)
class ResampleCounts:
    """Counts of the dynamic sampling of one step."""

    problems: int
    flat: int  # problems without contrast in the first draw
    rescued: int  # problems without contrast in the first draw, but with some in a later one
    draws: int  # rounds of sampling, the first included
    episodes: int  # episodes sampled over all rounds, with those that the result drops
    tokens: int  # tokens sampled over all rounds
    first_reward: float  # mean over all calls of the first draw: the kept draws are a biased sample


def resample(
    sample: Sample,
    reward: Reward,
    tasks: Sequence[Task],
    advantages: AdvantageConfig,
    *,
    draws: int,
    presets: Presets | None = None,
    learns: Callable[[Table], np.ndarray] = lambda table: np.ones(len(table), bool),
) -> tuple[Table, ResampleCounts]:
    """Sample every task, then tasks without contrast up to `draws - 1` times more; `draws=1` is plain sampling.

    `advantages` and `presets` define the groups, as in `with_advantages`; `learns` says which calls are learned from. A
    task that stays flat to the end keeps its last draw. The table has the episodes to learn from, task by task.
    """
    tables: list[Table] = []
    last: dict[str, list[int]] = {}  # by task: the episodes of its last draw, numbered over all draws
    flat, first_flat, first_reward = list(tasks), 0, 0.0
    drawn, first = 0, 0
    while flat and len(tables) < draws:
        table = reward(sample(flat, first))
        assert {bare.task.id for bare in table.bare_episodes} == {task.id for task in flat}
        last |= {task.id: [] for task in flat}
        for number, bare in enumerate(table.bare_episodes, drawn):
            last[bare.task.id].append(number)
        with_contrast = _with_contrast(table, advantages, presets, learns(table))
        flat = [task for task in flat if task.id not in with_contrast]
        if not tables:
            first_flat, first_reward = len(flat), float(np.mean(table.reward)) if len(table) else 0.0
        tables.append(table)
        drawn += len(table.bare_episodes)
        first = 1 + max(bare.sample for bare in table.bare_episodes)
    tokens = sum(int(table.length.sum()) for table in tables)
    counts = ResampleCounts(
        len(tasks), first_flat, first_flat - len(flat), len(tables), drawn, tokens, first_reward
    )
    if not tables:
        return Table.of([]), counts
    return Table.concat(tables).of_episodes([number for task in tasks for number in last[task.id]]), counts


def _with_contrast(
    table: Table, advantages: AdvantageConfig, presets: Presets | None, learned: np.ndarray
) -> set[str]:
    """The ids of tasks with an advantage that is not 0 among the calls that are learned."""
    compared, _ = with_advantages(table, dataclasses.replace(advantages, rows=None), presets)
    rows = np.flatnonzero(np.nan_to_num(compared.advantage) * learned)
    return {table.bare_episodes[number].task.id for number in table.episode[rows].tolist()}
