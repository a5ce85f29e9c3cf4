"""The programs that a run takes a step in do what the step does, on one device and for seeds in one program."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny_run import tiny_config

from marl_jax import compiled
from marl_jax.learning.estimators.worth import AdvantageConfig
from marl_jax.rewards.credit import CreditConfig
from marl_jax.runs import in_arrays
from marl_jax.runs.loading.parts import load_parts
from marl_jax.runs.step_programs import Layout, take_step, trace


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(tree)))


def difference(one, other):
    return norm(jax.tree.map(lambda x, y: np.asarray(x, np.float64) - y, one, other))


@pytest.mark.campaign
@pytest.mark.parametrize("seeds", [False, True])
def test_the_programs_of_a_step_do_what_it_does(base, seeds):
    short = AdvantageConfig(overlong=(8, 7))  # rewards differ by length
    config = dataclasses.replace(tiny_config(base), road="compiled", rewards=CreditConfig(), advantages=short)
    parts = load_parts(config)
    state = compiled.start(config, parts=parts)
    given = [(state, *next(compiled.batches(config, parts=parts, seed=seed))) for seed in range(2)]
    given = in_arrays._stack(given) if seeds else given[0]
    halves = compiled.make_halves(config, parts=parts, seeds_axis="seeds" if seeds else None)
    layout = Layout.on(jax.devices()[0], seeds)
    given = jax.device_put(given, layout.whole)
    (trees, learner), columns, told = take_step(
        [one.lower().compile() for one in trace(halves, layout, given)], *given
    )
    (all_trees, all_learner), all_columns, all_told = jax.jit(layout.step(halves))(*given)
    for name in ("tokens", "length", "advantage", "trains", "reward"):
        np.testing.assert_array_equal(getattr(columns.table, name), getattr(all_columns.table, name))
    np.testing.assert_allclose(columns.logp, all_columns.logp, atol=1e-5)
    moved = difference(all_trees, given[0].trees)
    assert moved > 0 and difference(trees, all_trees) < 1e-3 * moved
    assert difference(learner, all_learner) < 1e-4 * norm(all_learner)
    assert jax.tree.structure(told) == jax.tree.structure(all_told)
    np.testing.assert_array_equal(told["tokens"], all_told["tokens"])
