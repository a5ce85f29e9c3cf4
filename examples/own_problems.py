"""Problems that a run makes: a proposer writes a sum, a solver tries it four times, and each sum is a group of its own.

python -m examples.own_problems [WORKDIR] [--config.steps=200 ...]
"""

import re

import numpy as np

from marl_jax.commands import cli
from marl_jax.task import Task
from marl_jax.workflows import Call, solver, team, workflow

SUM = re.compile(r"(?<![\w+*-])\d{1,3}(?:[+-]\d{1,3}){1,2}(?![\w+*-])")


def longest_sum(text):
    """The reader of the proposer's text: its longest sum or difference."""
    return max(SUM.findall(text), key=len, default=None)


def problem(written, seed):
    """The proposed Task, its answer computed here; None if there is none, or only the problem that was shown."""
    if written is None or f"{written}=?" == seed.question:
        return None
    value = sum(int(term) for term in re.findall(r"[+-]?\d+", written))
    return Task(f"proposed/{written}", "math", f"{written}=?", gold=str(value))


@workflow(roles={"proposer": team, "solver": solver(slots="tries")}, families=("math",), counts=("tries",))
def propose_and_solve(task, prompts, *, tries=4):
    """A micro base cannot propose problems when asked: it is asked to solve one, and its working contains others."""
    ask = prompts.generator(question=task.question)
    written = yield Call("proposer", ask, read=longest_sum)
    made = problem(written.answer, task)
    if made is None:
        return None
    ask = prompts.generator(question=made.question)
    yield [Call("solver", ask, slot=i, reads=[written], about=made) for i in range(tries)]
    return None  # no answer to `task`, so `reward` is 0: see `solved`


def learnable(graded):
    """A solver earns its own grade; the proposer 4 a (1 - a) for their mean a, and 0 for a text without a problem."""
    return [_earned(one) for one in graded]


def _earned(one):
    tries = [grade for call, grade in zip(one.calls, one.answers) if call.role == "solver"]
    share = sum(tries) / len(tries) if tries else 0.0
    return [
        4 * share * (1 - share) if call.role == "proposer" else grade
        for call, grade in zip(one.calls, one.answers)
    ]


def solved(table):
    """The metric: the share of right tries of each episode."""
    solvers, episodes = table.having(role="solver"), len(table.bare_episodes)
    right = np.bincount(table.episode[solvers], table.grade[solvers], episodes)
    return right / np.maximum(np.bincount(table.episode[solvers], minlength=episodes), 1)


if __name__ == "__main__":
    cli.train(
        "runs/own_problems",
        "--config=configs/micro.py:single-shared-xs-math",
        "--config.workflow.name=__main__:propose_and_solve",
        '--config.policies.map={"proposer": "p0", "solver": "p1"}',
        "--config.rewards.name=__main__:learnable",
        "--config.evaluation.metric=__main__:solved",
        "--config.advantages.group=role,task",
        "--config.cell=own_problems",
        "--config.steps=50",
        "--config.data.problems=8",
    )
