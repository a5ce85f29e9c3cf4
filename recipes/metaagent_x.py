"""MetaAgent-X (arXiv 2605.14212): a designer writes how agents work together, executors play the design, both learn.

Claim: training executors and designer in stages reaches more than training them at once, and four designs with four
executions each teach the designer more than sixteen designs with one.

A design is a line in the language of `marl_jax.workflows.designs`, interpreted, with a bound on its calls. An execution
earns its outcome minus a small cost for every call (of this recipe, not of the paper), the designer the mean of its
executions. An unreadable design earns less than any execution does, so that writing none never pays best. Executors'
calls are compared over all executions of a problem, role by role (in the paper in one group), and the paper's rewards
for form are left out. The oracle takes, for each level of problems, the design that does best there on one half of the
problems, and is measured on the other half, both ways round.
"""

import functools
import itertools

import numpy as np

from marl_jax.workflows import Call, Fork, judge, picker, planner, solver, team, workflow
from marl_jax.workflows.designs import canonical, play, read
from recipes.recipe import Claim, Recipe, Trained, mean, micro, over_problems
from recipes.words import BASE, DESIGNS, ask_design, user

RULES = {"judge": "judge", "critic": "critic", "planner": "planner", "*": "executor"}
EXECUTORS = ["executor", "judge", "critic", "planner"]
MOST = 8  # most calls of a design
COST = 0.02  # cost of a call


@workflow(
    roles={"designer": team, "executor": solver, "judge": picker, "critic": judge, "planner": planner},
    families=("math",),
    counts=("executions",),
)
def designed(task, prompts, *, executions=4, design=""):
    """One design, played `executions` times; a given `design` replaces the designer's."""
    written = design
    if not design:
        ask = user(ask_design(task.question))
        reader = functools.partial(canonical, most=MOST, rules=RULES)
        written = (yield Call("designer", ask, read=reader)).answer
    if written is None:
        return None
    yield Fork(executions)
    return (yield from play(read(written, MOST), task, prompts, RULES))


def worth(graded):
    """The outcome minus the cost of the calls; for an unreadable design the cost is higher than for any other."""
    unread = lambda one: one.calls[0].role == "designer" and one.calls[0].answer is None
    return [one.outcome - COST * (MOST + 1 if unread(one) else len(one.calls) - 1) for one in graded]


def stages(length):
    """Executors first, then the designer, again and again."""
    return [
        {"steps": length, "name": "executors", "roles": EXECUTORS},
        {"steps": length, "name": "designer", "roles": ["designer"]},
    ]


def config():
    """Four designs of eight problems, four executions of each."""
    return micro(
        "recipes.metaagent_x:designed",
        dict.fromkeys(["designer", *EXECUTORS], "p0"),
        base=BASE,
        steps=40,
        problems=8,
        samples=4,
        levels=(1, 3),
        rewards__name="recipes.metaagent_x:worth",
        phases=stages(10),
    )


def calls_at(level, trained: Trained) -> float:
    """The mean number of calls in the designs that are written for problems of a level."""
    table = trained.table
    designs = [
        text for row, text in enumerate(table.answer)
        if table.role_of(row) == "designer" and text and table.task_of(row).level == level
    ]  # fmt: skip
    return mean([read(text, MOST).calls for text in designs])


def unreadable(trained: Trained) -> float:
    """The share of designs that cannot be read."""
    return 1 - mean(trained.table.readable[trained.table.having(role="designer")])


def oracle(trained: Trained) -> float:
    """The accuracy of the best design of each level, on problems that did not choose it."""
    if not trained.also:
        return float("nan")
    tables = [table.bare_episodes for table in trained.also.values()]
    right = np.array([[episode.outcome for episode in table] for table in tables])  # [designs, episodes]
    levels = np.array([episode.task.level for episode in tables[0]])
    found = []
    for level, chosen in itertools.product(sorted(set(levels.tolist())), (0, 1)):
        here = right[:, levels == level]
        half = np.arange(here.shape[1]) // trained.samples % 2
        found.append(here[here[:, half == chosen].mean(axis=1).argmax(), half != chosen].mean())
    return float(np.mean(found))


@over_problems
def value(table):
    """The value of an episode: its outcome minus the cost of its calls."""
    return np.array([episode.outcome for episode in table.bare_episodes]) - COST * (
        np.bincount(table.episode) - 1
    )


RECIPE = Recipe(
    system="MetaAgent-X, arXiv 2605.14212",
    claim="A designer and executors trained in stages reach more than trained at once, where training collapses, and "
    "4 x 4 trees teach more than 16 x 1.",
    config=config,
    arms={
        "stages of 10": {},
        "stages of 1": {"phases": stages(1)},
        "coupled": {"phases": []},
        "16 x 1": {"rollout.samples": 16, "workflow.settings.executions": 1},
    },
    claims=(
        Claim("accuracy", "stages of 10", "coupled"),
        Claim("accuracy", "stages of 10", "stages of 1"),
        Claim("accuracy", "stages of 10", "16 x 1"),
        Claim("unreadable", "coupled", "stages of 10"),
        Claim("calls at level 3", "stages of 10", "=calls at level 1"),
        Claim("oracle", "stages of 10", "=right"),
    ),
    measures={
        "value": value,
        "right": lambda trained: float(np.mean([episode.outcome for episode in trained.table.bare_episodes])),
        "oracle": oracle,
        "unreadable": unreadable,
        "calls at level 1": functools.partial(calls_at, 1),
        "calls at level 3": functools.partial(calls_at, 3),
    },
    examined={"workflow.settings.executions": 1},
    also={design: {"workflow.settings.design": design} for design in DESIGNS},
    hours=1.0,
)
