"""A GRPO loop of one's own: play, grade, compare, learn; each line is a function of the library.

python -m examples.own_loop [BASE]; examples/own_loop.ipynb has the same, cell by cell.
"""

import sys

from marl_jax import learning, policies
from marl_jax.rewards import grade, outcome, with_rewards
from marl_jax.rollouts import player_for
from marl_jax.tasks import micro
from marl_jax.workflows import voting


def train(base="configs/bases/micro-xs", steps=24, problems=16, samples=16, rate=3e-4):
    player = player_for(voting, base, policies=policies.isolated(voting.roles))
    optimiser = learning.OptimiserConfig(schedule=learning.ScheduleConfig(rate))
    config = learning.LearnerConfig(optimiser=optimiser)
    learner = learning.Learner(learning.Qwen3(player.model), config, player.policies)
    trees, stream = player.start(), micro.take("micro_math", "train", steps * problems, levels=(1,))
    states = learner.init(trees)
    for step in range(steps):
        tasks = [next(stream) for _ in range(problems)]
        table = player.play(tasks, samples=samples, step=step)  # a row for each call
        table = with_rewards(grade(table), outcome)
        table, _ = learning.with_advantages(table, learning.AdvantageConfig())
        trees, states, report = learner.step(trees, states, table, step=step)
        player.update(trees)
        right = sum(episode.outcome for episode in table.bare_episodes) / len(table.bare_episodes)
        print(f"step {step + 1}: {right:.1%} right, gradient norm {report.policies['p0']['grad_norm']:.2f}")
    return trees


if __name__ == "__main__":
    train(*sys.argv[1:2])
