"""A workflow of one's own: fresh drafts until the evaluator accepts one. Each role learns on a policy of its own.

python -m examples.own_workflow [WORKDIR] [--config.steps=200 ...]
"""

from marl_jax.commands import cli
from marl_jax.workflows import Call, judge, solver, workflow


@workflow(roles={"generator": solver, "evaluator": judge})
def first_accepted(task, prompts, *, tries=3):
    for slot in range(tries):
        draft = yield Call("generator", prompts.generator(question=task.question), slot=slot)
        look = prompts.evaluator(question=task.question, answer=draft)
        verdict = yield Call("evaluator", look, slot=slot, reads=[draft])
        if verdict.answer == "Correct":  # the text in its box
            break
    return draft


if __name__ == "__main__":
    cli.train(
        "runs/own_workflow",  # the command line may name another, and set what follows
        "--config=configs/micro.py:eval_opt-isolated-s-math",
        "--config.workflow.name=__main__:first_accepted",
        "--config.cell=first_accepted",
        "--config.steps=50",
        "--config.data.problems=16",
    )
