"""AT-GRPO (arXiv 2510.11062): candidates from one state are compared with each other, and the best one is continued.

Claim: groups of candidates of one role in one turn from one state teach more than groups of calls whose prompts differ.

At each turn eight candidates answer one prompt, each is scored, and the next turn begins from the best (`best`) or
from the first (`first`). Without the tree (`apart`), eight episodes of one candidate are played instead of one of
eight, and the calls of a role and turn are one group although their prompts differ after the first turn. So all groups
and all turns have up to eight calls; an approved draft ends the turns of all eight candidates, or of its own episode.
Calls are rewarded only for their own work: all candidates of a tree would share one outcome, but eight episodes would
not, so that the control would learn from another reward. Evaluated with one candidate.
"""

import functools

from marl_jax.rewards import families
from marl_jax.rewards.credit import own_work
from marl_jax.workflows import Call, judge, solver, workflow
from marl_jax.workflows.parse import verdict
from recipes.recipe import Claim, Recipe, Trained, mean, micro

ROLES = {"reasoner": "p0", "critic": "p0"}


def score(task, draft):
    """The step's own reward, which the environment gives in training."""
    return families.grade(task, draft.text)


def says(wanted, look):
    """Whether the critic's verdict is the wanted one."""
    return look.answer == wanted


@workflow(
    roles={"reasoner": solver(slots="candidates"), "critic": judge(slots="candidates")},
    families=("math",),
    counts=("candidates", "turns"),
)
def from_one_state(task, prompts, *, candidates=8, turns=2, best=True):
    """A draft, then criticism and revision in turn, up to `turns` drafts or until one is approved."""
    slots = range(candidates)

    def choose(tries, worth):
        return max(tries, key=worth) if best else tries[0]

    ask = prompts.generator(question=task.question)
    tries = yield [Call("reasoner", ask, slot=i, keep=True) for i in slots]
    draft = choose(tries, lambda one: score(task, one))
    for _ in range(turns - 1):
        wanted = "Correct" if score(task, draft) == 1 else "Incorrect"
        ask = prompts.evaluator(question=task.question, answer=draft)
        looks = yield [Call("critic", ask, slot=i, reads=[draft], read=verdict) for i in slots]
        look = choose(looks, functools.partial(says, wanted))
        if look.answer == "Correct":
            break
        ask = prompts.generator.refine(critique=look)
        tries = yield [Call("reasoner", ask, slot=i, after=draft, reads=[look], keep=True) for i in slots]
        draft = choose(tries, lambda one: score(task, one))
    return draft


def config():
    """One episode of eight candidates for each problem."""
    return micro(
        "recipes.at_grpo:from_one_state",
        ROLES,
        samples=1,
        rewards__name="team_and_local",
        rewards__alpha=0.0,
        advantages__group="state",
    )


def judged(trained: Trained) -> float:
    """The share of the critic's verdicts that are right."""
    of_role = trained.table.having(role="critic")
    right, known = own_work(trained.table)
    return mean(right[of_role & known])


RECIPE = Recipe(
    system="AT-GRPO, arXiv 2510.11062",
    claim="Candidates of a role and turn from one state, compared with each other, teach more than calls whose prompts "
    "differ, and going on from the best beats going on from any.",
    config=config,
    arms={
        "best": {},
        "first": {"workflow.settings.best": False},
        "apart": {
            "workflow.settings.candidates": 1,
            "rollout.samples": 8,
            "advantages.group": "role_turn",
        },
    },
    claims=(
        Claim("accuracy", "best", "apart"),
        Claim("accuracy", "first", "apart"),
        Claim("accuracy", "best", "first"),
    ),
    measures={"judged": judged},
    examined={"workflow.settings.candidates": 1, "workflow.settings.best": False},
    hours=0.4,
)
