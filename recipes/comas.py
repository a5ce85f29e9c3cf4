"""CoMAS (arXiv 2510.08529): two agents solve, look for flaws and score in turn, and learn from these verdicts alone.

Claim: solver and evaluator, paid against each other by a scorer's 1 to 3, stay near one half and get better; without
the evaluator rewards decay; without the scorer, when the evaluator's own verdict is the score, all praise all.

Each agent is a policy of its own and plays every role. Who evaluates and who scores is drawn for every answer. A scorer
earns 0, or -1 if its score cannot be read, and then the others earn 0. Grades are only logged. The base's scorers know
no prompt without a verdict: if no evaluator speaks, they are shown a random verdict.

The paper has four agents with two answers each, and whitens the rewards of each policy by itself; here two agents
answer once, calls are compared by problem and role over both policies, and one deviation is over all. The method needs
verdicts that are better than chance, and the micro base lacks them: its right answers earn hardly more than wrong ones.
"""

import functools

from marl_jax.workflows import Call, judge, solver, team, workflow
from marl_jax.workflows.parse import pick, verdict
from recipes.recipe import Claim, Recipe, Trained, mean, micro, part
from recipes.words import BASE, ask_score, user

AGENTS = 2
ROLES = ("solver", "evaluator", "scorer")


@workflow(roles={"solver": solver, "evaluator": judge, "scorer": team}, families=("math",))
def discussed(task, prompts, *, rng, evaluator=True, scorer=True):
    """An answer of each agent; each is evaluated, and scored, by an agent that is drawn."""
    ask = prompts.generator(question=task.question)
    answers = yield [Call("solver", ask, slot=i) for i in range(AGENTS)]
    looks = [None] * AGENTS
    if evaluator:
        asks = [prompts.evaluator(question=task.question, answer=answer) for answer in answers]
        who = rng.permutation(AGENTS).tolist()
        looks = yield [
            Call("evaluator", ask, slot=agent, reads=[answer], read=verdict)
            for ask, agent, answer in zip(asks, who, answers)
        ]
    if scorer:
        calls = []
        for agent, answer, look in zip(rng.permutation(AGENTS).tolist(), answers, looks):
            drawn = f"\\boxed{{{('Incorrect', 'Correct')[int(rng.integers(2))]}}}"
            words = ask_score(task.question, str(answer), str(look or drawn))
            reads = [answer] if look is None else [answer, look]
            ask = user(words)
            calls.append(Call("scorer", ask, slot=agent, reads=reads, read=functools.partial(pick, n=3)))
        yield calls
    return answers[0]


def verdicts(graded):
    """Rewards by the scores; without a scorer, by the evaluators' verdicts."""
    return [_earned(one) for one in graded]


def _earned(one):
    earned = [0.0] * len(one.calls)
    roles = {call.role for call in one.calls}
    for i, call in enumerate(one.calls):
        if call.role == "scorer":
            if call.answer is None:
                earned[i] = -1.0
                continue
            score = int(call.answer)
            earned[call.reads[0]] = (score - 1) / 2
            for look in call.reads[1:]:
                earned[look] = (3 - score) / 2
        elif call.role == "evaluator" and "scorer" not in roles:
            earned[i] = 0.0 if call.answer else -1.0
            earned[call.reads[0]] = float(call.answer == "Correct")
    return earned


def config():
    """Every role of agent i is played by policy i."""
    return micro(
        "recipes.comas:discussed",
        {f"{role}/{i}": f"p{i}" for role in ROLES for i in range(AGENTS)},
        base=BASE,
        rewards__name="recipes.comas:verdicts",
        advantages__estimator="reinforce_pp_baseline",
    )


def solved(trained: Trained) -> float:
    """The share of all agents' answers that are right."""
    table = trained.table
    return float(table.grade[table.having(role="solver")].mean())


def base_pays(right, trained: Trained) -> float:
    """The mean reward of right, or wrong, answers under the initial policies: the signal to learn from."""
    earned = [
        worth
        for one in (trained.base.episodes() if trained.base is not None else ())
        for call, worth, grade in zip(one.calls, _earned(one), one.answers)
        if call.role == "solver" and bool(grade) == right
    ]
    return mean(earned)


RECIPE = Recipe(
    system="CoMAS, arXiv 2510.08529",
    claim="Verdicts of peers alone teach: rewards stay near one half; they decay without the evaluator, and become "
    "mutual praise without the scorer.",
    config=config,
    arms={
        "full": {},
        "no evaluator": {"workflow.settings.evaluator": False},
        "no scorer": {"workflow.settings.scorer": False},
    },
    claims=(
        Claim("accuracy", "full", "base"),
        Claim("accuracy", "full", "no evaluator"),
        Claim("accuracy", "full", "no scorer"),
        Claim("late reward", "no scorer", "full"),
        Claim("early reward", "no evaluator", "=late reward"),
        Claim("base pays right", "full", "=base pays wrong"),
    ),
    measures={
        "early reward": part("role/solver/reward", late=False),
        "late reward": part("role/solver/reward"),
        "late reward of evaluators": part("role/evaluator/reward"),
        "solved": solved,
        "base pays right": functools.partial(base_pays, True),
        "base pays wrong": functools.partial(base_pays, False),
    },
    hours=0.6,
)
