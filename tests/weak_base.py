"""Small base models that half know how: they are fitted to right and wrong answers of micro problems alike."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax

from marl_jax.models import ModelConfig, forward, init
from marl_jax.models.tokenizer import END, build_micro_tokenizer
from marl_jax.tasks import micro

TOKENIZER = build_micro_tokenizer()
BATCH = 64


def shape(hidden_size, layers):
    return ModelConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        rope_theta=1e4,
    )


def transcripts(kind, width, right, frame):
    """Batches of training problems in place of @, a share `right` of them answered rightly: tokens, loss mask."""
    stream, rng = micro.stream(kind, "train", levels=(1,)), random.Random(0)
    while True:
        tokens, mask = np.zeros((BATCH, width), np.int32), np.zeros((BATCH, width), np.float32)
        for row, weight, task in zip(tokens, mask, stream):
            good = rng.random() < right
            answer = micro.solution(task) if good else micro.mistake(task, rng.randrange(10**9))
            prompt = TOKENIZER.encode(frame.replace("@", task.question))
            both = (prompt + TOKENIZER.encode(answer + END))[:width]
            row[: len(both)], weight[len(prompt) : len(both)] = both, 1
        yield tokens, mask


def fitted(config, steps, batches):
    schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, 50, steps, 3e-4)
    optimiser = optax.adamw(schedule, b2=0.95, weight_decay=0.01)

    def loss(params, tokens, mask):
        logits = forward(params, config, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.sum(losses * mask[:, 1:]) / jnp.sum(mask[:, 1:])

    @jax.jit
    def step(params, state, tokens, mask):
        updates, state = optimiser.update(jax.grad(loss)(params, tokens, mask), state, params)
        return optax.apply_updates(params, updates), state

    params = init(0, config)
    state = optimiser.init(params)
    for _, batch in zip(range(steps), batches):
        params, state = step(params, state, *batch)
    return params
