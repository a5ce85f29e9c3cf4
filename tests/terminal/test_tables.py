"""Tables of a terminal: 80 columns, whole words."""

import re

from marl_jax.terminal.tables import aligned, filled, table

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


def test_rows_with_long_or_equal_names_have_numbers_where_they_go_on_below():
    long = "single_token_matched-shared-xs-math (tokens 70)"
    values = ["90.1% (88.3 – 92.0, 2 of 3 seeds)"] * 3
    for names in ([long, long + "!"], ["equal", "equal"]):
        rows = [["", "against", *"abc"], *([name, long, *values] for name in names)]
        text = aligned(rows, left=2)
        assert max(map(len, text.splitlines())) <= 80
        blocks = [[line.split() for line in block.splitlines()[1:]] for block in text.split("\n\n")]
        assert len(blocks) > 2 and all([row[0] for row in block] == ["1", "2"] for block in blocks)
        words = " ".join(word for block in blocks for row in block for word in row)
        assert words.count(values[0]) == 6 and all(name in words for name in names)
    alone = [["", "a"], ["equal", "1"], ["equal", "2"]]  # and where they fit, none
    assert aligned(alone, left=1) == "       a\nequal  1\nequal  2"


def test_words_are_wrapped_under_their_column_and_never_broken():
    lines = aligned([["role", "step", "own work"], ["generator", "100", WORDS]], left=3).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) == 3
    assert [line.index("own") for line in lines[:1]] == [17] and lines[2].startswith(" " * 17)
    assert " ".join(lines[1:]).split()[2:] == WORDS.split()


def test_a_word_that_is_wider_than_the_terminal_stays_whole():
    path = "/a" * 60
    assert path in filled(f"written to {path}").split()


def test_a_difference_is_in_points():
    names = ("accuracy", "ci_low", "ci_high", "any_correct", "calls_per_episode", "tokens_per_episode")
    record = {
        "split": "test",
        "problems": 4,
        "samples": 1,
        "mode": "trained",
        "seed": 0,
        "step": 100,
        "errors": 0,
    }
    record |= dict.fromkeys(names, 0.5) | {"pass_at_k": {"1": 0.5}, "roles": {}}
    said = table([record | {"difference": {"mean": 0.252, "low": 0.14, "high": 0.36}}])
    assert "over base, points" in said and "+25.2  +14.0 .. +36.0*" in said
