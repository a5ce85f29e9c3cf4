"""Log-probs of completions under a stored model, for users' rewards: readability, a prior, a judge by perplexity.

calls ──rows of one length, padded──► forward pass of the stored model ──► mean log-prob of each call's tokens
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marl_jax.episodes import CallRecord
from marl_jax.learning.logprobs import token_logprobs
from marl_jax.learning.network import Qwen3
from marl_jax.models import load_hf
from marl_jax.models.qwen3 import full_precision, hidden_states
from marl_jax.packaged import resolve_path

ROWS, STEP = 16, 64  # shape of a compiled program: rows, and the multiple that its length is padded to


@functools.lru_cache(2)
def _stored(directory: str, dtype: str | None, written: tuple[int, ...]) -> tuple[Any, Any]:
    """The model's configuration and weights. `written`, the files' times, makes a replaced model a new key."""
    return load_hf(directory, dtype=dtype)


def mean_logprobs(directory: str, calls: Sequence[CallRecord], *, dtype: str | None = None) -> list[float]:
    """By call, the mean log-prob of its tokens given its prompt, at temperature 1; 0 for a call without tokens.

    The stored model reads the ids of the policy that answered, so it must have that policy's tokenizer. `dtype`
    ("float32" or "bfloat16") is the type that the model computes in; None: as it is stored.
    """
    weights = sorted(resolve_path(directory).glob("*.safetensors"))
    config, params = _stored(directory, dtype, tuple(path.stat().st_mtime_ns for path in weights))
    values = []
    for first in range(0, len(calls), ROWS):
        batch = calls[first : first + ROWS]
        longest = max(len(call.prompt_tokens) + len(call.tokens) for call in batch)
        if longest > config.max_position_embeddings:
            raise ValueError(
                f"a call of {longest} tokens is longer than '{directory}' can read ({config.max_position_embeddings})"
            )
        tokens = np.zeros((ROWS, -(-longest // STEP) * STEP), np.int32)
        mask = np.zeros(tokens.shape, bool)
        for row, call in enumerate(batch):
            prompt, end = len(call.prompt_tokens), len(call.prompt_tokens) + len(call.tokens)
            tokens[row, :end], mask[row, prompt:end] = (*call.prompt_tokens, *call.tokens), True
        if tokens.max() >= config.vocab_size:
            raise ValueError(
                f"token {tokens.max()} is beyond the vocabulary of '{directory}': another tokenizer?"
            )
        means = np.asarray(_means(params, config, tokens, mask))
        values += means[: len(batch)].tolist()
    return values


@functools.partial(jax.jit, static_argnums=1)
@full_precision
def _means(params: Any, config: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    hidden = hidden_states(params, config, tokens)[:, :-1]
    logp, _ = token_logprobs(hidden, Qwen3(config).head(params, {}), tokens[:, 1:])
    counted = mask[:, 1:]
    return jnp.sum(jnp.where(counted, logp, 0), axis=1) / jnp.maximum(counted.sum(axis=1), 1)
