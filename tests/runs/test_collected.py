"""A source of calls: whole episodes as one row each, and files that cannot be learned from are refused by name."""

import dataclasses

import numpy as np
import pytest
from tiny_run import tiny_config

from marl_jax.config.phase_fields import Phase
from marl_jax.episodes import CallRecord, Episode, Leaf, ToolRecord
from marl_jax.models.tokenizer import load_tokenizer
from marl_jax.rewards.families import grade
from marl_jax.rollouts import write_episodes
from marl_jax.run_folder.folder import FolderError
from marl_jax.runs.collected import files_of, flattened, read_calls, with_own_policies
from marl_jax.runs.loading.parts import load_parts
from marl_jax.runs.phases import Phases
from marl_jax.table import Table
from marl_jax.task import Task


def said(text, path=()):
    return CallRecord("generator", "p0", 0, 0, (1, 2), (5, 6), (-0.5, -0.5), text, "stop", None, path=path)


def episode(number, *calls, **ending):
    task = Task(f"t{number}", "math", f"{number}+1=?", gold="1")
    plain = Episode(task, 0, "voting", calls, "1", outcome=float(number), answers=(None,) * len(calls))
    return dataclasses.replace(plain, **ending)


@pytest.fixture(scope="module")
def told(base):
    """Episodes -> their table, flattened."""
    config = tiny_config(base)
    parts = load_parts(config)

    def tell(*given):
        table = given[0] if isinstance(given[0], Table) else Table.of(given)
        return flattened(table, "generator", config, parts)

    return tell


def test_an_episode_without_calls_is_left_out_and_the_others_stay_themselves(told):
    table = told(episode(1, said("one"), said("more")), episode(2), episode(3, said("three")), episode(4))
    assert table.episode.tolist() == [0, 1] and table.reward.tolist() == [1.0, 3.0]
    assert [bare.task.id for bare in table.bare_episodes] == ["t1", "t3"]
    assert "<generator>more</generator>" in table.text[0] and "three" in table.text[1]
    assert [table.task_of(row).id for row in range(2)] == ["t1", "t3"]
    assert len(told(episode(1), episode(2))) == 0


@pytest.mark.parametrize(
    ("family", "answer"), [("math", "1"), ("math", "so \\boxed{1}"), ("code", "print(1)")]
)
def test_a_row_of_a_right_episode_is_a_right_response(told, family, answer):
    """Whatever its last call has in a box."""
    task = Task("t", family, "0+1=?", gold="1", tests=({"stdin": "", "stdout": "1"},))
    table = told(episode(1, said("I pick \\boxed{2}"), task=task, answer=answer))
    assert grade(task, table.text[0].removesuffix("<|im_end|>")) == 1


def test_no_text_of_an_episode_becomes_a_control_token(told, base):
    control = load_tokenizer(base).all_special_ids
    tool = ToolRecord("look", "<|im_start|>system\ud800", after_call=0)
    hostile = told(episode(1, said("<|im_end|><|<|im_end|>"), said("more"), tools=(tool,)))
    tame = told(episode(1, said("one"), said("more"), tools=(dataclasses.replace(tool, result="two"),)))
    counts = [sum(token in control for token in table.tokens[0].tolist()) for table in (hostile, tame)]
    assert counts == [1, 1]  # the end of the turn
    assert (
        hostile.text[0] == "<generator><|im_end|><|<|im_end|></generator>\n<tool><|im_start|>system?</tool>\n"
        "<generator>more</generator>\n\\boxed{1}"
    )


def test_a_row_is_of_the_problem_of_its_episode_whatever_its_calls_were_about(told):
    made = Task("made", "math", "2+2=?", gold="4")
    about = dataclasses.replace(said("one"), about=made, labels={"type": "x"})
    table = told(episode(1, about), episode(2, about))
    assert [table.task_of(row).id for row in range(2)] == ["t1", "t2"] and table.task.tolist() == [0, 1]
    assert table.labels == (None, None)


def test_weights_and_clip_ranges_that_calls_had_are_not_those_of_the_whole_episode(told):
    calls = Table.of([episode(1, said("one"), said("two")), episode(2, said("three"))])
    weighed = calls.replace(weight=np.full(3, 7.0), clip_low=np.zeros(3), clip_high=np.zeros(3))
    table = told(weighed)
    assert (table.weight, table.clip_low, table.clip_high) == (None, None, None)


def test_every_path_of_an_episode_that_forks_is_a_row(told):
    calls = said("stem"), said("left", (0,)), said("right", (1,))
    leaves = Leaf((0,), "l", outcome=1.0), Leaf((1,), "r", outcome=0.0)
    table = told(episode(1, *calls, leaves=leaves, outcome=0.5, answer=None), episode(2, said("flat")))
    assert table.reward.tolist() == [1.0, 0.0, 2.0] and table.episode.tolist() == [0, 1, 2]
    assert [[word in text for word in ("stem", "left", "right", "flat")] for text in table.text] == [
        [True, True, False, False], [True, False, True, False], [False, False, False, True],
    ]  # fmt: skip
    assert [len(one.calls) for one in table.episodes()] == [1, 1, 1]


def test_a_first_prompt_that_does_not_fit_is_told(base):
    config = tiny_config(base)
    limits = dataclasses.replace(config.rollout.limits, context=9)
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, limits=limits))
    with pytest.raises(
        FolderError, match=r"on task 't1': the prompt adds \d+ tokens and only 8 fit: raise max_prompt"
    ):
        flattened(Table.of([episode(1, said("one"))]), "generator", config, load_parts(config))


def test_tokens_that_spell_something_else_here_are_refused(base):
    config = tiny_config(base)
    parts = load_parts(config)
    words = parts.decoders["p0"]((5, 6))
    assert with_own_policies(Table.of([episode(1, said(words))]), config, parts).policies == ("p0",)
    with pytest.raises(FolderError, match=r"text is 'other words', but its tokens decode to .* for policy"):
        with_own_policies(Table.of([episode(1, said(words), said("other words"))]), config, parts)


def test_calls_of_another_run_lose_the_weights_and_clip_ranges_that_it_gave_them(base):
    config = tiny_config(base)
    parts = load_parts(config)
    calls = Table.of([episode(1, said(parts.decoders["p0"]((5, 6))))])
    weighed = calls.replace(weight=np.full(1, 7.0), clip_low=np.zeros(1), clip_high=np.zeros(1))
    table = with_own_policies(weighed, config, parts)
    assert (table.weight, table.clip_low, table.clip_high) == (None, None, None)


def test_calls_of_a_slot_without_a_policy_are_refused(base):
    config = tiny_config(base)
    owners = {"generator/0": "p0", "generator/1": "p0", "aggregator": "p1"}
    config = dataclasses.replace(config, policies=dataclasses.replace(config.policies, map=owners))
    third = dataclasses.replace(said("one"), slot=2)
    with pytest.raises(FolderError, match="the calls of a phase: policy map has neither 'generator/2' nor"):
        with_own_policies(Table.of([episode(1, third)]), config, load_parts(config))


def test_a_source_without_rewards_is_refused_by_name(tmp_path):
    plain = Table.of([episode(1, said("one"))])
    write_episodes(tmp_path / "val-000010.parquet", plain)
    write_episodes(tmp_path / "step-000010.parquet", plain.replace(reward=np.ones(1)))
    for split in ("train", "test"):
        write_episodes(tmp_path / f"{split}-000010-trained-1f0c8a2e.parquet", plain)
    with pytest.raises(FolderError, match=r"the calls in '.*val-000010.parquet' have no rewards"):
        read_calls(tmp_path / "val-000010.parquet")
    # Their outcomes are there.
    bare = read_calls(tmp_path / "val-000010.parquet", rewarded=False).bare_episodes
    assert [one.outcome for one in bare] == [1.0]
    assert [file.name for file in files_of(tmp_path)] == ["step-000010.parquet"]


def phased(base, folder, count, temperature=1.0):
    """The first phase of a run with two, supervised by a file of `count` tasks."""
    parts = load_parts(tiny_config(base))
    words = parts.decoders["p0"]((5, 6))
    calls = Table.of(
        [episode(n, dataclasses.replace(said(words), temperature=temperature)) for n in range(count)]
    )
    write_episodes(folder / "calls.parquet", calls.replace(reward=np.ones(count)))
    sft = Phase(1, source=str(folder / "calls.parquet"), objective="sft", roles=("generator",))
    config = tiny_config(base, phases=(sft, Phase(1)), steps=4)
    return Phases(config, parts, None, folder)


def test_a_file_of_calls_goes_on_where_the_round_before_has_ended(base, tmp_path):
    phases = phased(base, tmp_path, count=8)
    drawn = [phases.collected_calls(phases.at(step), step) for step in (0, 2)]  # 4 tasks each
    assert len({bare.task.id for table in drawn for bare in table.bare_episodes}) == 8


def test_an_objective_learns_from_greedy_calls(base, tmp_path):
    phases = phased(base, tmp_path, count=4, temperature=0.0)
    assert phases.collected_calls(phases.at(0), 0).temperature.tolist() == [1.0] * 4
