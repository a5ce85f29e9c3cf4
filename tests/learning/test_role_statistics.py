"""What each role's tokens say about it, by hand."""

import dataclasses

import numpy as np
import pytest
from learning_rows import Row, as_table

from marl_jax.learning.by_role.role_statistics import Evidence, form_drift, role_statistics, row_statistics
from marl_jax.learning.by_role.step_report import warnings_of
from marl_jax.learning.losses import LossConfig, kl_estimate

ROW = Row("p0", "voter", "t", 0, 0, (1, 2), (3, 4), (-1.0, -2.0), reward=1.0)


def evidence(**columns):
    """Entropies of 1, nothing of a reference, and the rest as given: one array a row."""
    count = len(columns["logp"])
    plain = {"entropy": [np.ones(2)] * count, "ref_logp": [None] * count}
    return Evidence(**plain | columns)


def test_statistics_by_hand():
    rows = [ROW, dataclasses.replace(ROW, reward=0.0, truncated=True, advantage=2.0, readable=False)]
    table = as_table(rows)
    old = [np.array([-1.0, -2.0]), np.array([-1.0, -1.5])]  # half a nat off the sampler at one of four tokens
    new = [old[0] + np.log(2.0), old[1]]
    known = evidence(logp=new, old_logp=old, ref_logp=[n - 0.1 for n in new], trainer_logp=old)
    stats = row_statistics(table)
    stats |= role_statistics(table, [0, 1], known, LossConfig(is_cap=1.1), corrected=True)
    expected = {
        "perplexity": np.exp(5.5 / 4 - np.log(2) / 2),
        "ratio_mean": 1.5,
        "chi2": (3 + np.e) / 4 - 1,
        "gap_max": 0.5,
        "gap_mean": 0.125,
        "gap_p50": 0.0,
        "kl": np.exp(-0.1) - 0.9,
        "advantage_mean": 1.0,
        "advantage_zero_share": 0.5,
        "length": 2.0,
        "truncated_share": 0.5,
        "unreadable_share": 0.5,
        "entropy": 1.0,
        "approx_kl": (2 - np.log(2) - 1) / 2,
        "clip_fraction_high": 0.0,  # the ratio of 2 belongs to the row whose advantage is 0
        "clip_fraction_low": 0.0,
        "is_weight": (3 + 1.1) / 4,
        "is_capped": 0.25,
    }
    assert {name: stats[name] for name in expected} == pytest.approx(expected)
    base = dict(stats, length=4.0, truncated_share=0.25)
    drift = form_drift(stats, base)
    assert drift == {"length_ratio": 0.5, "truncated_change": 0.25, "unreadable_change": 0.0}


def test_a_row_of_weight_zero_is_not_clipped():
    table = as_table([dataclasses.replace(ROW, advantage=1.0)] * 2).replace(weight=np.array([1.0, 0.0]))
    old = [np.full(2, -1.0)] * 2
    known = evidence(logp=[np.log(2.0) - np.ones(2)] * 2, old_logp=old, trainer_logp=old)
    assert role_statistics(table, [0, 1], known, LossConfig(), corrected=False)["clip_fraction_high"] == 0.5


def test_shares_by_hand():
    table = as_table([dataclasses.replace(ROW, advantage=a) for a in (0.0, 1.0, -1.0, 2.0)])
    assert row_statistics(table)["advantage_zero_share"] == 0.25
    ratios = np.array([[3.0, 1.0], [3.0, 1.0], [0.1, 6.0], [0.1, 1.0]])  # by row and token
    old = [np.full(2, -1.0)] * 4
    known = evidence(logp=old + np.log(ratios), old_logp=old, trainer_logp=old)
    everyone = range(4)
    stats = role_statistics(table, everyone, known, LossConfig(dual_clip=5.0), corrected=False)
    # Of eight tokens: a raised one that gained, a lowered one that lost; one that lost and rose sixfold.
    assert [stats[f"clip_fraction_{side}"] for side in ("high", "low", "dual")] == [1 / 8, 1 / 8, 1 / 8]
    assert "is_weight" not in stats  # nothing was corrected
    gspo = LossConfig("gspo", clip_low=0.5, clip_high=0.5)
    stats = role_statistics(table, everyone, known, gspo, corrected=False)
    of_sequences = np.sqrt(ratios.prod(axis=1))
    assert stats["ratio_mean"] == pytest.approx(of_sequences.mean())
    assert stats["clip_fraction_high"] == 2 / 8  # both tokens of the sequence that gained


def test_rows_that_are_not_trained_have_no_share_in_what_their_tokens_say():
    table = as_table([dataclasses.replace(ROW, advantage=a) for a in (1.0, 1.0, -1.0)])
    old = [np.full(2, -1.0), None, np.full(2, -1.0)]
    new = [np.log([3.0, 3.0]) - 1, None, np.log([0.1, 1.0]) - 1]
    known = evidence(logp=new, old_logp=old, entropy=[np.ones(2), None, np.zeros(2)], trainer_logp=old)
    stats = role_statistics(table, [0, 2], known, LossConfig(), corrected=False)
    assert (stats["tokens"], stats["entropy"], stats["ratio_mean"]) == (4, 0.5, pytest.approx(7.1 / 4))
    assert (stats["clip_fraction_high"], stats["clip_fraction_low"]) == (2 / 4, 1 / 4)


def test_a_role_far_from_its_reference_is_as_far_in_the_report_as_in_the_loss():
    new, ref = np.array([-80.0, -1.0]), np.array([-20.0, -1.0])
    known = evidence(logp=[new], old_logp=[new], ref_logp=[ref], trainer_logp=[new])
    stats = role_statistics(as_table([ROW]), [0], known, LossConfig(), corrected=False)
    divergence = kl_estimate(new, ref)
    assert stats["kl"] == pytest.approx(float(divergence.mean()), rel=1e-6)
    assert stats["kl_max"] == pytest.approx(float(divergence[0]), rel=1e-6) and divergence[0] > 1e8


@pytest.mark.parametrize("is_cap, there", [(2.0, True), (None, False)])
def test_weights_of_the_sampler_are_told_where_the_loss_has_them(is_cap, there):
    old = [np.full(2, -1.0)]
    known = evidence(logp=old, old_logp=old, trainer_logp=old)
    stats = role_statistics(as_table([ROW]), [0], known, LossConfig(is_cap=is_cap), corrected=True)
    assert ("is_weight" in stats) == ("is_capped" in stats) == there


def test_the_share_of_masked_tokens_is_told_where_the_loss_masks():
    longer = dataclasses.replace(ROW, tokens=(3, 4, 5, 6), logprobs=(-1.0, -2.0, -1.0, -1.0))
    old = [np.array([-1.0, -0.5]), np.array([-1.0, -0.5, -1.0, -1.0])]  # means of 0.75 and 0.375 nats
    known = evidence(logp=old, old_logp=old, trainer_logp=old, entropy=[np.ones(2), np.ones(4)])
    table = as_table([ROW, longer])
    told = lambda loss: role_statistics(table, [0, 1], known, loss, corrected=True).get("ratio_masked")
    assert told(LossConfig(mask_ratio=(0.5, 2.0))) == pytest.approx(2 / 6)
    assert told(LossConfig(mask_ratio=(0.5, 1.2))) == 1
    assert told(LossConfig()) is None


def test_one_token_far_off_is_no_less_far_in_the_mean_of_its_sequence():
    length, far = 50, np.arange(50) == 3
    row = dataclasses.replace(ROW, tokens=(3,) * length, logprobs=(-1.0,) * length)
    known = {"logp": [np.where(far, -46.0, -1.0)], "entropy": [np.ones(length)], "trainer_logp": [None]}
    loss = LossConfig("gspo", mask_ratio=(0.5, 2.0))
    told = lambda old: role_statistics(as_table([row]), [0], evidence(**known, old_logp=[old]), loss, True)
    assert told(np.full(length, -1.0))["ratio_mean"] == pytest.approx(np.exp(-0.9))
    assert told(known["logp"][0])["ratio_masked"] == 1


def test_a_loss_that_is_no_number_is_told_where_its_gradient_was_taken():
    reports = {"p0": {"loss": float("nan")}, "p1": {"loss": float("inf")}, "p2": {"loss": 1.0}, "p3": {}}
    told = [*warnings_of({}, reports, {"p0": 1, "p1": 0, "p2": 0, "p3": 0}, tolerance=1e-3)]
    assert len(told) == 2 and told[0].startswith("policy 'p0': its gradient was not finite, and was left out")
    assert told[1].startswith("policy 'p1': its loss is inf")
