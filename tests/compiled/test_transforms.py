"""The step goes under the transformations of JAX, and gives what it gives alone."""

from pathlib import Path

import eight_devices
import jax
import jax.numpy as jnp
import pytest

from marl_jax import compiled
from marl_jax.config.run_config import load_config
from marl_jax.runs.loading.parts import load_parts

HERE = Path(__file__).parent


@pytest.mark.long
def test_without_any_it_leaves_the_state_that_it_was_given():
    changes = [("data.problems", "2"), ("rollout.samples", "2")]
    config = load_config("configs/micro.py:single-shared-xs-math", changes)
    halves, state = compiled.make_halves(config), compiled.start(config)
    key, tasks = next(compiled.batches(config))
    played, _ = jax.eval_shape(halves.play, state, key, tasks)
    columns = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), played)
    after, *_ = halves.learn("p0", state, columns)
    leaves = [leaf for leaf in jax.tree.leaves((state, after)) if isinstance(leaf, jax.Array)]
    assert leaves and not any(leaf.is_deleted() for leaf in leaves)


DONATED = {
    "adapters on one base": (
        "voting-isolated-xs-math",
        {"policies.train": "lora", "policies.lora_rank": "2"},
    ),
    "an anchor": ("single-shared-xs-math", {"learner.interventions.kl_coef": '{"generator": 0.1}'}),
    "a frozen policy": ("voting-isolated-xs-math", {"policies.frozen_roles": "aggregator"}),
}


@pytest.mark.parametrize("what", DONATED)
def test_a_state_at_the_start_can_be_donated_and_made_again(what):
    cell, changes = DONATED[what]
    config = load_config(f"configs/micro.py:{cell}", [*changes.items()])
    parts, moved = (
        load_parts(config),
        jax.jit(lambda state: jax.tree.map(jnp.negative, state), donate_argnums=0),
    )
    one, other = (moved(compiled.start(config, parts=parts)) for _ in range(2))
    assert all(bool(jnp.array_equal(*pair)) for pair in zip(*map(jax.tree.leaves, (one, other))))


@pytest.mark.campaign
def test_scan_over_steps_vmap_over_seeds_shard_map_and_pmap_over_devices_and_weights_that_are_cut():
    assert "weights cut over devices agree" in eight_devices.run(
        HERE / "transforms_run.py", folder=HERE, seconds=3000
    )
