"""Debate: agents answer, read each other's answers and answer again; the majority wins."""

from marl_jax.workflows.api import Call, solver, workflow
from marl_jax.workflows.parse import majority


@workflow(roles={"debater": solver(slots="agents")}, counts=("agents", "rounds"))
def debate(task, prompts, *, agents=3, rounds=2):
    """Each of `agents` answers `rounds` times, its first answer included."""
    ask = prompts.debater(question=task.question)
    last = yield [Call("debater", ask, slot=i, keep=rounds > 1) for i in range(agents)]
    for turn in range(1, rounds):
        others = [last[:i] + last[i + 1 :] for i in range(agents)]
        asks = [prompts.debater.reply(others=read) for read in others]
        more = turn + 1 < rounds
        last = yield [
            Call("debater", asks[i], slot=i, after=last[i], reads=others[i], keep=more) for i in range(agents)
        ]
    return last[majority([answer.answer for answer in last])]


@debate.arrays
def debate_in_arrays(stage, *, agents, rounds):
    """The same in arrays, for the compiled road."""
    for _ in range(rounds):
        last = stage.say()
    return last.majority()
