"""What a base has seen: pairs of tokens, counted by hand on few rows, and which prompts are far from them."""

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest

from marl_jax.config.run_config import load_file
from marl_jax.episodes import CallRecord, Episode, Leaf
from marl_jax.models.tokenizer import build_micro_tokenizer
from marl_jax.pretraining.pairs import count_pairs, read_pairs, unfamiliar_prompts, write_pairs
from marl_jax.pretraining.recipe import Recipe, batches
from marl_jax.pretraining.roles import Skill
from marl_jax.pretraining.transcripts import flows, play
from marl_jax.rollouts import Chat
from marl_jax.table import Table
from marl_jax.task import Task
from marl_jax.tasks import micro
from marl_jax.workflows import load_prompts

BASES = Path(__file__).parents[2] / "configs" / "bases"
SCALES = ("xs", "s", "m")
TOKENIZER = build_micro_tokenizer()
RECIPE = Recipe("xs", steps=3, seed=5)


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_pairs_are_those_inside_the_rows_of_the_recipe():
    by_hand = set()
    for batch in itertools.islice(batches(RECIPE, TOKENIZER), RECIPE.steps):
        for tokens, segments in zip(batch.tokens.tolist(), batch.segments.tolist()):
            for i in range(len(tokens) - 1):
                if segments[i] and segments[i] == segments[i + 1]:
                    by_hand.add((tokens[i], tokens[i + 1]))
    assert {tuple(pair) for pair in np.argwhere(count_pairs(RECIPE, TOKENIZER)).tolist()} == by_hand


def test_they_are_written_beside_the_base_and_read_back(tmp_path):
    seen = count_pairs(RECIPE, TOKENIZER)
    write_pairs(tmp_path, seen)
    np.testing.assert_array_equal(read_pairs(tmp_path), seen)
    assert read_pairs(tmp_path / "published") is None
    (tmp_path / "pairs.json").write_text("{}")
    with pytest.raises(ValueError, match=r"pairs\.json' cannot be read as pairs of tokens"):
        read_pairs(tmp_path)


def table(*prompts, later=()):
    """One episode: prompts of a generator, then prompts that go on from the first."""
    starts = [ids(text) for text in prompts]
    said = ids("zz")
    ends = [starts[0] + said + ids(text) for text in later]
    count = len(starts) + len(ends)
    made = Table.make(
        role=["generator"] * count,
        policy=["p0"] * count,
        prompt=[*starts, *ends],
        tokens=[said] * count,
        logprobs=[[0.0] * len(said)] * count,
        after=[-1] * len(starts) + [0] * len(ends),
        call=list(range(count)),
    )
    return made


def knows(*texts):
    seen = np.zeros((len(TOKENIZER), len(TOKENIZER)), bool)
    for text in texts:
        tokens = ids(text)
        seen[tokens[:-1], tokens[1:]] = True
    return {"p0": seen}


def test_a_template_of_new_pairs_is_told_with_the_most_frequent_ones():
    (line,) = unfamiliar_prompts(table("abab", "abxaxa"), knows("abab"), TOKENIZER)
    # ab ba ab, ab bx xa ax xa: 4 of 8 are new, xa twice.
    assert line.startswith(
        "the prompts of 'generator' are far from what the base was trained on: 50% of their pairs"
    )
    assert "such as 'xa', 'bx', 'ax'" in line and "workflow.prompts=micro" in line


def test_later_prompts_are_judged_by_what_they_add_and_told_apart():
    assert unfamiliar_prompts(table("abab", later=["ab"]), knows("abab"), TOKENIZER) == []
    (line,) = unfamiliar_prompts(table("abab", later=["ac"]), knows("abab"), TOKENIZER)
    assert line.startswith("the later prompts of 'generator'") and "100%" in line


def test_what_a_branch_adds_is_judged_by_the_call_before_its_fork():
    said, start = tuple(ids("zz")), tuple(ids("abab"))

    def call(prompt, **more):
        return CallRecord(
            "generator", "p0", 0, 0, prompt, said, (0.0,) * len(said), "zz", "stop", None, **more
        )

    later = [call((*start, *said, *ids(text)), after=0, path=(way,)) for way, text in enumerate(("ab", "ac"))]
    leaves = tuple(Leaf((way,), None) for way in range(2))
    forked = Episode(Task("t", "math", "?"), 0, "any", (call(start), *later), None, leaves=leaves)
    (line,) = unfamiliar_prompts(Table.of([forked]), knows("abab"), TOKENIZER)
    assert line.startswith("the later prompts of 'generator'") and "50%" in line and "'ac'" in line


def test_a_base_that_does_not_tell_is_not_judged():
    assert unfamiliar_prompts(table("abab"), {"p0": None}, TOKENIZER) == []


@pytest.mark.long
@pytest.mark.parametrize(
    "scale", ["xs", *(pytest.param(other, marks=pytest.mark.campaign) for other in SCALES[1:])]
)
def test_a_committed_base_has_the_pairs_of_its_recipe(scale):
    recipe = load_file(f"configs/micro.py:{scale}", "get_recipe")[0](scale)
    seen = read_pairs(BASES / f"micro-{scale}")
    np.testing.assert_array_equal(seen, count_pairs(recipe, TOKENIZER))
    assert json.loads((BASES / f"micro-{scale}" / "pairs.json").read_text())["pairs"] == seen.sum()


def played(scale, family, size, problems=3):
    """{workflow: table} of scripted episodes on problems that no base was trained on, each prompt of that size."""
    recipe = load_file(f"configs/micro.py:{scale}", "get_recipe")[0](scale)
    kind, chat = f"micro_{family}", Chat(TOKENIZER)
    tasks = list(micro.take(kind, "val", problems, levels=recipe.levels[kind]))
    rng = random.Random(3)
    words = load_prompts(family, size)
    return {
        name: Table.of([play(task, flow, words, chat, rng, Skill()) for task in tasks])
        for name, flow in flows(family).items()
    }


@pytest.mark.parametrize("family", ["math", "code"])
@pytest.mark.parametrize("scale", SCALES)
def test_no_cell_that_a_base_was_trained_for_is_told_and_every_one_in_other_words_is(scale, family):
    seen = read_pairs(BASES / f"micro-{scale}")
    for name, own in played(scale, family, "micro").items():
        assert unfamiliar_prompts(own, dict.fromkeys(own.policies, seen), TOKENIZER) == [], name
    for name, other in played(scale, family, "full", problems=1).items():
        told = unfamiliar_prompts(other, dict.fromkeys(other.policies, seen), TOKENIZER)
        assert {role for role in other.present() if any(f"'{role}'" in line for line in told)} == {
            *other.present()
        }, name


def test_those_of_a_shipped_base_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_pairs("configs/bases/micro-xs") is not None
