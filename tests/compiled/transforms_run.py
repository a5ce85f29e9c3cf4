"""Run by test_transforms.py on eight virtual devices: the step under scan, vmap, shard_map and pmap, and cut by XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from both_roads import distance, moments, norm, small
from jax.sharding import PartitionSpec

from marl_jax import compiled
from marl_jax.models.weight_table import shardings
from marl_jax.runs.loading.parts import load_parts

CHANGES = {
    "data.problems": "8",
    "sampling.max_new_tokens": "24",
    "workflow.settings.rounds": "2",
    "learner.interventions.mixing.normalise_multiplicity": "true",
}
CONFIG = small("eval_opt-shared-xs-math", **CHANGES)  # two roles, and episodes that end early
PARTS = load_parts(CONFIG)


def near(one, other):
    """First moments are equal within the rounding of a gradient, and weights within what Adam makes of that.

    Adam's first steps go by the sign of a gradient; where it is a thousandth of the others, rounding may turn it.
    """
    (mine, theirs) = (moments(state.learner)["p0"] for state in (one, other))
    print(f"moments are {distance(mine, theirs) / norm(mine):.1e} of their norm apart")
    assert distance(mine, theirs) < 1e-5 * norm(mine)
    usual = norm(mine) / sum(leaf.size for leaf in jax.tree.leaves(mine)) ** 0.5
    sure = jax.tree.map(lambda moment: abs(moment) > 1e-3 * usual, mine)
    of = lambda state: jax.tree.map(np.where, sure, state.trees["p0"], START.trees["p0"])
    moved = distance(of(one), START.trees["p0"])
    assert moved > 0.9 * distance(one.trees, START.trees) and distance(of(one), of(other)) < 1e-3 * moved


def two_steps():
    batches = compiled.batches(CONFIG, parts=PARTS)
    (_, first), (_, second) = next(batches), next(batches)
    keys = jax.random.split(jax.random.key(3))
    return keys, jax.tree.map(lambda *x: np.stack(x), first, second)


START = compiled.start(CONFIG, parts=PARTS)
KEYS, TASKS = two_steps()
AT = lambda tree, i: jax.tree.map(lambda x: x[i], tree)


def main():
    assert len(jax.devices()) == 8
    plain = jax.jit(compiled.make_step(CONFIG, parts=PARTS))
    one, first_table, first = plain(START, KEYS[0], AT(TASKS, 0))
    two, _, second = plain(one, KEYS[1], AT(TASKS, 1))
    other, other_table, _ = plain(START, KEYS[1], AT(TASKS, 1))

    def steps(state, batch):
        state, _, metrics = plain(state, *batch)
        return state, metrics["reward"]

    scanned, rewards = jax.jit(lambda state: jax.lax.scan(steps, state, (KEYS, TASKS)))(START)
    near(scanned, two)
    assert rewards.tolist() == [first["reward"], second["reward"]]
    print("scan agrees")

    seeds = jax.vmap(compiled.make_step(CONFIG, parts=PARTS, seeds_axis="seeds"), axis_name="seeds")
    both, tables, _ = jax.jit(seeds)(jax.tree.map(lambda x: jnp.stack([x, x]), START), KEYS, TASKS)
    near(AT(both, 0), one)
    near(AT(both, 1), other)
    np.testing.assert_array_equal(tables.table.tokens, [first_table.table.tokens, other_table.table.tokens])
    print("vmap agrees")

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, cut = PartitionSpec(), PartitionSpec("data")
    shard = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    sharded = shard(
        compiled.make_step(CONFIG, parts=PARTS, data_axis="data"),
        in_specs=(whole, whole, cut),
        out_specs=(whole, cut, whole),
    )
    state, table, metrics = jax.jit(sharded)(START, KEYS[0], AT(TASKS, 0))
    near(state, one)
    np.testing.assert_array_equal(table.table.tokens, first_table.table.tokens)
    np.testing.assert_array_equal(table.table.advantage, first_table.table.advantage)
    np.testing.assert_allclose(metrics["reward"], first["reward"], rtol=1e-6)
    print("shard_map agrees")

    # The same over pmap: a device's problems have a leading axis, and every device returns its state.
    mapped = jax.pmap(
        compiled.make_step(CONFIG, parts=PARTS, data_axis="data"), "data", in_axes=(None, None, 0)
    )
    cut_by_hand = jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), AT(TASKS, 0))
    replicas, tables, _ = mapped(START, KEYS[0], cut_by_hand)
    np.testing.assert_array_equal(tables.table.tokens.reshape(table.table.tokens.shape), table.table.tokens)
    for mine, theirs in zip(jax.tree.leaves(replicas), jax.tree.leaves(state), strict=True):
        assert all(replica.tobytes() == np.asarray(mine[0]).tobytes() for replica in np.asarray(mine))
        np.testing.assert_allclose(mine[0], theirs, rtol=1e-6, atol=1e-6)
    print("pmap agrees")

    # Problems lie over `data`, weights and their moments over `model`; XLA cuts the work along `model`.
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    parts = shardings(PARTS.model, mesh)
    place = lambda tree, like: jax.device_put(tree, like)
    own = START.learner["p0"]
    moment = own.optimiser[0]
    moment = moment._replace(mu=place(moment.mu, parts), nu=place(moment.nu, parts))
    given = START.replace(
        trees={"p0": place(START.trees["p0"], parts)},
        learner={"p0": own.replace(optimiser=(moment, *own.optimiser[1:]))},
    )
    cut_tasks = jax.device_put(AT(TASKS, 0), jax.sharding.NamedSharding(mesh, cut))
    assert any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(given.trees))
    state, table, _ = plain(given, KEYS[0], cut_tasks)
    near(state, one)
    np.testing.assert_array_equal(table.table.tokens, first_table.table.tokens)
    print("weights cut over devices agree")


if __name__ == "__main__":
    main()
