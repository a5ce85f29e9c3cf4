"""Planner-Coder: the planner writes a plan in words, the coder writes the program."""

from marl_jax.workflows.api import Call, planner, solver, workflow

__all__ = ["planner_coder"]


@workflow(roles={"planner": planner, "coder": solver}, families=("code",))
def planner_coder(task, prompts):
    """Two calls; any text is a plan, an empty one too."""
    ask = prompts.planner(question=task.question)
    plan = yield Call("planner", ask, read=lambda text: text.strip() or None)
    return (yield Call("coder", prompts.coder(question=task.question, plan=plan), reads=[plan]))
