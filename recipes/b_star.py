"""B-STaR (arXiv 2412.17256): rejection learning whose temperature, samples and threshold are chosen by balance.

Claim: with the setting of each round chosen by the balance of exploration and exploitation, a policy that learns from
its own good answers goes on gaining, and keeps more different answers than under a fixed setting.

A round is a step. Each problem is answered eight times at each of three temperatures. A score is the grade and a fifth
of how likely the policy found its answer (in place of the paper's process reward). Of a setting (temperature, the first
so many answers, a score to be above) that chooses n answers to a problem, n' different right ones among them, the
balance is min(n' / 4, 1) n' / n, mean over the problems of the step. What the best setting chooses is learned by heart,
at the temperature that it was sampled at. `fixed` draws all 24 at one temperature and learns what is right.
"""

import itertools

import numpy as np

from marl_jax.workflows import Call, solver, workflow
from recipes.recipe import Claim, Recipe, micro, over_problems

TEMPERATURES = {"cool": 0.7, "warm": 1.0, "hot": 1.3}
COUNTS = (2, 4, 8)
THRESHOLDS = (0.0, 0.1, 0.5, 1.05, 1.1, 1.15)
WANTED = 4  # right answers to a problem, beyond which more are worth no more


@workflow(roles=dict.fromkeys(TEMPERATURES, solver(slots="tries")), families=("math",), counts=("tries",))
def at_temperatures(task, prompts, *, tries=8, only=""):
    """So many answers at each temperature, or at one alone."""
    ask = prompts.generator(question=task.question)
    roles = [only] if only else list(TEMPERATURES)
    return (yield [Call(role, ask, slot=i) for role in roles for i in range(tries)])[0]


def scored(graded):
    """The grade, and a fifth of e^(mean log-prob)."""
    return [
        [grade + np.exp(np.mean(call.logprobs)) / 5 for call, grade in zip(one.calls, one.answers)]
        for one in graded
    ]


def balanced(table):
    """Weight 1 for what is chosen by the setting with the best balance, 0 for all else."""
    best, weight = 0.0, np.zeros(len(table))
    for role, count, above in itertools.product(TEMPERATURES, COUNTS, THRESHOLDS):
        chosen = table.having(role=role) & (table.slot < count) & (table.reward > above)
        if (value := balance(table, chosen)) > best:
            best, weight = value, chosen.astype(float)
    return {"weight": weight}


def balance(table, chosen):
    """The mean over problems of min(n' / WANTED, 1) n' / n, for n chosen answers with n' different right ones."""
    right = {(table.task[row], table.text[row]) for row in np.flatnonzero(chosen & (table.grade > 0))}
    problems = table.task.max() + 1
    good = np.bincount(np.array([task for task, _ in right], int), minlength=problems)
    of = np.bincount(table.task[chosen], minlength=problems)
    return float(np.mean(np.minimum(good / WANTED, 1) * good / np.maximum(of, 1)))


def config():
    """Eight answers at each of three temperatures."""
    return micro(
        "recipes.b_star:at_temperatures",
        dict.fromkeys(TEMPERATURES, "p0"),
        samples=1,
        role_sampling={role: {"temperature": value} for role, value in TEMPERATURES.items()},
        rewards__name="recipes.b_star:scored",
        learner__loss__kind="sft",
        advantages__rows="recipes.b_star:balanced",
    )


def fixed(role):
    """All answers at one temperature; what is right is learned."""
    return {
        "workflow.settings.only": role,
        "workflow.settings.tries": 24,
        "advantages.rows": None,
        "learner.preference.by": "grade",
        "learner.preference.above": 0.5,
    }


@over_problems
def pass_at_8(table):
    """Whether any of eight answers is right."""
    return np.bincount(table.episode, table.grade, len(table.bare_episodes)) > 0


@over_problems
def different(table):
    """The share of an episode's answers that none before them has given."""
    return [len({call.answer for call in one.calls}) / len(one.calls) for one in table.episodes()]


RECIPE = Recipe(
    system="B-STaR, arXiv 2412.17256",
    claim="Rejection learning whose settings are chosen by balance goes on gaining and keeps more different answers "
    "than under fixed settings.",
    config=config,
    arms={"balance": {}, "fixed": fixed("warm"), "fixed hot": fixed("hot")},
    claims=(
        Claim("accuracy", "balance", "base"),
        Claim("accuracy", "balance", "fixed"),
        Claim("accuracy", "balance", "fixed hot"),
        Claim("pass at 8", "balance", "fixed"),
        Claim("different", "balance", "fixed"),
    ),
    measures={"pass at 8": pass_at_8, "different": different},
    examined={"workflow.settings.only": "warm", "workflow.settings.tries": 8},
    hours=0.5,
)
