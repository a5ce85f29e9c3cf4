"""UnityMAS-O (arXiv 2605.26646), its reflective code loop: each turn is rewarded by the change that it makes.

Claim: the change from turn to turn teaches later turns more than the shared outcome.

A coder writes a program, public tests are run on it, and it repairs failures, up to three turns. The first turn earns
its grade by the hidden tests (all or nothing; in the paper the share that pass), each later turn the change. The paper
has a critic per model; here calls of one turn are one group, which gives each turn its own baseline. No call is made
only to keep a right program: public tests that pass end the episode. Planner and reflector of the paper are left out:
the base has no words for them.
"""

from marl_jax.rewards.peers import changes
from marl_jax.workflows import self_refine_with_tests
from recipes.recipe import Claim, Recipe, Trained, mean, micro

WORKFLOW = self_refine_with_tests  # generator, and a tool between its turns


def by_turn(graded):
    """The first grade, then the change of each turn."""
    return [changes(list(map(float, one.answers))) for one in graded]


def config():
    """Three turns."""
    return micro(
        WORKFLOW.name,
        {"generator": "p0"},
        family="code",
        levels=(1, 2),
        rewards__name="recipes.unitymas_o:by_turn",
        advantages__group="role_turn",
    )


def later(trained: Trained) -> float:
    """The share of later turns that make a program right."""
    return mean(trained.table.grade[trained.table.turn > 0])


RECIPE = Recipe(
    system="UnityMAS-O, arXiv 2605.26646",
    claim="Rewards by the change from turn to turn teach later turns more than the shared outcome.",
    config=config,
    arms={
        "changes": {},
        "outcome": {"rewards.name": "outcome"},
        "outcome, one group": {"rewards.name": "outcome", "advantages.group": "role"},
    },
    claims=(
        Claim("accuracy", "changes", "outcome"),
        Claim("accuracy", "changes", "outcome, one group"),
        Claim("later", "changes", "outcome"),
    ),
    measures={"later": later},
    hours=0.6,
)
