"""Grades and credit beside a rollout: a task's episodes are judged while those of others are still sampled.

    an episode ends     ──finished──► its programs and algebra begin
    its task's last one ──finished──► the task's episodes are graded and credited on a thread
    all have ended      ──judge(episodes)──► what each is worth

So a slow credit function (a reward model, a service) costs a step only what it needs after the last episode.
"""

import collections
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import NamedTuple

from marl_jax.rewards.credit import CallRewards, Credit, CreditConfig, Graded, Grader, assign, grade_episodes
from marl_jax.rollouts.episodes import Episode

LOOK_S = 0.1  # between two looks at whether to give up


class Judged(NamedTuple):
    """An episode with its grades, and the components of its calls' rewards."""

    graded: Graded
    components: CallRewards


_Name = tuple[str, int]  # of an episode: its task and sample
_Batch = Future[dict[_Name, Judged]]


class Judge:
    """Judges the episodes of one step; use it as a context.

    Args:
      credit: from graded episodes to the components of their calls. It is called with the episodes of one task in the
        order of their samples or, where `config.batch` is "step", with all that it is asked for at once.
      samples: episodes of a task, which make a batch.
      check: called while waiting; what it raises ends that.
    """

    def __init__(
        self,
        credit: Credit,
        config: CreditConfig,
        samples: int,
        check: Callable[[], None] = lambda: None,
    ):
        self._credit, self._config, self._samples, self._check = credit, config, samples, check
        self._grader = Grader()
        self._ended: dict[str, list[Episode]] = collections.defaultdict(
            list
        )  # of tasks that are not complete
        self._sent: dict[_Name, _Batch] = {}
        self._broken: _Batch | None = None
        self._queue: queue.SimpleQueue[tuple[Sequence[Episode], _Batch] | None] = queue.SimpleQueue()

    def __enter__(self) -> "Judge":
        for _ in range(self._config.threads):
            # Nobody waits for a daemon: a run that is asked to end does not wait for a slow credit.
            threading.Thread(target=self._work, name="credit", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        while not self._queue.empty():
            self._queue.get()
        for _ in range(self._config.threads):
            self._queue.put(None)

    def finished(self, episode: Episode) -> None:
        """Begin with an episode that has ended; does not wait. A credit that failed on others fails here."""
        if self._broken is not None:
            self._broken.result()
        self._grader.start(episode)
        if self._config.batch == "task":
            ended = self._ended[episode.task.id]
            ended.append(episode)
            if len(ended) == self._samples:
                self._send(sorted(self._ended.pop(episode.task.id), key=lambda episode: episode.sample))

    def __call__(self, episodes: Sequence[Episode]) -> list[Judged]:
        """What each episode is worth; waits for it."""
        if late := [episode for episode in episodes if _name(episode) not in self._sent]:
            self._send(late)
        return [self._wait(self._sent[_name(episode)])[_name(episode)] for episode in episodes]

    def _send(self, episodes: Sequence[Episode]) -> None:
        batch: _Batch = Future()
        self._sent |= {_name(episode): batch for episode in episodes}
        self._queue.put((episodes, batch))

    def _wait(self, batch: _Batch) -> dict[_Name, Judged]:
        while True:
            self._check()
            try:
                return batch.result(LOOK_S)
            except TimeoutError:
                if batch.done():  # it is the credit's own
                    raise

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            episodes, batch = job
            try:
                graded = grade_episodes(episodes, self._grader)
                judged = map(Judged, graded, assign(self._credit, graded))
                batch.set_result({_name(one.graded.episode): one for one in judged})
            except BaseException as error:  # its own exit() fails the step, not this thread in silence
                batch.set_exception(error)
                self._broken = batch


def _name(episode: Episode) -> _Name:
    return episode.task.id, episode.sample
