"""What decoding samples has the log-probs that the learner computes, from packs and without caches."""

import jax
import numpy as np
import pytest

from marl_jax import compiled
from tests.compiled.both_roads import small


@pytest.mark.long
def test_several_heads_of_keys_and_values_are_each_lanes_own():
    """192 lanes of two heads, and of lengths that differ much; the last quarter of them is gathered."""
    changes = {"data.problems": "8", "rollout.samples": "8", "sampling.temperature": "2.0"}
    config = small("voting-shared-s-math", **changes)
    state, batch = compiled.start(config), next(compiled.batches(config))
    columns = jax.jit(compiled.make_step(config))(state, *batch)[1]
    table = jax.tree.map(np.asarray, columns.table)
    learned = (np.arange(table.logprobs.shape[1]) < table.length[:, None]) & table.trains[:, None]
    assert learned.sum() > 500
    np.testing.assert_allclose(table.logprobs[learned], np.asarray(columns.logp)[learned], atol=5e-5)
