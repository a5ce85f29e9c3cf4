"""Self-Refine with tests: the generator writes a program, sees which public test it fails, and repairs it."""

from marl_jax.rewards.code import run_program
from marl_jax.rewards.families import program
from marl_jax.workflows.api import Call, Tool, ToolTimeout, solver, workflow

TIME_LIMIT_S = 120.0  # seconds for all public tests together


def run_public_tests(task, response):
    """Tool: run the program in a response on the tests that a role may see; {"passed": bool, "reason": text}."""
    verdict = run_program(program(task, response), task.public_tests)
    return {"passed": verdict.passed, "reason": verdict.reason}


@workflow(roles={"generator": solver}, families=("code",), counts=("rounds",))
def self_refine_with_tests(task, prompts, *, rounds=3, run=run_public_tests):
    """At most `rounds` programs, until one passes the public tests; only one program if there are no public tests."""
    rounds = rounds if task.public_tests else 1
    draft = yield Call("generator", prompts.generator(question=task.question), keep=rounds > 1)
    for turn in range(1, rounds):
        report = {"passed": False, "reason": "no program found in the answer"}
        if draft.answer is not None:
            try:
                report = yield Tool(run, (task, draft.text), timeout_s=TIME_LIMIT_S)
            except ToolTimeout:
                report = {"passed": False, "reason": f"time limit of {TIME_LIMIT_S:g} s"}
        if report["passed"]:
            break
        ask = prompts.generator.repair(failure=report["reason"])
        draft = yield Call("generator", ask, after=draft, keep=turn + 1 < rounds)
    return draft
