"""The bases of the recipes speak their words."""

import collections
import functools
import itertools
import json
import random
import re
from pathlib import Path

import pytest

from marl_jax import fields
from marl_jax.models import load_hf
from marl_jax.models.tokenizer import build_micro_tokenizer, load_tokenizer
from marl_jax.pretraining.recipe import Recipe, batches
from marl_jax.pretraining.roles import Skill
from marl_jax.rewards.fences import extract_program
from marl_jax.rewards.math.boxed import extract_boxed
from marl_jax.rollouts import Chat
from marl_jax.sampling import generate
from marl_jax.tasks import micro
from marl_jax.workflows import designs
from marl_jax.workflows.parse import pick
from recipes import words

READERS = {
    "designer": designs.canonical,
    "scorer": functools.partial(pick, n=3),
    "teller": lambda text: re.search(r"\d", text),
    "listener": extract_boxed,
    "proposer": re.compile(r"\d{1,2}[+-]\d{1,2}").fullmatch,
    "abduction": extract_boxed,
    "induction": extract_boxed,
    "hopper": re.compile(r"\d{1,2}([+-]\d{1,2}){1,2}").fullmatch,
    "injector": extract_program,
    "mender": extract_program,
    "chooser": functools.partial(pick, n=words.END),
    "bidder": functools.partial(pick, n=9),
}
BASES = {
    words.BASE: (words.get_recipe("xs"), words.LESSONS),
    words.MORE_BASE: (words.get_recipe("more-xs"), words.MORE),
}


@pytest.mark.long
@pytest.mark.parametrize("base", BASES)
def test_of_prompts_of_each_lesson_most_are_answered_in_a_form_that_can_be_read(base):
    config, params = load_hf(base, dtype="float32")
    chat, rng = Chat(load_tokenizer(base, config)), random.Random(0)
    problems = {
        kind: list(itertools.islice(micro.stream(kind, "val", levels=(1,)), 8))
        for kind in ("micro_math", "micro_code")
    }
    asked = []
    for name in BASES[base][1]:
        kind = "micro_code" if name in ("injector", "mender") else "micro_math"
        asked += [(name, getattr(words, name)(task, rng, Skill())[0]) for task in problems[kind]]
    prompts = [chat.start([{"role": "user", "content": text}]) for _, text in asked]
    options = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 0, "stop_tokens": (chat.end_of_turn,)}
    said = generate(params, config, prompts, max_new_tokens=48, **options)
    readable = collections.Counter(
        name for (name, _), one in zip(asked, said) if READERS[name](chat.decode(one.tokens)) is not None
    )
    assert all(readable[name] >= 6 for name in BASES[base][1]), readable


@pytest.mark.parametrize("base", BASES)
def test_a_base_was_made_by_the_recipe_of_these_words(base):
    about = json.loads((Path(base) / "recipe.json").read_text())
    assert fields.with_defaults(Recipe, about["recipe"]) == json.loads(
        json.dumps(fields.to_json(BASES[base][0]))
    )


def test_lessons_are_rows_of_the_base():
    tokenizer, made, more = build_micro_tokenizer(), words.get_recipe("xs"), words.get_recipe("more-xs")
    text, other = (
        "".join(tokenizer.decode(row) for row in next(batches(one, tokenizer)).tokens) for one in (made, more)
    )
    assert "propose" in text and "score" in text and "```" not in text  # no code: it has no levels of it
    assert made.levels == {"micro_math": (1, 3)} and more.levels == {
        "micro_math": (1, 3),
        "micro_code": (1, 2),
    }
    assert "mend" in other and "next" in other and "score" not in other
