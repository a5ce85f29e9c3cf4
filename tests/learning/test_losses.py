"""Every loss against its formula, written out in float64 numpy one token at a time."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import close

from marl_jax.errors import UserError
from marl_jax.learning.losses import LossConfig, Mean, kl_estimate, policy_loss

RNG = np.random.default_rng(0)
B, T = 5, 7
BATCH = {
    "logp": RNG.normal(-1.5, 0.6, (B, T)),
    "old_logp": RNG.normal(-1.5, 0.6, (B, T)),
    "advantages": np.array([1.3, -0.7, 0.4, -2.0, 0.9]),
    "mask": np.arange(T) < np.array([7, 3, 0, 5, 1])[:, None],  # one row has no valid token
}
EXTRA = {name: RNG.normal(-1.5, 0.6, (B, T)) for name in ("sampler_logp", "ref_logp")} | {
    "entropy": RNG.uniform(0, 2, (B, T))
}


def token_loss(o, lp, old, a, sequence_log_ratio):
    clip = lambda x, low, high: min(max(x, low), high)
    ratio = np.exp(clip(lp - old, -20, 20))
    low, high = 1 - o.get("clip_low", 0.2), 1 + o.get("clip_high", 0.28)
    kind = o.get("kind", "ppo")
    if kind == "pg":
        return -a * lp
    if kind == "cispo":
        return -clip(ratio, low, high) * a * lp
    if kind == "gspo":
        ratio = np.exp(sequence_log_ratio)
    loss = max(-a * ratio, -a * clip(ratio, low, high))
    return min(loss, -a * o["dual_clip"]) if o.get("dual_clip") and a < 0 else loss


def expected(batch, **o):
    """(numerator, denominator) by loops, and the size of the terms that the numerator adds up."""
    aggregation = o.get("aggregation", "sequence_mean_token_mean")
    per_sequence, sizes, tokens = [], [], 0
    for b in range(len(batch["advantages"])):
        valid = np.flatnonzero(batch["mask"][b])
        if not len(valid):
            continue
        lp, old = batch["logp"][b], batch["old_logp"][b]
        mean = np.mean(np.clip(lp[valid] - old[valid], -20, 20))
        losses = []
        for t in valid:
            value = token_loss(o, lp[t], old[t], batch["advantages"][b], mean)
            if "sampler_logp" in o:
                distance = old - o["sampler_logp"][b]
                if o.get("is_cap", 2.0):
                    value *= min(np.exp(distance[t]), o.get("is_cap", 2.0))
                if "mask_ratio" in o:
                    low, high = o["mask_ratio"]
                    value *= low <= np.exp(np.mean(distance[valid])) <= high
            if "ref_logp" in o:
                d = o["ref_logp"][b, t] - lp[t]
                value += (
                    o["kl_coef"] * {"k1": -d, "k2": d * d / 2, "k3": np.exp(d) - d - 1}[o.get("kl", "k3")]
                )
            if "entropy" in o:
                value -= o["entropy_coef"] * o["entropy"][b, t]
            losses.append(value)
        tokens += len(losses)
        norm = {"sequence_mean_token_mean": len(losses), "sequence_mean_token_sum_norm": o.get("max_length")}
        per_sequence.append(sum(losses) / norm.get(aggregation, 1))
        sizes.append(sum(map(abs, losses)) / norm.get(aggregation, 1))
    return sum(per_sequence), tokens if aggregation == "token_mean" else len(per_sequence), sum(sizes)


CASES = [
    {},
    {"clip_low": 0.1, "clip_high": 0.5},
    {"clip_low": 0.0, "clip_high": 0.0},
    {"dual_clip": 3.0},
    {"dual_clip": 1.05},
    {"aggregation": "token_mean"},
    {"aggregation": "sequence_mean_token_sum"},
    {"aggregation": "sequence_mean_token_sum_norm", "max_length": 16},
    {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
    {"kind": "gspo"},
    {"kind": "cispo", "aggregation": "token_mean"},
    {"kind": "cispo"},
    {"kind": "pg"},
    {"kind": "pg", "aggregation": "token_mean"},
    {"sampler_logp": EXTRA["sampler_logp"]},
    {"sampler_logp": EXTRA["sampler_logp"], "is_cap": 1.1, "kind": "pg"},
    {"sampler_logp": EXTRA["sampler_logp"], "mask_ratio": (0.8, 1.25)},
    {
        "sampler_logp": EXTRA["sampler_logp"],
        "mask_ratio": (0.8, 1.25),
        "is_cap": None,
        "aggregation": "token_mean",
    },
    {"ref_logp": EXTRA["ref_logp"], "kl_coef": 0.1},
    {"ref_logp": EXTRA["ref_logp"], "kl_coef": 0.1, "kl": "k2", "aggregation": "token_mean"},
    {"ref_logp": EXTRA["ref_logp"], "kl_coef": 0.1, "kl": "k1"},
    {"entropy": EXTRA["entropy"], "entropy_coef": 0.01, "dual_clip": 2.0},
]
name = lambda case: ",".join(f"{k}={v if np.ndim(v) == 0 else '...'}" for k, v in case.items()) or "default"


def split(options):
    arrays = {k: v for k, v in options.items() if isinstance(v, np.ndarray)}
    return arrays, {k: v for k, v in options.items() if k not in arrays}


@pytest.mark.parametrize("options", CASES, ids=name)
def test_value_plain_jitted_and_vmapped(options):
    numerator, denominator, size = expected(BATCH, **options)
    loss = policy_loss(**BATCH, **options)
    close(loss.numerator, numerator, of=size)
    np.testing.assert_allclose(loss.denominator, denominator)
    close(loss.value, numerator / denominator, of=size / denominator)
    arrays, settings = split(options)
    run = lambda batch, arrays: policy_loss(**batch, **arrays, **settings)
    close(jax.jit(run)(BATCH, arrays).numerator, numerator, of=size)
    two = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), (BATCH, arrays))
    close(jax.vmap(run)(*two).numerator, [numerator] * 2, of=size)


@pytest.mark.parametrize("options", [o for o in CASES if o.get("kind") not in ("cispo", "gspo")], ids=name)
def test_gradient_equals_finite_differences(options):
    step, got = 1e-5, jax.grad(lambda lp: policy_loss(**dict(BATCH, logp=lp), **options).numerator)
    want = np.zeros((B, T))
    # Sampler weights do not depend on logp, so plain differences of the reference are the gradient.
    for b, t in itertools.product(range(B), range(T)):
        moved = [
            dict(BATCH, logp=BATCH["logp"] + s * (np.arange(B * T) == b * T + t).reshape(B, T))
            for s in (step, -step)
        ]
        want[b, t] = (expected(moved[0], **options)[0] - expected(moved[1], **options)[0]) / (2 * step)
    np.testing.assert_allclose(got(jnp.asarray(BATCH["logp"])), want, atol=2e-5)


def test_a_sequence_far_from_its_sampler_teaches_nothing_wherever_it_is_packed():
    old, new = np.full((2, 3), -1.0), np.full((2, 3), -0.9)
    mask, sampler = np.array([[1, 1, 1], [1, 1, 0]]), old.copy()
    sampler[0, 0] -= 3.0  # one token's 3 nats are a mean of 1 in the first sequence
    options = {"mask_ratio": (0.5, 2.0), "is_cap": None}
    loss = lambda logp: policy_loss(logp, old, np.ones(2), mask, sampler_logp=sampler, **options)
    grad = jax.grad(lambda logp: loss(logp).numerator)(jnp.asarray(new))
    assert not grad[0].any() and grad[1, :2].all()
    assert loss(new).denominator == 2 and float(loss(new).metrics["ratio_masked"].value) == pytest.approx(0.6)
    # Both in one row.
    flat = lambda x: jnp.asarray(x).reshape(1, 6)
    packed = lambda logp: policy_loss(
        logp, flat(old), jnp.ones((1, 6)), flat(mask), sampler_logp=flat(sampler),
        sequences=jnp.array([[0, 0, 0, 1, 1, 1]]), **options,
    )  # fmt: skip
    np.testing.assert_allclose(
        jax.grad(lambda logp: packed(logp).numerator)(flat(new)), flat(grad), rtol=1e-6
    )
    sampler[0, 0] += 1.0  # a mean of 0.67, and log 2 is 0.69
    assert (
        float(loss(new).metrics["ratio_masked"].value) == 0
        and jax.grad(lambda logp: loss(logp).numerator)(jnp.asarray(new))[0].all()
    )


@pytest.mark.parametrize("gap", [-45.0, 45.0])
def test_one_token_far_off_is_no_less_far_in_the_mean_of_its_sequence(gap):
    new, mask = np.full((1, 50), -1.0), np.ones((1, 50))
    other = np.where(np.arange(50) == 3, new - gap, new)
    # exp(0.9) is above 2 and exp(-0.9) below 0.5; the mean of a gap cut to 20 nats would lie between.
    far = policy_loss(new, new, [1.0], mask, sampler_logp=other, mask_ratio=(0.5, 2.0), is_cap=None)
    assert float(far.metrics["ratio_masked"]) == 1 and far.value == 0
    ratio = policy_loss(new, other, [1.0], mask, kind="gspo").metrics["ratio"]
    assert float(ratio) == pytest.approx(np.exp(gap / 50))


def test_cispo_gradient_is_the_clipped_ratio_times_the_advantage_even_where_clipped():
    grad = jax.grad(
        lambda lp: policy_loss(**dict(BATCH, logp=lp), kind="cispo", aggregation="token_mean").numerator
    )
    ratio = np.exp(BATCH["logp"] - BATCH["old_logp"])
    want = -np.clip(ratio, 0.8, 1.28) * BATCH["advantages"][:, None] * BATCH["mask"]
    np.testing.assert_allclose(grad(jnp.asarray(BATCH["logp"])), want, rtol=1e-5)


def test_beyond_its_limit_a_log_ratio_has_no_gradient_in_gspo_either():
    logp, old = jnp.zeros((1, 3)), jnp.full((1, 3), -25.0)
    value = lambda x, kind: policy_loss(x, old, [-1.0], jnp.ones((1, 3)), kind=kind).value
    for kind in ("ppo", "gspo"):
        assert not np.any(jax.grad(value)(logp, kind))


@pytest.mark.parametrize("shape", [(1,), (3,), (1, 4), (2, 3)])
def test_advantages_of_another_shape_are_refused(shape):
    rows = jnp.zeros((2, 4))
    with pytest.raises(
        ValueError, match=r"advantages have the shape .* give one for each of the 2 rows, or \[2, 4\]"
    ):
        policy_loss(rows, rows, jnp.zeros(shape), jnp.ones((2, 4)))


def test_gspo_gradient_is_the_sequence_ratio_times_the_advantage_inside_the_clip():
    grad = jax.grad(
        lambda lp: policy_loss(**dict(BATCH, logp=lp), kind="gspo", clip_low=0.1, clip_high=0.1).numerator
    )
    want = np.zeros((B, T))
    for b in range(B):
        valid = np.flatnonzero(BATCH["mask"][b])
        if len(valid):
            s = np.exp(np.mean((BATCH["logp"] - BATCH["old_logp"])[b, valid]))
            a = BATCH["advantages"][b]
            inside = s <= 1.1 if a > 0 else s >= 0.9
            want[b, valid] = -a * s / len(valid) * inside
    np.testing.assert_allclose(grad(jnp.asarray(BATCH["logp"])), want, rtol=1e-5)


@pytest.mark.parametrize("options", CASES, ids=name)
def test_micro_batches_add_up_to_the_batch(options):
    arrays, settings = split(options)
    run = lambda rows: policy_loss(**{k: v[rows] for k, v in (BATCH | arrays).items()}, **settings)
    whole, parts = run(slice(None)), [run(slice(0, 1)), run(slice(1, 3)), run(slice(3, None))]
    close(sum(p.numerator for p in parts), whole.numerator, of=expected(BATCH, **options)[2])
    np.testing.assert_allclose(sum(p.denominator for p in parts), whole.denominator)
    for key, metric in whole.metrics.items():
        total = parts[0].metrics[key] + parts[1].metrics[key] + parts[2].metrics[key]
        close(
            total.value, metric.value, of=1.0 + abs(metric.value), err_msg=key
        )  # means of terms of about one


@pytest.mark.parametrize("options", CASES, ids=name)
def test_packed_rows_weigh_what_separate_rows_weigh(options):
    pack = lambda x: jnp.asarray(x).reshape(1, -1)
    arrays, settings = split(options)
    spread = dict(BATCH, advantages=np.repeat(BATCH["advantages"], T).reshape(B, T))
    packed = policy_loss(
        **{k: pack(v) for k, v in (spread | arrays).items()},
        **settings,
        sequences=pack(np.repeat(np.arange(B), T)),
    )
    numerator, denominator, size = expected(BATCH, **options)
    close(packed.numerator, numerator, of=size)
    np.testing.assert_allclose(packed.denominator, denominator)


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "pg", f"{__name__}:logarithmic"])
def test_an_all_masked_batch_is_zero_not_nan(kind):
    run = lambda lp: policy_loss(lp, lp, np.ones(B), np.zeros((B, T)), kind=kind).value
    value, grad = jax.value_and_grad(run)(jnp.full((B, T), jnp.nan))
    assert value == 0 and not np.any(grad)


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "pg", f"{__name__}:logarithmic"])
def test_what_stands_on_masked_tokens_changes_nothing(kind):
    mask, junk = BATCH["mask"], np.full((B, T), -np.inf)
    run = lambda lp, old: (
        policy_loss(lp, old, BATCH["advantages"], mask, kind=kind, ref_logp=old, kl_coef=0.1).value
    )
    clean = jax.value_and_grad(run)(jnp.asarray(BATCH["logp"]), BATCH["old_logp"])
    dirty = jax.value_and_grad(run)(
        jnp.where(mask, BATCH["logp"], junk), np.where(mask, BATCH["old_logp"], np.nan)
    )
    np.testing.assert_array_equal(clean[0], dirty[0])
    np.testing.assert_array_equal(clean[1], dirty[1])


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "pg"])
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_huge_ratios_stay_finite(kind, gap):
    run = lambda lp: (
        policy_loss(lp, lp - gap, np.ones(B), np.ones((B, T)), kind=kind, sampler_logp=lp + gap).value
    )
    value, grad = jax.value_and_grad(run)(jnp.full((B, T), -1.0))
    assert np.isfinite(value) and np.all(np.isfinite(grad))


def test_a_huge_ratio_with_a_negative_advantage_is_exp_of_20_and_dual_clip_bounds_it():
    args = (jnp.zeros((1, 1)), jnp.full((1, 1), -300.0), jnp.array([-1.0]), jnp.ones((1, 1)))
    np.testing.assert_allclose(policy_loss(*args).value, np.exp(20.0), rtol=1e-6)
    np.testing.assert_allclose(policy_loss(*args, dual_clip=3.0).value, 3.0)


def test_on_policy_every_ratio_loss_has_the_policy_gradient():
    lp = jnp.asarray(BATCH["logp"])
    grads = [
        jax.grad(
            lambda x, kind=kind: policy_loss(x, lp, BATCH["advantages"], BATCH["mask"], kind=kind).value
        )(lp)
        for kind in ("ppo", "gspo", "cispo", "pg")
    ]
    for grad in grads[1:]:
        np.testing.assert_allclose(grad, grads[0], rtol=1e-5)


@pytest.mark.parametrize("clip", [(0.0, 0.28), (0.2, 0.0), (0.0, 0.0)])
def test_a_ratio_at_its_bound_is_not_beyond_it(clip):
    """Every first update has ratios of 1, which is the bound where a clip is 0."""
    logp, mask = jnp.full((2, 1), -1.0), jnp.ones((2, 1), bool)
    loss = lambda x: policy_loss(
        x, logp, jnp.array([1.0, -1.0]), mask, clip_low=clip[0], clip_high=clip[1], aggregation="token_mean"
    )
    np.testing.assert_array_equal(jax.grad(lambda x: loss(x).numerator)(logp), [[-1.0], [1.0]])


def test_no_gradient_reaches_anything_but_the_policys_own_log_probs():
    run = lambda old, sampler, ref, advantages, kl_coef: (
        policy_loss(
            BATCH["logp"],
            old,
            advantages,
            BATCH["mask"],
            sampler_logp=sampler,
            ref_logp=ref,
            kl_coef=kl_coef,
        ).value
    )
    given = (BATCH["old_logp"], *list(EXTRA.values())[:2], BATCH["advantages"], 0.1)
    grads = jax.grad(run, argnums=range(5))(*(jnp.asarray(x, jnp.float32) for x in given))
    assert not any(np.any(grad) for grad in grads)


def test_no_gradient_reaches_a_bound_that_is_traced():
    logp, old = jnp.array([[0.5, -0.5, 2.0]] * 2), jnp.zeros((2, 3))
    given = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "is_cap": 1.1, "entropy_coef": 0.1}
    run = lambda bounds: (
        policy_loss(
            logp, old, np.array([1, -1]), old + 1, sampler_logp=old - 1, entropy=old + 1, **bounds
        ).value
    )
    assert not any(jax.grad(run)(given).values())
    by_row = {"clip_low": jnp.full(2, 0.2), "clip_high": jnp.full((2, 3), 0.28)}
    assert not any(np.any(grad) for grad in jax.grad(run)(by_row).values())


def test_the_loss_without_its_terms_is_told():
    plain = policy_loss(**BATCH)
    terms = {"ref_logp": EXTRA["ref_logp"], "kl_coef": 0.1, "entropy": EXTRA["entropy"], "entropy_coef": 0.01}
    whole = policy_loss(**BATCH, **terms)
    _, denominator, size = expected(BATCH)
    close(whole.metrics["policy_loss"], plain.value, of=size / denominator)
    assert abs(float(whole.value) - float(plain.value)) > 1e-3


def test_clip_fractions_count_the_tokens_whose_gradient_the_clip_takes():
    log_ratio = np.log([[0.5, 1.0, 1.5], [0.5, 1.0, 5.0]])
    loss = policy_loss(log_ratio, np.zeros((2, 3)), np.array([1.0, -1.0]), np.ones((2, 3)), dual_clip=3.0)
    fractions = {k: float(v) for k, v in loss.metrics.items() if k.startswith("clip")}
    sixth = pytest.approx(1 / 6)
    assert fractions == {"clip_fraction_low": sixth, "clip_fraction_high": sixth, "clip_fraction_dual": sixth}


def test_kl_estimators_agree_in_expectation():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    exact, size = np.sum(p * np.log(p / q)), np.sum(p * np.abs(np.log(p / q)))
    estimate = lambda kind: float(np.sum(p * np.asarray(kl_estimate(np.log(p), np.log(q), kind))))
    close([estimate("k1"), estimate("k3")], exact, of=size)
    assert float(kl_estimate(np.log(0.5), np.log(0.2), "k2")) == pytest.approx(np.log(2.5) ** 2 / 2)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_an_anchor_pulls_however_far_the_policy_has_gone(kind):
    for gap in (25.0, -25.0):  # reference - policy
        estimate = lambda logp, gap=gap: kl_estimate(logp, jnp.float32(gap), kind)
        value, grad = jax.value_and_grad(estimate)(jnp.float32(0))
        # k3's exponential goes on as a straight line beyond 20.
        exact = {"k1": -gap, "k2": gap**2 / 2, "k3": np.exp(min(gap, 20)) * (1 + max(gap - 20, 0)) - gap - 1}
        slope = {"k1": 1.0, "k2": -gap, "k3": 1 - np.exp(min(gap, 20))}
        assert float(value) == pytest.approx(exact[kind], rel=1e-6)
        assert float(grad) == pytest.approx(slope[kind], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kind": "gspo", "aggregation": "token_mean"}, "'gspo' cannot use aggregation 'token_mean'"),
        ({"kind": "cispo", "dual_clip": 3.0}, "dual_clip belongs to kind 'ppo', not 'cispo'; set it to none"),
        ({"kind": f"{__name__}:linear", "dual_clip": 3.0}, f"'ppo', not '{__name__}:linear'"),
        ({"dual_clip": 0.5}, "above 1"),
        ({"aggregation": "mean"}, "aggregation .*'mean'"),
        ({"kind": "trpo"}, "unknown"),
        ({"clip_low": -0.1}, "negative"),
        ({"aggregation": "sequence_mean_token_sum_norm"}, "max_length"),
        ({"max_length": 7}, "max_length"),
        ({"mask_ratio": (2.0, 0.5)}, r"mask_ratio \(2.0, 0.5\) must be"),
        ({"mask_ratio": (0.0, 2.0)}, "mask_ratio"),
        ({"mask_ratio": (float("nan"), 2.0)}, "mask_ratio"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        policy_loss(**BATCH, **options)
    with pytest.raises(ValueError, match=reason):
        LossConfig(**options)


@pytest.mark.parametrize("options", [{"kl_coef": 0.1}, {"entropy_coef": 0.1}])
def test_a_term_without_its_input_is_refused(options):
    with pytest.raises(ValueError, match="needs"):
        policy_loss(**BATCH, **options)


def test_shapes_that_disagree_are_refused():
    with pytest.raises(AssertionError):
        policy_loss(BATCH["logp"], BATCH["old_logp"][:, 1:], BATCH["advantages"], BATCH["mask"])
    for name in ("sampler_logp", "ref_logp", "entropy"):  # by sequence, which would broadcast
        with pytest.raises(AssertionError):
            policy_loss(**BATCH | {name: BATCH["logp"][:, 0]})
    with pytest.raises(ValueError, match="sequences must be numbers from 0 to"):
        policy_loss(**BATCH, sequences=np.full(BATCH["logp"].shape, -1))
    rows = np.broadcast_to(np.arange(B)[:, None], BATCH["logp"].shape)
    padded = policy_loss(**BATCH, sequences=np.where(BATCH["mask"], rows, -1))  # of masked tokens any
    np.testing.assert_array_equal(padded.numerator, policy_loss(**BATCH, sequences=rows).numerator)


def test_losses_in_64_bits_are_exact_in_them():
    wide = {name: np.asarray(value, np.float64) for name, value in BATCH.items()}
    with jax.enable_x64(True):
        one, other = (
            policy_loss(**wide, aggregation=how, max_length=7 if "norm" in how else None)
            for how in ("sequence_mean_token_sum_norm", "sequence_mean_token_mean")
        )
        assert one.numerator.dtype == other.numerator.dtype == np.float64
    logp, old, mask = wide["logp"], wide["old_logp"], wide["mask"] != 0
    ratio, gain = np.exp(logp - old), wide["advantages"].reshape(len(logp), -1)
    token = -np.minimum(ratio * gain, np.clip(ratio, 0.8, 1.28) * gain) * mask
    assert float(one.numerator) == pytest.approx(token.sum() / 7, rel=1e-12)
    assert float(other.numerator) == pytest.approx(
        (token.sum(1) / np.maximum(mask.sum(1), 1)).sum(), rel=1e-12
    )


def test_a_kl_of_half_precision_is_finite():
    # Of the host: on a processor without F16C, XLA converts no float16.
    assert np.isfinite(float(kl_estimate(np.float16(-15), np.float16(0))))


def test_bounds_may_be_traced_and_are_checked_where_they_are_not():
    logp, old = jnp.array([[0.1, -0.5, 0.6]]), jnp.zeros((1, 3))
    plain = lambda **bounds: (
        policy_loss(logp, old, jnp.array([-1.0]), jnp.ones((1, 3)), sampler_logp=old - 0.4, **bounds).value
    )
    bounds = {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5, "is_cap": 1.2}
    np.testing.assert_allclose(jax.jit(plain)(**bounds), plain(**bounds), rtol=1e-6)
    for wrong in ({"is_cap": -1.0}, {"is_cap": float("nan")}, {"clip_low": -0.1}, {"dual_clip": 1.0}):
        with pytest.raises(ValueError, match=r"is_cap|clip"):
            plain(**wrong)
    without = policy_loss(logp, old, jnp.array([-1.0]), jnp.ones((1, 3)))
    np.testing.assert_array_equal(plain(is_cap=None), without.value)


def test_bounds_of_masked_tokens_may_be_nan():
    logp, mask = jnp.array([[0.1, -0.5]]), jnp.array([[1, 0]])
    run = lambda bound: policy_loss(logp, logp - 1, jnp.ones(1), mask, clip_low=bound, clip_high=bound).value
    want = run(jnp.array([[0.2, 0.2]]))
    for bounded in (run, jax.jit(run)):
        np.testing.assert_array_equal(bounded(jnp.array([[0.2, jnp.nan]])), want)
    for bad in (float("nan"), jnp.array([[jnp.nan, 0.2]])):
        with pytest.raises(ValueError, match="clip range"):
            policy_loss(logp, logp, jnp.ones(1), mask, clip_low=bad)


def test_every_number_may_be_traced():
    numbers = {"mask_ratio": (0.8, 1.25), "max_length": 16, "is_cap": 1.5}
    run = lambda numbers: (
        policy_loss(
            **BATCH, sampler_logp=EXTRA["sampler_logp"], aggregation="sequence_mean_token_sum_norm", **numbers
        ).value
    )
    np.testing.assert_allclose(jax.jit(run)(numbers), run(numbers), rtol=1e-6)
    with pytest.raises(ValueError, match="at least 1"):
        run(numbers | {"max_length": 0})


def test_lists_are_arrays_and_a_zero_of_any_type_needs_no_input():
    lists = {name: values.tolist() for name, values in BATCH.items()}
    zeros = {"kl_coef": np.float32(0), "entropy_coef": jnp.zeros(())}
    np.testing.assert_array_equal(policy_loss(**lists, **zeros).value, policy_loss(**BATCH).value)
    more = {"clip_low": np.linspace(0.0, 0.1, B), "sequences": np.repeat(np.arange(B), T).reshape(B, T)}
    listed = {name: values.tolist() for name, values in more.items()}
    np.testing.assert_array_equal(policy_loss(**lists, **listed).value, policy_loss(**BATCH, **more).value)


def test_a_metric_reads_as_the_number_that_it_is():
    metric = Mean(jnp.array(3.0), jnp.array(4.0))
    assert np.isfinite(metric) and jnp.isfinite(metric) and metric < 1 and metric > 0.5
    assert 0.75 <= metric <= 0.75 and metric == 0.75 and metric != 0.5
    assert metric and not Mean(jnp.array(0.0), jnp.array(4.0))
    assert f"{metric:.2f}" == "0.75" and metric.item() == float(metric) == np.asarray(metric) == 0.75
    np.testing.assert_allclose(metric, 0.75)
    assert (metric + Mean(jnp.array(1.0), jnp.array(4.0))).value == 0.5
    with pytest.raises(TypeError):
        metric + 1


def linear(logp, ratio, advantages):
    """A loss of one's own: the ratio without any clip."""
    return -advantages * ratio


def test_a_loss_of_ones_own_is_given_log_probs_ratios_and_advantages():
    logp = jnp.log(jnp.array([[0.5, 0.25], [0.9, 0.1]]))
    old = jnp.log(jnp.array([[0.25, 0.25], [0.3, 0.2]]))
    mask, advantages = jnp.array([[1, 1], [1, 0]]), jnp.array([2.0, -1.0])
    loss = policy_loss(logp, old, advantages, mask, kind=f"{__name__}:linear", aggregation="token_mean")
    assert float(loss.value) == pytest.approx((-2 * 2 - 2 * 1 + 1 * 3) / 3, rel=1e-6)


def logarithmic(logp, ratio, advantages):
    """Infinite where a log-prob is 0."""
    return -advantages * ratio + jnp.log(-logp)


def summed(logp, ratio, advantages):
    return (-advantages * ratio).sum()


def complex_one(logp, ratio, advantages):
    return -advantages * ratio * 1j


def raising(logp, ratio, advantages):
    raise KeyError("nothing")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("summed", r"loss '\w+:summed' returned .*; return an array \[5, 7\], one loss a token"),
        ("complex_one", r"loss '\w+:complex_one' returned [^;]*; return an array \[5, 7\], one loss a token"),
        ("raising", r"loss '\w+:raising' raised KeyError: 'nothing' \(in raising, line"),
    ],
)
def test_a_loss_of_ones_own_is_told_what_is_wrong_with_it(name, reason):
    with pytest.raises(UserError, match=reason) as refusal:
        policy_loss(**BATCH, kind=f"{__name__}:{name}")
    assert isinstance(refusal.value, ValueError)
    with pytest.raises(ValueError, match="loss 'json:nothing': module 'json' has no 'nothing'"):
        LossConfig(kind="json:nothing")


@pytest.mark.parametrize("options", CASES, ids=name)
def test_no_dtype_is_promoted_by_chance(options):
    narrow = {name: jnp.asarray(value, jnp.float32) for name, value in BATCH.items()}
    narrow["mask"] = narrow["mask"] != 0
    extra = {name: jnp.asarray(value, jnp.float32) for name, value in EXTRA.items() if name in options}
    with jax.numpy_dtype_promotion("strict"):
        loss = policy_loss(**narrow, **options | extra)
    close(loss.value, policy_loss(**BATCH, **options).value, of=1)


def test_a_coefficient_that_is_a_number_does_not_widen_the_loss():
    narrow = {name: np.asarray(value, np.float32) for name, value in BATCH.items()}
    with jax.enable_x64(True):
        loss = policy_loss(**narrow, ref_logp=narrow["old_logp"], kl_coef=0.1)
    assert {leaf.dtype for leaf in (loss.numerator, loss.denominator)} == {np.dtype(np.float32)}
