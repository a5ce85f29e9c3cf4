"""Eval-Opt: the generator answers, the evaluator judges and criticises, the generator refines."""

from marl_jax.table import VERDICTS
from marl_jax.workflows.api import Call, judge, solver, workflow
from marl_jax.workflows.parse import verdict

ROUNDS = {"math": 3, "code": 2}


@workflow(
    roles={"generator": solver, "evaluator": judge}, counts=("rounds",), groups={"study": ("task", "role")}
)
def eval_opt(task, prompts, *, rounds=None, shared=False):
    """At most `rounds` drafts (None: 3 for math, 2 for code), each judged; the verdict "Correct" ends the episode.

    Each role continues its own history; with `shared`, both are in one conversation.
    """
    if rounds is None:
        rounds = ROUNDS[task.family]
    review = None
    for turn in range(rounds):
        more = turn + 1 < rounds
        if review is None:
            draft = yield Call("generator", prompts.generator(question=task.question), keep=more or shared)
            check = prompts.evaluator(question=task.question, answer=draft)
        else:
            ask = prompts.generator.revise() if shared else prompts.generator.refine(critique=review)
            before = review if shared else draft
            draft = yield Call("generator", ask, after=before, reads=[review], keep=more or shared)
            check = prompts.evaluator.again(answer=draft)
        if shared:
            check = prompts.evaluator.join()
        before = draft if shared else review
        review = yield Call("evaluator", check, after=before, reads=[draft], read=verdict, keep=more)
        if review.answer == "Correct":
            break
    return draft


@eval_opt.arrays
def eval_opt_in_arrays(stage, *, rounds, shared):
    """The same in arrays, for the compiled road."""
    answer = None
    for _ in range(rounds or ROUNDS[stage.family]):
        answer = stage.say().over(answer)
        stage.end(stage.say().choice[:, 0] == VERDICTS["Correct"])
    return answer
