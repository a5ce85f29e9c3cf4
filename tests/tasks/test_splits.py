"""The study's splits, row by row."""

import numpy as np
import pytest

from marl_jax.tasks.datasets import SOURCES
from marl_jax.tasks.row_files import DataError
from marl_jax.tasks.splits import assign, carve, held_out


def test_dapo_math_is_split_as_in_the_study():
    order = np.random.default_rng(42).permutation(14116)
    train, test = held_out(14116, 0.1)
    assert (len(train), len(test)) == (12704, 1412)
    assert np.array_equal(test, order[:1412]) and np.array_equal(train, order[1412:])


def test_the_permutation_is_the_one_numpy_draws_from_seed_42():
    # Written down from numpy's generator alone, so that a change of it cannot pass unseen.
    assert held_out(14116, 0.1)[1][:5].tolist() == [4723, 5047, 4689, 3067, 5961]
    assert held_out(16252, 1000)[1][:5].tolist() == [4598, 1437, 12222, 13608, 243]


def test_the_first_thousand_rows_of_the_shuffled_code_set_are_its_test_split():
    train, test = held_out(16252, 1000)
    order = np.random.default_rng(42).permutation(16252)
    assert np.array_equal(test, order[:1000]) and np.array_equal(train, order[1000:])


def test_val_comes_out_of_train_and_leaves_the_rest_in_order():
    before, _ = held_out(14116, 0.1)
    train, val = carve(before, 300, seed=7)
    assert len(val) == 300 and len(train) == 12404
    assert sorted([*train, *val]) == sorted(before)
    assert np.array_equal(train, before[np.isin(before, train)])
    assert np.array_equal(val, carve(before, 300, seed=7)[1])
    assert not np.array_equal(val, carve(before, 300, seed=8)[1])


def test_without_a_val_split_train_and_test_are_the_studys():
    order = np.random.default_rng(42).permutation(14116)
    parts = assign({"train": 14116}, SOURCES["dapo_math"].test, val_size=0, seed=3)
    assert {name: len(rows) for name, (_, rows) in parts.items()} == {"train": 12704, "test": 1412}
    assert np.array_equal(parts["train"][1], order[1412:]) and np.array_equal(parts["test"][1], order[:1412])


def test_published_splits_are_kept_and_only_the_missing_ones_are_made():
    parts = assign({"train": 100, "val": 9, "test": 11, "prompt": 5}, 0.1)
    assert {name: (where, len(rows)) for name, (where, rows) in parts.items()} == {
        "train": ("train", 100),
        "val": ("val", 9),
        "test": ("test", 11),
        "prompt": ("prompt", 5),
    }
    assert list(assign({"test": 30}, 0.1)) == ["test"]


@pytest.mark.parametrize("call", [lambda: held_out(1000, 1000), lambda: carve(np.arange(5), 5, 0)])
def test_a_split_that_would_leave_nothing_is_refused(call):
    with pytest.raises(DataError, match="cannot"):
        call()
