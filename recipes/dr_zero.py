"""Dr. Zero (arXiv 2601.07055): single proposals, each compared with those of other prompts that ask for as many hops.

Claim: one proposal of each prompt, normalised over all prompts of as many hops, teaches as much as four proposals of
one prompt that are compared with each other, for a quarter of the solver's calls.

A hop is an operation: the proposer is shown a problem and asked for one with one or two operations. The executor
computes its answer, and refuses held-out problems. If k of n tries are right, the proposer earns (n - k) / (n - 1) for
0 < k < n, else 0, plus half of a score for form: a problem at all, of as many hops as asked for. All arms make
equally many solver's calls per step, but for refused proposals. Proposer and solver train in turn, five steps each;
`frozen proposer` has the same turns, the proposer's at a learning rate of 0.

Departs from the paper: there are no documents and no search. One hop or two are asked for, 2 : 1 (paper: one to four,
4 : 3 : 2 : 1). The answer is computed (paper: written by the proposer). Form has two parts (paper: four). The solver
learns from problems proposed in the same step (paper: written before its turn). The proposer's turns are of 5 steps
(paper: 50).
"""

import numpy as np

from marl_jax.workflows import Call, solver, team, workflow
from recipes.recipe import STILL, Claim, Recipe, Trained, micro, part, steps_of
from recipes.sums import chained
from recipes.words import MORE_BASE, ask_hops, user

ASKED = (1, 1, 2)  # hops, in this ratio


def hops_of(text):
    """The number of operations in a text."""
    return sum(text.count(sign) for sign in "+-")


def _valid(text):
    made = chained(text)
    return made and made.id


@workflow(roles={"proposer": team, "solver": solver(slots="tries")}, families=("math",), counts=("tries",))
def proposed(task, prompts, *, tries=5, by_hops=True, given=False):
    """A proposed problem, whose hops the shown task sets, and tries at it; with `given` (evaluation), the task."""
    if given:
        return (yield Call("solver", prompts.generator(question=task.question)))
    hops = ASKED[sum(map(ord, task.question)) % len(ASKED)]
    ask = user(ask_hops(task.question.removesuffix("=?"), hops))
    labels = {"hops": hops, "peers": str(hops) if by_hops else ""}
    written = yield Call("proposer", ask, read=_valid, labels=labels)
    if written.answer is None:
        return None
    made = chained(written.text)
    ask = prompts.generator(question=made.question)
    answers = yield [Call("solver", ask, slot=i, about=made, labels={"peers": made.id}) for i in range(tries)]
    return answers[0]


def paid(graded):
    """A solver earns its grade, a proposer by difficulty and form."""
    return [_paid(one) for one in graded]


def _paid(one):
    proposal, *tries = one.calls
    if not tries:
        return [0.0]
    count, right = len(tries), sum(one.answers[1:])
    difficulty = (count - right) / (count - 1) if 0 < right < count else 0.0
    form = (1 + (hops_of(proposal.text) == proposal.labels["hops"])) / 2
    return [difficulty + form / 2, *one.answers[1:]]


PROPOSER = {"steps": 5, "name": "proposer", "policies": ["p0"]}
SOLVER = {"steps": 5, "name": "solver", "policies": ["p1"]}


def config():
    """Five steps of the proposer, five of the solver, four times."""
    return micro(
        "recipes.dr_zero:proposed",
        {"proposer": "p0", "solver": "p1"},
        base=MORE_BASE,
        levels=(1, 3),
        samples=1,
        rewards__name="recipes.dr_zero:paid",
        advantages__group="role,call.peers",
        phases=[PROPOSER, SOLVER],
    )


def as_asked(trained: Trained) -> float:
    """The share of proposals that are problems of as many hops as asked for."""
    if "proposing" not in trained.also:
        return float("nan")
    calls = [one.calls[0] for one in trained.also["proposing"].episodes()]
    kept = [call.answer is not None and hops_of(call.text) == call.labels["hops"] for call in calls]
    return float(np.mean(kept))


RECIPE = Recipe(
    system="Dr. Zero, arXiv 2601.07055",
    claim="One proposal a prompt, normalised over prompts of as many hops, teaches more for the same solver's calls "
    "than four that are compared with each other.",
    config=config,
    arms={
        "by hops": {},
        "one group": {"workflow.settings.by_hops": False},
        "by prompt": {"data.problems": 4, "rollout.samples": 4, "advantages.group": "task,role"},
        "frozen proposer": {"phases": [PROPOSER | STILL, SOLVER]},
    },
    claims=(
        Claim("accuracy", "by hops", "base"),
        Claim("accuracy", "by hops", "by prompt"),
        Claim("accuracy", "by hops", "one group"),
        Claim("accuracy", "by hops", "frozen proposer"),
        Claim("as asked", "by hops", "by prompt"),
    ),
    measures={
        "as asked": as_asked,
        "late reward of proposers": part("role/proposer/reward"),
        "solver's steps": steps_of("solver"),
    },
    examined={"workflow.settings.given": True},
    also={"proposing": {"workflow.settings.given": False, "workflow.settings.tries": 1}},
    hours=0.5,
)
