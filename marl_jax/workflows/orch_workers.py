"""Orch-Workers: the orchestrator names strategies, each worker follows one, the synthesizer answers."""

import functools

from marl_jax.workflows.api import Call, planner, solver, team, workflow
from marl_jax.workflows.parse import plan_of, strategies


@workflow(
    roles={"orchestrator": planner, "worker": solver(slots="workers"), "synthesizer": team},
    counts=("workers",),
    groups={"study": ("task", "role")},
)
def orch_workers(task, prompts, *, workers=3):
    """At most `workers` strategies, one worker for each; if none can be read, one worker solves the plain task."""
    question = task.question

    ask = prompts.orchestrator(question=question, limit=workers)
    plan = yield Call("orchestrator", ask, read=functools.partial(plan_of, limit=workers))
    asks = [prompts.worker(question=question, strategy=line) for line in strategies(plan.text, workers)]
    reads = [plan] if asks else []
    asks = asks or [prompts.worker.system() + prompts.worker.plain(question=question)]
    solutions = yield [Call("worker", ask, slot=i, reads=reads) for i, ask in enumerate(asks)]
    ask = prompts.synthesizer(question=question, solutions=solutions)
    return (yield Call("synthesizer", ask, reads=solutions))


@orch_workers.arrays
def orch_workers_in_arrays(stage, *, workers):
    """The same in arrays, for the compiled road."""
    plan = stage.say()
    lines = [f"STRATEGY {k + 1}: {plan.part(k)}" for k in range(workers)]
    stage.follow(plan, ["\n".join(lines[:count]) for count in range(workers + 1)], plan.count[:, 0])
    stage.say()
    return stage.say().at(0)
