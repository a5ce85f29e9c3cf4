"""Dr. MAS (arXiv 2602.08847): a solver and a verifier, each with rewards normalised by its own mean and deviation.

Claim: under one mean and deviation for all roles of a problem, the second moment of role k's gradient is multiplied by
(sigma_k^2 + (mu_k - mu)^2) / sigma^2; normalised by role it is not, which trains more steadily and reaches more.

`factor/ROLE` is measured in a phase that trains nothing, so that both arms see the same calls: it is the mean square of
the advantages under the problem's normalisation over that under the role's. `squared/ROLE` is the mean squared norm of
the role's part of the gradient there, and `formula/ROLE` the factor by the formula for the same rewards.
"""

from functools import partial

import numpy as np

from marl_jax.learning.estimators.worth import AdvantageConfig, with_advantages
from marl_jax.table import VERDICTS
from marl_jax.workflows import Call, judge, solver, workflow
from marl_jax.workflows.parse import verdict
from recipes.recipe import Claim, Recipe, Trained, mean, micro

ROLES = ("solver", "verifier")


@workflow(roles={"solver": solver, "verifier": judge}, counts=("loops",))
def solver_verifier(task, prompts, *, loops=2):
    """Approval ends the loop, whether or not it is deserved; the last draft is not verified."""
    look = None
    for loop in range(loops):
        if look is None:
            draft = yield Call("solver", prompts.generator(question=task.question), keep=True)
        else:
            ask = prompts.generator.refine(critique=look)
            draft = yield Call("solver", ask, after=draft, reads=[look], keep=True)
        if loop + 1 == loops:
            break
        ask = prompts.evaluator(question=task.question, answer=draft)
        look = yield Call("verifier", ask, reads=[draft], read=verdict)
        if look.answer == "Correct":
            break
    return draft


def config():
    """A probe of five steps that trains nothing, then training."""
    return micro(
        "recipes.dr_mas:solver_verifier",
        dict.fromkeys(ROLES, "p0"),
        steps=45,
        rewards__format_penalty=0.1,
        advantages__estimator="agent",
        phases=[
            {
                "steps": 5,
                "name": "probe",
                "collect": True,
                "learner": {"optimiser.schedule.learning_rate": 0.0},
            },
            {"steps": 40, "name": "train"},
        ],
    )


def formula(role, trained: Trained) -> float:
    """The mean factor by the formula over the problems of the probe."""
    factors = []
    for table in trained.collected():
        of_role = table.having(role=role)
        for task in np.unique(table.task):
            here = table.task == task
            all_calls, own = table.reward[here], table.reward[here & of_role]
            if len(own) and (spread := all_calls.var()) > 1e-9:
                factors.append((len(own), (own.var() + (own.mean() - all_calls.mean()) ** 2) / spread))
    weights = [count for count, _ in factors]
    return float(np.average([one for _, one in factors], weights=weights)) if factors else float("nan")


def factor(role, trained: Trained) -> float:
    """The mean square of the role's advantages under the problem's normalisation over that under its own."""
    squares = []
    for over in ("task", "role"):
        how = AdvantageConfig(estimator="agent", agent_mean=over, agent_scale=over)
        made = [with_advantages(table, how)[0] for table in trained.collected()]
        advantages = [one.advantage[one.having(role=role)] for one in made]
        squares.append(float(np.mean(np.concatenate(advantages) ** 2)))
    return squares[0] / squares[1] if squares[1] else float("nan")


def spikes(trained: Trained) -> float:
    """The largest norm of the gradient over the median norm."""
    norms = [line["policy/p0/grad_norm"] for line in trained.lines if line.get("phase") == "train"]
    return float(np.max(norms) / np.median(norms)) if norms and np.median(norms) else float("nan")


def squared(role, trained: Trained) -> float:
    """The mean squared norm of the role's part of the gradient in the probe."""
    norms = [
        line.get(f"gradient/p0/norm/{role}") or 0.0 for line in trained.lines if line.get("phase") == "probe"
    ]
    return mean(np.square(norms))


def approvals(trained: Trained) -> float:
    """The share of the verifier's verdicts that approve."""
    verdicts = trained.table.choice[trained.table.having(role="verifier")]
    return mean(verdicts == VERDICTS["Correct"])


RECIPE = Recipe(
    system="Dr. MAS, arXiv 2602.08847",
    claim="Normalising each role's rewards by its own mean and deviation trains more steadily and to a higher accuracy "
    "than by those of the whole problem.",
    config=config,
    arms={
        "agent": {},
        "task": {"advantages.agent_mean": "task", "advantages.agent_scale": "task"},
    },
    claims=(
        Claim("accuracy", "agent", "task"),
        Claim("spikes", "task", "agent"),
        Claim("squared/verifier", "task", "agent"),
    ),
    measures={
        "spikes": spikes,
        "approvals": approvals,
        **{f"{of.__name__}/{role}": partial(of, role) for of in (formula, factor, squared) for role in ROLES},
    },
    hours=0.3,
)  # fmt: skip
