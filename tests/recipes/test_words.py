"""The base of the recipes speaks their words, and was never shown a problem that is held out."""

import functools
import itertools
import random
import re

from marl_jax.models import load_hf
from marl_jax.models.tokenizer import build_micro_tokenizer, load_tokenizer
from marl_jax.pretraining.recipe import batches
from marl_jax.pretraining.roles import Skill
from marl_jax.rollouts import Chat
from marl_jax.sampling import generate
from marl_jax.tasks import micro
from marl_jax.workflows import designs
from marl_jax.workflows.parse import boxed, pick
from recipes import words

BASE = "configs/bases/recipes-xs"
READERS = {
    "designer": designs.canonical,
    "scorer": functools.partial(pick, n=3),
    "teller": lambda text: re.search(r"\d", text),
    "listener": boxed,
    "proposer": re.compile(r"\d{1,2}[+-]\d{1,2}").fullmatch,
    "abduction": boxed,
    "induction": boxed,
}


def test_of_prompts_of_each_lesson_most_are_answered_in_a_form_that_can_be_read():
    config, params = load_hf(BASE, dtype="float32")
    chat, rng = Chat(load_tokenizer(BASE, config)), random.Random(0)
    problems = list(itertools.islice(micro.stream("micro_math", "val", levels=(1,)), 8))
    asked = [
        (name, getattr(words, name)(task, rng, Skill())[0]) for name in words.LESSONS for task in problems
    ]
    prompts = [chat.start([{"role": "user", "content": text}]) for _, text in asked]
    options = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 0, "stop_tokens": (chat.end_of_turn,)}
    said = generate(params, config, prompts, max_new_tokens=48, **options)
    texts = {
        name: [chat.decode(one.tokens) for (of, _), one in zip(asked, said) if of == name]
        for name, _ in asked
    }
    for name, some in texts.items():
        assert sum(READERS[name](text) is not None for text in some) >= 6, (name, some)


def test_lessons_are_rows_of_the_base():
    tokenizer, made = build_micro_tokenizer(), words.get_recipe("xs")
    text = "".join(tokenizer.decode(row) for row in next(batches(made, tokenizer)).tokens)
    assert "propose" in text and "score" in text and "```" not in text  # no code: it has no levels of it
    assert made.levels == {"micro_math": (1, 3)}
