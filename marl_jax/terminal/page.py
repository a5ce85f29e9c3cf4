"""Pages of plain text for a terminal: the first page of a run, and a plan for every kind of device."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from marl_jax.config.run_config import RunConfig
from marl_jax.learning.estimators.groups import group_key
from marl_jax.learning.optimiser import OptimiserConfig
from marl_jax.models import ModelConfig
from marl_jax.models.weight_table import num_parameters
from marl_jax.planning.costs import size, trained_tree
from marl_jax.planning.devices import BANDWIDTH, COMPUTE
from marl_jax.planning.memory import Shapes
from marl_jax.planning.plan import Plan, show
from marl_jax.planning.step_times import Guess, guess
from marl_jax.policies import trained_policies
from marl_jax.sampling.shapes import EngineSettings
from marl_jax.terminal.tables import aligned, filled
from marl_jax.workflows import find

LABEL = 14


def page(
    config: RunConfig,
    models: Mapping[str, ModelConfig],
    *,
    folder: Path,
    tasks: Mapping[str, int],
    engine: Shapes,
    plan: Plan,
    road: str = "hosted",
) -> str:
    """The start-up page; `tasks` counts the problems of each split, `engine` has the shapes that were chosen."""
    in_arrays = road.startswith("compiled")  # then only evaluations need engines
    engines = [] if in_arrays and not config.evaluation.every else _engines(config, plan, engine)
    lines = [
        ("cell", f"{config.cell}: workflow {config.workflow.name} on {config.data.name}"),
        *(("model" if not i else "", text) for i, text in enumerate(_models(config, models))),
        *(("policies" if not i else "", text) for i, text in enumerate(_policies(config, models))),
        ("problems", ", ".join(f"{split} {count:,}" for split, count in tasks.items())),
        ("advantages", _groups(config)),
        ("step", _step(config)),
        ("road", road),
        ("steps", f"{config.steps:,}{_evaluations(config, tasks)}"),
        *(("phases" if not i else "", text) for i, text in enumerate(_phases(config))),
        ("optimiser", _optimiser(config.learner.optimiser)),
        ("memory", _memory(plan) + (", as counted for the hosted road" if in_arrays else "")),
        *(("engine" if not i else "", text) for i, text in enumerate(engines)),
        ("time", _time(config, plan, guess(config, plan))),
        ("written to", f"{folder}: config.json, metrics.jsonl, eval.jsonl, episodes/, checkpoints/"),
    ]
    fill = functools.partial(filled, subsequent_indent=" " * LABEL)
    return "\n".join(fill(text, initial_indent=f"{label:<{LABEL}}") for label, text in lines)


def plan_page(
    config: RunConfig, models: Mapping[str, ModelConfig], source: str, plans: Sequence[Plan]
) -> str:
    """The plans of a cell for several devices: memory and time on each."""
    first = plans[0]
    kinds = dict.fromkeys(
        (one, config.policies.trains.get(name, config.policies.train)) for name, one in models.items()
    )
    trained = []
    for one, how in kinds:
        form = f"LoRA {config.policies.lora_rank}" if how == "lora" else "full"
        if how == "lora":
            form += too_many_adapters(config, one, size(trained_tree(one, config.policies.lora_rank)) // 4)
        trained.append(form)
    sizes = " and ".join(f"{_count(num_parameters(one))} parameters, {one.dtype}" for one, _ in kinds)
    head = [
        f"{config.cell}: {sizes}, from {source}; {' and '.join(trained)}, "
        f"remat {config.policies.remat}; {first.engines} engine{'s' * (first.engines > 1)}",
        f"at most {first.calls} calls per episode; assumed: {first.assumptions}; {COMPUTE:.0%} of a device's "
        f"peak operations, {BANDWIDTH:.0%} of its bandwidth",
    ]
    if first.failed:
        head.append(
            "the workflow failed on made-up answers, tools without results and tasks without meta, and only calls "
            f"before count: {first.failed}"
        )
    if config.rollout.draws > 1:
        head.append(f"times are for one draw of each problem, not for up to {config.rollout.draws}")
    if config.mesh.devices > 1:
        over = f", of each of {config.mesh.hosts} hosts" if config.mesh.hosts > 1 else ""
        head.append(f"for each device of a mesh of {config.mesh.data} x {config.mesh.model}{over}")
    times = [["time per step", *(plan.device.name for plan in plans)]]
    for work in dict.fromkeys(work.name for plan in plans for work in plan.works):
        times.append([work, *(duration((plan.seconds or {}).get(work, 0.0)) for plan in plans)])
    times.append(["in all", *(duration(sum((plan.seconds or {}).values())) for plan in plans)])
    known = guess(config, first)
    if known is not None:
        times.append([known.name, duration(known.seconds), *["-"] * (len(plans) - 1)])
    in_one = any(part.phase == "step" for part in first.parts)
    notes = [
        f"* only during its phase: {'sampling or step' if in_one else 'sampling, gradient or optimiser'}. Not counted: "
        "grading, and the memory of a process at its start (Python and JAX: about 0.3 GiB of the host)."
    ]
    notes += [f"{known.name.capitalize()}: {known.how}."] if known else []
    notes += [_verdict(config, plan) for plan in plans]
    fill = functools.partial(filled, subsequent_indent="  ")
    tables = [aligned(_memory_rows(plans), left=1), aligned(times, left=1)]
    return "\n\n".join(["\n".join(map(fill, head)), *tables, "\n".join(map(fill, notes))])


def _memory_rows(plans: Sequence[Plan]) -> list[list[str]]:
    """The table of memory, with a column for each plan."""
    rows = [["memory", *(plan.device.name for plan in plans)]]
    for name in dict.fromkeys(part.name for plan in plans for part in plan.parts):
        named = [[part for part in plan.parts if part.name == name] for plan in plans]
        passing = any(part.phase != "always" for parts in named for part in parts)
        counted = [max((part.bytes for part in parts), default=0) for parts in named]
        rows.append([f"{name} *" if passing else name, *(show(n) if n else "-" for n in counted)])
    rows.append(["at the peak", *(show(plan.total) for plan in plans)])
    rows.append(["phase of the peak", *(plan.phase for plan in plans)])
    rows.append(["available", *(show(plan.device.memory) for plan in plans)])
    rows.append(["lanes x tokens", *(", ".join(map(_longest, plan.each_shape)) for plan in plans)])
    if any(engine.lanes_at for plan in plans for engine in plan.each_shape):
        every = (", ".join(str(engine.lanes) for engine in plan.each_shape) for plan in plans)
        rows.append(["lanes of all lengths", *every])
    rows.append(["largest micro-batch", *(f"{p.largest.rows}x{p.largest.width}" for p in plans)])
    rows.append(["fits", *("yes" if plan.fits else "NO" for plan in plans)])
    return rows


def _longest(engine: EngineSettings) -> str:
    """The lanes of the longest cache, and its length."""
    return f"{engine.lanes_at[-1] if engine.lanes_at else engine.lanes}x{engine.context}"


def _verdict(config: RunConfig, plan: Plan) -> str:
    if not plan.fits:
        return f"{plan.device.name} does not fit: {plan.trouble(config)}"
    biggest = plan.at_peak[0]
    share = biggest.bytes / plan.total
    return f"{plan.device.name} fits: {share:.0%} of the peak is {biggest.name} ({show(biggest.bytes)})"


# ---------------------------------------------------------------- lines of the start-up page


def _models(config: RunConfig, models: Mapping[str, ModelConfig]) -> Iterator[str]:
    """A line for each base; if there are several, with the policies that start from it."""
    chosen, policies_of = config.policies, dict[str, list[str]]()
    for policy in models:
        policies_of.setdefault(chosen.bases.get(policy, chosen.base), []).append(policy)
    for base, policies in policies_of.items():
        model = models[policies[0]]
        whose = f" ({', '.join(policies)})" if len(policies_of) > 1 else ""
        yield f"{_count(num_parameters(model))} parameters, {model.dtype}, from {base}{whose}"


def _policies(config: RunConfig, models: Mapping[str, ModelConfig]) -> Iterator[str]:
    trained = trained_policies(config.policies.map, config.policies.frozen_roles)
    for policy, model in models.items():
        lora = config.policies.trains.get(policy, config.policies.train) == "lora"
        count = size(trained_tree(model, config.policies.lora_rank if lora else 0)) // 4
        roles = [key for key, name in config.policies.map.items() if name == policy]
        named = ", ".join(f"{key} (frozen)" if key in config.policies.frozen_roles else key for key in roles)
        what = "frozen, served only"
        if policy in trained:
            what = f"{_count(count)} trainable"
            if lora:
                what += f" (LoRA, rank {config.policies.lora_rank}){too_many_adapters(config, model, count)}"
        yield f"{named} -> {policy}: {what}"


def too_many_adapters(config: RunConfig, model: ModelConfig, count: int) -> str:
    """A hint if adapters have more parameters than the model that they save from being trained."""
    model_size, rank = num_parameters(model), config.policies.lora_rank
    if count <= model_size:
        return ""
    return (
        f", more than the {_count(model_size)} of the model itself: lower --config.policies.lora_rank to "
        f"{max(1, rank * model_size // (4 * count))}, a quarter of it, or set --config.policies.train=full"
    )


def _groups(config: RunConfig) -> str:
    chosen = config.advantages
    if chosen.estimator == "agent":
        return f"agent-wise: mean per {chosen.agent_mean}, scale per {chosen.agent_scale}, of each task"
    fields = group_key(chosen.group, find(config.workflow.name).groups)
    return f"{chosen.estimator}, calls compared with those of the same {' and '.join(fields)}"


def _step(config: RunConfig) -> str:
    problems, samples = config.data.problems, config.rollout.samples
    drawn = f", drawn up to {config.rollout.draws} times" if config.rollout.draws > 1 else ""
    return (
        f"{problems} problems x {samples} episodes = {problems * samples:,} episodes{drawn}; "
        f"up to {max(role.max_new_tokens for role in config.role_settings.values()):,} new tokens per call"
    )


def _evaluations(config: RunConfig, tasks: Mapping[str, int]) -> str:
    every, problems = config.evaluation.every, config.evaluation.problems
    if not every:
        return ""
    if (available := tasks.get("val", problems)) < problems:
        return f", evaluated every {every} on all {available} problems of val (evaluation.problems is {problems})"
    return f", evaluated every {every} on {problems} problems of val"


def _phases(config: RunConfig) -> Iterator[str]:
    for number, phase in enumerate(config.phases, 1):
        who = " and ".join(filter(None, (", ".join(phase.roles), ", ".join(phase.policies)))) or "everything"
        kind = phase.objective or config.learner.loss.kind
        calls = "" if phase.source == "play" else f" on {phase.source}"
        start = "" if phase.start == "last" else f", from {phase.start}"
        start += "".join(f", {name} from {other}" for name, other in phase.copies.items())
        start += "" if phase.reference == "base" else f", reference {phase.reference}"
        yield f"{phase.name or number}: {phase.steps} steps of {who}, {kind}{calls}{start}"


def _optimiser(config: OptimiserConfig) -> str:
    schedule = config.schedule
    warm = f", {schedule.warmup_steps} steps of warm-up" if schedule.warmup_steps else ""
    end = "" if schedule.kind == "constant" else f" to step {schedule.total_steps}"
    return f"{config.kind}, learning rate {schedule.learning_rate:g} {schedule.kind}{end}{warm}"


def _memory(plan: Plan) -> str:
    biggest = ", ".join(f"{part.name} {show(part.bytes)}" for part in plan.at_peak[:4])
    return (
        f"{show(plan.total)} at the peak ({plan.phase}) of {show(plan.device.memory)} that {plan.device.name} has "
        f"free; {biggest}"
    )


def _engines(config: RunConfig, plan: Plan, engine: Shapes) -> Iterator[str]:
    """One line if all engines are alike, else one for each base."""
    first, *others = {*engine.values()}
    if others:
        yield from (f"for {base}: {_lanes(shapes)}" for base, shapes in engine.items())
    elif config.engine.kind == "vllm":
        flight = f"{first.lanes} requests in flight; steps do not repeat to the bit, resumed or not"
        chosen = config.engine.vllm
        log = "vllm.log" if plan.engines == 1 else "vllm-*.log"
        place = f"started by this run ({log})" if chosen.start else f"at {chosen.url}"
        yield f"vLLM {place}, {flight}"
    else:
        yield (f"{plan.engines} engines, each of " if plan.engines > 1 else "") + _lanes(first)


def _lanes(engine: EngineSettings) -> str:
    if not engine.lanes_at:
        return f"{engine.lanes} lanes of {engine.context:,} tokens"
    rungs = ", ".join(f"{lanes} of {length:,}" for lanes, length in engine.rungs)
    return f"{engine.lanes} lanes over rungs: {rungs} tokens"


def _time(config: RunConfig, plan: Plan, known: Guess | None) -> str:
    seconds = plan.seconds
    if known is not None:
        return f"about {duration(known.seconds)} per step, {known.how}; without compilation and evaluation"
    if seconds is None:
        why = "it is not in the table of devices" if plan.calls else "the workflow's calls depend on its task"
        return f"not known for {plan.device.name}: {why}"
    parts = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items())
    left_out = "sampling, grading" if config.engine.kind == "vllm" else "grading"
    return (
        f"about {duration(sum(seconds.values()))} per step ({parts}) without {left_out} and compilation, where "
        f"{plan.assumptions}"
    )


# ---------------------------------------------------------------- helpers


def _count(number: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.2f}{name}" if number < 10 * unit else f"{number / unit:.1f}{name}"
    return str(number)


def duration(seconds: float) -> str:
    """A time in words, in the largest unit that fits."""
    if seconds >= 48 * 3600:
        return f"{seconds / 86400:,.0f} days"
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 60:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{seconds * 1000:.0f} ms" if seconds else "-"
