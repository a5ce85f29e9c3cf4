"""Optima (arXiv 2410.08115): two agents, each with one half of a problem, learn to say it in few words.

Claim: a price on tokens keeps the accuracy and shortens the messages, and a term for readability keeps them in the base
model's language.

One agent has the first number and tells it; the base mostly says it in a sentence of ten words. The other has the
second number and answers. Reward: the outcome, minus 0.5 x the tokens of the conversation over those of the problem's
longest one. Readability is likelihood under the base: half of e^(mean log-prob of the message) is added (in the paper
the inverse of the negative log-likelihood, which has no bound). The arm `tokens and readable` has a KL anchor on the
teller instead. `strange` is the share of messages in neither of the two forms that the base knows.

The paper trains one model for both agents, by SFT and DPO on ranked conversations. Here each agent is a policy of its
own that learns by GRPO from the same reward, and a conversation is never rejected for being too short.
"""

import math
import re

import numpy as np

from marl_jax.rewards.likelihood import mean_logprobs
from marl_jax.workflows import Call, solver, team, workflow
from marl_jax.workflows.parse import stripped
from recipes.recipe import Claim, Recipe, Trained, micro
from recipes.words import BASE, ask_listener, ask_teller, user

PRICE, LIKELY = 0.5, 0.5
KNOWN = re.compile(r"(the first number that i have is )?\d+")


@workflow(roles={"teller": team, "listener": solver}, families=("math",))
def told(task, prompts):
    """The teller's message, and the answer of the listener who reads it."""
    ask = user(ask_teller(task))
    message = yield Call("teller", ask, read=stripped)
    ask = user(ask_listener(task, str(message)))
    return (yield Call("listener", ask, reads=[message]))


def correct(graded):
    """The outcome alone."""
    return [one.outcome for one in graded]


def brief(graded):
    """The outcome minus the price of the conversation; `graded` are the episodes of one problem."""
    spent = [sum(len(call.tokens) for call in one.calls) for one in graded]
    most = max(spent)
    return [one.outcome - PRICE * tokens / most for one, tokens in zip(graded, spent)]


def likely(graded):
    """The reward of `brief` plus half of the message's likelihood under the base."""
    heard = mean_logprobs(BASE, [one.calls[0] for one in graded])
    return [worth + LIKELY * math.exp(mean) for worth, mean in zip(brief(graded), heard)]


def config():
    """Sums and differences of two numbers below 100."""
    return micro(
        "recipes.optima:told",
        {"teller": "p0", "listener": "p1"},
        base=BASE,
        rewards__name="recipes.optima:brief",
    )


def message_tokens(trained: Trained) -> float:
    """The mean length of a message."""
    return float(trained.table.length[trained.table.having(role="teller")].mean())


def strange(trained: Trained) -> float:
    """The share of messages in none of the forms that the base knows."""
    texts = [trained.table.text[row] for row in np.flatnonzero(trained.table.having(role="teller"))]
    return float(np.mean([KNOWN.fullmatch(text.strip()) is None for text in texts]))


RECIPE = Recipe(
    system="Optima, arXiv 2410.08115",
    claim="A price on tokens keeps the accuracy with a fraction of the tokens, and a term for readability keeps "
    "messages in the base model's language.",
    config=config,
    arms={
        "tokens": {},
        "correct": {"rewards.name": "recipes.optima:correct"},
        "tokens and likely": {"rewards.name": "recipes.optima:likely"},
        "tokens and readable": {"learner.interventions.kl_coef": {"teller": 0.05}},
    },
    claims=(
        Claim("message tokens", "correct", "tokens"),
        Claim("accuracy", "tokens", "correct"),
        Claim("accuracy", "tokens", "base"),
        Claim("strange", "tokens", "tokens and likely"),
        Claim("strange", "tokens", "tokens and readable"),
    ),
    measures={"message tokens": message_tokens, "strange": strange},
    hours=0.4,
)
