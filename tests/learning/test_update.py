"""The update equals the plain float32 gradient however the batch is cut, and policies stay apart."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import ROUNDINGS, close, close_trees
from learning_rows import TINY, as_table, make_rows, plain_loss
from traced import all_highest

from marl_jax.learning import update_programs
from marl_jax.learning.batching import BatchConfig, make_batches
from marl_jax.learning.by_role.interventions import InterventionConfig, Mixing, PerRole
from marl_jax.learning.learner_config import LearnerConfig, StepSettings
from marl_jax.learning.losses import LossConfig
from marl_jax.learning.network import Qwen3
from marl_jax.learning.optimiser import OptimiserConfig, ScheduleConfig, transformation
from marl_jax.learning.packs import make_packs
from marl_jax.learning.update import Learner
from marl_jax.models import qwen3
from marl_jax.models.lora import init_lora, merge

BUCKETS = (8, 16, 32, 64)
# One step of plain descent, so long that the old weights do not round it: it is the gradient itself.
RATE = 2.0**14
DESCENT = OptimiserConfig("sgd", ScheduleConfig(RATE), b1=0.0, weight_decay=0.0, grad_clip=None)
PARAMS = qwen3.init(0, TINY)
SHARED, ISOLATED = {"generator": "p0", "judge": "p0"}, {"generator": "p0", "judge": "p1"}
SAMPLER_RATIO = {"old_logprobs": "sampler"}


def config(**changes):
    plain = {"optimiser": DESCENT, "batch": BatchConfig(BUCKETS, 256), "logprob_chunk": 64}
    return LearnerConfig(**plain | changes)


def gradient_of(rows, roles, network=None, trees=None, frozen=None, mesh=None, **changes):
    """{policy: gradient} and the report of one update."""
    learner = Learner(network or Qwen3(TINY), config(**changes), roles, mesh=mesh)
    trees = trees or {policy: qwen3.init(i, TINY) for i, policy in enumerate(sorted(set(roles.values())))}
    before = jax.tree.map(np.asarray, trees)
    trees = jax.tree.map(jnp.copy, trees)
    after, _, report = learner.step(
        trees, learner.init(trees), as_table(rows), bases=dict.fromkeys(trees, frozen)
    )
    return jax.tree.map(lambda b, a: (b - np.asarray(a)) / RATE, before, after), report


def two_roles(policies=("p0", "p0")):
    """Rows of two roles, each sampled at a temperature of its own."""
    rng = np.random.default_rng(3)
    generator = make_rows(rng, policy=policies[0], slots=2)
    judge = make_rows(rng, role="judge", policy=policies[1], samples=4)
    return generator + [dataclasses.replace(row, temperature=0.7) for row in judge]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch": BatchConfig(BUCKETS, 32, share_prompts=False)},
        {"logprob_chunk": 1, "gradients": "off"},
        pytest.param({"network": Qwen3(TINY, remat="layer")}, marks=pytest.mark.long),
        pytest.param({"batch": BatchConfig(BUCKETS, 256, slice_tokens=64)}, marks=pytest.mark.long),
        pytest.param(
            {"batch": BatchConfig(BUCKETS, 256, share_prompts=False, slice_tokens=1)}, marks=pytest.mark.long
        ),
    ],
    ids=["shared prompts", "packed", "one token a chunk", "remat", "short packs", "a row each"],
)
def test_every_way_to_cut_the_batch_gives_the_plain_gradient(changes):
    rows = two_roles()
    value, want = plain_loss(PARAMS, rows)
    got, report = gradient_of(rows, SHARED, **SAMPLER_RATIO, **changes)
    close_trees(got["p0"], want)
    size, _ = plain_loss(PARAMS, rows, weights=np.sign([row.advantage for row in rows]))
    close(
        report.policies["p0"]["loss"], value, of=abs(size)
    )  # with every advantage positive, no term cancels


@pytest.mark.parametrize(
    "loss",
    [
        LossConfig(aggregation="token_mean", dual_clip=3.0),
        pytest.param(LossConfig("gspo", clip_low=0.1, clip_high=0.1), marks=pytest.mark.long),
        pytest.param(
            LossConfig("cispo", "sequence_mean_token_sum_norm", max_length=16, entropy_coef=0.05),
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda loss: loss.kind,
)
def test_losses_survive_packing_and_micro_batches(loss):
    rows, options = two_roles(), dataclasses.asdict(loss)
    del options["is_cap"]
    _, want = plain_loss(PARAMS, rows, **options)
    slices = BatchConfig(BUCKETS, 256, slice_tokens=1)
    got, _ = gradient_of(rows, SHARED, loss=loss, batch=slices, **SAMPLER_RATIO)
    close_trees(got["p0"], want)


@pytest.mark.parametrize("kind", ["ppo", pytest.param("gspo", marks=pytest.mark.long)])
@pytest.mark.parametrize("share", [True, False], ids=["behind their prompts", "each with its prompt"])
@pytest.mark.parametrize("streams", [1, 2])
def test_packs_of_a_micro_batch_add_up_to_the_plain_gradient(kind, share, streams):
    rows = make_rows(np.random.default_rng(4), prompts=6, samples=4, prompt=(20, 40), lengths=(1, 60))
    batch = BatchConfig((128,), 1024, share_prompts=share, slice_tokens=128, streams=streams)
    packs = make_packs(as_table(rows), ["generator"] * len(rows), batch, streams=streams)
    assert max(b.size // b.arrays.tokens.shape[1] for b in packs) >= 2 and len(packs) >= streams
    loss = LossConfig(kind, clip_low=0.1, clip_high=0.1)
    _, want = plain_loss(PARAMS, rows, kind=kind, clip_low=0.1, clip_high=0.1)
    got, _ = gradient_of(rows, {"generator": "p0"}, loss=loss, batch=batch, **SAMPLER_RATIO)
    close_trees(got["p0"], want)


@pytest.mark.parametrize("layout", ["trees", "plain rows", "packs"])
def test_every_product_of_the_update_asks_for_full_precision(layout):
    rows = make_rows(np.random.default_rng(4), prompts=2, samples=4)
    learner = Learner(Qwen3(TINY), config(), {"generator": "p0"})
    make, share = make_packs if layout == "packs" else make_batches, layout == "trees"
    batch = make(as_table(rows), ["generator"] * len(rows), BatchConfig(BUCKETS, 256, share_prompts=share))[0]
    assert bool(batch.arrays.prefix) == share
    carry = learner._zeros(PARAMS, 1)
    run = lambda carry, tree: update_programs.accumulate(
        learner._settings["p0"], carry, tree, None, batch.arrays, 0, anchored=True, on_policy=True
    )
    assert all_highest(run, carry, PARAMS, more_than=20)
    with (
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
    ):  # a caller's, of its own code
        jax.eval_shape(run, carry, PARAMS)


def test_every_product_of_the_interventions_asks_for_full_precision():
    mixing = Mixing(True, "cap", project_conflicts=True, damping=0.1)
    roles = PerRole(jnp.ones(2), jnp.ones(2, bool), jnp.ones(2), jnp.eye(2))
    optimiser = OptimiserConfig()
    carry = jax.tree.map(lambda x: jnp.zeros((2, *x.shape)), PARAMS), jnp.ones(())
    state, damping = transformation(optimiser).init(PARAMS), PARAMS
    given = (PARAMS, state, damping, carry, 0.1, roles)
    run = functools.partial(update_programs.apply, settings=StepSettings(optimiser, mixing))
    assert all_highest(run, *given, more_than=20)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(run, *given)


def test_no_rows_have_no_log_probs():
    assert Learner(Qwen3(TINY), config(), SHARED).logprobs(PARAMS, as_table([])) == []


def test_on_policy_the_ratio_is_one_and_the_sampler_weight_is_applied():
    rows = two_roles()
    logprobs = Learner(Qwen3(TINY), config(), SHARED).logprobs(PARAMS, as_table(rows))
    shifted = [dataclasses.replace(r, logprobs=tuple(x - 0.3)) for r, x in zip(rows, logprobs)]
    got, report = gradient_of(shifted, SHARED)
    _, want = plain_loss(PARAMS, rows, on_policy=True)
    close_trees(got["p0"], jax.tree.map(lambda g: np.exp(0.3) * g, want))
    assert report.policies["p0"]["ratio"] == 1.0
    assert report.roles["judge"]["gap_max"] == pytest.approx(0.3, abs=1e-5)
    assert len(report.warnings) == 2 and "'judge'" in report.warnings[1]


def test_clips_are_counted_role_by_role():
    rows = two_roles()
    logprobs = Learner(Qwen3(TINY), config(), SHARED).logprobs(PARAMS, as_table(rows))
    apart = {
        "generator": 0.0,
        "judge": -1.0,
    }  # the judge's ratios are e: above the clip where the advantage is
    shifted = [
        dataclasses.replace(row, logprobs=tuple(own + apart[row.role]), advantage=1.0)
        for row, own in zip(rows, logprobs)
    ]
    _, report = gradient_of(shifted, SHARED, **SAMPLER_RATIO)
    assert {role: stats["clip_fraction_high"] for role, stats in report.roles.items()} == {
        "generator": 0.0,
        "judge": 1.0,
    }
    assert report.roles["judge"]["clip_fraction_low"] == 0.0
    assert 0 < report.policies["p0"]["clip_fraction_high"] < 1


@pytest.mark.parametrize("anchor", [{}, {"judge": 0.5}], ids=["plain", "anchored"])
def test_without_diagnostics_roles_share_micro_batches_and_nothing_else_changes(anchor):
    rows = two_roles()
    after, reports = [], []
    for level in ("off", "roles"):
        anchored = InterventionConfig(kl_coef=anchor)
        batch = BatchConfig(BUCKETS, 256, streams=1)
        made = Learner(Qwen3(TINY), config(gradients=level, interventions=anchored, batch=batch), SHARED)
        trees = {"p0": jax.tree.map(jnp.copy, PARAMS)}
        tree, _, report = made.step(
            trees, made.init(trees), as_table(rows), references={"p0": qwen3.init(2, TINY)}
        )
        after.append(jax.tree.map(lambda b, a: (np.asarray(b) - np.asarray(a)) / RATE, PARAMS, tree["p0"]))
        reports.append(report)
        mixed = [len({rows[p.row].role for p in batch.placements}) for batch in made._batches(as_table(rows))]
        assert (max(mixed) == 2) == (level == "off")
    close_trees(after[0], after[1])
    assert reports[0].roles.keys() == reports[1].roles.keys()
    for role, stats in reports[0].roles.items():
        assert stats == pytest.approx(reports[1].roles[role], rel=1e-4, abs=1e-6)
    assert reports[0].gradients == {"p0": {}} and reports[1].gradients["p0"]


def test_isolated_policies_never_see_each_others_rows():
    rows = two_roles(("p0", "p1"))
    roles = ISOLATED
    both, report = gradient_of(rows, roles)
    alone, _ = gradient_of([r for r in rows if r.role == "generator"], roles)
    jax.tree.map(np.testing.assert_array_equal, both["p0"], alone["p0"])
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(alone["p1"]))
    assert report.cosines == {("generator", "judge"): None}


def test_a_shared_policy_gets_the_gradient_of_the_merged_batch():
    rows = two_roles()
    as_roles, report = gradient_of(rows, SHARED)
    merged = [dataclasses.replace(row, role="generator") for row in rows]
    as_one, _ = gradient_of(merged, {"generator": "p0"})
    close_trees(as_roles["p0"], as_one["p0"])
    assert report.cosines[("generator", "judge")] is not None


def test_rows_that_are_only_described_may_be_greedy():
    frozen = InterventionConfig(freeze=("judge",))
    rows = two_roles()
    greedy = [dataclasses.replace(row, temperature=0.0) if row.role == "judge" else row for row in rows]
    changed, report = gradient_of(greedy, SHARED, interventions=frozen)
    expected, _ = gradient_of(rows, SHARED, interventions=frozen)
    jax.tree.map(np.testing.assert_array_equal, changed, expected)
    assert report.roles["judge"]["rows"] == sum(row.role == "judge" for row in rows)
    with pytest.raises(ValueError, match=r"a row of role 'judge' has temperature 0\.0"):
        gradient_of(greedy, SHARED)


def test_the_settings_of_an_objective_are_those_of_its_surrogate():
    learner = config(loss=LossConfig("sft"))
    settings = update_programs.Settings.of(Qwen3(TINY), learner)
    assert settings.loss.kind == "pg" and not settings.sampler_weights and learner.loss.corrects_sampler
    assert update_programs.Settings.of(Qwen3(TINY), config()).sampler_weights


def test_partial_sharing_lies_between_exactly():
    rng = np.random.default_rng(0)
    rows = [
        r for role, p in (("a", "p0"), ("b", "p0"), ("c", "p1")) for r in make_rows(rng, role=role, policy=p)
    ]
    partial, report = gradient_of(rows, {"a": "p0", "b": "p0", "c": "p1"})
    shared, _ = gradient_of([r for r in rows if r.policy == "p0"], {"a": "p0", "b": "p0"})
    jax.tree.map(np.testing.assert_array_equal, partial["p0"], shared["p0"])
    assert [pair for pair, cosine in report.cosines.items() if cosine is None] == [("a", "c"), ("b", "c")]


@pytest.mark.parametrize("level", ["roles", "slots"])
def test_the_gram_matrix_is_that_of_explicit_role_gradients(level):
    rows = two_roles()
    _, report = gradient_of(rows, SHARED, gradients=level, **SAMPLER_RATIO)

    def explicit(belongs):
        tree = plain_loss(PARAMS, rows, weights=[belongs(r) for r in rows])[1]
        return np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)])

    norm = np.linalg.norm
    g, j = explicit(lambda r: r.role == "generator"), explicit(lambda r: r.role == "judge")
    found = report.gradients["p0"]
    assert found["norm"] == pytest.approx({"generator": norm(g), "judge": norm(j)}, rel=ROUNDINGS)
    assert found["share"]["judge"] == pytest.approx(norm(j) / (norm(g) + norm(j)), rel=ROUNDINGS)
    assert found["cosine"][("generator", "judge")] == pytest.approx(g @ j / norm(g) / norm(j), abs=ROUNDINGS)
    assert found["coherence"] == pytest.approx(norm(g + j) / (norm(g) + norm(j)), rel=ROUNDINGS)
    assert report.policies["p0"]["grad_norm"] == pytest.approx(norm(g + j), rel=ROUNDINGS)
    if level == "slots":
        slots = [explicit(lambda r, slot=slot: r.role == "generator" and r.slot == slot) for slot in (0, 1)]
        mean = (norm(slots[0]) + norm(slots[1])) / 2
        amplification = found["slots"]["generator"]["amplification"]
        assert amplification == pytest.approx(norm(slots[0] + slots[1]) / mean, rel=ROUNDINGS)


def test_a_loss_that_is_written_anew_is_the_one_that_is_learned_by(monkeypatch):
    """As in a notebook: under the name of a program that was compiled."""
    norms = []
    for factor in (1.0, 100.0):
        monkeypatch.setitem(
            globals(), "mine", lambda logp, ratio, advantages, f=factor: -f * advantages * logp
        )
        _, report = gradient_of(two_roles(), SHARED, loss=LossConfig(f"{__name__}:mine"))
        norms.append(report.policies["p0"]["grad_norm"])
    assert norms[1] == pytest.approx(100 * norms[0], rel=ROUNDINGS)


def test_a_learner_stays_in_float32_whatever_jax_is_set_to():
    fresh = init_lora(1, TINY, rank=2, num_adapters=1)
    with jax.enable_x64(True):
        learner = Learner(Qwen3(TINY), config(optimiser=OptimiserConfig("sgd")), SHARED)
        trees = {"p0": jax.tree.map(jnp.copy, PARAMS)}
        state = learner.init(trees)
        for _ in range(2):
            trees, state, _ = learner.step(trees, state, as_table(two_roles()))
        wide = {leaf.dtype for leaf in jax.tree.leaves((trees, state["p0"].optimiser))} - {jnp.dtype("int32")}
        again = init_lora(1, TINY, rank=2, num_adapters=1)
    assert wide == {jnp.dtype("float32")}
    for one, other in zip(jax.tree.leaves(fresh), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)


def test_adapters_are_trained_on_a_frozen_base():
    rng, rows = np.random.default_rng(0), two_roles()
    fresh = jax.tree.map(lambda x: x[0], init_lora(1, TINY, rank=2, num_adapters=1))
    adapters = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.2, jnp.float32), fresh)
    _, want = plain_loss(
        adapters,
        rows,
        merge=lambda adapters: merge(PARAMS, adapters, 0.5),
    )
    got, _ = gradient_of(rows, SHARED, Qwen3(TINY, 0.5), {"p0": adapters}, PARAMS, **SAMPLER_RATIO)
    close_trees(got["p0"], want)


def test_an_anchor_pulls_a_role_to_its_reference():
    rows = as_table([dataclasses.replace(r, advantage=0.0) for r in two_roles(("p0", "p1"))])
    gentle = OptimiserConfig("sgd", ScheduleConfig(0.1), b1=0.0, weight_decay=0.0)
    anchored = config(interventions=InterventionConfig(kl_coef={"judge": 1.0}), optimiser=gentle)
    learner = Learner(Qwen3(TINY), anchored, ISOLATED)
    trees = {"p0": jax.tree.map(jnp.copy, PARAMS), "p1": qwen3.init(1, TINY)}
    reference, start = {"p1": qwen3.init(2, TINY)}, jax.tree.map(np.asarray, trees)
    with pytest.raises(ValueError, match="needs references"):
        learner.step(trees, learner.init(trees), rows)
    assert not any(
        leaf.is_deleted() for leaf in jax.tree.leaves(trees)
    )  # told before any policy is given away
    after, states, before = learner.step(trees, learner.init(trees), rows, references=reference)
    jax.tree.map(np.testing.assert_array_equal, after["p0"], start["p0"])
    _, _, report = learner.step(after, states, rows, references=reference)
    assert report.roles["judge"]["kl"] < before.roles["judge"]["kl"]
    assert "kl" not in report.roles["generator"]


def test_the_report_is_flat_numbers_for_a_metrics_file():
    _, report = gradient_of(two_roles(), SHARED, layer_norms=True)
    flat = json.loads(json.dumps(report.flat(), allow_nan=False))
    for key in (
        "policy/p0/update_norm",
        "role/judge/entropy",
        "gradient/p0/share/judge",
        "cosine/generator/judge",
    ):
        assert isinstance(flat[key], float), key
    assert flat["policy/p0/update_norm"] == pytest.approx(RATE * flat["policy/p0/grad_norm"], rel=1e-5)
    norms = [v for k, v in flat.items() if k.startswith("gradient/p0/layers/judge/")]
    assert np.linalg.norm(norms) == pytest.approx(flat["gradient/p0/norm/judge"], rel=ROUNDINGS)


@pytest.mark.long
def test_policies_of_different_models_learn_as_each_would_alone():
    """One in full, one by an adapter on a model of another shape and vocabulary: not a bit of one reaches the other."""
    other = dataclasses.replace(TINY, vocab_size=2 * TINY.vocab_size, hidden_size=2 * TINY.hidden_size)
    networks = {"p0": Qwen3(TINY), "p1": Qwen3(other, 0.5)}
    first = lambda leaf: leaf[0]
    trees = {"p0": PARAMS, "p1": jax.tree.map(first, init_lora(1, other, 2, 1))}
    frozen = {"p1": qwen3.init(2, other)}
    references = {"p0": PARAMS, "p1": jax.tree.map(jnp.zeros_like, trees["p1"])}
    rows = two_roles(("p0", "p1"))

    def learned(policies):
        roles = {role: policy for role, policy in ISOLATED.items() if policy in policies}
        anchored = config(interventions=InterventionConfig(kl_coef=dict.fromkeys(roles, 0.1)))
        learner = Learner({name: networks[name] for name in policies}, anchored, roles)
        mine = {name: jax.tree.map(jnp.copy, trees[name]) for name in policies}
        table = as_table([row for row in rows if row.policy in policies])
        after, _, report = learner.step(mine, learner.init(mine), table, bases=frozen, references=references)
        return jax.tree.map(np.asarray, after), report

    together, both = learned(("p0", "p1"))
    for policy, role in (("p0", "generator"), ("p1", "judge")):
        alone, report = learned((policy,))
        jax.tree.map(np.testing.assert_array_equal, together[policy], alone[policy])
        assert both.policies[policy] == report.policies[policy] and both.roles[role] == report.roles[role]
        assert both.policies[policy]["update_norm"] > 0
    assert both.cosines["generator", "judge"] is None  # there is nothing to compare across policies
