"""The torch step that the update's speed is measured against does the same work."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learning_rows import Row, as_table

from benchmarks.torch_step import torch_step
from marl_jax.learning.learner_config import LearnerConfig
from marl_jax.learning.network import Qwen3
from marl_jax.learning.optimiser import OptimiserConfig, ScheduleConfig
from marl_jax.learning.update import Learner
from marl_jax.models import ModelConfig, init


@pytest.mark.parity
@pytest.mark.parametrize("clip", [100.0, 1.0], ids=["as it is", "clipped"])
def test_the_gradient_of_the_torch_step_is_ours(clip):
    model = dataclasses.replace(ModelConfig.preset("xs"), dtype="float32")
    rng = np.random.default_rng(0)
    draw = lambda count: rng.integers(1, model.vocab_size, count).tolist()
    prompts = [draw(9), draw(9)]
    rows = []
    for n in range(8):
        logprobs, advantage = rng.normal(-5, 1, 7).tolist(), rng.normal()
        rows.append(
            Row("p0", "writer", n // 4, 0, 0, prompts[n // 4], draw(7), logprobs, advantage=advantage)
        )
    params, table = init(0, model), as_table(rows)
    step, weights = torch_step(model, params, table, micro_rows=4, max_norm=clip)
    step()
    rate = 1e4  # a step that stands out in weights that are about 1
    optimiser = OptimiserConfig("sgd", ScheduleConfig(rate), b1=0.0, weight_decay=0.0, grad_clip=clip)
    learner = Learner(Qwen3(model), LearnerConfig(optimiser=optimiser), {"writer": "p0"})
    policies = {"p0": jax.tree.map(jnp.copy, params)}
    after, _, report = learner.step(policies, learner.init(policies), table)
    assert (report.policies["p0"]["clip_factor"] < 1) == (clip == 1)
    for before, moved, theirs in zip(*map(jax.tree.leaves, (params, after["p0"], weights)), strict=True):
        ours = (np.asarray(before, np.float64) - np.asarray(moved, np.float64)) / rate
        np.testing.assert_allclose(theirs.grad.numpy(), ours, rtol=1e-3, atol=1e-4 * np.abs(ours).max())
