"""Every recipe plays two steps, and its measures tell constructed tables apart."""

import dataclasses
import importlib
import inspect
import json
from pathlib import Path

import numpy as np
import pytest
from by_hand import call, episode, table_of

import recipes
from marl_jax.errors import RunError
from marl_jax.models import ModelConfig, init, save_hf
from marl_jax.models.tokenizer import build_micro_tokenizer
from marl_jax.planning.devices import Device
from marl_jax.planning.plan import demand_of, find_models, make_plan
from marl_jax.runs.opening import check_before_run
from recipes import run
from recipes.recipe import Recipe, Trained, changed, find, micro, names
from recipes.run import compared, of_arm, sampled, trained

HERE = Device("test", "cpu", 8 << 30, bandwidth=1e9, bfloat16=1e10, float32=1e10)
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
def test_a_recipe_says_what_it_claims_and_every_arm_can_be_started(name, tmp_path):
    """What a start would refuse is refused here: every arm is planned, and its workflow begun on real problems."""
    recipe = find(name)
    said = inspect.getdoc(importlib.import_module(f"recipes.{name}"))
    assert said.split("\n\n")[1].startswith("Claim: "), "the claim comes first"
    assert recipe.claim.endswith(".") and ". " not in recipe.claim and recipe.claims
    for claim in recipe.claims:
        assert claim.more in recipe.arms and (claim.than[0] == "=" or claim.than in {*recipe.arms, "base"})
        assert {claim.measure, claim.than.removeprefix("=")} - {*recipe.arms, "base"} <= {
            *recipe.measures,
            "accuracy",
            "tokens",
        }
    for arm in recipe.arms:
        config = of_arm(recipe, arm, tmp_path, 0)
        models, _ = find_models(config)
        made = make_plan(config, models, HERE, demand_of(config, problems=1))
        check_before_run(config, made)
        assert made.fits
        for fields in ({}, *recipe.also.values()):
            changed(changed(config, recipe.examined), fields)


# First arms in every run of the tests; each recipe compiles programs of its own.
QUICK = ("optima", "r_zero", "spo")


@pytest.mark.parametrize(
    "name, arms",
    [
        (QUICK[-1], 1),
        *(pytest.param(name, 1, marks=pytest.mark.long) for name in QUICK[:-1]),
        *(pytest.param(n, None, marks=pytest.mark.campaign) for n in names()),
    ],
)
def test_a_recipe_plays_two_steps(name, arms, base, tmp_path):
    recipe = find(name)
    configs = {arm: small(of_arm(recipe, arm, tmp_path, 0), base) for arm in list(recipe.arms)[:arms]}
    for arm, config in configs.items():
        trained(config, tmp_path / arm)
    few = dataclasses.replace(recipe, also=dict(list(recipe.also.items())[:1]))
    for arm, found in compared(few, configs, tmp_path).items():
        assert set(found["values"]) == {"accuracy", "tokens", *recipe.measures}
        assert found["sampled"] > 0 or not configs[arm].steps


def test_fewer_seeds_do_not_replace_the_results_of_more(tmp_path):
    file = tmp_path / "one.json"
    assert not run._has_more_runs(file, 1)
    file.write_text(json.dumps({"runs": [1, 2, 3]}))
    assert run._has_more_runs(file, 2) and not run._has_more_runs(file, 3)
    file.write_text("damaged")
    assert not run._has_more_runs(file, 1)


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


def test_an_arm_that_samples_nothing_sets_no_budget(tmp_path, monkeypatch):
    recipe = Recipe("", ".", lambda: None, {"told": {}, "played": {}}, (), measures={})
    told = {"steps": 2, "source": "calls.parquet", "objective": "sft"}
    configs = {
        arm: micro("single", {"generator": "p0"}, steps=2, phases=phases)
        for arm, phases in (("told", [told]), ("played", []))
    }
    for arm in configs:
        lines = [{"step": step, "tokens": 4, "time/wall": 1.5} for step in (1, 2)]
        for line in lines:
            (tmp_path / arm / "checkpoints" / str(line["step"])).mkdir(parents=True)
        (tmp_path / arm / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(run, "played", lambda config, folder, step: None)
    monkeypatch.setattr(run, "COMMON", {})
    found = compared(recipe, configs, tmp_path)
    assert {arm: (one["step"], one["sampled"]) for arm, one in found.items()} == {
        "told": (2, 0),
        "played": (2, 8),
    }


def test_an_arm_without_a_checkpoint_within_the_budget_is_named(tmp_path, monkeypatch, capsys):
    recipe = Recipe("", ".", lambda: None, {"short": {}, "long": {}}, (), measures={})
    configs = {arm: micro("single", {"generator": "p0"}, steps=1) for arm in recipe.arms}
    for arm, tokens in (("short", 4), ("long", 9)):
        (tmp_path / arm / "checkpoints" / "1").mkdir(parents=True)
        line = {"step": 1, "tokens": tokens, "time/wall": 1.5}
        (tmp_path / arm / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    monkeypatch.setattr(run, "played", lambda config, folder, step: None)
    monkeypatch.setattr(run, "COMMON", {})
    assert compared(recipe, configs, tmp_path)["long"]["sampled"] == 9
    (told,) = capsys.readouterr().out.splitlines()
    assert told.startswith("long: its first checkpoint, step 1, was saved after 9 tokens, more than the 4")


def test_a_measure_of_other_than_one_number_or_one_a_problem_is_refused():
    """Two problems, two episodes of each: a number for each episode would count episodes as problems."""
    table = table_of(*(episode(call("generator"), sample=i) for i in range(4)))
    measured = lambda value: run._measured({"mine": lambda one: value}, Trained(table, samples=2))
    assert measured(1.0) == {"mine": 1.0} and measured([1.0, np.nan]) == {"mine": [1.0, None]}
    with pytest.raises(RunError, match=r"'mine' gave \[4\] numbers: give one, or one for each of 2 problems"):
        measured([1.0, 0.0, 1.0, 0.0])


def test_tokens_of_problems_that_are_drawn_again_are_counted():
    config = micro("single", {"generator": "p0"}, steps=2)
    lines = [{"tokens": 4, "draws/tokens": 10}, {"tokens": 4}]
    assert run.sampled(config, lines).tolist() == [10, 14]


def test_tokens_of_collected_calls_are_not_counted_again():
    phases = [
        {"steps": 2, "name": "play", "collect": True},
        {"steps": 1, "source": "collected", "objective": "sft"},
    ]
    config = micro("single", {"generator": "p0"}, steps=3, phases=phases)
    assert sampled(config, [{"tokens": 5}, {"tokens": 7}, {"tokens": 5}]).tolist() == [5, 12, 12]
