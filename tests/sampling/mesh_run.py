"""Run by test_mesh.py in a process of its own: the engine on eight virtual devices against one device."""

import dataclasses

import jax
from jax.sharding import AxisType
from kit import CONFIG as KIT
from kit import (
    SETTINGS,
    ask,
    assert_same_but_for_near_ties,
    compilations,
    make_params,
    prompt,
    serve,
    warm_up,
)

from marl_jax.models.weight_table import shardings
from marl_jax.sampling import Engine, Features

CONFIG = dataclasses.replace(KIT, num_hidden_layers=1)


def shard_shapes(array):
    return {shard.data.shape for shard in array.addressable_shards}


def main():
    assert len(jax.devices()) == 8
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    settings = dataclasses.replace(SETTINGS, chunks=(16,), features=Features(truncate=True), banks=2)
    params = make_params(CONFIG)
    sharded = jax.device_put(params, shardings(CONFIG, mesh))
    assert shard_shapes(sharded["embed"]) == {(48, 32)}
    assert shard_shapes(sharded["layers"]["q"]) == {(1, 32, 2, 8)}
    assert shard_shapes(sharded["layers"]["down"]) == {(1, 24, 32)}

    requests = [
        ask(prompt(n, n), n, new=16, temperature=(1.0, 0, 0.7)[n % 3], top_k=(0, 9)[n % 2])
        for n in range(1, 41, 2)
    ]
    one = serve(Engine(params, CONFIG, settings), requests)
    engine = Engine(sharded, CONFIG, settings)
    warm_up(engine)
    with compilations() as counted:
        many = serve(engine, requests)
    for cache, rows in ((engine._banks[0].rungs[0], 8), (engine._prefix_cache, 4)):
        for keys, values in zip(cache.keys, cache.values):
            assert shard_shapes(keys) == {(rows // 4, 1, 8, cache.length)}
            assert shard_shapes(values) == {(rows // 4, 1, cache.length, 8)}
    margins = assert_same_but_for_near_ties(params, requests, one, many, CONFIG)
    assert counted == [0], f"{counted[0]} programs compiled after warm-up"
    again = serve(engine, requests[::-1])[::-1]
    # Lanes lie on devices a few at a time, where some compilers round by the place of a row.
    assert_same_but_for_near_ties(params, requests, many, again, CONFIG)

    # Lanes over rungs, which change places between caches that are spread.
    over = dataclasses.replace(settings, banks=1, widths=(16,), lengths=(16, 32, 64), lanes_at=(8, 4, 4))
    engine = Engine(sharded, CONFIG, over)
    warm_up(engine)
    with compilations() as counted:
        moved = serve(engine, requests)
    assert_same_but_for_near_ties(params, requests, one, moved, CONFIG)
    assert counted == [0] and engine.stats.moved, f"{counted[0]} programs, {engine.stats}"
    for cache in engine._banks[0].rungs:
        assert shard_shapes(cache.keys[0]) == {(cache.rows // 4, 1, 8, cache.length)}
    print(f"equal on the mesh, {len(margins)} near-ties")


if __name__ == "__main__":
    main()
