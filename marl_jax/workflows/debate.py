"""Debate: agents answer, read the others' answers, answer again; the majority wins."""

from marl_jax.workflows.api import Call, solver, workflow
from marl_jax.workflows.parse import majority


@workflow(roles={"debater": solver(slots="agents")}, counts=("agents", "rounds"))
def debate(task, prompts, *, agents=3, rounds=2):
    """`rounds` answers of each of `agents`, the opening one included."""
    ask = prompts.debater(question=task.question)
    said = yield [Call("debater", ask, slot=i, keep=rounds > 1) for i in range(agents)]
    for turn in range(1, rounds):
        others = [said[:i] + said[i + 1 :] for i in range(agents)]
        asks = [prompts.debater.reply(others=heard) for heard in others]
        more = turn + 1 < rounds
        said = yield [
            Call("debater", asks[i], slot=i, after=said[i], reads=others[i], keep=more) for i in range(agents)
        ]
    return said[majority([answer.answer for answer in said])]


@debate.arrays
def debate_in_arrays(stage, *, agents, rounds):
    """The same in arrays, for the compiled road."""
    for _ in range(rounds):
        said = stage.say()
    return said.majority()
