"""Groups are an explicit key, and what cannot teach is counted."""

import jax.numpy as jnp
import numpy as np
import pytest

from marl_jax.learning.estimators.groups import GroupCounts, count_groups, group_ids, group_key, informative
from marl_jax.workflows import debate, eval_opt, orch_workers, voting

ROWS = {
    "task": ["t0", "t0", "t0", "t0", "t1", "t1"],
    "role": ["generator", "generator", "aggregator", "generator", "generator", "aggregator"],
    "slot": [0, 1, 0, 0, 0, 0],
    "turn": [0, 0, 0, 1, 0, 0],
}


@pytest.mark.parametrize(
    ("name", "workflow", "expected"),
    [
        ("task", None, [0, 0, 0, 0, 1, 1]),
        ("role", None, [0, 0, 1, 0, 2, 3]),
        ("role_turn", None, [0, 0, 1, 2, 3, 4]),
        ("task,role,slot,turn", None, [0, 1, 2, 3, 4, 5]),
        (("turn", "task"), None, [0, 0, 0, 1, 2, 2]),
        ("study", voting, [0, 1, 2, 0, 3, 4]),
        ("study", orch_workers, [0, 0, 1, 0, 2, 3]),
        ("study", eval_opt, [0, 0, 1, 0, 2, 3]),
    ],
)
def test_rows_with_the_same_key_are_one_group(name, workflow, expected):
    key = group_key(name, workflow and workflow.groups)
    np.testing.assert_array_equal(group_ids(key, **ROWS), expected)


@pytest.mark.parametrize("name", ["taks", "task,rule", "", ("task", "episode"), ()])
def test_a_key_that_names_no_field_is_refused(name):
    with pytest.raises(ValueError, match="names no field"):
        group_key(name)


@pytest.mark.parametrize("declared", [None, debate.groups], ids=["nowhere", "by another workflow"])
def test_the_study_key_needs_a_workflow_that_declares_it(declared):
    with pytest.raises(ValueError, match=r"this workflow declares no group 'study', .*: name fields"):
        group_key("study", declared)


def test_a_workflow_may_declare_presets_of_its_own():
    declared = {"study": ("task", "role", "slot"), "rounds": ("turn", "task")}
    assert group_key("study", declared) == ("task", "role", "slot")
    assert group_key("rounds", declared) == ("task", "turn")  # in the order of the fields
    assert group_key("role", declared) == ("task", "role")
    with pytest.raises(ValueError, match="group 'role' is built in"):
        group_key("role", {"role": ("slot",)})


def test_singletons_and_zero_variance_are_counted_per_role():
    rewards = [1, 1, 0, 1, 0, 1, 0.5]
    groups = np.array([0, 0, 1, 2, 2, 3, 1])
    roles = ["g", "g", "a", "g", "g", "a", "a"]
    assert count_groups(rewards, groups, roles) == {"g": GroupCounts(2, 0, 1), "a": GroupCounts(2, 1, 0)}
    assert informative(rewards, groups).tolist() == [False, False, True, True, True, False, True]


@pytest.mark.parametrize(
    "groups",
    [
        np.array([-1, 3, 3, 0, 0]),  # calls without tokens are of group -1
        [-1, 3, 3, 0, 0],
        jnp.array([-1, 3, 3, 0, 0]),
        np.array([-1, 10**12, 10**12, 0, 0]),
        [-1, ("t", 0), ("t", 0), "u", "u"],
    ],
    ids=["array", "list", "device", "large", "keys"],
)
def test_groups_may_be_any_keys_and_rows_of_none_count_for_nothing(groups):
    rewards, roles = [0.0, 1.0, 0.0, 1.0, 1.0], ["silent", "g", "g", "g", "a"]
    assert informative(rewards, groups).tolist() == [False, True, True, False, False]
    assert count_groups(rewards, groups, roles) == {"g": GroupCounts(2, 0, 1), "a": GroupCounts(1, 0, 1)}


def test_of_no_rows_nothing_is_counted():
    assert informative([], []).tolist() == [] and count_groups([], [], []) == {}


def test_a_group_that_spans_roles_counts_for_each_of_them():
    counts = count_groups([1, 1], np.array([0, 0]), ["g", "a"])
    assert counts == {"g": GroupCounts(1, 0, 1), "a": GroupCounts(1, 0, 1)}


def test_rewards_that_are_one_number_on_the_device_do_not_vary():
    rewards, groups = [0.1 + 0.2, 0.3], np.array([0, 0])
    assert informative(rewards, groups).tolist() == [False, False]
    assert count_groups(rewards, groups, ["g", "g"])["g"].zero_variance == 1
