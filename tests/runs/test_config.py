"""A configuration is what the cell says and the command line changes; what cannot be is refused all at once."""

import json

import pytest

from configs import micro, qwen3
from marl_jax.runs.cells import all_cells, parse_cell
from marl_jax.runs.config import ConfigError, RunConfig, from_argv, load_config, load_file, split_argv

VOTING = "configs/micro.py:voting-isolated-s-math"


def refused(*texts, spec=VOTING):
    with pytest.raises(ConfigError) as error:
        load_config(spec, texts)
    return error.value.problems


@pytest.mark.parametrize("file", [micro, qwen3])
def test_every_cell_is_a_valid_configuration_that_json_gives_back(file):
    for cell in all_cells(file.SCALES):
        config = file.get_config(str(cell))
        assert config.cell == str(cell)
        assert set(config.policies.map) == set(config.roles)
        distinct = len(config.roles) if cell.policy == "isolated" else 1
        assert len(set(config.policies.map.values())) == distinct
        assert RunConfig.from_json(json.loads(json.dumps(config.to_json(), allow_nan=False))) == config


def test_the_study_cell_has_the_settings_of_the_study():
    config = load_config("configs/qwen3.py:eval_opt-isolated-1.7b-math")
    assert (config.policies.train, config.policies.lora_rank, config.policies.lora_alpha) == ("lora", 64, 32)
    assert (config.data.name, config.data.problems, config.rollout.samples) == ("dapo_math", 64, 8)
    assert (config.engine.max_prompt, config.sampling.max_new_tokens) == (30720, 5120)
    assert config.sampling.temperature == 0.7
    optimiser = config.learner.optimiser
    assert (optimiser.schedule.learning_rate, optimiser.schedule.warmup_steps) == (2e-5, 15)
    assert (config.steps, config.checkpoints.every, config.evaluation.every) == (500, 5, 10)


def test_single_has_one_cell_whatever_its_policy_is_called():
    cells = [load_config(f"configs/micro.py:single-{policy}-xs-code") for policy in ("shared", "isolated")]
    assert cells[0] == cells[1]
    assert len(all_cells(micro.SCALES)) == 3 * 2 * (3 + 3 * 2)


@pytest.mark.parametrize(
    "name, hint",
    [
        ("voting-isolatd-s-math", "did you mean 'voting-isolated-s-math'?"),
        ("evalopt-shared-m-code", "did you mean 'eval_opt-shared-m-code'?"),
        ("voting-isolated-s", "did you mean 'voting-isolated-s-math'?"),
        ("voting-isolated-1.7b-math", "scale xs|s|m"),
        ("", "{workflow}-{policy}-{scale}-{task}"),
    ],
)
def test_a_cell_with_a_typo_gets_the_nearest(name, hint):
    with pytest.raises(ValueError) as error:
        parse_cell(name, micro.SCALES)
    assert hint in str(error.value) and "\n" not in str(error.value)


def test_a_missing_file_and_one_without_a_function_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no file 'configs/micr\.py': did you mean 'configs/micro\.py'"):
        load_file("configs/micr.py:voting-isolated-s-math")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ConfigError, match=r"defines no get_config"):
        load_file(f"{tmp_path}/empty.py:x")
    assert load_file("configs/micro.py")[1] == ""


def test_a_command_line_is_taken_apart():
    argv = ["train", "--config", VOTING, "--workdir=DIR", "--config.steps=7", "--config.logging.wandb"]
    argv += ["--config.seed", "3", "--", "--config.steps=8"]
    spec, texts, rest = split_argv(argv)
    assert spec == VOTING
    assert texts == [("steps", "7"), ("logging.wandb", None), ("seed", "3")]
    assert rest == ["train", "--workdir=DIR", "--", "--config.steps=8"]
    config, _ = from_argv(argv)
    assert (config.steps, config.seed, config.logging.wandb) == (7, 3, True)
    with pytest.raises(ConfigError, match="--config is missing"):
        from_argv(["train", "--workdir=DIR"])


def test_overrides_reach_every_part():
    config = load_config(
        VOTING,
        [
            ("workflow.settings.votes", "5"),
            ("policies.map.generator/1", "p7"),
            ("role_sampling.aggregator.max_new_tokens", "8"),
            ("learner.interventions.kl_coef.generator", "0.01"),
            ("learner.loss.dual_clip", "3"),
            ("learner.optimiser.schedule.kind", "cosine"),
            ("rollout.limits.overlong", "truncate"),
        ],
    )
    assert config.workflow.settings == {"votes": 5}
    assert config.policies.map == {"generator": "p0", "aggregator": "p1", "generator/1": "p7"}
    assert config.role_settings["aggregator"].max_new_tokens == 8
    assert config.role_settings["generator"].max_new_tokens == config.sampling.max_new_tokens
    assert config.learner.interventions.kl_coef == {"generator": 0.01}
    assert config.learner.loss.dual_clip == 3.0
    assert config.learner.optimiser.schedule.kind == "cosine"
    assert config.rollout.limits.overlong == "truncate"
    assert load_config(VOTING).policies.map == {"generator": "p0", "aggregator": "p1"}


def test_unknown_keys_wrong_types_and_impossible_combinations_are_told_together():
    problems = refused(
        ("sampling.temprature", "0.7"),
        ("steps", "many"),
        ("learner.loss.kind", "gsop"),
        ("learner.epochs", "0"),
        ("policies.map.evaluator", "p0"),
        ("data.name", "micro_code"),
    )
    assert len(problems) == 6
    assert "sampling.temprature is unknown: did you mean 'sampling.temperature'?" in problems


@pytest.mark.parametrize(
    "texts, message",
    [
        ([("workflow.name", "votin")], "did you mean 'voting'?"),
        ([("workflow.settings.vote", "3")], "did you mean 'votes'?"),
        ([("workflow.settings.votes", "three")], "workflow.settings.votes is 'three'; it must be an integer"),
        ([("workflow.settings.votes", "0")], "it must be an integer from 1 on"),
        ([("policies.map", '{"generator": "p0"}')], "policy map lacks the role 'aggregator'"),
        ([("policies.frozen_roles", "generator,aggregator")], "nothing is left to train"),
        ([("policies.frozen_roles", "generatr")], "frozen role 'generatr'"),
        ([("policies.bases.p9", "x")], "policies.bases names 'p9'"),
        ([("policies.base", "")], "policies.base is empty"),
        ([("policies.lora_rank", "0")], "lora_rank 0"),
        ([("role_sampling.aggregator.top_q", "1")], "no field 'top_q'"),
        ([("role_sampling.aggregator.temperature", "0")], "role 'aggregator' samples at temperature 0"),
        ([("sampling.temperature", "0.7")], "set sampling.temperature and learner.temperature alike"),
        ([("sampling.max_new_tokens", "0")], "max_new_tokens is 0"),
        ([("rollout.limits.context", "5000")], "rollout.limits.context 5000"),
        ([("engine.max_prompt", "40000")], "add a longer bucket"),
        ([("data.name", "micro_maths")], "did you mean 'micro_math'?"),
        ([("data.name", "deepcoder")], "data.name 'deepcoder' is code, data.family is math"),
        ([("data.name", "jsonl")], "give their directory"),
        ([("data.name", "gsm8k"), ("data.train_size", "5")], "data.train_size is for procedural data"),
        ([("data.directory", "x")], "'micro_math' is drawn, not read"),
        ([("data.val_size", "10")], "evaluation.problems 64 is more than data.val_size 10"),
        ([("advantages.group", "tasks")], "tasks"),
        ([("rollout.samples", "1")], "groups of one have no baseline"),
        ([("workflow.name", "eval_opt"), ("rewards.name", "voting_rubric")], "is defined for voting"),
        ([("rewards.name", "rubric")], "credit 'rubric' is unknown"),
        ([("rewards.name", "no_module:f")], "cannot import module 'no_module'"),
        ([("workflow.name", "json:dumps")], "is a function: decorate it with @workflow"),
        ([("workflow.name", "votin")], "did you mean 'voting'?"),
        ([("data.name", "json:nothing")], "module 'json' has no 'nothing'"),
        ([("data.val_size", "0")], "set evaluation.every=0"),
        ([("evaluation.every", "0")], "checkpoints.best needs evaluations"),
        ([("learner.interventions.freeze", "worker")], "names 'worker', which is no role"),
        ([("checkpoints.every", "0")], "checkpoints.every is 0; it must be at least 1"),
        ([("seed", "-1")], "seed is -1; it must be at least 0"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(texts, message):
    assert any(message in problem for problem in refused(*texts))


def test_damping_is_for_isolated_policies():
    damping = ("learner.interventions.mixing.damping", "0.2")
    load_config(VOTING, [damping])
    assert "isolated" in refused(damping, spec="configs/micro.py:voting-shared-s-math")[0]


def test_another_schema_is_refused():
    with pytest.raises(ValueError, match=r"schema 99, this version reads 1"):
        RunConfig.from_json({**load_config(VOTING).to_json(), "schema": 99})
