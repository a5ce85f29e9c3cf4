"""Answers are equal by value and type; printed text by words, numbers within a tolerance."""

import itertools
import math
import random
import time

import pytest
from pace import slowness

from marl_jax.rewards import same_output, same_value
from marl_jax.rewards.compare import same_packed
from marl_jax.rewards.sandbox import plain

NAN, INF = math.nan, math.inf

EQUAL = [
    (1, 1),
    (1, 1.0),
    (1.0, 1),
    (0.1 + 0.2, 0.3),
    (1e-7, 0.0),
    (10**17, 1e17),
    (10**400, 10**400),
    (-0.0, 0.0),
    (NAN, NAN),
    (INF, INF),
    (-INF, -INF),
    (1 + 2j, 1.0000000001 + 2j),
    (True, True),
    (None, None),
    ("é\ud800", "é\ud800"),
    (b"\x00\xff", b"\x00\xff"),
    ([1, 2], (1, 2)),
    ((), []),
    ([(1, [2.0])], ([1, (2,)],)),
    ({1, 2}, {2, 1}),
    ({0.1 + 0.2, "x", None, (1, 2)}, {(1, 2), None, "x", 0.3}),
    (frozenset({1}), frozenset({1})),
    ({frozenset({1, 2})}, {frozenset({2, 1})}),
    ({"a": 1, "b": [2]}, {"b": (2.0,), "a": 1}),
    ({1: "x", (1, 2): {3}}, {(1, 2): {3}, 1: "x"}),
    ({1: 2}, {1.0: 2}),
    ({}, {}),
    # Members that are close but not equal, and so sort otherwise on the two sides.
    ({(1.0, 5), (1.0000001, 3)}, {(1.0000001, 5), (1.0, 3)}),
    ({10**7, 10**7 + 1}, {10**7 - 0.5, 10**7}),
    ({frozenset({1.0, 8}), frozenset({1.0000001, 7})}, {frozenset({1.0, 7}), frozenset({1.0000001, 8})}),
    ({(1.0, 5): "x", (1.0000001, 3): "y"}, {(1.0000001, 5): "x", (1.0, 3): "y"}),
    ({1.0: "x", 1.0000001: "y"}, {1.0: "y", 1.0000001: "x"}),
    ({(0.12345 + n * 1e-10, n) for n in range(100)}, {(0.12345 - n * 1e-10, n) for n in range(100)}),
]

DIFFERENT = [
    (True, 1),
    (1, True),
    (False, 0.0),
    ([True], [1]),
    ({True}, {1}),
    ({True: 1}, {1: 1}),
    ({"a": 1}, {"a": True}),
    (None, False),
    (None, 0),
    ("1", 1),
    ("a", "a "),
    (b"a", "a"),
    (1.0, 1.00001),
    (1_000_000, 1_000_001),
    (10**17, 10**17 + 1),
    (10**400, INF),
    (10**400, 1.0),
    (INF, -INF),
    (NAN, 0.0),
    (1 + 0j, 1),
    ([1], [1, 1]),
    ([], {}),
    ([], set()),
    ({}, set()),
    ({1}, [1]),
    ({1}, frozenset({1})),
    ({1: 2}, {1: 3}),
    ({1: 2}, {2: 2}),
    ({(1, 2)}, {(1, 3)}),
    ([[1, 2], [3]], [[1], [2, 3]]),
    ({1.0, 1.0000005}, {1.0, 2.0}),  # two for one
    ({1.0000005, 1.000002}, {1.0, 1.0000004}),
    ({(1.0, 5), (1.0000001, 5)}, {(1.0, 5), (1.0000001, 3)}),
]


@pytest.mark.parametrize("one, other", EQUAL)
def test_equal_values(one, other):
    assert same_value(one, other)
    assert same_value(other, one)


@pytest.mark.parametrize("one, other", DIFFERENT)
def test_different_values(one, other):
    assert not same_value(one, other)
    assert not same_value(other, one)


@pytest.mark.parametrize("value", [value for pair in EQUAL + DIFFERENT for value in pair])
def test_values_survive_the_border(value):
    back = plain.unpack(plain.loads(plain.dumps(plain.pack(value))))
    assert type(back) is type(value)
    assert back == value or value != value


@pytest.mark.parametrize(
    "forged",
    [
        *(
            {},
            {"x": 1},
            {"t": 1},
            {"t": [1], "s": []},
            {"f": "1"},
            {"i": 5},
            {"i": "zz"},
            {"b": 1},
            {"c": "11"},
        ),
        *({"d": [1]}, {"d": [[1]]}, {"d": [[1, 2, 3]]}, {"s": [{"q": 1}]}, {"s": [{}]}, {"d": [[{}, 2]]}),
    ],
)
def test_what_no_value_packs_to_equals_nothing(forged):
    for expected in ({1: 2}, {1}, (1,), [1], 1, 1.0, b"", 1j, "x", None):
        assert not same_packed(forged, plain.pack(expected))
        assert not same_packed([forged], plain.pack([expected]))


def test_subclasses_count_as_their_base():
    import collections
    import enum

    class Color(enum.IntEnum):
        RED = 1

    point = collections.namedtuple("Point", "x y")(1, 2)
    assert same_value(point, (1, 2))
    assert same_value(collections.Counter("aab"), {"a": 2, "b": 1})
    assert same_value(collections.OrderedDict(a=1), {"a": 1})
    assert same_value(collections.defaultdict(list, {1: [2]}), {1: [2]})
    assert same_value(Color.RED, 1)
    assert same_value(collections.ChainMap({1: [2]}, {1: 3, 4: 5}), {1: [2], 4: 5})


@pytest.mark.parametrize(
    "value", [object(), range(3), iter([]), {1: object()}, [print], bytearray(b"x"), int]
)
def test_other_objects_are_not_plain(value):
    with pytest.raises(plain.NotPlain, match="a value of type"):
        plain.pack(value)


def test_members_are_paired_wherever_they_can_be():
    numbers = (1, 2, 1.0, 1 + 4e-7, 1 - 4e-7, 1 + 8e-7, 10**7, 10**7 + 1, 10**7 + 0.5, 10**7 + 9.0)
    draw, found = random.Random(0), 0
    for _ in range(1500):
        pairs = [(draw.choice(numbers), draw.choice(numbers)) for _ in range(draw.randint(1, 5))]
        one = {pair if draw.random() < 0.5 else pair[0] for pair in pairs}
        other = {pair if draw.random() < 0.5 else pair[0] + draw.choice((0, 3e-7, -7e-7)) for pair in pairs}
        by_hand = len(one) == len(other) and any(
            all(map(same_value, one, order)) for order in itertools.permutations(other)
        )
        assert same_value(one, other) == by_hand, (one, other)
        found += by_hand
    assert 100 < found < 1400, found


def test_the_search_for_a_pairing_has_a_bound():
    close = plain.pack({(1 + n * 1e-10, m) for n in range(40) for m in range(40)})
    forged = {"s": [{"t": [1 + n * 1e-10, m]} for n in range(40) for m in [*range(1, 40), 1]]}
    begun = time.thread_time()
    assert not same_packed(forged, close)
    assert not same_packed({"s": [forged] * 4}, {"s": [close] * 4})
    assert time.thread_time() - begun < 2 * slowness()


def test_hostile_values_cost_no_more_than_sorting():
    colliding = {"s": [n * (2**61 - 1) for n in range(20_000)]}
    expected = plain.pack({n * (2**61 - 1) + 1 for n in range(300)} | set(range(19_700)))
    start = time.thread_time()
    assert not same_packed(colliding, expected)
    assert not same_packed(plain.loads("[" * 900 + "]" * 900), plain.pack([[[1]]]))
    with pytest.raises(ValueError):
        plain.loads("[" * 1_000_000)
    with pytest.raises(ValueError):
        plain.loads("NaN")
    assert time.thread_time() - start < 2 * slowness()


SAME_TEXT = [
    ("1 2\n", "1  2"),
    ("\n1\n\n2\n\n", "1\n2\n"),
    ("YES\r\n", "YES\n"),
    ("a\tb ", " a b"),
    ("0.333333", "0.333333333333"),
    ("3", "3.0"),
    ("3.0000001", "3"),
    ("+5 -0", "5 0"),
    ("1e3", "1000"),
    (".5", "0.5"),
    ("", "\n"),
    ("9" * 5000, "9" * 5000),
]

OTHER_TEXT = [
    ("1 2", "1\n2"),
    ("12", "1 2"),
    ("YES", "yes"),
    ("1000000", "1000001"),
    ("9" * 30, "9" * 29 + "8"),
    ("0.1", "0.2"),
    ("1e999", "1e998"),
    ("nan", "1"),
    ("inf", "1e999"),
    ("1_000", "1000"),
    ("1", "1 1"),
    ("1", "1\n1"),
    ("", "1"),
    ("-1", "1"),
    ("٣", "3"),
]


@pytest.mark.parametrize("one, other", SAME_TEXT, ids=lambda text: repr(text)[:20])
def test_same_text(one, other):
    assert same_output(one, other)
    assert same_output(other, one)


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1000000.5", "1000000", False),  # n / 2 for n // 2
        ("1000000.0", "1000000", True),
        ("101010100000000000000000.0", "101010101010101010101010", False),
        ("1e24", "1" + "0" * 24, False),  # more digits than a float has: print an int
        ("1000000", "1000000.5", True),  # a float is expected: relative
        ("3.0000001", "3", True),
        ("007", "7", True),
        ("11", "0011", False),  # a text of digits is expected
        ("11.0", "0011", False),
        ("0011", "0011", True),
    ],
)
def test_a_number_is_as_exact_as_the_int_that_is_expected(printed, expected, same):
    assert same_output(printed, expected) is same


@pytest.mark.parametrize("one, other", OTHER_TEXT, ids=lambda text: repr(text)[:20])
def test_other_text(one, other):
    assert not same_output(one, other)
    assert not same_output(other, one)
