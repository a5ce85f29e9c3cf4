"""The parts of a run's memory, in bytes; and the shapes of its engines, which depend on them."""

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from marl_jax.config.phase_fields import references
from marl_jax.config.run_config import RunConfig
from marl_jax.learning.network import Qwen3
from marl_jax.learning.streams import stream_count
from marl_jax.learning.update import Learner
from marl_jax.learning.work import units_of
from marl_jax.models import ModelConfig
from marl_jax.models.weight_table import abstract, share_per_device
from marl_jax.planning import costs
from marl_jax.planning.costs import Model, size
from marl_jax.planning.devices import Device
from marl_jax.planning.dry_run import Demand
from marl_jax.planning.workload import Shape, all_shapes
from marl_jax.policies import decode_groups, roles_of
from marl_jax.rollouts.vllm.vllm_config import IN_FLIGHT
from marl_jax.rollouts.voices import load_of
from marl_jax.sampling.shapes import EngineSettings, lane_bytes, memory_bytes, prefix_bytes
from marl_jax.sampling.shapes import plan as plan_engine

BASES, STATES, GRADIENTS = "base weights", "optimiser states", "gradient trees"
TRAINED, ADAPTERS = "trained weights (float32)", "adapters (float32)"
SERVED = "weights served to the sampler"
COPIES, RESULTS = "states on the devices", "results of the compiled step"
SCRATCH = "working memory of the compiled step"
LANES, PROMPTS, SAMPLING = "caches of the lanes", "caches of prompts", "working memory of sampling"
ACTIVATIONS, BACKWARD = "activations", "working memory of the backward pass"
OPTIMISER = "working memory of the optimiser"
PROGRAMS = "compiled programs and libraries"
OF_SEEDS = (TRAINED, ADAPTERS, STATES)  # each seed has its own
# Measured (tests/planning/test_peak.py): memory of a host for programs and their compilation at a first start.
# Programs of adapters take more. A start that reads kept programs takes less.
PROGRAM_BYTES, ADAPTED_PROGRAM_BYTES = 550 << 20, 800 << 20
Phase = Literal["always", "sampling", "gradient", "optimiser", "step"]  # "step" is of the compiled road
Shapes = Mapping[str, EngineSettings]  # of the engines, by base


@dataclasses.dataclass(frozen=True)
class Part:
    """Something that takes memory, and the phase in which it does."""

    name: str
    bytes: int
    phase: Phase


def sizes_of(config: RunConfig, models: Mapping[str, ModelConfig], device: Device) -> dict[str, Model]:
    """{policy: its model as the run trains it on a device}."""
    chosen = config.policies
    sizes = {}
    for name, shape in models.items():
        rank = chosen.lora_rank if chosen.trains.get(name, chosen.train) == "lora" else 0
        sizes[name] = Model(shape, device.platform, device.capability, chosen.remat, chosen.attention, rank)
    return sizes


def model_of_group(config: RunConfig, sizes: Mapping[str, Model], group: Sequence[str]) -> Model:
    """The model of an engine: as its policies that learn are trained, if any do."""
    specs = config.policies.specs
    return sizes[next((name for name in group if not specs[name].frozen), group[0])]


def training(config: RunConfig, sizes: Mapping[str, Model], demand: Demand) -> tuple[list[Part], Shape]:
    """All parts but the engines: those always in memory, and those of updates at their largest micro-batch."""
    update, largest = _update(config, sizes, demand)
    return [*_always(config, sizes), *update], largest


def _always(config: RunConfig, sizes: Mapping[str, Model]) -> list[Part]:
    specs = config.policies.specs
    models = {name: sizes[name] for name, spec in specs.items() if not spec.frozen}
    networks = {name: Qwen3(model.config) for name, model in sizes.items()}
    trees = {name: costs.trained_tree(model.config, model.lora_rank) for name, model in models.items()}
    states = jax.eval_shape(Learner(networks, config.learner, config.policies.map).init, trees)
    any_model = next(iter(sizes.values()))  # all are on one kind of device
    devices = memories(config, any_model.platform)[1]
    here = lambda model, count: int(count * model.per_device(devices))
    stored = lambda model: int(model.weights * share_per_device(model.config, devices))

    def served(group: tuple[str, ...]) -> int:
        """Bytes of weights that an engine has: adapters side by side, or a copy in its dtype if not float32."""
        if all(specs[name].frozen for name in group) or config.engine.kind == "vllm":
            return 0
        model = model_of_group(config, sizes, group)
        itemsize = jnp.dtype(model.config.dtype).itemsize
        count = model.trained * itemsize
        return (len(group) if model.lora_rank else int(itemsize < 4)) * here(model, count)

    local = {name: here(models[name], size(tree)) for name, tree in trees.items()}
    full = sum(count for name, count in local.items() if not models[name].lora_rank)
    adapters = sum(local.values()) - full
    to_base, to_others = references(config.learner, config.phases)
    programs = ADAPTED_PROGRAM_BYTES if adapters else PROGRAM_BYTES
    parts = {
        BASES: sum({spec.base: stored(sizes[name]) for name, spec in specs.items()}.values()),
        TRAINED: full,
        ADAPTERS: adapters,
        "adapters of the reference": adapters if to_base else 0,
        "weights that a phase began with": full + adapters if to_others else 0,
        SERVED: sum(map(served, decode_groups(specs))),
        STATES: sum(here(models[name], size((s.optimiser, s.damping))) for name, s in states.items()),
        PROGRAMS: programs if any_model.platform == "cpu" else 0,
    }
    seeds = 1 if config.road == "compiled" else config.seeds  # see `step_memory`
    copies = lambda name: seeds if name in OF_SEEDS else 1
    return [Part(name, copies(name) * count, "always") for name, count in parts.items() if count]


def _update(config: RunConfig, sizes: Mapping[str, Model], demand: Demand) -> tuple[list[Part], Shape]:
    """The gradient and the optimiser step of the policies that need most."""
    learning = [name for name, spec in config.policies.specs.items() if not spec.frozen]
    kinds = dict.fromkeys(
        (sizes[name], count_units(config, demand, name), _longest(config, sizes[name], demand, name))
        for name in learning
    )
    each = [_update_of(config, *kind) for kind in kinds]

    def most(phase: Phase) -> tuple[list[Part], Shape]:
        choices = [([part for part in parts if part.phase == phase], largest) for parts, largest in each]
        return max(choices, key=lambda choice: sum(part.bytes for part in choice[0]))

    gradient, largest = most("gradient")
    return [*gradient, *most("optimiser")[0]], largest


def _longest(config: RunConfig, model: Model, demand: Demand, policy: str) -> tuple[int, int]:
    """Tokens of a policy's longest prompt and of its longest completion.

    A host has room for the prompts that follow completions as long as allowed. An accelerator, whose memory is a hard
    limit, keeps room for every prompt that the engine accepts.
    """
    calls = [call for call in (*demand.calls, *demand.longest) if call.policy == policy]
    if model.platform == "cpu" and calls and not demand.failed:
        return max(len(call.prompt) for call in calls), max(call.new for call in calls)
    return config.engine.max_prompt, max(role.max_new_tokens for role in config.role_settings.values())


def _update_of(
    config: RunConfig, model: Model, units: int, longest: tuple[int, int]
) -> tuple[list[Part], Shape]:
    """The update of a policy with `units` parts of its gradient, at the micro-batch that needs most."""
    batch, chunk = config.learner.batch, config.learner.logprob_chunk
    share, devices = model.per_device(memories(config, model.platform)[1]), config.mesh.devices
    streams = stream_count(model.platform, devices, batch.streams)
    on_cpu = model.platform == "cpu"
    at_once = streams if devices == 1 or not on_cpu else config.mesh.data  # packs, in one memory
    spread = 1 if on_cpu else config.mesh.hosts * config.mesh.data
    shapes = [
        dataclasses.replace(s, rows=max(1, s.rows // spread))
        for s in all_shapes(batch, *longest, model.platform)
    ]
    largest = max(shapes, key=lambda s: costs.kept(model, s) + costs.working(model, s, chunk))
    tree = 4 * model.trained
    cast = 0 if model.lora_rank or model.config.dtype == "float32" else model.weights
    cast += 2 * model.weights if model.widened else 0
    # Dividing the parts of the gradient copies all of them, and mixing them does so again, unless there is only one.
    copies = 0 if units == 1 else 2 if config.learner.interventions.needs_roles else 1
    parts = [
        Part(GRADIENTS, int(streams * units * tree * share), "gradient"),
        Part("weights in the compute dtype", int(streams * cast * share), "gradient"),
        Part(ACTIVATIONS, at_once * costs.kept(model, largest), "gradient"),
        Part(BACKWARD, at_once * costs.working(model, largest, chunk), "gradient"),
        Part(GRADIENTS, int(units * tree * share), "optimiser"),
        Part(OPTIMISER, int((copies * units + 2) * tree * share), "optimiser"),
    ]
    return [part for part in parts if part.bytes], largest


def sampling(config: RunConfig, sizes: Mapping[str, Model], engines: Shapes) -> list[Part]:
    """The engines' caches, and the largest working memory of an engine; a vLLM server has memory of its own."""
    if config.engine.kind == "vllm":
        return []
    specs, devices = config.policies.specs, memories(config, next(iter(sizes.values())).platform)
    lanes = prompts = most = 0
    for group in decode_groups(specs):
        model, engine = model_of_group(config, sizes, group), engines[specs[group[0]].base]
        in_lanes, in_rows = (count(model.config, engine, devices) for count in (lane_bytes, prefix_bytes))
        working = memory_bytes(model.config, engine, 0, devices) - in_lanes - in_rows
        # The budget of an engine allows for a copy of the embedding in every bank, too, which no program makes.
        working -= engine.banks * (model.weights - size(abstract(model.config)["layers"])) // devices[1]
        working += 2 * (in_lanes + model.weights) if model.widened else 0
        lanes, prompts, most = lanes + in_lanes, prompts + in_rows, max(most, working)
    return [Part(LANES, lanes, "always"), Part(PROMPTS, prompts, "always"), Part(SAMPLING, most, "sampling")]


def memories(config: RunConfig, platform: str) -> tuple[int, int]:
    """How many devices share the rows of caches, and how many heads and weights; CPU devices share one memory."""
    return (1, 1) if platform == "cpu" else (config.mesh.data, config.mesh.model)


def count_units(config: RunConfig, demand: Demand, policy: str) -> int:
    """How many gradient trees a policy's update keeps apart."""
    calls = ((call.role, call.slot) for call in demand.of([policy]))
    return max(1, len(units_of(config.learner, roles_of(config.policies.map, policy), calls)[0]))


# ---------------------------------------------------------------- room for engines


@dataclasses.dataclass(frozen=True)
class Room:
    """Bytes that each engine may take, working memory included."""

    budget: int
    update: int = 0  # bytes of the budget that an update needs next to the caches
    left: int = sys.maxsize  # most for the engine with rows for histories: the bytes that an update leaves


def room(
    config: RunConfig,
    device: Device,
    free: int,
    training: Sequence[Part],
    share: tuple[int, int],
) -> Room:
    """The room of an engine. `free` bytes are left by all weights, or by the bases alone if there are `training` parts.

    Half of a host's memory, which other programs use, too; nine tenths of the memory that an accelerator has left.
    Updates and engines take turns. An engine has `share[0]` of every `share[1]` bytes.
    """
    quota, total = share
    if config.engine.budget_bytes:
        return Room(config.engine.budget_bytes)
    phases = dict.fromkeys(get_args(Phase), 0)
    for part in training:
        phases[part.phase] += part.bytes if part.name != BASES else 0
    always = phases.pop("always")
    update = max(phases.values())
    if device.platform == "cpu":
        left = (free - always - update) * quota // total if training else sys.maxsize
        return Room(max(1, free * quota // (2 * total)), left=left)
    return Room(max(1, int(0.9 * (free - always)) * quota // total), update * quota // total)


def shapes(
    config: RunConfig,
    models: Mapping[str, ModelConfig],
    device: Device,
    free: int,
    training: Sequence[Part],
    demand: Demand,
) -> Shapes:
    """The shapes of all engines in the memory that `room` gives them; ValueError if nothing fits.

    Engines of one model have the same shapes. Engines of several models share the memory in proportion to one lane of
    each, so that all have about the same number of lanes.
    """
    by_base, groups = _by_base(config, models), decode_groups(config.policies.specs)
    model_of = {group: models[group[0]] for group in groups}
    if config.engine.kind == "vllm":
        return dict.fromkeys(by_base, _vllm_settings(config, model_of[groups[0]]))
    devices = memories(config, device.platform)
    lane = {
        model: memory_bytes(model, _least_engine(config, model, device.platform), 0, devices)
        for model in model_of.values()
    }
    total = sum(lane[model] for model in model_of.values())
    by_model = {}
    for model in lane:
        space = room(config, device, free, training, (lane[model], total))
        of_model = [group for group in groups if model_of[group] == model]
        try:
            by_model[model] = _engine_settings(config, model, space, demand, device.platform, of_model)
        except ValueError as error:
            raise error if len(lane) == 1 else ValueError(f"policy '{of_model[0][0]}': {error}") from None
    return {base: by_model[model] for base, model in by_base.items()}


def least_shapes(config: RunConfig, models: Mapping[str, ModelConfig], platform: str) -> Shapes:
    """The smallest shapes that the run could use, for a plan in which nothing fits."""
    by_base = _by_base(config, models)
    return {base: _least_engine(config, model, platform) for base, model in by_base.items()}


def _by_base(config: RunConfig, models: Mapping[str, ModelConfig]) -> dict[str, ModelConfig]:
    return {spec.base: models[name] for name, spec in config.policies.specs.items()}


def _engine_settings(
    config: RunConfig,
    model: ModelConfig,
    room: Room,
    demand: Demand,
    platform: str,
    groups: Sequence[tuple[str, ...]],
) -> EngineSettings:
    """The shapes of each engine of a model, which serve these groups of policies; ValueError if none fit."""
    calls = demand.lengths([name for group in groups for name in group])
    planned = functools.partial(_planned, config, model, platform, config.engine.lanes, room, calls=calls)
    bare = planned()
    devices = memories(config, platform)
    a_row_each = prefix_bytes(model, dataclasses.replace(bare, prefixes=devices[0]), devices)
    rows = devices[0] * (max(0, room.left - memory_bytes(model, bare, 0, devices)) // a_row_each)
    # Histories of the episodes that are under way at a time.
    each = max(map(demand.histories, groups))
    evaluation = config.evaluation
    episodes = max(config.data.problems * config.rollout.samples, evaluation.problems * evaluation.samples)
    engines = len(decode_groups(config.policies.specs))
    histories = each * min(look_ahead(config, bare.lanes * engines), episodes)
    return planned(histories=min(rows, histories))


def _least_engine(config: RunConfig, model: ModelConfig, platform: str) -> EngineSettings:
    """The smallest shapes of an engine, as if the model had enough positions."""
    positions = config.engine.max_prompt + max(r.max_new_tokens for r in config.role_settings.values())
    positions = max(positions, model.max_position_embeddings)
    roomy = dataclasses.replace(model, max_position_embeddings=positions)
    return _planned(config, roomy, platform, config.engine.lanes or 1)


def look_ahead(config: RunConfig, lanes: int) -> int:
    """How many requests are unfinished before new episodes have to wait: enough to fill the lanes of all engines."""
    return config.rollout.ahead or 2 * lanes


def _vllm_settings(config: RunConfig, model: ModelConfig) -> EngineSettings:
    """Settings for a vLLM server: the longest call and the calls at a time; the server has its own shapes."""
    ends = len(model.stop_tokens)
    load = load_of(config.role_settings.values(), config.engine.max_prompt, ends=ends)
    return EngineSettings(
        widths=(config.engine.lanes or IN_FLIGHT,),
        lengths=(load.max_prompt + load.max_new,),
        chunks=(load.max_prompt,),
        prefill_tokens=load.max_prompt,
        prefixes=1,
        stops=load.stops,
        features=load.features,
    )


def _planned(
    config: RunConfig,
    model: ModelConfig,
    platform: str,
    lanes: int | None,
    room: Room = Room(sys.maxsize),
    **known: Any,
) -> EngineSettings:
    """The shapes of an engine for a run; `known` are fields of its load."""
    ends = len(model.stop_tokens)
    load = load_of(config.role_settings.values(), config.engine.max_prompt, config.engine.sampler, ends)
    return plan_engine(
        model,
        dataclasses.replace(load, **known),
        budget_bytes=room.budget,
        update_bytes=room.update,
        lanes=lanes,
        steps=config.engine.steps,
        platform=platform,
        devices=(config.mesh.data, config.mesh.model),
    )
