"""Retroformer (arXiv 2308.02151): a frozen actor, and a reflector that learns to say what is wrong with its trial.

Claim: rewards of the change that a reflection makes, the return of the next trial less that of this one, teach the
reflector to make the frozen actor better.

On the policy's own samples in place of the paper's offline PPO with a reward model. Reflections are compared with each
other behind one trial (`siblings`): four of each.
"""

from functools import partial

from marl_jax.workflows import Call, Fork, judge, solver, workflow
from marl_jax.workflows.parse import verdict
from recipes.recipe import Claim, Recipe, Trained, micro


@workflow(roles={"actor": solver, "reflector": judge}, families=("math",), counts=("reflections",))
def trials(task, prompts, *, reflections=4):
    """A trial, a reflection on it, and another trial."""
    first = yield Call("actor", prompts.generator(question=task.question), keep=True)
    yield Fork(reflections)
    ask = prompts.evaluator(question=task.question, answer=first)
    look = yield Call("reflector", ask, reads=[first], read=verdict)
    ask = prompts.generator.refine(critique=look)
    return (yield Call("actor", ask, after=first, reads=[look]))


def change(graded):
    """What the second trial has more than the first."""
    return [one.outcome - one.answers[0] for one in graded]


def config():
    """The actor is served and does not learn."""
    return micro(
        "recipes.retroformer:trials",
        {"actor": "p0", "reflector": "p1"},
        samples=2,
        policies__frozen_roles=["actor"],
        rewards__name="recipes.retroformer:change",
        advantages__group="siblings",
    )


def trial(turn, trained: Trained) -> float:
    """The accuracy of first (0) or second (1) trials."""
    table = trained.table
    return float(table.grade[table.having(role="actor") & (table.turn == turn)].mean())


RECIPE = Recipe(
    system="Retroformer, arXiv 2308.02151",
    claim="A reflector that is paid by the change its words make turns a frozen actor's second trial better than its "
    "first.",
    config=config,
    arms={
        "siblings": {},
        "all of a problem": {"advantages.group": "role"},
        "outcome": {"rewards.name": "outcome", "advantages.group": "role"},
    },
    claims=(
        Claim("second", "siblings", "=first"),
        Claim("accuracy", "siblings", "base"),
        Claim("accuracy", "siblings", "all of a problem"),
        Claim("accuracy", "all of a problem", "outcome"),
    ),
    measures={"first": partial(trial, 0), "second": partial(trial, 1)},
    examined={"workflow.settings.reflections": 1},
    hours=0.4,
)
