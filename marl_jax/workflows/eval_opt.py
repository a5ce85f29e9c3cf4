"""Eval-Opt: the generator answers, the evaluator judges and criticises, the generator refines."""

from marl_jax.table import VERDICTS
from marl_jax.workflows.api import Call, judge, solver, workflow
from marl_jax.workflows.parse import verdict

ROUNDS = {"math": 3, "code": 2}


@workflow(
    roles={"generator": solver, "evaluator": judge}, counts=("rounds",), groups={"study": ("task", "role")}
)
def eval_opt(task, prompts, *, rounds=None, shared=False):
    """At most `rounds` drafts (None: 3 for math, 2 for code), each judged; "Correct" ends it.

    Each role goes on in its own history; `shared` puts both into one conversation.
    """
    if rounds is None:
        rounds = ROUNDS[task.family]
    judged = None
    for turn in range(rounds):
        more = turn + 1 < rounds
        if judged is None:
            draft = yield Call("generator", prompts.generator(question=task.question), keep=more or shared)
            look = prompts.evaluator(question=task.question, answer=draft)
        else:
            ask = prompts.generator.revise() if shared else prompts.generator.refine(critique=judged)
            before = judged if shared else draft
            draft = yield Call("generator", ask, after=before, reads=[judged], keep=more or shared)
            look = prompts.evaluator.again(answer=draft)
        if shared:
            look, judged = prompts.evaluator.join(), draft
        judged = yield Call("evaluator", look, after=judged, reads=[draft], read=verdict, keep=more)
        if judged.answer == "Correct":
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
