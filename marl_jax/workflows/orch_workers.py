"""Orch-Workers: the orchestrator names strategies, each worker follows one, the synthesizer answers."""

from marl_jax.workflows.api import Call, planner, solver, team, workflow
from marl_jax.workflows.parse import strategies


@workflow(
    roles={"orchestrator": planner, "worker": solver(slots="workers"), "synthesizer": team},
    counts=("workers",),
    groups={"study": ("task", "role")},
)
def orch_workers(task, prompts, *, workers=3):
    """At most `workers` strategies; without a readable one, a single worker on the plain task."""
    question = task.question

    def read(text):
        return "\n".join(strategies(text, workers)) or None

    plan = yield Call("orchestrator", prompts.orchestrator(question=question, limit=workers), read=read)
    asks = [prompts.worker(question=question, strategy=way) for way in strategies(plan.text, workers)]
    reads = [plan] if asks else []
    asks = asks or [prompts.worker.system() + prompts.worker.plain(question=question)]
    solutions = yield [Call("worker", ask, slot=i, reads=reads) for i, ask in enumerate(asks)]
    ask = prompts.synthesizer(question=question, solutions=solutions)
    return (yield Call("synthesizer", ask, reads=solutions))
