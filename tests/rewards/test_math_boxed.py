r"""The parser that finds the boxed answer."""

import time

import pytest
from pace import slowness

from marl_jax.rewards import extract_boxed


@pytest.mark.parametrize(
    ("text", "answer", "why"),
    [
        (r"so $\boxed{42}$.", "42", "the plain case"),
        (r"\fbox{7}", "7", "fbox is a box"),
        (r"\boxed {5}", "5", "a space before the brace"),
        ("\\boxed{\n5\n}", "5", "white space around the answer"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}", "braces nest"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}", "escaped braces do not nest"),
        (r"\boxed{\{1, 2}", r"\{1, 2", "an escaped brace does not open a group"),
        (r"\boxed{1 \\} 2}", r"1 \\", "a line break is no escape"),
        (r"\boxed{1} and \boxed{2}", "2", "the last of several"),
        (r"\boxed{a \fbox{b} c}", r"a \fbox{b} c", "a box inside of an answer belongs to it"),
        (r"\boxed{\boxed{5}}", "5", "a box of a box"),
        (r"\boxed{1} then \boxed{2", "1", "a cut box is skipped"),
        (r"\boxed{ {5 } x", None, "a box that never closes"),
        (r"{ \boxed{3}", "3", "a stray brace before"),
        (r"\boxed 5", "5", "no braces: up to white space"),
        (r"\boxed 42.", "42", "no braces: without the full stop"),
        (r"$\boxed5$", "5", "no braces: up to the dollar"),
        (r"$\boxed \frac{1}{2}$ ok", r"\frac{1}{2}", "no braces: a command with its arguments"),
        (r"\boxed", None, "nothing after the command"),
        (r"\boxed{}", None, "an empty box"),
        (r"\boxed{1} \boxed{ }", None, "an empty box after a full one"),
        (r"\boxedanswer{5}", None, "another command"),
        ("boxed{5}", None, "no command"),
        ("", None, "nothing"),
    ],
)
def test_the_last_complete_box_is_read(text, answer, why):
    assert extract_boxed(text) == answer, why


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 150_000,
        "\\boxed{" + "{" * 1_000_000,
        "\\boxed{" + "\\" * 1_000_000,
        "\\boxed " * 150_000,
        "\\boxed " + "{}" * 500_000,
        "\\boxed" + " " * 1_000_000 + "{5}",
        "{}" * 500_000,
    ],
    ids=["boxes", "braces", "escapes", "bare boxes", "bare groups", "spaces", "no box"],
)
def test_a_megabyte_of_noise_is_read_at_once(text):
    begun = time.thread_time()
    extract_boxed(text)
    assert time.thread_time() - begun < slowness()
