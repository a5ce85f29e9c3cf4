"""Text in arrays, for tokenizers of single characters and whole words: `decode` and `encode` as array programs.

    tokens [B, M] --spell--> codes [B, S] --join with other pieces--> codes [B, N] --tokenise--> tokens [B, P]

A code below 128 is an ASCII character, from 128 on a control token of the chat template; 0 is padding. A text in a
prompt may get other tokens than were sampled ("C", "o", .. "t" becomes the word "Correct"), also across the seam;
so prompts are joined as codes and tokenised as a whole, as on the host. This is not possible for byte-pair tokenizers.
"""

import dataclasses
import functools
import json
import operator
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marl_jax.compiled.refusal import NoArrayForm
from marl_jax.models.scatter import UNIQUE, distinct

CONTROL = 128  # the code of the first control token


@dataclasses.dataclass(frozen=True, eq=False)
class Alphabet:
    """The text of each token of one tokenizer, and the tables to find tokens in a text."""

    spelled: np.ndarray  # uint8 [V, C] the codes of every token as `decode` writes it, padded with 0
    ids: np.ndarray  # int32 [256] the token of every single code, -1 if there is none
    words: tuple[tuple[bytes, int], ...]  # whole words and their tokens, the longest first
    control: dict[str, int]  # control word -> its code
    unknown: int  # the code of the unknown token, for characters without a token

    @property
    def longest(self) -> int:
        """Characters of the longest token."""
        return self.spelled.shape[1]

    def codes(self, text: str, control: bool = False) -> np.ndarray:
        """The codes of a Python string, uint8 [n]; with `control`, control words in it become control tokens."""
        known = set(map(chr, np.flatnonzero(self.ids[:CONTROL] >= 0).tolist()))
        words = "|".join(re.escape(word) for word in self.control)
        parts = re.split(f"({words})", text) if control else [text]
        codes: list[int] = []
        for part in parts:
            if control and part in self.control:
                codes.append(self.control[part])
            else:
                codes += [ord(char) if char in known else self.unknown for char in part]
        return np.array(codes, np.uint8)

    def text(self, tokens: np.ndarray) -> str:
        """The text of tokens as `decode` writes it, on the host."""
        codes = self.spelled[tokens]
        return codes[codes > 0].tobytes().decode("ascii")

    def count(self, text: str) -> int:
        """The number of tokens of a Python string; control words count as one token."""
        words = [*self.control, *(word.decode() for word, _ in self.words)]
        return len(re.findall("|".join(map(re.escape, words)) + r"|[\s\S]", text))


def alphabet_of(tokenizer: Any, vocabulary: int) -> Alphabet:
    """The alphabet of a tokenizer of characters and words, for the `vocabulary` ids of a model; others are refused."""
    inner = json.loads(tokenizer.backend_tokenizer.to_str())
    added = inner["added_tokens"]
    checks = {
        "its model is not WordLevel": inner["model"]["type"] == "WordLevel",
        "it normalises text": inner["normalizer"] is None,
        "it does not split into characters": (inner["pre_tokenizer"] or {}).get("pattern")
        == {"Regex": r"[\s\S]"},
        "some words do not match everywhere": not any(
            token[flag] for token in added for flag in ("single_word", "lstrip", "rstrip", "normalized")
        ),
    }
    characters = {text: i for text, i in inner["model"]["vocab"].items() if len(text) == 1}
    words = {token["content"]: token["id"] for token in added if not token["special"]}
    is_ascii = all(text.isascii() for text in (*characters, *words))
    checks["it is not ASCII"] = is_ascii and "\0" not in characters
    if failed := [check for check, passed in checks.items() if not passed]:
        raise NoArrayForm(
            f"the tokenizer {tokenizer.name_or_path!r} may merge texts where they meet ({failed[0]}); the "
            "compiled road needs a tokenizer of single characters and whole words"
        )
    special = {token["content"]: token["id"] for token in added if token["special"]}
    control = {word: CONTROL + k for k, word in enumerate(special)}
    ids = np.full(256, -1, np.int32)
    for text, token in characters.items():
        ids[ord(text)] = token
    for word, code in control.items():
        ids[code] = special[word]
    texts = [
        tokenizer.decode([i], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for i in range(vocabulary)
    ]
    spelled = np.zeros((vocabulary, max(map(len, texts))), np.uint8)
    for row, text in zip(spelled, texts):
        row[: len(text)] = list(text.encode())
    longest_first = sorted(words.items(), key=lambda word: -len(word[0]))
    words_first = tuple((text.encode(), i) for text, i in longest_first)
    return Alphabet(spelled, ids, words_first, control, control[inner["model"]["unk_token"]])


def spell(
    alphabet: Alphabet, tokens: jax.Array, length: jax.Array, width: int
) -> tuple[jax.Array, jax.Array]:
    """tokens [B, M] of lengths [B] -> their codes [B, width], padded with 0, and the number of codes [B]."""
    sizes = jnp.asarray((alphabet.spelled > 0).sum(axis=1), jnp.int32)[tokens]
    sizes = jnp.where(jnp.arange(tokens.shape[1]) < length[:, None], sizes, 0)
    start = jnp.cumsum(sizes, axis=1) - sizes
    size = sizes.sum(axis=1)
    rows = jnp.arange(len(tokens))[:, None]
    # The token of a column is found by counting the tokens that begin up to it; empty ones are left out.
    begins = jnp.zeros((len(tokens), width), jnp.int32)
    begins = begins.at[rows, distinct(jnp.where(sizes > 0, start, width), width)].set(1, **UNIQUE)
    order = jnp.argsort(sizes == 0, axis=1, stable=True)  # tokens that are not empty come first
    ordered, begin = (jnp.take_along_axis(x, order, axis=1) for x in (tokens, start))
    which = jnp.maximum(jnp.cumsum(begins, axis=1) - 1, 0)
    column = jnp.arange(width) - jnp.take_along_axis(begin, which, axis=1)
    token = jnp.take_along_axis(ordered, which, axis=1)
    codes = jnp.asarray(alphabet.spelled)[token, jnp.clip(column, 0, alphabet.longest - 1)]
    return jnp.where(jnp.arange(width) < size[:, None], codes, 0), size


def join(pieces: list[tuple[jax.Array, jax.Array]], width: int) -> tuple[jax.Array, jax.Array]:
    """Concatenate pieces (values [B, n], length [B]) row by row -> [B, width], padded with 0, and the lengths [B]."""
    total = sum((length for _, length in pieces), jnp.zeros((), jnp.int32))
    columns = jnp.arange(width)
    source = jnp.zeros((len(total), width), jnp.int32)
    start, offset = jnp.zeros_like(total), 0
    for values, length in pieces:
        inside = columns >= start[:, None]
        source = jnp.where(inside, offset + columns - start[:, None], source)
        start, offset = start + length, offset + values.shape[1]
    together = jnp.concatenate([values for values, _ in pieces], axis=1)
    joined = jnp.take_along_axis(together, jnp.minimum(source, offset - 1), axis=1)
    return jnp.where(columns < total[:, None], joined, 0), total


def tokenise(
    alphabet: Alphabet, codes: jax.Array, size: jax.Array, width: int
) -> tuple[jax.Array, jax.Array]:
    """codes [B, N] of sizes [B] -> tokens [B, width], padded with 0, and their number [B].

    From the left: the longest word that matches, else one character. Tokens beyond `width` are dropped but counted.
    """
    rows, count = codes.shape
    reach = max((len(word) for word, _ in alphabet.words), default=1)
    padded = jnp.pad(codes, ((0, 0), (0, reach)))
    longest_last = alphabet.words[::-1]  # a later match replaces an earlier one, so the longest word wins
    table = jnp.array([list(word.ljust(reach, b"\0")) for word, _ in longest_last], jnp.uint8)
    table, ids = table.reshape(-1, reach), jnp.array([number for _, number in longest_last], jnp.int32)

    def find(best: tuple[jax.Array, jax.Array], word: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        spelled, number = word
        same = [(padded[:, k : k + count] == spelled[k]) | (spelled[k] == 0) for k in range(reach)]
        matches = functools.reduce(operator.and_, same)
        new = number, jnp.sum(spelled > 0, dtype=jnp.int32)
        return jax.tree.map(lambda old, value: jnp.where(matches, value, old), best, new), None

    single = jnp.asarray(alphabet.ids)[codes], jnp.ones((rows, count), jnp.int32)
    (token, jump), _ = jax.lax.scan(find, single, (table, ids))

    def read(left: jax.Array, jump: jax.Array) -> tuple[jax.Array, jax.Array]:
        begins = left == 0
        return jnp.where(begins, jump, left) - 1, begins

    _, begins = jax.lax.scan(read, jnp.zeros_like(jump[:, 0]), jump.T)
    begins = begins.T & (jnp.arange(count) < size[:, None])
    place = distinct(jnp.where(begins, jnp.cumsum(begins, axis=1) - 1, width), width)
    tokens = jnp.zeros((rows, width), jnp.int32)
    tokens = tokens.at[jnp.arange(rows)[:, None], place].set(token, **UNIQUE)
    return tokens, begins.sum(axis=1, dtype=jnp.int32)
