"""Writes go to places that all differ, without which a GPU's deterministic kernels are wrong; see `models.scatter`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from traced import equations

from marl_jax import compiled
from marl_jax.learning.logprobs import token_logprobs
from marl_jax.models.decode import empty_cache
from marl_jax.models.scatter import UNIQUE, distinct
from marl_jax.sampling.methods import truncate_few
from marl_jax.sampling.programs import copy_rows_within
from tests.compiled.both_roads import small
from tests.sampling.kit import CONFIG


def _scatters(function, *given):
    """Whether places are said to differ, of every scatter that overwrites."""
    found = equations(function, *given)
    return [one.params["unique_indices"] for one in found if one.primitive.name == "scatter"]


@pytest.mark.long
@pytest.mark.parametrize(
    "cell, seeds",
    [
        ("voting-isolated-xs-math", False),
        pytest.param("orch_workers-shared-xs-math", True, marks=pytest.mark.long),
        pytest.param("single-shared-xs-code", True, marks=pytest.mark.long),
    ],
)
def test_a_compiled_step_writes_to_places_that_differ(cell, seeds):
    """Of one seed, and of two in one program."""
    config = small(cell)
    given = compiled.start(config), *next(compiled.batches(config))
    step = compiled.make_step(config, seeds_axis="seeds" if seeds else None)
    if seeds:
        given = jax.tree.map(lambda leaf: np.stack([leaf] * 2), given)
        step = jax.vmap(step, axis_name="seeds")
    found = _scatters(step, *given)
    assert len(found) > 3 and all(found)


def test_hosted_programs_write_to_places_that_differ():
    cache, rows = empty_cache(CONFIG, 4, 16), jnp.arange(4)
    assert (found := _scatters(copy_rows_within, cache, rows, rows)) and all(found)
    hidden, head = jnp.zeros((2, 3, 8)), jnp.zeros((8, 11))
    targets, kept = jnp.zeros((2, 3), int), jnp.zeros((2, 3, 4), int)
    score = lambda kept: token_logprobs(hidden, head, targets, kept=kept)
    assert (found := _scatters(score, kept)) and all(found)
    cut = lambda logits: truncate_few(logits, rows, jnp.ones(4), 8)
    assert (found := _scatters(cut, jnp.zeros((4, 32)))) and all(found)


def test_places_beyond_the_end_are_dropped_row_by_row():
    places = np.array([[0, 3, 3, 1], [3, 2, 7, 0]])
    rows = jnp.arange(2)[:, None]
    once = distinct(jnp.asarray(places), 3)
    assert all(len(set(row)) == 4 for row in np.asarray(once).tolist())
    found = jnp.zeros((2, 3), int).at[rows, once].set(jnp.arange(1, 9).reshape(2, 4), **UNIQUE)
    assert found.tolist() == [[1, 4, 0], [8, 0, 6]]
