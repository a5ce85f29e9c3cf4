"""Memory and time that a run needs on a device, before it begins: nothing is compiled, no weights are read.

    dry run ──► calls and their tokens ──► memory and operations of each program ──► Plan
    peak = parts always in memory + the largest of: sampling | gradient of the largest micro-batch | optimiser
    time = sampling (prefill + decode) + update; grading is not counted

Lengths are not known before a run, so times are based on stated assumptions; memory is for the longest calls allowed.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_args

import jax.numpy as jnp

from marl_jax.config.phase_fields import learner_of
from marl_jax.config.run_config import RunConfig
from marl_jax.learning.objectives import PASSES
from marl_jax.models import ModelConfig
from marl_jax.models.decode import cache_bytes
from marl_jax.models.hf import load_config
from marl_jax.models.model_config import PRESETS
from marl_jax.models.tokenizer import load_tokenizer
from marl_jax.own import is_own
from marl_jax.packaged import resolve_path
from marl_jax.planning import costs, memory
from marl_jax.planning.costs import Model
from marl_jax.planning.devices import Device
from marl_jax.planning.dry_run import PROBLEMS, Assumptions, Demand, PlanError, PlannedCall, dry_run, play
from marl_jax.planning.lengths import SPREAD, Lengths
from marl_jax.planning.memory import Part, Phase, Shapes
from marl_jax.planning.occupancy import Length, Occupancy, Waves, occupancy_at_length
from marl_jax.planning.workload import Shape, batches_of
from marl_jax.policies import decode_groups, roles_of
from marl_jax.rollouts.history import Chats
from marl_jax.runs.loading.parts import read_prompts
from marl_jax.sampling.shapes import EngineSettings
from marl_jax.task import Task
from marl_jax.workflows import find


@dataclasses.dataclass(frozen=True)
class Work:
    """A part of a step: operations of matrix products, and bytes that must move."""

    name: str
    operations: float
    moved: float
    elsewhere: float = 0.0  # seconds on other devices; then the other two are 0

    def of(self, seeds: int) -> "Work":
        """The work of `seeds` seeds, one after the other."""
        return Work(self.name, seeds * self.operations, seeds * self.moved, seeds * self.elsewhere)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run needs on one device."""

    device: Device
    dtype: str
    parts: tuple[Part, ...]
    works: tuple[Work, ...]  # of one training step
    shapes: Shapes  # of the engines
    engines: int
    largest: Shape  # the micro-batch that takes most
    calls: int  # most calls of an episode
    assumptions: Assumptions
    failed: str = ""  # the error that ended an episode of made-up answers
    refusal: str | None = None  # error of the engine, if its lanes do not fit the memory left for them

    @property
    def each_shape(self) -> tuple[EngineSettings, ...]:
        """The different shapes of the engines; engines of one model have the same."""
        return tuple(dict.fromkeys(self.shapes.values()))

    @property
    def phase(self) -> Phase:
        """The phase that needs most memory."""
        during = lambda phase: sum(part.bytes for part in self.parts if part.phase == phase)
        return max((phase for phase in get_args(Phase) if phase != "always"), key=during)

    @property
    def at_peak(self) -> list[Part]:
        """The parts in memory when most is needed, the biggest first."""
        present = [part for part in self.parts if part.phase in ("always", self.phase)]
        return sorted(present, key=lambda part: -part.bytes)

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(part.bytes for part in self.at_peak)

    @property
    def fits(self) -> bool:
        """Whether the device can hold the peak."""
        return self.refusal is None and self.total <= self.device.memory

    @property
    def seconds(self) -> dict[str, float] | None:
        """{work: seconds of a step}; None if the device's rates or the workflow's calls are not known."""
        if not self.device.bandwidth or not self.calls:
            return None
        on_device = lambda work: self.device.seconds(work.operations, work.moved, self.dtype)
        times = {work.name: work.elsewhere or on_device(work) for work in self.works}
        return {name: value for name, value in times.items() if value}

    def trouble(self, config: RunConfig) -> str:
        """One line: why the run does not fit and what to change."""
        # Engines get only a part of the memory, and the model may lack positions.
        if self.total <= self.device.memory:
            return f"the engines of the run cannot be made on {self.device.name}: {self.refusal}"
        lasting = [part for part in self.at_peak if part.phase == "always"]
        always = sum(part.bytes for part in lasting)
        hopeless = always > self.device.memory  # whatever a phase takes
        biggest = next(
            part for part in (lasting if hopeless else self.at_peak) if part.name != memory.PROGRAMS
        )
        return (
            f"the run needs {show(self.total)} at its peak{f', {show(always)} of it permanently,' * hopeless} and "
            f"{self.device.name} has {show(self.device.memory)}; the biggest {'permanent ' * hopeless}part is "
            f"{biggest.name} ({show(biggest.bytes)}): {_way_out(biggest.name, config)}"
        )


def demand_of(
    config: RunConfig,
    completion: Lengths | float = SPREAD,
    tokens_per_second: float = 0.0,
    *,
    answers: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
    problems: int = PROBLEMS,
) -> Demand:
    """The calls that the run makes of its engines. See `Assumptions`.

    A number as `completion` is the length of all completions, as a share of max_new_tokens. `problems` of a step's
    problems are played; they stand for all.
    """
    workflow = find(config.workflow.name).bind(**config.workflow.settings)
    lengths = completion if isinstance(completion, Lengths) else Lengths(completion, sigma=0.0)
    assumptions = Assumptions(lengths, answers=answers, tokens_per_second=tokens_per_second)
    if config.workflow.prompts == "micro":  # its tokenizer spells out most words
        assumptions = dataclasses.replace(assumptions, question=32, characters=1.25)
    return dry_run(config, workflow, read_prompts(config), assumptions, problems)


def make_plan(
    config: RunConfig,
    models: Mapping[str, ModelConfig],
    device: Device,
    demand: Demand | None = None,
    *,
    engine: Shapes | None = None,
) -> Plan:
    """What the run needs on a device; over a mesh, what one of its devices needs.

    `models` are the shapes of the policies, `demand` comes from `demand_of`. `engine` has the shapes that an earlier
    start settled; without it the engines get the shapes that the device has room for.
    """
    check_tokens(config, models)
    demand, sizes = demand or demand_of(config), memory.sizes_of(config, models, device)
    training, largest = memory.training(config, sizes, demand)
    refusal = None
    if engine is None:
        bases = sum(part.bytes for part in training if part.name == memory.BASES)
        try:
            engine = memory.shapes(config, models, device, device.memory - bases, training, demand)
        except ValueError as error:  # the plan still shows what the smallest engines need
            engine, refusal = memory.least_shapes(config, models, device.platform), str(error)
    works = (*_decoding(config, sizes, demand, engine), *_learning(config, sizes, demand, training))
    parts, order = [*training, *memory.sampling(config, sizes, engine)], get_args(Phase)
    return Plan(
        device=device,
        # Times are counted at the rates of the widest dtype.
        dtype=max((one.dtype for one in models.values()), key=lambda dtype: jnp.dtype(dtype).itemsize),
        parts=tuple(sorted(parts, key=lambda part: order.index(part.phase))),
        works=tuple(work.of(config.seeds) for work in works),
        shapes=engine,
        engines=len(decode_groups(config.policies.specs)),
        largest=largest,
        calls=demand.most_calls,
        assumptions=demand.assumptions,
        failed=demand.failed,
        refusal=refusal,
    )


def with_demand(plan: Plan, config: RunConfig, models: Mapping[str, ModelConfig], demand: Demand) -> Plan:
    """The plan for other lengths of calls, with the lanes of `plan`, which a run chooses without them."""
    if demand.assumptions == plan.assumptions:
        return plan
    return make_plan(config, models, plan.device, demand, engine=None if plan.refusal else plan.shapes)


def check_fits(
    config: RunConfig, models: Mapping[str, ModelConfig], device: Device, engine: Shapes | None = None
) -> Plan:
    """The plan for a device; refused with one line if the run does not fit, or if no prompt fits its engines."""
    plan = make_plan(config, models, device, engine=engine)
    if not plan.fits:
        raise PlanError(plan.trouble(config))
    check_prompts(config, plan)
    return plan


def check_tokens(config: RunConfig, models: Mapping[str, ModelConfig]) -> None:
    """Refuse a `top_k` or `stop_tokens` beyond the vocabulary of a role's model."""
    for role, setting in config.role_settings.items():
        policies = (name for key, name in config.policies.map.items() if key.split("/")[0] == role)
        vocab = min(models[name].vocab_size for name in policies)
        flags = {name: f"role_sampling.{role}.{name}" for name in config.role_sampling.get(role, {})}
        if setting.top_k > vocab:
            raise PlanError(
                f"{flags.get('top_k', 'sampling.top_k')} is {setting.top_k}, and the model has {vocab} tokens: lower it"
            )
        if setting.stop_tokens and (largest := max(setting.stop_tokens)) >= vocab:
            raise PlanError(
                f"{flags.get('stop_tokens', 'sampling.stop_tokens')} holds {largest}, and the model's tokens are "
                f"0..{vocab - 1}: leave it out"
            )


def check_prompts(config: RunConfig, plan: Plan, tokenizers: Mapping[str, Any] | None = None) -> None:
    """Refuse a built-in workflow with a role whose prompt leaves no room for a question in the engines of a plan.

    `tokenizers` is {policy: tokenizer}, if they are loaded already.
    """
    if is_own(config.workflow.name) or config.rollout.limits.overlong == "truncate":
        return
    try:
        if tokenizers is None:
            specs = config.policies.specs
            loaded = {base: load_tokenizer(base) for base in {spec.base for spec in specs.values()}}
            tokenizers = {name: loaded[spec.base] for name, spec in specs.items()}
        ends = {name: chat.end_of_turn for name, chat in Chats(tokenizers, {}).by_policy.items()}
    except (OSError, ValueError):  # reported when the model is loaded
        return
    context = min(one.context for one in plan.each_shape)
    limit = config.rollout.limits.context or context
    way_out = "rollout.limits.context" if limit < context else "engine.max_prompt"
    context = min(limit, context)
    calls, _ = play(
        find(config.workflow.name).bind(**config.workflow.settings),
        [Task("0", config.data.family, "")],
        read_prompts(config),
        config.policies.map,
        tokenizers,
        lambda call, request: [ends[str(request.policy)]],
        settings=config.role_settings,
        limits=dataclasses.replace(config.rollout.limits, context=None),  # the context is compared with below
    )
    for call in calls:
        room, needed = context - config.role_settings[call.role].max_new_tokens, len(call.prompt)
        if call.first and needed > room:
            raise PlanError(
                f"the prompt of '{call.role}' takes {needed} tokens before any question, and there is room for {room}: "
                f"raise --config.{way_out}"
            )


def find_models(config: RunConfig) -> tuple[dict[str, ModelConfig], str]:
    """{policy: the shape of its model}, and a text with their sources."""
    specs = config.policies.specs
    found = {base: _find_model(config, base) for base in dict.fromkeys(spec.base for spec in specs.values())}
    models = {name: found[spec.base][0] for name, spec in specs.items()}
    return models, " and ".join(source for _, source in found.values())


def _find_model(config: RunConfig, directory: str) -> tuple[ModelConfig, str]:
    """The model's shape and its source: its directory, or the preset of the cell's scale."""
    dtype = config.policies.dtype
    if (resolve_path(directory) / "config.json").is_file():
        try:
            return load_config(directory, dtype=dtype), f"'{directory}/config.json'"
        except (OSError, ValueError) as error:
            raise PlanError(str(error)) from None
    scale = config.cell.split("-")[-2] if config.cell.count("-") == 3 else ""
    if directory != config.policies.base:
        raise PlanError(f"there is no model in '{directory}': correct policies.bases")
    if scale not in PRESETS:
        raise PlanError(
            f"there is no model in '{directory}', and the cell '{config.cell}' names no scale of {', '.join(PRESETS)}: "
            "give --config.policies.base"
        )
    model = ModelConfig.preset(scale)
    model = dataclasses.replace(model, dtype=dtype) if dtype else model
    return model, f"the preset '{scale}' (there is no '{directory}/config.json' yet)"


def show(size: float) -> str:
    """Bytes as a text for people."""
    power, unit = next(((p, u) for p, u in ((40, "TiB"), (30, "GiB")) if size >= 2**p), (20, "MiB"))
    return f"{size / 2**power:.1f} {unit}"


# ---------------------------------------------------------------- time


def _decoding(
    config: RunConfig, models: Mapping[str, Model], demand: Demand, engines: Shapes
) -> Iterable[Work]:
    """Prefill and decode of one step's episodes, engine by engine."""
    times = config.data.problems / demand.problems
    if rate := demand.assumptions.tokens_per_second:
        return (Work("rollouts elsewhere", 0.0, 0.0, times * sum(call.new for call in demand.calls) / rate),)
    if config.engine.kind == "vllm":  # its devices are not known here
        return ()
    share, specs = config.mesh.devices, config.policies.specs
    prefill = decode = moved = weights = 0.0
    for group in decode_groups(specs):
        sizes, engine = memory.model_of_group(config, models, group), engines[specs[group[0]].base]
        adapters = len(group) * sizes.trained if sizes.lora_rank else 0
        calls = demand.of(group)
        for call in calls:
            prompt, attended = len(call.prompt), len(call.prompt) + call.new
            prefill += costs.serving_operations(sizes, call.fed, prompt - call.fed / 2, adapters)
            decode += (
                costs.serving_operations(sizes, call.new, attended, adapters) + 2 * call.new * sizes.head
            )
        # A step writes its logits and reads them twice.
        moved += 12 * sizes.config.vocab_size * sum(call.new for call in calls)
        if engine.lanes_at and calls:
            cached, steps, recomputed = _over_rungs(config, sizes, calls, engine, times)
            prefill += costs.serving_operations(sizes, recomputed, engine.context / 2, adapters)
        else:
            cached, steps = _over_one_cache(sizes, calls, engine, times)
        moved += cached
        weights += steps * sizes.weights
    # Lanes are spread over the devices of a process, and each of these reads its part of the weights at every step.
    weights *= config.mesh.data / share
    return (
        Work("prefill", times * prefill / share, 0.0),
        Work("decode", times * decode / share, times * (moved / share + weights)),
    )


def _over_one_cache(
    sizes: Model, calls: Sequence[PlannedCall], engine: EngineSettings, times: float
) -> tuple[float, float]:
    """(cache bytes that these calls read, if lanes are full and read just what is in them; decode steps)."""
    longest: dict[int, int] = {}  # by wave: sampled tokens of its longest call
    for call in calls:
        longest[call.wave] = max(longest.get(call.wave, 0), call.new)
    attended = sum(call.new * (len(call.prompt) + call.new) for call in calls)
    filled = -(-times * sum(call.new for call in calls) // engine.widths[0])
    # Each bank reads the weights.
    steps = max(filled, engine.banks * sum(longest.values()))
    return attended * cache_bytes(sizes.config, 1, 1), steps / times


def _over_rungs(
    config: RunConfig, sizes: Model, calls: Sequence[PlannedCall], engine: EngineSettings, times: float
) -> tuple[float, float, float]:
    """(cache bytes that a replay of these calls reads, its decode steps, tokens that are fed once more)."""
    most = tuple((role, own.max_new_tokens) for role, own in config.role_settings.items())
    ahead = memory.look_ahead(config, engine.lanes)
    replay = _replay(tuple(calls), most, engine, math.ceil(times), ahead)
    part = sum(call.new for call in calls) / replay.sampled
    steps, read = part * engine.steps, cache_bytes(sizes.config, 1, 1)
    return steps * replay.attended * read, steps * replay.dispatches, part * replay.recomputed


@functools.lru_cache(maxsize=8)  # kinds of device with equal memory have the same lanes
def _replay(
    calls: tuple[PlannedCall, ...],
    most: tuple[tuple[str, int], ...],
    engine: EngineSettings,
    times: int,
    ahead: int,
) -> Occupancy:
    return occupancy_at_length(engine, episodes_of(calls, dict(most), engine), times, ahead)


def episodes_of(calls: Iterable[PlannedCall], most: Mapping[str, int], engine: EngineSettings) -> list[Waves]:
    """The calls of an engine in the form of a replay; `most` is {role: tokens that it may sample}."""
    episodes: dict[tuple[int, ...], dict[int, list[Length]]] = {}
    for call in calls:
        waves, new = episodes.setdefault(call.episode, {}), min(most[call.role], engine.context - 1)
        fitting = Length(call.prompt[: engine.context - new], min(call.new, new), new)
        waves.setdefault(call.wave, []).append(fitting)
    return [list(waves.values()) for waves in episodes.values()]


def _learning(
    config: RunConfig, models: Mapping[str, Model], demand: Demand, parts: Iterable[Part]
) -> Iterable[Work]:
    """Reference pass, gradient and optimiser step, over all policies; epochs and passes are the most of any phase."""
    learners = [learner_of(config.learner, phase) for phase in config.phases] or [config.learner]
    share, epochs = config.mesh.devices, max(one.epochs for one in learners)
    times = config.data.problems / demand.problems
    reference = gradient = moved = added = 0.0
    cut = config.mesh.model  # devices that share a weight; other devices hold copies and do the same work
    # `parts` count the optimiser states of all seeds, on one device.
    seeds = 1 if config.road == "compiled" else config.seeds
    stepped = sum(2 * part.bytes / seeds for part in parts if part.name == memory.STATES)
    for policy in (name for name, spec in config.policies.specs.items() if not spec.frozen):
        roles = roles_of(config.policies.map, policy)
        sizes = models[policy]
        numbers = sizes.trained
        passes = max(
            PASSES.get(one.loss.kind, int(any(map(one.interventions.kl_coef.get, roles)))) for one in learners
        )
        for shape, count in batches_of(config, demand, policy, sizes.platform):
            gradient += count * costs.update_operations(sizes, shape)
            # Activations are written and read, the gradient is added to its tree.
            moved += count * 2 * costs.kept(sizes, shape)
            added += count * 12 * numbers
            reference += count * costs.forward_operations(sizes, shape) * passes
        stepped += (8 * memory.count_units(config, demand, policy) + 12) * numbers / cut
    return (
        Work("reference", times * reference / share, 0.0),
        Work("gradient", epochs * times * gradient / share, epochs * times * (moved / share + added / cut)),
        Work("optimiser", 0.0, epochs * stepped),
    )


# ---------------------------------------------------------------- ways out


def _way_out(part: str, config: RunConfig) -> str:
    policies, learner, lanes = config.policies, config.learner, config.engine.lanes
    smaller = "take a smaller base"
    shorter = "shorten --config.engine.max_prompt or --config.sampling.max_new_tokens"
    fewer = [f"lower --config.engine.lanes ({lanes})"] * bool(lanes and lanes > 1)
    off = ["--config.learner.gradients=off"] * (learner.gradients != "off")
    remat = ["--config.policies.remat=layer"] * (policies.remat != "layer")
    factored = ["--config.learner.optimiser.kind=adafactor"] * (learner.optimiser.kind != "adafactor")
    tokens = "lower --config.learner.batch.token_budget (on a CPU: slice_tokens)"
    problems = "lower --config.data.problems or --config.rollout.samples"
    seeds = [f"lower --config.seeds ({config.seeds})"] * (config.seeds > 1)
    narrower = ["--config.policies.dtype=bfloat16 if it is float32"] * (policies.dtype != "bfloat16")
    lora = ["--config.policies.train=lora"]
    if adapters := "lora" in {policies.train, *policies.trains.values()}:
        lora = [f"lower --config.policies.lora_rank ({policies.lora_rank})"] * (policies.lora_rank > 1)
    ways = {
        **{name: [*fewer, shorter] for name in (memory.LANES, memory.PROMPTS, memory.SAMPLING)},
        memory.BASES: [smaller, *narrower],
        **{name: [*off, *lora, smaller] for name in (memory.GRADIENTS, memory.OPTIMISER)},
        memory.STATES: [*lora, *factored, smaller],
        memory.ACTIVATIONS: [*remat, tokens, shorter],
        memory.BACKWARD: [f"{tokens}, tree_limit or logprob_chunk", shorter],
        **{
            name: [problems, "--config.road=hosted"]
            for name in (memory.COPIES, memory.RESULTS, memory.SCRATCH)
        },
    }
    return ", or ".join([*seeds, *ways.get(part, [smaller] if adapters else [*lora, smaller])])
