"""What peers say of each other, against sums by hand."""

import numpy as np
import pytest

from marl_jax.rewards.peers import agreement, changes, consensus, crowding, wins


def test_the_consensus_is_the_commonest_answer_and_what_cannot_be_read_is_never_right():
    answers = ["7", "8", None, "8", "9"]
    assert consensus(answers) == ("8", 0.4) and agreement(answers) == [0, 1, 0, 1, 0]
    assert consensus(["1", "2"]) == ("1", 0.5)
    assert consensus([None, None]) == (None, 0.0) and agreement([None, None]) == [0, 0]


def test_the_share_of_wins():
    assert wins([3, 1, 2]) == [1.0, 0.0, 0.5]
    assert wins([1, 1, 0]) == [0.75, 0.75, 0.0]  # a tie is half a win: (1/2 + 1) / 2
    assert wins([5]) == [0.5]


def test_no_answer_wins_in_a_cycle_and_wins_always_add_up():
    assert wins("rsp", lambda a, b: a + b in ("rs", "sp", "pr")) == [0.5, 0.5, 0.5]
    rng = np.random.default_rng(0)
    for count in (2, 5, 9):
        preferred = rng.random((count, count)) < 0.5
        assert sum(wins(range(count), lambda a, b, preferred=preferred: preferred[a, b])) == pytest.approx(
            count / 2
        )


def test_crowding_counts_texts_that_are_near():
    # abcd: abc bcd; abce: abc bce, which share 1 of 3 runs; abcd and abcd share all.
    assert crowding(["abcd", "abcd", "abce"], near=0.5) == [2 / 3, 2 / 3, 1 / 3]
    assert crowding(["abcd", "abcd", "abce"], near=0.3) == [1.0, 1.0, 1.0]
    assert crowding(["", "a"]) == [0.5, 0.5]


def test_changes_add_up_to_the_last_value():
    assert changes([0.25, 1.0, 0.5]) == [0.25, 0.75, -0.5] and sum(
        changes([0.2, 0.9], start=0.5)
    ) == pytest.approx(0.4)
    assert changes([]) == []
