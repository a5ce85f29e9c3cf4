"""Who speaks next is chosen by a role that reads the talk (AutoGen, arXiv 2308.08155), or by bids (SALE). Not trained.

Claim: choosing the next speaker, or letting the highest bid speak, is worth more than as many tokens of independent
answers and their majority.

Speakers are the two ways in which the base can solve. `chosen`: a role reads the question and the last answer, and says
who answers next, or that it is done. `auction`: each way bids on the problem before anything is worked out, and the
highest bid answers. `in turn` gives every way its turn and returns the last answer.
"""

import functools

from marl_jax.workflows import Call, solver, team, workflow
from marl_jax.workflows.parse import pick
from recipes.recipe import Claim, Recipe, micro
from recipes.untrained import majority_of, plays
from recipes.words import END, MORE_BASE, WAYS, ask_bid, ask_next, user


def _answer(task, prompts, way):
    return Call("speaker", prompts.worker(question=task.question, strategy=WAYS[way]))


@workflow(roles={"speaker": solver, "chooser": team}, families=("math",), counts=("most",))
def chosen(task, prompts, *, most=3):
    """At most `most` answers; a role chooses who gives the next, and an unreadable choice is the first way."""
    answer, texts = None, ""
    for _ in range(most):
        ask = user(ask_next(task.question, texts))
        reads = [answer] if answer is not None else []
        choice = yield Call("chooser", ask, reads=reads, read=functools.partial(pick, n=END))
        who = int(choice.answer or 1)
        if who == END and answer is not None:
            break
        answer = yield _answer(task, prompts, min(who, len(WAYS)) - 1)
        texts = answer.text
    return answer


@workflow(roles={"speaker": solver, "bidder": team}, families=("math",))
def auction(task, prompts):
    """Each way bids, and the highest bid answers; the first of equal bids."""
    asks = [user(ask_bid(task.question, way)) for way in WAYS]
    read = functools.partial(pick, n=9)
    bids = yield [Call("bidder", ask, slot=i, read=read) for i, ask in enumerate(asks)]
    worth = [int(bid.answer or 0) for bid in bids]
    return (yield _answer(task, prompts, worth.index(max(worth))))


@workflow(roles={"speaker": solver}, families=("math",))
def in_turn(task, prompts):
    """Every way in turn."""
    for way in range(len(WAYS)):
        answer = yield _answer(task, prompts, way)
    return answer


def config():
    """Nothing is trained."""
    return micro(
        "recipes.speakers:chosen",
        {"speaker": "p0", "chooser": "p0"},
        base=MORE_BASE,
        steps=0,
        evaluation__every=0,
    )


RECIPE = Recipe(
    system="AutoGen, arXiv 2308.08155, and SALE (control flow alone)",
    claim="Choosing who speaks next, or an auction among ways, is worth more than as many tokens of independent "
    "answers.",
    config=config,
    arms={
        "chosen": {},
        "auction": plays("recipes.speakers:auction", "speaker", "bidder"),
        "in turn": plays("recipes.speakers:in_turn", "speaker"),
        **{f"majority of {tokens}": majority_of(tokens) for tokens in (30, 50)},
    },
    claims=(
        Claim("accuracy", "chosen", "majority of 50"),
        Claim("accuracy", "auction", "majority of 30"),
        Claim("accuracy", "chosen", "in turn"),
    ),
    hours=0.1,
)
