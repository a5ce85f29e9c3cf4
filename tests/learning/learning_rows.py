"""Rows, models and plain references that the learner's tests share."""

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marl_jax.learning.losses import policy_loss
from marl_jax.models import qwen3
from marl_jax.models.model_config import ModelConfig
from marl_jax.table import Table

TINY = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a table, as tests write it down."""

    policy: str
    role: str
    task: Hashable
    slot: int
    turn: int
    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    reward: float = 0.0
    advantage: float = 0.0
    truncated: bool = False
    readable: bool = True
    temperature: float = 1.0
    kept: Any = None


def as_table(rows):
    columns = {field.name: [getattr(row, field.name) for row in rows] for field in dataclasses.fields(Row)}
    return Table.make(**columns)


def make_row(rng, prompt, length, *, role="generator", policy="p0", advantage=None, **names):
    tokens = tuple(int(t) for t in rng.integers(1, TINY.vocab_size, length))
    logprobs = tuple(float(x) for x in rng.normal(-3.4, 0.3, length))
    advantage = float(rng.normal()) if advantage is None else advantage
    names = {"task": 0, "slot": 0, "turn": 0} | names
    return Row(
        policy, role, prompt=tuple(prompt), tokens=tokens, logprobs=logprobs, advantage=advantage, **names
    )


def make_rows(
    rng, *, prompts=2, samples=2, role="generator", policy="p0", prompt=(8, 9), lengths=(5, 9), slots=1
):
    """`samples` rows per prompt and slot; the slots of a role share their prompt. Ranges are half open."""
    rows = []
    for task in range(prompts):
        tokens = rng.integers(1, TINY.vocab_size, rng.integers(*prompt)).tolist()
        for slot in range(slots):
            for _ in range(samples):
                length = int(rng.integers(*lengths))
                rows.append(make_row(rng, tokens, length, role=role, policy=policy, task=task, slot=slot))
    return rows


def rectangle(rows):
    """Rows one per line, padded on the right: (tokens, where completions start, their mask, sampler log-probs)."""
    tokens = [[*row.prompt, *row.tokens] for row in rows]
    width = max(len(row.tokens) for row in rows)
    pad = lambda lists, size: np.array([list(x) + [0] * (size - len(x)) for x in lists])
    start = np.array([[len(row.prompt) - 1] for row in rows])
    mask = np.arange(width) < np.array([[len(row.tokens)] for row in rows])
    return pad(tokens, max(map(len, tokens))), start, mask, pad([row.logprobs for row in rows], width)


def _log_probs(params, tokens, start, width, temperature, config):
    log_p = jax.nn.log_softmax(qwen3.forward(params, config, tokens[:, :-1]) / temperature[:, None, None])
    where = jnp.minimum(start + jnp.arange(width), log_p.shape[1] - 1)
    log_p = jnp.take_along_axis(log_p, where[..., None], axis=1)
    targets = jnp.take_along_axis(tokens[:, 1:], where, axis=1)
    return jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0], -jnp.sum(
        jnp.exp(log_p) * log_p, -1
    )


def log_probs(params, rows, config=TINY):
    """Log-probs [rows, T] from the whole logits of `forward`: no packing, sharing or chunks."""
    tokens, start, mask, _ = rectangle(rows)
    return _log_probs(params, jnp.asarray(tokens), start, mask.shape[1], temperatures(rows), config)[0]


def temperatures(rows):
    return np.array([row.temperature for row in rows], np.float32)


@functools.partial(jax.jit, static_argnames=("options", "on_policy", "merge"))
def _plain(params, tokens, start, mask, sampler, temperature, advantages, weights, options, on_policy, merge):
    def loss(params):
        logp, entropy = _log_probs(merge(params), tokens, start, mask.shape[1], temperature, TINY)
        old = jax.lax.stop_gradient(logp) if on_policy else sampler
        return policy_loss(logp, old, advantages, mask, entropy=entropy, **dict(options))

    def value(params):
        found = loss(params)
        return found.numerator / found.denominator

    # Weights pick rows: the numerator is linear in advantages, and the denominator counts all rows.
    advantages = advantages * weights
    return jax.value_and_grad(value)(params)


def plain_loss(params, rows, *, weights=None, on_policy=False, merge=lambda params: params, **options):
    """(loss, gradient) of rows in one padded rectangle, with none of the learner's machinery.

    `weights` are factors on the rows' advantages; `merge` makes model parameters of what is differentiated.
    """
    tokens, start, mask, sampler = rectangle(rows)
    advantages = np.array([row.advantage for row in rows])
    weights = np.ones(len(rows)) if weights is None else np.asarray(weights, float)
    options = tuple(sorted(options.items()))
    given = (tokens, start, mask, sampler, temperatures(rows), advantages, weights)
    return _plain(params, *given, options, on_policy, merge)
