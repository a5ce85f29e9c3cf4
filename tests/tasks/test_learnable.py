"""A tiny base model, shown right and wrong answers alike, solves some micro problems and not most; votes help."""

import random
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from marl_jax.models import ModelConfig, forward, init
from marl_jax.models.tokenizer import build_micro_tokenizer
from marl_jax.rewards.families import grade, parse
from marl_jax.sampling import generate
from marl_jax.tasks import micro

TOKENIZER = build_micro_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
STEPS, BATCH, VOTES = 1000, 64, 5


def config(hidden_size, layers):
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


def ids(text):
    return TOKENIZER(text)["input_ids"]


def transcripts(kind, width, right):
    """Batches of unseen training problems, a share `right` of them answered rightly, loss on the answers."""
    stream, rng = micro.stream(kind, "train", levels=(1,)), random.Random(0)
    while True:
        tokens = np.full((BATCH, width), TOKENIZER.pad_token_id, np.int32)
        mask = np.zeros((BATCH, width), np.float32)
        for row, weight, task in zip(tokens, mask, stream):
            good = rng.random() < right
            answer = micro.solution(task) if good else micro.mistake(task, rng.randrange(10**9))
            prompt, answer = ids(task.question + "\n"), [*ids(answer), END]
            both = (prompt + answer)[:width]
            row[: len(both)], weight[len(prompt) : len(both)] = both, 1
        yield tokens, mask


def pretrain(kind, model, width, right):
    params = init(0, model)
    schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, 50, STEPS, 3e-4)
    optimiser = optax.adamw(schedule, b2=0.95, weight_decay=0.01)

    def loss(params, tokens, mask):
        logits = forward(params, model, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.sum(losses * mask[:, 1:]) / jnp.sum(mask[:, 1:])

    @jax.jit
    def step(params, state, tokens, mask):
        updates, state = optimiser.update(jax.grad(loss)(params, tokens, mask), state, params)
        return optax.apply_updates(params, updates), state

    state = optimiser.init(params)
    for _, (tokens, mask) in zip(range(STEPS), transcripts(kind, width, right)):
        params, state = step(params, state, tokens, mask)
    return params


@pytest.mark.campaign
@pytest.mark.parametrize(
    "kind, model, width, right",
    [
        ("micro_math", config(64, 2), 44, 0.6),  # 0.13M parameters
        ("micro_code", config(96, 3), 64, 0.7),  # 0.43M
    ],
)
def test_a_fresh_base_model_solves_some_and_a_vote_repairs_single_calls(kind, model, width, right):
    params = pretrain(kind, model, width, right)
    tasks = list(micro.take(kind, "val", 100, levels=(1,)))
    prompts = [ids(task.question + "\n") for task in tasks for _ in range(VOTES)]
    sampled = generate(
        params,
        model,
        prompts,
        max_new_tokens=width - 12,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=1,
        stop_tokens=(END,),
    )
    texts = [TOKENIZER.decode([t for t in completion.tokens if t != END]) for completion in sampled]
    single, vote, best = [], [], []
    for i, task in enumerate(tasks):
        mine = texts[i * VOTES : (i + 1) * VOTES]
        rewards = {text: grade(task, text) for text in mine}
        answers = Counter(answer for text in mine if (answer := parse(task, text)) is not None)
        winner = next(
            (t for t in mine if answers and parse(task, t) == answers.most_common(1)[0][0]), mine[0]
        )
        single.append(np.mean([rewards[text] for text in mine]))
        vote.append(rewards[winner])
        best.append(max(rewards.values()))
    print(
        f"{kind}: single {np.mean(single):.3f}, vote of {VOTES} {np.mean(vote):.3f}, any {np.mean(best):.3f}"
    )
    assert 0.15 < np.mean(single) < 0.8
    assert np.mean(vote) > np.mean(single) + 0.03
    assert np.mean(best) > np.mean(vote) + 0.03
