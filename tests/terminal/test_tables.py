"""Tables of a terminal: 80 columns, whole words."""

import re

from marl_jax.terminal.tables import aligned, filled

WORDS = "of the verdicts on answers that can be graded were right, and the others were not; unreadable 1.0%"


def test_a_narrow_table_is_one_block():
    assert aligned([["", "a", "bb"], ["row", "10", "2"]], left=1) == "      a  bb\nrow  10   2"


def test_columns_that_do_not_fit_stand_below_behind_the_first_one():
    rows = [["name", *(f"column {i}" for i in range(12))], ["row", *(str(i) for i in range(12))]]
    blocks = aligned(rows, left=1).split("\n\n")
    assert len(blocks) == 2 and all(block.splitlines()[1].startswith("row") for block in blocks)
    assert max(len(line) for block in blocks for line in block.splitlines()) <= 80
    shown = [re.findall(r"column \d+", block) for block in blocks]
    assert [*shown[0], *shown[1]] == rows[0][1:]
    assert " ".join(block.splitlines()[1].removeprefix("row") for block in blocks).split() == rows[1][1:]


def test_words_are_wrapped_under_their_column_and_never_broken():
    lines = aligned([["role", "step", "own work"], ["generator", "100", WORDS]], left=3).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) == 3
    assert [line.index("own") for line in lines[:1]] == [17] and lines[2].startswith(" " * 17)
    assert " ".join(lines[1:]).split()[2:] == WORDS.split()


def test_a_word_that_is_wider_than_the_terminal_stays_whole():
    path = "/a" * 60
    assert path in filled(f"written to {path}").split()
