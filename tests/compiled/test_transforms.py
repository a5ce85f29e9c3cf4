"""The step goes under the transformations of JAX, and gives what it gives alone."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from marl_jax import compiled
from marl_jax.config.run_config import load_config

ROOT = Path(__file__).parents[2]


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


@pytest.mark.campaign
def test_scan_over_steps_vmap_over_seeds_and_shard_map_and_pmap_over_devices():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}",
    }
    run = subprocess.run(
        [sys.executable, Path(__file__).parent / "transforms_run.py"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "pmap agrees" in run.stdout
