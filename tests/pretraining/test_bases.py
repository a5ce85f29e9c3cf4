"""The committed bases: what they are, and how often they are right before any RL."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from marl_jax import fields
from marl_jax.config.run_config import load_file
from marl_jax.models import ModelConfig, load_hf
from marl_jax.models.hf import load_config
from marl_jax.models.tokenizer import build_micro_tokenizer, load_tokenizer
from marl_jax.pretraining.base_accuracy import accuracy, play_held_out
from marl_jax.pretraining.recipe import Recipe
from marl_jax.workflows import eval_opt, orch_workers, single, voting

SCALES = ("xs", "s", "m")
BASES = Path(__file__).parents[2] / "configs" / "bases"
LEAST, MOST = 0.15, 0.6


def folder(scale):
    return BASES / f"micro-{scale}"


def play(scale, flow, kind, **options):
    return play_held_out(folder(scale), flow, kind, **options)


def recipe(scale):
    return load_file("configs/micro.py:" + scale, "get_recipe")[0](scale)


@pytest.mark.parametrize("scale", SCALES)
def test_a_base_is_small_half_precise_and_trains_in_float32(scale):
    files = list(folder(scale).iterdir())
    assert (folder(scale) / "model.safetensors").stat().st_size < 4_000_000
    assert sum(file.stat().st_size for file in files) < 4_200_000
    assert load_config(folder(scale)).dtype == "bfloat16"
    config, params = load_hf(folder(scale), dtype="float32")
    assert config == ModelConfig.preset(scale)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
    assert all(leaf.dtype == np.float32 and np.isfinite(leaf).all() for leaf in leaves)


@pytest.mark.parametrize("scale", SCALES)
def test_a_base_speaks_the_micro_tokenizers_language(scale):
    tokenizer = load_tokenizer(folder(scale), load_config(folder(scale)))
    fresh = build_micro_tokenizer()
    talk = [{"role": "user", "content": "37+48=?"}]
    assert tokenizer.get_vocab() == fresh.get_vocab()
    assert tokenizer.apply_chat_template(talk, tokenize=False) == fresh.apply_chat_template(
        talk, tokenize=False
    )


@pytest.mark.parametrize("scale", SCALES)
def test_a_base_was_made_by_the_recipe_of_its_scale(scale):
    about = json.loads((folder(scale) / "recipe.json").read_text())
    made_by = fields.with_defaults(Recipe, about["recipe"])  # with the fields that are newer than the base
    assert made_by == json.loads(json.dumps(fields.to_json(recipe(scale))))
    assert (
        about["command"]
        == f"python -m experiments.pretrain --config=configs/micro.py:{scale} --out=configs/bases/micro-{scale}"
    )
    assert about["seconds"] > 0 and about["machine"]


def test_the_smallest_base_answers_some_problems_and_not_most():
    table = play("xs", single, "micro_math", levels=recipe("xs").levels["micro_math"], problems=64, samples=2)
    assert LEAST - 0.05 < accuracy(table, 64)[0] < MOST + 0.05


@pytest.mark.long
def test_roles_speak_in_the_form_they_are_read_in():
    for flow in (voting, eval_opt, orch_workers):
        table = play(
            "xs", flow, "micro_math", levels=recipe("xs").levels["micro_math"], problems=16, samples=2
        )
        assert not any(head.error for head in table.bare_episodes)
        for role in flow.roles:
            assert np.mean(table.readable[table.having(role=role)]) > 0.8


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["micro_math", "micro_code"])
@pytest.mark.parametrize("split", ["val", "test"])
def test_accuracy_of_fresh_bases_lies_between_15_and_60_percent_and_rises_with_scale(kind, split):
    levels = {scale: recipe(scale).levels[kind] for scale in SCALES}
    assert len(set(levels.values())) == 1
    means = []
    for scale in SCALES:
        table = play(
            scale, single, kind, levels=levels[scale], split=split, problems=256, samples=4, max_prompt=160
        )
        mean, error = accuracy(table, 256)
        print(f"{kind} {split} {scale}: {mean:.3f} +- {error:.3f}")
        means.append(mean)
    assert means[0] > LEAST and means[-1] < MOST
    assert means == sorted(means)
