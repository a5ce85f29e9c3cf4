"""AFM, chain of agents (arXiv 2508.13167): one model first learns a team's episodes, then by reward.

Claim: a single policy that is first trained on a trained team's episodes, as one sequence with roles as tags, reaches
more than one that learns by reward alone.

The team is voting: three drafts and a choice. Its episodes of the second half of its run are stored; the distilled arm
learns from those whose answer is right, then plays. Arms are compared at equal numbers of tokens that they sample
themselves; the team's are not counted for the distilled arm, as in the paper.
"""

from recipes.recipe import Claim, Recipe, Trained, micro

HALF = 20  # steps
ALONE = {"workflow.name": "single", "policies.map": {"generator": "p0"}}
TOLD = {
    "steps": HALF,
    "name": "told",
    "source": "{arms}/team/collected",
    "flatten": "generator",
    "objective": "sft",
    "learner": {"preference.above": 0.5},
}


def config():
    """The team, whose episodes are stored in the second half."""
    return micro(
        "voting",
        {"generator": "p0", "aggregator": "p0"},
        steps=2 * HALF,
        sampling__max_new_tokens=208,  # a team's drafts and choice between their tags take up to 181
        engine__max_prompt=256,
        phases=[{"steps": HALF, "name": "team"}, {"steps": HALF, "name": "kept", "collect": True}],
    )


def tagged(trained: Trained) -> float:
    """The share of answers that begin as a team of several roles would."""
    return sum(text.startswith("<generator>") for text in trained.table.text) / max(len(trained.table), 1)


RECIPE = Recipe(
    system="AFM, arXiv 2508.13167",
    claim="A policy that is first told a trained team's episodes, roles as tags, reaches more by reward "
    "than one without.",
    config=config,
    arms={
        "team": {},
        "told": {**ALONE, "phases": [TOLD, {"steps": HALF, "name": "played"}]},
        "alone": {**ALONE, "phases": [], "steps": HALF},
    },
    claims=(Claim("accuracy", "told", "alone"),),
    measures={"tagged": tagged},
    hours=0.6,
)
