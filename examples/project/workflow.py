"""Fresh drafts until the evaluator accepts one."""

from marl_jax.workflows import Call, judge, solver, workflow
from marl_jax.workflows.parse import verdict


@workflow(roles={"generator": solver, "evaluator": judge})
def first_accepted(task, prompts, *, tries=3):
    """At most `tries` drafts; the last one counts if none is accepted."""
    for slot in range(tries):
        draft = yield Call("generator", prompts.generator(question=task.question), slot=slot)
        look = prompts.evaluator(question=task.question, answer=draft)
        review = yield Call("evaluator", look, slot=slot, reads=[draft], read=verdict)
        if review.answer == "Correct":
            break
    return draft
