"""Planner-Coder: the planner writes a plan in words, the coder writes the program."""

from marl_jax.workflows.api import Call, planner, solver, workflow
from marl_jax.workflows.parse import stripped


@workflow(roles={"planner": planner, "coder": solver}, families=("code",))
def planner_coder(task, prompts):
    """Two calls; any text counts as a plan, even an empty one."""
    ask = prompts.planner(question=task.question)
    plan = yield Call("planner", ask, read=stripped)
    return (yield Call("coder", prompts.coder(question=task.question, plan=plan), reads=[plan]))


@planner_coder.arrays
def planner_coder_in_arrays(stage):
    """The same in arrays, for the compiled road."""
    stage.say()
    return stage.say().at(0)
