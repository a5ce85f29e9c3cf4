"""From episodes to rows to advantages; schedules and statistics on the way."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_jax.learning.batching import BatchConfig, make_batches
from marl_jax.learning.groups import GroupCounts
from marl_jax.learning.losses import LossConfig, kl_estimate
from marl_jax.learning.optimiser import OptimiserConfig, ScheduleConfig, decay_mask, transformation
from marl_jax.learning.role_statistics import Seen, form_drift, role_statistics, row_statistics
from marl_jax.learning.rows import AdvantageConfig, Row, rows_of, with_advantages
from marl_jax.rollouts.episodes import CallRecord, Episode
from marl_jax.tasks.task import Task


def call(role, slot=0, **changes):
    fields = {"policy": "p0", "turn": 0, "prompt_tokens": (1, 2), "tokens": (3, 4), "logprobs": (-1.0, -2.0)}
    return CallRecord(role=role, slot=slot, text="", finish_reason="stop", answer="7", **fields | changes)


EPISODES = [
    Episode(
        Task("t", "math", "?"), sample, "voting", (call("voter", 0), call("voter", 1), call("judge")), "7"
    )
    for sample in range(2)
]


def test_rows_carry_what_the_calls_were():
    cut = dataclasses.replace(EPISODES[0].calls[0], finish_reason="length", answer=None)
    rows = rows_of(
        [dataclasses.replace(EPISODES[0], calls=(cut, call("judge", tokens=(), logprobs=())))], [[1, 0]]
    )
    assert rows == [
        Row("p0", "voter", "t", 0, 0, (1, 2), (3, 4), (-1.0, -2.0), 1.0, truncated=True, readable=False)
    ]
    with pytest.raises(ValueError, match="shorter"):
        rows_of(EPISODES, [[1.0, 0.0], [1.0, 0.0, 1.0]])


def test_rows_carry_the_set_that_top_k_and_top_p_kept():
    (row,) = rows_of(
        [dataclasses.replace(EPISODES[0], calls=(call("voter", kept=((3,), (4, 9, 2))),))], [[1.0]]
    )
    np.testing.assert_array_equal(row.kept, [[3, -1, -1], [4, 9, 2]])
    (batch,) = make_batches([row], ["voter"], BatchConfig((16,)))
    np.testing.assert_array_equal(batch.arrays.kept[0, :2], [[3, -1, -1, -1], [4, 9, 2, -1]])


def test_the_study_groups_each_voter_apart_and_keeps_singletons():
    rows = rows_of(EPISODES, [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    done, counts = with_advantages(rows, AdvantageConfig.study(), "voting")
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert [r.advantage for r in done] == pytest.approx([half, 0, 0, -half, 0, 0])
    assert counts == {"voter": GroupCounts(2, 0, 1), "judge": GroupCounts(1, 0, 1)}
    alone, counts = with_advantages(rows[:1], AdvantageConfig.study(), "voting")
    assert alone[0].advantage == 1.0 and counts["voter"].singletons == 1


def test_agent_wise_and_overlong_advantages():
    rows = rows_of(EPISODES, [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    done, _ = with_advantages(rows, AdvantageConfig(estimator="agent"))
    assert [r.advantage for r in done] == pytest.approx([1.5, -0.5, 0, -0.5, -0.5, 0], abs=1e-5)
    long = [
        dataclasses.replace(rows[0], reward=1.0),
        dataclasses.replace(rows[0], tokens=(3,) * 10, logprobs=(0,) * 10),
    ]
    done, _ = with_advantages(long, AdvantageConfig(estimator="dr_grpo", overlong=(10, 5)))
    assert [r.advantage for r in done] == [0.5, -0.5]


@pytest.mark.parametrize("options", [{}, {"estimator": "agent"}, {"estimator": "rloo", "overlong": (2, 1)}])
def test_another_number_of_rows_compiles_nothing(options, caplog):
    rows = rows_of(EPISODES, [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for count in (6, 5, 4):
            with_advantages(rows[:count], AdvantageConfig(**options))
        assert not [record for record in caplog.records if "ompil" in record.getMessage()]
        jax.jit(lambda x: x + 1)(0)
        assert "ompil" in caplog.text  # a compilation would have been seen


def test_config_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="names no field"):
        AdvantageConfig(group="task,rol")
    with pytest.raises(ValueError, match="'gae'"):
        AdvantageConfig(estimator="gae")
    with pytest.raises(ValueError, match="'exponential'"):
        ScheduleConfig(kind="exponential")


def test_schedules_warm_up_and_end_where_they_say():
    cosine = ScheduleConfig(1.0, "cosine", warmup_steps=4, total_steps=14, final_ratio=0.1)
    assert [cosine(t) for t in (0, 3, 4, 9)] == pytest.approx([0.25, 1.0, 1.0, 0.55])
    assert cosine(14) == cosine(1000) == pytest.approx(0.1)
    constant = ScheduleConfig(0.5, warmup_steps=2, final_ratio=0.1)
    assert [constant(t) for t in (0, 2, 5000)] == [0.25, 0.5, 0.5]
    linear = ScheduleConfig(2.0, "linear", total_steps=10)
    assert [linear(t) for t in (0, 5, 10, 50)] == pytest.approx([2.0, 1.0, 0.0, 0.0])


def test_the_studys_schedule_comes_back_up_after_its_end():
    study = ScheduleConfig.study(total_steps=115, learning_rate=1.0)
    assert (
        study(115) == pytest.approx(0.0)
        and study(165) == pytest.approx(0.5)
        and study(215) == pytest.approx(1.0)
    )
    assert study.clock == "shared"


def test_weight_decay_spares_norms_and_embeddings():
    tree = {
        "embed": jnp.ones(3),
        "layers": {"q": jnp.ones(3), "q_norm": jnp.ones(3)},
        "final_norm": jnp.ones(3),
    }
    assert decay_mask(tree) == {"embed": False, "layers": {"q": True, "q_norm": False}, "final_norm": False}
    for kind in ("adamw", "sgd", "adafactor"):
        optimiser = transformation(OptimiserConfig(kind, weight_decay=0.1))
        zero = jax.tree.map(jnp.zeros_like, tree)
        update, state = optimiser.update(zero, optimiser.init(tree), tree)
        np.testing.assert_allclose(update["layers"]["q"], -0.1, rtol=1e-6)
        assert not np.any(update["embed"]) and not np.any(update["layers"]["q_norm"])
        assert all(x.dtype != jnp.bfloat16 for x in jax.tree.leaves(state))


def test_a_role_far_from_its_reference_is_as_far_in_the_report_as_in_the_loss():
    row = rows_of(EPISODES, [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])[0]
    new, ref = np.array([-80.0, -1.0]), np.array([-20.0, -1.0])
    stats = role_statistics([Seen(row, new, new, np.ones(2), ref, new)], LossConfig(), corrected=False)
    assert stats["kl"] == pytest.approx(float(kl_estimate(new, ref).mean()), rel=1e-6)


def test_what_a_row_pays_for_its_length_is_told_beside_its_reward():
    config = AdvantageConfig(overlong=(2, 2), estimator="dr_grpo", group="task")
    rows, _ = with_advantages(rows_of(EPISODES, [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]), config)
    paid = [row.reward + row.penalty for row in rows]
    means = {
        task: np.mean([p for p, r in zip(paid, rows) if r.task == task]) for task in {r.task for r in rows}
    }
    assert [row.advantage for row in rows] == pytest.approx([p - means[r.task] for p, r in zip(paid, rows)])
    assert [row.penalty for row in rows] == [-min(len(row.tokens) / 2, 1) for row in rows]
    stats = row_statistics(rows)
    assert stats["overlong_penalty"] == pytest.approx(np.mean([row.penalty for row in rows]))
    assert stats["reward"] == pytest.approx(np.mean([row.reward for row in rows]))
    assert "overlong_penalty" not in row_statistics(rows_of(EPISODES, [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]))


def test_statistics_by_hand():
    rows = rows_of(EPISODES, [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])[:2]
    rows[1] = dataclasses.replace(rows[1], truncated=True, advantage=2.0, readable=False)
    old = [np.array([-1.0, -2.0]), np.array([-1.0, -1.5])]  # half a nat off the sampler at one of four tokens
    new = [old[0] + np.log(2.0), old[1]]
    seen = [Seen(row, n, o, np.ones(2), n - 0.1, o) for row, n, o in zip(rows, new, old)]
    stats = row_statistics(rows) | role_statistics(seen, LossConfig(is_cap=1.1), corrected=True)
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


def test_shares_by_hand():
    four = [rows_of(EPISODES, [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])[0]] * 4
    rows = [dataclasses.replace(row, advantage=a) for row, a in zip(four, (0.0, 1.0, -1.0, 2.0))]
    assert row_statistics(rows)["advantage_zero_share"] == 0.25
    ratios = np.array([[3.0, 1.0], [3.0, 1.0], [0.1, 6.0], [0.1, 1.0]])  # by row and token
    old = np.full(2, -1.0)
    seen = [Seen(row, old + np.log(ratio), old, np.ones(2), None, old) for row, ratio in zip(rows, ratios)]
    stats = role_statistics(seen, LossConfig(dual_clip=5.0), corrected=False)
    # Of eight tokens: a raised one that gained, a lowered one that lost; one that lost and rose sixfold.
    assert [stats[f"clip_fraction_{side}"] for side in ("high", "low", "dual")] == [1 / 8, 1 / 8, 1 / 8]
    assert "is_weight" not in stats  # nothing was corrected
    gspo = role_statistics(seen, LossConfig("gspo", clip_low=0.5, clip_high=0.5), corrected=False)
    of_sequences = np.sqrt(ratios.prod(axis=1))
    assert gspo["ratio_mean"] == pytest.approx(of_sequences.mean())
    assert gspo["clip_fraction_high"] == 2 / 8  # both tokens of the sequence that gained


@pytest.mark.parametrize("is_cap, there", [(2.0, True), (None, False)])
def test_weights_of_the_sampler_are_told_where_the_loss_has_them(is_cap, there):
    row, old = rows_of(EPISODES, [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])[0], np.full(2, -1.0)
    stats = role_statistics([Seen(row, old, old, old, None, old)], LossConfig(is_cap=is_cap), corrected=True)
    assert ("is_weight" in stats) == ("is_capped" in stats) == there
