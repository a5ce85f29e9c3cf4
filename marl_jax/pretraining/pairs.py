"""Pairs of adjacent tokens in the training data of a base, and warnings of prompts with other pairs.

    rows of the recipe ──count_pairs──► pairs.json beside the base ──unfamiliar_prompts──► a line per strange template

A micro tokenizer can encode any text, so no prompt is refused; but a base that never saw "Pl" cannot read "Please".
"""

import base64
import itertools
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from marl_jax.models.hf import write_json
from marl_jax.packaged import resolve_path
from marl_jax.pretraining.recipe import Recipe, batches
from marl_jax.table import Table

FILE = "pairs.json"
STEPS = 100  # steps of the recipe whose pairs are counted, some 200,000 tokens
FAR = 0.05  # share of a template's pairs unknown to its base, above which a warning is shown
PROMPTS = 256  # prompts of a template that are checked
EXAMPLES = 5

Pairs = np.ndarray  # Bool[V, V]: whether the second token ever followed the first


def count_pairs(recipe: Recipe, tokenizer: Any) -> Pairs:
    """The pairs in the rows of a recipe's first steps; a pair that only comes later is rare."""
    seen = np.zeros((len(tokenizer), len(tokenizer)), bool)
    for batch in itertools.islice(batches(recipe, tokenizer), min(STEPS, recipe.steps)):
        same_segment = (batch.segments[:, 1:] == batch.segments[:, :-1]) & (batch.segments[:, 1:] > 0)
        seen[batch.tokens[:, :-1][same_segment], batch.tokens[:, 1:][same_segment]] = True
    return seen


def write_pairs(directory: str | os.PathLike[str], seen: Pairs) -> None:
    """Write the pairs into the directory of the base."""
    bits = base64.b64encode(np.packbits(seen).tobytes()).decode()
    write_json(Path(directory) / FILE, {"tokens": len(seen), "pairs": int(seen.sum()), "bits": bits})


def read_pairs(directory: str | os.PathLike[str]) -> Pairs | None:
    """The pairs of a base; None for a base without such a file, such as a published one."""
    path = resolve_path(directory) / FILE
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        bits = np.unpackbits(np.frombuffer(base64.b64decode(record["bits"]), np.uint8))
        return bits[: record["tokens"] ** 2].reshape(record["tokens"], record["tokens"]).astype(bool)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"'{path}' cannot be read as pairs of tokens ({error}): restore it, or remove it"
        ) from None


def unfamiliar_prompts(
    table: Table, seen: Mapping[str, Pairs | None], tokenizer: Any | Mapping[str, Any]
) -> list[str]:
    """A line for each template (a role's first prompt, or its later ones) that is far from the base's training data.

    `seen` is {policy: the pairs of its base, None if unknown}; `tokenizer` is one for all policies, or {policy: one}.
    """
    lines = []
    table, rows_of = table.paths()  # in which the call that a prompt continues is found by its position
    once = np.isin(np.arange(len(table)), np.unique(rows_of, return_index=True)[1])  # each call once
    for role in table.present():
        for later in (False, True):
            rows = np.flatnonzero(once & table.having(role=role) & ((table.after >= 0) == later))
            share, examples = _unseen(table, rows[:PROMPTS].tolist(), seen, tokenizer)
            if share > FAR:
                which = "later prompts" if later else "prompts"
                lines.append(
                    f"the {which} of '{role}' are far from what the base was trained on: {share:.0%} of their pairs of "
                    f"tokens are new to it, such as {', '.join(map(repr, examples))}; a micro base knows those of "
                    "--config.workflow.prompts=micro"
                )
    return lines


def _unseen(
    table: Table, rows: list[int], seen: Mapping[str, Pairs | None], tokenizer: Any | Mapping[str, Any]
) -> tuple[float, list[str]]:
    """The share of unknown pairs in the new part of each prompt, and the most frequent ones of them."""
    unknown: Counter[tuple[int, int, int]] = Counter()
    tokenizers: dict[int, Any] = {}  # by their identity
    count = 0
    for row in rows:
        policy = table.policies[table.policy[row]]
        known = seen.get(policy)
        if known is None:
            continue
        tokens, start = table.prompt[row], 0
        if (after := int(table.after[row])) >= 0:
            before = row - int(table.call[row]) + after
            start = len(table.prompt[before]) + len(table.tokens[before])
        first, second = tokens[start:-1], tokens[start + 1 :]
        strange = ~known[first, second]
        coder = tokenizer[policy] if isinstance(tokenizer, Mapping) else tokenizer
        tokenizers[id(coder)] = coder
        unknown.update(zip(itertools.repeat(id(coder)), first[strange].tolist(), second[strange].tolist()))
        count += len(first)
    examples = [tokenizers[coder].decode(pair) for (coder, *pair), _ in unknown.most_common(EXAMPLES)]
    return (unknown.total() / count if count else 0.0), examples
