"""Retroformer (arXiv 2308.02151): a frozen actor, and a reflector that learns to say what is wrong with a trial.

Claim: rewards by the change that a reflection makes, the return of the next trial minus that of this one, teach the
reflector to make the frozen actor better.

The environment says whether a trial has failed, as in the paper, also in the evaluation: a right first trial is
returned, a wrong one is reflected on, and tried once more. So accuracy is that of both trials, and never below the
first's. Grades are 0 or 1, so that the change after a failed trial is the outcome of the next. The reflector learns
from its own samples instead of the paper's offline PPO with a reward model, and there is one reflection instead of
several in a row. Four reflections on the same trial are compared with each other (`siblings`).
"""

from functools import partial

from marl_jax.rewards import families
from marl_jax.workflows import Call, Fork, judge, solver, workflow
from marl_jax.workflows.parse import verdict
from recipes.recipe import Claim, Recipe, Trained, mean, micro


@workflow(roles={"actor": solver, "reflector": judge}, families=("math",), counts=("reflections",))
def trials(task, prompts, *, reflections=4):
    """A trial; if it fails, a reflection on it, and another trial."""
    first = yield Call("actor", prompts.generator(question=task.question), keep=True)
    if families.grade(task, first.text) == 1:
        return first
    yield Fork(reflections)
    ask = prompts.evaluator(question=task.question, answer=first)
    look = yield Call("reflector", ask, reads=[first], read=verdict)
    ask = prompts.generator.refine(critique=look)
    return (yield Call("actor", ask, after=first, reads=[look]))


def change(graded):
    """The outcome minus the grade of the first trial; 0 without a second trial."""
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
    """The accuracy of first (0) or second (1) trials; that of second ones is the share of failed trials mended."""
    table = trained.table
    return mean(table.grade[table.having(role="actor") & (table.turn == turn)])


def mended_by_base(trained: Trained) -> float:
    """The share of failed trials that are mended with reflections of the initial policies."""
    return trial(1, Trained(trained.base)) if trained.base is not None else float("nan")


RECIPE = Recipe(
    system="Retroformer, arXiv 2308.02151",
    claim="A reflector that is paid by the change its words make helps a frozen actor to mend more of the trials that "
    "failed.",
    config=config,
    arms={
        "siblings": {},
        "all of a problem": {"advantages.group": "role"},
    },
    claims=(
        Claim("accuracy", "siblings", "base"),
        Claim("mended", "siblings", "=mended by base"),
        Claim("accuracy", "siblings", "all of a problem"),
    ),
    measures={"first": partial(trial, 0), "mended": partial(trial, 1), "mended by base": mended_by_base},
    examined={"workflow.settings.reflections": 1},
    hours=0.3,
)
