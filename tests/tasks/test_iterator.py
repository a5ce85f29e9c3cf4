"""The iterator's position is three integers, and they are enough."""

import dataclasses
import json

import numpy as np
import pytest

from marl_jax.task import Task
from marl_jax.tasks.iterator import Position, TaskIterator, advance, order

TASKS = [Task(str(i), "math", f"q{i}", gold="1") for i in range(23)]


def ids(batch):
    return [task.id for task in batch]


def read(iterator, batches):
    return [name for _ in range(batches) for name in ids(next(iterator))]


def test_every_epoch_holds_every_problem_once_and_in_another_order():
    stream = read(TaskIterator(TASKS, 5, Position(seed=3)), 23)  # 5 epochs
    epochs = [stream[i : i + 23] for i in range(0, 115, 23)]
    assert all(sorted(epoch) == sorted(task.id for task in TASKS) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5


@pytest.mark.parametrize("batch", [1, 5, 12, 16, 22, 23])
def test_no_batch_holds_a_problem_twice_and_every_epoch_still_holds_all(batch):
    iterator = TaskIterator(TASKS, batch, Position(seed=3))
    batches = [ids(next(iterator)) for _ in range(4 * 23)]
    assert all(len(set(names)) == batch for names in batches)
    stream = [name for names in batches for name in names]
    epochs = [stream[i : i + 23] for i in range(0, len(stream), 23)]
    assert all(sorted(epoch) == sorted(task.id for task in TASKS) for epoch in epochs)


def test_another_seed_is_another_order():
    assert read(TaskIterator(TASKS, 23, Position(seed=3)), 1) != read(
        TaskIterator(TASKS, 23, Position(seed=4)), 1
    )


@pytest.mark.parametrize("stop", range(12))
def test_resume_goes_on_exactly_where_it_stopped(stop):
    whole = TaskIterator(TASKS, 7, Position(seed=1))
    read(whole, stop)
    saved = json.dumps(dataclasses.asdict(whole.position))
    resumed = TaskIterator(TASKS, 7, Position(**json.loads(saved)))
    assert read(resumed, 9) == read(whole, 9)


def test_going_back_to_a_position_replays_it():
    iterator = TaskIterator(TASKS, 4, Position(seed=2))
    read(iterator, 5)
    here = iterator.position
    first = read(iterator, 8)
    iterator.position = here
    assert read(iterator, 8) == first


class Flaky(list):
    """Fails on the first of its reads that is told to."""

    fail_at = 0

    def __getitem__(self, index):
        self.fail_at -= 1
        if self.fail_at == 0:
            raise OSError("the disk was away")
        return super().__getitem__(index)


def test_a_batch_that_could_not_be_read_is_neither_skipped_nor_torn():
    flaky, sound = Flaky(TASKS), TaskIterator(TASKS, 5, Position(seed=1))
    iterator = TaskIterator(flaky, 5, Position(seed=1))
    assert read(iterator, 2) == read(sound, 2)
    before, flaky.fail_at = iterator.position, 3
    with pytest.raises(OSError, match="the disk was away"):
        next(iterator)
    assert iterator.position == before
    assert read(iterator, 9) == read(sound, 9)


def test_a_batch_larger_than_the_data_takes_several_epochs():
    batch = ids(next(TaskIterator(TASKS[:3], 8)))
    assert sorted(batch[:3]) == sorted(batch[3:6]) == ["0", "1", "2"] and len(batch) == 8


def test_the_order_is_a_pure_function_and_places_are_counted_without_drawing():
    assert np.array_equal(order(23, 1, 2), order(23, 1, 2))
    places, after = advance(Position(epoch=2, index=21, seed=9), 4, 23)
    assert places == [(2, 21), (2, 22), (3, 0), (3, 1)]
    assert after == Position(epoch=3, index=2, seed=9)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: TaskIterator([], 4), "no tasks"),
        (lambda: TaskIterator(TASKS, 0), "batch of 0"),
        (lambda: TaskIterator(TASKS, 4, Position(index=23)), "other data"),
    ],
)
def test_what_cannot_be_iterated_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
