"""Every recipe plays two steps, and its measures tell constructed tables apart."""

import dataclasses
import json
from pathlib import Path

import pytest

import recipes
from marl_jax.models import ModelConfig, init, save_hf
from marl_jax.models.tokenizer import build_micro_tokenizer
from recipes import run
from recipes.recipe import Recipe, changed, find, micro, names
from recipes.run import compared, of_arm, sampled, trained

SMALL = {
    "steps": 2,
    "data.problems": 2,
    "data.train_size": 8,
    "data.test_size": 2,
    "data.val_size": 0,
    "sampling.max_new_tokens": 8,
    "engine.lanes": 16,
    "engine.steps": 4,
    "learner.batch.buckets": [512],
    "learner.batch.token_budget": 512,
    "learner.batch.share_prompts": False,
    "checkpoints.every": 1,
    "checkpoints.keep_every": 1,
}


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    model = dataclasses.replace(
        ModelConfig.preset("xs"), num_hidden_layers=1, hidden_size=32, intermediate_size=64
    )
    directory = tmp_path_factory.mktemp("base")
    save_hf(directory, model, init(0, model), build_micro_tokenizer())
    return directory


def small(config, base, **more):
    """Two steps of it, one of each of its phases."""
    values = {**SMALL, "policies.base": str(base), **more}
    if not config.steps:
        values["steps"] = 0
    if config.phases:
        values["phases"] = [dataclasses.replace(phase, steps=1) for phase in config.phases]
        values["steps"] = max(2, len(config.phases))
    return changed(config, values)


@pytest.mark.parametrize("name", names())
def test_a_recipe_is_a_page_of_code(name):
    assert len((Path(recipes.__file__).parent / f"{name}.py").read_text().splitlines()) <= 150


@pytest.mark.parametrize("name", names())
def test_a_recipe_says_what_it_claims_and_its_arms_can_be_run(name, tmp_path):
    recipe = find(name)
    assert recipe.claim.endswith(".") and recipe.claims
    for claim in recipe.claims:
        assert claim.more in recipe.arms and (claim.than[0] == "=" or claim.than in {*recipe.arms, "base"})
        assert {claim.measure, claim.than.removeprefix("=")} - {*recipe.arms, "base"} <= {
            *recipe.measures,
            "accuracy",
            "tokens",
        }
    for arm in recipe.arms:
        config = of_arm(recipe, arm, tmp_path, 0)
        assert changed(config, recipe.examined).workflow.name == config.workflow.name


# One in every run of the tests: each compiles programs of its own.
QUICK = "optima"


@pytest.mark.parametrize(
    "name", [n if n == QUICK else pytest.param(n, marks=pytest.mark.campaign) for n in names()]
)
def test_a_recipe_plays_two_steps(name, base, tmp_path):
    recipe = find(name)
    arm = next(iter(recipe.arms))
    config = small(of_arm(recipe, arm, tmp_path, 0), base)
    trained(config, tmp_path / arm)
    few = dataclasses.replace(recipe, also=dict(list(recipe.also.items())[:1]))
    found = compared(few, {arm: config}, tmp_path)[arm]
    assert set(found["values"]) == {"accuracy", "tokens", *recipe.measures} and (
        found["sampled"] > 0 or not config.steps
    )


def test_arms_are_compared_where_the_thriftiest_has_ended(tmp_path, monkeypatch):
    """`short` samples eight tokens; `long` has sampled six of its twelve at its last checkpoint before that."""
    recipe = Recipe("", ".", lambda: None, {"short": {}, "long": {}}, (), measures={})
    configs = {
        "short": micro("single", {"generator": "p0"}, steps=2),
        "long": micro("single", {"generator": "p0"}, steps=4),
    }
    for arm, tokens in (("short", 4), ("long", 3)):
        for step in range(1, configs[arm].steps + 1):
            (tmp_path / arm / "checkpoints" / str(step)).mkdir(parents=True)
        lines = [{"step": i, "tokens": tokens, "time/wall": 1.5} for i in range(1, configs[arm].steps + 1)]
        (tmp_path / arm / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = []
    monkeypatch.setattr(run, "played", lambda config, folder, step: asked.append((folder.name, step)))
    monkeypatch.setattr(run, "COMMON", {})
    found = compared(recipe, configs, tmp_path)
    assert {arm: (one["step"], one["sampled"], one["seconds"]) for arm, one in found.items()} == {
        "short": (2, 8, 3.0),
        "long": (2, 6, 6.0),
    }
    assert asked == [("short", 2), ("short", 0), ("long", 2), ("long", 0)]


def test_tokens_of_collected_calls_are_not_counted_again():
    phases = [
        {"steps": 2, "name": "play", "collect": True},
        {"steps": 1, "source": "collected", "objective": "sft"},
    ]
    config = micro("single", {"generator": "p0"}, steps=3, phases=phases)
    assert sampled(config, [{"tokens": 5}, {"tokens": 7}, {"tokens": 5}]).tolist() == [5, 12, 12]
