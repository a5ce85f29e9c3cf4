"""Texts as rows of tokens, read in arrays, and the same texts read on the hosted road."""

import functools

import jax
import numpy as np

from marl_jax.compiled.alphabet import alphabet_of, spell
from marl_jax.models import load_hf
from marl_jax.models.tokenizer import build_micro_tokenizer, load_tokenizer
from marl_jax.rewards import arrays
from marl_jax.rewards.math import grade_math
from marl_jax.rollouts import Chat
from marl_jax.sampling import generate
from marl_jax.tasks import micro

TOKENIZER = build_micro_tokenizer()
ALPHABET = alphabet_of(TOKENIZER, len(TOKENIZER) + 64)  # a model may have more ids than its tokenizer


def rows(texts, width=None):
    """Token ids [B, T] and lengths [B], padded with a token that would spell something."""
    ids = [TOKENIZER(text)["input_ids"] for text in texts]
    width = width or (64 if max(map(len, ids)) <= 64 else 128)
    tokens = np.full((len(texts), width), TOKENIZER("7")["input_ids"][0], np.int32)
    for row, those in zip(tokens, ids):
        row[: len(those)] = those
    return tokens, np.array(list(map(len, ids)), np.int32)


def text_of(tokens, lengths):
    """The `Text` of rows of tokens; under jit, too."""
    return arrays.Text(*spell(ALPHABET, tokens, lengths, tokens.shape[1] * ALPHABET.longest))


def spelled(texts, width=None):
    return SPELL(*rows(texts, width))


def strings(text):
    """The rows of a `Text` on the host."""
    return [bytes(row[:size]).decode() for row, size in zip(np.asarray(text.chars), np.asarray(text.length))]


SPELL = jax.jit(text_of)
READ = jax.jit(arrays.read_answers)


@functools.partial(jax.jit, static_argnames="width")
def GRADE(tokens, lengths, gold, width):
    text = text_of(tokens, lengths)
    return arrays.grade_integers(text, arrays.read_answers(text), gold, width=width)


def graded(responses, golds, block=1024, width=None):
    """(right, beyond) of responses, in blocks of one shape."""
    tokens, lengths = rows(responses, width)
    golds, size = np.asarray(golds, np.int32), len(responses)
    right, beyond = np.zeros(size, bool), np.zeros(size, bool)
    for start in range(0, size, block):
        at = np.minimum(np.arange(start, start + block), size - 1)
        verdict = GRADE(tokens[at], lengths[at], golds[at], tokens.shape[1])
        right[at], beyond[at] = verdict.right, verdict.beyond  # the last row may come several times
    return right, beyond


def by_text(responses, golds):
    return np.array([grade_math(response, str(gold)) == 1 for response, gold in zip(responses, golds)])


def said_by_a_base(family, times, count):
    """(texts, tasks) that many times: what micro-xs says to tasks of a family, sampled hot."""
    config, params = load_hf("configs/bases/micro-xs")
    tokenizer = load_tokenizer("configs/bases/micro-xs", config)
    tasks = list(micro.take(family, "train", count, levels=(1, 2, 3, 4, 5)))
    prompts = [Chat(tokenizer).start([{"role": "user", "content": task.question}]) for task in tasks]
    for seed in range(times):
        said = generate(
            params,
            config,
            prompts,
            max_new_tokens=64,
            temperature=1.0 + seed % 3 / 4,
            top_p=1.0,
            top_k=0,
            seed=seed,
            stop_tokens=[tokenizer.eos_token_id],
        )
        yield [tokenizer.decode(each.tokens, skip_special_tokens=True) for each in said], tasks
