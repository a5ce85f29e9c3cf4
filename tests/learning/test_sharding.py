"""A mesh changes where the numbers are computed and not what they are."""

from pathlib import Path

import eight_devices
import pytest

COMMON = """
import re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from closeness import close, close_trees
from learning_rows import TINY, as_table, make_rows, plain_loss
from marl_jax.learning.batching import BatchConfig
from marl_jax.learning import update_programs
from marl_jax.learning.by_role.interventions import InterventionConfig, Mixing, PerRole
from marl_jax.learning.network import Qwen3
from marl_jax.learning.optimiser import OptimiserConfig, ScheduleConfig
from marl_jax.learning.learner_config import LearnerConfig
from marl_jax.learning.update import Learner
from marl_jax.models import qwen3
from marl_jax.models import weight_table
from marl_jax.models.lora import init_lora

assert jax.device_count() == 8
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
rng = np.random.default_rng(0)
rows = make_rows(rng, prompts=4, samples=4) + make_rows(rng, prompts=4, samples=4, role="judge")
params = jax.tree.map(np.asarray, qwen3.init(0, TINY))
"""

# One step of plain descent is the gradient.
GRADIENT = """descent = OptimiserConfig("sgd", ScheduleConfig(2.0**14), b1=0.0, weight_decay=0.0, grad_clip=None)
config = LearnerConfig(
    optimiser=descent, batch=BatchConfig((8, 16, 32, 64), 256), old_logprobs="sampler", logprob_chunk=64
)
learner = Learner(Qwen3(TINY), config, {"generator": "p0", "judge": "p0"}, mesh=mesh)
tree = jax.tree.map(jax.device_put, params, weight_table.shardings(TINY, mesh))
laid = jax.tree.map(lambda x: x.sharding, tree)
for part, weight in zip(jax.tree.leaves(learner._zeros(tree, 2)[0]), jax.tree.leaves(tree)):
    spec = PartitionSpec("data", None, *weight.sharding.spec)  # each device along "data" has a sum of its own
    assert part.sharding.is_equivalent_to(NamedSharding(mesh, spec), part.ndim), part.sharding
after, states, report = learner.step({"p0": tree}, learner.init({"p0": tree}), as_table(rows))
assert any(not s.is_fully_replicated for s in jax.tree.leaves(laid))
kept = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), after["p0"], laid)
assert all(jax.tree.leaves(kept)), kept
got = jax.tree.map(lambda b, a: (np.asarray(b) - np.asarray(a)) / 2.0**14, params, after["p0"])
value, want = plain_loss(params, rows)
close_trees(got, want)
size, _ = plain_loss(params, rows, weights=np.sign([row.advantage for row in rows]))
close(report.policies["p0"]["loss"], value, of=abs(size))  # with every advantage positive, no term cancels
"""

# Devices along "data" exchange nothing for a micro-batch; what they have is added up in the optimiser step.
EXCHANGE = """
mesh = jax.make_mesh((8, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
learner = Learner(Qwen3(TINY), LearnerConfig(), {"generator": "p0", "judge": "p0"}, mesh=mesh)
tree = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
settings, carry = learner._settings["p0"], learner._zeros(tree, 2)
batch = learner._place(learner._batches(as_table(rows))[0].arrays)
state, roles = learner.init({"p0": tree})["p0"].optimiser, PerRole(np.ones(2), np.ones(2, bool), None, np.eye(2))
score = update_programs.score.lower(settings, tree, None, batch)
accumulate = update_programs.accumulate.lower(
    settings, carry, tree, None, batch, np.int32(0), anchored=False, on_policy=True
)
apply = update_programs.apply.lower(
    tree, state, None, carry, np.float32(0.1), roles, settings=learner.config.step_settings
)
exchanges = lambda program: set(re.findall(
    "all-reduce|all-gather|all-to-all|reduce-scatter|collective-[a-z]*", program.compile().as_text()
))
assert [exchanges(score), exchanges(accumulate), exchanges(apply)] == [set(), set(), {"all-reduce"}]
"""

# Devices wait for all others inside of the loop over packs where weights are cut; here they have 3, 2, 2 and 2.
PACKS = """
descent = OptimiserConfig("sgd", ScheduleConfig(2.0**14), b1=0.0, weight_decay=0.0, grad_clip=None)
batch = BatchConfig((64,), 1024, slice_tokens=64, streams=1)
rows, ends = make_rows(rng, prompts=33, samples=4), []
for over in (None, mesh):
    made = Learner(Qwen3(TINY), LearnerConfig(optimiser=descent, batch=batch), {"generator": "p0"}, mesh=over)
    tree = jax.tree.map(jnp.asarray, params)
    if over is not None:
        tree = jax.tree.map(jax.device_put, params, weight_table.shardings(TINY, over))
        segments = np.split(made._batches(as_table(rows))[0].arrays.segments, 4)
        assert [int(np.any(part, axis=1).sum()) for part in segments] == [3, 2, 2, 2]
    after, *_ = made.step({"p0": tree}, made.init({"p0": tree}), as_table(rows))
    ends.append(jax.tree.map(lambda a, b: (np.asarray(b) - np.asarray(a)) / 2.0**14, after["p0"], params))
close_trees(ends[1], ends[0])
"""

# All that stands between the gradient and the new weights, here adapters: anchor, balance, clip, AdamW.
UPDATE = """
roles = {"generator": "p0", "judge": "p0"}
chosen = InterventionConfig(Mixing(balance="equalise", project_conflicts=True), {"judge": 0.5}, {"generator": 0.01})
adamw = OptimiserConfig("adamw", ScheduleConfig(0.1), eps=1e-3, grad_clip=0.02)
config = LearnerConfig(optimiser=adamw, batch=BatchConfig((8, 16, 32, 64), 256), interventions=chosen)
adapter = jax.tree.map(lambda x: np.asarray(x[0]) + 0.01, init_lora(1, TINY, rank=2, num_adapters=1))
ends = []
for over in (None, mesh):
    made = Learner(Qwen3(TINY, 0.5), config, roles, mesh=over)
    put, base = jnp.asarray, jax.tree.map(jnp.asarray, params)
    if over is not None:
        put = lambda x: jax.device_put(x, NamedSharding(over, PartitionSpec()))
        base = jax.tree.map(jax.device_put, params, weight_table.shardings(TINY, over))
    trees = {"p0": jax.tree.map(put, adapter)}
    anchor = {"p0": jax.tree.map(lambda x: put(x * 1.1), adapter)}
    states = made.init(trees)
    for step in range(2):
        trees, states, report = made.step(
        trees, states, as_table(rows), step=step, bases={"p0": base}, references=anchor
    )
    ends.append(jax.tree.map(np.asarray, trees["p0"]))
close_trees(ends[1], ends[0])
assert any(np.max(np.abs(a - b)) > 0.01 for a, b in zip(*map(jax.tree.leaves, (ends[0], adapter))))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "script",
    [GRADIENT, EXCHANGE, PACKS, pytest.param(UPDATE, marks=pytest.mark.campaign)],
    ids=["gradient", "exchange", "packs", "update"],
)
def test_eight_devices_give_what_one_gives(script):
    eight_devices.run("-c", COMMON + script, folder=Path(__file__).parent)
