"""Episodes that fork: an orchestrator names a strategy, four workers try it, and its reward is their mean reward.

python -m examples.forks [WORKDIR] [--config.steps=200 ...]
"""

from marl_jax.commands import cli
from marl_jax.workflows import Call, Fork, planner, solver, workflow
from marl_jax.workflows.parse import strategies


@workflow(roles={"orchestrator": planner, "worker": solver})
def designed(task, prompts, *, executions=4):
    ask = prompts.orchestrator(question=task.question, limit=1)
    design = yield Call("orchestrator", ask, read=lambda text: "".join(strategies(text, 1)) or None)
    yield Fork(executions)  # the rest is played once in each branch
    if design.answer is None:
        ask = prompts.worker.plain(question=task.question)
    else:
        ask = prompts.worker(question=task.question, strategy=design.answer)
    return (yield Call("worker", ask, reads=[design]))


if __name__ == "__main__":
    cli.train(
        "runs/forks",
        "--config=configs/micro.py:orch_workers-isolated-s-math",
        "--config.workflow.name=__main__:designed",
        '--config.policies.map={"orchestrator": "p0", "worker": "p1"}',
        "--config.cell=designed",
        "--config.rollout.samples=4",  # designs of each problem
        "--config.steps=50",
        "--config.data.problems=16",
    )
