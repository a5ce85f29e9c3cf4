"""A base is a pure function of its recipe: the same seed gives the same bytes."""

import dataclasses
import hashlib
import itertools
import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
import script
from study_folders import write_run

from marl_jax.config.run_config import load_file
from marl_jax.errors import UserError
from marl_jax.models import ModelConfig, forward, init, load_hf
from marl_jax.models.tokenizer import build_micro_tokenizer, load_tokenizer
from marl_jax.pretraining.recipe import Recipe, batches, pack, train
from marl_jax.pretraining.transcripts import History

TOKENIZER = build_micro_tokenizer()
XS = load_file("configs/micro.py:xs", "get_recipe")[0]("xs")
SHORT = dataclasses.replace(XS, steps=3, rows=2)  # as the command below is asked for: one program is compiled


def row(*tokens, sampled=1):
    said = np.zeros(len(tokens), bool)
    said[-sampled:] = True
    return History(np.array(tokens, np.int32), said)


def weights(recipe):
    _, params = train(recipe, TOKENIZER)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]


@pytest.mark.long
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others():
    assert weights(SHORT) == weights(SHORT)
    assert weights(SHORT) != weights(dataclasses.replace(SHORT, seed=SHORT.seed + 1))


def test_rows_are_packed_in_order_and_the_first_without_room_opens_the_next_batch():
    stream = [row(1, 2, 3), row(4, 5, 6, 7), row(8, 9), row(10, 11, 12), row(13)]
    first, *rest = pack(stream, count=2, length=5, prompt_weight=0.5)
    assert first.tokens.tolist() == [[1, 2, 3, 8, 9], [4, 5, 6, 7, 0]]
    assert first.segments.tolist() == [[1, 1, 1, 2, 2], [1, 1, 1, 1, 0]]
    assert first.weights.tolist() == [[0, 0.5, 1, 0, 1], [0, 0.5, 0.5, 1, 0]]
    assert rest == []  # a batch that may still grow is not handed out


def test_packed_rows_are_trained_on_as_each_alone_would_be():
    batch = next(batches(dataclasses.replace(SHORT, length=192), TOKENIZER))
    config = ModelConfig.preset("xs")
    params = init(0, config)
    packed = np.asarray(forward(params, config, batch.tokens, segment_ids=batch.segments))
    place = batch.segments[0] == 2  # the second history of the first row
    alone = np.asarray(forward(params, config, batch.tokens[:1, place]))
    np.testing.assert_allclose(packed[0, place], alone[0], atol=2e-5)


# SHA-256 of the tokens and segments of the first four batches, row by row as little-endian 32-bit integers. Made once,
# by a first-fit packing in plain lists.
FIRST_ROWS = {
    "xs": "3d5b8d6115efcb39dde85f1307b656667e6f7bb6b96372c5a42bd29d31a68d9c",
    "s": "c08bf264013ad4b6c21fbcd17148fe713e2ceb9b9c07776f0f838b686884c4b6",
    "m": "88791d2c36407eac3289d5dc896eec8e5f2e7912100f4d0f819fcdec2e86b207",
}


@pytest.mark.parametrize("scale", FIRST_ROWS)
def test_the_rows_of_a_committed_base_are_still_what_they_were(scale):
    recipe = load_file("configs/micro.py:s", "get_recipe")[0](scale)
    digest = hashlib.sha256()
    for batch in itertools.islice(batches(recipe, TOKENIZER), 4):
        for tokens, segments in zip(batch.tokens, batch.segments):
            digest.update(tokens.astype("<i4").tobytes() + segments.astype("<i4").tobytes())
    assert digest.hexdigest() == FIRST_ROWS[scale]


def test_rows_that_hold_no_history_are_refused():
    with pytest.raises(UserError, match="length is 8: 1000 histories in a row are longer"):
        next(batches(Recipe("xs", steps=1, length=8), TOKENIZER))


def test_every_scale_has_a_recipe_and_another_is_refused_by_name():
    get_recipe, scale = load_file("configs/micro.py:s", "get_recipe")
    assert scale == "s"
    assert [get_recipe(scale).scale for scale in ("xs", "s", "m")] == ["xs", "s", "m"]
    with pytest.raises(ValueError, match=r"'l' has no recipe; there is: xs, s, m"):
        get_recipe("l")


@pytest.mark.long
def test_the_command_writes_a_base_that_loads_and_says_how_it_was_made(tmp_path, capsys):
    out = tmp_path / "base"
    asked = ["--config=configs/micro.py:xs", "--config.steps=3", "--config.rows=2", f"--out={out}"]
    assert script.run("experiments.pretrain", *asked, "--problems=4", "--samples=1") == 0
    about = json.loads((out / "recipe.json").read_text())
    assert about["recipe"]["scale"] == "xs" and about["recipe"]["steps"] == 3
    assert about["recipe"]["seed"] == SHORT.seed
    assert about["command"].startswith("python -m experiments.pretrain --config=configs/micro.py:xs")
    assert about["seconds"] > 0 and about["machine"]
    assert about["single_agent"]["micro_math"]["accuracy"] == 0.0
    config, params = load_hf(out, dtype="float32")
    assert load_tokenizer(out, config).get_vocab() == TOKENIZER.get_vocab()
    _, expected = train(SHORT, TOKENIZER)
    rounded = jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype("float32"), expected)
    jax.tree.map(np.testing.assert_array_equal, params, rounded)
    assert "step 2: loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong, words",
    [
        (["--config=configs/micro.py:xl"], "'xl' has no recipe"),
        (["--config=configs/micro.py:xs", "--config.step=3"], "step is unknown: did you mean 'steps'?"),
        (["--config=configs/micr.py:xs"], "there is no file 'configs/micr.py'"),
        ([], "--config is missing"),
        (["--config=configs/micro.py:xs", "config.steps=3"], "'config.steps=3' is no flag"),
        (["--config=configs/micro.py:xl", "--config.step=3"], "step is unknown: did you mean 'steps'?"),
        (
            ["--config=configs/micro.py:xs", "--config.steps=-1", "--config.rows=0"],
            "steps is -1; it must be at least 1\n  rows is 0; it must be at least 1",
        ),
        (
            ["--config=configs/micro.py:xs", "--config.scale=0.6b"],
            "scale is '0.6b'; it must be 'xs' or 's' or 'm'",
        ),
        (["--config=configs/micro.py:xs", "--config.learning_rate=-1"], "learning_rate is -1"),
        (
            ["--config=configs/micro.py:xs", "--config.math_levels=", "--config.code_levels="],
            "math_levels and code_levels are empty",
        ),
        (["--config=configs/micro.py:xs", "--config.lessons=nowhere:f"], "cannot import module 'nowhere'"),
        (["--config=configs/micro.py:xs", "--out="], "--out is missing: give the directory"),
        (["--config=configs/micro.py:xs", "--samples=0"], "--samples=0: 0 is not a positive integer"),
        (["--config=configs/micro.py:xs", "--sample=1"], "Unknown command line flag 'sample'"),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_line(wrong, words, tmp_path, capsys):
    assert script.run("experiments.pretrain", f"--out={tmp_path / 'base'}", *wrong) == 2
    assert words in capsys.readouterr().err
    assert not Path(tmp_path / "base").exists()


def test_a_place_that_cannot_be_written_is_told_before_anything_is_trained(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    for out in ("~/file", tmp_path / "file" / "base"):
        assert script.run("experiments.pretrain", "--config=configs/micro.py:m", f"--out={out}") == 2
        place = os.path.expanduser(out)
        assert capsys.readouterr().err.count(f"'{place}' cannot be used") == 1


def test_a_base_is_not_written_over_a_run(tmp_path, capsys):
    """Both have a config.json."""
    run = write_run(tmp_path / "run", lines=[])
    before = (run / "config.json").read_bytes()
    assert script.run("experiments.pretrain", "--config=configs/micro.py:m", f"--out={run}") == 2
    assert "lies in the run" in capsys.readouterr().err and (run / "config.json").read_bytes() == before
