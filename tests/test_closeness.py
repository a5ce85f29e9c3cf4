"""What the tests take for equal, and what they do not."""

import numpy as np
import pytest
from closeness import EPS, close, close_trees


def test_a_sum_near_cancellation_may_be_off_by_a_few_roundings_of_its_terms():
    terms = np.array([1e3, -1e3, 1e-3])
    close(np.sum(terms) + 7 * EPS * 2e3, np.sum(terms), of=np.sum(np.abs(terms)))
    with pytest.raises(AssertionError):
        close(np.sum(terms) + 9 * EPS * 2e3, np.sum(terms), of=np.sum(np.abs(terms)))


@pytest.mark.parametrize("entry", [0, 5])
def test_one_entry_that_is_off_by_a_percent_of_the_norm_is_noticed(entry):
    tree = {"large": np.arange(5.0) - 2, "small": np.array([1e-4])}
    flat = np.concatenate([tree["large"], tree["small"]])
    flat[entry] += 0.01 * np.linalg.norm(flat)
    with pytest.raises(AssertionError, match="small" if entry == 5 else "large"):
        close_trees({"large": flat[:5], "small": flat[5:]}, tree)


def test_of_nothing_only_nothing_is_near():
    close(np.zeros(2), np.zeros(2), of=0.0)
    with pytest.raises(AssertionError):
        close([0.0, 1e-30], np.zeros(2), of=0.0)
    with pytest.raises(AssertionError):
        close(np.nan, 0.0, of=1.0)
