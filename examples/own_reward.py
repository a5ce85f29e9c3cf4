"""A reward of one's own: voters earn by their own answers and by being brief, the aggregator by the outcome.

python -m examples.own_reward [WORKDIR] [--config.steps=200 ...]
"""

from marl_jax.commands import cli


def brief_voters(graded):
    return [[reward(one, i) for i in range(len(one.episode.calls))] for one in graded]


def reward(one, i):
    call = one.episode.calls[i]
    if call.role == "aggregator":
        return {"outcome": one.outcome}
    return {"own": one.answers[i], "length": -0.002 * len(call.tokens)}  # of this voter's own answer


if __name__ == "__main__":
    cli.train(
        "runs/own_reward",
        "--config=configs/micro.py:voting-isolated-s-math",
        "--config.rewards.name=__main__:brief_voters",
        "--config.cell=brief_voters",
        "--config.steps=50",
        "--config.data.problems=16",
    )
