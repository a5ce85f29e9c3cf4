"""The memory of a run's largest programs as XLA itself counts it, compiled for the device at hand."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marl_jax.config.run_config import RunConfig
from marl_jax.learning import update_programs
from marl_jax.learning.by_role.interventions import PerRole
from marl_jax.learning.network import Qwen3
from marl_jax.learning.optimiser import transformation
from marl_jax.models import ModelConfig
from marl_jax.models.decode import empty_cache
from marl_jax.models.lora import init_lora
from marl_jax.models.weight_table import abstract
from marl_jax.planning import devices
from marl_jax.planning.costs import trained_tree
from marl_jax.planning.dry_run import Demand
from marl_jax.planning.memory import count_units
from marl_jax.planning.plan import Plan, make_plan, show
from marl_jax.sampling import programs
from marl_jax.sampling.lanes import LaneTable


def account(config: RunConfig, models: Mapping[str, ModelConfig], demand: Demand) -> str:
    """A line for each program of each model, at the shapes that the device at hand has room for."""
    plan, specs = make_plan(config, models, devices.here(), demand), config.policies.specs
    lines = [f"counted by XLA for {plan.device.name}: arguments + output + temporary - aliased"]
    kinds = {(models[name], spec.lora): name for name, spec in specs.items() if not spec.frozen}
    for policy in kinds.values():
        lines += [f"policy {policy}, from {specs[policy].base}:"] if len(kinds) > 1 else []
        for name, program in lowered(config, models[policy], demand, plan, policy).items():
            lines.append(line_of(name, program.compile()))
    return "\n".join(lines)


def line_of(name: str, program: jax.stages.Compiled) -> str:
    """The line of a program: its memory as XLA counts it."""
    m: Any = program.memory_analysis()
    parts = (m.argument_size_in_bytes, m.output_size_in_bytes, m.temp_size_in_bytes, m.alias_size_in_bytes)
    return f"{name:<10} {show(needed(m)):>10} = {' + '.join(map(show, parts[:3]))} - {show(parts[3])}"


def needed(m: Any) -> int:
    """Bytes of a program by its `memory_analysis`; an output in the place of an argument counts once."""
    return m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes


def lowered(
    config: RunConfig, model: ModelConfig, demand: Demand, plan: Plan, policy: str
) -> dict[str, jax.stages.Lowered]:
    """The programs of a policy at the largest shapes of a plan: for one device, stream, slice and bank."""
    specs, spec = config.policies.specs, config.policies.specs[policy]
    learner, shapes = config.learner, plan.shapes[spec.base]
    rank = config.policies.lora_rank if spec.lora else 0
    tree, params = trained_tree(model, rank), abstract(model)
    frozen, scale = (params, 1.0) if rank else (None, None)
    adapters = jax.eval_shape(lambda: init_lora(0, model, rank, 1)) if rank else None
    units = max(count_units(config, demand, name) for name, one in specs.items() if not one.frozen)
    carry = jax.eval_shape(lambda tree: update_programs.zero_carry(tree, units), tree)
    network = Qwen3(model, scale, config.policies.remat, config.policies.attention)
    settings = update_programs.Settings.of(network, learner)
    rows, chunk = shapes.prefill_rows(shapes.chunks[-1]), shapes.chunks[-1]
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    cache = lambda rows, length: jax.eval_shape(lambda: empty_cache(model, rows, length))
    largest = shapes.rungs if shapes.lanes_at else [(shapes.widths[0], shapes.context)]
    table = LaneTable(shapes.widths[0], shapes.context, shapes.stops, shapes.features)
    each = np.ones(units)
    limits = each if learner.interventions.role_clip else None
    per_role = PerRole(each, each > 0, limits, np.eye(units)) if learner.interventions.needs_roles else None
    return {
        "gradient": update_programs.accumulate.lower(
            settings, carry, tree, frozen, plan.largest.arrays(), ints(), anchored=False, on_policy=True
        ),
        "optimiser": update_programs.apply.lower(
            tree,
            jax.eval_shape(transformation(learner.optimiser).init, tree),
            None,
            carry,
            jax.ShapeDtypeStruct((), jnp.float32),
            per_role,
            settings=learner.step_settings,
        ),
        "prefill": programs.prefill.lower(
            params,
            adapters,
            cache(shapes.prefixes, shapes.context),
            programs.Feeds(ints(rows), ints(rows, chunk), ints(rows), ints(rows)),
            config=model,
            attended=shapes.context,
            scale=1.0,
        ),
        "decode": programs.decode.lower(
            params,
            adapters,
            tuple(cache(width, length) for width, length in largest),
            table.lanes,
            config=model,
            features=shapes.features,
            steps=shapes.steps,
            scale=1.0,
        ),
    }
