"""A recipe of one's own, in a clone of the repository: does the majority of a group teach as much as the truth?

python -m recipes.run examples.own_recipe --seeds=3 --root=runs/recipes
"""

from marl_jax.rewards.peers import agreement
from marl_jax.workflows import Call, solver, workflow
from recipes.recipe import Claim, Recipe, Trained, micro


@workflow(roles={"generator": solver})
def alone(task, prompts):
    return (yield Call("generator", prompts.generator(question=task.question)))


def majority(graded):  # the episodes of one problem: 1 for those whose answer is the commonest
    return agreement([one.answer for one in graded])


def config():
    return micro("examples.own_recipe:alone", {"generator": "p0"}, steps=40)


def unreadable(trained: Trained) -> float:
    return float(1 - trained.table.readable.mean())


RECIPE = Recipe(
    system="TTRL, arXiv 2504.16084",
    claim="Rewards by the majority of a group teach nearly as much as rewards by the truth.",
    config=config,
    arms={
        "majority": {"rewards.name": "examples.own_recipe:majority"},
        "truth": {},
    },
    claims=[Claim("accuracy", "majority", "base"), Claim("accuracy", "truth", "majority")],
    measures={"unreadable": unreadable},
)
