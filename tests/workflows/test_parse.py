import time

import pytest
from pace import slowness

from marl_jax.workflows.parse import majority, pick, strategies, verdict


@pytest.mark.parametrize(
    ("text", "n", "chosen"),
    [
        (r"I choose \boxed{2}", 3, "2"),
        (r"\boxed{1} no, \boxed{3}", 3, "3"),  # the last box counts
        (r"\boxed{Candidate 2}", 3, "2"),
        (r"\boxed{\text{2}}", 3, "2"),
        (r"\boxed{ 02. }", 3, "2"),
        (r"Of 3 candidates: \boxed{\text{\textbf{2}}}", 3, "2"),
        (r"\boxed{7} or rather 3", 3, "3"),  # out of range: the first digit that is in range
        ("candidate 3, not 1", 3, "3"),
        ("the 9 is wrong, so 2", 3, "2"),
        (r"\boxed{", 3, None),
        ("neither", 3, None),
        ("0 or 4", 3, None),
        ("", 3, None),
        (r"\boxed{12}", 12, "12"),
        ("number 13, or 11", 12, "11"),
    ],
)
def test_a_pick_is_the_boxed_number_or_the_first_digit_in_range(text, n, chosen):
    assert pick(text, n) == chosen


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (r"All steps hold. \boxed{Correct}", "Correct"),
        (r"\boxed{Incorrect}: step 2", "Incorrect"),
        (r"\boxed{\text{Correct}}", "Correct"),
        (r"\boxed{\mathbf{Correct}}", "Correct"),
        (r"\boxed{\boxed{Incorrect}}", "Incorrect"),
        (r"\boxed{\text{\textbf{Correct}}}", "Correct"),
        (r"\boxed{Correct} \boxed{Inc", "Correct"),  # one that was cut is none
        (r"\boxed{\neg Correct}", None),
        (r"\boxed{ INCORRECT. }", "Incorrect"),
        (r"\boxed{Correct} ... no: \boxed{Incorrect}", "Incorrect"),
        (r"\boxed{mostly correct}", None),
        ("Correct", None),  # not in a box
        (r"\boxed{}", None),
        ("", None),
    ],
)
def test_a_verdict_is_the_boxed_word(text, word):
    assert verdict(text) == word


def test_strategies_are_the_text_of_their_lines_in_order():
    text = "Sure!\nSTRATEGY 1: count\n  **STRATEGY 2:** bound it\nstrategy 3 : guess\nSTRATEGY 4: extra\n"
    assert strategies(text, 3) == ["count", "bound it", "guess"]
    assert strategies(text, 10)[3] == "extra"


def test_lines_without_a_strategy_are_none():
    assert strategies("STRATEGY 1:   \nSTRATEGY one: x\nA STRATEGY 2: y\nplan", 3) == []


def test_the_majority_is_the_first_of_the_most_frequent_readable_answers():
    assert majority(["4", None, "7", "7"]) == 2
    assert majority(["4", "7"]) == 0
    assert majority([None, None, "1"]) == 2
    assert majority([None, None]) == 0


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 20000,
        "\\boxed{" + "a" * 100000,
        "STRATEGY 1: " + "* " * 50000 + "a",
        "\n" * 100000,
        "1" * 100000,
    ],
)
def test_no_text_makes_a_reader_slow(text):
    start = time.thread_time()
    pick(text, 3), pick(text, 20), verdict(text), strategies(text, 3)
    assert time.thread_time() - start < 2 * slowness()
