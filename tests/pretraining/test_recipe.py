"""A base is a pure function of its recipe: the same seed gives the same bytes."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from marl_jax.models import ModelConfig, forward, init, load_hf
from marl_jax.models.tokenizer import build_micro_tokenizer, load_tokenizer
from marl_jax.pretraining.recipe import Recipe, batches, pack, train
from marl_jax.pretraining.transcripts import Row
from marl_jax.runs.config import load_file

TOKENIZER = build_micro_tokenizer()
SHORT = Recipe("xs", steps=3, rows=2)


def row(*tokens, spoken=1):
    said = np.zeros(len(tokens), bool)
    said[-spoken:] = True
    return Row(np.array(tokens, np.int32), said)


def weights(recipe):
    _, params = train(recipe, TOKENIZER)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others():
    assert weights(SHORT) == weights(SHORT)
    assert weights(SHORT) != weights(dataclasses.replace(SHORT, seed=1))


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


def test_every_scale_has_a_recipe_and_another_is_refused_by_name():
    get_recipe, scale = load_file("configs/micro.py:s", "get_recipe")
    assert scale == "s"
    assert [get_recipe(scale).scale for scale in ("xs", "s", "m")] == ["xs", "s", "m"]
    with pytest.raises(ValueError, match=r"'l' has no recipe; there is: xs, s, m"):
        get_recipe("l")


def test_the_command_writes_a_base_that_loads_and_says_how_it_was_made(tmp_path):
    out = tmp_path / "base"
    command = [
        "-m",
        "experiments.pretrain",
        "--config=configs/micro.py:xs",
        "--config.steps=2",
        f"--out={out}",
    ]
    run = subprocess.run(
        [sys.executable, *command, "--config.rows=2", "--problems=4", "--samples=1"],
        capture_output=True,
        text=True,
        check=True,
    )
    about = json.loads((out / "recipe.json").read_text())
    assert about["recipe"]["scale"] == "xs" and about["recipe"]["steps"] == 2 and about["recipe"]["seed"] == 0
    assert about["command"].startswith("python -m experiments.pretrain --config=configs/micro.py:xs")
    assert (
        about["seconds"] > 0 and about["machine"] and about["single_agent"]["micro_math"]["accuracy"] == 0.0
    )
    config, params = load_hf(out, dtype="float32")
    assert load_tokenizer(out, config).get_vocab() == TOKENIZER.get_vocab()
    recipe = dataclasses.replace(load_file("configs/micro.py:xs", "get_recipe")[0]("xs"), steps=2, rows=2)
    _, expected = train(recipe, TOKENIZER)
    rounded = jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype("float32"), expected)
    jax.tree.map(np.testing.assert_array_equal, params, rounded)
    assert "step 1: loss" in run.stdout


@pytest.mark.parametrize(
    "wrong, words",
    [
        (["--config=configs/micro.py:xl"], "'xl' has no recipe"),
        (["--config=configs/micro.py:xs", "--config.step=3"], "step is unknown: did you mean 'steps'?"),
        (["--config=configs/micr.py:xs"], "there is no file 'configs/micr.py'"),
        ([], "--config is missing"),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_line(wrong, words, tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "experiments.pretrain", *wrong, f"--out={tmp_path / 'base'}"],
        capture_output=True,
        text=True,
    )
    assert run.returncode and words in run.stderr and "Traceback" not in run.stderr
    assert not Path(tmp_path / "base").exists()
