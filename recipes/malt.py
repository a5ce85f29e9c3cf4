"""MALT (arXiv 2412.01928): a generator, a verifier and a refiner learn from a tree of 3 x 3 x 3 of their calls.

Claim: supervised learning on calls of value above one half helps, and pairs of one parent for verifier and refiner add
to it.

The value of a call is the mean outcome of the paths below it. A pair is a good and a bad call after one prompt; values
are in thirds, and differ by more than a third in a pair. The arm that learns on its own samples (`grpo`) compares
siblings by the same values, and is compared at the step at which it has sampled as many tokens as the tree: do pairs
add anything to the tree? Evaluated in one pass.
"""

from marl_jax.workflows import Call, Fork, judge, solver, workflow
from marl_jax.workflows.parse import verdict
from recipes.recipe import Claim, Recipe, micro

TREES = 20  # steps of 16 problems


@workflow(
    roles={"generator": solver, "verifier": judge, "refiner": solver},
    families=("math",),
    counts=("verifiers", "refiners"),
)
def chain(task, prompts, *, verifiers=3, refiners=3):
    """A draft, `verifiers` verdicts on it, and `refiners` final answers after each verdict."""
    draft = yield Call("generator", prompts.generator(question=task.question), keep=True)
    yield Fork(verifiers)
    ask = prompts.evaluator(question=task.question, answer=draft)
    look = yield Call("verifier", ask, reads=[draft], read=verdict)
    yield Fork(refiners)
    return (yield Call("refiner", prompts.generator.refine(critique=look), after=draft, reads=[draft, look]))


STILL = {
    "steps": TREES,
    "name": "tree",
    "collect": True,
    "learner": {"optimiser.schedule.learning_rate": 0.0},
}
SFT = {
    "steps": 2 * TREES,
    "name": "sft",
    "source": "collected:tree",
    "objective": "sft",
    "optimiser": "fresh",
    "learner": {"preference.above": 0.5},
}
DPO = {
    "steps": 2 * TREES,
    "name": "dpo",
    "source": "collected:tree",
    "objective": "dpo",
    "reference": "start",
    "optimiser": "fresh",
    "roles": ["verifier", "refiner"],
    "learner": {"preference.beta": 0.2, "preference.gap": 0.34, "optimiser.schedule.learning_rate": 1e-4},
}


def config():
    """Trees of three drafts, three verdicts on each, three answers to each of those."""
    return micro(
        "recipes.malt:chain",
        {"generator": "p0", "verifier": "p1", "refiner": "p2"},
        steps=5 * TREES,
        samples=3,
        advantages__group="siblings",
        phases=[STILL, SFT, DPO],
    )


RECIPE = Recipe(
    system="MALT, arXiv 2412.01928",
    claim="Supervised learning on calls of high value in a tree helps, and pairs of siblings for verifier and refiner "
    "add to it.",
    config=config,
    arms={
        "sft and dpo": {},
        "sft": {"phases": [STILL, SFT], "steps": 3 * TREES},
        # Longer than the tree and with every step saved, so that all arms are compared at the tree's tokens.
        "grpo": {"phases": [], "steps": 2 * TREES, "checkpoints.every": 1, "checkpoints.keep_every": 1},
    },
    claims=(
        Claim("accuracy", "sft", "base"),
        Claim("accuracy", "sft and dpo", "sft"),
        Claim("accuracy", "sft and dpo", "grpo"),
    ),
    examined={"workflow.settings.verifiers": 1, "workflow.settings.refiners": 1},
    hours=0.7,
)
