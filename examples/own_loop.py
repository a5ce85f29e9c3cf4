"""A GRPO loop of one's own: sample, grade, compare, learn; each line is a function of the library.

python -m examples.own_loop [BASE]
"""

import sys

from marl_jax import learning, models, rewards, sampling
from marl_jax.models.tokenizer import load_tokenizer
from marl_jax.rollouts import Chat
from marl_jax.table import Table
from marl_jax.tasks import micro
from marl_jax.workflows import load_prompts


def train(base="configs/bases/micro-xs", steps=5, problems=16, samples=8):
    config, params = models.load_hf(base, dtype="float32")
    chat, words = Chat(load_tokenizer(base, config)), load_prompts("math", "micro")
    learner = learning.Learner(learning.Qwen3(config), learning.LearnerConfig(), {"generator": "p0"})
    policies, problem_stream = {"p0": params}, micro.stream("micro_math", "train", levels=(1,))
    states = learner.init(policies)
    for step in range(steps):
        tasks = [task for task in (next(problem_stream) for _ in range(problems)) for _ in range(samples)]
        prompts = [chat.start(words.generator(question=task.question)) for task in tasks]
        limits = {"max_new_tokens": 64, "temperature": 1.0, "stop_tokens": (chat.end_of_turn,)}
        answers = sampling.generate(policies["p0"], config, prompts, seed=step, **limits)
        table = Table.make(
            role=["generator"] * len(tasks),
            policy=["p0"] * len(tasks),
            prompt=prompts,
            tokens=[answer.tokens for answer in answers],
            logprobs=[answer.logprobs for answer in answers],
            task=[task.id for task in tasks],
            reward=[rewards.grade_math(chat.decode(a.tokens), task.gold) for a, task in zip(answers, tasks)],
        )
        table, _ = learning.with_advantages(table, learning.AdvantageConfig())
        policies, states, report = learner.step(policies, states, table, step=step)
        print(f"step {step + 1}: {table.reward.mean():.1%} right, loss {report.policies['p0']['loss']:+.3f}")
    return policies["p0"]


if __name__ == "__main__":
    train(*sys.argv[1:2])
