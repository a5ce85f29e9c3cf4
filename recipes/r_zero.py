"""R-Zero (arXiv 2508.05004): a challenger writes questions, a solver learns from the majority of its own answers.

Claim: pseudo-labels drift away from the truth as training goes on, and leaving out questions whose majority is too
large or too small slows it. Here the truth is known to the executor, so drift is measured and not estimated. Agent0's
ADPO (arXiv 2511.16043) gives a small majority less weight instead of leaving it out, and a wider clip range; with one
update per step, as here, nothing is clipped, so that only its weights are compared.

The challenger earns min(s, 1 - s) for the share s of the solver's answers that agree, minus the share of its batch that
is near to its question, and -1 for a text that is no question. A solver earns 1 for the majority's answer. They are two
policies that train in turn, five steps each; `frozen challenger` has the same turns, the challenger's at a learning
rate of 0. The band leaves out questions with s outside of 0.3 to 0.8. If all answers agree, advantages are 0 without
the band, too, so that it only changes questions of which no two answers agree.

Departs from the paper: answers vote on the label that they learn from; in the paper it is fixed before the solver's
turn. A question that two episodes ask has a label in each, but its answers are one group, in which those of an episode
that is left out count as wrong. The solver's turns are as long as the challenger's, not three to four times as long.
Nearness is by runs of three characters, not by BLEU, and a text that is no question pays nothing for it. No KL.
"""

import functools

import numpy as np

from marl_jax.rewards.peers import agreement, consensus, crowding
from marl_jax.workflows import Call, solver, team, workflow
from recipes.recipe import STILL, Claim, Recipe, Trained, mean, micro, steps_of
from recipes.sums import asked_for
from recipes.words import BASE

BAND = (0.3, 0.8)


@workflow(
    roles={"challenger": team, "solver": solver(slots="answers")}, families=("math",), counts=("answers",)
)
def challenged(task, prompts, *, rng, answers=5, given=False):
    """A question is written, and answered `answers` times; with `given` (evaluation), the task itself is answered."""
    if given:
        return (yield Call("solver", prompts.generator(question=task.question)))
    made = yield from asked_for("challenger", rng)
    if made is None:
        return None
    ask = prompts.generator(question=made.question)
    return (yield [Call("solver", ask, slot=i, about=made) for i in range(answers)])[0]


def paid(graded, band=None):
    """Rewards of all episodes of a step."""
    written = [one.calls[0].text for one in graded]
    near = crowding(written, near=0.9)
    return [_paid(one, common, band) for one, common in zip(graded, near)]


def _paid(one, common, band):
    answers = [call.answer for call in one.calls[1:]]
    if not answers:
        return [-1.0]
    share = consensus(answers)[1]
    labels = agreement(answers) if band is None or band[0] <= share <= band[1] else [0.0] * len(answers)
    return [min(share, 1 - share) - common, *labels]


def banded(graded):
    """The rewards of `paid`, with the band."""
    return paid(graded, BAND)


def adpo(table):
    """Solvers' weight (0.6 to 1) and upper clip (0.3 to 0.2) by the share of equal answers; challengers': 1, 0.28."""
    solver = table.having(role="solver") & (table.length > 0)
    groups = table.group[solver]
    share = np.bincount(groups, table.reward[solver])[groups] / np.bincount(groups)[groups]
    weight, high = np.ones(len(table)), np.full(len(table), 0.28)
    weight[solver] = 0.6 + 0.4 * np.clip((share - 0.3) / 0.5, 0, 1)
    high[solver] = 0.2 + 0.1 * np.clip((0.8 - share) / 0.5, 0, 1)
    return {"weight": weight, "clip_high": high}


CHALLENGER = {"steps": 5, "name": "challenger", "policies": ["p0"]}
SOLVER = {"steps": 5, "name": "solver", "policies": ["p1"], "collect": True}


def config():
    """Five steps of the challenger, five of the solver, four times."""
    return micro(
        "recipes.r_zero:challenged",
        {"challenger": "p0", "solver": "p1"},
        base=BASE,
        samples=4,
        rewards__name="recipes.r_zero:banded",
        rewards__batch="step",
        advantages__group="task,role",
        phases=[CHALLENGER, SOLVER],
    )


def label_accuracy(tables, every=False):
    """The share of labels that the executor finds true, among labels that raise an answer, or among all."""
    right = []
    for table in tables:
        teaching = {*table.episode[table.having(role="solver") & (table.advantage > 0)].tolist()}
        for number, one in enumerate(table.episodes()):
            answers = [call.answer for call in one.calls[1:]]
            label, _ = consensus(answers)
            if label is not None and (every or number in teaching):
                right.append(one.answers[1 + answers.index(label)])
    return mean(right)


def early(trained: Trained, every: bool = False) -> float:
    """The label accuracy in the first quarter of the solver's steps."""
    tables = trained.collected()
    return label_accuracy(tables[: max(len(tables) // 4, 1)], every)


def late(trained: Trained, every: bool = False) -> float:
    """The label accuracy in the last quarter, up to the step that is compared."""
    tables = trained.collected()
    return label_accuracy(tables[-max(len(tables) // 4, 1) :], every)


RECIPE = Recipe(
    system="R-Zero, arXiv 2508.05004",
    claim="Labels by majority drift away from the truth as training goes on, and a band on their share slows it.",
    config=config,
    arms={
        "band": {},
        "no band": {"rewards.name": "recipes.r_zero:paid"},
        "adpo": {"rewards.name": "recipes.r_zero:paid", "advantages.rows": "recipes.r_zero:adpo"},
        "frozen challenger": {"phases": [CHALLENGER | STILL, SOLVER]},
    },
    claims=(
        Claim("accuracy", "band", "base"),
        Claim("labels early", "no band", "=labels late"),
        Claim("labels late", "band", "no band"),
        Claim("all labels late", "band", "no band"),
        Claim("accuracy", "adpo", "no band"),
        Claim("accuracy", "band", "frozen challenger"),
    ),
    measures={
        "labels early": early,
        "labels late": late,
        "all labels early": functools.partial(early, every=True),
        "all labels late": functools.partial(late, every=True),
        "solver's steps": steps_of("solver"),
    },
    examined={"workflow.settings.given": True},
    hours=0.6,
)
