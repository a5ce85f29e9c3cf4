import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_jax.policies import (
    PolicySpec,
    SamplingSettings,
    decode_groups,
    init_policies,
    is_frozen,
    isolated,
    policy_names,
    policy_of,
    role_settings,
    shared,
    stack,
    trained_policies,
    validate_map,
)

ROLES = ("generator", "aggregator")


# ---------------------------------------------------------------- maps


def test_shared_is_one_policy_and_isolated_one_per_role():
    assert shared(ROLES) == {"generator": "p0", "aggregator": "p0"}
    assert isolated(ROLES) == {"generator": "p0", "aggregator": "p1"}
    assert shared(["solo"]) == isolated(["solo"])


@pytest.mark.parametrize("roles", [(), "generator", ("a", "a"), ("a", ""), ("a", 5), ("a", "a/1")])
@pytest.mark.parametrize("make", [shared, isolated])
def test_roles_must_be_distinct_names(make, roles):
    with pytest.raises(ValueError, match="distinct names"):
        make(roles)


def test_a_misspelt_role_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"'generater'.*did you mean 'generator'"):
        validate_map({"generater": "p0", "aggregator": "p0"}, ROLES)


def test_a_role_of_a_map_is_a_name():
    with pytest.raises(ValueError, match="names '5', which is no role"):
        validate_map({5: "p0", **shared(ROLES)}, ROLES)
    with pytest.raises(ValueError, match="map is 'shared'; it must be a mapping"):
        validate_map("shared", ROLES)


def test_a_missing_role_is_refused_by_name():
    with pytest.raises(ValueError, match="lacks the role 'aggregator'"):
        validate_map({"generator": "p0"}, ROLES)


def test_roles_match_by_their_exact_name_alone():
    roles = ("worker", "co_worker")
    validate_map({"worker": "p0", "co_worker": "p1"}, roles)
    assert policy_of({"worker": "p0", "co_worker": "p1"}, "co_worker") == "p1"
    with pytest.raises(ValueError, match="lacks the role 'co_worker'"):
        validate_map({"worker": "p0"}, roles)


def test_each_voter_can_have_a_policy_of_its_own():
    voters = {"generator/0": "a", "generator/1": "b", "aggregator": "a"}
    validate_map(voters, ROLES)
    assert [policy_of(voters, "generator", slot) for slot in (0, 1)] == ["a", "b"]
    with pytest.raises(ValueError, match="neither 'generator/2' nor 'generator'"):
        policy_of(voters, "generator", 2)
    assert policy_of({**voters, "generator": "rest"}, "generator", 2) == "rest"
    assert policy_names(voters) == ("a", "b")


@pytest.mark.parametrize("key", ["generator/x", "generator/01", "generator/-1", "generator/"])
def test_a_slot_is_a_plain_number(key):
    with pytest.raises(ValueError, match="no role of the workflow"):
        validate_map({**shared(ROLES), key: "p0"}, ROLES)


def test_a_policy_is_a_name():
    with pytest.raises(ValueError, match="'aggregator' the policy None"):
        validate_map({"generator": "p0", "aggregator": None}, ROLES)


def test_a_frozen_role_is_served_and_trains_nothing():
    assert trained_policies(isolated(ROLES), ["aggregator"]) == ("p0",)
    assert trained_policies(shared(ROLES), ["aggregator"]) == ("p0",)
    assert trained_policies(shared(ROLES), ROLES) == ()
    assert trained_policies({"generator/0": "a", "generator/1": "b"}, ["generator/1"]) == ("a",)
    assert trained_policies({"generator/0": "a", "generator/1": "b"}, ["generator"]) == ()
    with pytest.raises(ValueError, match=r"'agregator'.*did you mean 'aggregator'"):
        trained_policies(shared(ROLES), ["agregator"])


def test_a_frozen_slot_without_a_policy_of_its_own_leaves_its_policy_to_the_other_slots():
    assert trained_policies(isolated(ROLES), ["generator/1"]) == ("p0", "p1")
    assert trained_policies({**isolated(ROLES), "generator/1": "own"}, ["generator/1"]) == ("p0", "p1")
    for unknown in ("generator/x", "worker/1"):
        with pytest.raises(ValueError, match=f"frozen role '{unknown}' is not in the policy map"):
            trained_policies(isolated(ROLES), [unknown])
    with pytest.raises(ValueError, match="frozen role 'generator/2' is not in the policy map"):
        trained_policies({"generator/0": "a", "generator/1": "b"}, ["generator/2"])


# ---------------------------------------------------------------- state


def bases():
    return {"base": {"w": jnp.arange(3.0)}, "other": {"w": jnp.arange(3.0) + 10}}


def test_each_policy_starts_from_its_own_base():
    specs = {
        "p0": PolicySpec(),
        "p1": PolicySpec(base="other"),
        "p2": PolicySpec(lora=True),
        "p3": PolicySpec(frozen=True),
    }
    start = bases()
    trees = init_policies(specs, start, lambda policy: {"a": jnp.ones(2, jnp.bfloat16)})
    np.testing.assert_array_equal(trees["p1"]["w"], [10, 11, 12])
    np.testing.assert_array_equal(trees["p2"]["a"], [1, 1])
    assert trees["p2"]["a"].dtype == jnp.float32  # whatever the model computes in
    assert trees["p3"] is start["base"]


def test_training_a_policy_leaves_its_base_behind_as_the_reference():
    start = bases()
    tree = init_policies({"p0": PolicySpec()}, start)["p0"]
    tree = jax.jit(lambda t: jax.tree.map(lambda w: w + 1, t), donate_argnums=0)(tree)
    np.testing.assert_array_equal(tree["w"], [1, 2, 3])
    np.testing.assert_array_equal(start["base"]["w"], [0, 1, 2])


def test_a_frozen_policy_has_no_adapters():
    with pytest.raises(ValueError, match="a frozen policy is its base, without adapters to train"):
        PolicySpec(lora=True, frozen=True)


def test_an_unknown_base_and_missing_adapters_are_refused():
    with pytest.raises(ValueError, match=r"starts from 'bsae'.*did you mean 'base'"):
        init_policies({"p0": PolicySpec(base="bsae")}, bases())
    with pytest.raises(ValueError, match="pass `adapters`"):
        init_policies({"p0": PolicySpec(lora=True)}, bases())


def test_a_frozen_slot_is_frozen_alone():
    assert is_frozen("generator", 1, ("generator/1",)) and is_frozen("generator", 1, ("generator",))
    assert not is_frozen("generator", 0, ("generator/1",)) and not is_frozen("generator", 0, ("aggregator",))


def test_policies_decode_together_where_their_weights_allow_it():
    lora, full, frozen = PolicySpec(lora=True), PolicySpec(), PolicySpec(frozen=True)
    assert decode_groups({"a": lora, "b": lora}) == [("a", "b")]
    assert decode_groups({"a": full, "b": full}) == [("a",), ("b",)]
    assert decode_groups({"a": lora, "b": full, "c": frozen}) == [("a", "c"), ("b",)]
    assert decode_groups({"a": lora, "b": PolicySpec(base="other", lora=True)}) == [("a",), ("b",)]


def test_stacked_adapters_have_a_leading_axis_of_policies():
    trees = {name: {"q": {"a": jnp.full((2, 3), i), "b": jnp.full((4,), -i)}} for i, name in enumerate("xyz")}
    stacked = stack(trees)
    assert stacked["q"]["a"].shape == (3, 2, 3)
    for i, tree in enumerate(trees.values()):
        assert jax.tree.all(jax.tree.map(lambda a, b, i=i: bool((a[i] == b).all()), stacked, tree))


def test_what_cannot_be_stacked_is_refused():
    with pytest.raises(ValueError, match="'x' and 'y' differ in shape"):
        stack({"x": {"a": jnp.ones(2)}, "y": {"a": jnp.ones(3)}})
    with pytest.raises(ValueError, match="no policy"):
        stack({})


# ---------------------------------------------------------------- sampling settings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", True),
        ("min_new_tokens", -1),
        ("min_new_tokens", 300),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", None),
        ("top_k", -1),
        ("stop_tokens", (-1,)),
        ("stop_strings", ("",)),
        ("stop_strings", "###"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingSettings(**{field: value})


def test_a_role_overrides_only_the_fields_it_names():
    settings = role_settings(
        ROLES, SamplingSettings(temperature=0.7, top_k=5), {"aggregator": {"temperature": 0}}
    )
    assert settings["generator"] == SamplingSettings(temperature=0.7, top_k=5)
    assert settings["aggregator"] == SamplingSettings(temperature=0, top_k=5)


def test_overrides_of_unknown_roles_and_fields_are_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"'agregator'.*did you mean 'aggregator'"):
        role_settings(ROLES, overrides={"agregator": {}})
    with pytest.raises(ValueError, match=r"'temprature'.*did you mean 'temperature'"):
        role_settings(ROLES, overrides={"generator": {"temprature": 1}})
    with pytest.raises(ValueError, match="top_p is 2"):
        role_settings(ROLES, overrides={"generator": {"top_p": 2}})


@pytest.mark.parametrize("make", [shared, isolated])
def test_roles_without_an_order_are_refused(make):
    with pytest.raises(ValueError, match="must be a non-empty sequence of distinct names"):
        make({"writer", "critic"})
