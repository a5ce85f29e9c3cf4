"""Interventions are numbers read off a Gram matrix; here each meets the vectors it stands for, in float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import close, close_trees

from marl_jax.learning.by_role.interventions import (
    InterventionConfig,
    Mixing,
    PerRole,
    balance,
    clip,
    coefficients,
    damp,
    project_conflicts,
)

VECTORS = np.random.default_rng(0).normal(size=(3, 20)) * np.array([[10.0], [1.0], [3.0]])
VECTORS[2] -= 0.4 * VECTORS[0]  # role 2 opposes role 0
GRAM = jnp.asarray(VECTORS @ VECTORS.T, jnp.float32)
NORMS = np.linalg.norm(VECTORS, axis=1)


def weights(mixing, multiplicity=(1.0, 1.0, 1.0), *, mixed=(True, True, True), clip=None):
    roles = PerRole(
        np.array(multiplicity), np.array(mixed), None if clip is None else np.array(clip), np.eye(3)
    )
    return np.asarray(coefficients(mixing, GRAM, roles))


def shares(factors):
    mass = NORMS * np.asarray(factors)
    return mass / mass.sum()


def test_equalising_gives_every_role_the_same_share_and_keeps_the_mass():
    factors = np.asarray(balance(GRAM, None))
    np.testing.assert_allclose(shares(factors), [1 / 3] * 3, rtol=1e-5)
    assert (NORMS * factors).sum() == pytest.approx(NORMS.sum(), rel=1e-5)


@pytest.mark.parametrize("cap", [1.0, 0.9, 0.6, 0.5, 0.4, 0.34])
def test_a_cap_leaves_no_role_more_than_its_share_and_touches_no_more_than_it_must(cap):
    factors = np.asarray(balance(GRAM, cap))
    assert shares(factors).max() <= cap * (1 + 1e-5)
    cut = factors < 1
    np.testing.assert_allclose(shares(factors)[cut], cap, rtol=1e-4)
    assert cut.any() == (NORMS.max() / NORMS.sum() > cap)


def test_a_lone_gradient_is_not_balanced_away():
    gram = jnp.diag(jnp.array([4.0, 0.0]))
    for cap in (None, 0.5, 0.1):
        np.testing.assert_array_equal(balance(gram, cap), [1.0, 1.0])
    np.testing.assert_array_equal(balance(jnp.zeros((2, 2)), 0.5), [1.0, 1.0])


def test_pcgrad_removes_what_opposes_the_others():
    want = []
    for i, own in enumerate(VECTORS):
        own = own.copy()
        for j, other in enumerate(VECTORS):
            if i != j and own @ other < 0:
                own -= own @ other / (other @ other) * other
        want.append(own)
    got = np.asarray(project_conflicts(GRAM)) @ VECTORS
    close_trees(got, np.array(want))
    assert VECTORS[0] @ VECTORS[2] < 0


def test_parts_that_agree_are_left_as_they_are():
    agree = np.array([[1.0, 0.2], [0.5, 1.0]])
    np.testing.assert_allclose(project_conflicts(jnp.asarray(agree @ agree.T)), np.eye(2), atol=1e-7)


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_what_is_done_does_not_depend_on_the_size_of_gradients(size):
    gram = GRAM * size**2
    np.testing.assert_allclose(project_conflicts(gram), project_conflicts(GRAM), rtol=1e-4, atol=1e-6)
    limits = np.array([np.inf, 0.5, 1e9]) * size
    np.testing.assert_allclose(clip(gram, limits), [1, 0.5 / NORMS[1], 1], rtol=1e-5)
    for cap in (None, 0.5):
        np.testing.assert_allclose(balance(gram, cap), balance(GRAM, cap), rtol=1e-4)


def test_two_conflicting_roles_no_longer_oppose_each_other():
    g = np.array([[1.0, 0.0], [-1.0, 1.0]])
    mixed = np.asarray(project_conflicts(jnp.asarray(g @ g.T))) @ g
    np.testing.assert_allclose(mixed, [[0.5, 0.5], [0.0, 1.0]], atol=1e-6)
    assert mixed[0] @ g[1] >= -1e-6 and mixed[1] @ g[0] >= -1e-6


def test_multiplicity_is_divided_out():
    mixing = Mixing(normalise_multiplicity=True)
    np.testing.assert_allclose(weights(mixing, (3.0, 1.0, 2.0)), [1 / 3, 1, 0.5])


def test_multiplicity_is_divided_out_of_the_roles_that_are_mixed():
    mixing = Mixing(normalise_multiplicity=True)
    got = weights(mixing, (3.0, 1.0, 2.0), mixed=(False, True, True))
    np.testing.assert_allclose(got, [1, 1, 0.5])


def test_a_role_that_is_not_mixed_counts_in_the_mean_and_keeps_its_part():
    got = NORMS * weights(Mixing(balance="equalise"), mixed=(True, False, True))
    np.testing.assert_allclose(got, [NORMS.mean(), NORMS[1], NORMS.mean()], rtol=1e-5)


@pytest.mark.parametrize("cap", [0.5, 0.3])
def test_a_role_that_is_not_mixed_is_not_cut_and_others_are_cut_to_their_share_of_all(cap):
    assert NORMS[0] / NORMS.sum() > 0.6 and NORMS[1] / NORMS.sum() < 0.1
    got = NORMS * weights(Mixing(balance="cap", max_share=cap), mixed=(False, True, False))
    np.testing.assert_allclose(got, NORMS, rtol=1e-6)  # what is mixed has little as it is
    got = NORMS * weights(Mixing(balance="cap", max_share=cap), mixed=(True, False, False))
    np.testing.assert_allclose(got[1:], NORMS[1:], rtol=1e-6)
    assert got[0] / got.sum() == pytest.approx(cap, rel=1e-4)


def test_a_cap_is_kept_by_any_two_of_three_roles():
    rng = np.random.default_rng(0)
    for norms in 10.0 ** rng.uniform(-2, 2, (100, 3)):
        for cap in (0.2, 0.4, 0.7):
            gram = jnp.diag(jnp.asarray(norms**2))
            got = norms * np.asarray(balance(gram, cap, np.array([True, True, False])))
            share = got / got.sum()
            assert got[2] == pytest.approx(norms[2]) and np.all(got <= norms * (1 + 1e-5))
            assert share[:2].max() <= cap * (1 + 1e-3)
            np.testing.assert_allclose(share[got < norms * (1 - 1e-4)], cap, rtol=1e-3)


def test_a_role_that_is_not_mixed_keeps_what_opposes_the_others():
    got = weights(Mixing(project_conflicts=True), mixed=(False, False, True)) @ VECTORS
    stripped = VECTORS[2].copy()
    for other in VECTORS[:2]:
        stripped -= min(stripped @ other, 0) / (other @ other) * other
    assert VECTORS[2] @ VECTORS[0] < 0
    close(got, VECTORS[0] + VECTORS[1] + stripped, of=NORMS.sum())


def test_a_role_is_clipped_whether_it_is_mixed_or_not():
    got = weights(Mixing(), mixed=(True, False, True), clip=(np.inf, 0.5, np.inf))
    np.testing.assert_allclose(got, [1, 0.5 / NORMS[1], 1], rtol=1e-5)


def test_interventions_act_one_after_another():
    multiplicity, limit = np.array([5.0, 1.0, 1.0]), np.array([np.inf, np.inf, 0.7])
    own = VECTORS / multiplicity[:, None]
    own = own * (np.linalg.norm(own, axis=1).mean() / np.linalg.norm(own, axis=1))[:, None]
    projected = []
    for i in range(3):
        g = own[i].copy()
        for j in range(3):
            if i != j:
                g -= min(g @ own[j], 0) / (own[j] @ own[j]) * own[j]
        projected.append(g)
    projected[2] = projected[2] * min(1, 0.7 / np.linalg.norm(projected[2]))
    mixing = Mixing(True, "equalise", project_conflicts=True)
    got = weights(mixing, multiplicity, clip=limit) @ VECTORS
    close(got, np.sum(projected, axis=0), of=np.linalg.norm(own, axis=1).sum())


@pytest.mark.parametrize(
    "norms, cap",
    [((100, 1), 0.4), ((10, 3, 1), 0.3), ((0.449, 2.3e-4, 299), 1 / 3), ((100, 1, 0), 0.4), ((5, 5, 5), 0.1)],
    ids=str,
)
def test_a_cap_that_too_few_roles_can_keep_makes_them_equal(norms, cap):
    norms = np.array(norms, float)
    got = np.asarray(balance(jnp.diag(jnp.asarray(norms**2)), cap)) * norms
    moving = norms > 0
    np.testing.assert_allclose(got, moving * norms[moving].min(), rtol=1e-4)


def test_a_cap_is_kept_by_any_three_roles_that_can():
    rng = np.random.default_rng(0)
    for norms in 10.0 ** rng.uniform(-3, 3, (100, 3)):
        for cap in (1 / 3, 0.4, 0.7):
            got = np.asarray(balance(jnp.diag(jnp.asarray(norms**2)), cap)) * norms
            assert (got / got.sum()).max() <= cap * (1 + 1e-3)
            assert np.all(got <= norms * (1 + 1e-5))


def test_all_off_changes_nothing():
    np.testing.assert_array_equal(weights(Mixing()), np.ones(3))


def test_damping_scales_the_first_step_by_one_minus_lambda_and_spares_what_turns_away():
    g = {"w": jnp.array([3.0, 4.0])}
    run = jax.jit(lambda g, ema: damp(g, ema, strength=0.3, window=4))
    damped, ema, cosine = run(g, {"w": jnp.zeros(2)})
    assert float(cosine) == pytest.approx(1.0)
    np.testing.assert_allclose(damped["w"], [2.1, 2.8], rtol=1e-6)
    np.testing.assert_allclose(ema["w"], [3 - 0.9 / 4, 4 - 1.2 / 4], rtol=1e-6)
    turned = {"w": jnp.array([4.0, -3.0])}  # at right angles: kept whole
    damped, ema, cosine = run(turned, ema)
    np.testing.assert_allclose(damped["w"], turned["w"], rtol=1e-6)
    opposed, _, cosine = run({"w": -ema["w"]}, ema)
    assert float(cosine) == pytest.approx(-1.0)
    np.testing.assert_allclose(opposed["w"], -ema["w"], rtol=1e-6)


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e10, 1e30])
def test_damping_does_not_depend_on_the_size_of_gradients(size):
    g, ema = {"w": jnp.array([3.0, 4.0]) * size}, {"w": jnp.array([4.0, 3.0]) * size}
    damped, _, cosine = damp(g, ema, strength=0.3, window=4)
    assert float(cosine) == pytest.approx(0.96, rel=1e-6)
    np.testing.assert_allclose(damped["w"], g["w"] * (1 - 0.3 * 0.96), rtol=1e-6)


def test_damping_waits_for_a_gradient_that_is_not_zero():
    nothing, g = {"w": jnp.zeros(2)}, {"w": jnp.array([3.0, 4.0])}
    damped, ema, cosine = damp(nothing, nothing, strength=0.3, window=4)
    assert float(cosine) == 0 and not np.any(damped["w"]) and not np.any(ema["w"])
    np.testing.assert_allclose(damp(g, ema, strength=0.3, window=4)[0]["w"], [2.1, 2.8], rtol=1e-6)


def test_roles_are_frozen_or_trained_in_turn():
    turns = InterventionConfig(alternate=("a", "b"), alternate_every=2, freeze=("c",))
    assert [turns.trains("a", step) for step in range(6)] == [True, True, False, False, True, True]
    assert [turns.trains("b", step) for step in range(6)] == [False, False, True, True, False, False]
    assert not turns.trains("c", 0) and turns.trains("d", 0)


@pytest.mark.parametrize(
    "wrong", [{"damping": 0.5}, {"balance": "half"}, {"max_share": 0.0}, {"damping_window": 0}], ids=str
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Mixing(**wrong)


def test_a_limit_for_any_role_keeps_roles_apart():
    assert not InterventionConfig(Mixing(damping=0.1)).needs_roles
    assert InterventionConfig(role_clip={"a": 1.0}).needs_roles


def test_roles_may_come_as_a_list_and_not_as_a_text():
    assert hash(Mixing(roles=["a", "b"])) == hash(Mixing(roles=("a", "b")))
    assert InterventionConfig(alternate=["a", "b"]).alternate == ("a", "b")
    for make in (lambda: Mixing(roles="ab"), lambda: InterventionConfig(freeze="ab")):
        with pytest.raises(ValueError, match="is 'ab'; it must be any number of values"):
            make()


def test_damping_acts_on_the_roles_that_are_mixed():
    some = InterventionConfig(Mixing(damping=0.1, roles=("a",)))
    assert some.damps("a") and not some.damps("b")
    assert InterventionConfig(Mixing(damping=0.1)).damps("b")
    assert not InterventionConfig(Mixing(roles=("a",))).damps("a")
