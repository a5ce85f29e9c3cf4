"""A run makes the steps it was asked for, leaves what its folder promises, and refuses what it cannot train on."""

import contextlib
import dataclasses
import functools
import html
import io
import json
import shutil
import sys
import threading
import types
from types import SimpleNamespace

import numpy as np
import pytest
from run_kit import quiet, records, run, same
from tiny_run import letters, tiny_config

from marl_jax import fields
from marl_jax.config.run_config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    WorkflowConfig,
    load_config,
)
from marl_jax.errors import RunError
from marl_jax.learning import AdvantageConfig
from marl_jax.models.tokenizer import build_micro_tokenizer
from marl_jax.own import OwnError, digest_own
from marl_jax.pretraining.pairs import write_pairs
from marl_jax.rewards.credit import CreditConfig
from marl_jax.rewards.warn import ungraded
from marl_jax.rollouts import EpisodesFailed, read_episodes
from marl_jax.run_folder.checkpoints import restore, steps
from marl_jax.run_folder.folder import FolderError
from marl_jax.runs import loop
from marl_jax.runs.loading import roads
from marl_jax.runs.loading.parts import PartsError, load_parts, model_configs
from marl_jax.sampling import engine
from marl_jax.study.report.html_page import write_report
from marl_jax.tasks import DataError, Task
from marl_jax.terminal.live import Live
from marl_jax.workflows import Call, judge, solver, workflow


def test_a_run_leaves_what_its_folder_promises(whole):
    metrics, evaluations = records(whole)
    assert [line["step"] for line in metrics] == list(range(1, 9))
    assert [line["step"] for line in evaluations] == [0, 4, 8]
    assert {"split": "val", "problems": 4, "samples": 1}.items() <= evaluations[0].items()
    assert evaluations[0]["difference"] is None and evaluations[-1]["difference"] is not None
    first = metrics[0]
    assert first["episodes"] == 16 and first["calls"] == 48 and first["failed"] == 0
    assert {"reward/generator", "own/generator", "role/generator/entropy", "policy/p0/grad_norm"} <= set(
        first
    )
    assert first["role/generator/gap_max"] < 1e-4
    assert first["cosine/generator/aggregator"] is None  # separate weights
    assert len(steps(whole / "checkpoints")) >= 2
    assert json.loads((whole / "config.json").read_text())["settled"]["engine"]["widths"]
    written = {path.name for path in (whole / "episodes").iterdir()}
    assert written == {
        *(f"step-{step:06d}.parquet" for step in (1, 4, 8)),  # the first, every fourth, the last
        *(f"val-{line['step']:06d}.parquet" for line in evaluations),
    }


def test_episodes_are_kept_with_what_every_call_earned(whole):
    table = read_episodes(whole / "episodes" / "step-000004.parquet")
    assert (
        len(table.bare_episodes) == 4 and len({head.task.id for head in table.bare_episodes}) == 1
    )  # of one problem
    assert list(table.components) == ["user"] and table.trains.all()
    np.testing.assert_array_equal(table.reward, table.components["user"])
    np.testing.assert_allclose(
        table.reward, [share for calls in letters(table.episodes()) for share in calls]
    )
    for role in table.roles:  # compared with those of their role
        own = table.reward[table.having(role=role)]
        baseline = (own - own.mean()) / (own.std(ddof=1) + 1e-6)
        np.testing.assert_allclose(table.advantage[table.having(role=role)], baseline, atol=1e-4)


def test_training_raises_what_it_is_paid_for(whole):
    rewards = [line["reward/generator"] for line in records(whole)[0]]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.05


def test_an_update_reaches_the_sampler_of_every_policy(whole):
    for episode in read_episodes(whole / "episodes" / "step-000008.parquet").episodes():
        assert {(call.policy, call.version) for call in episode.calls} == {("p0", 7), ("p1", 7)}


def test_what_could_not_be_graded_before_a_run_is_not_counted_as_its_own(base, tmp_path, monkeypatch):
    inner = loop.open_runs

    def opened(*args):
        ungraded("of a road that is timed")
        return inner(*args)

    monkeypatch.setattr(loop, "open_runs", opened)
    ungraded("of something before")
    assert run(base, tmp_path / "run", steps=1) == 1
    evaluations = (tmp_path / "run" / "eval.jsonl").read_text()
    assert '"step": 0' in evaluations and "ungraded" not in evaluations


def test_a_run_within_another_is_refused_and_leaves_nothing(base, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    for inner in (tmp_path / "run" / "more", tmp_path / "run" / "more" / "again"):
        with pytest.raises(FolderError, match=r"--workdir=.* lies in the run '.*run': choose another"):
            loop.train(tiny_config(base), inner, live=quiet())
    assert not (tmp_path / "run" / "more").exists()


@pytest.mark.long
def test_another_seed_is_another_run_and_the_same_seed_the_same(base, whole, tmp_path):
    run(base, tmp_path / "same")
    same(tmp_path / "same", whole)
    run(base, tmp_path / "other", seed=1)
    assert records(tmp_path / "other")[0] != records(whole)[0]


def test_shapes_that_were_measured_are_not_measured_again(base, tmp_path, monkeypatch):
    measured = []

    def measure(params, adapters, config, settings, *rest):
        measured.append(settings)
        return settings

    monkeypatch.setattr(engine, "stable_shapes", measure)
    for _ in range(2):
        assert run(base, tmp_path / "run", steps=1) == 1
    assert len(measured) == 2  # an engine for each of two policies, at the first start
    assert json.loads((tmp_path / "run" / "config.json").read_text())["settled"]["measured"]


@pytest.mark.long
@pytest.mark.parametrize("what, value", [("data.seed", "1"), ("workflow.settings", '{"votes": 3}')])
def test_an_evaluation_is_compared_with_one_of_the_same_problems_noise_and_calls_alone(
    base, tmp_path, what, value
):
    run(base, tmp_path / "run", steps=1)
    changed, _ = fields.change(tiny_config(base, steps=2), [(what, value)])
    assert loop.train(changed, tmp_path / "run", live=quiet(2), accept_changes=True) == 2
    lines = records(tmp_path / "run")[1]
    assert [(line["step"], line["difference"] is None) for line in lines] == [
        (0, True),
        (1, False),
        (2, True),
    ]


def test_a_batch_larger_than_the_data_is_refused(base, tmp_path):
    config = tiny_config(base, steps=1)
    larger = dataclasses.replace(config, data=dataclasses.replace(config.data, problems=40))
    with pytest.raises(DataError, match=r"data\.problems is 40 and the train split has 16"):
        loop.train(larger, tmp_path / "run", live=quiet(1))


def sums(split):
    """A data set of one's own; two problems of val are learned from."""
    asked = {"train": range(16), "val": (20, 3, 21, 4)}[split]
    return [Task(f"{split}/{i}", "math", f"{i}+1=?", gold=str(i + 1)) for i in asked]


def unanswered(split):
    return [dataclasses.replace(task, question=None if i == 2 else "?") for i, task in enumerate(sums(split))]


def own_data(base, function, **changes):
    return tiny_config(base, data=DataConfig("math", f"test_loop:{function.__name__}", problems=4), **changes)


def test_a_broken_task_of_ones_own_is_told_before_anything_is_compiled(base, tmp_path):
    with pytest.raises(
        DataError,
        match=r"'test_loop:unanswered', train: 1 of its 16 .* task 2 \(id 'train/2'\): field 'question'",
    ):
        loop.train(own_data(base, unanswered), tmp_path / "run", live=quiet())
    assert not (tmp_path / "run" / "config.json").exists()


def unanswerable(split):
    return [dataclasses.replace(task, gold="") for task in sums(split)]


def test_only_a_reward_of_ones_own_does_without_answers(base, tmp_path):
    config = own_data(base, unanswerable, steps=1)
    assert loop.train(config, tmp_path / "own", live=quiet(1)) == 1
    with pytest.raises(DataError, match=r"train: 16 of its 16 .* field 'gold' is empty"):
        loop.train(dataclasses.replace(config, rewards=CreditConfig()), tmp_path / "run", live=quiet(1))


def test_problems_of_val_that_are_learned_from_are_told(base, tmp_path):
    said = io.StringIO()
    with contextlib.closing(Live(0, ("generator", "aggregator"), said)) as live:
        loop.train(own_data(base, sums, steps=0), tmp_path / "run", live=live)
    assert (
        "'test_loop:sums': 2 of the 4 problems of val have a question that is in train, too"
        in said.getvalue()
    )
    assert "(the first is 'val/3')" in said.getvalue()


def test_a_val_split_that_leaves_too_few_problems_is_what_to_lower(base, tmp_path):
    row = json.dumps({"family": "math", "question": "1+1=?", "answer": "2"})
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join([row] * 30))
    data = DataConfig(
        "math", "jsonl", str(tmp_path / "data"), str(tmp_path / "cache"), problems=8, val_size=20
    )
    with pytest.raises(DataError, match=r"the train split has 7: .*, or --config\.data\.val_size \(20\)"):
        loop.train(tiny_config(base, data=data), tmp_path / "run", live=quiet(1))


def test_a_run_that_is_past_the_last_step_asked_for_says_so_and_ends(base, whole, tmp_path):
    copy, said = shutil.copytree(whole, tmp_path / "run"), io.StringIO()
    live = Live(5, ("generator", "aggregator"), said)
    assert loop.train(tiny_config(base, steps=5), copy, accept_changes=True, live=live) == 8
    assert "the run is already past its last step, 5: no step is made" in said.getvalue()
    same(copy, whole)


@workflow(
    roles={"generator": solver(slots="drafts"), "aggregator": judge},
    families=("math",),
    groups={"study": ("task", "slot", "role")},
)
def drafted(task, prompts, *, drafts=2):
    ask = prompts.generator(question=task.question)
    made = yield [Call("generator", ask, slot=slot) for slot in range(drafts)]
    yield Call("aggregator", prompts.aggregator(question=task.question, candidates=made), reads=made)
    return made[0]


def test_what_a_workflow_of_ones_own_declares_of_its_roles_and_groups_is_used(base, tmp_path):
    """Its roles are graded by their kinds, and calls compared by the preset `study`: slot by slot."""
    config = tiny_config(
        base,
        steps=1,
        workflow=WorkflowConfig(f"{__name__}:drafted", prompts="micro"),
        rewards=CreditConfig("own_correctness"),
        advantages=AdvantageConfig.study(),
    )
    loop.train(config, tmp_path / "run", live=quiet(1))
    (line,), evaluations = records(tmp_path / "run")
    assert line["groups/generator/groups"] == 4 * 2 and line["groups/aggregator/groups"] == 4
    kinds = {role: found["kind"] for role, found in evaluations[0]["roles"].items()}
    assert kinds == {"generator": "solver", "aggregator": "judge"}
    table = read_episodes(tmp_path / "run" / "episodes" / "step-000001.parquet")
    assert [call.kind for call in table.episodes()[0].calls] == ["solver", "solver", "judge"]


@workflow(roles=("generator", "aggregator"), families=("math",))
def failing(task, prompts):
    yield Call("generator", prompts.generator(question=task.question))
    raise ValueError("no such word")


@workflow(roles=("generator", "aggregator"), families=("math",))
def mute(task, prompts):
    yield Call("generator", prompts.generator(question=task.question))


@workflow(roles=("generator", "aggregator"), families=("math",))
def silent(task, prompts):
    return "1"
    yield


@workflow(roles=("generator", "aggregator"), families=("math",))
def misspelt(task, prompts):
    yield Call("generator", prompts.generater(question=task.question))


def own_workflow(base, flow, **changes):
    """Two steps of a workflow, graded, without evaluations."""
    return tiny_config(
        base,
        steps=2,
        workflow=WorkflowConfig(f"{__name__}:{flow.name}", prompts="micro"),
        rewards=CreditConfig(),
        checkpoints=CheckpointConfig(best=False),
        **{"evaluation": EvaluationConfig(every=0), **changes},
    )


@pytest.mark.parametrize("every", [0, 1])
def test_a_run_ends_with_the_first_traceback_where_every_episode_failed(base, tmp_path, every):
    config = own_workflow(base, failing, evaluation=EvaluationConfig(every=every, problems=4))
    with pytest.raises(EpisodesFailed) as error:
        loop.train(config, tmp_path / "run", live=quiet(2))
    told = str(error.value)
    assert told.startswith(f"workflow 'failing': all {4 if every else 16} episodes ended in an error")
    assert "Traceback (most recent call last):" in told and told.endswith("ValueError: no such word")
    assert records(tmp_path / "run") == ([], [])


def test_a_workflow_that_returns_nothing_ends_the_run_unless_a_reward_of_ones_own_does_without(
    base, tmp_path
):
    with pytest.raises(EpisodesFailed, match="workflow 'mute' returned nothing in all 16 episodes"):
        loop.train(own_workflow(base, mute), tmp_path / "run", live=quiet(2))
    own = dataclasses.replace(own_workflow(base, mute), rewards=CreditConfig("tiny_run:letters"))
    assert loop.train(own, tmp_path / "own", live=quiet(2)) == 2


def test_a_workflow_without_calls_is_told_that_it_learns_nothing(base, tmp_path):
    loop.train(own_workflow(base, silent), tmp_path / "run", live=quiet(2))
    assert [line["warnings"] for line in records(tmp_path / "run")[0]] == [
        ["no call was made, so there was nothing to learn"]
    ] * 2


def test_a_workflow_that_cannot_begin_is_told_before_anything_is_compiled(base, tmp_path, monkeypatch):
    monkeypatch.setattr(roads, "make_service", lambda *_, **__: pytest.fail("an engine was built"))
    with pytest.raises(EpisodesFailed, match=r"on all 16 problems(.|\n)*no prompt file for role 'generater'"):
        loop.train(own_workflow(base, misspelt), tmp_path / "run", live=quiet(2))


def test_prompts_that_are_all_too_long_are_told_before_anything_is_compiled(base, tmp_path, monkeypatch):
    monkeypatch.setattr(roads, "make_service", lambda *_, **__: pytest.fail("an engine was built"))
    config = own_workflow(base, drafted)
    short = dataclasses.replace(config, engine=dataclasses.replace(config.engine, max_prompt=4))
    with pytest.raises(
        PartsError, match=r"engine\.max_prompt is 4, and the shortest prompt of 16 problems has \d\d tokens"
    ):
        loop.train(short, tmp_path / "run", live=quiet())


def test_a_phase_copies_no_adapter_to_another_base():
    """Over other weights it is another model, though its arrays fit."""
    changes = [
        ("policies.bases", '{"p1": "configs/bases/recipes-xs"}'),
        ("phases", '[{"steps": 5, "copies": {"p1": "p0"}}]'),
    ]
    load = functools.partial(load_config, "configs/micro.py:voting-isolated-xs-math")
    with pytest.raises(PartsError, match="copies 'p0' to 'p1', which has its adapter on another base"):
        model_configs(load([*changes, ("policies.train", "lora")]))
    assert model_configs(load(changes)).keys() == {"p0", "p1"}  # whole weights bring all that they are


def test_failures_below_the_threshold_of_the_configuration_are_told_once(base, tmp_path):
    config = own_workflow(base, failing)
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, max_failed=None))
    said = io.StringIO()
    assert loop.train(config, tmp_path / "run", live=Live(2, config.roles, said)) == 2
    told = [line for line in said.getvalue().splitlines() if "every episode" in line]
    assert len(told) == 1
    assert told[0].startswith("step 1: every episode ended in an error, the first: ValueError: no such word")


def raising(graded):
    return [None.worth for _ in graded]


def test_a_reward_that_raises_is_one_line_with_the_place(base, tmp_path):
    config = tiny_config(base, steps=1, rewards=CreditConfig(f"{__name__}:raising"))
    line = raising.__code__.co_firstlineno + 1
    with pytest.raises(OwnError) as error:
        loop.train(config, tmp_path / "run", live=quiet(1))
    assert str(error.value) == (
        f"credit '{__name__}:raising' raised AttributeError: 'NoneType' object has no attribute 'worth' "
        f"(in <listcomp>, line {line})"
        if sys.version_info < (3, 12)
        else f"credit '{__name__}:raising' raised AttributeError: 'NoneType' object has no attribute 'worth' "
        f"(in raising, line {line})"
    )


def test_evaluations_that_are_lost_are_told_when_a_run_goes_on(base, whole, tmp_path):
    copy, said = shutil.copytree(whole, tmp_path / "run"), io.StringIO()
    lines = (copy / "eval.jsonl").read_text().splitlines(keepends=True)
    (copy / "eval.jsonl").write_text(lines[1] + lines[2][:40])
    assert loop.train(tiny_config(base), copy, live=Live(8, ("generator", "aggregator"), said)) == 8
    assert (
        "eval.jsonl was damaged: it lacks the evaluation of step 0, 8, and without step 0" in said.getvalue()
    )


def test_prompts_far_from_what_the_base_was_trained_on_are_told_in_the_first_step(base, tmp_path):
    strange, tokens = shutil.copytree(base, tmp_path / "base"), len(build_micro_tokenizer())
    write_pairs(strange, np.zeros((tokens, tokens), bool))
    run(strange, tmp_path / "run", steps=2)
    first, second = records(tmp_path / "run")[0]
    told = [text for text in first["warnings"] if "far from what the base was trained on: 100%" in text]
    assert len(told) == 2 and "'generator'" in told[0] and "'aggregator'" in told[1]  # once per template
    assert "warnings" not in second


def calls_of_all(table):
    """A metric: the share of an episode's calls that are cut off."""
    return np.bincount(table.episode, table.truncated, len(table.bare_episodes)) / 3


def test_a_metric_of_ones_own_is_the_accuracy_decides_best_and_is_named(base, tmp_path):
    config = own_data(base, unanswerable, steps=2)
    config = dataclasses.replace(
        config, evaluation=EvaluationConfig(every=1, problems=4, metric=f"{__name__}:calls_of_all")
    )
    loop.train(config, tmp_path / "run", live=quiet(2))
    lines = records(tmp_path / "run")[1]
    assert [line["metric"] for line in lines] == [f"{__name__}:calls_of_all"] * 3
    for line in lines:
        assert line["accuracy"] == pytest.approx(np.mean(line["per_problem"])) and 0 < line["accuracy"] <= 1
        assert {round(3 * value, 9) for value in line["per_problem"]} <= {0.0, 1.0, 2.0, 3.0}
    best = max(lines, key=lambda line: (line["accuracy"], -line["step"]))
    _, data = restore(tmp_path / "run" / "checkpoints", "latest", {})
    assert data["best"] == {"step": best["step"], "accuracy": best["accuracy"]}
    digests = json.loads((tmp_path / "run" / "config.json").read_text())["digests"]
    assert "code of metric" in digests
    page = html.unescape(write_report(tmp_path / "run").read_text())
    named = f"Accuracy here is the mean of '{__name__}:calls_of_all' over the episodes."
    assert page.index(named) < page.index("<figure")  # among the first words


@pytest.mark.parametrize("file", [None, "<stdin>"])
def test_code_that_is_in_no_file_as_of_a_notebook_is_refused_in_one_line(monkeypatch, file):
    notebook = types.ModuleType("notebook")
    if file:
        notebook.__file__, notebook.__loader__ = file, object()
    monkeypatch.setitem(sys.modules, "notebook", notebook)
    with pytest.raises(
        OwnError, match=r"'notebook:mine' has no source file that can be read.*such as mine:function$"
    ):
        digest_own("notebook:mine")


def test_a_changed_configuration_is_refused_by_field_unless_accepted(base, whole):
    changed = tiny_config(base, steps=9, seed=5)
    with pytest.raises(FolderError) as error:
        loop.train(changed, whole, live=quiet())
    assert "config.steps: 8 -> 9" in str(error.value) and "config.seed: 0 -> 5" in str(error.value)
    assert "--accept_changes" in str(error.value)


def test_frozen_roles_are_served_and_never_move(base, tmp_path):
    config = tiny_config(base, steps=2)
    policies = dataclasses.replace(config.policies, frozen_roles=("aggregator",))
    loop.train(dataclasses.replace(config, policies=policies), tmp_path / "run", live=quiet())
    line = records(tmp_path / "run")[0][-1]
    assert "policy/p0/updates" in line and "policy/p1/updates" not in line
    assert not any(name.startswith("role/aggregator") for name in line)


@pytest.mark.long
def test_adapters_alone_are_saved_under_lora(base, tmp_path):
    config = tiny_config(base, steps=2)
    policies = dataclasses.replace(config.policies, train="lora", lora_rank=2, lora_alpha=4.0)
    config = dataclasses.replace(config, policies=policies)
    loop.train(config, tmp_path / "run", live=quiet())
    lines = records(tmp_path / "run")[0]
    assert lines[-1]["role/generator/gap_max"] < 1e-4 and lines[-1]["policy/p0/updates"] == 2
    parts = load_parts(config)
    templates = {"policies": {name: parts.start(0)[name] for name in parts.trained}}
    trees, _ = restore(tmp_path / "run" / "checkpoints", "latest", templates)
    assert all("a" in leaf and "b" in leaf for tree in trees["policies"].values() for leaf in tree.values())


def test_a_kl_anchor_is_to_each_policys_own_start(base, tmp_path):
    config = tiny_config(base, steps=2)
    anchored = dataclasses.replace(config.learner.interventions, kl_coef={"generator": 0.1})
    learner = dataclasses.replace(config.learner, interventions=anchored)
    loop.train(dataclasses.replace(config, learner=learner), tmp_path / "run", live=quiet())
    first, second = (line["role/generator/kl"] for line in records(tmp_path / "run")[0])
    assert first < 1e-8 < second  # at the first step it is where it began


def test_dynamic_sampling_draws_again(base, tmp_path):
    config = tiny_config(base, steps=1)
    rollout, paid = dataclasses.replace(config.rollout, draws=3), CreditConfig(name="test_alarms:nothing")
    config = dataclasses.replace(config, rollout=rollout, rewards=paid)  # every group is flat in every draw
    loop.train(config, tmp_path / "run", live=quiet())
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert [line[f"draws/{name}"] for name in ("draws", "problems", "flat", "rescued")] == [3, 4, 4, 0]
    assert line["time/tokens_per_second"] == pytest.approx(line["draws/tokens"] / line["time/step"])
    assert line["draws/tokens"] > 2 * line["tokens"]


credited = threading.Event()


def noted_credit(graded):
    credited.set()
    return [1.0] * len(graded)


def test_credit_of_ones_own_is_called_while_other_problems_are_sampled(base, tmp_path):
    class Watch(Live):
        """Lets no rollout end before the first credit was asked for."""

        def rollout(self, progress):
            if 4 <= progress.done < progress.episodes:  # one problem at a time, so that one is complete
                seen.append(credited.wait(60))
            super().rollout(progress)

    seen = []
    config = tiny_config(base, steps=1, rewards=CreditConfig(f"{__name__}:noted_credit"))
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, ahead=1))
    live = Watch(1, ("generator", "aggregator"), io.StringIO())
    assert loop.train(config, tmp_path / "run", live=live) == 1
    assert seen and all(seen)
    assert records(tmp_path / "run")[0][0]["reward/generator"] == 1.0


@pytest.mark.parametrize("config", [None, {"steps": 3}, "configs/micro.py:single-shared-xs-math"])
def test_what_is_no_configuration_is_refused(config, tmp_path):
    with pytest.raises(TypeError, match="give a RunConfig, as load_config"):
        loop.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_weights_that_differ_between_processes_are_not_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(loop.hosts, "count", lambda: 2)
    monkeypatch.setattr(loop.hosts, "from_all", lambda make: [make(), make() + 1])
    kept = SimpleNamespace(directory=tmp_path, save=lambda *_: pytest.fail("saved"))
    state = SimpleNamespace(step=3, trees={"p0": np.ones(2)}, learner={})
    with pytest.raises(
        RunError, match="step 3: process 1's weights differ from process 0's, so nothing is saved"
    ):
        loop.save(SimpleNamespace(checkpoints=kept), state)
