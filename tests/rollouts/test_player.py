"""A player is built in one call, plays again and again, and says what went wrong in words of its arguments."""

import dataclasses
import functools
import re
import types

import jax
import numpy as np
import pytest
from fake_engine import TOKENIZER, FakeEngine
from rollout_kit import TASKS, ragged

from marl_jax import policies
from marl_jax.models import ModelConfig, init, save_hf
from marl_jax.policies import SamplingSettings
from marl_jax.rollouts import EpisodesFailed, Player, player_for
from marl_jax.tasks import micro
from marl_jax.workflows import Call, voting, workflow

MODEL = dataclasses.replace(
    ModelConfig.preset("xs"), num_hidden_layers=1, hidden_size=32, intermediate_size=64
)


def player(flow, **options):
    """One over an engine without a model."""
    service = types.SimpleNamespace(engines=FakeEngine(ragged), versions={"p0": 0})
    settings = policies.role_settings(flow.roles)
    return Player(flow, None, TOKENIZER, service, policies.shared(flow.roles), settings, **options)


@workflow(roles=("generator",), families=("math",))
def sometimes(task, prompts, *, broken=("t1",)):
    draft = yield Call("generator", prompts.generator(question=task.question))
    if task.id in broken:
        raise KeyError(f"no {task.id}")
    return draft


@workflow(roles=("generator",), families=("math",))
def mute(task, prompts):
    yield Call("generator", prompts.generator(question=task.question))


def test_a_function_that_is_no_workflow_and_data_that_are_not_there_are_told():
    with pytest.raises(
        TypeError, match=r"workflow is <function .*: decorate its function with @workflow\(roles"
    ):
        player_for(lambda task, prompts: None, "configs/bases/micro-xs")
    with pytest.raises(
        ValueError, match="there is no procedural data 'micro_mth': did you mean 'micro_math'"
    ):
        next(micro.take("micro_mth", "train", 1))


ALL = tuple(task.id for task in TASKS)


def test_a_rollout_in_which_every_episode_failed_ends_with_the_first_traceback():
    with pytest.raises(EpisodesFailed) as error:
        player(sometimes.bind(broken=ALL)).play(TASKS, samples=2)
    head, *trace = str(error.value).splitlines()
    assert head.startswith("workflow 'sometimes': all 12 episodes ended in an error")
    assert trace[0] == "Traceback (most recent call last):" and re.fullmatch(r"KeyError: 'no t\d'", trace[-1])
    assert __file__ in trace[1] and 'raise KeyError(f"no {task.id}")' in trace[2]
    assert not any("running.py" in line for line in trace)
    some = workflow(roles=sometimes.roles, name="some")(functools.partial(sometimes.fn, broken=ALL))
    with pytest.raises(EpisodesFailed, match="workflow 'some': all 12 episodes ended in an error"):
        player(some).play(TASKS, samples=2)


@pytest.mark.parametrize(
    ("most", "broken", "fails"),
    [(1.0, ALL[:5], False), (0.5, ALL[:2], False), (0.5, ALL[:3], True), (None, ALL, False)],
)
def test_the_share_of_failures_that_is_too_many_can_be_set(most, broken, fails):
    playing = player(sometimes.bind(broken=broken), max_failed=most)
    if fails:
        with pytest.raises(EpisodesFailed, match=r"3 of 6 episodes ended in an error \(max_failed is 0\.5\)"):
            playing.play(TASKS)
    else:
        errors = [head.error for head in playing.play(TASKS).bare_episodes]
        assert sum(error is not None for error in errors) == len(broken)


def test_a_workflow_that_returns_nothing_is_an_error_where_an_answer_is_needed():
    assert {head.answer for head in player(mute).play(TASKS).bare_episodes} == {None}
    with pytest.raises(EpisodesFailed, match="'mute' returned nothing in all 6 episodes: return its answer"):
        player(mute, answers=True).play(TASKS)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    save_hf(directory, MODEL, init(0, MODEL), TOKENIZER)
    return directory


def test_one_call_builds_all_that_a_workflow_needs_and_new_weights_are_served(base):
    roles = policies.isolated(voting.roles)
    short = {"policies": roles, "sampling": SamplingSettings(max_new_tokens=8), "max_prompt": 96, "lanes": 8}
    playing = player_for("voting", base, **short)
    tasks = list(micro.take("micro_math", "train", 2, levels=(1,)))
    first = playing.play(tasks, samples=2)
    assert len(first.bare_episodes) == 4 and set(first.policies) == {"p0", "p1"}
    again = playing.play(tasks, samples=2)
    assert first.text == again.text and set(again.version.tolist()) == {0}
    other = playing.start()
    other["p0"] = init(1, MODEL)
    playing.update(other)
    changed = playing.play(tasks, samples=2)
    assert set(changed.version.tolist()) == {1}
    assert changed.text[:3] != first.text[:3]  # the generators' policy is another one
    with pytest.raises(ValueError, match="trees lacks the policy 'p1'; it has: p0"):
        playing.update({"p0": other["p0"]})


def test_weights_that_an_update_took_are_told(base):
    playing = player_for(voting, base, max_prompt=64, lanes=8)
    trees, tasks = playing.start(), micro.take("micro_math", "train", 1, levels=(1,))
    playing.update(trees)
    jax.tree.map(lambda leaf: leaf.delete(), trees)  # as a donation does
    with pytest.raises(RuntimeError, match=r"took the memory of this engine's weights: pass the new ones"):
        playing.play(tasks)


def test_weights_to_learn_from_are_fresh_at_every_call(base):
    playing = player_for(voting, base, max_prompt=64, lanes=8)
    one, two = playing.start()["p0"]["embed"], playing.start()["p0"]["embed"]
    assert one is not two and one.dtype == np.float32
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"base": "nowhere"}, "base is 'nowhere', which is no directory"),
        ({"policies": {"generator": "p0"}}, "policies: policy map lacks the role 'aggregator'"),
        ({"policies": {"judge": "p0"}}, "policies: policy map names 'judge', which is no role"),
        ({"sampling": {"generator": SamplingSettings()}}, r"sampling is for \['generator'\]; the roles are"),
        ({"max_prompt": 10**6}, "max_prompt is 1000000; max_new_tokens=64 leaves room for 1 to"),
        (
            {"sampling": SamplingSettings(max_new_tokens=4096)},
            "^max_new_tokens is 4096; the model has 4096 positions, for prompt and completion together",
        ),
        (
            {"sampling": SamplingSettings(top_p=0.9)},
            "sampling of role 'generator' has top_k 0, and top_p or top_k leaves out tokens",
        ),
        (
            {"sampling": SamplingSettings(min_new_tokens=4)},
            "sampling of role 'generator' has min_new_tokens 4 and top_k 0: training cannot know",
        ),
        ({"lanes": 0}, "^lanes is 0; it must be a whole number"),
        ({"workflow": "votin"}, "'votin' is no workflow: did you mean 'voting'"),
    ],
)
def test_a_refusal_names_the_argument(base, wrong, told):
    with pytest.raises(ValueError, match=told) as error:
        player_for(**{"workflow": voting, "base": base, **wrong})
    assert "\n" not in str(error.value) and "engine." not in str(error.value)


def test_a_question_alone_is_no_task(base):
    with pytest.raises(TypeError, match=r"a task is '12\+7=\?': give Task\(id"):
        player_for(voting, base, max_prompt=64, lanes=8).play(["12+7=?"])


def test_a_task_that_cannot_be_graded_is_refused_before_it_is_played(base):
    playing = player_for(voting, base, max_prompt=64, lanes=8)
    with pytest.raises(ValueError, match=r"task '.*' cannot be played: field 'gold' is int, not text"):
        playing.play([dataclasses.replace(TASKS[0], gold=19)])


def test_tasks_of_two_families_have_no_common_words(base):
    playing = player_for(voting, base, max_prompt=64, lanes=8)
    mixed = [TASKS[0], dataclasses.replace(TASKS[1], family="code")]
    with pytest.raises(
        ValueError, match=r"tasks are of math and code, .*: play them apart, or give prompts="
    ):
        playing.play(mixed)


def test_the_longest_prompt_is_that_which_was_asked_for(base):
    """Whatever the engine rounds its caches to."""
    task, settings = (
        dataclasses.replace(TASKS[0], question="1+" * 20 + "1=?"),
        SamplingSettings(max_new_tokens=8),
    )
    play = lambda most: player_for(voting, base, max_prompt=most, sampling=settings, lanes=8).play([task])
    longest = max(map(len, play(400).prompt))
    assert max(map(len, play(longest).prompt)) == longest
    with pytest.raises(EpisodesFailed, match="raise max_prompt"):
        play(longest - 1)


def test_a_prompt_that_is_too_long_is_told_in_words_of_the_arguments(base):
    short = player_for(voting, base, max_prompt=1, sampling=SamplingSettings(max_new_tokens=1), lanes=8)
    long = dataclasses.replace(TASKS[0], question="1+" * 400 + "1=?")
    with pytest.raises(EpisodesFailed, match="raise max_prompt"):
        short.play([long])
