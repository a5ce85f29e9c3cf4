"""A tiny base model, shown right and wrong answers alike, solves some micro problems and not most; votes help."""

from collections import Counter

import numpy as np
import pytest
from weak_base import TOKENIZER, fitted, shape, transcripts

from marl_jax.rewards.families import grade, parse
from marl_jax.sampling import generate
from marl_jax.tasks import micro

STEPS, VOTES = 1000, 5
FRAME = "@\n"


@pytest.mark.campaign
@pytest.mark.parametrize(
    "kind, model, width, right",
    [
        ("micro_math", shape(64, 2), 44, 0.6),  # 0.13M parameters
        ("micro_code", shape(96, 3), 64, 0.7),  # 0.43M
    ],
)
def test_a_fresh_base_model_solves_some_and_a_vote_repairs_single_calls(kind, model, width, right):
    params, end = fitted(model, STEPS, transcripts(kind, width, right, FRAME)), TOKENIZER.eos_token_id
    tasks = list(micro.take(kind, "val", 100, levels=(1,)))
    prompts = [TOKENIZER.encode(FRAME.replace("@", task.question)) for task in tasks for _ in range(VOTES)]
    sampled = generate(
        params,
        model,
        prompts,
        max_new_tokens=width - 12,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=1,
        stop_tokens=(end,),
    )
    texts = [TOKENIZER.decode([t for t in completion.tokens if t != end]) for completion in sampled]
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
