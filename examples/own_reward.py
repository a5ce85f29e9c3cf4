"""A reward of one's own: voters earn by their own answers and by being brief, the aggregator by the outcome.

python -m examples.own_reward [WORKDIR] [--config.steps=200 ...]
"""

import sys

from experiments import cli
from marl_jax.runs import train


def brief_voters(graded):
    return [[reward(one, i) for i in range(len(one.episode.calls))] for one in graded]


def reward(one, i):
    call = one.episode.calls[i]
    if call.role == "aggregator":
        return {"outcome": one.outcome}
    return {"own": one.answers[i], "length": -0.002 * len(call.tokens)}  # of this voter's own answer


def main(config, rest):
    train(config, rest[0] if rest else "runs/own_reward")


if __name__ == "__main__":
    sys.argv[1:1] = [
        "--config=configs/micro.py:voting-isolated-s-math",
        "--config.rewards.name=examples.own_reward:brief_voters",
        "--config.cell=brief_voters",
        "--config.steps=50",
        "--config.data.problems=16",
    ]
    cli.run(main)
