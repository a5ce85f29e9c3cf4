"""Fields are set from texts by their annotations; every mistake is told, and the valid rest still applies."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from annotated_types import Ge, Gt, Le, Lt, MinLen

from marl_jax import fields


@dataclasses.dataclass(frozen=True)
class Leaf:
    low: int = 0
    high: int = 10

    def __post_init__(self) -> None:
        if self.low < 0:
            raise ValueError(f"low {self.low} is negative")
        if self.high > 99:
            raise ValueError(f"high {self.high} is too high")
        if self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}")


@dataclasses.dataclass(frozen=True)
class Tree:
    leaf: Leaf = dataclasses.field(default_factory=Leaf)
    rate: float = 0.5
    on: bool = False
    name: str = "x"
    kind: Literal["one", "two"] = "one"
    limit: float | None = None
    sizes: tuple[int, ...] = (1,)
    words: tuple[str, ...] = ()
    pair: tuple[int, int] | None = None
    table: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"a": 1.0})
    deep: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)


@pytest.mark.parametrize(
    "path, text, expected",
    [
        ("rate", "1e-3", 0.001),
        ("rate", "2", 2.0),
        ("on", "true", True),
        ("on", None, True),
        ("on", "0", False),
        ("name", "none", "none"),
        ("name", "", ""),
        ("kind", "two", "two"),
        ("limit", "none", None),
        ("limit", "3", 3.0),
        ("sizes", "1,2,3", (1, 2, 3)),
        ("sizes", "(4,)", (4,)),
        ("sizes", "[]", ()),
        ("words", "a, b", ("a", "b")),
        ("words", '["a"]', ("a",)),
        ("words", '["a, b", "\\n"]', ("a, b", "\n")),
        ("words", "[a, b]", ("a", "b")),
        ("sizes", '[1, "2"]', (1, 2)),
        ("pair", "5,6", (5, 6)),
        ("table", '{"b": 2}', {"b": 2.0}),
        ("table.b/1", "2", {"a": 1.0, "b/1": 2.0}),
        ("deep.r.k", "0.5", {"r": {"k": 0.5}}),
        ("deep.r.k", "word", {"r": {"k": "word"}}),
        ("deep.r.k", "none", {"r": {"k": None}}),
        ("deep.r.k", "[1, 2]", {"r": {"k": (1, 2)}}),
    ],
)
def test_a_text_becomes_what_the_annotation_says(path, text, expected):
    tree, problems = fields.change(Tree(), [(path, text)])
    value = getattr(tree, path.split(".")[0])
    assert not problems
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    "path, text, message",
    [
        ("rate", "fast", "rate is 'fast'; it must be a finite number"),
        ("rate", "nan", "a finite number"),
        ("rate", None, "rate is given without a value"),
        ("on", "maybe", "true or false"),
        ("kind", "three", "'one' or 'two'"),
        ("limit", "low", "a finite number or none"),
        ("sizes", "1,x", "any number of values with commas between (or a JSON list), each an integer"),
        ("sizes", "1.5", "each an integer"),
        ("words", '["a, b", "c"', "; it must be a JSON list that can be read: Expecting ',' delimiter"),
        ("pair", "1,2,3", "2 values with commas between (or a JSON list), each an integer or none"),
        ("table", "a=1", "a JSON object"),
        ("table", '{"a": 1', "a JSON object that can be read: Expecting ',' delimiter: line 1 column 8"),
        ("table", '{"a": 1, "b": 2, "a": 3}', "a JSON object that can be read: 'a' appears twice"),
        ("table", '{"a": "x"}', "a JSON object whose 'a' is a finite number"),
        ("table.b", "x", "a finite number"),
        ("leaf", "3", "set field by field: low, high"),
        ("leaf", '{"low": 1', "; it must be a JSON object that can be read: Expecting ',' delimiter"),
        ("leaf.lwo", "3", "leaf.lwo is unknown: did you mean 'leaf.low'?"),
        ("low", "3", "low is unknown: did you mean 'leaf.low'?"),
        ("rat", "3", "rat is unknown: did you mean 'rate'?"),
        ("leaf.zzzzz", "3", "leaf.zzzzz is unknown; in leaf there is: low, high"),
        ("leaf.zz", "3", "leaf.zz is unknown; in leaf there is: low, high"),
        ("laef.zz", "3", "laef.zz is unknown; in leaf there is: low, high"),
        ("tabel.b", "3", "tabel.b is unknown: did you mean 'table.b'?"),
        ("leaf.more.lwo", "3", "leaf.more.lwo is unknown: did you mean 'leaf.low'?"),
        ("rate.x", "3", "rate.x is unknown"),
        ("table.b.c", "3", "table.b.c is unknown"),
        ("table.", "3", "table. is unknown"),
        ("", "3", " is unknown"),
        ("__class__", "3", "__class__ is unknown"),
    ],
)
def test_a_wrong_text_is_refused_by_its_path(path, text, message):
    tree, problems = fields.change(Tree(), [(path, text)])
    assert len(problems) == 1 and message in problems[0]
    assert tree == Tree()


def test_every_mistake_is_told_and_the_rest_applies():
    texts = [("leaf.low", "-1"), ("leaf.high", "100"), ("rate", "x"), ("nme", "y"), ("name", "z")]
    tree, problems = fields.change(Tree(), texts)
    assert sorted(problems) == [
        "leaf: high 100 is too high",
        "leaf: low -1 is negative",
        "nme is unknown: did you mean 'name'?",
        "rate is 'x'; it must be a finite number",
    ]
    assert tree == Tree(name="z")


def test_fields_that_are_only_valid_together_are_set_together():
    tree, problems = fields.change(Tree(), [("leaf.low", "20"), ("leaf.high", "30")])
    assert not problems and tree.leaf == Leaf(20, 30)


def test_the_last_of_two_texts_wins_and_entries_add_up():
    tree, problems = fields.change(Tree(), [("rate", "1"), ("rate", "2"), ("table.b", "3"), ("table.c", "4")])
    assert not problems
    assert tree.rate == 2.0 and tree.table == {"a": 1.0, "b": 3.0, "c": 4.0}


def test_json_gives_back_an_equal_tree():
    tree = Tree(Leaf(1, 2), 0.1 + 0.2, sizes=(1, 2), pair=(3, 4), deep={"r": {"k": (1, None, "s")}})
    assert fields.from_json(Tree, json.loads(json.dumps(fields.to_json(tree), allow_nan=False))) == tree


def test_json_from_before_a_field_was_there_is_filled_with_its_default():
    old = {"leaf": {"low": 3}, "rate": 2.0, "extra": 1}
    assert fields.with_defaults(Tree, old) == {**fields.to_json(Tree(Leaf(3, 10), 2.0)), "extra": 1}
    assert fields.with_defaults(Tree, {}) == fields.to_json(Tree())
    pair = dataclasses.make_dataclass("Pair", [("one", int), ("two", int)], frozen=True)
    assert fields.with_defaults(pair, {"one": 1}) == {"one": 1}
    assert fields.with_defaults(Tree, {"leaf": "x"})["leaf"] == "x"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rate": "0.5"}, "rate is '0.5'; it must be a finite number"),
        ({"rate": True}, "rate is True"),
        ({"leaf": {"low": 1}}, "leaf.high is missing"),
        ({"leaf": {"low": 5, "high": 5}}, "leaf: low 5 is not below high 5"),
        ({"extra": 1}, "extra is unknown"),
        ({"kind": "three"}, "kind is 'three'"),
    ],
)
def test_json_that_does_not_fit_is_refused_by_its_path(change, message):
    with pytest.raises(ValueError, match=message):
        fields.from_json(Tree, {**fields.to_json(Tree()), **change})


def test_a_tree_built_in_python_is_as_json_gives_it_back():
    built = Tree(
        Leaf(np.int64(1)), 1, sizes=[1, np.int32(2)], pair=[3, 4], table={"a": 2}, deep={"r": {"k": [1]}}
    )
    values, problems = fields.fit(built)
    tree = Tree(**values)
    assert not problems and built.sizes == [1, 2]
    assert repr(tree) == repr(fields.from_json(Tree, json.loads(json.dumps(fields.to_json(tree)))))
    assert tree == Tree(Leaf(1), 1.0, sizes=(1, 2), pair=(3, 4), table={"a": 2.0}, deep={"r": {"k": (1,)}})


def test_every_value_of_a_wrong_type_in_a_tree_built_in_python_is_told_by_its_path():
    built = Tree(Leaf(2.5), "0.5", 1, kind="One", sizes=3, table={"a": "x", 2: 1.0}, deep=None)
    assert fields.fit(built)[1] == [
        "leaf.low is 2.5; it must be an integer",
        "rate is '0.5'; it must be a finite number",
        "on is 1; it must be true or false",
        "kind is 'One'; it must be 'one' or 'two'",
        "sizes is 3; it must be any number of values with commas between (or a JSON list), each an integer",
        "table has the key 2; it must be a text",
        "table.a is 'x'; it must be a finite number",
        'deep is None; it must be a JSON object such as {"role": ...}, or set entry by entry with .role=value',
    ]
    assert fields.fit(Tree(leaf=3))[1] == ["leaf is 3; it must be Leaf(...)"]


def test_a_group_of_fields_may_be_given_as_a_mapping():
    assert fields.fit(Tree(leaf={"low": 1, "high": np.int32(2)}))[0]["leaf"] == Leaf(1, 2)
    assert fields.fit(Tree(leaf={"low": 1}))[1] == ["leaf.high is missing"]
    assert fields.fit(Tree(leaf={"low": 3, "high": 2}))[1] == ["leaf: low 3 is not below high 2"]


@dataclasses.dataclass(frozen=True)
class Bounded:
    count: Annotated[int, Ge(1)] = 1
    share: Annotated[float, Gt(0), Le(1)] = 1.0
    most: Annotated[int | None, Ge(1)] = None


@dataclasses.dataclass(frozen=True)
class Group:
    inner: Bounded
    seed: Annotated[int, Ge(0)] = 0


def test_a_number_beyond_the_bounds_that_its_field_declares_is_told_by_its_path():
    assert not list(fields.out_of_bounds(Group(Bounded())))
    assert not list(fields.out_of_bounds(Group(Bounded(1, 1e-9, 1))))
    assert list(fields.out_of_bounds(Group(Bounded(0, 0.0, 0), -1))) == [
        "inner.count is 0; it must be at least 1",
        "inner.share is 0.0; it must be more than 0",
        "inner.most is 0; it must be at least 1",
        "seed is -1; it must be at least 0",
    ]
    assert list(fields.out_of_bounds(Bounded(share=1.5))) == ["share is 1.5; it must be at most 1"]
    changed, problems = fields.change(Bounded(), [("count", "2"), ("most", "none"), ("share", "x")])
    assert changed == Bounded(2) and problems == ["share is 'x'; it must be a finite number"]


def test_a_number_that_no_float_can_hold_is_refused():
    assert fields.misfit(float, 10**400) == "a finite number"
    assert fields.misfit(Any, 10**400) is None


@dataclasses.dataclass(frozen=True)
class Checked:
    mode: Literal["sum", "mean"] = "sum"
    counts: tuple[Annotated[int, Ge(1)], ...] = ()
    rates: Mapping[str, Annotated[float, Ge(0), Lt(1)]] = dataclasses.field(default_factory=dict)
    words: tuple[Annotated[str, MinLen(1)], ...] = ()
    inner: Bounded = Bounded()

    def __post_init__(self):
        fields.check(self)


def test_a_dataclass_that_checks_itself_holds_values_of_its_types():
    made = Checked(counts=[1, np.int64(2)], rates={"a": 0}, inner=Bounded(2))
    assert made == Checked(counts=(1, 2), rates={"a": 0.0}, inner=Bounded(2))
    assert type(made.counts) is tuple and type(made.counts[1]) is int and type(made.rates["a"]) is float


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mode": "median"}, "mode is 'median'; it must be 'sum' or 'mean'"),
        ({"counts": (1, 0)}, "counts is 0; it must be at least 1"),
        (
            {"counts": 3},
            "counts is 3; it must be any number of values with commas between (or a JSON list), each an integer",
        ),
        ({"rates": {"a": 0.5, "b": 1}}, "rates.b is 1.0; it must be less than 1"),
        ({"rates": {"a": float("nan")}}, "rates.a is nan; it must be a finite number"),
        ({"words": ("a", "")}, "words is ''; it must not be empty"),
        ({"inner": Bounded(0)}, "inner.count is 0; it must be at least 1"),
        ({"inner": None}, "inner is None; it must be Bounded(...)"),
        (
            {"mode": 3, "words": 4},
            "mode is 3; it must be 'sum' or 'mean'; words is 4; it must be any number of "
            "values with commas between (or a JSON list), each a text",
        ),
    ],
)
def test_a_dataclass_that_checks_itself_refuses_the_rest_in_one_line(wrong, message):
    with pytest.raises(ValueError) as error:
        Checked(**wrong)
    assert str(error.value) == message


@dataclasses.dataclass(frozen=True)
class Holder:
    checked: Checked = Checked()


def test_every_mistake_that_a_dataclass_finds_in_itself_is_told_once():
    wrong = [("checked.counts", "0,2"), ("checked.mode", "mean"), ("checked.rates.a", "7")]
    changed, problems = fields.change(Holder(), wrong)
    assert problems == [
        "checked: counts is 0; it must be at least 1",
        "checked: rates.a is 7.0; it must be less than 1",
    ]
    assert changed == Holder(Checked("mean"))
