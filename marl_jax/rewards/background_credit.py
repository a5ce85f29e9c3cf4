"""Grading and credit during a rollout: a task's episodes are credited while those of other tasks are still sampled.

    an episode ends     ──finished──► its programs and algebra start to run
    its task's last one ──finished──► the task's episodes are graded and credited on a thread
    all have ended      ──background(table)──► the table with grades, components and rewards

So a slow credit function (a reward model, a service) costs a step only the time that it needs after the last episode.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from marl_jax.episodes import Episode
from marl_jax.rewards.credit import Credit, CreditConfig, with_rewards
from marl_jax.rewards.grading import Grader, grade
from marl_jax.table import Table
from marl_jax.threads import Workers

LEAVE_S = 2.0  # seconds that threads get to end; a thread in a slow credit is abandoned


class BackgroundCredit:
    """Credits the episodes of one step; use it as a context.

    Args:
      credit: from a graded table to the components of its calls.
      config: with `batch` "task" the credit gets the episodes of one task, in the order of their samples; with "step"
        all episodes of one call of this object. `threads` calls of the credit run at a time.
      samples: episodes per task; a task is complete when all of them have ended.
      check: called while waiting; an exception in it ends the wait.
    """

    def __init__(
        self, credit: Credit, config: CreditConfig, samples: int, check: Callable[[], None] = lambda: None
    ):
        self._credit, self._config, self._samples, self._check = credit, config, samples, check
        self._grader = Grader()
        # Ended episodes by task, for tasks that are not complete.
        self._ended: dict[str, list[Episode]] = collections.defaultdict(list)
        self._sent: dict[tuple[str, int], Future[Table]] = {}  # by task and sample of an episode
        self._error: BaseException | None = None  # raised by the credit, which is then not called again
        self._workers = Workers("credit", config.threads)

    def __enter__(self) -> "BackgroundCredit":
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close(LEAVE_S)

    def finished(self, episode: Episode) -> None:
        """Start on an episode that has ended, without waiting. Raises the credit's error on earlier episodes."""
        self._raise_error()
        self._grader.start(episode)
        if self._config.batch == "task":
            ended = self._ended[episode.task.id]
            ended.append(episode)
            if len(ended) == self._samples:
                ended = sorted(self._ended.pop(episode.task.id), key=_id_of)
                self._send(ended, functools.partial(Table.of, ended))

    def __call__(self, table: Table) -> Table:
        """The table with grades, components and rewards; waits for them."""
        unsent: dict[str, list[int]] = collections.defaultdict(list)
        for number, bare in enumerate(table.bare_episodes):
            if _id_of(bare) not in self._sent:
                unsent[bare.task.id if self._config.batch == "task" else ""].append(number)
        for numbers in unsent.values():
            if self._config.batch == "task":
                numbers.sort(key=lambda number: table.bare_episodes[number].sample)
            batch = [table.bare_episodes[number] for number in numbers]
            self._send(batch, functools.partial(table.of_episodes, numbers))
        if not table.bare_episodes:
            return with_rewards(grade(table, self._grader), self._credit, self._config.leaves)
        jobs = dict.fromkeys(self._sent[_id_of(bare)] for bare in table.bare_episodes)
        for job in jobs:
            self._workers.wait([job], self._check_all)
        credited = Table.concat([job.result() for job in jobs])
        position = {_id_of(bare): number for number, bare in enumerate(credited.bare_episodes)}
        return credited.of_episodes([position[_id_of(bare)] for bare in table.bare_episodes])

    def _send(self, episodes: Sequence[Episode], table: Callable[[], Table]) -> None:
        batch = self._workers.submit(self._rewarded, table)
        self._sent |= {_id_of(episode): batch for episode in episodes}

    def _check_all(self) -> None:
        self._check()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _rewarded(self, table: Callable[[], Table]) -> Table:
        self._raise_error()
        try:
            return with_rewards(grade(table(), self._grader), self._credit, self._config.leaves)
        except BaseException as error:  # an exit() in the credit must fail the step, not just end this thread
            self._error = error
            raise


def _id_of(episode: Episode) -> tuple[str, int]:
    return episode.task.id, episode.sample
