"""An endless, shuffled iterator over tasks whose position is three integers.

    stream = order(seed, 0) ++ order(seed, 1) ++ ...      every epoch a permutation of all problems
    a batch is the next n of the stream, also across the end of an epoch

No batch has a problem twice, unless it is larger than the data: if a batch spans two epochs, problems that it already
has are moved back in the second epoch.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from marl_jax.task import Task


@dataclasses.dataclass(frozen=True)
class Position:
    """How far a stream has been read: `index` problems into `epoch` of the stream of `seed`."""

    epoch: int = 0  # passes over the data that are complete
    index: int = 0  # next problem of the pass
    seed: int = 0  # seed of its order


class TaskIterator(Iterator[list[Task]]):
    """Batches of `batch` problems; assign `position` to move in the stream."""

    def __init__(self, tasks: Sequence[Task], batch: int, position: Position = Position()):
        if not len(tasks):
            raise ValueError("there are no tasks to iterate over")
        if batch < 1:
            raise ValueError(f"a batch of {batch} problems cannot be drawn; it must have at least 1")
        self._tasks, self._batch = tasks, batch
        self._order: tuple[Any, int, np.ndarray] | None = None  # (seed, offset of batches), epoch, its order
        self.position = position

    @property
    def position(self) -> Position:
        """The position of the next batch, as saved in a checkpoint."""
        return self._position

    @position.setter
    def position(self, position: Position) -> None:
        size = len(self._tasks)
        if position.epoch < 0 or position.seed < 0 or not 0 <= position.index < size:
            raise ValueError(
                f"{position} lies outside of a stream over {size} tasks: was it saved with other data?"
            )
        self._position = position

    def __next__(self) -> list[Task]:
        places, next_position = advance(self._position, self._batch, len(self._tasks))
        batch = [self._tasks[int(self._epoch(epoch)[index])] for epoch, index in places]
        self._position = next_position  # moved last, so that a batch that failed to load is read again
        return batch

    def _epoch(self, epoch: int) -> np.ndarray:
        """The order of the problems in an epoch. It depends on the epochs before, because batches span their ends."""
        seed, size, batch = self._position.seed, len(self._tasks), self._batch
        offset = (self._position.epoch * size + self._position.index) % batch  # where batches begin
        if self._order is None or self._order[0] != (seed, offset) or self._order[1] > epoch:
            self._order = (seed, offset), 0, order(size, seed, 0)
        key, at, drawn = self._order
        for later in range(at + 1, epoch + 1):
            before = (later * size - offset) % batch  # problems of its first batch that are in earlier epochs
            shuffled = order(size, seed, later)
            drawn = defer(shuffled, drawn[size - before :], batch - before) if batch <= size else shuffled
        self._order = key, max(at, epoch), drawn
        return drawn


def order(size: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the problems in an epoch: a pure function of the seed and the epoch."""
    return np.random.default_rng([seed, epoch]).permutation(size)


def defer(order: np.ndarray, seen: np.ndarray, count: int) -> np.ndarray:
    """The order with its first `count` problems that are not in `seen` moved to the front."""
    fresh = order[~np.isin(order, seen)][:count]
    return np.concatenate([fresh, order[~np.isin(order, fresh)]])


def advance(position: Position, count: int, size: int) -> tuple[list[tuple[int, int]], Position]:
    """The next `count` places (epoch, index) of a stream over `size` problems, and the position after them."""
    start = position.epoch * size + position.index
    places = [divmod(place, size) for place in range(start, start + count)]
    epoch, index = divmod(start + count, size)
    return places, Position(epoch, index, position.seed)
