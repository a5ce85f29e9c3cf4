"""SEVerA (arXiv 2603.25111, only its abstract): calls under a contract, with retries, and a fallback that keeps it.

Claim: with retries and a fallback no answer ever breaks the contract, whatever training does to the model.

The contract: the answer can be read as an integer of at most four digits. A call that breaks it is made again, at most
twice; then the answer is 0, which is no call and trains nothing. Rejected calls are rows like all others: they earn -1
in `contract`, the episode's reward in `rejected as accepted`, as if they had been accepted, and have weight 0 in
`rejected left out`.
"""

import re

import numpy as np

from marl_jax.rewards import extract_boxed
from marl_jax.workflows import Call, solver, workflow
from recipes.recipe import Claim, Recipe, Trained, micro

FALLBACK = "0"


def holds(text):
    """The answer of a text that keeps the contract; None for a text that breaks it."""
    answer = (extract_boxed(text) or "").strip()
    return answer if re.fullmatch("-?[0-9]{1,4}", answer) else None


@workflow(roles={"generator": solver}, families=("math",))
def contracted(task, prompts, *, retries=2, fallback=True):
    """Calls until one keeps the contract; retries are new samples from the same prompt."""
    ask = prompts.generator(question=task.question)
    for _ in range(1 + retries):
        answer = yield Call("generator", ask, read=holds)
        if answer.answer is not None:
            return answer
    return FALLBACK if fallback else answer


def penal(graded):
    """Calls that break the contract earn -1, the one that keeps it the outcome."""
    return [[one.outcome if call.answer is not None else -1.0 for call in one.calls] for one in graded]


def accepted(table):
    """Weight 1 for calls that keep the contract, 0 for those that were rejected."""
    return {"weight": table.readable.astype(float)}


def config():
    """At most two retries."""
    return micro("recipes.severa:contracted", {"generator": "p0"}, rewards__name="recipes.severa:penal")


def violations(trained: Trained) -> float:
    """The share of episodes whose answer breaks the contract."""
    return float(np.mean([one.answer is None for one in trained.table.bare_episodes]))


def fallbacks(trained: Trained) -> float:
    """The share of episodes in which no call kept the contract."""
    table = trained.table
    kept = np.bincount(table.episode, table.readable, len(table.bare_episodes))
    return float(np.mean(kept == 0))


RECIPE = Recipe(
    system="SEVerA, arXiv 2603.25111",
    claim="With retries and a fallback no answer breaks the contract, whatever training does.",
    config=config,
    arms={
        "contract": {},
        "rejected as accepted": {"rewards.name": "outcome"},
        "rejected left out": {"rewards.name": "outcome", "advantages.rows": "recipes.severa:accepted"},
        "none": {
            "workflow.settings.retries": 0,
            "workflow.settings.fallback": False,
            "rewards.name": "outcome",
        },
    },
    claims=(
        Claim("violations", "none", "contract"),
        Claim("accuracy", "contract", "none"),
        Claim("accuracy", "contract", "rejected left out"),
        Claim("fallbacks", "rejected as accepted", "contract"),
        Claim("fallbacks", "rejected left out", "contract"),
    ),
    measures={"violations": violations, "fallbacks": fallbacks},
    hours=0.5,
)
