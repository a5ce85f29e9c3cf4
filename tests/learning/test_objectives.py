"""SFT, DPO, KTO and SPPO's square: formulas by hand, slopes by differences, and updates that equal plain autodiff."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import ROUNDINGS, close, close_trees
from learning_rows import TINY, as_table, log_probs, make_row, make_rows, plain_loss
from test_update import BUCKETS, PARAMS, RATE, SHARED, config

from marl_jax.learning import objectives
from marl_jax.learning.batching import BatchConfig
from marl_jax.learning.learner_config import LearnerConfig
from marl_jax.learning.losses import AGGREGATIONS, LossConfig, policy_loss
from marl_jax.learning.network import Qwen3
from marl_jax.learning.objectives import PreferenceConfig, contrasts, win_share
from marl_jax.learning.update import Learner
from marl_jax.learning.work import mini_batches_of
from marl_jax.models import qwen3
from marl_jax.table import Table

REFERENCE = qwen3.init(2, TINY)
PAIRS = np.array([[0, 1], [0, 2], [3, 1]])
WEIGHT = np.array([1.0, 0.5, 2.0, 1.0])
FORMULAS = {
    "dpo": lambda s: objectives.dpo(s, PAIRS, 0.3, WEIGHT),
    "kto": lambda s: objectives.kto(s, np.array([True, False, True, False]), 0.4, 0.7, WEIGHT),
    "sppo": lambda s: objectives.sppo(s, np.array([1.0, 0.0, 0.25, 0.5]), 0.5, WEIGHT),
}


# ---------------------------------------------------------------- the formulas


@pytest.mark.parametrize("kind", FORMULAS)
def test_slopes_are_the_derivatives_of_the_loss(kind):
    scores, step = np.array([0.2, -1.1, 0.9, 2.0]), 1e-5
    value = FORMULAS[kind](scores)
    for i in range(4):
        ahead, behind = (
            FORMULAS[kind](np.where(np.arange(4) == i, scores + d, scores)) for d in (step, -step)
        )
        # A central difference of a function of size 1: its third derivative's share, and rounding, are below 1e-9.
        assert (ahead.loss - behind.loss) / (2 * step) == pytest.approx(value.slope[i], abs=1e-9)


def test_dpo_by_hand():
    value = objectives.dpo(np.array([1.0, 0.0]), np.array([[0, 1]]), math.log(3), np.ones(2))
    # beta (s_a - s_b) = log 3: the better one is preferred with probability 3/4
    assert value.loss == pytest.approx(math.log(4 / 3))
    np.testing.assert_allclose(value.slope, [-math.log(3) / 4, math.log(3) / 4])
    assert value.metrics == {"margin": pytest.approx(math.log(3)), "preferred": 1.0}


def test_kto_by_hand():
    value = objectives.kto(
        np.array([1.0, 1.0]), np.array([True, False]), 0.0, math.log(3), np.array([1.0, 2.0])
    )
    # sigmoid(log 3) = 3/4 of the desirable one, sigmoid(-log 3) = 1/4 of the other, which weighs 2
    assert value.loss == pytest.approx((0.25 + 2 * 0.75) / 2)
    np.testing.assert_allclose(value.slope, [-math.log(3) * 3 / 16 / 2, 2 * math.log(3) * 3 / 16 / 2])


def test_sppo_by_hand():
    value = objectives.sppo(np.array([1.0, -2.0]), np.array([0.75, 0.5]), 0.25, np.ones(2))
    # targets (0.75 - 0.5) / 0.25 = 1 and 0
    assert value.loss == 2.0
    np.testing.assert_array_equal(value.slope, [0.0, -2.0])


def test_scores_far_away_stay_finite():
    for kind, formula in FORMULAS.items():
        value = formula(np.array([-4e3, 4e3, 0.0, 1e3]))
        assert math.isfinite(value.loss) and np.isfinite(value.slope).all(), kind


def test_pairs_are_of_one_group_and_differ_by_more_than_the_gap():
    values, groups = np.array([0.2, 1.0, 0.9, 1.0, 0.5, 0.5, np.nan, 0.3]), np.array([0, 0, 0, 0, 1, 1, 1, 2])
    pairs, without = contrasts(values, groups, "best_worst", 0.0)
    assert pairs.tolist() == [[1, 0]] and without == 2  # the first of equals
    pairs, without = contrasts(values, groups, "all", 0.2)
    assert sorted(map(tuple, pairs.tolist())) == [(1, 0), (2, 0), (3, 0)] and without == 2
    pairs, without = contrasts(values, groups, "all", 0.9)
    assert pairs.shape == (0, 2) and without == 3


def test_shares_of_wins_count_a_tie_half():
    share = win_share(np.array([1.0, 0.0, 0.0, 5.0]), np.array([0, 0, 0, 1]))
    np.testing.assert_array_equal(share, [1.0, 0.25, 0.25, 0.5])


def test_what_has_no_value_or_no_weight_is_none_of_the_others():
    values = np.array([1.0, 0.0, np.nan])
    np.testing.assert_array_equal(win_share(values, np.zeros(3, int)), [1.0, 0.0, 0.5])
    rng = np.random.default_rng(0)
    rows = as_table([make_row(rng, [1], 2) for _ in range(4)])
    rows = rows.replace(reward=np.array([1.0, 0.0, np.nan, 5.0]), weight=np.array([1.0, 1.0, 1.0, 0.0]))
    found = objectives.aim("sppo", rows, PreferenceConfig())
    assert (found.rows.tolist(), found.target.tolist()) == ([0, 1], [1.0, 0.0])
    pair = objectives.aim("dpo", rows, PreferenceConfig())
    assert (pair.rows.tolist(), pair.pairs.tolist()) == ([0, 1], [[0, 1]])


def test_the_others_of_a_group_may_be_of_another_policy():
    rng = np.random.default_rng(0)
    rows = as_table([make_row(rng, [1], 2) for _ in range(4)])
    rows = rows.replace(reward=np.array([1.0, 0.0, 2.0, 3.0]), group=np.array([0, 0, 0, 1]))
    won = objectives.aim("sppo", rows, PreferenceConfig(), np.array([0, 3]))
    assert (won.rows.tolist(), won.target.tolist()) == ([0, 1], [0.5, 0.5])
    won = objectives.aim("sppo", rows, PreferenceConfig(), np.array([1, 2]))
    assert (won.rows.tolist(), won.target.tolist()) == ([0, 1], [0.0, 1.0])
    best = objectives.aim("sft", rows, PreferenceConfig(best=1), np.array([0, 3]))
    assert (best.rows.tolist(), best.counts) == ([1], {"chosen": 1.0, "left_out": 1.0})
    none = objectives.aim("sft", rows, PreferenceConfig(best=1), np.array([0, 1]))
    assert not len(none.rows) and "is among the best of its group" in none.missing


def test_shares_of_wins_that_are_given_are_not_counted_again():
    rng = np.random.default_rng(0)
    share = np.array([0.25, 1.0, 0.5, 0.25, np.nan, 0.75])
    rows = as_table([make_row(rng, [1], 2) for _ in share]).replace(reward=share)
    given = objectives.aim("sppo", rows, PreferenceConfig(wins="given"))
    assert (given.rows.tolist(), given.target.tolist()) == ([0, 1, 2, 3, 5], [0.25, 1.0, 0.5, 0.25, 0.75])
    counted = objectives.aim("sppo", rows, PreferenceConfig())
    assert counted.target.tolist() == [0.125, 1.0, 0.5, 0.125, 0.75]
    lower = rows.replace(reward=share - 0.75)
    with pytest.raises(ValueError, match=r"is -0\.5, which is not a share of wins: .* to counted"):
        objectives.aim("sppo", lower, PreferenceConfig(wins="given"))
    assert objectives.aim("sppo", lower, PreferenceConfig()).target.tolist() == counted.target.tolist()


def test_what_an_objective_lacks_is_named():
    rows = as_table(graded_rows())
    weightless = rows.replace(weight=np.zeros(len(rows)))
    for kind in ("sppo", "sft"):
        missing = objectives.aim(kind, weightless, PreferenceConfig()).missing
        assert "has a weight above 0 and a reward" in missing and "preference.above" not in missing
    filtered = objectives.aim("sft", rows, PreferenceConfig(above=2.0)).missing
    assert "has a reward above 2.0: lower learner.preference.above" in filtered


def test_the_divergence_is_measured_behind_the_prompts_of_others():
    prompts = {"a": ([1], [2], [1]), "b": ([3], [3], [3])}
    rng = np.random.default_rng(0)
    rows = [make_row(rng, prompt, 2, role=role) for role, some in prompts.items() for prompt in some]
    other = objectives.mismatched(as_table(rows), 128)
    assert [other.prompt[i].tolist() for i in range(6)] == [
        [2],
        [1],
        [2],
        [3],
        [3],
        [3],
    ]  # b has no other one
    assert [other.tokens[i].tolist() for i in range(6)] == [list(row.tokens) for row in rows]
    assert objectives.has_other_prompt(as_table(rows), other).tolist() == [True] * 3 + [False] * 3


def test_no_mismatched_row_is_longer_than_rows_may_be():
    rng = np.random.default_rng(0)
    # Seven inputs each; mismatched three and eleven.
    rows = as_table([make_row(rng, [1] * 6, 2), make_row(rng, [2] * 2, 6)])
    other = objectives.mismatched(rows, 8)
    assert objectives.has_other_prompt(rows, other).tolist() == [True, False]


# ---------------------------------------------------------------- updates


def graded_rows(samples=4):
    """Rows of two roles with rewards, several calls of each prompt."""
    rng = np.random.default_rng(5)
    rows = make_rows(rng, samples=samples) + make_rows(rng, role="judge", samples=samples)
    rewards = rng.permutation(len(rows)) / len(rows)
    return [dataclasses.replace(row, reward=float(r)) for row, r in zip(rows, rewards)]


def ratios(params, rows):
    """[n] plain float32 sums over each row, of logits that were never packed."""
    mask = np.arange(max(len(row.tokens) for row in rows)) < np.array([[len(row.tokens)] for row in rows])
    gap = log_probs(params, rows) - log_probs(REFERENCE, rows)
    return jnp.sum(jnp.where(mask, gap, 0.0), axis=1)


def plain(kind, rows, beta=0.2):
    """(loss, gradient) of an objective as its paper has it, by autodiff of whole sequences."""
    table = as_table(rows)
    values = np.array([row.reward for row in rows])
    groups = objectives.same_prompt(table)

    def loss(params):
        s = ratios(params, rows)
        if kind == "dpo":
            best = [max(np.flatnonzero(groups == g), key=lambda i: values[i]) for g in np.unique(groups)]
            worst = [min(np.flatnonzero(groups == g), key=lambda i: values[i]) for g in np.unique(groups)]
            return -jnp.mean(jax.nn.log_sigmoid(beta * (s[np.array(best)] - s[np.array(worst)])))
        if kind == "kto":
            moved = [
                dataclasses.replace(row, prompt=objectives.mismatched(table, 128).prompt[i].tolist())
                for i, row in enumerate(rows)
            ]
            z = jax.lax.stop_gradient(jnp.maximum(0.0, jnp.mean(ratios(params, moved))))
            sign = np.where(values > 0.5, 1.0, -1.0)
            return jnp.mean(1 - jax.nn.sigmoid(sign * beta * (s - z)))
        wins = [
            np.mean([values[i] > values[j] for j in np.flatnonzero(groups == groups[i]) if j != i])
            for i in range(len(rows))
        ]
        return jnp.mean((s - (np.array(wins) - 0.5) / beta) ** 2)

    return jax.value_and_grad(loss)(PARAMS)


def objective(kind, **changes):
    preference = PreferenceConfig(above=0.5 if kind == "kto" else None, beta=0.2)
    return config(**({"loss": LossConfig(kind), "preference": preference} | changes))


def gradient(rows, learner_config, **columns):
    learner = Learner(Qwen3(TINY), learner_config, SHARED)
    trees = {"p0": jax.tree.map(jnp.copy, PARAMS)}
    table = as_table(rows) if not isinstance(rows, Table) else rows
    table = table.replace(**columns)
    after, _, report = learner.step(trees, learner.init(trees), table, references={"p0": REFERENCE})
    return jax.tree.map(lambda b, a: (np.asarray(b) - np.asarray(a)) / RATE, PARAMS, after["p0"]), report


WAYS = {
    "shared prompts": BatchConfig(BUCKETS, 256),
    "packed": BatchConfig(BUCKETS, 64, share_prompts=False),
    "slices": BatchConfig(BUCKETS, 256, slice_tokens=1),
}


@pytest.mark.parametrize("kind", ["dpo", *(pytest.param(k, marks=pytest.mark.long) for k in ("kto", "sppo"))])
@pytest.mark.parametrize(
    "way", ["shared prompts", *(pytest.param(way, marks=pytest.mark.long) for way in list(WAYS)[1:])]
)
def test_an_objective_has_its_plain_gradient_however_the_batch_is_cut(kind, way):
    rows = graded_rows()
    value, want = plain(kind, rows)
    got, report = gradient(rows, objective(kind, batch=WAYS[way]))
    close_trees(got, want, roundings=32)  # the plain sums are over float32 sequences, ours over float64
    assert report.policies["p0"]["loss"] == pytest.approx(float(value), rel=1e-5)
    assert report.warnings == ()


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.long) for kind in ("dpo", "kto")), "sppo"]
)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_an_objective_is_the_same_however_the_terms_beside_it_are_aggregated(kind, aggregation):
    """The entropy bonus counts tokens as `aggregation` says, as it does beside any other loss."""
    longest = 8 if aggregation == "sequence_mean_token_sum_norm" else None
    rows, how = graded_rows(samples=2), {"aggregation": aggregation, "max_length": longest}
    alone, _ = gradient(rows, objective(kind, loss=LossConfig(kind, **how)))
    close_trees(alone, plain(kind, rows)[1], roundings=32)
    beside = {"entropy_coef": 0.1, **how}
    with_bonus, _ = gradient(rows, objective(kind, loss=LossConfig(kind, **beside)))
    nothing = np.zeros(len(rows))
    bonus, _ = gradient(rows, config(loss=LossConfig("pg", **beside)), advantage=nothing)
    close_trees(with_bonus, jax.tree.map(np.add, alone, bonus), roundings=32)


def test_the_divergence_is_0_where_a_role_has_one_prompt():
    """And rows of such a role are not in the mean of the others."""
    rng = np.random.default_rng(3)
    same = [dataclasses.replace(make_row(rng, [3, 4], 5), reward=float(k % 2)) for k in range(4)]
    _, report = gradient(same, objective("kto"))
    assert report.policies["p0"]["divergence"] == 0.0
    others = graded_rows()[:8]
    _, alone = gradient(others, objective("kto"))
    _, both = gradient([*others, *(dataclasses.replace(row, role="judge") for row in same)], objective("kto"))
    assert both.policies["p0"]["divergence"] == pytest.approx(alone.policies["p0"]["divergence"], rel=1e-6)


@pytest.mark.long
def test_the_roles_parts_of_an_objective_are_those_of_its_rows():
    rows = graded_rows()
    _, report = gradient(rows, objective("dpo"))
    parts = {}
    for role in ("generator", "judge"):
        own = [row for row in rows if row.role == role]
        # Both roles have as many pairs: each part is half of the mean over its own.
        tree = plain("dpo", own)[1]
        parts[role] = np.concatenate([np.ravel(x).astype(np.float64) / 2 for x in jax.tree.leaves(tree)])
    norms = report.gradients["p0"]["norm"]
    a, b = parts["generator"], parts["judge"]
    assert norms == pytest.approx({"generator": np.linalg.norm(a), "judge": np.linalg.norm(b)}, rel=ROUNDINGS)
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert report.gradients["p0"]["cosine"][("generator", "judge")] == pytest.approx(cosine, abs=ROUNDINGS)


def test_rows_without_a_contrast_are_counted_and_left_out():
    rows = graded_rows()
    flat = [dataclasses.replace(row, reward=0.5) if row.role == "judge" else row for row in rows]
    got, report = gradient(flat, objective("dpo"))
    _, want = plain("dpo", [row for row in rows if row.role == "generator"])
    close_trees(got, want, roundings=32)
    assert report.policies["p0"]["pairs"] == 2 and report.policies["p0"]["without_contrast"] == 2
    assert report.roles["judge"]["trained_rows"] == 0


def test_a_step_without_a_pair_changes_nothing_and_says_what_to_do():
    rows = [dataclasses.replace(row, reward=1.0) for row in graded_rows()]
    got, report = gradient(rows, objective("dpo"))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(got))
    (warning,) = report.warnings
    assert "none of its 4 prompts has two calls whose reward differs" in warning
    assert "raise rollout.samples, or lower learner.preference.gap" in warning
    assert report.policies["p0"]["empty"] == 1 and report.policies["p0"]["without_contrast"] == 4


def test_a_group_over_policies_has_one_best_call():
    rng = np.random.default_rng(4)
    rows = [make_row(rng, [1, 2], 3, policy=f"p{k}", slot=k, reward=float(k)) for k in range(2)]
    learner = Learner(
        Qwen3(TINY),
        objective("sft", preference=PreferenceConfig(best=1)),
        {"generator": "p0", "generator/1": "p1"},
    )
    trees = {name: jax.tree.map(jnp.copy, PARAMS) for name in ("p0", "p1")}
    table = as_table(rows).replace(group=np.zeros(2, np.int32))
    _, states, report = learner.step(trees, learner.init(trees), table)
    assert [report.policies[name]["chosen"] for name in ("p0", "p1")] == [0, 1]
    assert [states[name].empty for name in ("p0", "p1")] == [1, 0]
    assert "is among the best of its group" in report.warnings[0]


def test_pairs_stay_in_one_mini_batch():
    together = np.repeat(np.arange(10), 3)[np.random.default_rng(0).permutation(30)]
    cut = LearnerConfig(updates="fixed", updates_fixed=4, epochs=2)
    parts = mini_batches_of(cut, "p0", 30, 3, together)
    assert len(parts) == 8 and sorted(np.concatenate(parts[:4]).tolist()) == list(range(30))
    for part in parts:
        assert all(np.isin(np.flatnonzero(together == k), part).all() for k in together[part])


def test_the_second_mini_batch_has_slopes_at_the_weights_of_the_first():
    """Two epochs are two steps, each with the slopes of its own weights."""
    rows = as_table(graded_rows())
    gentle = dataclasses.replace(
        config().optimiser, schedule=dataclasses.replace(config().optimiser.schedule, learning_rate=0.5)
    )
    after = []
    for epochs, steps in ((2, 1), (1, 2)):
        learner = Learner(Qwen3(TINY), objective("sppo", epochs=epochs, optimiser=gentle), SHARED)
        trees = {"p0": jax.tree.map(jnp.copy, PARAMS)}
        states = learner.init(trees)
        for _ in range(steps):
            trees, states, _ = learner.step(trees, states, rows, references={"p0": REFERENCE})
        after.append(trees["p0"])
    jax.tree.map(np.testing.assert_array_equal, *after)


def test_sft_is_the_mean_negative_log_prob_with_weights():
    rows = graded_rows()
    weight = np.linspace(0.5, 2.0, len(rows))
    chosen = [dataclasses.replace(row, advantage=float(w)) for row, w in zip(rows, weight)]
    value, want = plain_loss(PARAMS, chosen, kind="pg", aggregation="token_mean")
    got, report = gradient(rows, objective("sft", loss=LossConfig("sft", "token_mean")), weight=weight)
    close_trees(got, want)
    close(report.policies["p0"]["loss"], value, of=abs(value))
    # One's own words or not: there is no sampler to disagree with.
    assert report.warnings == () and "gap_max" not in report.roles["judge"]


def test_sft_learns_from_the_best_of_each_group_above_a_value():
    rows = graded_rows()
    table = as_table(rows)
    groups = objectives.same_prompt(table)
    best = [
        i
        for g in np.unique(groups)
        for i in np.flatnonzero(groups == g)[
            np.argsort([-rows[i].reward for i in np.flatnonzero(groups == g)])
        ][:2]
    ]
    chosen = sorted(i for i in best if rows[i].reward > 0.3)
    assert 2 < len(chosen) < 8
    filtered = objective("sft", preference=PreferenceConfig(above=0.3, best=2))
    got, report = gradient(rows, filtered)
    alone, _ = gradient([rows[i] for i in chosen], objective("sft"))
    close_trees(got, alone)
    assert report.policies["p0"]["chosen"] == len(chosen)
    _, none = gradient(rows, objective("sft", preference=PreferenceConfig(above=1.0)))
    assert "lower learner.preference.above" in none.warnings[0]


def test_masked_tokens_are_read_and_not_learned():
    """Half a completion is not the policy's own: its loss is that of the rest, behind a longer prompt."""
    rng = np.random.default_rng(1)
    rows = [make_row(rng, [3, 4, 5], 6), make_row(rng, [6, 7], 4)]
    spoken = [np.arange(6) >= 2, np.arange(4) >= 1]
    table = Table.make(
        role=["generator"] * 2, policy=["p0"] * 2, prompt=[row.prompt for row in rows],
        tokens=[row.tokens for row in rows], logprobs=[[math.nan] * 6, [math.nan] * 4], spoken=spoken,
    )  # fmt: skip
    got, report = gradient(table, objective("sft"))
    after = [
        dataclasses.replace(
            row,
            prompt=(*row.prompt, *row.tokens[:k]),
            tokens=row.tokens[k:],
            logprobs=row.logprobs[k:],
            advantage=1.0,
        )
        for row, k in zip(rows, (2, 1))
    ]
    value, want = plain_loss(PARAMS, after, kind="pg")
    close_trees(got, want)
    assert report.roles["generator"]["tokens"] == 7
    close(report.policies["p0"]["loss"], value, of=abs(value))
    unmarked = table.replace(spoken=dataclasses.replace(table.spoken, values=np.zeros(10, bool)))
    with pytest.raises(ValueError, match="`spoken` must have as many marks, at least one"):
        gradient(unmarked, objective("sft"))


@pytest.mark.long
def test_rows_may_have_weights_and_clip_ranges_of_their_own():
    rows = make_rows(np.random.default_rng(7), samples=4)
    rng = np.random.default_rng(8)
    low, high, weight = (
        rng.uniform(0.05, 0.3, len(rows)),
        rng.uniform(0.05, 0.6, len(rows)),
        rng.uniform(0.2, 2, len(rows)),
    )
    mask = np.arange(max(len(row.tokens) for row in rows)) < np.array([[len(row.tokens)] for row in rows])
    old = np.array([[*row.logprobs] + [0.0] * (mask.shape[1] - len(row.tokens)) for row in rows])
    advantages = np.array([row.advantage for row in rows]) * weight

    def loss(params):
        found = policy_loss(log_probs(params, rows), old, advantages, mask, clip_low=low, clip_high=high)
        return found.numerator / found.denominator

    want = jax.grad(loss)(PARAMS)
    got, report = gradient(rows, config(old_logprobs="sampler"), clip_low=low, clip_high=high, weight=weight)
    close_trees(got, want)
    assert (
        0
        < report.roles["generator"]["clip_fraction_high"]
        == pytest.approx(report.policies["p0"]["clip_fraction_high"])
    )
    same, _ = gradient(
        rows,
        config(old_logprobs="sampler"),
        clip_low=np.full(len(rows), 0.2),
        clip_high=np.full(len(rows), 0.28),
    )
    close_trees(same, gradient(rows, config(old_logprobs="sampler"))[0])


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match=r"'kto' needs preference\.above"):
        LearnerConfig(LossConfig("kto"))
    with pytest.raises(ValueError, match="'dpo' is a loss of whole sequences"):
        policy_loss(*(jnp.zeros((1, 1)),) * 4, kind="dpo")
    with pytest.raises(ValueError, match="dual_clip belongs to kind 'ppo', not 'dpo'"):
        LossConfig("dpo", dual_clip=3.0)
    with pytest.raises(ValueError, match=r"unknown.*for whole sequences one of \('sft'"):
        LossConfig("dop")
    learner = Learner(Qwen3(TINY), objective("dpo"), SHARED)
    trees = {"p0": PARAMS}
    with pytest.raises(ValueError, match=r"loss.kind 'dpo' needs references\['p0'\]"):
        learner.step(trees, learner.init(trees), as_table(graded_rows()))
