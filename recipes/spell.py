"""SPELL (arXiv 2509.23863): one policy asks, answers and verifies; verdicts stand in where the rule is silent.

Claim: the majority of a verifier's votes, taken together with a rule that sees only some answers, teaches more than the
rule alone.

The questioner writes a problem, three responders answer it, each answer gets three votes. The rule is silent about
half of the problems, by their digits. A verifier earns 1 if its vote is the majority's, a responder the larger of
rule and majority, the questioner exp(-(m - 1/2)^2 / (2 (1/6)^2)) of the mean m of its responders, -1 for a text
that is no problem. The arm `rule` is played without verifiers. Votes are compared with those on the same answer; if two
episodes ask the same problem, also with those on the answer in the same slot. SPELL's verifier compares an answer with
the questioner's own; this one sees only the problem and the answer, and has to judge by itself. Left out: the
questioner's memory of solved problems, and the paper's choice of rows by role (all rows are learned from).
"""

import functools
import math

import numpy as np

from marl_jax.rewards.peers import agreement, consensus
from marl_jax.workflows import Call, judge, solver, team, workflow
from marl_jax.workflows.parse import verdict
from recipes.recipe import Claim, Recipe, micro, part
from recipes.sums import asked_for
from recipes.words import BASE


@workflow(
    roles={"questioner": team, "responder": solver(slots="answers"), "verifier": judge(slots="seats")},
    families=("math",),
)
def asked(task, prompts, *, rng, answers=3, votes=3, seats=9, given=False):
    """A problem, its answers, and votes on each of them; with `given` (evaluation), answers to the task itself."""
    if given:
        return (yield Call("responder", prompts.generator(question=task.question)))
    made = yield from asked_for("questioner", rng, labels={"of": -1})
    if made is None:
        return None
    ask = prompts.generator(question=made.question)
    replies = yield [Call("responder", ask, slot=i, about=made, labels={"of": -1}) for i in range(answers)]
    if not seats:
        return replies[0]
    looks = [prompts.evaluator(question=made.question, answer=answer) for answer in replies]
    yield [
        Call(
            *("verifier", looks[i // votes]),
            slot=i,
            reads=[replies[i // votes]],
            read=verdict,
            about=made,
            labels={"of": i // votes},  # votes are compared with those on the same answer
        )
        for i in range(min(answers * votes, seats))
    ]
    return replies[0]


def speaks(one):
    """Whether the rule judges answers to this problem."""
    return sum(int(c) for c in one.calls[0].text if c.isdigit()) % 2 == 0


def paid(graded, rule=True, votes=True):
    """Rewards by rule and votes: responders earn the larger of both."""
    return [_paid(one, rule, votes) for one in graded]


def _paid(one, rule, votes):
    if one.calls[0].answer is None:
        return [-1.0]
    worth = [0.0] * len(one.calls)
    answers = [i for i, call in enumerate(one.calls) if call.role == "responder"]
    for i in answers:
        votes_on = [j for j, call in enumerate(one.calls) if call.role == "verifier" and i in call.reads]
        verdicts = [one.calls[j].answer for j in votes_on]
        for j, agrees in zip(votes_on, agreement(verdicts)):
            worth[j] = agrees
        known = float(one.answers[i]) if rule and speaks(one) else 0.0
        worth[i] = max(known, float(votes and consensus(verdicts)[0] == "Correct"))
    mean = float(np.mean([worth[i] for i in answers]))
    worth[0] = math.exp(-((mean - 0.5) ** 2) / (2 * (0.5 / 3) ** 2))
    return worth


rule_alone = functools.partial(paid, votes=False)
votes_alone = functools.partial(paid, rule=False)


def config():
    """Four problems are asked in place of each task of the data set, which no role is shown."""
    return micro(
        "recipes.spell:asked",
        dict.fromkeys(("questioner", "responder", "verifier"), "p0"),
        base=BASE,
        problems=8,
        samples=4,
        rewards__name="recipes.spell:paid",
        advantages__group="task,role,call.of",
    )


RECIPE = Recipe(
    system="SPELL, arXiv 2509.23863",
    claim="The majority of votes beside a rule that sees only some answers teaches more than the rule alone.",
    config=config,
    arms={
        "rule and votes": {},
        "rule": {"rewards.name": "recipes.spell:rule_alone", "workflow.settings.seats": 0},
        "votes": {"rewards.name": "recipes.spell:votes_alone"},
    },
    claims=(
        Claim("accuracy", "rule and votes", "rule"),
        Claim("accuracy", "rule and votes", "votes"),
        Claim("accuracy", "rule and votes", "base"),
    ),
    # Verifiers that all say the same agree, too: what responders earn by votes alone is the share that they accept.
    measures={"verifiers agree": part("reward/verifier"), "responders earn": part("reward/responder")},
    examined={"workflow.settings.given": True},
    hours=0.6,
)
