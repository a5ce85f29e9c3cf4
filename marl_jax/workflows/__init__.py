"""Workflows: generator functions in which roles call a model and read each other's completions.

Built-in workflows are listed in `BUILT_IN`; a workflow of your own is passed as an object or as "module:workflow".
"""

from marl_jax.fields import nearest
from marl_jax.own import is_own, load_own
from marl_jax.workflows.api import (
    KINDS,
    Call,
    Completion,
    Fork,
    Kind,
    Tool,
    ToolError,
    ToolTimeout,
    Workflow,
    judge,
    picker,
    planner,
    solver,
    team,
    workflow,
)
from marl_jax.workflows.debate import debate
from marl_jax.workflows.eval_opt import eval_opt
from marl_jax.workflows.orch_workers import orch_workers
from marl_jax.workflows.planner_coder import planner_coder
from marl_jax.workflows.render import Prompts, load_prompts
from marl_jax.workflows.self_refine import self_refine_with_tests
from marl_jax.workflows.single import single, single_matched, single_token_matched
from marl_jax.workflows.voting import voting

BUILT_IN = {
    entry.name: entry
    for entry in (
        single,
        single_matched,
        single_token_matched,
        voting,
        eval_opt,
        orch_workers,
        planner_coder,
        debate,
        self_refine_with_tests,
    )
}


def find(name: str) -> Workflow:
    """The built-in workflow of a name, or a user's as "module:workflow"."""
    if is_own(name):
        loaded = load_own(name, "workflow")
        if not isinstance(loaded, Workflow):
            raise ValueError(
                f"workflow '{name}' is a {type(loaded).__name__}: decorate it with @workflow(roles=...)"
            )
        return loaded
    if name not in BUILT_IN:
        known = f"; there is: {', '.join(BUILT_IN)}, or your own as 'module:function'"
        raise ValueError(f"'{name}' is no workflow{nearest(name, BUILT_IN, known)}")
    return BUILT_IN[name]


__all__ = [
    "BUILT_IN",
    "KINDS",
    "Call",
    "Completion",
    "Fork",
    "Kind",
    "Prompts",
    "Tool",
    "ToolError",
    "ToolTimeout",
    "Workflow",
    "debate",
    "eval_opt",
    "find",
    "judge",
    "load_prompts",
    "orch_workers",
    "picker",
    "planner",
    "planner_coder",
    "self_refine_with_tests",
    "single",
    "single_matched",
    "single_token_matched",
    "solver",
    "team",
    "voting",
    "workflow",
]
