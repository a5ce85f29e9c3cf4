"""One agent: the control of every comparison, alone or with as much compute as a workflow spends."""

from marl_jax.workflows.api import Call, Completion, solver, workflow
from marl_jax.workflows.parse import majority


@workflow(roles={"generator": solver}, groups={"study": ("task", "role")})
def single(task, prompts):
    """One call."""
    return (yield Call("generator", prompts.generator(question=task.question)))


@single.arrays
def single_in_arrays(stage):
    """The same in arrays, for the compiled road."""
    return stage.say().at(0)


@workflow(roles={"generator": solver(slots="calls")}, counts=("calls",))
def single_matched(task, prompts, *, calls=4):
    """`calls` independent calls and their majority: a control for a workflow that makes as many calls.

    For code, an answer is the text of a program: if no two are equal, the first readable one wins.
    """
    ask = prompts.generator(question=task.question)
    drafts = yield [Call("generator", ask, slot=i) for i in range(calls)]
    return drafts[majority([draft.answer for draft in drafts])]


@single_matched.arrays
def single_matched_in_arrays(stage, *, calls):
    """The same in arrays, for the compiled road."""
    return stage.say().majority()


@workflow(roles={"generator": solver(slots="calls")}, counts=("tokens", "calls"))
def single_token_matched(task, prompts, *, tokens=256, calls=16):
    """Independent calls until `tokens` are sampled, and their majority: a control for a workflow that samples as many.

    Set `tokens` to the mean per episode of that workflow; a run without it is refused. Calls of n tokens exceed their
    budget by E[n^2] / 2 E[n] on average, so another call is made only while that much still fits, and there are at
    most `calls`.
    """
    ask = prompts.generator(question=task.question)
    drafts: list[Completion] = []
    spent = squares = 0
    while not drafts or (len(drafts) < calls and spent * spent + squares / 2 <= tokens * spent):
        draft = yield Call("generator", ask, slot=len(drafts))
        drafts.append(draft)
        spent += len(draft.tokens)
        squares += len(draft.tokens) ** 2
    return drafts[majority([draft.answer for draft in drafts])]
