"""The parts of a run's memory, in bytes; and the shapes of its engines, which depend on them."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from marl_jax.config.phase_fields import references
from marl_jax.config.run_config import RunConfig
from marl_jax.learning.network import Qwen3
from marl_jax.learning.streams import stream_count
from marl_jax.learning.update import Learner
from marl_jax.learning.update_programs import slice_count
from marl_jax.models import ModelConfig
from marl_jax.models.decode import cache_bytes
from marl_jax.models.weight_table import abstract
from marl_jax.planning import costs
from marl_jax.planning.costs import Model, size
from marl_jax.planning.devices import Device
from marl_jax.planning.dry_run import Demand
from marl_jax.planning.workload import Shape, all_shapes
from marl_jax.policies import decode_groups
from marl_jax.rollouts.voices import load_of
from marl_jax.runs.parts import policy_specs
from marl_jax.sampling.shapes import EngineSettings, memory_bytes
from marl_jax.sampling.shapes import plan as plan_engine

__all__ = [
    "OPTIMISER",
    "PROGRAMS",
    "Part",
    "Phase",
    "Room",
    "count_units",
    "engine_settings",
    "least_engine",
    "look_ahead",
    "most_units",
    "room",
    "sampling",
    "sizes_of",
    "training",
    "weight_share",
]

BASES, STATES, GRADIENTS = "base weights", "optimiser states", "gradient trees"
LANES, PROMPTS, SAMPLING = "caches of the lanes", "caches of prompts", "working memory of sampling"
ACTIVATIONS, BACKWARD = "activations", "working memory of the backward pass"
OPTIMISER = "working memory of the optimiser"
PROGRAMS = "compiled programs and libraries"
# Measured (tests/planning/test_peak.py): what programs and their compilation take of a host at a first start.
# One that reads kept programs takes less (xs: 350 MiB where a first start took 580).
PROGRAM_BYTES = 680 << 20
Phase = Literal["always", "sampling", "gradient", "optimiser"]


@dataclasses.dataclass(frozen=True)
class Part:
    """Something that takes memory, and when it does."""

    name: str
    bytes: int
    phase: Phase


def sizes_of(config: RunConfig, model: ModelConfig, device: Device) -> Model:
    """The model as the run trains it on a device."""
    chosen = config.policies
    rank = chosen.lora_rank if chosen.train == "lora" else 0
    return Model(model, device.platform, device.capability, chosen.remat, chosen.attention, rank)


def training(config: RunConfig, model: Model, demand: Demand) -> tuple[list[Part], Shape]:
    """All but the engines: what lies in memory all the time, and what updates need at their largest micro-batch."""
    passing, largest = _update(config, model, demand)
    return [*_standing(config, model), *passing], largest


def _standing(config: RunConfig, model: Model) -> list[Part]:
    specs = policy_specs(config.policies)
    learning = [name for name, spec in specs.items() if not spec.frozen]
    learner = Learner(Qwen3(model.config), config.learner, config.policies.map)
    tree = costs.trained_tree(model.config, model.lora_rank)
    states = jax.eval_shape(learner.init, dict.fromkeys(learning, tree)).values()
    itemsize = jnp.dtype(model.config.dtype).itemsize

    def served(group: tuple[str, ...]) -> int:
        """Copies that an engine has: adapters side by side, or weights in its dtype if that is another."""
        if all(specs[name].frozen for name in group):
            return 0
        return len(group) if model.lora_rank else int(itemsize < 4)

    trained = len(learning) * size(tree)
    to_base, to_others = references(config.learner, config.phases)
    sizes = {
        BASES: len({spec.base for spec in specs.values()}) * model.weights,
        f"{'adapters' if model.lora_rank else 'trained weights'} (float32)": trained,
        "adapters of the reference": trained if to_base and model.lora_rank else 0,
        "weights that a phase began with": trained if to_others else 0,
        "weights served to the sampler": sum(map(served, decode_groups(specs))) * model.trained * itemsize,
        STATES: size([(state.optimiser, state.damping) for state in states]),
        PROGRAMS: PROGRAM_BYTES if model.platform == "cpu" else 0,
    }
    share = weight_share(config, model)
    return [Part(name, count // share, "always") for name, count in sizes.items() if count]


def _update(config: RunConfig, model: Model, demand: Demand) -> tuple[list[Part], Shape]:
    """The update of the policy that needs most, at the micro-batch that needs most."""
    batch, chunk = config.learner.batch, config.learner.logprob_chunk
    longest = max(role.max_new_tokens for role in config.role_settings.values())
    share, devices = weight_share(config, model), config.mesh.devices
    streams = stream_count(model.platform, devices, batch.streams)
    slices = batch.slice_tokens if model.platform == "cpu" and devices == 1 else 0
    spread = 1 if model.platform == "cpu" else config.mesh.hosts * config.mesh.data
    shapes = [
        dataclasses.replace(s, rows=max(1, s.rows // spread) // slice_count(s.rows, s.width, slices))
        for s in all_shapes(batch, config.engine.max_prompt, longest)
    ]
    largest = max(shapes, key=lambda s: costs.kept(model, s) + costs.working(model, s, chunk))
    tree, units = 4 * model.trained, most_units(config, demand)
    cast = 0 if model.lora_rank or model.config.dtype == "float32" else model.weights
    cast += 2 * model.weights if model.widened else 0
    # Dividing the parts takes them once more, and mixing them again, unless there is but one.
    again = 0 if units == 1 else 2 if config.learner.interventions.needs_roles else 1
    parts = [
        Part(GRADIENTS, streams * units * tree // share, "gradient"),
        Part("weights in the dtype of the products", streams * cast // share, "gradient"),
        Part(ACTIVATIONS, streams * costs.kept(model, largest), "gradient"),
        Part(BACKWARD, streams * costs.working(model, largest, chunk), "gradient"),
        Part(GRADIENTS, units * tree // share, "optimiser"),
        Part(OPTIMISER, (again * units + 2) * tree // share, "optimiser"),
    ]
    return [part for part in parts if part.bytes], largest


def sampling(config: RunConfig, model: Model, engine: EngineSettings) -> list[Part]:
    """The engines' caches, and what one of them works with."""
    engines = len(decode_groups(policy_specs(config.policies)))
    spread = 1 if model.platform == "cpu" else config.mesh.data * config.mesh.model
    lanes = cache_bytes(model.config, 1, engine.cells)
    prompts = cache_bytes(model.config, engine.prefixes, engine.context)
    working = memory_bytes(model.config, engine) - lanes - prompts
    # The budget of an engine allows for a copy of the embedding in every bank, too, which no program makes.
    working -= engine.banks * (model.weights - size(abstract(model.config)["layers"]))
    working += 2 * (lanes + model.weights) if model.widened else 0
    return [
        Part(LANES, engines * lanes // spread, "always"),
        Part(PROMPTS, engines * prompts // spread, "always"),
        Part(SAMPLING, working // spread, "sampling"),
    ]


def count_units(config: RunConfig, demand: Demand, policy: str) -> int:
    """How many gradient trees a policy's update keeps apart."""
    if config.learner.gradients == "slots":
        return max(1, len({(call.role, call.slot) for call in demand.of([policy])}))
    roles = {key.split("/")[0] for key, name in config.policies.map.items() if name == policy}
    return len(roles) if config.learner.apart else 1


def most_units(config: RunConfig, demand: Demand) -> int:
    """Of the policy that has most."""
    specs = policy_specs(config.policies)
    return max(count_units(config, demand, name) for name, spec in specs.items() if not spec.frozen)


def weight_share(config: RunConfig, model: Model) -> int:
    """Over how many devices each weight is cut; the processor's devices share one memory."""
    return 1 if model.platform == "cpu" else config.mesh.model


# ---------------------------------------------------------------- room for engines


@dataclasses.dataclass(frozen=True)
class Room:
    """What each engine may take, in bytes, working memory included."""

    budget: int
    beside: int = 0  # what an update needs of it beside the caches
    left: int = sys.maxsize  # what the engine may come to with rows for histories: an update leaves so much


def room(config: RunConfig, device: Device, free: int, training: Sequence[Part] = ()) -> Room:
    """Where so much is free beside all weights; or beside the bases, if the run also needs these parts to train.

    Half of a host's memory, which others use, too; nine tenths of what an accelerator has left. An update takes turns
    with the engines.
    """
    engines = len(decode_groups(policy_specs(config.policies)))
    if config.engine.budget_bytes:
        return Room(config.engine.budget_bytes)
    phases = dict.fromkeys(get_args(Phase), 0)
    for part in training:
        phases[part.phase] += part.bytes if part.name != BASES else 0
    others = phases.pop("always")
    beside = max(phases.values())
    if device.platform == "cpu":
        left = (free - others - beside) // engines if training else sys.maxsize
        return Room(max(1, free // (2 * engines)), left=left)
    return Room(max(1, int(0.9 * (free - others)) // engines), beside // engines)


def engine_settings(
    config: RunConfig, model: ModelConfig, room: Room, demand: Demand, platform: str
) -> EngineSettings:
    """The shapes of each engine of a run; ValueError where nothing fits."""
    shapes, lanes = _shapes(config, model, room, platform), config.engine.lanes
    groups = decode_groups(policy_specs(config.policies))
    bare = shapes(lanes)
    fitting = max(0, room.left - memory_bytes(model, bare)) // cache_bytes(model, 1, bare.context)
    # Of the episodes that are under way at a time.
    each = max(map(demand.histories, groups))
    training, evaluation = config.data.problems * config.rollout.samples, config.evaluation
    episodes = max(training, evaluation.problems * evaluation.samples)
    histories = each * min(look_ahead(config, bare, len(groups)), episodes)
    return shapes(lanes, min(fitting, histories))


def least_engine(config: RunConfig, model: ModelConfig, platform: str) -> EngineSettings:
    """The shapes that would be needed where nothing fits, of a model that had the positions."""
    positions = config.engine.max_prompt + max(r.max_new_tokens for r in config.role_settings.values())
    positions = max(positions, model.max_position_embeddings)
    roomy = dataclasses.replace(model, max_position_embeddings=positions)
    return _shapes(config, roomy, Room(sys.maxsize), platform)(config.engine.lanes or 1)


def look_ahead(config: RunConfig, settings: EngineSettings, engines: int) -> int:
    """How many requests are unfinished before new episodes have to wait: enough to fill the lanes of all engines."""
    return config.rollout.ahead or 2 * settings.lanes * engines


def _shapes(
    config: RunConfig, model: ModelConfig, room: Room, platform: str
) -> Callable[..., EngineSettings]:
    """From lanes and histories to the shapes for the calls of a run."""
    load = load_of(config.role_settings.values(), config.engine.max_prompt, config.engine.sampler)
    planned = functools.partial(
        plan_engine,
        model,
        budget_bytes=room.budget,
        beside_bytes=room.beside,
        steps=config.engine.steps,
        platform=platform,
    )
    return lambda lanes, histories=0: planned(dataclasses.replace(load, histories=histories), lanes=lanes)
