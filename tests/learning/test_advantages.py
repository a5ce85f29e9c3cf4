"""Every estimator against its formula, written out in float64 numpy one row at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_jax.errors import UserError
from marl_jax.learning.estimators.advantages import agent_advantages, group_advantages, overlong_penalty

REWARDS = np.array([1.0, 0.0, 0.5, 1.0, 0.25, 0.25, 0.25, -2.0])
GROUPS = np.array([7, 7, 3, 7, 5, 5, 5, 3])  # sizes 3, 2 and 3 without variance


def expected(estimator, rewards, groups, ddof):
    out = []
    for r, g in zip(rewards, groups):
        peers = [float(x) for x, h in zip(rewards, groups) if h == g]
        n, mean = len(peers), sum(peers) / len(peers)
        if n == 1:
            out.append(0.0)
        elif estimator == "grpo":
            out.append((r - mean) / (np.std(peers, ddof=ddof) + 1e-6))
        elif estimator == "dr_grpo":
            out.append(r - mean)
        elif estimator == "rloo":
            out.append(r - (sum(peers) - r) / (n - 1))
        else:
            out.append((r - mean) / (np.std(rewards, ddof=ddof) + 1e-6))
    return np.array(out)


@pytest.mark.parametrize("std", ["unbiased", "biased"])
@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
@pytest.mark.parametrize(
    ("rewards", "groups"),
    [
        (REWARDS, GROUPS),
        (np.array([1.0, 0.0, 1.0]), np.array([0, 1, 2])),  # singletons
        (np.array([0.1, 0.1, 0.1, 0.7]), np.array([0, 0, 0, 0])),
        (np.array([1e6, 1e6 + 1, 3.0, 4.0]), np.array([0, 0, 1, 1])),  # far from zero
    ],
)
def test_estimators(estimator, std, rewards, groups):
    want = expected(estimator, rewards, groups, {"unbiased": 1, "biased": 0}[std])
    run = lambda r, g: group_advantages(r, g, estimator=estimator, std=std)
    np.testing.assert_allclose(run(rewards, groups), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(run)(rewards, groups), want, rtol=1e-5, atol=1e-6)
    closed = jax.jit(lambda r: run(r, groups))  # groups that are known when it is traced
    np.testing.assert_allclose(closed(rewards), want, rtol=1e-5, atol=1e-6)
    many = jax.vmap(run)(jnp.stack([rewards, -rewards]), jnp.stack([groups, groups]))
    np.testing.assert_allclose(many, [want, -want], rtol=1e-5, atol=1e-6)


def test_four_of_eight_right_by_hand():
    # mean 1/2, unbiased std sqrt(8 * 1/4 / 7) = 0.534522...
    advantages = group_advantages([1, 1, 1, 1, 0, 0, 0, 0], [0] * 8)
    np.testing.assert_allclose(advantages, [0.9354126] * 4 + [-0.9354126] * 4, rtol=1e-6)


def test_equal_rewards_give_exactly_zero():
    assert not np.any(group_advantages([0.1] * 3 + [0.7] * 7, ["a"] * 3 + ["b"] * 7))


def test_groups_may_be_any_hashables():
    keys = [("t", g) for g in GROUPS]
    names = [str(g) for g in GROUPS]
    want = group_advantages(REWARDS, GROUPS)
    for groups in (keys, names, np.array(names), np.array(keys), jnp.asarray(GROUPS), GROUPS.tolist()):
        np.testing.assert_array_equal(group_advantages(REWARDS, groups), want)


def test_the_study_gives_a_singleton_its_reward():
    got = group_advantages([0.75, 1.0, 0.0], [0, 1, 1], singleton="reward")
    np.testing.assert_allclose(got, [0.75, 0.5**0.5, -(0.5**0.5)], rtol=1e-5)


@pytest.mark.parametrize("mean", ["task", "role"])
@pytest.mark.parametrize("scale", ["task", "role"])
def test_agent_wise_mean_and_std_in_all_four_combinations(mean, scale):
    rewards = np.array([1.0, 0.0, 0.5, 2.0, 1.5, 1.0, 4.0, 2.0])
    tasks = np.array([0, 0, 0, 0, 0, 1, 1, 1])
    roles = np.array([4, 4, 9, 9, 9, 4, 4, 9])
    want = []
    for r, t, role in zip(rewards, tasks, roles):
        peers = {"task": rewards[tasks == t], "role": rewards[(tasks == t) & (roles == role)]}
        spread = np.std(peers[scale], ddof=1) if len(peers[scale]) > 1 else 0.0
        want.append((r - peers[mean].mean()) / (spread + 1e-6) if spread else 0.0)
    run = lambda *rows: agent_advantages(*rows, mean=mean, scale=scale)
    np.testing.assert_allclose(run(rewards, tasks, roles), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(run)(rewards, tasks, roles), want, rtol=1e-5, atol=1e-6)
    named = run(rewards, [f"task {t}" for t in tasks], ["generator" if r == 4 else "judge" for r in roles])
    np.testing.assert_allclose(named, want, rtol=1e-5, atol=1e-6)


def test_many_pairs_of_task_and_role_stay_apart():
    count = 2**17  # the product of two ids is beyond 32 bits
    rng = np.random.default_rng(0)
    tasks, roles = (one[rng.permutation(count)] for one in (np.arange(count) // 2, np.arange(count) // 2 % 3))
    rewards = rng.random(count)
    want = group_advantages(rewards, tasks.astype(np.int64) * 3 + roles)
    for run in (agent_advantages, jax.jit(agent_advantages)):
        np.testing.assert_allclose(run(rewards, tasks, roles), want, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e39])
def test_a_reward_that_is_no_number_is_refused(bad):
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([1.0, bad], [0, 0])
    with pytest.raises(ValueError, match="not finite"):
        agent_advantages([1.0, bad], [0, 0], [0, 0])


@pytest.mark.parametrize("bad", [None, "1", 1j])
def test_rewards_that_are_no_numbers_are_refused(bad):
    with pytest.raises(ValueError, match=r"rewards are \[1\.0, .*\]; they must be numbers"):
        group_advantages([1.0, bad], [0, 0])


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_a_traced_reward_that_is_no_number_shows_in_its_group_alone(estimator):
    rewards, groups = jnp.array([1.0, jnp.nan, 1.0, 0.0]), np.array([0, 0, 1, 1])
    shown = np.isfinite(jax.jit(lambda r: group_advantages(r, groups, estimator=estimator))(rewards))
    assert shown.tolist() == [False, False, True, True]
    for scale in ("task", "role"):
        of_agents = jax.jit(lambda r, s=scale: agent_advantages(r, groups, groups, scale=s))(rewards)
        assert np.isfinite(of_agents).tolist() == [False, False, True, True]


@pytest.mark.parametrize("option", [{"estimator": "gae"}, {"std": "robust"}, {"singleton": "drop"}])
def test_unknown_options_are_refused(option):
    with pytest.raises(ValueError, match="unknown"):
        group_advantages([1.0, 0.0], [0, 0], **option)


def test_overlong_penalty_slopes_over_the_buffer():
    got = overlong_penalty(np.array([0, 12, 14, 16, 20]), max_length=16, buffer=4)
    np.testing.assert_allclose(got, [0, 0, -0.5, -1, -1])
    unsigned = overlong_penalty(np.array([20, 14, 2], np.uint32), max_length=16, buffer=4)
    np.testing.assert_allclose(unsigned, [-1, -0.5, 0])


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_pp_baseline"])
@pytest.mark.parametrize("std", ["unbiased", "biased"])
def test_without_eps_what_has_no_spread_is_zero(estimator, std):
    rewards, groups = [1.0, 1.0, 2.0], [0, 0, 1]
    of_flat = lambda rewards: group_advantages(rewards, groups, estimator=estimator, std=std, eps=0.0)
    assert of_flat(rewards).tolist() == of_flat([2.0] * 3).tolist() == [0.0, 0.0, 0.0]
    spread = group_advantages([0.0, 2.0], [0, 0], std="biased", eps=0.0)
    assert spread.tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("eps", [-1.0, float("nan"), float("inf")])
def test_an_eps_that_would_turn_signs_is_refused(eps):
    with pytest.raises(ValueError, match="must be finite and not negative"):
        group_advantages([0.0, 1.0], [0, 0], eps=eps)
    with pytest.raises(ValueError, match="must be finite and not negative"):
        agent_advantages([0.0, 1.0], [0, 0], [0, 0], eps=eps)


def test_an_eps_may_be_traced():
    rewards, groups = np.array([0.0, 1.0]), ["a", "a"]
    run = lambda eps: group_advantages(rewards, groups, eps=eps)
    np.testing.assert_allclose(jax.jit(run)(0.5), run(0.5), rtol=1e-6)
    run = lambda eps: agent_advantages(rewards, groups, groups, eps=eps)
    np.testing.assert_allclose(jax.jit(run)(0.5), run(0.5), rtol=1e-6)


@pytest.mark.parametrize("rewards", [np.array([1, 0, 2]), jnp.array([1.0, 0.0, 2.0], jnp.bfloat16)])
def test_no_dtype_is_promoted_by_chance(rewards):
    groups = jnp.array([0, 0, 1])
    with jax.numpy_dtype_promotion("strict"):
        host, traced = group_advantages(rewards, groups), jax.jit(group_advantages)(rewards, groups)
        agents = jax.jit(agent_advantages)(rewards, groups, groups)
    np.testing.assert_allclose([traced, agents], [host, host], rtol=1e-6)


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_pp_baseline", "agent"])
def test_equal_rewards_have_a_finite_gradient(estimator):
    """A group of 1 and 1 beside one of 1/2 and 1/5; a batch of one value."""
    groups, weight = np.array([0, 0, 1, 1]), jnp.arange(4.0)
    if estimator == "agent":
        run = lambda rewards: agent_advantages(rewards, groups, groups) @ weight
    else:
        run = lambda rewards: group_advantages(rewards, groups, estimator=estimator) @ weight
    for rewards in ([1.0, 1.0, 0.5, 0.2], [1.0] * 4):
        assert np.isfinite(jax.grad(run)(jnp.array(rewards))).all()


def half_of_the_rest(rewards, groups):
    """An estimator of one's own: half of what a reward is above the smallest of its group."""
    xp = jnp if isinstance(rewards, jax.Array) else np
    same = groups[:, None] == groups[None, :]
    return (rewards - xp.min(xp.where(same, rewards[None, :], xp.inf), axis=1)) / 2


def test_an_estimator_of_ones_own_is_given_rewards_and_groups():
    lowest = {7: 0.0, 3: -2.0, 5: 0.25}
    want = [(r - lowest[g]) / 2 for r, g in zip(REWARDS, GROUPS)]
    got = group_advantages(REWARDS, GROUPS, estimator=f"{__name__}:half_of_the_rest")
    np.testing.assert_allclose(got, want, atol=1e-7)
    traced = jax.jit(lambda r, g: group_advantages(r, g, estimator=f"{__name__}:half_of_the_rest"))
    np.testing.assert_allclose(traced(REWARDS, GROUPS), want, atol=1e-7)


def one_number(rewards, groups):
    return rewards.sum()


def texts(rewards, groups):
    return rewards.astype(str)


def column(rewards, groups):
    return rewards[:, None]


def infinite(rewards, groups):
    return rewards / 0.0


def raising(rewards, groups):
    raise KeyError("nothing")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("one_number", "for 8 rewards; return an array of as many"),
        ("texts", r"returned an array \[8\] of <U32 for 8 rewards; return an array of as many numbers"),
        ("column", r"returned an array \[8, 1\] of float32 for 8 rewards"),  # in one line
        ("infinite", "not finite"),
        ("raising", r"estimator '\w+:raising' raised KeyError: 'nothing' \(in raising, line"),
    ],
)
def test_an_estimator_of_ones_own_is_told_what_is_wrong_with_it(name, reason):
    with np.errstate(all="ignore"), pytest.raises(UserError, match=reason) as refusal:
        group_advantages(REWARDS, GROUPS, estimator=f"{__name__}:{name}")
    assert isinstance(refusal.value, ValueError)
    with pytest.raises(ValueError, match="is a str, not a function"):
        group_advantages(REWARDS, GROUPS, estimator="string:digits")
