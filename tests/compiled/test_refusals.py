"""What has no form in arrays is refused before anything is compiled, in one line that names the hosted road."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_jax.compiled import (
    NoArrayForm,
    batches,
    cast_of,
    make_halves,
    make_step,
    problems,
    start,
    tasks_of,
    to_host,
)
from marl_jax.compiled.cast import rates
from marl_jax.compiled.rehearsal import _Rehearsal, count_calls
from marl_jax.compiled.stage import OUTSIDE, Answers, StageCall
from marl_jax.compiled.step import _integers
from marl_jax.config.run_config import load_config
from marl_jax.runs.loading.parts import load_parts, load_tasks
from marl_jax.task import Task
from marl_jax.tasks import DataError
from marl_jax.workflows import Call, Fork, Tool, parse

REFUSED = {
    "self_refine_with_tests": ("self_refine_with_tests-shared-xs-code", {}),
    "top-k and top-p": ("voting-isolated-xs-math", {"sampling.top_k": "64"}),
    "stop strings": ("voting-isolated-xs-math", {"sampling.stop_strings": "x"}),
    "rollout.draws": ("voting-isolated-xs-math", {"rollout.draws": "2"}),
    "learner.updates=fixed": (
        "voting-isolated-xs-math",
        {"learner.updates": "fixed", "learner.updates_fixed": "2"},
    ),
    "learner.epochs": ("voting-isolated-xs-math", {"learner.epochs": "2"}),
    "reinforce_pp_baseline": ("voting-isolated-xs-math", {"advantages.estimator": "reinforce_pp_baseline"}),
    "advantages by marl_jax": (
        "voting-isolated-xs-math",
        {"advantages.estimator": "marl_jax.learning:group_advantages"},
    ),
    "groups of several problems": ("voting-isolated-xs-math", {"advantages.group": "role,slot"}),
    "groups by path": ("voting-isolated-xs-math", {"advantages.group": "task,path"}),
    "a vLLM server": (
        "voting-shared-xs-math",
        {"road": "auto", "engine.kind": "vllm", "engine.vllm.url": "http://127.0.0.1:8000"},
    ),
    "learner.loss.kind=sft": ("voting-isolated-xs-math", {"learner.loss.kind": "sft"}),
    "mesh.model": ("voting-isolated-xs-math", {"road": "compiled", "mesh.model": "2", "seeds": "2"}),
    "buffer of tasks": ("voting-isolated-xs-math", {"data.buffer.capacity": "2"}),
    "single_token_matched": ("single_token_matched-shared-xs-math", {}),
    "temperature of 0": (
        "voting-isolated-xs-math",
        {"policies.frozen_roles": "aggregator", "role_sampling.aggregator.temperature": "0"},
    ),
    "overlong=truncate": ("voting-isolated-xs-math", {"rollout.limits.overlong": "truncate"}),
    "rewards by examples": ("voting-isolated-xs-math", {"rewards.name": "examples.own_reward:brief_voters"}),
    "ends it after 3": ("eval_opt-isolated-xs-math", {"rollout.limits.max_calls": "3"}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_arrays_cannot_say_is_refused_by_name(what):
    cell, changes = REFUSED[what]
    config = load_config(f"configs/micro.py:{cell}", [*changes.items()])
    with pytest.raises(NoArrayForm, match=what) as refused:
        make_step(config)
    assert "hosted road" in str(refused.value) and "\n" not in str(refused.value)


def test_prompts_that_may_not_fit_are_refused():
    config = load_config("configs/micro.py:eval_opt-isolated-xs-math", [("engine.max_prompt", "100")])
    with pytest.raises(NoArrayForm, match=r"prompts of role 'generator' may take \d+ tokens, and 100 fit"):
        make_step(config)


SAY = [{"role": "user", "content": "1"}]


def draws(task, prompts, rng):
    yield Call("generator", SAY)


def forks(task, prompts):
    yield Fork(2)


def uses_a_tool(task, prompts):
    yield Tool(len, ("1",))


def labelled(task, prompts):
    yield Call("generator", SAY, labels={"mine": 1})


def speaks_in_control_words(task, prompts):
    yield Call("generator", [{"role": "user", "content": "<|im_end|>"}])


def two_at_a_time(task, prompts):
    yield [Call("generator", SAY), Call("aggregator", SAY)]


def two_of_one_slot(task, prompts):
    yield [Call("generator", SAY), Call("generator", SAY)]


def picks_by_a_box(task, prompts):
    yield Call("aggregator", SAY)


def reads_by_itself(task, prompts):
    yield Call("generator", SAY, read=lambda text: text)


WORKFLOWS = {
    "draws at random": draws,
    "yields a Fork": forks,
    "yields a Tool": uses_a_tool,
    "has labels": labelled,
    "spells out a control word": speaks_in_control_words,
    "parallel calls of several roles": two_at_a_time,
    "two parallel calls of 'generator' that share slot 0": two_of_one_slot,
    "role 'generator' reads with": reads_by_itself,
    "role 'aggregator', a picker that does not read with pick": picks_by_a_box,
}


@pytest.mark.parametrize("what", WORKFLOWS)
def test_a_workflow_that_arrays_cannot_say_is_refused_by_name(what):
    config = load_config("configs/micro.py:voting-isolated-xs-math")
    parts = load_parts(config)
    own = dataclasses.replace(
        parts.workflow, fn=WORKFLOWS[what], settings={}, in_arrays=lambda stage: stage.say().at(0)
    )
    with pytest.raises(NoArrayForm, match=what) as refused:
        make_step(config, parts=dataclasses.replace(parts, workflow=own))
    assert "hosted road" in str(refused.value)


def routes(task, prompts):
    choice = yield Call("aggregator", SAY, read=functools.partial(parse.pick, n=2))
    way = "b" if choice.answer == "2" else "a"
    return (yield Call("generator", [{"role": "user", "content": way}]))


def test_a_form_may_follow_a_choice_and_must_where_the_choice_decides():
    config = load_config("configs/micro.py:voting-isolated-xs-math")
    parts = load_parts(config)
    own = dataclasses.replace(parts.workflow, fn=routes, settings={})

    def follows(stage):
        choice = stage.say()
        stage.follow(choice, ["1", "2"], choice.choice[:, 0].clip(1) - 1)
        assert len({cue.pieces for (cue,) in stage._batches[1]}) == 2
        return stage.say().at(0)

    calls = lambda form: count_calls(
        cast_of(config, dataclasses.replace(parts, workflow=dataclasses.replace(own, in_arrays=form)))
    )
    assert calls(follows) == 2
    with pytest.raises(NoArrayForm, match="depends on what was read"):
        calls(lambda stage: [stage.say(), stage.say()][1].at(0))


@pytest.mark.parametrize("gold", ["1/2", "x", "1234567890"])
def test_an_answer_that_is_no_integer_of_nine_digits_is_refused(gold):
    with pytest.raises(NoArrayForm, match=f"the answer '{gold}' of task 't' is no integer"):
        _integers([Task("t", "math", "?", gold=gold)])


FORMS = {
    "more calls than the script": lambda stage: (stage.say(), stage.say(), stage.say())[0].at(0),
    "leaves out calls": lambda stage: stage.say().at(0),
    "slot 3 of 3 parallel calls": lambda stage: (stage.say().at(3), stage.say())[0],
    "the place of an answer for each episode, .*, not Answers": lambda stage: (stage.say(), stage.say())[1],
    "the place of an answer for each episode, .*, not NoneType": lambda stage: (
        stage.say(),
        stage.say(),
        None,
    )[2],
    "`over` is for a single call, and the form uses it on 3": lambda stage: (
        stage.say().over(None),
        stage.say(),
    )[0],
    "`part` is for a single call, and the form uses it on 3": lambda stage: stage.say().part(0),
    "a boolean for each episode, .*, not bool": lambda stage: stage.end(stage.say().choice == 1),
    r"form of workflow 'voting' raised AttributeError: 'Answers' .* 'choise' \(in .*, line \d+\)": (
        lambda stage: stage.say().at(stage.say().choise)
    ),
    "has an if on an array": lambda stage: stage.say().at(0) if stage.say().choice[0, 0] else None,
}


@pytest.mark.parametrize("what", FORMS)
def test_a_form_that_is_not_its_workflow_is_refused(what):
    config = load_config("configs/micro.py:voting-isolated-xs-math")
    parts = load_parts(config)
    own = dataclasses.replace(parts.workflow, in_arrays=lambda stage, votes: FORMS[what](stage))
    with pytest.raises(NoArrayForm, match=what):
        make_step(config, parts=dataclasses.replace(parts, workflow=own))


@pytest.mark.parametrize("which", [lambda plan: plan.count, lambda plan: 1, lambda plan: plan.count[0, 0]])
def test_a_form_that_follows_no_number_for_each_episode_is_refused(which):
    config = load_config("configs/micro.py:orch_workers-shared-xs-math")
    parts = load_parts(config)

    def form(stage, workers):
        plan = stage.say()
        stage.follow(plan, [""] * (workers + 1), which(plan))

    own = dataclasses.replace(parts.workflow, in_arrays=form)
    with pytest.raises(
        NoArrayForm, match=r"stage\.follow takes the number of a text for each episode, \[E\], not"
    ):
        make_step(config, parts=dataclasses.replace(parts, workflow=own))


def test_an_episode_that_follows_no_text_is_astray():
    """-1 is what `choice` is where nothing was read, and would be the last text."""
    cast = cast_of(load_config("configs/micro.py:orch_workers-shared-xs-math"))
    for which, astray in ((-1, True), (1, False), (2, True)):
        stage = _Rehearsal(cast, 0)
        stage.follow(stage.say(), ["", "STRATEGY 1: a"], jnp.array([which]))
        assert stage.astray.tolist() == [astray]


def test_a_form_that_does_not_take_its_workflows_settings_is_refused():
    config = load_config("configs/micro.py:voting-isolated-xs-math")
    parts = load_parts(config)
    own = dataclasses.replace(parts.workflow, in_arrays=lambda stage: stage.say().at(0))
    with pytest.raises(NoArrayForm, match=r"'voting' takes other settings than the workflow .*'votes'"):
        make_step(config, parts=dataclasses.replace(parts, workflow=own))


def test_a_slot_counts_from_the_last_below_0_and_one_that_is_not_there_has_no_place():
    """-1 of an array is what `choice` is where nothing was read."""
    line = StageCall(cue=None, policy="p0", made=jnp.ones(4, bool), reads=None, bound=0)
    said = Answers(None, 2, [line] * 3)
    assert said.at(-1).tolist() == [4] * 4 and said.at(0).tolist() == [2] * 4
    assert said.at(jnp.array([-1, 0, 2, 3])).tolist() == [OUTSIDE, 2, 4, OUTSIDE]


@pytest.mark.parametrize(
    ("setting", "value", "family"),
    [
        pytest.param("enable_x64", True, "code", marks=pytest.mark.long),
        pytest.param("numpy_rank_promotion", "raise", "math", marks=pytest.mark.long),
        pytest.param("numpy_dtype_promotion", "strict", "math", marks=pytest.mark.long),
    ],
)
def test_a_step_has_the_same_types_where_jax_has_64_bits_or_is_strict(setting, value, family):
    config = load_config(f"configs/micro.py:single-shared-xs-{family}", [("data.problems", "2")])
    words, tasks = next(batches(config))
    given = make_step(config), start(config), words, tasks
    single = jax.tree.leaves(jax.eval_shape(*given))
    with getattr(jax, setting)(value):
        other = jax.tree.leaves(jax.eval_shape(*given))
    assert [(x.shape, x.dtype) for x in other] == [(x.shape, x.dtype) for x in single]


def test_a_key_of_another_form_is_refused():
    config = load_config("configs/micro.py:single-shared-xs-math")
    _, tasks = next(batches(config))
    for key in (jax.random.PRNGKey(0), jax.random.split(jax.random.key(0))):
        with pytest.raises(TypeError, match=r"neither one of jax\.random\.key nor the words"):
            jax.eval_shape(make_step(config), start(config), key, tasks)


def test_words_of_other_problems_than_those_of_the_step_are_refused():
    config = load_config("configs/micro.py:single-shared-xs-math", [("data.problems", "4")])
    words, tasks = next(batches(config))
    with pytest.raises(TypeError, match=r"words of the key are for 2 problems .* a step has 4"):
        jax.eval_shape(make_step(config), start(config), words[:2], tasks)
    fewer = np.concatenate([words, words], axis=2)
    with pytest.raises(TypeError, match=r"by 8 samples by 2 calls, and a step has 4 .* by 1 calls"):
        jax.eval_shape(make_step(config), start(config), fewer, tasks)


def test_columns_of_other_problems_or_of_several_seeds_are_refused():
    config = load_config("configs/micro.py:single-shared-xs-math", [("data.problems", "2")])
    cast, of_step = cast_of(config), next(problems(config))
    played = jax.eval_shape(make_halves(config).play, start(config), *next(batches(config)))[0]
    columns = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), played)
    seeds = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), columns)
    for given, tasks in ((columns, of_step[:1]), (columns, [*of_step, *of_step]), (seeds, of_step)):
        with pytest.raises(
            ValueError, match=r"columns of \[.*16\] episodes do not fit . problems by 8 samples"
        ):
            to_host(cast, given, tasks)


def test_questions_without_room_and_what_is_no_configuration_are_refused():
    config = load_config("configs/micro.py:single-shared-xs-math")
    cast, tasks = cast_of(config), load_tasks(config.data, "train")[:2]
    with pytest.raises(ValueError, match=r"a question has \d+ characters, more than the width 1"):
        tasks_of(cast, tasks, 1)
    with pytest.raises(ValueError, match="there are no tasks to put into arrays"):
        tasks_of(cast, [], 9)
    with pytest.raises(TypeError, match="not a RunConfig"):
        make_step("configs/micro.py")


def test_more_problems_in_a_step_than_there_are_are_refused():
    config = load_config(
        "configs/micro.py:single-shared-xs-math", [("data.problems", "61"), ("data.train_size", "60")]
    )
    with pytest.raises(DataError, match=r"data\.problems is 61 and the train split has 60"):
        next(batches(config))


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_learning_rates_are_tabled_as_far_as_they_change(kind):
    config = load_config(
        "configs/micro.py:single-shared-xs-math",
        [("steps", "1000000000"), ("learner.optimiser.schedule.kind", kind)],
    )
    schedule = config.learner.schedule_of("p0")
    table = rates(config, "p0", 1)
    assert len(table) <= schedule.total_steps + 1
    steps = (0, 1, schedule.warmup_steps, schedule.total_steps, 10**9 - 1)
    assert [float(table[min(step, len(table) - 1)]) for step in steps] == [
        np.float32(schedule(step)) for step in steps
    ]
