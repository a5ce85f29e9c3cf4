"""Over a mesh of eight virtual CPU devices the model computes the same, with its weights really spread out."""

import os
import textwrap
from pathlib import Path

import eight_devices
import jax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from marl_jax.models import ModelConfig, weight_table

_SETTING = """
    import dataclasses, functools, sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from marl_jax.models import ModelConfig, forward, init, load_hf, lora, save_hf
    from marl_jax.models import weight_table

    assert jax.device_count() == 8
    config = ModelConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=8, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False)
    tokens = np.random.default_rng(0).integers(0, 64, (4, 16))
    segments = np.repeat([[1, 2, 3, 0]], 4, axis=0).repeat(4, axis=1)
    adapters = jax.tree.map(lambda leaf: leaf + 0.1, lora.init_lora(1, config, 2, 3))
    run = jax.jit(functools.partial(forward, adapters=adapters, segment_ids=segments), static_argnums=1)
    index = np.array([0, 2, -1, 1])
    params = init(0, config)
    plain = np.asarray(run(params, config, tokens, adapter_index=index))
"""
_CHECK = """
    save_hf(sys.argv[1], config, params)
    for shape in [(4, 2), (2, 4)]:
        mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        _, spread = load_hf(sys.argv[1], shardings=lambda config: weight_table.shardings(config, mesh))
        rows = NamedSharding(mesh, P("data"))
        logits = run(spread, config, jax.device_put(tokens, rows), adapter_index=jax.device_put(index, rows))
        np.testing.assert_allclose(np.asarray(logits), plain, atol=2e-5, rtol=0)

        held = lambda leaf: leaf.addressable_shards[0].data.size / leaf.size
        layers, model = spread["layers"], shape[1]
        assert held(layers["gate"]) == held(layers["q"]) == held(spread["embed"]) == 1 / model
        assert held(layers["k"]) == (1 / 2 if model == 2 else 1)  # two KV heads do not divide by four
    save_hf(sys.argv[1] + "/again", config, spread)
    _, again = load_hf(sys.argv[1] + "/again")
    jax.tree.map(np.testing.assert_array_equal, params, again)
    print("equal")
"""


def test_a_sharded_model_computes_the_same_and_is_really_sharded(tmp_path):
    script = textwrap.dedent(_SETTING) + textwrap.dedent(_CHECK)
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
    said = eight_devices.run("-c", script, tmp_path, folder=Path(__file__).parent, XLA_FLAGS=flags)
    assert said == "equal\n"


def test_an_axis_that_the_mesh_does_not_divide_stays_whole():
    mesh = AbstractMesh((2, 3), ("data", "model"))
    weights = weight_table.table(ModelConfig.preset("m"))["layers"]  # 6 heads, 2 KV heads
    assert weight_table.partition(weights["q"], mesh) == PartitionSpec(None, None, "model", None)
    assert weight_table.partition(weights["k"], mesh) == PartitionSpec(None, None, None, None)


def test_a_mesh_without_a_model_axis_replicates():
    mesh = AbstractMesh((8,), ("data",))
    for weight in jax.tree.leaves(weight_table.table(ModelConfig.preset("m"))):
        assert not any(weight_table.partition(weight, mesh))


@pytest.mark.parametrize("name", ["xs", "0.6b"])
def test_abstract_shapes_are_those_of_fresh_parameters(name):
    config = ModelConfig.preset(name)
    fresh = jax.eval_shape(lambda key: weight_table.random(key, config), jax.random.key(0))
    assert jax.tree.leaves(fresh) == jax.tree.leaves(weight_table.abstract(config))
    assert jax.tree.structure(fresh) == jax.tree.structure(weight_table.abstract(config))
