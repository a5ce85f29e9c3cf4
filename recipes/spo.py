"""SPO (arXiv 2401.04056) and SPPO (arXiv 2405.00675): learning from preferences among the policy's own answers.

Claim: the share of the policy's other answers that an answer beats is a reward that withstands preferences that are
noisy, and cyclic among wrong answers; SPPO's square on the same shares does, too.

The oracle prefers right answers. `noisy`: each comparison is turned over with probability 0.3, by a hash of the two
texts. `cyclic`: of two wrong answers, the one whose last digit is 1 more modulo 3 is preferred, so that they have no
order.
"""

import functools
import hashlib

from marl_jax.rewards.peers import wins
from recipes.recipe import Claim, Recipe, micro

NOISE = 0.3


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
    """Between 0 and 1, the same for both orders."""
    texts = sorted(f"{e.sample} {e.calls[0].text}" for e in (one, other))
    return int.from_bytes(hashlib.sha256(f"{one.task.id} {texts}".encode()).digest()[:4], "big") / 2**32


def sure(graded):
    """The share of wins by an oracle without noise."""
    return wins(graded, prefers)


def noisy(graded):
    """The same with noise."""
    return wins(graded, functools.partial(prefers, noise=NOISE))


def cyclic(graded):
    """The same, cyclic among wrong answers."""
    return wins(graded, functools.partial(prefers, cyclic=True))


def config():
    """Eight answers to each problem."""
    return micro("single", {"generator": "p0"}, rewards__name="recipes.spo:sure")


SPPO = {"learner.loss.kind": "sppo", "learner.preference.beta": 0.1}

RECIPE = Recipe(
    system="SPO, arXiv 2401.04056, and SPPO, arXiv 2405.00675",
    claim="The share of wins over the policy's own answers teaches under noisy and cyclic preferences, as a reward "
    "and in SPPO's square.",
    config=config,
    arms={
        "spo": {},
        "spo noisy": {"rewards.name": "recipes.spo:noisy"},
        "spo cyclic": {"rewards.name": "recipes.spo:cyclic"},
        "sppo": SPPO,
        "sppo noisy": {**SPPO, "rewards.name": "recipes.spo:noisy"},
        "sppo cyclic": {**SPPO, "rewards.name": "recipes.spo:cyclic"},
    },
    claims=(
        Claim("accuracy", "spo noisy", "base"),
        Claim("accuracy", "spo cyclic", "base"),
        Claim("accuracy", "sppo noisy", "base"),
        Claim("accuracy", "sppo cyclic", "base"),
        Claim("accuracy", "spo", "spo noisy"),
        Claim("accuracy", "spo", "sppo"),
    ),
    hours=0.6,
)
