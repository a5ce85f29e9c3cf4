"""Text in arrays is what the tokenizer decodes and encodes."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from marl_jax.compiled import NoArrayForm
from marl_jax.compiled.alphabet import alphabet_of, join, spell, tokenise
from marl_jax.models.tokenizer import WORDS, build_micro_tokenizer

TOKENIZER = build_micro_tokenizer()
IDS = 160  # of a model whose last ids no token has
ALPHABET = alphabet_of(TOKENIZER, IDS)
# Beginnings and ends of words, so that they meet and overlap.
SCRAPS = [*WORDS, *(word[:k] for word in WORDS for k in (1, 3, -1)), " ", "  ", "7", "\n", "<", "|im_end|>"]


def soups(count, longest=12):
    rng = random.Random(3)
    return ["".join(rng.choices(SCRAPS, k=rng.randrange(longest))) for _ in range(count)]


def padded(rows, width, dtype):
    table = np.zeros((len(rows), width), dtype)
    for line, row in zip(table, rows):
        line[: len(row)] = row
    return table, np.array([len(row) for row in rows], np.int32)


def test_texts_are_read_as_the_tokenizer_reads_them():
    texts = soups(3000)
    codes = padded([ALPHABET.codes(text) for text in texts], 128, np.uint8)
    tokens, length = jax.jit(lambda *codes: tokenise(ALPHABET, *codes, 128))(*codes)
    wanted = [TOKENIZER.encode(text.replace("<|im_end|>", ""), add_special_tokens=False) for text in texts]
    for text, row, n, ids in zip(texts, np.asarray(tokens), length, wanted):
        if "<|im_end|>" not in text:  # a control word, which `Chat` takes apart
            assert row[:n].tolist() == ids, text
            assert ALPHABET.count(text) == len(ids)


def test_tokens_spell_what_the_tokenizer_decodes():
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, IDS, rng.integers(0, 20)) for _ in range(500)]
    spelled = jax.jit(lambda *tokens: spell(ALPHABET, *tokens, 20 * ALPHABET.longest))
    codes, size = spelled(*padded(rows, 20, np.int32))
    for row, line, n in zip(rows, np.asarray(codes), size):
        assert bytes(line[:n]).decode() == TOKENIZER.decode(row, skip_special_tokens=True)


def test_control_words_of_a_template_are_tokens_and_those_of_a_text_are_spelled():
    text = "<|im_start|>user\n7<|im_end|>"
    tokens, length = tokenise(ALPHABET, ALPHABET.codes(text, control=True)[None], jnp.array([8]), 8)
    assert tokens[0, : length[0]].tolist() == TOKENIZER.encode(text, add_special_tokens=False)
    assert bytes(ALPHABET.codes(text)).decode() == text


def test_pieces_are_joined_end_to_end():
    pieces = [padded(rows, 4, np.int32) for rows in ([[1, 2], []], [[], [3]], [[4, 5, 6, 7], [8]])]
    joined, length = join([*pieces], 10)
    assert joined.tolist() == [[1, 2, 4, 5, 6, 7, 0, 0, 0, 0], [3, 8, 0, 0, 0, 0, 0, 0, 0, 0]]
    assert length.tolist() == [6, 2]


def test_a_tokenizer_that_merges_is_refused():
    bpe = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    )
    with pytest.raises(NoArrayForm, match="hosted road"):
        alphabet_of(bpe, 3)
