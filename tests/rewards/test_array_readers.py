"""Picks, verdicts, majorities and strategies that are read in arrays are those of the hosted readers."""

import functools
import random

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_rows import ALPHABET, TOKENIZER, rows, spelled, strings, text_of

from marl_jax.compiled import NoArrayForm, readers
from marl_jax.compiled.alphabet import alphabet_of, tokenise
from marl_jax.models.tokenizer import WORDS
from marl_jax.rewards import arrays
from marl_jax.rewards.arrays import role_readers
from marl_jax.workflows import parse

PIECES = ["\\boxed{", "\\boxed{", "\\boxed", "{", "}", "}", "1", "2", "3", "0", "7", "10", " ", "x", "\n"]
PIECES += ["text "]
PIECES += [
    "\\text",
    "Correct",
    "Incorrect",
    "correct",
    "In",
    "CORRECT",
    "_",
    "\\text{",
    "\\textbf{",
    "a" * 19,
    ".",
]
LINES = [
    "STRATEGY 1: ",
    "STRATEGY 2:",
    "strategy 3 : ",
    "STRATEGY",
    " ",
    "* ",
    "**",
    "# ",
    "> ",
    "- ",
    "12",
    ":",
]
LINES += ["\n", "\n", "columns", "parts", "\t", "return ", "    ", "Strategy 4*: go", "x" * 9]


def soups(pieces, count, longest=12):
    rng = random.Random(1)
    return ["".join(rng.choices(pieces, k=rng.randrange(longest))) for _ in range(count)]


@pytest.mark.long
@pytest.mark.parametrize("n", [3, 9])
def test_picks(n):
    texts = ["\\boxed{2}", "2 or \\boxed{4}", "\\boxed{03}", "\\boxed{12}", "candidate 2", "", "\\boxed{}"]
    texts += soups(PIECES, 1500)
    read = jax.jit(functools.partial(readers.FORMS[parse.pick], n=n))(spelled(texts, 128), None)
    wanted = [int(parse.pick(text, n) or -1) for text in texts]
    assert [(t, int(r), w) for t, r, w in zip(texts, read.choice, wanted) if r != w] == []
    assert read.readable.tolist() == [choice > 0 for choice in wanted]
    assert set(wanted) >= {-1, 1, 2, 3}


def test_a_choice_among_ten_is_refused():
    with pytest.raises(NoArrayForm, match="role 'aggregator' picks among more than 9 answers"):
        readers.form_of(functools.partial(parse.pick, n=10), "aggregator", "math")


@pytest.mark.long
def test_verdicts():
    inside = ["Correct", "In", "correct", "\\text", "\\math", "\\boxed", "bf", "{", "}", " ", "_"]
    texts = soups(PIECES, 1500) + ["\\boxed{" + words + "}" for words in soups(inside, 2000, 5)]
    texts += ["\\boxed{\\text{Correct}}", "\\boxed{\\textCorrect}", "\\boxed{Cor rect.}", "Correct", ""]
    texts += [
        "\\boxed{Correct} \\boxed{",
        "\\boxed{Correct} \\boxed{{{Incorrect}}}",
        "\\boxed{\\boxed{Correct}}",
    ]
    read = jax.jit(readers.FORMS[parse.verdict])(spelled(texts, 128), None)
    wanted = [{"Correct": 1, "Incorrect": 0}.get(parse.verdict(text), -1) for text in texts]
    assert [(t, int(r), w) for t, r, w in zip(texts, read.choice, wanted) if r != w] == []
    assert read.readable.tolist() == [choice >= 0 for choice in wanted]
    assert min(np.bincount(np.array(wanted) + 1)) > 5


@pytest.mark.long
def test_majorities():
    answers = [
        ["5", "7", "7"],
        ["5", "7", None],
        [None] * 3,
        [None, "5", "7"],
        ["5", None, "5"],
        ["7", "5", "5"],
    ]
    texts = ["" if a is None else f"\\boxed{{{a}}}" for row in answers for a in row]
    solved = jax.jit(arrays.read_answers)(spelled(texts))
    with jax.enable_x64(True):
        wide = jax.jit(arrays.read_answers)(spelled(texts))
        chex.assert_trees_all_equal(wide, solved)
        gold = np.full(len(texts), 7)
        right = arrays.grade_integers(spelled(texts), wide, gold, width=8).right
        assert right.tolist() == ["{7}" in text for text in texts]
    best = jax.vmap(role_readers.majority)(solved.key.reshape(6, 3, 2), solved.readable.reshape(6, 3))
    assert best.tolist() == [parse.majority(row) for row in answers] == [1, 0, 0, 1, 0, 1]


def test_strategies():
    texts = [
        "STRATEGY 1: columns\nSTRATEGY 2: parts",
        "STRATEGY 1:a\n" * 4,
        "",
        "12STRATEGY 1: x",
        "STRATEGY",
    ]
    texts += soups(LINES, 1500, longest=16)
    read = jax.jit(functools.partial(readers.plan, limit=3))(spelled(texts, 128), None)
    ways, count = read.parts.reshape(-1, read.parts.shape[2]), read.count
    found = strings(arrays.Text(ways, jnp.sum(ways > 0, axis=1)))
    read = [found[3 * i : 3 * i + size] for i, size in enumerate(np.asarray(count))]
    wanted = [parse.strategies(text, 3) for text in texts]
    assert [(t, r, w) for t, r, w in zip(texts, read, wanted) if r != w] == []
    assert all(
        text == "" for i, size in enumerate(np.asarray(count)) for text in found[3 * i + size : 3 * i + 3]
    )
    assert set(map(len, wanted)) == {0, 1, 2, 3}


def test_texts_become_the_tokens_of_the_tokenizer():
    texts = soups([*WORDS, "a", " ", "  ", "C", "or", "\n", "for", "\\", "box"], 2000)
    text = spelled(texts, 128)
    encode = jax.jit(lambda text: tokenise(ALPHABET, text.chars, text.length, text.chars.shape[1]))
    tokens, lengths = encode(text)
    assert [row[:size].tolist() for row, size in zip(np.asarray(tokens), lengths)] == [
        TOKENIZER.encode(text, add_special_tokens=False) if text else [] for text in texts
    ]


def test_a_word_spelled_by_its_letters_is_encoded_as_the_word():
    letters = [TOKENIZER.convert_tokens_to_ids(char) for char in "Correct"]
    text = text_of(np.array([letters], np.int32), np.array([7]))
    tokens, lengths = tokenise(ALPHABET, text.chars, text.length, 7)
    assert tokens[0, : lengths[0]].tolist() == TOKENIZER("Correct")["input_ids"]


def test_control_tokens_and_ids_beyond_the_tokenizer_spell_nothing():
    tokens, lengths = rows(["\\boxed{85}"])
    tokens[0, lengths[0] : lengths[0] + 2] = TOKENIZER.convert_tokens_to_ids("<|im_end|>"), 150
    assert strings(text_of(tokens, lengths + 2)) == ["\\boxed{85}"]


def test_another_kind_of_tokenizer_is_refused():
    import tokenizers
    import transformers

    merged = tokenizers.Tokenizer(
        tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2, "ba": 3}, [("a", "b"), ("b", "a")])
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=merged)
    with pytest.raises(ValueError, match="needs a tokenizer of single characters"):
        alphabet_of(tokenizer, 4)
