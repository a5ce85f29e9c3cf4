"""A configuration is what the cell says and the command line changes; what cannot be is refused all at once."""

import contextlib
import dataclasses
import json
import sys

import numpy as np
import pytest

from configs import micro, qwen3, study
from marl_jax.config.cells import all_cells, of_study, parse_cell
from marl_jax.config.run_config import ConfigError, RunConfig, from_argv, load_config, load_file, split_argv
from marl_jax.learning.learner_config import LearnerConfig
from marl_jax.learning.losses import LossConfig
from marl_jax.planning import walks
from marl_jax.planning.plan import demand_of
from marl_jax.planning.walks import least_calls
from marl_jax.policies import shared
from marl_jax.runs import train
from marl_jax.runs.loading.parts import load_parts
from marl_jax.workflows import BUILT_IN, Call, workflow

VOTING = "configs/micro.py:voting-isolated-s-math"
INTERVENTIONS = "learner.interventions"
MIXING = f"{INTERVENTIONS}.mixing"
OWN_DATA = ("data.name", "json:loads")


@workflow(roles=("generator", "evaluator"))
def unsaid(task, prompts):
    """Its roles are named, and what their work is is not."""
    yield Call("generator", prompts.generator(question=task.question))


def refused(*texts, spec=VOTING):
    with pytest.raises(ConfigError) as error:
        load_config(spec, texts)
    return error.value.problems


@pytest.mark.parametrize("file", [micro, qwen3, pytest.param(study, marks=pytest.mark.long)])
def test_every_cell_is_a_valid_configuration_that_json_gives_back(file):
    for cell in all_cells(file.SCALES):
        config = file.get_config(str(cell))
        assert config.cell == str(cell)
        assert set(config.policies.map) == set(config.roles)
        distinct = len(config.roles) if cell.policy == "isolated" else 1
        assert len(set(config.policies.map.values())) == distinct
        assert RunConfig.from_json(json.loads(json.dumps(config.to_json(), allow_nan=False))) == config


MATCHED = "configs/qwen3.py:single_token_matched-shared-0.6b-math"


def test_what_a_token_matched_agent_is_matched_to_has_to_be_said(tmp_path):
    with pytest.raises(ConfigError) as error:
        train(load_config(MATCHED), tmp_path / "run")
    (line,) = error.value.problems
    assert line.startswith(
        "workflow.settings.tokens of 'single_token_matched' is not given: give --config.workflow."
    )
    assert "'tokens_per_episode' in its run's eval.jsonl" in line
    assert load_config(MATCHED, [("workflow.settings.tokens", "5200")]).workflow.settings == {"tokens": 5200}
    small = micro.get_config("single_token_matched-shared-xs-math")
    open_ended = dataclasses.replace(small, workflow=dataclasses.replace(small.workflow, settings={}))
    with pytest.raises(ConfigError, match="is not given: give"):
        train(open_ended, tmp_path / "run")
    assert (
        load_parts(open_ended).workflow.name == "single_token_matched"
    )  # a run of before is still evaluated


@pytest.mark.parametrize("file", [micro, qwen3, study])
def test_the_cells_of_a_file_can_be_run_as_they_stand(file):
    assert set(file.CELLS) <= set(map(str, all_cells(file.SCALES)))
    for name in file.CELLS:
        load_config(f"configs/{file.__name__.rpartition('.')[2]}.py:{name}")
    assert not any("single_token_matched" in name for name in qwen3.CELLS)
    assert any("single_matched-shared-4b" in name for name in qwen3.CELLS)


def test_the_study_cell_has_the_settings_of_the_study():
    config = load_config("configs/qwen3.py:eval_opt-isolated-1.7b-math")
    assert (config.policies.train, config.policies.lora_rank, config.policies.lora_alpha) == ("lora", 64, 32)
    assert (config.data.name, config.data.problems, config.rollout.samples) == ("dapo_math", 64, 8)
    assert (config.engine.max_prompt, config.sampling.max_new_tokens) == (30720, 5120)
    assert config.sampling.temperature == 0.7
    optimiser = config.learner.optimiser
    assert (optimiser.schedule.learning_rate, optimiser.schedule.warmup_steps) == (2e-5, 15)
    assert (config.steps, config.checkpoints.every, config.evaluation.every) == (500, 5, 10)


@pytest.mark.parametrize("name", ["voting-isolated-xs-math", "eval_opt-shared-1.7b-code"])
def test_the_studys_regime_is_the_same_cell_with_another_learner(name):
    clean = (micro if "-xs-" in name else qwen3).get_config(name)
    config = study.get_config(name)
    assert dataclasses.replace(config, learner=clean.learner, advantages=clean.advantages) == clean
    schedule, loss = config.learner.optimiser.schedule, config.learner.loss
    assert (schedule.clock, schedule.clamped, schedule.kind) == ("shared", False, "cosine")
    assert schedule.learning_rate == clean.learner.optimiser.schedule.learning_rate
    assert schedule.total_steps == clean.steps and loss.dual_clip == 3.0 and loss.is_cap is None
    assert (config.learner.updates, config.learner.sequences_per_update) == ("sequences", 512)
    assert (config.advantages.group, config.advantages.singleton) == ("study", "reward")
    assert config.learner.batch == clean.learner.batch


def test_single_has_one_cell_whatever_its_policy_is_called():
    cells = [load_config(f"configs/micro.py:single-{policy}-xs-code") for policy in ("shared", "isolated")]
    assert cells[0] == cells[1]
    assert len([cell for cell in all_cells(micro.SCALES) if of_study(str(cell))]) == 3 * 2 * (3 + 3 * 2)
    assert len(all_cells(micro.SCALES)) == 3 * 2 * (3 + 3 * 2) + 3 * (
        2 + 2 + 1
    )  # debate, planner_coder, self_refine


@pytest.mark.parametrize(
    "name, hint",
    [
        ("voting-isolatd-s-math", "did you mean 'voting-isolated-s-math'?"),
        ("evalopt-shared-m-code", "did you mean 'eval_opt-shared-m-code'?"),
        ("voting-isolated-s", "did you mean 'voting-isolated-s-math'?"),
        ("voting-isolated-1.7b-math", "scale xs|s|m"),
        (
            "",
            "the name of the cell is empty: give --config=FILE:CELL. A name is {workflow}-{policy}-{scale}-{task}",
        ),
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
    with pytest.raises(ConfigError, match=r"'README\.md' is no Python file"):
        load_file("README.md:x")
    (tmp_path / "broken.py").write_text("\ndef get_config(:\n")
    with pytest.raises(ConfigError, match=r"line 2 of '.*/broken\.py': "):
        load_file(f"{tmp_path}/broken.py:x")


@pytest.mark.parametrize(
    "source, message",
    [
        ("import no_such_module", "'{file}' cannot be loaded: No module named 'no_such_module'"),
        ("1 / 0", "'{file}' raised ZeroDivisionError: division by zero (in <module>, line 1)"),
        (
            "def get_config(name):\n    return {}[name]",
            "get_config('x') raised KeyError: 'x' (in get_config, line 2)",
        ),
        ("def get_config(): pass", "'{file}' defines no get_config(name)"),
        ("get_config = 3", "'{file}' defines no get_config(name)"),
        ("def get_config(name): return {'steps': 3}", "get_config gives a dict: return a RunConfig"),
    ],
)
def test_a_file_that_gives_no_configuration_is_told_in_one_line(tmp_path, source, message):
    file = tmp_path / "cells.py"
    file.write_text(source)
    assert refused(spec=f"{file}:x") == [f"--config={file}:x: {message.format(file=file)}"]


def test_a_command_line_is_taken_apart():
    argv = ["train", "--config", VOTING, "--workdir=DIR", "--config.steps=7", "--config.logging.tensorboard"]
    argv += ["--config.seed", "3", "--", "--config.steps=8"]
    spec, texts, rest = split_argv(argv)
    assert spec == VOTING
    assert texts == [("steps", "7"), ("logging.tensorboard", None), ("seed", "3")]
    assert rest == ["train", "--workdir=DIR", "--", "--config.steps=8"]
    config, _ = from_argv(argv)
    assert (config.steps, config.seed, config.logging.tensorboard) == (7, 3, True)
    with pytest.raises(ConfigError, match="--config is missing"):
        from_argv(["train", "--workdir=DIR"])


def test_a_cell_that_does_not_exist_hides_no_mistake_that_shows_without_it():
    problems = refused(("step", "3"), ("seed", "x"), spec="configs/micro.py:votin-shared-s-math")
    assert [problem.split()[0] for problem in problems] == ["cell", "step", "seed"]


def test_overrides_reach_every_part():
    config = load_config(
        VOTING,
        [
            ("workflow.settings.votes", "5"),
            ("policies.map.generator/1", "p7"),
            ("role_sampling.aggregator.max_new_tokens", "8"),
            ("role_sampling.aggregator.stop_tokens", "1,2"),
            ("learner.interventions.kl_coef.generator", "0.01"),
            ("learner.loss.dual_clip", "3"),
            ("learner.optimiser.schedule.kind", "cosine"),
            ("rollout.limits.overlong", "truncate"),
        ],
    )
    assert config.workflow.settings == {"votes": 5}
    assert config.policies.map == {"generator": "p0", "aggregator": "p1", "generator/1": "p7"}
    assert config.role_settings["aggregator"].max_new_tokens == 8
    assert config.role_settings["aggregator"].stop_tokens == (1, 2)
    assert config.role_settings["generator"].max_new_tokens == config.sampling.max_new_tokens
    assert config.learner.interventions.kl_coef == {"generator": 0.01}
    assert config.learner.loss.dual_clip == 3.0
    assert config.learner.optimiser.schedule.kind == "cosine"
    assert config.rollout.limits.overlong == "truncate"
    assert load_config(VOTING).policies.map == {"generator": "p0", "aggregator": "p1"}
    group = load_config(VOTING, [("learner", '{"loss": {"clip_low": 0.1}}')]).learner
    assert group == dataclasses.replace(LearnerConfig(), loss=LossConfig(clip_low=0.1))
    both = [("learner.loss.clip_high", "0.5"), ("learner", '{"loss": {"clip_low": 0.1}}')]
    for changes in (both, both[::-1]):  # an object is the whole group, and single fields are set in it
        assert load_config(VOTING, changes).learner.loss == LossConfig(clip_low=0.1, clip_high=0.5)


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


def test_a_configuration_built_in_python_has_values_of_the_types_of_its_fields():
    config = load_config(VOTING)
    policies = dataclasses.replace(config.policies, train="LoRA", map={"generator": 0, "aggregator": "p1"})
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(config, steps=2.5, policies=policies, data=None)
    assert error.value.problems == [
        "policies.map.generator is 0; it must be a text",
        "policies.train is 'LoRA'; it must be 'full' or 'lora'",
        "data is None; it must be DataConfig(...)",
        "steps is 2.5; it must be an integer",
    ]
    data = dataclasses.replace(config.data, levels=[1, 2])
    logging = dataclasses.replace(config.logging, tensorboard=np.True_)
    built = dataclasses.replace(config, steps=np.int64(3), data=data, logging=logging)
    assert RunConfig.from_json(json.loads(json.dumps(built.to_json()))) == built


def test_a_config_files_values_of_a_wrong_type_are_told_with_those_of_the_command_line(tmp_path):
    file = tmp_path / "cells.py"
    file.write_text(
        "import dataclasses\nfrom configs import micro\n"
        "def get_config(name): return dataclasses.replace(micro.get_config(name), steps='many')"
    )
    assert refused(("seed", "x"), spec=f"{file}:voting-isolated-s-math") == [
        "steps is 'many'; it must be an integer",
        "seed is 'x'; it must be an integer",
    ]


def test_a_setting_of_none_is_all_that_is_told_of_it():
    assert refused(("workflow.settings.votes", "0")) == [
        "workflow.settings.votes is 0; it must be an integer from 1 on"
    ]


def test_what_is_asked_in_vain_is_told_with_the_rest(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    asked = {"data.problems": "-3", "logging.wandb": None, "data.name": "gsm8k", "data.levels": "9"}
    said = ("data.problems is -3", "data.levels is for procedural data", "logging.wandb is on")
    found = refused(*asked.items())
    assert len(found) == 3 and all(any(line.startswith(part) for line in found) for part in said)


@pytest.mark.parametrize(
    "texts, message",
    [
        ([("workflow.name", "votin")], "did you mean 'voting'?"),
        ([("workflow.settings.vote", "3")], "did you mean 'votes'?"),
        ([("workflow.settings.votes", "three")], "workflow.settings.votes is 'three'; it must be an integer"),
        ([("workflow.settings.votes", "0")], "it must be an integer from 1 on"),
        ([("policies.map", '{"generator": "p0"}')], "policy map lacks the role 'aggregator'"),
        (
            [("policies.map.generator", "Qwen/4b")],
            "policies.map has the policy 'Qwen/4b': metrics use '/' as a separator",
        ),
        ([("policies.map.generator", "..")], "policies.map has the policy '..', which cannot name a folder"),
        ([("policies.frozen_roles", "generator,aggregator")], "nothing is left to train"),
        ([("policies.frozen_roles", "generatr")], "frozen role 'generatr'"),
        ([("policies.bases.p9", "x")], "policies.bases names 'p9'"),
        ([("policies.base", "")], "policies.base is empty"),
        ([("policies.bases.p0", "")], "policies.bases.p0 is empty: give the directory of its model"),
        ([("seed", "2147483647"), ("seeds", "2")], "seeds 2: the last seed would exceed 2147483647"),
        ([("policies.lora_rank", "0")], "policies.lora_rank is 0; it must be at least 1"),
        ([("role_sampling.aggregator.top_q", "1")], "no field 'top_q'"),
        ([("role_sampling.aggregator.temperature", "0")], "role 'aggregator' samples at temperature 0"),
        ([("role_sampling.aggregator.temperature", "1e-50")], "aggregator' samples at temperature 1e-50"),
        ([("rollout.samples", "10001")], "rollout.samples is 10001; it must be at most 10000"),
        ([("sampling.max_new_tokens", "0")], "max_new_tokens is 0"),
        ([("rollout.limits.context", "5000")], "rollout.limits.context 5000"),
        ([("engine.max_prompt", "40000")], "add a longer bucket"),
        ([("data.name", "micro_maths")], "did you mean 'micro_math'?"),
        ([("data.name", "deepcoder")], "data.name 'deepcoder' is code, but data.family is math"),
        ([("data.name", "jsonl")], "give their directory"),
        (
            [("data.name", "gsm8k"), ("data.train_size", "5")],
            "data.train_size is 5; it is for procedural data",
        ),
        ([("data.name", "gsm8k"), ("data.levels", "1")], "data.levels is for procedural data"),
        ([("data.directory", "x")], "data.directory is 'x'; it is for data read from files"),
        ([("data.bad_rows", "skip")], "data.bad_rows is 'skip'; it is for data read from files"),
        ([("data.levels", "2,9")], "data.levels is 2,9; 'micro_math' has the levels 1,2,3,4,5"),
        ([("data.levels", "")], "data.levels is empty; 'micro_math' has the levels 1,2,3,4,5"),
        ([("rollout.limits.max_calls", "3")], "max_calls is 3, and every episode of 'voting' makes 4 calls"),
        (
            [("workflow.settings.votes", "100")],
            "makes 101 calls or more: raise it, or lower workflow.settings.votes",
        ),
        ([("workflow.settings.votes", "1000000")], "lower workflow.settings.votes"),
        ([OWN_DATA, ("data.directory", "x")], "it is for data read from files, and 'json:loads' is not"),
        ([OWN_DATA, ("data.bad_rows", "skip")], "data.bad_rows is 'skip'"),
        ([OWN_DATA, ("data.train_size", "9")], "data.train_size is 9; it is for procedural data"),
        ([OWN_DATA, ("data.test_size", "9")], "data.test_size is 9"),
        ([OWN_DATA, ("data.val_size", "99")], "data.val_size is 99; it is for built-in data sets"),
        ([OWN_DATA, ("data.seed", "1")], "data.seed is 1; it is for built-in data sets"),
        ([OWN_DATA, ("data.cache", "x")], "data.cache is 'x'; it is for built-in data sets"),
        ([OWN_DATA, ("data.levels", "2")], "data.levels is for procedural data; 'json:loads' has no levels"),
        ([("data.name", "json:decoder")], "'json:decoder' is a module: name a function that maps a split"),
        (
            [("policies.map.generator/3", "p7")],
            "policies.map gives 'generator/3' a policy, but no call of this",
        ),
        ([("policies.map.aggregator/1", "p7")], "policies.map gives 'aggregator/1' a policy, but no call of"),
        (
            [("policies.map", '{"generator/0": "a", "generator/1": "b", "aggregator": "c"}')],
            "policies.map lacks 'generator/2': add it, or 'generator'",
        ),
        (
            [("role_sampling.aggregator.max_new_tokens", "abc")],
            "max_new_tokens is 'abc'; it must be an integer",
        ),
        (
            [("role_sampling.aggregator.temperature", "hot")],
            "temperature is 'hot'; it must be a finite number",
        ),
        (
            [("role_sampling.aggregator.temperature", None)],
            "temperature is given without a value; it must be a finite number",
        ),
        ([("learner.interventions.freeze", "generator,aggregator")], "freeze leaves no role to train"),
        (
            [("learner.interventions.freeze", "generator"), ("policies.frozen_roles", "aggregator")],
            "freeze leaves no role to train",
        ),
        ([("seed", str(2**70))], f"seed is {2**70}; it must be at most 2147483647"),
        ([("data.seed", str(2**31))], "data.seed is 2147483648; it must be at most"),
        ([("learner.seed", str(2**31))], "learner: seed is 2147483648; it must be at most"),
        ([("learner.seed", "-1")], "learner: seed is -1; it must be at least 0"),
        (
            [("workflow.name", "self_refine_with_tests"), ("workflow.settings.run", "3")],
            "workflow.settings.run is 3; it must be left out: it is a function",
        ),
        ([("data.val_size", "10")], "evaluation.problems 64 is more than data.val_size 10"),
        ([("advantages.group", "tasks")], "tasks"),
        ([("rollout.samples", "1")], "all calls of an episode get its outcome: no reward differs within"),
        (
            [("rollout.samples", "1"), ("advantages.group", "task,role,slot")],
            "groups of one have no baseline and teach nothing; set it to 2 or more, or advantages.singleton=reward",
        ),
        ([(f"{INTERVENTIONS}.alternate", "generator")], "alternate is generator; it must name two roles"),
        (
            [(f"{INTERVENTIONS}.alternate", "generator,generator")],
            "alternate is generator, generator; it must",
        ),
        (
            [(f"{INTERVENTIONS}.alternate", "generator,aggregator"), ("policies.frozen_roles", "aggregator")],
            "alternate names aggregator, frozen by policies.frozen_roles",
        ),
        (
            [(f"{INTERVENTIONS}.kl_coef.generator", "1e40")],
            "kl_coef.generator is 1e+40; it must be at most 3.4",
        ),
        (
            [("learner.layer_norms", "true"), ("learner.gradients", "off")],
            "layer_norms needs gradients split by role or slot",
        ),
        (
            [("learner.loss.aggregation", "sequence_mean_token_sum_norm")],
            "'sequence_mean_token_sum_norm' divides by max_length: set it",
        ),
        (
            [("learner.loss.max_length", "9")],
            "max_length 9 is for 'sequence_mean_token_sum_norm': leave it out",
        ),
        ([("learner.optimiser.weight_decay", "-1")], "weight_decay is -1.0; it must be at least 0"),
        ([("learner.optimiser.schedule.total_steps", "0")], "total_steps is 0; it must be at least 1"),
        ([("workflow.name", "eval_opt"), ("rewards.name", "voting_rubric")], "is for solvers and pickers"),
        (
            [("workflow.name", f"{__name__}:unsaid"), ("rewards.name", "own_correctness")],
            'write @workflow(roles={"generator": solver, "evaluator": solver})',
        ),
        ([("engine.sampler", "json:nothing")], "engine.sampler: sampler 'json:nothing'"),
        ([("engine.sampler", "json:loads")], "has top_k 0 in a run that truncates"),
        ([("sampling.min_new_tokens", "2")], "has min_new_tokens 2 and top_k 0: only with top_k"),
        ([("learner.loss.kind", "json:nothing")], "loss 'json:nothing': module 'json' has no 'nothing'"),
        (
            [("advantages.estimator", "json:nothing")],
            "estimator 'json:nothing': module 'json' has no 'nothing'",
        ),
        ([("rewards.name", "rubric")], "credit 'rubric' is unknown"),
        (
            [("rewards.penalized_roles", "generater")],
            "rewards.penalized_roles names 'generater', which is no role of the workflow: did you mean 'generator'?",
        ),
        ([("rewards.name", "no_module:f")], "cannot import module 'no_module'"),
        ([("workflow.name", "json:dumps")], "is a function: decorate it with @workflow"),
        ([("workflow.name", "votin")], "did you mean 'voting'?"),
        ([("data.name", "json:nothing")], "module 'json' has no 'nothing'"),
        ([("data.val_size", "0")], "set evaluation.every=0"),
        ([("evaluation.every", "0")], "checkpoints.best needs evaluations"),
        ([("learner.interventions.freeze", "worker")], "names 'worker', which is no role"),
        (
            [(f"{MIXING}.balance", "cap"), (f"{MIXING}.roles", "generatr")],
            f"{MIXING}.roles names 'generatr', which is no role of the workflow: did you mean 'generator'?",
        ),
        ([("learner.updates_fixed", "4")], "learner.updates_fixed is for learner.updates=fixed: set that"),
        ([(f"{MIXING}.max_share", "0.3"), (f"{MIXING}.balance", "equalise")], f"is for {MIXING}.balance=cap"),
        ([(f"{MIXING}.roles", "generator")], f"{MIXING}.roles is set, but no switch of mixing is on"),
        ([("learner.learning_rates.p9", "1e-4")], "names 'p9', which is no policy"),
        (
            [("learner.learning_rates.p1", "1e-4"), ("policies.frozen_roles", "aggregator")],
            "learning_rates names 'p1', which is frozen",
        ),
        ([("sampling.max_new_tokens", "1000000000000")], "max_new_tokens"),
        ([("checkpoints.every", "0")], "checkpoints.every is 0; it must be at least 1"),
        ([("seed", "-1")], "seed is -1; it must be at least 0"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(texts, message):
    assert any(message in problem for problem in refused(*texts))


@workflow(roles=("writer",), counts=("rounds",))
def own_settings(
    task, prompts, *, style="plain", keep=0.25, tries=3, loud=False, words=("a",), limit=None, rounds=2
):
    yield Call("writer", prompts.writer(question=task.question))


def own(*settings):
    """A configuration of it with these settings."""
    name = ("workflow.name", f"{__name__}:own_settings")
    texts = [name, ("policies.map", '{"writer": "p0"}'), *settings]
    return load_config("configs/micro.py:single-shared-s-math", texts)


def test_settings_of_ones_own_workflow_are_of_the_types_of_their_defaults():
    texts = {"style": "terse", "keep": "0.5", "tries": "0", "loud": "true", "words": '["b"]', "limit": "any"}
    config = own(*((f"workflow.settings.{name}", text) for name, text in texts.items()))
    found = {"style": "terse", "keep": 0.5, "tries": 0, "loud": True, "words": ("b",), "limit": "any"}
    assert config.workflow.settings == found
    for name, text, wanted in (
        ("style", "3", "a text"),
        ("keep", "half", "a finite number"),
        ("tries", "1.5", "an integer"),
        ("loud", "3", "true or false"),
        ("words", "b", 'a JSON list, such as ["a", "b"] or [1, 2]'),
        ("rounds", "0", "an integer from 1 on"),
        ("limit", "NaN", "a value that JSON can store, with finite numbers"),
        ("words", "[1, -Infinity]", "a value that JSON can store, with finite numbers"),
    ):
        with pytest.raises(ConfigError, match=rf"workflow\.settings\.{name} is .*; it must be") as refusal:
            own((f"workflow.settings.{name}", text))
        assert wanted in str(refusal.value)


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_slots_that_are_known_are_those_that_a_workflow_calls(name):
    roles, (family, *_) = BUILT_IN[name].roles, BUILT_IN[name].families
    config = load_config(
        f"configs/micro.py:single-shared-s-{family}",
        [
            ("workflow.name", name),
            ("policies.map", json.dumps(shared(roles))),
            ("workflow.settings", "{}"),
        ],
    )
    short = demand_of(config, completion=0.01)  # so that a budget of tokens is not what ends an episode
    called = {(call.role, call.slot) for call in short.calls}
    assert called == {(role, slot) for role in roles for slot in range(BUILT_IN[name].slots_of(role))}


@pytest.mark.parametrize(
    "name, settings, fewest",
    [
        ("single", {}, 1),
        ("single_matched", {"calls": 6}, 6),
        ("single_token_matched", {"tokens": 256}, 4),  # calls of 64 tokens
        ("voting", {}, 4),
        ("eval_opt", {"rounds": 9}, 2),
        ("eval_opt", {"shared": True}, 2),
        ("orch_workers", {"workers": 9}, 3),
        ("debate", {"agents": 4, "rounds": 3}, 12),
        ("planner_coder", {}, 2),
        ("self_refine_with_tests", {}, 1),
    ],
)
def test_a_limit_that_the_shortest_episode_breaks_is_refused(name, settings, fewest):
    family = BUILT_IN[name].families[0]
    cell, texts = (
        f"configs/micro.py:single-shared-s-{family}",
        {
            "workflow.name": name,
            "workflow.settings": json.dumps(settings),
            "policies.map": json.dumps(shared(BUILT_IN[name].roles)),
        },
    )
    enough = load_config(cell, [*texts.items(), ("rollout.limits.max_calls", str(fewest))])
    assert least_calls(enough) == fewest
    if fewest > 1:
        (line,) = refused(*texts.items(), ("rollout.limits.max_calls", str(fewest - 1)), spec=cell)
        assert f"makes {fewest} calls or more: raise it" in line


def test_weights_and_biases_is_refused_where_it_is_not_installed(tmp_path, monkeypatch):
    asked = ("logging.wandb", "true")
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert refused(asked) == [
        "logging.wandb is on and wandb is not installed: pip install wandb, or leave it off"
    ]
    monkeypatch.delitem(sys.modules, "wandb")
    (tmp_path / "wandb.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(VOTING, [asked])
    (tmp_path / "wandb.py").unlink()
    assert RunConfig.from_json(config.to_json()) == config  # elsewhere, such a run is evaluated


def test_damping_is_for_isolated_policies():
    damping = (f"{MIXING}.damping", "0.2")
    load_config(VOTING, [damping])
    assert "isolated" in refused(damping, spec="configs/micro.py:voting-shared-s-math")[0]


def test_damping_of_one_role_needs_a_policy_for_that_role_alone():
    workers = [(f"policies.map.{role}", "p0") for role in ("worker", "synthesizer")]
    asked = [*workers, ("policies.map.orchestrator", "p1"), (f"{MIXING}.damping", "0.2")]
    spec = "configs/micro.py:orch_workers-isolated-s-math"
    roles = f"{MIXING}.roles"
    load_config(spec, [*asked, (roles, "orchestrator")])
    for wrong in ("worker", "orchestrator,worker"):
        assert "isolated" in refused(*asked, (roles, wrong), spec=spec)[0]


def test_another_schema_is_refused():
    with pytest.raises(ValueError, match=r"schema 99, this version reads 1"):
        RunConfig.from_json({**load_config(VOTING).to_json(), "schema": 99})


@pytest.mark.parametrize(
    ("cell", "changes", "alone"),
    [
        ("single", {}, True),
        ("single", {"advantages.group": "task"}, True),
        ("voting", {}, False),
        ("voting", {"advantages.group": "study"}, True),
        ("voting", {"workflow.settings.votes": "1"}, True),
        ("voting", {"workflow.settings.votes": "1", "advantages.group": "task"}, False),
        ("voting", {"advantages.estimator": "agent"}, False),
        ("voting", {"advantages.estimator": "agent", "advantages.group": "task,role,slot,turn"}, False),
        ("eval_opt", {}, False),
        ("eval_opt", {"advantages.group": "role_turn"}, True),
        ("eval_opt", {"workflow.settings.rounds": "1"}, True),
        ("orch_workers", {}, False),
        ("orch_workers", {"workflow.settings.workers": "1"}, True),
        ("orch_workers", {"advantages.group": "task,role,slot"}, True),
        ("voting", {"advantages.group": "slot"}, False),
    ],
)
def test_who_has_nobody_to_be_compared_with_in_one_episode_is_known(cell, changes, alone):
    asked = list(changes.items())
    config = load_config(f"configs/micro.py:{cell}-shared-s-math", asked)
    assert walks.has_single_groups(config) == alone
    once = [*asked, ("rollout.samples", "1"), ("rewards.name", "own_correctness")]
    if not alone:
        load_config(f"configs/micro.py:{cell}-shared-s-math", once)
    else:
        assert "groups of one" in refused(*once, spec=f"configs/micro.py:{cell}-shared-s-math")[0]


@pytest.mark.parametrize(
    ("phases", "alone"),
    [
        ([{"steps": 2, "source": "calls.parquet", "objective": "dpo"}], False),
        ([{"steps": 2, "learner": {"loss.kind": "sft"}}], False),
        ([{"steps": 2, "source": "calls.parquet", "objective": "dpo"}, {"steps": 2}], True),
        (
            [
                {"steps": 2, "name": "first", "collect": True, "objective": "sft"},
                {"steps": 2, "source": "collected:first", "objective": "dpo"},
            ],
            True,
        ),
    ],
)
def test_one_sample_is_enough_where_no_calls_of_the_run_are_compared(phases, alone):
    once = [("rollout.samples", "1"), ("phases", json.dumps(phases))]
    once.append(("steps", str(sum(phase["steps"] for phase in phases))))
    with pytest.raises(ConfigError, match="groups of one") if alone else contextlib.nullcontext():
        load_config("configs/micro.py:single-shared-s-math", once)


def test_an_estimator_of_ones_own_may_do_with_one_sample():
    once = [("rollout.samples", "1"), ("advantages.estimator", "json:loads")]
    load_config("configs/micro.py:voting-shared-s-math", once)


def test_groups_of_ones_own_workflow_are_known_to_be_single_where_all_calls_are_apart():
    for key, alone in (("role", False), ("task,role,slot,turn", True)):
        assert walks.has_single_groups(own(("advantages.group", key))) == alone
