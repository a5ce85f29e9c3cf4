"""Voting: generators answer the same prompt in parallel, then the aggregator picks one: no votes are counted."""

import functools

from marl_jax.workflows.api import Call, picker, solver, workflow
from marl_jax.workflows.parse import pick


@workflow(
    roles={"generator": solver(slots="votes"), "aggregator": picker},
    counts=("votes",),
    groups={"study": ("task", "role", "slot")},
)
def voting(task, prompts, *, votes=3):
    """`votes` drafts and one choice among them; an unreadable choice means the first draft."""
    ask = prompts.generator(question=task.question)
    drafts = yield [Call("generator", ask, slot=i) for i in range(votes)]
    ask = prompts.aggregator(question=task.question, candidates=drafts)
    choice = yield Call("aggregator", ask, reads=drafts, read=functools.partial(pick, n=votes))
    return drafts[int(choice.answer or 1) - 1]


@voting.arrays
def voting_in_arrays(stage, *, votes):
    """The same in arrays, for the compiled road."""
    drafts = stage.say()
    return drafts.at(stage.say().choice[:, 0].clip(1) - 1)
