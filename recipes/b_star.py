"""B-STaR (arXiv 2412.17256): rejection learning whose temperature, samples and threshold are chosen by balance.

Claim: with the setting of each round chosen by the balance of exploration and exploitation, a policy that learns from
its own good answers goes on gaining, and keeps more different right answers than under a fixed setting.

A round is a step. Each problem is answered eight times at each of three temperatures. A setting is a temperature, the
first 2, 4 or 8 answers, and a threshold of the score: the grade plus a fifth of the answer's likelihood by the policy.
If it chooses n different texts for a problem, n' of them right, the balance is the mean of min(n' / 4, 1) n' / n.
The texts that the best setting chooses are learned by SFT, each once, at the temperature of their sampling. `fixed`
draws all 24 at one temperature, and learns the right ones among the first eight, each text once.

Departures: the paper chooses the setting on a small part of the problems, before it answers all of them; here the
setting is chosen on the answers that are learned. The likelihood replaces a process reward, 4 replaces 8 in the
balance, and six thresholds a fine grid. There are few right ways to work out a sum, and the base knows mostly one.
"""

import itertools

import numpy as np

from marl_jax.workflows import Call, solver, workflow
from recipes.recipe import Claim, Recipe, micro, over_problems, part

TEMPERATURES = {"cool": 0.7, "warm": 1.0, "hot": 1.3}
COUNTS = (2, 4, 8)
THRESHOLDS = (0.0, 0.1, 0.5, 1.05, 1.1, 1.15)
WANTED = 4  # right answers to a problem that count in the balance; more add nothing


@workflow(roles=dict.fromkeys(TEMPERATURES, solver(slots="tries")), families=("math",), counts=("tries",))
def at_temperatures(task, prompts, *, tries=8, only=""):
    """`tries` answers at each temperature, or only at one."""
    ask = prompts.generator(question=task.question)
    roles = [only] if only else list(TEMPERATURES)
    return (yield [Call(role, ask, slot=i) for role in roles for i in range(tries)])[0]


def scored(graded):
    """The grade plus a fifth of e^(mean log-prob)."""
    return [
        [grade + np.exp(np.mean(call.logprobs)) / 5 for call, grade in zip(one.calls, one.answers)]
        for one in graded
    ]


def balanced(table):
    """Weight 1 for the answers that the setting with the best balance chooses, 0 for all others."""
    best, weight = 0.0, np.zeros(len(table))
    for role, count, above in itertools.product(TEMPERATURES, COUNTS, THRESHOLDS):
        chosen = different(table, table.having(role=role) & (table.slot < count) & (table.reward > above))
        if (value := balance(table, chosen)) > best:
            best, weight = value, chosen.astype(float)
    return {"weight": weight}


def first_right(table):
    """Weight 1 for the right ones among the first eight answers, 0 for all others."""
    return {"weight": different(table, (table.slot < max(COUNTS)) & (table.grade > 0)).astype(float)}


def balance(table, chosen):
    """The mean over problems of min(n' / WANTED, 1) n' / n, for n chosen answers, n' of them right."""
    problems = table.episode.max() + 1
    good = np.bincount(table.episode[chosen & (table.grade > 0)], minlength=problems)
    chosen_count = np.bincount(table.episode[chosen], minlength=problems)
    return float(np.mean(np.minimum(good / WANTED, 1) * good / np.maximum(chosen_count, 1)))


def different(table, chosen):
    """The chosen rows without those that repeat the text of an earlier row of their episode."""
    last_to_first = np.flatnonzero(chosen)[::-1]
    first = {(table.episode[row], table.text[row]): row for row in last_to_first}
    return np.isin(np.arange(len(table)), list(first.values()))


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
    """All answers at one temperature; the right ones among the first eight are learned."""
    return {
        "workflow.settings.only": role,
        "workflow.settings.tries": 24,
        "advantages.rows": "recipes.b_star:first_right",
    }


@over_problems
def pass_at_8(table):
    """Whether any of eight answers is right."""
    return np.bincount(table.episode, table.grade, len(table.bare_episodes)) > 0


@over_problems
def different_right(table):
    """The number of different right texts of an episode, as a share of its answers."""
    episodes = len(table.bare_episodes)
    found = np.bincount(table.episode[different(table, table.grade > 0)], minlength=episodes)
    return found / np.bincount(table.episode, minlength=episodes)


RECIPE = Recipe(
    system="B-STaR, arXiv 2412.17256",
    claim="Rejection learning whose settings are chosen by balance goes on gaining and keeps more different "
    "right answers than under fixed settings.",
    config=config,
    arms={"balance": {}, "fixed": fixed("warm"), "fixed hot": fixed("hot")},
    claims=(
        Claim("accuracy", "balance", "base"),
        Claim("accuracy", "balance", "fixed"),
        Claim("accuracy", "balance", "fixed hot"),
        Claim("pass at 8", "balance", "fixed"),
        Claim("different right", "balance", "fixed"),
    ),
    measures={
        "pass at 8": pass_at_8,
        "different right": different_right,
        "learned a step": part("policy/p0/chosen"),
    },
    examined={"workflow.settings.only": "warm", "workflow.settings.tries": 8},
    hours=0.5,
)
