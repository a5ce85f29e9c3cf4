"""CoRe-Code (arXiv 2605.24812): a planner and a coder, trained one after the other by whether their programs pass.

Claim: a stage for the planner with the coder frozen, then one for the coder with the planner frozen, reaches more than
either stage alone.

Each plan is coded four times and earns the mean reward of its programs; programs of one plan are compared with each
other. The paper weighs them by a sigmoid whose formula is not published, and adds terms for time and memory, in which
these programs do not differ: both are left out.
"""

from marl_jax.workflows import Call, Fork, planner, solver, workflow
from marl_jax.workflows.parse import stripped
from recipes.recipe import Claim, Recipe, Trained, micro


@workflow(roles={"planner": planner, "coder": solver}, families=("code",), counts=("codes",))
def planned(task, prompts, *, codes=4):
    """A plan in words, and `codes` programs that follow it."""
    ask = prompts.planner(question=task.question)
    plan = yield Call("planner", ask, read=stripped)
    yield Fork(codes)
    return (yield Call("coder", prompts.coder(question=task.question, plan=plan), reads=[plan]))


PLANNER = {"steps": 20, "name": "planner", "roles": ["planner"]}
CODER = {"steps": 20, "name": "coder", "roles": ["coder"]}


def config():
    """Four plans of a problem, four programs of each."""
    return micro(
        "recipes.core_code:planned",
        {"planner": "p0", "coder": "p1"},
        family="code",
        levels=(1, 2),
        problems=8,
        samples=4,
        advantages__group="siblings",
        phases=[PLANNER, CODER],
    )


def obeyed(trained: Trained) -> float:
    """The share of programs whose steps are those of their plan."""
    table, plans = trained.table, {}
    same = []
    for row, text in enumerate(table.text):
        number = int(table.episode[row])
        if table.role_of(row) == "planner":
            plans[number] = text.split(", ")
        else:
            lines = [line.strip() for line in (table.answer[row] or "").splitlines()[1:]]
            steps = [line.removeprefix("return ").removeprefix("x=") for line in lines]
            same.append(steps == plans.get(number))
    return sum(same) / max(len(same), 1)


RECIPE = Recipe(
    system="CoRe-Code, arXiv 2605.24812",
    claim="A planner trained with its coder frozen, then the coder with the planner frozen, reach more than either "
    "alone and more than both at once.",
    config=config,
    arms={
        "stages": {},
        "together": {"phases": []},
        "planner alone": {"phases": [PLANNER]},
        "coder alone": {"phases": [CODER]},
    },
    claims=(
        Claim("accuracy", "stages", "together"),
        Claim("accuracy", "stages", "planner alone"),
        Claim("accuracy", "stages", "coder alone"),
        Claim("accuracy", "stages", "base"),
    ),
    measures={"obeyed": obeyed},
    examined={"workflow.settings.codes": 1},
    hours=0.7,
)
