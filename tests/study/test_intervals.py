"""Intervals against values worked out by hand, by enumeration and by the normal approximation."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from marl_jax.study.intervals import (
    Interval,
    bootstrap,
    holm,
    over_seeds,
    p_value,
    paired_bootstrap,
    pass_at_k,
    wilson,
)

Z2 = 1.959963984540054**2


@pytest.mark.parametrize(
    "right, count, low, high",
    [  # (p + z2/2n +- z sqrt(p(1-p)/n + z2/4n2)) / (1 + z2/n), with z2 = 3.841459
        (8, 10, 0.4901625, 0.9433178),
        (0, 10, 0.0, Z2 / (10 + Z2)),
        (10, 10, 10 / (10 + Z2), 1.0),
        (1, 2, 0.5 - 0.5 * math.sqrt(Z2 / (2 + Z2)), 0.5 + 0.5 * math.sqrt(Z2 / (2 + Z2))),
    ],
)
def test_wilson_by_hand(right, count, low, high):
    assert wilson(right, count) == pytest.approx((right / count, low, high), abs=1e-6)


def test_wilson_of_nothing_knows_nothing():
    assert wilson(0, 0)[1:] == (0.0, 1.0)
    with pytest.raises(ValueError, match="3 of 2 cannot be right"):
        wilson(3, 2)


def test_the_bootstrap_has_the_quantiles_of_all_resamples():
    values = np.array([0.0, 0.1, 0.4, 1.0])
    means = [np.mean(each) for each in itertools.product(values, repeat=4)]
    expected = np.quantile(means, [0.025, 0.975])
    found = bootstrap(values)
    assert found.mean == np.mean(values)
    assert found[1:] == pytest.approx(tuple(expected), abs=0.026)  # the lattice of means has steps of 0.025


def test_many_problems_come_near_the_normal_interval():
    values = np.random.default_rng(1).random((500, 4)) < np.linspace(0, 1, 500)[:, None]
    mean = values.mean(axis=1)
    half = 1.96 * mean.std(ddof=1) / math.sqrt(500)
    assert bootstrap(values) == pytest.approx(
        (mean.mean(), mean.mean() - half, mean.mean() + half), abs=0.003
    )


def test_pairing_takes_out_how_hard_problems_are():
    base = np.repeat([0.0, 1.0], 50)
    better = np.clip(base + 0.1, 0, None)
    better[0] += 0.1
    gain = paired_bootstrap(better, base)
    assert gain.mean == pytest.approx(0.101) and 0.0999 < gain.low <= gain.high < 0.105
    assert gain.excludes_zero
    alone = bootstrap(better)
    assert alone.low < 0.51 < alone.high
    assert not paired_bootstrap(base, base).excludes_zero
    with pytest.raises(ValueError, match="3 problems cannot be paired with 2"):
        paired_bootstrap(np.zeros(3), np.zeros(2))


@pytest.mark.parametrize("right, low, high", [(10, 10 / (10 + Z2), 1.0), (0, 0.0, Z2 / (10 + Z2))])
def test_problems_that_all_agree_leave_the_doubt_that_wilson_has(right, low, high):
    values = np.full((10, 4), right / 10)
    assert bootstrap(values) == pytest.approx((right / 10, low, high))
    assert bootstrap(values)[1:] == pytest.approx(wilson(right, 10)[1:])


def test_where_all_problems_are_half_right_others_may_be_anything():
    others = Z2 / (10 + Z2)  # Wilson's bound of 0 in 10
    assert bootstrap(np.full(10, 0.5)) == pytest.approx((0.5, 0.5 * (1 - others), 0.5 * (1 + others)))


def test_differences_that_all_agree_leave_room_for_problems_that_got_better_or_worse():
    others = Z2 / (10 + Z2)
    same = paired_bootstrap(np.full(10, 0.3), np.full(10, 0.3))
    assert same == pytest.approx((0.0, -others, others)) and not same.excludes_zero
    every = paired_bootstrap(np.ones(10), np.zeros(10))  # of the others, some may be lost
    assert every == pytest.approx((1.0, 1 - 2 * others, 1.0)) and every.excludes_zero
    assert not paired_bootstrap(np.ones(2), np.zeros(2)).excludes_zero  # two problems show nothing


def test_samples_of_a_problem_are_one_observation():
    few = np.array([0.0, 1.0, 1.0, 0.0, 1.0])
    many = np.repeat(few[:, None], 100, axis=1)
    assert bootstrap(few) == bootstrap(many)


def test_the_same_values_give_the_same_interval():
    values = np.random.default_rng(0).random(37)
    assert bootstrap(values) == bootstrap(values)


@pytest.mark.parametrize(
    "right, n, k, expected",
    [
        (1, 4, 2, 1 - 3 / 6),
        (2, 5, 3, 1 - 1 / 10),
        (0, 5, 5, 0.0),
        (3, 5, 3, 1.0),
        (2, 8, 1, 2 / 8),
        (100, 200, 1, 0.5),
    ],
)
def test_pass_at_k_by_hand(right, n, k, expected):
    assert pass_at_k(np.arange(n)[None] < right, k) == pytest.approx([expected])


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    row = np.array([True, False, False, True, False, False])
    for k in range(1, 7):
        share = np.mean([any(each) for each in itertools.combinations(row, k)])
        assert pass_at_k(row[None], k) == pytest.approx([share])


@pytest.mark.parametrize(
    "call",
    [
        lambda: pass_at_k(np.ones((2, 3), bool), 4),
        lambda: pass_at_k(np.ones((2, 3), bool), 0),
        lambda: bootstrap(np.zeros(0)),
    ],
)
def test_what_cannot_be_asked_is_refused(call):
    with pytest.raises(ValueError):
        call()


def test_an_interval_that_touches_zero_does_not_exclude_it():
    assert not Interval(0.1, 0.0, 0.2).excludes_zero
    assert Interval(-0.1, -0.2, -0.01).excludes_zero


# ---------------------------------------------------------------- over seeds


def test_an_interval_over_seeds_by_hand():
    # Means of seeds 0.25, 0.75; of problems 0.5, 0, 0.5, 1; 0.5 in all. Squares: seeds 4 x 2/16 = 0.5 of 1;
    # problems 2 x 1/2 = 1 of 3; left 0.5 of 3. A + B - E = 2/3; freedom (2/3)^2 / (0.5^2 + (1/3)^2/3 + (1/6)^2/3).
    values = np.array([[0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 1.0, 1.0]])
    freedom = (4 / 9) / (1 / 4 + 1 / 27 + 1 / 108)
    half = stats.t.ppf(0.975, freedom) * math.sqrt(2 / 3 / 8)
    found = over_seeds(values, bounds=(-9.0, 9.0))
    assert found == pytest.approx((0.5, 0.5 - half, 0.5 + half))
    assert over_seeds(values) == (0.5, 0.0, 1.0)  # of shares


def test_one_seed_has_the_bootstrap_of_its_problems_and_equal_values_say_how_many_others_there_may_be():
    values = np.random.default_rng(0).random(12)
    assert over_seeds(values[None]) == bootstrap(values)
    assert over_seeds(np.ones((3, 10))) == bootstrap(np.ones(10))
    assert over_seeds(values[:, None]) == bootstrap(values)  # one problem
    for wrong in (values, values[None, :0]):
        with pytest.raises(ValueError, match="seeds, problems"):
            over_seeds(wrong)


@pytest.mark.parametrize("values", [[[0.0, 1.0], [1.0, 0.0]], [[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0]]])
def test_noise_that_cancels_in_every_row_and_column_is_noise(values):
    found = over_seeds(np.array(values), bounds=(-99.0, 99.0))
    assert found.low < found.mean < found.high


@pytest.mark.parametrize(
    "by_seed, by_problem, square, freedom",
    [  # A is 3 by_seed^2, B 3 by_problem^2, E 6: the largest of A + B - E and each alone
        (1, 0, 6, 4),
        (0, 1, 6, 4),
        (math.sqrt(2), 0, 6, 2),  # as much as the noise: the fewer degrees of freedom
        (10, 0, 300, 2),
        (0, 10, 300, 2),
        (2, 3, 33, 33**2 / (12**2 / 2 + 27**2 / 2 + 6**2 / 4)),
    ],
)
def test_no_interval_is_surer_than_its_seeds_its_problems_or_its_noise_alone(
    by_seed, by_problem, square, freedom
):
    steps = np.array([-1.0, 0.0, 1.0])
    # Rows and columns have none of it.
    noise = np.array([[0.0, 2.0, -2.0], [-2.0, 0.0, 2.0], [2.0, -2.0, 0.0]])
    found = over_seeds(by_seed * steps[:, None] + by_problem * steps + noise, bounds=(-99.0, 99.0))
    assert found.high == pytest.approx(stats.t.ppf(0.975, freedom) * math.sqrt(square / 9))


@pytest.mark.parametrize(
    "seeds, problems, by_seed, by_problem, noise, least",
    [
        (3, 64, 0.05, 0.3, 0.3, 0.925),
        (3, 64, 0.0, 0.3, 0.3, 0.925),
        (5, 128, 0.1, 0.0, 0.4, 0.925),
        (4, 32, 0.1, 0.3, 0.1, 0.925),
        (3, 64, 0.2, 0.3, 0.3, 0.9),  # few seeds that differ much
        (2, 64, 0.2, 0.3, 0.3, 0.85),
    ],
)
def test_intervals_over_seeds_hold_the_mean_about_as_often_as_they_say(
    seeds, problems, by_seed, by_problem, noise, least
):
    rng, held, times = np.random.default_rng(0), 0, 1000
    for _ in range(times):
        values = noise * rng.normal(size=(seeds, problems))
        values += by_seed * rng.normal(size=(seeds, 1)) + by_problem * rng.normal(size=problems)
        found = over_seeds(values, bounds=(-9.0, 9.0))
        held += found.low <= 0 <= found.high
    assert least <= held / times <= 0.975


def test_the_p_value_of_a_layout_where_seeds_differ_most_is_that_of_a_t_test_over_seeds():
    by_seed = np.array([0.1, 0.3, 0.25, 0.2])
    # Problems hardly differ, and in the same way in each run.
    values = by_seed[:, None] + np.array([-0.001, 0.001])
    assert p_value(values) == pytest.approx(stats.ttest_1samp(by_seed, 0).pvalue, rel=0.01)


def test_a_p_value_is_that_of_the_two_way_layout_or_of_the_seeds_means_whichever_is_larger():
    # Seeds 0.25, 0.75; problems 0.5, 0, 0.5, 1: the square and the freedom are worked out by hand above, and the t of
    # the seeds' means is 0.5 / (0.5 / 2) = 2 with one degree of freedom.
    values = np.array([[0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 1.0, 1.0]])
    two_way = 2 * stats.t.sf(0.5 / math.sqrt(2 / 3 / 8), (4 / 9) / (1 / 4 + 1 / 27 + 1 / 108))
    of_means = stats.ttest_1samp([0.25, 0.75], 0).pvalue
    assert of_means == pytest.approx(2 * stats.t.sf(2, 1))
    assert p_value(values) == pytest.approx(max(two_way, of_means))
    noisy = np.array([[9.0, -8.0, 1.0], [-7.0, 9.0, 1.0]])  # means 2/3 and 1, although the noise is large
    assert p_value(noisy) > stats.ttest_1samp([2 / 3, 1], 0).pvalue


def test_a_p_value_below_the_level_leaves_zero_outside_of_the_interval():
    rng, small = np.random.default_rng(0), 0
    for _ in range(200):
        values = rng.normal(rng.normal(0, 0.4), 0.5, (3, 30)) + rng.normal(0, 0.1, (3, 1))
        if p_value(values) < 0.05:
            small += 1
            assert over_seeds(values, bounds=(-9.0, 9.0)).excludes_zero
    assert small > 20


@pytest.mark.parametrize("by_seed", [0.0, 0.01, 0.02, 0.04])  # points by which runs of one cell differ
@pytest.mark.parametrize(("by_problem", "noise"), [(0.3, 0.3), (0.05, 0.4)])
def test_three_seeds_are_not_called_different_more_often_than_the_level_says(by_seed, by_problem, noise):
    rng, level, times = np.random.default_rng(0), 0.0017, 3000  # what Holm leaves the first of 30 tests
    called = 0
    for _ in range(times):
        values = noise * rng.normal(size=(3, 128))
        values += by_seed * rng.normal(size=(3, 1)) + by_problem * rng.normal(size=128)
        called += p_value(values) <= level
    assert called <= level * times + 3 * math.sqrt(level * times)


def test_a_value_that_is_not_known_leaves_nothing_known():
    values = np.array([[0.0, np.nan], [1.0, 1.0]])
    assert all(
        math.isnan(mean) for mean in (over_seeds(values).mean, bootstrap(values).mean, p_value(values))
    )
    assert over_seeds(values)[1:] == (0.0, 1.0)


def test_one_seed_or_no_difference_is_no_test():
    assert p_value(np.ones((1, 5))) is None and p_value(np.zeros((3, 5))) is None


@pytest.mark.parametrize("value", [1.0, -1.0, 0.5])
def test_where_all_values_agree_a_p_value_knows_how_few_seeds_and_problems_there_are(value):
    # As the seeds' t test has it where one problem of one seed came to zero; of few problems, Wilson's bound.
    one_off = np.full((3, 64), value)
    one_off[0, 0] = 0
    assert p_value(np.full((3, 64), value)) == pytest.approx(
        stats.ttest_1samp(one_off.mean(axis=1), 0).pvalue, rel=0.2
    )
    for problems in range(2, 12):
        values = np.full((3, problems), value)
        assert (p_value(values) < 0.05) == over_seeds(values, bounds=(-1.0, 1.0)).excludes_zero


def test_holm_multiplies_by_how_many_are_left_and_never_falls():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []
