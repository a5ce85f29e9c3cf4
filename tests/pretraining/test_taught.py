"""A base says which roles' words it was trained on, and a cell with others says so."""

import dataclasses
import json
import shutil

import pytest

from marl_jax.config.run_config import load_config
from marl_jax.models.tokenizer import build_micro_tokenizer
from marl_jax.packaged import resolve_path
from marl_jax.pretraining.recipe import Recipe
from marl_jax.pretraining.taught import untaught, untaught_warning, words_of
from marl_jax.runs.loading.parts import read_prompts
from marl_jax.workflows import BUILT_IN, Prompts, load_prompts


@pytest.mark.parametrize("scale", ["xs", "s", "m"])
def test_committed_bases_were_trained_on_the_words_of_every_built_in_role(scale):
    for name, flow in BUILT_IN.items():
        for family in flow.families:
            config = load_config(f"micro:{name}-shared-{scale}-{family}")
            assert untaught_warning(config, read_prompts(config)) == ""


def test_the_list_of_a_committed_base_follows_from_its_recipe():
    about = json.loads((resolve_path("configs/bases/micro-xs") / "recipe.json").read_text())
    recipe = Recipe("xs", about["recipe"]["steps"], seed=about["recipe"]["seed"])
    assert words_of(recipe, build_micro_tokenizer()) == about["words"]


def test_roles_whose_words_are_new_are_named(tmp_path):
    config = load_config("micro:voting-shared-xs-math")
    prompts = load_prompts("math", "micro")
    other = Prompts({**prompts.files, "aggregator": "## user\nsay something\n{{question}}\n"})
    assert untaught(config, prompts) == []
    assert untaught(config, other) == ["aggregator"]
    assert untaught_warning(config, other).startswith(
        "the base was never trained on the prompts of aggregator: "
    )


def test_a_base_that_does_not_say_is_taken_to_understand(tmp_path):
    base = shutil.copytree(resolve_path("configs/bases/micro-xs"), tmp_path / "base")
    config = load_config("micro:voting-shared-xs-math", [("policies.base", str(base))])
    full = dataclasses.replace(config, workflow=dataclasses.replace(config.workflow, prompts="full"))
    assert untaught(full, read_prompts(full)) == ["generator", "aggregator"]  # the words for larger models
    (base / "recipe.json").unlink()
    assert untaught(full, read_prompts(full)) == []
