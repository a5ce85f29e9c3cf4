"""Interventions, judged by the update that they make under SGD and AdamW."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from closeness import close_trees
from learning_rows import as_table
from test_learner_state import ROWS, learner, start
from test_mechanisms import row, sgd

from marl_jax.learning.by_role.interventions import InterventionConfig, Mixing
from marl_jax.learning.optimiser import OptimiserConfig, ScheduleConfig

# Under AdamW a common factor of a policy's gradient does nothing.
INTERVENTIONS = {
    "multiplicity": InterventionConfig(Mixing(normalise_multiplicity=True)),
    "balance": InterventionConfig(Mixing(balance="equalise")),
    "conflicts": InterventionConfig(Mixing(project_conflicts=True)),
    "role clip": InterventionConfig(role_clip={"writer": 1e-3}),
    "anchor": InterventionConfig(kl_coef={"writer": 50.0}),
}


@pytest.mark.parametrize("name", INTERVENTIONS)
@pytest.mark.parametrize(
    "kind, shared, steps",
    [("sgd", True, 1), ("sgd", False, 1), ("adamw", False, 1), ("adamw", False, 2), ("adamw", True, 2)],
    ids=["sgd shared", "sgd isolated", "adamw isolated", "adamw isolated, later", "adamw shared, later"],
)
def test_an_intervention_is_judged_by_the_update_that_it_makes(name, kind, shared, steps):
    roles = {"writer": "p0", "judge": "p0" if shared else "p1"}
    rows = [dataclasses.replace(row("writer", [0, 1 + n], 1.0 + n), slot=n) for n in range(2)]
    rows.append(dataclasses.replace(row("judge", [3, 0], 0.3), policy=roles["judge"]))
    policies = tuple(dict.fromkeys(roles.values()))

    def update(interventions):
        optimiser = OptimiserConfig(
            kind, ScheduleConfig(0.1), b1=0.0, eps=1e-30, weight_decay=0.0, grad_clip=None
        )
        run = learner(roles, optimiser=optimiser, interventions=interventions)
        anchor = {"w": jnp.arange(16.0).reshape(4, 4) / 16}
        references = dict.fromkeys(policies, anchor)
        trees, states = start(run, policies)
        for step in range(steps):  # later the writer hears less of what it hears first
            scales = {"writer": 1.0 - 0.7 * step, "judge": 1.0}
            some = [dataclasses.replace(r, advantage=r.advantage * scales[r.role]) for r in rows]
            trees, states, _ = run.step(trees, states, as_table(some), references=references, step=step)
        return np.asarray(trees["p0"]["w"])

    plain, changed = update(InterventionConfig()), update(INTERVENTIONS[name])
    inert = np.allclose(plain, changed, rtol=1e-4, atol=1e-7)
    # Of isolated policies one role's part is the whole gradient: a factor, which SGD sees and AdamW does not.
    # An anchor is no factor: it adds to the gradient; and a clip is another factor in every step.
    alone = not shared and (kind == "adamw" or name in ("balance", "conflicts"))
    assert inert == (alone and name != "anchor" and not (name == "role clip" and steps > 1))


@pytest.mark.parametrize(
    "switch",
    [
        {"normalise_multiplicity": True},
        {"balance": "equalise"},
        {"balance": "cap", "max_share": 0.3},
        {"project_conflicts": True},
    ],
    ids=str,
)
def test_a_switch_acts_on_the_roles_that_are_named(switch):
    roles = {"writer": "p0", "judge": "p0"}
    rows = [dataclasses.replace(row("writer", [0], 1.0 + n), slot=n) for n in range(2)]
    rows += [dataclasses.replace(row("judge", [1], 0.7), slot=n) for n in range(3)]  # they oppose each other

    def update(**mixing):
        run = learner(roles, optimiser=sgd(1.0), interventions=InterventionConfig(Mixing(**mixing)))
        trees, _, report = run.step(*start(run, ("p0",)), as_table(rows))
        return np.asarray(trees["p0"]["w"]), report.gradients["p0"]["weight"]

    plain, _ = update()
    for named, spared in (("judge", "writer"), ("writer", "judge")):
        one, weights = update(**switch, roles=(named,))
        assert np.abs(one - plain).max() > 1e-2
        # A projection takes from the part that is named by giving the other another weight.
        assert weights[named if "project_conflicts" in switch else spared] == pytest.approx(1)
    np.testing.assert_array_equal(update(**switch, roles=("judge", "writer"))[0], update(**switch)[0])


def test_damping_of_one_role_leaves_the_policies_of_the_others_alone():
    def update(mixing):
        roles = {"writer": "p0", "judge": "p1", "critic": "p1"}
        run = learner(roles, optimiser=sgd(1.0), interventions=InterventionConfig(mixing))
        return run.step(*start(run), as_table(ROWS))

    plain, _, _ = update(Mixing())
    damped, states, report = update(Mixing(damping=0.3, roles=("writer",)))
    close_trees(damped["p0"]["w"], 0.7 * plain["p0"]["w"])
    np.testing.assert_array_equal(damped["p1"]["w"], plain["p1"]["w"])
    assert states["p1"].damping is None and "damping_cosine" not in report.policies["p1"]


def test_damping_under_adamw_acts_as_the_cosine_changes():
    turned = [dataclasses.replace(r, advantage=-r.advantage) for r in ROWS]
    after = {}
    for damping in (0.0, 0.3):
        run = learner(interventions=InterventionConfig(Mixing(damping=damping, damping_window=4)))
        trees, states = start(run)
        for step, rows in enumerate((ROWS, turned, ROWS)):
            trees, states, _ = run.step(trees, states, as_table(rows), step=step)
        after[damping] = np.asarray(trees["p0"]["w"])
    assert np.max(np.abs(after[0.3] - after[0.0])) > 1e-3


def test_freezing_a_role_of_a_shared_policy_leaves_the_update_of_the_other_alone():
    roles = {"writer": "p0", "judge": "p0"}
    rows = [*ROWS[:2], dataclasses.replace(ROWS[2], policy="p0")]
    frozen = learner(roles, interventions=InterventionConfig(freeze=("judge",)))
    alone = learner({"writer": "p0"})
    one = frozen.step(*start(frozen, ("p0",)), as_table(rows))
    two = alone.step(*start(alone, ("p0",)), as_table(rows[:2]))
    close_trees(one[0]["p0"], two[0]["p0"])
    assert one[2].gradients["p0"]["norm"]["judge"] == 0 and one[2].gradients["p0"]["amplification"] == 1
    assert one[2].gradients["p0"]["weight"] == {"writer": 1.0, "judge": None}
