"""Memory and time that a run needs on a device, counted from shapes: nothing is compiled, no weights are read.

    peak = what is always there + the largest of: prefill | decode | gradient of the largest micro-batch | optimiser
    time = sampling (prefill + decode) + update; grading is not counted

Lengths are not known before a run, so times rest on stated assumptions; memory is that of the longest calls allowed.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from marl_jax.models import ModelConfig
from marl_jax.models.decode import cache_bytes
from marl_jax.models.hf import load_config
from marl_jax.models.model_config import PRESETS
from marl_jax.models.tokenizer import load_tokenizer
from marl_jax.models.weight_table import num_parameters
from marl_jax.own import is_own
from marl_jax.planning import costs, devices, memory
from marl_jax.planning.costs import Model
from marl_jax.planning.devices import Device
from marl_jax.planning.memory import Part, Phase
from marl_jax.planning.walks import shortest_episode
from marl_jax.planning.workload import Assumptions, CallShape, Shape, assume, batches_of, calls_of
from marl_jax.policies import PolicySpec, decode_groups
from marl_jax.rollouts import Chat
from marl_jax.runs.parts import policy_specs, words
from marl_jax.runs.run_config import RunConfig
from marl_jax.sampling.shapes import EngineSettings

PROBLEMS = 4  # so many are batched to see how the rows of a step are packed


class PlanError(ValueError):
    """A run that does not fit its device or its model; the text is one line."""


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
        # Engines get but a part of what there is, and the model may have no such positions.
        if self.total <= self.device.memory:
            return f"on {self.device.name} its engines cannot be made: {self.refusal}"
        lasting = [part for part in self.at_peak if part.phase == "always"]
        always = sum(part.bytes for part in lasting)
        hopeless = always > self.device.memory  # whatever a phase takes
        biggest = (lasting if hopeless else self.at_peak)[0]
        return (
            f"the run needs {show(self.total)} at its peak{f', {show(always)} of it always,' if hopeless else ''} and "
            f"{self.device.name} has {show(self.device.memory)}; {'of what is always there ' if hopeless else ''}the "
            f"biggest part is {biggest.name} ({show(biggest.bytes)}): {_way_out(biggest.name, config)}"
        )


def make_plan(
    config: RunConfig,
    model: ModelConfig,
    device: Device,
    *,
    completion: float = 0.5,
    engine: EngineSettings | None = None,
) -> Plan:
    """What the run needs on a device; over a mesh, what one of its devices does.

    `completion` is the mean length that is assumed of completions, as a share of max_new_tokens. `engine` is what an
    earlier start settled; without it the engines get the shapes that the device has room for.
    """
    _check_tokens(config, model)
    specs = policy_specs(config.policies)
    sizes = Model(model, device.platform, device.capability, config.policies.remat, config.policies.attention)
    assumptions = assume(config, completion)
    rounds = calls_of(config, assumptions)
    standing = memory.standing(config, sizes, specs)
    bases = sum(part.bytes for part in standing if part.name == memory.BASES)
    engines = len(decode_groups(specs))
    refusal = None
    if engine is None:
        engine, refusal = memory.engine_within(config, model, device, device.memory - bases, engines)
    gradient, largest = memory.gradient(config, sizes, specs, rounds)
    return Plan(
        device=device,
        dtype=model.dtype,
        parts=(*standing, *memory.sampling(config, sizes, engine, engines), *gradient),
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


def check_fits(
    config: RunConfig,
    model: ModelConfig,
    available_bytes: int | None = None,
    *,
    engine: EngineSettings | None = None,
) -> Plan:
    """The plan for the device at hand; refused with one line if the run cannot fit it, or no prompt its engines."""
    device = devices.here()
    if available_bytes is not None:
        device = dataclasses.replace(device, memory=available_bytes)
    made = make_plan(config, model, device, engine=engine)
    if not made.fits:
        raise PlanError(made.trouble(config))
    _check_prompts(config, made.engine)
    return made


def _check_tokens(config: RunConfig, model: ModelConfig) -> None:
    """Refuse settings that speak of more tokens than the model has."""
    vocab = model.vocab_size
    for role, own in config.role_settings.items():
        of = {name: f"role_sampling.{role}.{name}" for name in config.role_sampling.get(role, {})}
        if own.top_k > vocab:
            name = of.get("top_k", "sampling.top_k")
            raise PlanError(
                f"{name} is {own.top_k}, and the model has {vocab} tokens: lower it, or 0 to keep all"
            )
        if own.stop_tokens and (largest := max(own.stop_tokens)) >= vocab:
            name = of.get("stop_tokens", "sampling.stop_tokens")
            raise PlanError(
                f"{name} holds {largest}, and the model's tokens are 0..{vocab - 1}: leave it out"
            )


def _check_prompts(config: RunConfig, engine: EngineSettings) -> None:
    """Refuse a built-in workflow with a role whose words leave no room for any question."""
    directory = Path(config.policies.base)
    if is_own(config.workflow.name) or config.rollout.limits.overlong == "truncate":
        return
    try:
        chat = Chat(load_tokenizer(directory))
    except (OSError, ValueError):  # told when the model is loaded
        return
    limit = config.rollout.limits.context or engine.context
    context = min(limit, engine.context)
    way_out = "rollout.limits.context" if limit < engine.context else "engine.max_prompt"
    for call in shortest_episode(config, words(config)):
        room = context - config.role_settings[call.role].max_new_tokens
        if not call.after and (needed := len(chat.start(call.messages))) > room:
            raise PlanError(
                f"the prompt of '{call.role}' takes {needed} tokens before any question, and there is room for {room}: "
                f"raise --config.{way_out}"
            )


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
        sampled: dict[int, int] = {}  # tokens, by the length of cache that their calls may need
        for call in (call for some in mine for call in some):
            rung = engine.rung_of(
                min(engine.context, call.prompt + config.role_settings[call.role].max_new_tokens)
            )
            sampled[rung] = sampled.get(rung, 0) + episodes * call.new
        in_turn = sum(max((call.new for call in some), default=0) for some in mine)
        filled = sum(-(-tokens // engine.widths_at(rung)[0]) for rung, tokens in sampled.items())
        decode_moved += max(filled, engine.banks * in_turn) * costs.weights(model)  # each bank reads them
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
        units = memory.count_units(config, rounds, policy)
        state = memory.optimiser_bytes(config, sizes.config)
        stepped += config.learner.epochs * (8 * units * numbers + 2 * state + 12 * numbers)
    return (
        Work("reference", reference / share, 0.0),
        Work("gradient", gradient / share, moved / share),
        Work("optimiser", 0.0, stepped / share),
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
    lora = ["--config.policies.train=lora"]
    if policies.train == "lora":
        lora = [f"lower --config.policies.lora_rank ({policies.lora_rank})"] * (policies.lora_rank > 1)
    ways = {
        "base weights": [smaller, "--config.policies.dtype=bfloat16"],
        "caches of the lanes": [*fewer, shorter],
        "caches of prompts": [*fewer, shorter],
        "working memory of prefill": ["shorten --config.engine.max_prompt"],
        "working memory of decoding": [*fewer, shorter],
        "an array of a cache, resized": [*fewer, shorter],
        "gradient trees": [*off, *lora, smaller],
        "optimiser states": [*lora, *factored, smaller],
        "activations": [*remat, "lower --config.learner.batch.token_budget", shorter],
        "working memory of the backward pass": [
            "lower --config.learner.batch.token_budget, tree_limit or logprob_chunk",
            shorter,
        ],
        "working memory of the optimiser": [*off, *lora, smaller],
    }
    return ", or ".join(ways.get(part, [*lora, smaller]))
