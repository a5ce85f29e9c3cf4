"""Absolute Zero (arXiv 2505.03335): a proposer writes problems, an executor checks them, a solver learns from them.

Claim: solvers get better on held-out problems without a single given one, and a proposer paid by learnability gets them
further than one paid for any valid problem, one paid by difficulty alone, or one that does not learn; whitening by role
and type beats one whitening of all.

A proposer writes `a+b` or `a-b`. Deduction asks for its value, abduction for b given the value, and induction for its
value given two pairs that show the operation on a. The executor parses the text, refuses problems that are out of
range or held out, and computes the answer. Probes measure how often a problem is solved and are not trained on;
solvers learn from problems of the buffer. `one whitening` has one group of all calls that train. The test problems are
sums and differences of the test split, which are deductions.

Departures: any text that is no valid problem earns -1 (paper: -0.5 if it has the right form), four probes instead of
eight measure a, and problems are drawn from the buffer evenly (paper: the newest first).
"""

import functools

import numpy as np

from marl_jax.workflows import Call, solver, team, workflow
from recipes.recipe import Claim, Recipe, micro, part
from recipes.sums import ONE, executed, valid
from recipes.words import BASE, TYPES, ask_proposer, user


@workflow(
    roles={"proposer": team, "probe": solver(slots="tries"), "solver": solver(slots="tries")},
    families=("math",),
)
def self_play(task, prompts, *, rng, tries=4, given=False):
    """A problem of the buffer, or a given one, is solved; instead of any other task, one is proposed and probed."""
    if given or task.id.startswith("made/"):
        labels = {"type": task.meta.get("type", "deduction"), "over": "trained"}
        ask = prompts.generator(question=task.question)
        return (yield [Call("solver", ask, slot=i, labels=labels) for i in range(1 if given else tries)])[0]
    kind = TYPES[int(rng.integers(len(TYPES)))]
    shown = [example["question"] for example in task.meta.get("examples", ())]
    seen = ONE.search(" ".join(shown))
    ask = user(ask_proposer(seen[0] if seen else "1+1", kind))
    written = yield Call(
        "proposer", ask, read=functools.partial(valid, kind), labels={"type": kind, "over": "trained"}
    )
    if written.answer is None:
        return None
    made = executed(kind, written.text)
    ask = prompts.generator(question=made.question)
    probes = [
        Call("probe", ask, slot=i, about=made, labels={"type": kind, "over": "probes"}) for i in range(tries)
    ]
    return (yield probes)[0]


def paid(graded, worth):
    """A solver: 1, -0.5 for a wrong answer, -1 for none. A proposer: `worth` of the share a of right probes, or -1."""
    return [[_paid(one, i, worth) for i in range(len(one.calls))] for one in graded]


def _paid(one, i, worth):
    call = one.calls[i]
    if call.role == "proposer":
        rates = [one.answers[j] for j, other in enumerate(one.calls) if other.role == "probe"]
        return -1.0 if call.answer is None else worth(float(np.mean(rates)))
    return 1.0 if one.answers[i] else -0.5 if call.answer is not None else -1.0


def learnability(graded):
    """1 - a if 0 < a < 1, else -0.5."""
    return paid(graded, lambda a: 1 - a if 0 < a < 1 else -0.5)


def uniform(graded):
    """Any valid problem is as good as another."""
    return paid(graded, lambda a: 1.0)


def difficulty(graded):
    """1 - a, so that a problem that nobody solves is the best."""
    return paid(graded, lambda a: 1 - a)


def config():
    """Half of the problems are proposed, half are from the buffer; no role is shown those of the data set."""
    return micro(
        "recipes.absolute_zero:self_play",
        dict.fromkeys(("proposer", "probe", "solver"), "p0"),
        base=BASE,
        samples=4,
        policies__frozen_roles=["probe"],
        rewards__name="recipes.absolute_zero:learnability",
        advantages__group="role,call.type",
        data__buffer__capacity=512,
        data__buffer__share=0.5,
        data__buffer__streams="type",
        data__buffer__examples=1,
    )


RECIPE = Recipe(
    system="Absolute Zero, arXiv 2505.03335",
    claim="Without any given problem a solver gets better on held-out ones, most where the proposer is paid by "
    "learnability and advantages are whitened by role and type.",
    config=config,
    arms={
        "learnability": {},
        "uniform": {"rewards.name": "recipes.absolute_zero:uniform"},
        "difficulty": {"rewards.name": "recipes.absolute_zero:difficulty"},
        "frozen proposer": {"policies.frozen_roles": ["probe", "proposer"]},
        "one whitening": {"advantages.group": "call.over"},  # all calls that train
    },
    claims=(
        Claim("accuracy", "learnability", "base"),
        Claim("accuracy", "learnability", "uniform"),
        Claim("accuracy", "learnability", "difficulty"),
        Claim("accuracy", "learnability", "frozen proposer"),
        Claim("accuracy", "learnability", "one whitening"),
    ),
    measures={
        "valid": lambda trained: 1 - part("role/proposer/unreadable_share")(trained),
        "solved by probes": part("own/probe"),
        "buffer": part("buffer/size"),
    },
    examined={"workflow.settings.given": True},
    hours=0.7,
)  # fmt: skip
