"""SPO (arXiv 2401.04056) and SPPO (arXiv 2405.00675): learning from preferences among the policy's own answers.

Claim: the share of the policy's other answers that an answer beats is a reward that withstands preferences that are
noisy, or cyclic among wrong answers, under which the scores of a Bradley-Terry model drift; SPPO's squared loss on the
same shares withstands them, too.

The oracle prefers right answers. `noisy`: each of its preferences is flipped with probability 0.3, by a hash of both
texts. `cyclic`: of two wrong answers, the one whose last digit is 1 more modulo 3 is preferred: they have no order.

`bt`: the reward is the score of a Bradley-Terry model fitted to the comparisons of the group. All of its answers are
compared with all others, so the scores have the order of the shares, and only their distances differ. A reward model
that is fitted once, across problems, to the answers of an earlier policy could drift farther, and is left out.

SPPO has three iterations (of 14, 14 and 12 steps), each against the policy at its beginning. In the paper an iteration
samples once, from this policy, and learns from the best and the worst of five answers, with a beta of 0.001; here every
step samples anew and learns from all eight, with 0.1.
"""

import functools
import hashlib

import numpy as np

from marl_jax.rewards.peers import wins
from recipes.recipe import Claim, Recipe, micro

NOISE = 0.3
PRIOR = 0.1  # precision of the prior of Bradley-Terry scores about 0, which bounds them
NEWTON = 10  # Newton steps to their maximum


def prefers(one, other, noise=0.0, cyclic=False):
    """Whether the oracle prefers one graded episode to another."""
    if one.outcome != other.outcome:
        better = one.outcome > other.outcome
    elif cyclic and not one.outcome:
        better = (_style(one) - _style(other)) % 3 == 1
    else:
        return False
    return better != (_chance(one, other) < noise)


def _style(one):
    digits = [int(c) for c in one.answer or "" if c.isdigit()]
    return digits[-1] % 3 if digits else 0


def _chance(one, other):
    """A hash of both texts between 0 and 1, the same for both orders."""
    texts = sorted(f"{e.sample} {e.calls[0].text}" for e in (one, other))
    return int.from_bytes(hashlib.sha256(f"{one.task.id} {texts}".encode()).digest()[:4], "big") / 2**32


def sure(graded):
    """The share of wins by an oracle without noise."""
    return wins(graded, prefers)


def noisy(graded):
    """The share of wins by a noisy oracle."""
    return wins(graded, functools.partial(prefers, noise=NOISE))


def cyclic(graded):
    """The share of wins by an oracle that is cyclic among wrong answers."""
    return wins(graded, functools.partial(prefers, cyclic=True))


def bt_noisy(graded):
    """The scores of a Bradley-Terry model of the noisy comparisons."""
    return strengths(noisy(graded))


def bt_cyclic(graded):
    """The scores of a Bradley-Terry model of the cyclic comparisons."""
    return strengths(cyclic(graded))


def strengths(shares):
    """Scores s of a group with P(i beats j) = sigmoid(s_i - s_j), most likely given its shares of wins and a prior.

    Since all are compared with all, the likelihood depends on the comparisons only through the shares.
    """
    scores, others = np.zeros(len(shares)), ~np.eye(len(shares), dtype=bool)
    for _ in range(NEWTON):
        chance = others / (1 + np.exp(scores - scores[:, None]))
        slope = (len(shares) - 1) * np.asarray(shares) - chance.sum(1) - PRIOR * scores
        bend = chance * (1 - chance)
        scores = scores + np.linalg.solve(np.diag(bend.sum(1) + PRIOR) - bend, slope)
    return scores.tolist()


def config():
    """Eight answers to each problem."""
    return micro("single", {"generator": "p0"}, rewards__name="recipes.spo:sure")


SPPO = {
    "learner.loss.kind": "sppo",
    "learner.preference.beta": 0.1,
    "learner.preference.wins": "given",
    "phases": [{"steps": 14, "reference": "start"}],  # begins anew until the last step
}

RECIPE = Recipe(
    system="SPO, arXiv 2401.04056, and SPPO, arXiv 2405.00675",
    claim="The share of wins over the policy's own answers teaches under noisy and cyclic preferences, as a reward "
    "and in SPPO's square; the scores of a Bradley-Terry model drift under cyclic ones.",
    config=config,
    arms={
        "spo": {},
        "spo noisy": {"rewards.name": "recipes.spo:noisy"},
        "spo cyclic": {"rewards.name": "recipes.spo:cyclic"},
        "bt noisy": {"rewards.name": "recipes.spo:bt_noisy"},
        "bt cyclic": {"rewards.name": "recipes.spo:bt_cyclic"},
        "sppo": SPPO,
        "sppo noisy": {**SPPO, "rewards.name": "recipes.spo:noisy"},
        "sppo cyclic": {**SPPO, "rewards.name": "recipes.spo:cyclic"},
    },
    claims=(
        Claim("accuracy", "spo noisy", "base"),
        Claim("accuracy", "spo cyclic", "base"),
        Claim("accuracy", "sppo noisy", "base"),
        Claim("accuracy", "sppo cyclic", "base"),
        Claim("accuracy", "spo cyclic", "bt cyclic"),
        Claim("accuracy", "spo", "spo noisy"),
        Claim("accuracy", "spo", "sppo"),
    ),
    hours=0.8,
)
