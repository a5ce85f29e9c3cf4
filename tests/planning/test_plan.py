"""What a run needs, counted without compiling: beside XLA's own analysis of the compiled programs, and by hand."""

import dataclasses
import json
import math
import re
import resource
import subprocess
import sys

import jax
import numpy as np
import pytest
from pace import slowness
from plan_kit import engine_of, fitting, of_all, plan_of

from marl_jax import fields
from marl_jax.commands import cli
from marl_jax.config.run_config import load_config
from marl_jax.learning.batching import make_batches
from marl_jax.models import ModelConfig
from marl_jax.models.decode import cache_bytes
from marl_jax.models.lora import init_lora
from marl_jax.models.qwen3 import UNROLLED
from marl_jax.models.weight_table import abstract, num_parameters
from marl_jax.planning import account, costs
from marl_jax.planning.devices import BANDWIDTH, COMPUTE, KINDS, Device, host
from marl_jax.planning.memory import count_units, room
from marl_jax.planning.plan import Plan, PlanError, demand_of, find_models
from marl_jax.planning.workload import Shape, all_shapes
from marl_jax.policies import decode_groups
from marl_jax.run_folder.folder import FolderError
from marl_jax.runs.loading.play import settled_shapes
from marl_jax.sampling.shapes import EngineSettings
from marl_jax.table import Table
from marl_jax.terminal.page import plan_page

MODEL = ModelConfig(
    vocab_size=3000,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)
HERE = Device("test", "cpu", 8 << 30, bandwidth=1e9, bfloat16=1e10, float32=1e10)
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # same buffers


def config(cell: str = "voting-shared-xs-math", **overrides: str):
    file = "qwen3" if cell.split("-")[2].endswith("b") else "micro"
    return load_config(f"configs/{file}.py:{cell}", [(k.replace("__", "."), v) for k, v in overrides.items()])


def with_memory(count: int) -> Device:
    return dataclasses.replace(HERE, memory=count)


def size(plan: Plan, *names: str, phase: str | None = None) -> int:
    found = [p for p in plan.parts if p.name in names and p.phase in ("always", phase or p.phase)]
    assert {p.name for p in found} == set(names)
    return sum(p.bytes for p in found)


def compiled(run, model: ModelConfig, plan: Plan, name: str) -> jax.stages.Compiled:
    """A program of the plan as `experiments.plan --compile` compiles it."""
    return account.lowered(run, model, demand_of(run), plan, "p0")[name].compile(QUICK)


def needed(program: jax.stages.Compiled) -> int:
    return account.needed(program.memory_analysis())


def in_streams(plan, program: jax.stages.Compiled) -> int:
    """What the two streams of a CPU take that run a program at the same time, with the same weights."""
    weights = size(plan, "trained weights (float32)")
    return weights + 2 * (needed(program) - weights)


# ---------------------------------------------------------------- beside XLA's own analysis


@pytest.mark.long
@pytest.mark.parametrize("layers", [4, 9], ids=["unrolled", "a loop"])
def test_the_gradient_of_trees_takes_the_memory_and_the_operations_that_xla_counts(layers):
    """Trees are what accelerators learn from; XLA counts their program here."""
    model = dataclasses.replace(MODEL, vocab_size=250, num_hidden_layers=layers)
    batch = {"learner__batch__token_budget": "4096", "learner__batch__buckets": "128"}
    run = config(**batch, engine__max_prompt="80", sampling__max_new_tokens="48")
    plan, sizes = plan_of(run, model, HERE), costs.Model(model)
    taken = lambda shape: costs.kept(sizes, shape) + costs.working(sizes, shape, run.learner.logprob_chunk)
    shape = max(all_shapes(run.learner.batch, 80, 48, "gpu"), key=taken)
    assert shape.prefix  # scores of branches behind a prompt are what takes most
    program = compiled(run, model, dataclasses.replace(plan, largest=shape), "gradient")
    ours = size(plan, "trained weights (float32)", "gradient trees", phase="gradient") + 2 * taken(shape)
    assert ours == pytest.approx(in_streams(plan, program), rel=0.15)
    # It counts the body of a loop once.
    once = dataclasses.replace(model, num_hidden_layers=1) if layers > UNROLLED else model
    counted = costs.update_operations(costs.Model(once), shape)
    assert counted == pytest.approx(program.cost_analysis()["flops"], rel=0.15)


@pytest.mark.long
@pytest.mark.parametrize(
    ("layers", "slice_tokens", "longest"),
    [(4, "1024", "80"), (9, "1024", "80"), (4, "2048", "1800")],
    ids=["unrolled", "a loop", "scores in parts"],
)
def test_the_gradient_of_packs_takes_the_memory_and_the_operations_that_xla_counts(
    layers, slice_tokens, longest
):
    model = dataclasses.replace(MODEL, vocab_size=250, num_hidden_layers=layers)
    batch = {"learner__batch__token_budget": "4096", "learner__batch__slice_tokens": slice_tokens}
    run = config(
        **batch, learner__batch__buckets="2048", engine__max_prompt=longest, sampling__max_new_tokens="48"
    )
    plan = plan_of(run, model, HERE)
    assert plan.largest.seen
    program = compiled(run, model, plan, "gradient")
    ours = (
        "trained weights (float32)",
        "gradient trees",
        "activations",
        "working memory of the backward pass",
    )
    assert size(plan, *ours, phase="gradient") == pytest.approx(in_streams(plan, program), rel=0.15)
    assert size(plan, *ours[2:]) > 0.8 * in_streams(plan, program)  # not swamped by weights
    if slice_tokens == "2048":  # XLA counts the body of a loop over parts once
        return
    # And that of a loop over layers.
    once = dataclasses.replace(model, num_hidden_layers=1) if layers > UNROLLED else model
    counted = costs.update_operations(costs.Model(once), plan.largest)
    assert counted == pytest.approx(program.cost_analysis()["flops"], rel=0.15)


@pytest.mark.long
def test_the_gradient_under_a_large_vocabulary_takes_the_memory_that_xla_counts():
    model = dataclasses.replace(MODEL, vocab_size=6000, num_hidden_layers=9)
    batch = {"learner__batch__token_budget": "4096", "learner__batch__share_prompts": "false",
             "learner__batch__slice_tokens": "0"}  # fmt: skip
    run = config(**batch, policies__remat="layer", learner__batch__buckets="64", engine__max_prompt="8",
                 sampling__max_new_tokens="56")  # fmt: skip
    plan = plan_of(run, model, HERE)
    assert plan.largest.width == 4096
    ours = (
        "trained weights (float32)",
        "gradient trees",
        "activations",
        "working memory of the backward pass",
    )
    program = compiled(run, model, plan, "gradient")
    assert size(plan, *ours, phase="gradient") == pytest.approx(in_streams(plan, program), rel=0.15)
    logits = 2 * 2 * plan.largest.tokens * model.vocab_size * 4
    assert size(plan, "working memory of the backward pass") == pytest.approx(logits, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize(
    ("train", "prompt", "lanes"),
    [("full", 32, 512), ("full", 256, 8), ("full", 1024, 8), ("lora", 256, 8), ("lora", 1024, 8)],
)
def test_sampling_takes_the_memory_that_xla_counts(train, prompt, lanes):
    """Of all banks that decode, or of one that prefills meanwhile; and an array of a cache that is resized."""
    chosen = {"policies__train": train, "policies__lora_rank": "8", "learner__batch__buckets": "2048"}
    length = {"engine__max_prompt": str(prompt), "sampling__max_new_tokens": "32"}
    run = config("single-shared-xs-math", **chosen, **length, engine__lanes=str(lanes))
    model = dataclasses.replace(MODEL, num_hidden_layers=1 if lanes > 64 else 2)
    plan = plan_of(run, model, HERE)
    served = size(plan, "weights served to the sampler") if train == "lora" else 0
    cached = size(plan, "caches of the lanes"), size(plan, "caches of prompts")
    weights = size(plan, "base weights") + served
    banks = engine_of(plan).banks
    decode = needed(compiled(run, model, plan, "decode")) - weights - cached[0] // banks
    prefill = needed(compiled(run, model, plan, "prefill")) - weights - cached[1]
    resized = cached[0] // banks // (2 * model.num_hidden_layers)
    counted = weights + sum(cached) + max(banks * decode, (banks - 1) * decode + prefill) + resized
    working = size(plan, "working memory of sampling")
    assert weights + sum(cached) + working == pytest.approx(counted, rel=0.15)
    assert working > 0.3 * counted and (banks == 2) == (lanes == 512)


def test_an_average_of_gradients_is_kept_for_the_policies_that_are_damped():
    mixing = "learner__interventions__mixing__"
    states = {}
    for named in (None, "generator", "generator,aggregator"):
        chosen = {} if named is None else {f"{mixing}damping": "0.1", f"{mixing}roles": named}
        plan = plan_of(config("voting-isolated-xs-math", **chosen), MODEL, HERE)
        states[named] = size(plan, "optimiser states")
    of_one = 4 * num_parameters(MODEL)
    assert states["generator"] - states[None] == of_one
    assert states["generator,aggregator"] - states[None] == 2 * of_one


@pytest.mark.parametrize("balance", ["off", "equalise"])
def test_the_optimiser_takes_the_memory_that_xla_counts(balance):
    run = config(learner__interventions__mixing__balance=balance)
    plan = plan_of(run, MODEL, HERE)
    program = compiled(run, MODEL, plan, "optimiser")
    names = (
        "trained weights (float32)",
        "optimiser states",
        "gradient trees",
        "working memory of the optimiser",
    )
    assert size(plan, *names, phase="optimiser") == pytest.approx(needed(program), rel=0.15)


# ---------------------------------------------------------------- what is counted


def test_the_weights_of_a_published_scale():
    plan = plan_of(config("voting-isolated-0.6b-math"), ModelConfig.preset("0.6b"), KINDS[1])
    weights = 28 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128)
    weights += 151936 * 1024 + 1024
    assert size(plan, "base weights") == 2 * weights
    adapters = jax.eval_shape(lambda: init_lora(0, ModelConfig.preset("0.6b"), 64, 2))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(adapters))
    assert size(plan, "adapters (float32)") == 4 * numbers
    assert size(plan, "weights served to the sampler") == 2 * numbers
    assert size(plan, "optimiser states") == pytest.approx(8 * numbers, abs=16)


@pytest.mark.parametrize(
    ("cell", "level", "units"),
    [
        ("voting-shared-xs-math", "off", 1),
        ("voting-shared-xs-math", "roles", 2),
        ("voting-shared-xs-math", "slots", 4),
        ("voting-isolated-xs-math", "roles", 1),
        ("voting-isolated-xs-math", "slots", 3),
    ],
)
def test_every_tracked_role_or_slot_has_a_gradient_tree(cell, level, units):
    run = config(cell, learner__gradients=level)
    plan = plan_of(run, MODEL, HERE)
    tree = 4 * sum(leaf.size for leaf in jax.tree.leaves(abstract(MODEL)))
    assert size(plan, "gradient trees", phase="optimiser") == units * tree
    # Two streams of micro-batches add up their own, and their sum is taken. Of isolated policies the aggregator's needs
    # most, for its prompts are long; it has one part.
    apart = 1 if "isolated" in cell else units
    assert size(plan, "gradient trees", phase="gradient") == 2 * apart * tree
    assert count_units(run, demand_of(run), "p0") == units


def test_fully_trained_policies_have_an_engine_each_and_adapters_share_one():
    lanes = {"engine__lanes": "64"}
    full = plan_of(config("voting-isolated-xs-math", **lanes), MODEL, HERE)
    lora = plan_of(config("voting-isolated-xs-math", policies__train="lora", **lanes), MODEL, HERE)
    shared = plan_of(config("voting-shared-xs-math", **lanes), MODEL, HERE)
    assert (full.engines, lora.engines, shared.engines) == (2, 1, 1)
    assert size(full, "caches of the lanes") == 2 * size(lora, "caches of the lanes")
    assert size(full, "base weights") == size(shared, "base weights")  # kept once, as the reference
    assert size(full, "optimiser states") == pytest.approx(2 * size(shared, "optimiser states"), abs=16)


@pytest.mark.parametrize(
    ("workflow", "settings", "map_", "each"),
    [
        ("voting", {}, {"generator": "p0", "aggregator": "p0"}, 0),
        ("eval_opt", {}, {"generator": "p0", "evaluator": "p0"}, 2),
        ("eval_opt", {}, {"generator": "p0", "evaluator": "p1"}, 1),  # an engine each
        ("eval_opt", {"rounds": 1}, {"generator": "p0", "evaluator": "p0"}, 0),
        ("eval_opt", {"shared": True}, {"generator": "p0", "evaluator": "p0"}, 1),
        ("debate", {"agents": 4, "rounds": 3}, {"debater": "p0"}, 4),
    ],
)
def test_engines_have_room_for_the_histories_of_all_episodes_under_way(workflow, settings, map_, each):
    chosen = {
        "workflow__name": workflow,
        "workflow__settings": json.dumps(settings),
        "policies__map": json.dumps(map_),
        "engine__lanes": "8",
    }
    many = engine_of(plan_of(config(**chosen, data__problems="64"), MODEL, HERE))
    ahead = 2 * 8 * len(set(map_.values()))  # twice the lanes of all engines
    assert many.prefixes == 8 // 2 + each * ahead
    few = config(**chosen, data__problems="1", rollout__samples="2", evaluation__problems="3")
    assert engine_of(plan_of(few, MODEL, HERE)).prefixes == 8 // 2 + each * 3


def test_no_micro_batch_is_larger_than_the_largest():
    run = config(learner__batch__token_budget="2048", learner__batch__tree_limit="1024")
    sizes, chunk, most = costs.Model(MODEL), run.learner.logprob_chunk, 0
    shapes = list(all_shapes(run.learner.batch, run.engine.max_prompt, 64, "gpu"))
    bound = max(costs.kept(sizes, s) + costs.working(sizes, s, chunk) for s in shapes)
    rng = np.random.default_rng(0)
    for _ in range(20):
        rows = []
        for task in range(12):
            prompt = [task + 1] * int(rng.integers(1, run.engine.max_prompt + 1))
            for _ in range(8):
                new = int(rng.integers(1, 65))
                rows.append((prompt, [1] * new, [0.0] * new))
        prompts, tokens, logprobs = zip(*rows)
        names = {"role": ["generator"] * len(rows), "policy": ["p0"] * len(rows)}
        table = Table.make(**names, prompt=prompts, tokens=tokens, logprobs=logprobs)
        for batch in make_batches(table, names["role"], run.learner.batch):
            s = Shape.of(batch.arrays)
            most = max(most, costs.kept(sizes, s) + costs.working(sizes, s, chunk))
    assert 0.5 * bound < most <= bound


def test_recomputing_layers_and_a_smaller_budget_of_tokens_save_activations():
    def activations(**overrides):
        return size(plan_of(config(**overrides), ModelConfig.preset("s"), HERE), "activations")

    assert activations(policies__remat="layer") < activations(policies__remat="dots") < activations()
    assert activations(learner__batch__slice_tokens="512") < 0.75 * activations()


# ---------------------------------------------------------------- time


def test_time_is_the_slower_of_operations_and_bytes():
    device = Device("d", "gpu", 1 << 40, bandwidth=1e9, bfloat16=4e12, float32=1e12)
    assert device.seconds(1e12, 0, "float32") == pytest.approx(1 / COMPUTE)
    assert device.seconds(1e12, 0, "bfloat16") == pytest.approx(0.25 / COMPUTE)
    assert device.seconds(1e12, 1e10, "bfloat16") == pytest.approx(10 / BANDWIDTH)
    assert dataclasses.replace(device, float32=0.0).seconds(1, 1, "float32") is None


def test_decoding_is_counted_by_hand():
    run = config("single-shared-xs-math", engine__lanes="512")
    demand = demand_of(run, completion=0.25)  # 16 tokens each
    plan, call = plan_of(run, MODEL, HERE, demand), demand.calls[0]
    decode = next(work for work in plan.works if work.name == "decode")
    layer = 128 * (2 * 128 + 2 * 64 + 3 * 384)
    attended = len(call.prompt) + 16
    per_token = 2 * layer + 2 * 128 * 3000 + 4 * 128 * attended
    assert decode.operations == 512 * 16 * per_token
    cache = 512 * 16 * attended * 2 * 64 * 4
    weights = 2 * 16 * 4 * (layer + 3000 * 128 + 3 * 128 + 2 * 32)  # once a step in each of two banks
    assert decode.moved == cache + weights + 512 * 16 * 3 * 4 * 3000


def test_a_reference_pass_costs_only_where_a_role_is_anchored():
    def reference(run):
        return next(w.operations for w in plan_of(run, MODEL, HERE).works if w.name == "reference")

    assert reference(config()) == 0
    assert reference(config(learner__interventions__kl_coef='{"aggregator": 0.1}')) > 0
    phases = '[{"steps": 5}, {"steps": 5, "objective": "dpo"}]'
    assert reference(config(phases=phases)) == reference(config(learner__loss__kind="dpo")) > 0


# ---------------------------------------------------------------- refusals


def test_calls_that_do_not_train_take_no_time_of_the_update():
    def gradient(**changes):
        return next(
            w.operations for w in plan_of(config(**changes), MODEL, HERE).works if w.name == "gradient"
        )

    whole = gradient()
    for frozen in ("policies__frozen_roles", "learner__interventions__freeze"):
        roles = [gradient(**{frozen: role}) for role in ("generator", "aggregator")]
        assert min(roles) > 0 and sum(roles) == pytest.approx(whole, rel=0.2)
    assert gradient(policies__frozen_roles="generator/0") < 0.9 * whole


def test_a_run_that_cannot_fit_is_refused_in_one_line_with_the_way_out():
    run = config(engine__lanes="64", engine__budget_bytes=str(1 << 30))
    model = ModelConfig.preset("xs")
    needs = fitting(run, model, HERE).total
    fitting(run, model, with_memory(needs))
    with pytest.raises(PlanError) as refused:
        fitting(run, model, with_memory(needs - 1))
    message = str(refused.value)
    assert "\n" not in message
    assert "the biggest part is activations" in message and "--config.policies.remat=layer" in message
    changed = dataclasses.replace(run, policies=dataclasses.replace(run.policies, remat="layer"))
    fitting(changed, model, with_memory(needs - 1))


def test_the_plan_of_a_resumed_run_is_of_the_shapes_that_it_settled():
    run, model = config(), ModelConfig.preset("xs")
    settled = dataclasses.replace(engine_of(fitting(run, model, HERE)), widths=(8,))
    needs = fitting(run, model, HERE, settled)
    assert engine_of(needs) == settled and needs.total < fitting(run, model, HERE).total
    with pytest.raises(PlanError, match="the run needs"):
        fitting(run, model, with_memory(needs.total - 1), settled)


def test_lanes_that_do_not_fit_their_budget_are_refused():
    narrow = config(engine__lanes="64", engine__budget_bytes=str(1 << 20))
    with pytest.raises(
        PlanError, match=r"engines .* cannot be made .*: 64 lanes of 512 tokens need .* is 1\.0 MiB"
    ):
        fitting(narrow, ModelConfig.preset("xs"), HERE)
    with pytest.raises(PlanError, match="the model has 4096"):
        fitting(
            config(engine__max_prompt="5000", learner__batch__buckets="8192"),
            ModelConfig.preset("s"),
            HERE,
        )


@pytest.mark.parametrize("train", ["full", "lora"])
@pytest.mark.parametrize("lanes", [4096, 100_000_000])
def test_far_too_many_lanes_are_what_to_lower(train, lanes):
    run = config("voting-isolated-xs-math", engine__lanes=str(lanes), policies__train=train)
    with pytest.raises(
        PlanError, match=rf"permanent part is caches of the lanes.*: lower --config.engine.lanes \({lanes}\)"
    ):
        fitting(run, ModelConfig.preset("xs"), with_memory(1 << 30))


@pytest.mark.parametrize(
    "settings", [{"engine__lanes": "100000"}, {"policies__train": "lora", "policies__lora_rank": "1000000"}]
)
def test_the_refusal_names_the_total_of_the_table(settings):
    run, model = config("voting-isolated-s-math", **settings), ModelConfig.preset("s")
    for device in KINDS:
        plan = plan_of(run, model, device)
        text = plan_page(run, of_all(run, model), "here", [plan])
        (total,) = re.findall(r"^at the peak +(.+)$", text, re.MULTILINE)
        assert not plan.fits and f"the run needs {total} at its peak" in plan.trouble(run)


def test_too_high_a_rank_is_what_to_lower():
    run = config("voting-isolated-s-math", policies__train="lora", policies__lora_rank="1000000")
    plan = plan_of(run, ModelConfig.preset("s"), KINDS[0])
    assert "optimiser states (97" in plan.trouble(run)
    assert ": lower --config.policies.lora_rank (1000000), or --config.learner.opt" in plan.trouble(run)
    factored = config(
        "voting-isolated-s-math",
        policies__train="lora",
        policies__lora_rank="1000000",
        learner__optimiser__kind="adafactor",
    )
    assert "adafactor" not in plan_of(factored, ModelConfig.preset("s"), KINDS[0]).trouble(factored)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("sampling__top_k", "161", "sampling.top_k is 161, and the model has 160 tokens"),
        (
            "role_sampling__aggregator__stop_tokens",
            "[160]",
            "role_sampling.aggregator.stop_tokens holds 160, and",
        ),
    ],
)
def test_tokens_that_the_model_does_not_have_are_refused(name, text, line):
    model = dataclasses.replace(MODEL, vocab_size=160)
    with pytest.raises(PlanError, match=re.escape(line)):
        plan_of(config(**{name: text}), model, HERE)
    plan_of(config(sampling__top_k="160", sampling__stop_tokens="159"), model, HERE)


def test_engines_take_all_stop_tokens_of_a_role_and_the_end_of_its_turn():
    assert engine_of(plan_of(config(), MODEL, HERE)).stops == 8
    many = ",".join(map(str, range(20)))
    assert engine_of(plan_of(config(sampling__stop_tokens=many), MODEL, HERE)).stops == 21


@pytest.mark.parametrize("workflow", ["voting", "eval_opt", "orch_workers"])
def test_prompts_that_leave_no_room_for_a_question_are_refused(workflow):
    def check(length, **others):
        new = {"sampling__max_new_tokens": "8", "engine__max_prompt": str(length), **others}
        fitting(config(f"{workflow}-shared-xs-math", **new), ModelConfig.preset("xs"), HERE)

    with pytest.raises(
        PlanError, match=r"tokens before any question, and there is room for .* --config.engine.max_p"
    ):
        check(8)
    check(8, rollout__limits__overlong="truncate")
    check(120)
    with pytest.raises(PlanError, match=r"before any question, .* --config.rollout.limits.context"):
        check(120, rollout__limits__context="16")
    check(120, rollout__limits__context="120")


def test_a_mesh_cuts_weights_and_spreads_the_rest():
    cell, model = "voting-shared-4b-code", ModelConfig.preset("4b")
    one = plan_of(config(cell, policies__remat="layer", engine__lanes="8"), model, KINDS[2])
    mesh = {"mesh__data": "2", "mesh__model": "2"}
    four = plan_of(config(cell, policies__remat="layer", engine__lanes="8", **mesh), model, KINDS[2])
    # Norms are whole on each device.
    assert size(four, "base weights") == pytest.approx(size(one, "base weights") / 2, rel=1e-3)
    assert size(four, "caches of the lanes") == size(one, "caches of the lanes") // 4
    assert sum(four.seconds.values()) < 0.5 * sum(one.seconds.values())
    mesh["mesh__hosts"] = "2"  # each with a whole copy of the weights, and half of the problems
    hosts = plan_of(config(cell, policies__remat="layer", engine__lanes="8", **mesh), model, KINDS[2])
    assert size(hosts, "base weights") == size(four, "base weights")
    assert sum(hosts.seconds.values()) < 0.6 * sum(four.seconds.values())


def test_a_mesh_leaves_adapters_whole_and_cuts_only_what_it_divides():
    cell, model = "voting-isolated-4b-code", ModelConfig.preset("4b")
    parts = {
        devices: plan_of(config(cell, engine__lanes="8", mesh__model=str(devices)), model, KINDS[2])
        for devices in (1, 3, 4)
    }
    for name in ("adapters (float32)", "weights served to the sampler", "optimiser states", "gradient trees"):
        assert size(parts[4], name) == size(parts[1], name), name
    # 3 divides neither the heads nor the MLP nor the vocabulary.
    assert size(parts[3], "base weights") == size(parts[1], "base weights")


# ---------------------------------------------------------------- models and the command


def test_the_model_is_read_where_it_is_and_else_the_preset_of_its_scale(tmp_path):
    run = config("voting-shared-xs-math", policies__base=str(tmp_path))
    assert find_models(run) == (
        of_all(run, ModelConfig.preset("xs")),
        f"the preset 'xs' (there is no '{tmp_path}/config.json' yet)",
    )
    (tmp_path / "config.json").write_text(json.dumps(MODEL.to_hf()))
    assert find_models(run) == (of_all(run, MODEL), f"'{tmp_path}/config.json'")
    strange = dataclasses.replace(
        run, cell="mine", policies=dataclasses.replace(run.policies, base="nowhere")
    )
    with pytest.raises(PlanError, match=r"no model in 'nowhere'.*--config.policies.base"):
        find_models(strange)


@pytest.mark.parametrize(
    "cell",
    [
        "voting-isolated-0.6b-math",
        pytest.param("eval_opt-shared-1.7b-code", marks=pytest.mark.long),
        pytest.param("voting-shared-4b-math", marks=pytest.mark.long),
    ],
)
def test_engines_on_an_accelerator_take_what_an_update_leaves(cell):
    run, scale = config(cell), cell.split("-")[2]
    for device in KINDS:
        plan = plan_of(run, ModelConfig.preset(scale), device)
        # What engines take never drives the update out: a run that does not fit is refused by its engines.
        assert plan.fits or plan.refusal, (device.name, plan.total)
        if device.name in ("H100", "H200"):
            engine = engine_of(plan)
            cells = sum(map(math.prod, engine.caches))
            assert plan.fits and engine.lanes > 2 * cells // engine.context


def test_histories_leave_a_host_the_memory_of_its_update():
    """An update that needs more than the half which engines do not take: lanes stay, rows for histories go."""
    settings = {
        "workflow__name": "eval_opt",
        "policies__map": '{"generator": "p0", "evaluator": "p0"}',
        "learner__batch__token_budget": "16384",
    }
    run = config(**settings, engine__lanes="64", data__problems="64")
    roomy = plan_of(run, MODEL, HERE)
    assert roomy.fits and engine_of(roomy).prefixes == 32 + 2 * 128
    row = cache_bytes(MODEL, 1, engine_of(roomy).context)
    tight = plan_of(run, MODEL, dataclasses.replace(HERE, memory=roomy.total - 100 * row))
    assert tight.fits and 32 < engine_of(tight).prefixes < engine_of(roomy).prefixes - 90
    assert engine_of(tight).lanes == engine_of(roomy).lanes


def test_a_run_that_no_engine_would_save_is_told_what_is_too_big():
    run = config("voting-shared-4b-math", policies__train="full", learner__gradients="roles")
    plan = plan_of(run, ModelConfig.preset("4b"), next(kind for kind in KINDS if kind.name == "H100"))
    assert not plan.fits and plan.refusal
    assert re.search(r"biggest part is working memory of the optimiser.*train=lora", plan.trouble(run))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_engines_that_only_play_share_the_memory_that_is_free(platform):
    device = Device("test", platform, 1000)
    cells = ("voting-shared-xs-math", "voting-isolated-xs-math")
    engines = (decode_groups(config(cell).policies.specs) for cell in cells)
    one, two = (room(config(), device, 1000, (), (1, len(groups))) for groups in engines)
    assert (one.budget, two.budget) == ((500, 250) if platform == "cpu" else (900, 450))
    assert one.update == 0  # nothing is trained


@pytest.mark.long
def test_the_page_names_every_kind_of_device_and_what_dominates():
    run, model = config("voting-isolated-0.6b-math", policies__remat="layer"), ModelConfig.preset("0.6b")
    plans = [plan_of(run, model, device) for device in (HERE, *KINDS)]
    text = plan_page(run, of_all(run, model), "the preset '0.6b'", plans)
    assert max(map(len, text.splitlines())) <= 100
    for kind in ("A100", "H100", "H200", "TPU v5e", "TPU v6e"):
        assert kind in text
    assert "test does not fit" in text and "H200 fits: " in text and "Not counted:" in text
    assert "completions are 50% of max_new_tokens" in text


def test_the_page_says_that_times_are_of_one_draw():
    run = config(rollout__draws="4")
    page = " ".join(plan_page(run, of_all(run, MODEL), "here", [plan_of(run, MODEL, HERE)]).split())
    assert "times are for one draw of each problem, not for up to 4" in page


def test_the_processor_at_hand_is_measured():
    device = host()
    assert device.platform == "cpu" and device.memory > 0
    assert 1e8 < device.float32 < 1e14 and 1e7 < device.bandwidth < 1e13


@pytest.mark.long
def test_the_command_prints_the_plan():
    command = [sys.executable, "-m", "experiments.plan", "--config=configs/micro.py:voting-isolated-xs-math"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "time per step" in done.stdout and "CPU fits" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param("micro.py:eval_opt-isolated-m-math", marks=pytest.mark.long),
        "qwen3.py:voting-isolated-0.6b-math",
    ],
)
def test_a_plan_of_the_hosted_road_takes_seconds(cell):
    """Less than 5 of the processor's where it was measured; imports vary by more than `slowness` says, so twice."""

    def taken():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "experiments.plan", f"--config=configs/{cell}"]
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert any(taken() < 10.0 * slowness() for _ in range(3))  # the first may have compiled bytecode


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--config=configs/micro.py:votin-isolated-xs-math"], "did you mean 'voting-isolated-xs-math'?"),
        (["--config=configs/micro.py:voting-isolated-xs-math", "--config.step=3"], "did you mean 'steps'?"),
        (["--config.steps=3"], "--config is missing"),
    ],
)
def test_a_mistyped_command_line_is_told_without_a_traceback(arguments, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plan", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.run(lambda config, rest: pytest.fail("it must not begin"))
    assert left.value.code == 2
    assert says in capsys.readouterr().err


def test_shapes_that_were_settled_before_a_field_was_known_are_read():
    shapes = EngineSettings((8,), (32, 64), (8,), prefill_tokens=8, prefixes=3)
    written = fields.to_json(shapes)
    for later in ("lanes_at", "banks"):
        del written[later]
    of = lambda engine: settled_shapes({"engine": engine, "measured": True}, config())
    assert [*of(written).values()] == [shapes] == [*of(written | {"lanes_at": [], "grows": True}).values()]
    with pytest.raises(FolderError, match=r"lanes_at \[8, 4\] of lanes that took turns.*make settled {}"):
        of(written | {"lanes_at": [8, 4], "grows": True})
    assert settled_shapes({}, config()) is None
