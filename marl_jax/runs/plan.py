"""Memory and time that a run needs on a device, counted from shapes: nothing is compiled, no weights are read.

    peak = what is always there + the largest of: prefill | decode | gradient of the largest micro-batch | optimiser
    time = sampling (prefill + decode) + update; grading is not counted

Lengths are not known before a run, so times rest on stated assumptions; memory is that of the longest calls allowed.
"""

import dataclasses
import functools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from marl_jax.learning.compiled import SLICES_AT_ONCE, slice_count
from marl_jax.learning.optimiser import transformation
from marl_jax.models import ModelConfig
from marl_jax.models.config import PRESETS
from marl_jax.models.decode import cache_bytes
from marl_jax.models.hf import load_config
from marl_jax.models.lora import init_lora
from marl_jax.models.table import abstract, num_parameters
from marl_jax.policies import PolicySpec, decode_groups
from marl_jax.runs import costs, devices
from marl_jax.runs.config import RunConfig
from marl_jax.runs.costs import Model
from marl_jax.runs.devices import Device
from marl_jax.runs.parts import policy_specs
from marl_jax.runs.workload import Assumptions, CallShape, Shape, all_shapes, assume, batches_of, calls_of
from marl_jax.sampling.plan import EngineSettings
from marl_jax.sampling.plan import plan as plan_engine
from marl_jax.sampling.programs import Features

Phase = Literal["always", "prefill", "decode", "resizing", "gradient", "optimiser"]
PROBLEMS = 4  # so many are batched to see how the rows of a step are packed


class PlanError(ValueError):
    """A run that cannot fit the device; the text is one line."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Something that takes memory, and when it does."""

    name: str
    bytes: int
    phase: Phase


@dataclasses.dataclass(frozen=True)
class Work:
    """A part of a step: operations of matrix products, and bytes that must move."""

    name: str
    operations: float
    moved: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run needs on one device."""

    device: Device
    dtype: str
    parts: tuple[Part, ...]
    works: tuple[Work, ...]  # of one training step
    engine: EngineSettings  # of each engine
    engines: int
    largest: Shape  # the micro-batch that takes most
    calls: int  # of an episode, at most
    assumptions: Assumptions
    refusal: str | None = None  # of the engine, where its lanes do not fit what is left for them

    @property
    def phase(self) -> Phase:
        """When most is needed."""
        return max((phase for phase in get_args(Phase) if phase != "always"), key=self.during)

    def during(self, phase: Phase) -> int:
        """Bytes of what only this phase needs."""
        return sum(part.bytes for part in self.parts if part.phase == phase)

    @property
    def at_peak(self) -> list[Part]:
        """What is there when most is needed, the biggest first."""
        there = [part for part in self.parts if part.phase in ("always", self.phase)]
        return sorted(there, key=lambda part: -part.bytes)

    @property
    def total(self) -> int:
        return sum(part.bytes for part in self.at_peak)

    @property
    def fits(self) -> bool:
        return self.refusal is None and self.total <= self.device.memory

    @property
    def seconds(self) -> dict[str, float] | None:
        """{work: seconds of a step}; None where the device's rates or the workflow's calls are not known."""
        if not self.device.bandwidth or not self.calls:
            return None
        times = {w.name: self.device.seconds(w.operations, w.moved, self.dtype) for w in self.works}
        return {name: value for name, value in times.items() if value}

    def trouble(self, config: RunConfig) -> str:
        """Why it does not fit and what to change, in one line."""
        if self.refusal is not None:
            return f"on {self.device.name} {self.refusal}"
        biggest = self.at_peak[0]
        return (
            f"the run needs {show(self.total)} and {self.device.name} has {show(self.device.memory)}; the biggest part "
            f"is {biggest.name} ({show(biggest.bytes)}): {_way_out(biggest.name, config)}"
        )


def make_plan(config: RunConfig, model: ModelConfig, device: Device, *, completion: float = 0.5) -> Plan:
    """What the run needs on a device; over a mesh, what one of its devices does.

    `completion` is the mean length that is assumed of completions, as a share of max_new_tokens.
    """
    specs = policy_specs(config.policies)
    sizes = Model(model, device.platform, device.capability, config.policies.remat)
    assumptions = assume(config, completion)
    rounds = calls_of(config, assumptions)
    standing = _standing(config, sizes, specs)
    bases = sum(part.bytes for part in standing if part.name == "base weights")
    engines = len(decode_groups(specs))
    engine, refusal = _engine(config, model, device, device.memory - bases, engines)
    gradient, largest = _gradient(config, sizes, specs, rounds)
    return Plan(
        device=device,
        dtype=model.dtype,
        parts=(*standing, *_sampling(config, sizes, engine, engines), *gradient),
        works=(
            *_decoding(config, sizes, specs, rounds, engine),
            *_learning(config, sizes, specs, rounds),
        ),
        engine=engine,
        engines=engines,
        largest=largest,
        calls=sum(map(len, rounds)),
        assumptions=assumptions,
        refusal=refusal,
    )


def check_fits(config: RunConfig, model: ModelConfig, available_bytes: int | None = None) -> Plan:
    """The plan for the device at hand; refused with one line if the run cannot fit it."""
    device = devices.here()
    if available_bytes is not None:
        device = dataclasses.replace(device, memory=available_bytes)
    made = make_plan(config, model, device)
    if not made.fits:
        raise PlanError(made.trouble(config))
    return made


def find_model(config: RunConfig) -> tuple[ModelConfig, str]:
    """The model's shape and where it is known from: its directory, or the preset of the cell's scale."""
    directory, dtype = config.policies.base, config.policies.dtype
    if (Path(directory) / "config.json").is_file():
        try:
            return load_config(directory, dtype=dtype), f"'{directory}/config.json'"
        except (OSError, ValueError) as error:
            raise PlanError(str(error)) from None
    scale = config.cell.split("-")[-2] if config.cell.count("-") == 3 else ""
    if scale not in PRESETS:
        raise PlanError(
            f"there is no model in '{directory}', and the cell '{config.cell}' names no scale of {', '.join(PRESETS)}: "
            "give --config.policies.base"
        )
    model = ModelConfig.preset(scale)
    model = dataclasses.replace(model, dtype=dtype) if dtype else model
    return model, f"the preset '{scale}' (there is no '{directory}/config.json' yet)"


def show(size: float) -> str:
    """Bytes for people."""
    power, unit = next(((p, u) for p, u in ((40, "TiB"), (30, "GiB")) if size >= 2**p), (20, "MiB"))
    return f"{size / 2**power:.1f} {unit}"


# ---------------------------------------------------------------- memory


def _standing(config: RunConfig, sizes: Model, specs: dict[str, PolicySpec]) -> list[Part]:
    """What lies in memory all the time but for the engines' caches."""
    model, share = sizes.config, _cut(config, sizes)
    trained = [spec for spec in specs.values() if not spec.frozen]
    adapter = config.policies.lora_rank * sizes.rank_one()
    itemsize = jnp.dtype(model.dtype).itemsize
    bases = len({spec.base for spec in specs.values()}) * costs.weights(model)
    served = 0
    for group in decode_groups(specs):
        if any(specs[name].lora for name in group):
            served += len(group) * adapter * itemsize
        elif not specs[group[0]].frozen and model.dtype != "float32":
            served += costs.weights(model)
    numbers = sum(adapter if spec.lora else num_parameters(model) for spec in trained)
    states = len(trained) * optimiser_bytes(config, model)
    damped = numbers * 4 if config.learner.interventions.mixing.damping else 0
    what = "adapters" if config.policies.train == "lora" else "trained weights"
    parts = [
        Part("base weights", bases // share, "always"),
        Part(f"{what} (float32)", numbers * 4 // share, "always"),
        Part("weights served to the sampler", served // share, "always"),
        Part("optimiser states", (states + damped) // share, "always"),
    ]
    return [part for part in parts if part.bytes]


def engine_settings(
    config: RunConfig,
    model: ModelConfig,
    *,
    lanes: int | None,
    budget_bytes: int,
    platform: str | None = None,
) -> EngineSettings:
    """The shapes of each engine of a run, within a byte budget; ValueError where nothing fits."""
    sampling = config.role_settings.values()
    truncate = any(role.top_p < 1 or role.top_k > 0 for role in sampling)
    return plan_engine(
        model,
        max_prompt=config.engine.max_prompt,
        max_new=max(role.max_new_tokens for role in sampling),
        lanes=lanes,
        budget_bytes=budget_bytes,
        features=Features(
            truncate=truncate,
            # What the trainer renormalises over.
            candidates=max(role.top_k for role in sampling) if truncate else 0,
            min_new=any(role.min_new_tokens > 0 for role in sampling),
        ),
        steps=config.engine.steps,
        platform=platform,
    )


def _engine(
    config: RunConfig, model: ModelConfig, device: Device, free: int, engines: int
) -> tuple[EngineSettings, str | None]:
    """The engines' settings as a run would choose them with so much memory free, and why it could not."""
    budget = config.engine.budget_bytes or max(1, free // (2 * engines))
    shapes = functools.partial(engine_settings, config, platform=device.platform)
    try:
        return shapes(model, lanes=config.engine.lanes, budget_bytes=budget), None
    except ValueError as error:  # what the least would take is still told
        positions = config.engine.max_prompt + max(r.max_new_tokens for r in config.role_settings.values())
        positions = max(positions, model.max_position_embeddings)
        roomy = dataclasses.replace(model, max_position_embeddings=positions)
        return shapes(roomy, lanes=config.engine.lanes or 1, budget_bytes=sys.maxsize), str(error)


def _sampling(config: RunConfig, sizes: Model, engine: EngineSettings, engines: int) -> list[Part]:
    model = sizes.config
    spread = 1 if sizes.platform == "cpu" else config.mesh.data * config.mesh.model
    lanes = cache_bytes(model, engine.lanes, engine.context)
    prompts = cache_bytes(model, engine.prefixes, engine.context)
    chunk, context = engine.chunks[-1], engine.context
    prefill = costs.prefill_working(sizes, engine.prefill_rows(chunk), chunk, context)
    decode = costs.decode_working(sizes, engine.lanes, context)
    return [
        Part("caches of the lanes", engines * lanes // spread, "always"),
        Part("caches of prompts", engines * prompts // spread, "always"),
        Part("working memory of prefill", prefill // spread, "prefill"),
        Part("working memory of decoding", decode // spread, "decode"),
        Part("an array of a cache, resized", lanes // (2 * model.num_hidden_layers) // spread, "resizing"),
    ]


def _gradient(
    config: RunConfig, sizes: Model, specs: dict[str, PolicySpec], rounds: list[list[CallShape]]
) -> tuple[list[Part], Shape]:
    """The update of the policy that needs most, at the micro-batch that needs most."""
    longest = max(role.max_new_tokens for role in config.role_settings.values())
    shapes = all_shapes(config.learner.batch, config.engine.max_prompt, longest)
    adapter = config.policies.lora_rank * sizes.rank_one() if config.policies.train == "lora" else 0
    numbers = adapter or num_parameters(sizes.config)
    units = max(count_units(config, rounds, name) for name, spec in specs.items() if not spec.frozen)
    share, data = _cut(config, sizes), 1 if sizes.platform == "cpu" else config.mesh.data
    single = sizes.platform == "cpu" and config.mesh.data * config.mesh.model == 1
    slices = config.learner.batch.slice_tokens if single else 0
    alone = []
    for s in shapes:
        count = slice_count(s.rows, s.width, slices)
        alone.append(
            dataclasses.replace(s, rows=max(1, s.rows // data) // count * min(count, SLICES_AT_ONCE))
        )
    chunk = config.learner.logprob_chunk
    largest = max(alone, key=lambda s: costs.kept(sizes, s) + costs.working(sizes, s, chunk, numbers))
    cast = 0 if adapter or sizes.config.dtype == "float32" else costs.weights(sizes.config)
    cast += 2 * costs.weights(sizes.config) if sizes.widened else 0
    trees = units * numbers * 4
    # Dividing and mixing the parts takes them twice more, unless there is but one.
    mixing = (2 * units + 2 if units > 1 else 2) * numbers * 4
    parts = [
        Part("gradient trees", trees // share, "gradient"),
        Part("weights in the dtype of the products", cast // share, "gradient"),
        Part("activations", costs.kept(sizes, largest), "gradient"),
        Part(
            "working memory of the backward pass", costs.working(sizes, largest, chunk, numbers), "gradient"
        ),
        Part("gradient trees", trees // share, "optimiser"),
        Part("working memory of the optimiser", mixing // share, "optimiser"),
    ]
    return [part for part in parts if part.bytes], largest


def count_units(config: RunConfig, rounds: list[list[CallShape]], policy: str) -> int:
    """How many gradient trees a policy's update keeps apart."""
    mine = [call for some in rounds for call in some if call.policy == policy]
    level, mixing = config.learner.gradients, config.learner.interventions.mixing
    if level == "slots":
        return max(1, len({(call.role, call.slot) for call in mine}))
    roles = {key.split("/")[0] for key, name in config.policies.map.items() if name == policy}
    return len(roles) if level == "roles" or mixing.needs_roles else 1


def optimiser_bytes(config: RunConfig, model: ModelConfig) -> int:
    """What the optimiser carries for one policy."""
    tree = abstract(model)
    if config.policies.train == "lora":
        tree = jax.eval_shape(lambda: init_lora(0, model, config.policies.lora_rank, 1))
    trained = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), tree)
    state = jax.eval_shape(transformation(config.learner.optimiser).init, trained)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def _cut(config: RunConfig, sizes: Model) -> int:
    """Over how many devices each weight is cut; the processor's devices share one memory."""
    return 1 if sizes.platform == "cpu" else config.mesh.model


# ---------------------------------------------------------------- time


def _decoding(
    config: RunConfig,
    sizes: Model,
    specs: dict[str, PolicySpec],
    rounds: list[list[CallShape]],
    engine: EngineSettings,
) -> Iterable[Work]:
    """Prefill and decode of one step's episodes, engine by engine."""
    model, share = sizes.config, config.mesh.data * config.mesh.model
    episodes = config.data.problems * config.rollout.samples
    per_token = cache_bytes(model, 1, 1)
    fed_operations = decode_operations = decode_moved = 0.0
    for group in decode_groups(specs):
        lora = any(specs[name].lora for name in group)
        adapters = len(group) * config.policies.lora_rank * sizes.rank_one() if lora else 0
        mine = [[call for call in some if call.policy in group] for some in rounds]
        prompts: dict[tuple[str, str], CallShape] = {}
        for call in (call for some in mine for call in some):
            if call.same is not None:
                prompts[call.policy, call.same] = call
            else:
                fed_operations += episodes * costs.prefill_operations(sizes, call.fed, call.prompt, adapters)
            attended = call.prompt + call.new
            decode_operations += episodes * call.new * costs.decode_operations(sizes, attended, adapters)
            # A step writes its logits and reads them twice; every lane reads its cache.
            decode_moved += episodes * call.new * (attended * per_token + 12 * model.vocab_size)
        for call in prompts.values():
            fed_operations += config.data.problems * costs.prefill_operations(
                sizes, call.fed, call.prompt, adapters
            )
        tokens = episodes * sum(call.new for some in mine for call in some)
        in_turn = sum(max((call.new for call in some), default=0) for some in mine)
        steps = max(-(-tokens // engine.lanes), in_turn)
        decode_moved += steps * costs.weights(model)
    return (
        Work("prefill", fed_operations / share, 0.0),
        Work("decode", decode_operations / share, decode_moved / share),
    )


def _learning(
    config: RunConfig, sizes: Model, specs: dict[str, PolicySpec], rounds: list[list[CallShape]]
) -> Iterable[Work]:
    """Reference pass, gradient and optimiser step of one training step, over all policies."""
    share = config.mesh.data * config.mesh.model
    adapter = config.policies.lora_rank * sizes.rank_one() if config.policies.train == "lora" else 0
    numbers = adapter or num_parameters(sizes.config)
    problems = min(PROBLEMS, config.data.problems)
    scale = config.data.problems / problems
    reference = gradient = moved = stepped = 0.0
    anchors = config.learner.interventions.kl_coef
    for policy in (name for name, spec in specs.items() if not spec.frozen):
        anchored = any(
            anchors.get(key.split("/")[0]) for key, p in config.policies.map.items() if p == policy
        )
        batches = batches_of(config, rounds, policy, problems)
        for shape, count in batches:
            times = count * scale * config.learner.epochs
            gradient += times * costs.update_operations(sizes, shape, adapter)
            # Activations are written and read, the gradient is added to its tree.
            moved += times * (2 * costs.kept(sizes, shape) + 12 * numbers)
            reference += count * scale * costs.forward_operations(sizes, shape) * anchored
        units = count_units(config, rounds, policy)
        state = optimiser_bytes(config, sizes.config)
        stepped += config.learner.epochs * (8 * units * numbers + 2 * state + 12 * numbers)
    return (
        Work("reference", reference / share, 0.0),
        Work("gradient", gradient / share, moved / share),
        Work("optimiser", 0.0, stepped / share),
    )


# ---------------------------------------------------------------- ways out


def _way_out(part: str, config: RunConfig) -> str:
    shorter = "shorten --config.engine.max_prompt or --config.sampling.max_new_tokens"
    lora = "" if config.policies.train == "lora" else "--config.policies.train=lora, or "
    off = "" if config.learner.gradients == "off" else "--config.learner.gradients=off, or "
    remat = "" if config.policies.remat == "layer" else "--config.policies.remat=layer, or "
    ways = {
        "base weights": "take a smaller base, or --config.policies.dtype=bfloat16",
        "caches of the lanes": f"lower --config.engine.lanes or budget_bytes, or {shorter}",
        "caches of prompts": f"lower --config.engine.lanes or budget_bytes, or {shorter}",
        "working memory of prefill": "shorten --config.engine.max_prompt",
        "working memory of decoding": "lower --config.engine.lanes",
        "gradient trees": f"{off}{lora}take a smaller base",
        "optimiser states": f"{lora}--config.learner.optimiser.kind=adafactor",
        "activations": f"{remat}lower --config.learner.batch.token_budget, or {shorter}",
        "working memory of the backward pass": (
            f"lower --config.learner.batch.token_budget, tree_limit or logprob_chunk, or {shorter}"
        ),
        "working memory of the optimiser": f"{off}{lora}take a smaller base",
    }
    return ways.get(part, f"{lora}take a smaller base")
