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


@pytest.mark.long
def test_behind_the_tokens_that_are_forced_of_a_call_it_is_sampled():
    changes = {"data.problems": "2", "rollout.samples": "2", "sampling.max_new_tokens": "8"}
    config = small("single-shared-xs-math", **changes)
    state, (key, tasks) = compiled.start(config), next(compiled.batches(config))
    play = jax.jit(compiled.make_halves(config).play)
    short = np.full((2, 2, 1, 3), 20, np.int32)
    whole = np.pad(short, ((0, 0),) * 3 + ((0, 5),), constant_values=-1)
    one, other = (play(state, key, tasks.replace(forced=forced))[0].table.tokens for forced in (short, whole))
    assert (one[:, :3] == 20).all() and (one == other).all() and (one[:, 3:] != 20).any()
