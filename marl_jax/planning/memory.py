"""The parts of a run's memory, in bytes counted from shapes; and the shapes of its engines, which depend on them."""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from marl_jax.learning.compiled import slice_count
from marl_jax.learning.optimiser import transformation
from marl_jax.learning.streams import stream_count
from marl_jax.models import ModelConfig
from marl_jax.models.decode import cache_bytes
from marl_jax.models.lora import init_lora
from marl_jax.models.weight_table import abstract, num_parameters
from marl_jax.planning import costs
from marl_jax.planning.costs import Model
from marl_jax.planning.devices import Device
from marl_jax.planning.workload import CallShape, Shape, all_shapes, assume, calls_of
from marl_jax.policies import PolicySpec, decode_groups
from marl_jax.runs.parts import policy_specs
from marl_jax.runs.run_config import RunConfig
from marl_jax.sampling.programs import Features
from marl_jax.sampling.shapes import EngineSettings, memory_bytes
from marl_jax.sampling.shapes import plan as plan_engine

BASES, CACHES = "base weights", ("caches of the lanes", "caches of prompts")
Phase = Literal["always", "prefill", "decode", "resizing", "gradient", "optimiser"]


@dataclasses.dataclass(frozen=True)
class Part:
    """Something that takes memory, and when it does."""

    name: str
    bytes: int
    phase: Phase


def standing(config: RunConfig, sizes: Model, specs: dict[str, PolicySpec]) -> list[Part]:
    """What lies in memory all the time but for the engines' caches."""
    model, share = sizes.config, cut(config, sizes)
    adapter = config.policies.lora_rank * sizes.rank_one()
    itemsize = jnp.dtype(model.dtype).itemsize
    bases = len({spec.base for spec in specs.values()}) * costs.weights(model)
    served = 0
    for group in decode_groups(specs):
        if any(specs[name].lora for name in group):
            served += len(group) * adapter * itemsize
        elif not specs[group[0]].frozen and model.dtype != "float32":
            served += costs.weights(model)
    trained = {
        name: adapter if spec.lora else num_parameters(model)
        for name, spec in specs.items()
        if not spec.frozen
    }
    numbers, states = sum(trained.values()), len(trained) * optimiser_bytes(config, model)
    damps = config.learner.interventions.damps
    damped = {policy for key, policy in config.policies.map.items() if damps(key.split("/")[0])}
    averages = sum(trained[name] for name in damped & {*trained}) * 4
    what = "adapters" if config.policies.train == "lora" else "trained weights"
    parts = [
        Part(BASES, bases // share, "always"),
        Part(f"{what} (float32)", numbers * 4 // share, "always"),
        Part("weights served to the sampler", served // share, "always"),
        Part("optimiser states", (states + averages) // share, "always"),
    ]
    return [part for part in parts if part.bytes]


@dataclasses.dataclass(frozen=True)
class Room:
    """What each engine may take, in bytes, working memory included."""

    budget: int
    beside: int = 0  # what an update needs of it beside the caches
    left: int = sys.maxsize  # what the engine may come to with rows for histories: an update leaves so much


def room_to_train(config: RunConfig, model: ModelConfig, device: Device, free: int) -> Room:
    """Where so much is free beside the bases, and an update takes turns with the engines.

    Half of a host's memory, which others use, too; nine tenths of what an accelerator has left.
    """
    specs = policy_specs(config.policies)
    engines = len(decode_groups(specs))
    if config.engine.budget_bytes:
        return Room(config.engine.budget_bytes)
    sizes = Model(model, device.platform, device.capability, config.policies.remat, config.policies.attention)
    others = sum(part.bytes for part in standing(config, sizes, specs) if part.name != BASES)
    update, _ = gradient(config, sizes, specs, calls_of(config, assume(config)))
    phases = {part.phase for part in update}
    beside = max((sum(p.bytes for p in update if p.phase == phase) for phase in phases), default=0)
    if device.platform == "cpu":
        return Room(max(1, free // (2 * engines)), left=(free - others - beside) // engines)
    return Room(max(1, int(0.9 * (free - others)) // engines), beside // engines)


def room_to_play(config: RunConfig, free: int, engines: int, platform: str) -> Room:
    """Where so much is free beside all weights, and nothing is trained."""
    share = 0.5 if platform == "cpu" else 0.9
    return Room(config.engine.budget_bytes or max(1, int(share * free) // engines))


def engine_settings(
    config: RunConfig,
    model: ModelConfig,
    *,
    lanes: int | None,
    room: Room,
    engines: int,
    platform: str | None = None,
) -> EngineSettings:
    """The shapes of each engine of a run; ValueError where nothing fits."""
    shapes = _shapes(config, model, room, platform)
    bare = shapes(lanes=lanes)
    fitting = max(0, room.left - memory_bytes(model, bare)) // cache_bytes(model, 1, bare.context)
    return shapes(lanes=lanes, histories=min(fitting, histories(config, look_ahead(config, bare, engines))))


def look_ahead(config: RunConfig, settings: EngineSettings, engines: int) -> int:
    """How many requests are unfinished before new episodes have to wait: enough to fill the lanes of all engines."""
    return config.rollout.ahead or 2 * settings.lanes * engines


def histories(config: RunConfig, ahead: int) -> int:
    """About how many histories, which later turns will go on from, lie in an engine at a time."""
    groups = decode_groups(policy_specs(config.policies))
    calls = list(itertools.chain(*calls_of(config, assume(config))))
    each = max(sum(call.opens_history and call.policy in group for call in calls) for group in groups)
    training, evaluation = config.data.problems * config.rollout.samples, config.evaluation
    return each * min(ahead, max(training, evaluation.problems * evaluation.samples))


def _shapes(
    config: RunConfig, model: ModelConfig, room: Room, platform: str | None
) -> Callable[..., EngineSettings]:
    """`sampling.plan` for the calls of a run."""
    sampling = config.role_settings.values()
    truncate = any(role.top_p < 1 or role.top_k > 0 for role in sampling)
    return functools.partial(
        plan_engine,
        model,
        max_prompt=config.engine.max_prompt,
        max_new=max(role.max_new_tokens for role in sampling),
        min_new=min(role.max_new_tokens for role in sampling),
        budget_bytes=room.budget,
        beside_bytes=room.beside,
        features=Features(
            truncate=truncate,
            # What the trainer renormalises over.
            candidates=max(role.top_k for role in sampling) if truncate else 0,
            min_new=any(role.min_new_tokens > 0 for role in sampling),
        ),
        steps=config.engine.steps,
        stops=max(8, *(len(role.stop_tokens) + 1 for role in sampling)),  # and the template's end of turn
        platform=platform,
    )


def engine_within(
    config: RunConfig, model: ModelConfig, device: Device, free: int, engines: int
) -> tuple[EngineSettings, str | None]:
    """The engines' settings as a run would choose them with so much memory free, and why it could not."""
    lanes, platform = config.engine.lanes, device.platform
    room = room_to_train(config, model, device, free)
    try:
        settings = engine_settings(config, model, lanes=lanes, room=room, engines=engines, platform=platform)
        return settings, None
    except ValueError as error:  # what the least would take is still told
        positions = config.engine.max_prompt + max(r.max_new_tokens for r in config.role_settings.values())
        positions = max(positions, model.max_position_embeddings)
        roomy = dataclasses.replace(model, max_position_embeddings=positions)
        return _shapes(config, roomy, Room(sys.maxsize), platform)(lanes=lanes or 1), str(error)


def sampling(config: RunConfig, sizes: Model, engine: EngineSettings, engines: int) -> list[Part]:
    """The engines' caches, and what they work with."""
    model = sizes.config
    spread = 1 if sizes.platform == "cpu" else config.mesh.data * config.mesh.model
    lanes = cache_bytes(model, 1, engine.cells)
    prompts = cache_bytes(model, engine.prefixes, engine.context)
    resized = lanes // engine.banks // (2 * model.num_hidden_layers)
    chunk, context = engine.chunks[-1], engine.context
    prefill = costs.prefill_working(sizes, engine.prefill_rows(chunk), chunk, context)
    decode = costs.decode_working(sizes, engine.lanes // engine.banks, context)
    others = (engine.banks - 1) * decode  # those that decode meanwhile
    return [
        Part(CACHES[0], engines * lanes // spread, "always"),
        Part(CACHES[1], engines * prompts // spread, "always"),
        Part("working memory of prefill", (prefill + others) // spread, "prefill"),
        Part("working memory of decoding", (decode + others) // spread, "decode"),
        Part("an array of a cache, resized", (resized + others) // spread, "resizing"),
    ]


def gradient(
    config: RunConfig, sizes: Model, specs: dict[str, PolicySpec], rounds: list[list[CallShape]]
) -> tuple[list[Part], Shape]:
    """The update of the policy that needs most, at the micro-batch that needs most."""
    longest = max(role.max_new_tokens for role in config.role_settings.values())
    shapes = all_shapes(config.learner.batch, config.engine.max_prompt, longest)
    adapter = config.policies.lora_rank * sizes.rank_one() if config.policies.train == "lora" else 0
    numbers = adapter or num_parameters(sizes.config)
    units = max(count_units(config, rounds, name) for name, spec in specs.items() if not spec.frozen)
    share, data = cut(config, sizes), 1 if sizes.platform == "cpu" else config.mesh.data
    single = sizes.platform == "cpu" and config.mesh.data * config.mesh.model == 1
    slices = config.learner.batch.slice_tokens if single else 0
    devices = config.mesh.data * config.mesh.model
    streams = stream_count(sizes.platform, devices, config.learner.batch.streams)
    alone = [
        dataclasses.replace(s, rows=max(1, s.rows // data) // slice_count(s.rows, s.width, slices))
        for s in shapes
    ]
    chunk = config.learner.logprob_chunk
    largest = max(alone, key=lambda s: costs.kept(sizes, s) + costs.working(sizes, s, chunk, numbers))
    cast = 0 if adapter or sizes.config.dtype == "float32" else costs.weights(sizes.config)
    cast += 2 * costs.weights(sizes.config) if sizes.widened else 0
    trees = units * numbers * 4
    # Dividing the parts takes them once more, and mixing them again, unless there is but one.
    again = 0 if units == 1 else 2 if config.learner.interventions.needs_roles else 1
    mixing = (again * units + 2) * numbers * 4
    parts = [
        Part("gradient trees", streams * trees // share, "gradient"),
        Part("weights in the dtype of the products", streams * cast // share, "gradient"),
        Part("activations", streams * costs.kept(sizes, largest), "gradient"),
        Part(
            "working memory of the backward pass",
            streams * costs.working(sizes, largest, chunk, numbers),
            "gradient",
        ),
        Part("gradient trees", trees // share, "optimiser"),
        Part("working memory of the optimiser", mixing // share, "optimiser"),
    ]
    return [part for part in parts if part.bytes], largest


def count_units(config: RunConfig, rounds: list[list[CallShape]], policy: str) -> int:
    """How many gradient trees a policy's update keeps apart."""
    mine = [call for some in rounds for call in some if call.policy == policy]
    if config.learner.gradients == "slots":
        return max(1, len({(call.role, call.slot) for call in mine}))
    roles = {key.split("/")[0] for key, name in config.policies.map.items() if name == policy}
    return len(roles) if config.learner.apart else 1


def optimiser_bytes(config: RunConfig, model: ModelConfig) -> int:
    """What the optimiser carries for one policy."""
    tree = abstract(model)
    if config.policies.train == "lora":
        tree = jax.eval_shape(lambda: init_lora(0, model, config.policies.lora_rank, 1))
    trained = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), tree)
    state = jax.eval_shape(transformation(config.learner.optimiser).init, trained)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def cut(config: RunConfig, sizes: Model) -> int:
    """Over how many devices each weight is cut; the processor's devices share one memory."""
    return 1 if sizes.platform == "cpu" else config.mesh.model
