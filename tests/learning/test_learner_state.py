"""What a policy carries from step to step: optimiser state, damping average, clocks, and who is trained when."""

import dataclasses

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import close, close_trees
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from learning_rows import TINY, as_table
from slow import slowed
from test_mechanisms import LogitTable, row, sgd

from marl_jax.learning import update_programs
from marl_jax.learning.batching import BatchConfig
from marl_jax.learning.by_role.interventions import InterventionConfig, Mixing
from marl_jax.learning.estimators.worth import AdvantageConfig
from marl_jax.learning.learner_config import LearnerConfig
from marl_jax.learning.losses import LossConfig
from marl_jax.learning.optimiser import OptimiserConfig, ScheduleConfig
from marl_jax.learning.update import Learner, NonFiniteGradients
from marl_jax.learning.work import mini_batches_of
from marl_jax.models import init
from marl_jax.models.weight_table import shardings
from marl_jax.sampling import generate

ROLES = {"writer": "p0", "judge": "p1"}
ROWS = [
    row("writer", [0, 3, 1], 1.0),
    row("writer", [2, 2], -0.5),
    dataclasses.replace(row("judge", [1, 0], 0.7), policy="p1"),
]


BATCH = BatchConfig((16, 64), 256, share_prompts=False)


def learner(roles=ROLES, schedule=None, mesh=None, **options):
    optimiser = OptimiserConfig("adamw", schedule or ScheduleConfig(0.1))
    plain = {"loss": LossConfig("pg"), "optimiser": optimiser, "batch": BATCH}
    return Learner(LogitTable(4), LearnerConfig(**plain | options), roles, mesh=mesh)


def start(run, policies=("p0", "p1")):
    trees = {policy: {"w": jnp.zeros((4, 4))} for policy in policies}
    return trees, run.init(trees)


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize(
    ("part", "program"), [("logprobs", "score"), ("gradient", "accumulate"), ("optimiser", "apply")]
)
def test_waiting_for_a_slow_program_is_time_of_that_program(monkeypatch, part, program, streams):
    anchored = InterventionConfig(kl_coef=dict.fromkeys(ROLES, 0.1))
    run = learner(batch=dataclasses.replace(BATCH, streams=streams), interventions=anchored)

    def step():
        run.step(*start(run), as_table(ROWS), references=start(run)[0])
        return dict(run.watch.seconds)

    before = step()  # compiles
    with monkeypatch.context() as patch:
        patch.setattr(update_programs, program, slowed(getattr(update_programs, program), 0.3))
        assert step()[part] - before[part] >= 0.3


def test_meshes_that_the_programs_cannot_use_are_refused():
    explicit = jax.make_mesh((1, 1), ("data", "model"))  # the axes that JAX makes by default
    tree = jax.device_put(init(0, TINY), NamedSharding(explicit, PartitionSpec()))
    for use in (
        lambda: learner(mesh=explicit),
        lambda: shardings(TINY, explicit),
        lambda: generate(tree, TINY, [[1]], max_new_tokens=1, seed=0),
    ):
        with pytest.raises(
            ValueError, match=r"data \(Explicit\), model \(Explicit\): make it with jax.make_mesh"
        ):
            use()
    with pytest.raises(ValueError, match="the mesh has no axis 'data'"):
        learner(mesh=jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,)))


@pytest.mark.parametrize("argument", ["policies", "states", "references"])
def test_trees_that_a_step_donated_are_refused_by_name(argument):
    run = learner(interventions=InterventionConfig(kl_coef=dict.fromkeys(ROLES, 0.1)))
    trees, states = start(run)
    after = run.step(trees, states, as_table(ROWS), references=trees)  # as good as a copy: it is read first
    given = {"policies": after[0], "states": after[1], "references": start(run)[0]}
    given[argument] = states if argument == "states" else trees
    with pytest.raises(ValueError, match=rf"{argument}\['p0'\] has arrays that an earlier step donated"):
        run.step(**given, rows=as_table(ROWS), step=1)


def test_a_checkpoint_of_weights_and_states_goes_on_to_the_same_bits():
    run = learner(interventions=InterventionConfig(Mixing(damping=0.3, damping_window=4)))
    trees, states = start(run)
    for step in range(2):
        trees, states, _ = run.step(trees, states, as_table(ROWS), step=step)
    saved = flax.serialization.to_bytes((trees, states))
    straight = run.step(trees, states, as_table(ROWS[::-1]), step=2)
    fresh = start(run)
    resumed = run.step(*flax.serialization.from_bytes(fresh, saved), as_table(ROWS[::-1]), step=2)
    jax.tree.map(np.testing.assert_array_equal, resumed[:2], straight[:2])
    assert resumed[2].flat() == straight[2].flat()
    assert straight[2].policies["p0"]["damping_cosine"] != 1.0  # the average was there to be lost


def test_damping_makes_the_first_sgd_step_smaller_by_lambda_and_leaves_adamws_as_it_was():
    norms = {}
    for kind in ("sgd", "adamw"):
        for damping in (0.0, 0.3):
            optimiser = OptimiserConfig(
                kind, ScheduleConfig(0.1), eps=1e-12, weight_decay=0.0, grad_clip=None
            )
            run = learner(optimiser=optimiser, interventions=InterventionConfig(Mixing(damping=damping)))
            _, _, report = run.step(*start(run), as_table(ROWS))
            norms[kind, damping] = report.policies["p0"]["update_norm"]
            applied = report.gradients["p0"]["weight"]["writer"]
            assert applied == pytest.approx(1 - damping)
    assert norms["sgd", 0.3] == pytest.approx(0.7 * norms["sgd", 0.0], rel=1e-5)
    assert norms["adamw", 0.3] == pytest.approx(norms["adamw", 0.0], rel=1e-4)


def test_every_policy_has_its_own_clock_and_the_study_shares_one():
    own = ScheduleConfig(1.0, "linear", total_steps=10)
    shared = dataclasses.replace(own, clock="shared")
    for schedule, expected in ((own, [(1.0, 1.0), (0.9, 0.9)]), (shared, [(1.0, 0.9), (0.8, 0.7)])):
        run = learner(schedule=schedule)
        trees, states = start(run)
        for step, rates in enumerate(expected):
            trees, states, report = run.step(trees, states, as_table(ROWS), step=step)
            found = tuple(report.policies[p]["learning_rate"] for p in ("p0", "p1"))
            assert found == pytest.approx(rates)
            # With the other policy handed over first, the clock ticks in the same order.
            trees, states = (dict(reversed(given.items())) for given in (trees, states))


def test_a_policy_may_have_a_learning_rate_of_its_own():
    run = learner(schedule=ScheduleConfig(0.1, "linear", total_steps=10), learning_rates={"p1": 0.4})
    trees, states = start(run)
    for expected in ((0.1, 0.4), (0.09, 0.36)):
        trees, states, report = run.step(trees, states, as_table(ROWS))
        assert [report.policies[p]["learning_rate"] for p in ("p0", "p1")] == pytest.approx(expected)


def test_a_role_may_have_any_name():
    named = lambda name: [dataclasses.replace(r, role=name) for r in ROWS[:2]]
    moved = {}
    for name in ("all", "writer"):
        run = learner({name: "p0"}, interventions=InterventionConfig(role_clip={name: 1e-3}))
        _, _, report = run.step(*start(run, ("p0",)), as_table(named(name)))
        moved[name] = report.policies["p0"]["grad_norm"]
    assert moved["all"] == pytest.approx(1e-3, rel=1e-4) and moved["all"] == moved["writer"]


def test_rows_of_a_policy_that_was_not_handed_over_are_refused():
    run = learner()
    with pytest.raises(ValueError, match=r"\['p1'\], which were not passed"):
        run.step(*start(run, ("p0",)), as_table(ROWS))


def test_narrow_weights_are_refused():
    with pytest.raises(ValueError, match="'p0' is bfloat16; train float32 weights"):
        learner().init({"p0": {"w": jnp.zeros((4, 4), jnp.bfloat16)}})


def test_old_weights_and_states_are_given_away():
    run = learner(interventions=InterventionConfig(Mixing(damping=0.1)))
    trees, states = start(run)
    run.step(trees, states, as_table(ROWS))
    given = (trees, [(s.optimiser, s.damping) for s in states.values()])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))


def test_the_share_of_padding_is_reported():
    run = learner()
    _, _, report = run.step(*start(run), as_table(ROWS))
    # Rows of 1 + 3 - 1 and 1 + 2 - 1 tokens, and one of 2, each in the smallest micro-batch: four times 16.
    assert report.policies["p0"]["padding_share"] == pytest.approx(1 - 5 / 64)
    assert report.flat()["policy/p1/padding_share"] == pytest.approx(1 - 2 / 64)


def test_a_skipped_update_leaves_the_numbers_of_the_others():
    broken = dataclasses.replace(ROWS[0], advantage=float("nan"))
    run = learner({"writer": "p0"}, updates="fixed", updates_fixed=2, layer_norms=True)
    _, states, report = run.step(*start(run, ("p0",)), as_table([broken, ROWS[1]]))
    alone = learner({"writer": "p0"})
    _, _, wanted = alone.step(*start(alone, ("p0",)), as_table([ROWS[1]]))
    assert states["p0"].skipped == 1
    found, alone = report.policies["p0"], wanted.policies["p0"]
    for name in ("grad_norm", "update_norm", "clip_factor"):
        assert found[name] == pytest.approx(alone[name], rel=1e-5), name
    # A mean of advantages times log-probs, those of one token among four.
    close(found["loss"], alone["loss"], of=abs(ROWS[1].advantage) * np.log(4))


def test_norms_by_layer_and_by_role_are_means_over_the_same_updates():
    run = learner({"writer": "p0"}, updates="fixed", updates_fixed=2, layer_norms=True)
    _, _, report = run.step(*start(run, ("p0",)), as_table(ROWS[:2]))
    found = report.gradients["p0"]
    assert found["layers"]["writer"]["w"] == pytest.approx(found["norm"]["writer"], rel=1e-5)


def test_a_frozen_role_leaves_its_policy_where_it_is_even_under_momentum():
    turns = InterventionConfig(alternate=("writer", "judge"), alternate_every=1)
    run = learner(interventions=turns)
    trees, states = start(run)
    for step, trained in enumerate(("p0", "p1", "p0")):
        before = jax.tree.map(np.asarray, trees)
        trees, states, _ = run.step(trees, states, as_table(ROWS), step=step)
        moved = {p for p in trees if np.any(np.asarray(trees[p]["w"]) != before[p]["w"])}
        assert moved == {trained}
    assert (states["p0"].updates, states["p1"].updates, states["p1"].empty) == (2, 1, 2)


def test_slots_of_a_role_may_have_policies_of_their_own():
    rows = [row("writer", [0, 3]), dataclasses.replace(row("writer", [2, 2], slot=1), policy="p1")]
    run = learner({"writer/0": "p0", "writer/1": "p1"})
    trees, states, report = run.step(*start(run), as_table(rows))
    assert report.cosines == {("writer/0", "writer/1"): None}
    assert np.any(trees["p0"]["w"] != trees["p1"]["w"]) and states["p1"].updates == 1


def test_interventions_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="'p0' is shared: give every role"):
        learner({"a": "p0", "b": "p0"}, interventions=InterventionConfig(Mixing(damping=0.1)))
    with pytest.raises(ValueError, match="'wirter'"):
        learner(interventions=InterventionConfig(freeze=("wirter",)))
    with pytest.raises(ValueError, match=r"interventions.mixing.roles names \['jugde'\]"):
        learner(interventions=InterventionConfig(Mixing(balance="cap", roles=("jugde",))))
    with pytest.raises(ValueError, match=r"\['p7'\] name no policies"):
        learner(learning_rates={"p7": 0.1})
    for wrong in ({"updates": "two"}, {"epochs": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            learner(**wrong)


def test_the_studys_regime_is_one_preset():
    study = LearnerConfig.study(total_steps=100)
    assert (study.updates, study.sequences_per_update, study.loss.dual_clip) == ("sequences", 512, 3.0)
    assert (study.optimiser.schedule.clock, study.optimiser.schedule.clamped) == ("shared", False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1),
        ({"epochs": 3}, 3),
        ({"updates": "fixed", "updates_fixed": 4}, 4),
        ({"updates": "sequences", "sequences_per_update": 4, "epochs": 2}, 6),
    ],
)
def test_updates_per_step_are_what_the_config_says(changes, expected):
    rows = [row("writer", [arm, 0], float(arm) - 1.5, logprobs=[-1.4, -1.4]) for arm in (0, 1, 2, 3, 3)] * 2
    run = learner(**changes)
    parts = mini_batches_of(run.config, "p0", len(rows), step=0)
    assert len(parts) == expected
    assert sorted(np.concatenate(parts)) == sorted(list(range(10)) * changes.get("epochs", 1))
    _, states, report = run.step(*start(run), as_table(rows))
    assert (states["p0"].updates, states["p0"].steps) == (expected, 1)
    # Only later updates are off the policy that the ratio is taken against.
    assert (report.policies["p0"]["ratio"] == 1.0) == (expected == 1)


@pytest.mark.parametrize("old", ["trainer", "sampler"])
@pytest.mark.parametrize(
    "changes", [{}, {"epochs": 2}, {"updates": "fixed", "updates_fixed": 2, "epochs": 2}]
)
def test_the_gap_to_the_sampler_is_told_whatever_the_ratio_is_taken_against(old, changes):
    rows = [row("writer", [arm, 0], float(arm) - 1.5, logprobs=[-1.4, -1.4]) for arm in range(4)]
    run = learner(old_logprobs=old, **changes)
    _, _, report = run.step(*start(run), as_table(rows))
    gap = 1.4 - np.log(4)  # four equal arms before the first update
    stats = report.roles["writer"]
    assert [stats["gap_max"], stats["gap_mean"]] == pytest.approx([gap, gap], abs=1e-6)
    assert stats["chi2"] == pytest.approx(np.exp(2 * gap) - 1, abs=1e-5)
    assert stats["ppl_ratio"] == pytest.approx(np.exp(-gap), abs=1e-5)
    assert len(report.warnings) == 1


def test_a_policy_without_rows_is_left_alone_and_counted():
    run = learner()
    trees, states, report = run.step(*start(run), as_table(ROWS[:2]))
    assert not np.any(trees["p1"]["w"])
    assert (states["p1"].empty, states["p1"].updates) == (1, 0)
    assert report.policies["p1"] == {"steps": 0, "updates": 0, "skipped": 0, "empty": 1}


def test_a_non_finite_gradient_is_skipped_counted_and_at_last_stops_the_run():
    rows = [row("writer", [0, 1], float("nan")), row("writer", [2])]
    run = learner(max_skips=2)
    trees, states, report = run.step(*start(run), as_table(rows))
    assert not np.any(trees["p0"]["w"])
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(states["p0"].optimiser))
    assert (report.policies["p0"]["skipped"], report.policies["p0"]["updates"]) == (1, 0)
    assert report.flat()["policy/p0/grad_norm"] is None and report.gradients["p0"] == {}
    assert report.policies["p0"]["update_norm"] == 0
    assert report.warnings[-1] == "policy 'p0': its gradient was not finite, and was left out"
    with pytest.raises(NonFiniteGradients, match="'p0': 2 gradients"):
        run.step(trees, states, as_table(rows))


def test_what_cannot_be_learned_from_is_refused_while_all_policies_are_whole():
    run = learner()
    trees, states = start(run)
    late = [
        (dataclasses.replace(ROWS[2], tokens=[0] * 80, logprobs=[0.0] * 80), "fits no length bucket"),
        (dataclasses.replace(ROWS[2], logprobs=[0.0]), "2 tokens and 1 log-probs"),
    ]
    for broken, said in late:
        assert broken.policy == "p1"
        with pytest.raises(ValueError, match=said):
            run.step(trees, states, as_table([*ROWS[:2], broken]))
    with pytest.raises(ValueError, match=r"\['p1'\] have no state: take it from `init`"):
        run.step(trees, {"p0": states["p0"]}, as_table(ROWS))
    with pytest.raises(ValueError, match="policies 'p0' and 'p1' share arrays"):
        run.step({"p0": trees["p0"], "p1": {**trees["p0"]}}, states, as_table(ROWS))
    with pytest.raises(ValueError, match=r"policies \['p2'\] have no role in the map"):
        run.step({**trees, "p2": trees["p1"]}, {**states, "p2": states["p1"]}, as_table(ROWS))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(trees))


def test_rows_of_a_slot_with_a_policy_of_its_own_are_of_that_policy():
    run = learner({"voter/0": "p0", "voter/1": "p1"})
    mine = dataclasses.replace(row("voter", [0, 1], 1.0), slot=0, policy="p0")
    run.step(*start(run), as_table([mine]))
    with pytest.raises(ValueError, match=r"\('voter', 0, 'p1'\)"):
        run.step(*start(run), as_table([dataclasses.replace(mine, policy="p1")]))


def test_rows_of_an_unknown_role_or_policy_are_refused():
    run = learner()
    with pytest.raises(ValueError, match="'p7'"):
        run.step(*start(run), as_table([dataclasses.replace(ROWS[0], policy="p7")]))


def test_truncated_completions_can_be_left_out():
    run = learner(mask_truncated=True)
    cut = dataclasses.replace(ROWS[1], truncated=True)
    left_out, absent = (run.step(*start(run), as_table(rows))[0] for rows in ([ROWS[0], cut], ROWS[:1]))
    np.testing.assert_array_equal(left_out["p0"]["w"], absent["p0"]["w"])


def test_a_role_whose_slots_have_policies_of_their_own_is_reported_whole():
    rows = [row("writer", [0, 3, 1], 1.0), row("writer", [2], -0.5)]
    rows.append(dataclasses.replace(row("writer", [1, 0], 4.0), policy="p1", slot=1))
    run = learner({"writer/0": "p0", "writer/1": "p1"})
    _, _, report = run.step(*start(run), as_table(rows))
    writer = report.roles["writer"]
    assert writer["rows"] == writer["trained_rows"] == 3
    assert (writer["tokens"], writer["advantage_mean"]) == (6, 1.5)


def test_rows_that_are_not_trained_on_are_reported_all_the_same():
    rows = [row("writer", [0, 3, 1], 1.0), dataclasses.replace(row("writer", [2], -0.5), truncated=True)]
    run = learner(mask_truncated=True, interventions=InterventionConfig(freeze=("judge",)))
    _, _, report = run.step(*start(run), as_table([*rows, ROWS[2]]))
    writer, judge = report.roles["writer"], report.roles["judge"]
    assert (writer["rows"], writer["trained_rows"], writer["truncated_share"]) == (2, 1, 0.5)
    assert (writer["length"], writer["tokens"]) == (2, 3)
    assert (judge["rows"], judge["trained_rows"], judge["advantage_mean"]) == (1, 0, pytest.approx(0.7))


def test_multiplicity_is_that_of_the_step_however_it_is_cut_into_mini_batches():
    slots = [dataclasses.replace(row("writer", [1, 2], 1.0), slot=n % 3) for n in range(12)]
    mixing = InterventionConfig(Mixing(normalise_multiplicity=True))
    run = learner(interventions=mixing, updates="fixed", updates_fixed=4)
    _, _, report = run.step(*start(run), as_table(slots))
    assert report.gradients["p0"]["weight"]["writer"] == pytest.approx(1 / 3)


def test_multiplicity_is_a_mean_over_calls_that_come_in_unequal_numbers():
    rows = [dataclasses.replace(row("writer", [1, 2], 1.0), slot=slot) for slot in (0, 0, 0, 1)]
    run = learner(interventions=InterventionConfig(Mixing(normalise_multiplicity=True)))
    _, _, report = run.step(*start(run), as_table(rows))
    assert report.gradients["p0"]["weight"]["writer"] == pytest.approx(3 / 4)  # one and a third at a time


def test_norms_are_means_over_the_updates_of_a_step():
    gentle = OptimiserConfig(
        "sgd", ScheduleConfig(1e-6), b1=0.0, weight_decay=0.0
    )  # the second is from the same weights
    rows = [ROWS[0], dataclasses.replace(ROWS[0], advantage=3 * ROWS[0].advantage)]
    run = learner({"writer": "p0"}, updates="fixed", updates_fixed=2, optimiser=gentle)
    _, _, both = run.step(*start(run, ("p0",)), as_table(rows))
    once = learner({"writer": "p0"}, optimiser=gentle)
    _, _, one = once.step(*start(once, ("p0",)), as_table(rows[:1]))
    assert both.policies["p0"]["updates"] == 2
    for name in ("grad_norm", "update_norm"):
        assert both.policies["p0"][name] == pytest.approx(2 * one.policies["p0"][name], rel=1e-3), name


def test_sgd_has_the_momentum_that_it_is_given():
    after = {}
    for momentum in (0.0, 0.5):
        run = learner({"writer": "p0"}, optimiser=dataclasses.replace(sgd(0.1), b1=momentum))
        trees, states, _ = run.step(*start(run, ("p0",)), as_table([ROWS[0]]))
        first = np.array(trees["p0"]["w"])
        trees, _, _ = run.step(trees, states, as_table([ROWS[0]]), step=1)
        after[momentum] = first, trees["p0"]["w"] - first
    close_trees(after[0.5][0], after[0.0][0])
    close_trees(after[0.5][1], after[0.0][1] + 0.5 * after[0.0][0])


def test_multiplicity_is_that_of_the_slots_that_a_policy_has():
    rows = [dataclasses.replace(row("writer", [1, 2], 1.0), policy="p1", slot=1 + n % 2) for n in range(8)]
    run = learner(
        {"writer": "p1", "writer/0": "p0"},
        interventions=InterventionConfig(Mixing(normalise_multiplicity=True)),
    )
    _, _, report = run.step(*start(run), as_table(rows))
    assert report.gradients["p1"]["weight"]["writer"] == pytest.approx(1 / 2)


def test_damping_starts_at_the_first_finite_gradient():
    broken = dataclasses.replace(ROWS[0], advantage=float("nan"))
    damped = InterventionConfig(Mixing(damping=0.3, damping_window=4))
    run = learner({"writer": "p0"}, interventions=damped, updates="fixed", updates_fixed=2)
    shuffled = (
        Learner(run.network, dataclasses.replace(run.config, seed=n), {"writer": "p0"}) for n in range(64)
    )
    both = next(
        made for made in shuffled if mini_batches_of(made.config, "p0", 2, 0)[0].tolist() == [0]
    )  # the broken row first
    _, states, _ = both.step(*start(both, ("p0",)), as_table([broken, ROWS[1]]))
    alone = learner({"writer": "p0"}, interventions=damped)
    _, wanted, _ = alone.step(*start(alone, ("p0",)), as_table([ROWS[1]]))
    assert states["p0"].skipped == 1
    close_trees(states["p0"].damping, wanted["p0"].damping)


@pytest.mark.parametrize(
    "refused",
    [
        lambda: LossConfig(aggregation="sequence_mean_token_sum_norm", max_length=0),
        lambda: LossConfig(clip_low=float("nan")),
        lambda: BatchConfig(token_budget=0),
        lambda: LearnerConfig(logprob_chunk=0),
        lambda: LearnerConfig(gap_tolerance=-1),
        lambda: ScheduleConfig(learning_rate=-1),
        lambda: OptimiserConfig(b1=2),
        lambda: OptimiserConfig(eps=0),
        lambda: AdvantageConfig(eps=-1),
        lambda: AdvantageConfig(eps=float("inf")),
        lambda: LossConfig(entropy_coef=float("nan")),
        lambda: LearnerConfig(learning_rates={"p0": -1.0}),
        lambda: InterventionConfig(kl_coef={"generator": float("inf")}),
        lambda: AdvantageConfig(overlong=(4, 9)),
        lambda: InterventionConfig(kl_coef={"generator": -1}),
        lambda: InterventionConfig(role_clip={"generator": 0}),
        lambda: InterventionConfig(freeze=("generator",), alternate=("generator", "judge")),
    ],
)
def test_settings_that_no_run_can_mean_are_refused_when_they_are_made(refused):
    with pytest.raises(ValueError, match=r"must|choose"):
        refused()


@pytest.mark.parametrize("name", ["std", "singleton", "agent_mean", "agent_scale", "estimator"])
def test_an_option_of_advantages_that_does_not_exist_is_refused_when_it_is_made(name):
    with pytest.raises(ValueError, match=f"{name} (is 'robust'; it must be|'robust' is unknown; use one of)"):
        AdvantageConfig(**{name: "robust"})


def test_where_xla_fails_on_a_gpu_the_way_out_is_named(monkeypatch):
    def fails(*_, **__):
        raise IndexError("absl::container_internal::raw_hash_map<>::at")

    monkeypatch.setattr(update_programs, "accumulate", fails)
    run = learner()
    with pytest.raises(IndexError, match="raw_hash_map") as error:
        run.step(*start(run), as_table(ROWS))
    assert "policies.attention=blocks" in error.value.__notes__[0]
