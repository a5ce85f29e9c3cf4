"""Schedules end where they say, and weight decay spares norms and embeddings."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from marl_jax.learning.optimiser import OptimiserConfig, ScheduleConfig, decay_mask, transformation


def test_an_unknown_schedule_is_refused():
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


def test_states_have_one_form_with_and_without_decay_and_no_decay_changes_no_bit():
    tree = {"layers": {"q": jnp.array([1.0, -2.0]), "q_norm": jnp.ones(2)}}
    gradient = jax.tree.map(lambda x: x * jnp.array([-0.0, 0.3]), tree)
    for kind in ("adamw", "sgd", "adafactor"):
        with_decay, without = (transformation(OptimiserConfig(kind, weight_decay=w)) for w in (0.1, 0.0))
        state = without.init(tree)
        assert jax.tree.structure(state) == jax.tree.structure(with_decay.init(tree))
        got, _ = without.update(gradient, state, tree)
        scale = {
            "adamw": optax.scale_by_adam(),
            "sgd": optax.trace(0.9),
            "adafactor": optax.scale_by_factored_rms(),
        }
        plain = optax.chain(scale[kind], optax.scale(-1.0))
        want, _ = plain.update(gradient, plain.init(tree), tree)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
            assert one.tobytes() == other.tobytes()
