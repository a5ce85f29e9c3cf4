"""Published directories: what is written is read back to the bit, and what is wrong is refused by name."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from marl_jax.models import ModelConfig, init, load_hf, save_hf
from marl_jax.models.hf import load_config
from marl_jax.models.tokenizer import build_micro_tokenizer

SMALL = ModelConfig(
    vocab_size=40,
    hidden_size=24,
    intermediate_size=56,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=10,
    eos_token_id=(2, 5),
)
CONFIGS = {
    "tied": SMALL,
    "untied": dataclasses.replace(SMALL, tie_word_embeddings=False),
    "bfloat16": dataclasses.replace(SMALL, dtype="bfloat16", tie_word_embeddings=False),
}


@pytest.fixture
def directory(tmp_path):
    save_hf(tmp_path, SMALL, init(0, SMALL))
    return tmp_path


def weights_of(directory):
    return load_file(directory / "model.safetensors")


def rewrite(directory, weights):
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 4_000], ids=["single", "sharded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_is_bit_exact(tmp_path, name, max_shard_bytes):
    config = CONFIGS[name]
    params = init(1, config)
    save_hf(tmp_path, config, params, max_shard_bytes=max_shard_bytes)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_bytes < 5_000)
    loaded_config, loaded = load_hf(tmp_path)
    assert loaded_config == config
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)), params, loaded)


def test_arrays_of_any_layout_in_memory_are_written_as_they_read(tmp_path):
    config = CONFIGS[next(iter(CONFIGS))]
    params = jax.tree.map(np.asarray, init(1, config))
    for number, change in enumerate((np.asfortranarray, lambda x: np.flip(np.flip(x).copy()))):
        save_hf(tmp_path / str(number), config, jax.tree.map(change, params))
        loaded = load_hf(tmp_path / str(number))[1]
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)), params, loaded)


def bits(array):
    assert array.dtype in (jnp.float32, jnp.bfloat16)
    return np.asarray(array).view(f"u{array.dtype.itemsize}")


def test_published_matrices_are_output_by_input(directory):
    params, published = init(0, SMALL), weights_of(directory)
    q = published["model.layers.1.self_attn.q_proj.weight"]
    assert q.shape == (40, 24)  # heads * head_dim, hidden
    assert q[13, 7] == params["layers"]["q"][1, 7, 1, 3]  # row 13 is head 1, dimension 3
    o = published["model.layers.2.self_attn.o_proj.weight"]
    assert o.shape == (24, 40)
    assert o[7, 13] == params["layers"]["o"][2, 1, 3, 7]


def test_shards_hold_no_more_than_asked(tmp_path):
    save_hf(tmp_path, SMALL, init(0, SMALL), max_shard_bytes=8_000)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 3
    assert all(sum(w.nbytes for w in load_file(shard).values()) <= 8_000 for shard in shards)


@pytest.mark.parametrize("before", [5_000_000_000, 8_000], ids=["single", "sharded"])
@pytest.mark.parametrize("after", [5_000_000_000, 8_000, 4_000], ids=["single", "sharded", "more_shards"])
def test_a_model_replaces_another_and_no_other_file(tmp_path, before, after):
    others = ("model-backup.safetensors", "model-1-of-2.safetensors", "model.safetensors.bak", "notes.txt")
    for name in others:
        (tmp_path / name).write_text("mine")
    save_hf(tmp_path, SMALL, init(0, SMALL), max_shard_bytes=before)
    save_hf(tmp_path, SMALL, init(1, SMALL), max_shard_bytes=after)
    assert_holds(tmp_path, seed=1)
    assert all((tmp_path / name).read_text() == "mine" for name in others)
    weights = {"model.safetensors"}
    if after < 5_000_000_000:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        weights = {"model.safetensors.index.json", *index["weight_map"].values()}
    expected = {"config.json", "generation_config.json", *weights, *others}
    assert {path.name for path in tmp_path.iterdir()} == expected


@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 8_000], ids=["single", "sharded"])
def test_a_model_survives_one_that_fails_half_way(tmp_path, monkeypatch, max_shard_bytes):
    save_hf(tmp_path, SMALL, init(0, SMALL), max_shard_bytes=max_shard_bytes)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    written: list[Path] = []

    def full_disk(weights, path, **kwargs):
        if len(written) == 2:
            raise OSError("No space left on device")
        written.append(path)
        save_file(weights, path, **kwargs)

    monkeypatch.setattr("safetensors.numpy.save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_hf(tmp_path, SMALL, init(1, SMALL), max_shard_bytes=8_000)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert_holds(tmp_path, seed=0)


def test_shards_of_two_models_never_load_as_one(sharded, monkeypatch):
    """Killed between two moves, a directory is refused; saving again mends it."""
    moved: list[Path] = []
    replace = Path.replace

    def killed(self, target):
        if len(moved) == 2:
            raise KeyboardInterrupt
        moved.append(target)
        return replace(self, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", killed)
        save_hf(sharded, SMALL, init(1, SMALL), max_shard_bytes=8_000)
    with pytest.raises(FileNotFoundError, match=r"config.json is missing"):
        load_hf(sharded)
    save_hf(sharded, SMALL, init(1, SMALL), max_shard_bytes=8_000)
    assert_holds(sharded, seed=1)


def assert_holds(directory, seed):
    config, params = load_hf(directory)
    assert config == SMALL
    jax.tree.map(np.testing.assert_array_equal, params, init(seed, SMALL))


def test_weights_can_be_loaded_in_another_dtype(directory):
    config, params = load_hf(directory, dtype="bfloat16")
    assert config.dtype == "bfloat16"
    expected = init(0, SMALL)["layers"]["down"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(bits(params["layers"]["down"]), bits(expected))


def test_half_precision_weights_load_when_a_dtype_is_named(directory):
    rewrite(directory, {name: w.astype(np.float16) for name, w in weights_of(directory).items()})
    edit_config(directory, dtype="float16", torch_dtype="float16")
    with pytest.raises(ValueError, match="dtype is 'float16'; load the weights as one of float32, bfloat16"):
        load_hf(directory)
    _, params = load_hf(directory, dtype="float32")
    # By numpy: XLA has no such conversion for a processor without F16C.
    expected = np.asarray(init(0, SMALL)["layers"]["up"]).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(params["layers"]["up"], expected)


def test_a_tied_checkpoint_may_repeat_the_embedding_as_its_head(directory):
    weights = weights_of(directory)
    rewrite(directory, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    np.testing.assert_array_equal(load_hf(directory)[1]["embed"], init(0, SMALL)["embed"])
    rewrite(directory, weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1})
    with pytest.raises(
        ValueError, match=r"lm_head.weight differs from the embedding, though config.json says tie"
    ):
        load_hf(directory)


def test_a_missing_weight_is_named(directory):
    weights = weights_of(directory)
    del weights["model.layers.1.mlp.up_proj.weight"]
    rewrite(directory, weights)
    with pytest.raises(ValueError, match=r"lacks the weight model.layers.1.mlp.up_proj.weight$"):
        load_hf(directory)


@pytest.mark.parametrize(
    ("name", "weight", "message"),
    [
        (
            "layers.0.self_attn.q_proj.bias",
            np.zeros(40, np.float32),
            "has a weight .* no place for: .*q_proj.bias$",
        ),
        (
            "norm.weight",
            np.ones(25, np.float32),
            r"norm.weight has shape \[25\], config.json asks for \[24\]",
        ),
        ("norm.weight", np.ones(24, np.int8), "norm.weight is stored as I8"),
        ("norm.weight", np.ones(0, np.float32), r"norm.weight is stored as F32 \[0\]"),
    ],
    ids=["left over", "misshapen", "integers", "empty"],
)
def test_a_weight_that_does_not_fit_is_named(directory, name, weight, message):
    rewrite(directory, weights_of(directory) | {f"model.{name}": weight})
    with pytest.raises(ValueError, match=f"model.safetensors.*{message}"):
        load_hf(directory)


@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, 0.999])
def test_a_truncated_file_is_refused(directory, kept):
    path = directory / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: kept if isinstance(kept, int) else int(len(content) * kept)])
    with pytest.raises(ValueError, match=r"model.safetensors is truncated[^\n]*$"):
        load_hf(directory)


def header(**entries):
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"\x08" + b"\0" * 7 + b"not json",
        b"\x02" + b"\0" * 7 + b"[]",
        header(w={"dtype": "F32"}),
        header(w={"dtype": "F32", "shape": [2], "data_offsets": [0, 4]})
        + b"\0" * 4,  # the shape needs 8 bytes
        header(w={"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}) + b"\0" * 8,  # a gap before it
        header(w={"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}) + b"\0" * 9,  # bytes behind it
    ],
)
def test_a_corrupt_file_is_refused(directory, content):
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"model.safetensors is truncated, corrupt or no safetensors file[^\n]*$"
    ):
        load_hf(directory)


@pytest.fixture
def sharded(tmp_path):
    save_hf(tmp_path, SMALL, init(0, SMALL), max_shard_bytes=8_000)
    return tmp_path


def test_a_missing_shard_is_named(sharded):
    next(sharded.glob("model-00002-*")).unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-\d+.safetensors is missing"):
        load_hf(sharded)


def test_a_weight_in_two_shards_is_refused(sharded):
    first, second = sorted(sharded.glob("model-*"))[:2]
    save_file(load_file(first) | load_file(second), second)
    with pytest.raises(ValueError, match=r"is in both .*model-00001.* and .*model-00002"):
        load_hf(sharded)


def test_a_shard_without_what_the_index_promises_is_refused(sharded):
    first = sorted(sharded.glob("model-*"))[0]
    weights = load_file(first)
    name = sorted(weights)[0]
    del weights[name]
    save_file(weights or {"other": np.ones(1, np.float32)}, first)
    with pytest.raises(ValueError, match=rf"model-00001-of-\d+.safetensors lacks {name}, though"):
        load_hf(sharded)


def test_an_index_cannot_point_outside_its_directory(sharded):
    path = sharded / "model.safetensors.index.json"
    path.write_text(path.read_text().replace("model-00001", "../model-00001"))
    with pytest.raises(ValueError, match="a shard must be in the same directory"):
        load_hf(sharded)


def test_a_single_file_beside_an_index_is_ambiguous(sharded):
    (sharded / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="has both"):
        load_hf(sharded)


def test_a_directory_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"nowhere/config.json is missing; is this the directory of a Qwen3"
    ):
        load_hf(tmp_path / "nowhere")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="is missing; this is an adapter: `export --format=hf`"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"config.json: model_type is 'llama'; only 'qwen3'"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMALL.to_hf()))
    with pytest.raises(FileNotFoundError, match=r"has neither model.safetensors nor"):
        load_hf(tmp_path)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, (2, 5)),
        ({"eos_token_id": 5}, (2, 5)),
        ({"eos_token_id": [7, 2]}, (2, 5, 7)),
        ({"eos_token_id": 9}, (2, 5, 9)),
    ],
)
def test_what_ends_a_text_may_stand_in_the_configuration_of_generation(directory, given, wanted):
    (directory / "generation_config.json").write_text(json.dumps(given))
    assert load_config(directory).stop_tokens == wanted
    (directory / "generation_config.json").unlink()
    assert load_config(directory) == SMALL


def test_a_broken_configuration_of_generation_is_named(directory):
    (directory / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config.json"):
        load_config(directory)


def test_ends_that_are_no_token_of_the_model_are_left_out(directory):
    """A file may be older than a vocabulary that was cut."""
    own = load_config(directory)
    (directory / "generation_config.json").write_text(
        f'{{"eos_token_id": [-1, {own.vocab_size}, null, "2"]}}'
    )
    assert load_config(directory) == own


def test_parameters_that_do_not_fit_the_config_are_not_saved(tmp_path):
    params = init(0, SMALL)
    with pytest.raises(ValueError, match=r"disagree on \['lm_head'\]"):
        save_hf(tmp_path, CONFIGS["untied"], params)
    with pytest.raises(
        ValueError, match=r"\['embed'\] is float32\[40, 24\]; the config says bfloat16\[40, 24\]"
    ):
        save_hf(tmp_path, dataclasses.replace(SMALL, dtype="bfloat16"), params)
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_larger_than_the_model_is_not_saved_with_it(tmp_path):
    with pytest.raises(ValueError, match="vocab_size is 40"):
        save_hf(tmp_path, SMALL, init(0, SMALL), build_micro_tokenizer())


_PEAK = """
import sys
import jax
from marl_jax.models import load_hf

def memory(field):  # resident bytes; the high-water mark that getrusage knows is inherited from the parent
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

jax.block_until_ready(jax.device_put(0))
before = memory("VmRSS")
config, params = load_hf(sys.argv[1])
jax.block_until_ready(params)
print(sum(leaf.nbytes for leaf in jax.tree.leaves(params)), memory("VmHWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 30_000_000], ids=["single", "sharded"])
def test_loading_needs_little_more_memory_than_the_model(tmp_path, max_shard_bytes):
    config = dataclasses.replace(
        CONFIGS["bfloat16"], vocab_size=24_000, hidden_size=512, intermediate_size=2_048, num_hidden_layers=8
    )
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(lambda: init(0, config))
    )
    save_hf(tmp_path, config, zeros, max_shard_bytes=max_shard_bytes)
    output = subprocess.run(
        [sys.executable, "-c", _PEAK, str(tmp_path)], check=True, capture_output=True, text=True
    )
    size, peak = map(int, output.stdout.split())
    assert size > 90e6
    assert size < peak < 1.3 * size
