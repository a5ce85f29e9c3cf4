"""Workflows without training, compared with a majority of single answers at as many tokens: debate on dissent, a state
machine, replies by likeness.

Claim: talk that is spent where answers differ (conditional debate, DynaDebate), by a state machine (StateFlow), or
along a graph of who is most like the others (SelfOrg) is worth more than as many tokens of independent answers.
`speakers` has the workflows in which a role chooses who talks, on a base that knows its prompts.
"""

from marl_jax.rewards.peers import crowding
from marl_jax.workflows import Call, judge, solver, workflow
from marl_jax.workflows.parse import majority, verdict
from recipes.recipe import Claim, Recipe, micro

ROLES = {"debater": solver(slots="debaters")}


@workflow(roles=ROLES, families=("math",), counts=("debaters",))
def conditional_debate(task, prompts, *, debaters=3):
    """Debaters reply to each other only where they differ."""
    ask = prompts.debater(question=task.question)
    answers = yield [Call("debater", ask, slot=i, keep=True) for i in range(debaters)]
    if len({answer.answer for answer in answers}) > 1:
        answers = yield [_reply(prompts, i, answers, answers) for i in range(debaters)]
    return answers[majority([answer.answer for answer in answers])]


@workflow(roles=ROLES, families=("math",), counts=("debaters",))
def likeness(task, prompts, *, debaters=3):
    """The debater that is least like the others reads the one that is most like them, and answers again."""
    ask = prompts.debater(question=task.question)
    answers = yield [Call("debater", ask, slot=i, keep=True) for i in range(debaters)]
    common = crowding([answer.text for answer in answers], near=0.3)
    most, least = common.index(max(common)), common.index(min(common))
    if most != least:
        answers[least] = yield _reply(prompts, least, answers, [answers[most]])
    return answers[majority([answer.answer for answer in answers])]


def _reply(prompts, i, answers, heard):
    others = [answer for answer in heard if answer is not answers[i]]
    return Call("debater", prompts.debater.reply(others=others), slot=i, after=answers[i], reads=others)


@workflow(roles={"debater": solver, "judge": judge}, families=("math",), counts=("most",))
def states(task, prompts, *, most=5):
    """A state machine: answer, check, and answer again until it is approved, in at most `most` calls."""
    state, draft, look = "answer", None, None
    for _ in range(most):
        if state == "answer" and look is None:
            draft = yield Call("debater", prompts.generator(question=task.question), keep=True)
            state = "check"
        elif state == "answer":
            ask = prompts.generator.refine(critique=look)
            draft = yield Call("debater", ask, after=draft, reads=[look], keep=True)
            state = "check"
        else:
            ask = prompts.evaluator(question=task.question, answer=draft)
            look = yield Call("judge", ask, reads=[draft], read=verdict)
            if look.answer == "Correct":
                break
            state = "answer"
    return draft


def config():
    """Nothing is trained."""
    return micro("recipes.untrained:conditional_debate", {"debater": "p0"}, steps=0, evaluation__every=0)


def plays(name, *roles):
    """The fields of an arm with another workflow, whose roles all have one policy."""
    return {"workflow.name": name, "policies.map": dict.fromkeys(roles, "p0")}


def majority_of(tokens):
    """The fields of an arm that samples single answers up to a number of tokens, and returns their majority."""
    return {**plays("single_token_matched", "generator"), "workflow.settings.tokens": tokens}


RECIPE = Recipe(
    system="DynaDebate, SelfOrg, StateFlow (control flow alone)",
    claim="Talk that is spent where answers differ, along likeness or by states is worth more than as many tokens of "
    "independent answers.",
    config=config,
    arms={
        "conditional debate": {},
        "likeness": {"workflow.name": "recipes.untrained:likeness"},
        "states": plays("recipes.untrained:states", "debater", "judge"),
        **{f"majority of {tokens}": majority_of(tokens) for tokens in (60, 120)},
    },
    claims=(
        Claim("accuracy", "conditional debate", "majority of 120"),
        Claim("accuracy", "likeness", "majority of 60"),
        Claim("accuracy", "states", "majority of 60"),
    ),
    hours=0.1,
)
