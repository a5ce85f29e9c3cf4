"""The output of `plan`: the page over all kinds of devices, how many seeds fit, and XLA's account of memory."""

import json
import math
from collections.abc import Iterator

from marl_jax.config.run_config import RunConfig
from marl_jax.fields import each_once
from marl_jax.planning.account import account, line_of
from marl_jax.planning.devices import KINDS, host
from marl_jax.planning.lengths import SPREAD, PlanError, read_lengths, recorded_lengths
from marl_jax.planning.plan import demand_of, find_models, make_plan, with_demand
from marl_jax.terminal.page import plan_page


def run_plan(
    config: RunConfig,
    completion: str,
    folder: str | None,
    tokens_per_second: float,
    answers: str = "{}",
    *,
    compiles: bool = False,
) -> Iterator[str]:
    """Yields the output text by text. Lengths of completions are `completion`, or those of the run in `folder`;
    `answers` are JSON: {role: {text: probability}}.
    """
    from marl_jax.planning.step_memory import compiled_plan, seeds_that_fit
    from marl_jax.runs.in_arrays import cpu_devices
    from marl_jax.runs.opening import check_before_run

    if config.road == "compiled":
        cpu_devices()
    models, source = find_models(config)
    lengths = read_lengths(completion)
    if folder:
        lengths = recorded_lengths(folder, lengths)
    if not math.isfinite(tokens_per_second):
        raise PlanError(f"--tokens_per_second is {tokens_per_second}; it must be a number, or 0 for none")
    usual = demand = demand_of(config)
    probabilities = _answers(answers, config)
    if (lengths, tokens_per_second, probabilities) != (SPREAD, 0.0, {}):
        demand = demand_of(config, lengths, tokens_per_second, answers=probabilities)
    plans = [make_plan(config, models, device, usual) for device in (host(), *KINDS)]
    road = check_before_run(config, plans[0])
    plans = [with_demand(plan, config, models, demand) for plan in plans]
    hosted, traced = plans, None
    if road is not None:
        step, traced = road.planned()
        plans = [compiled_plan(plan, config, step) for plan in plans]
    yield plan_page(config, models, source, plans)
    if config.road == "compiled":
        memory = (
            "memory is the compiled step's" if road else "memory, too: bases or generated tasks are missing"
        )
        yield f"times and micro-batches are counted for the hosted road; {memory}"
    if road is not None and config.seeds > 1:
        fitting = (f"{seeds_that_fit(plan, config, step)} on {plan.device.name}" for plan in hosted)
        yield f"how many of the {config.seeds} seeds fit: {', '.join(fitting)}"
    if compiles:
        yield f"\n{account(config, models, usual)}"
        if road is not None and config.mesh.model > 1:
            yield "the compiled step is not listed: its trace has unsharded weights, and mesh.model shards them"
        elif road is not None:
            yield line_of("step", road.compiled(traced))


def _answers(text: str, config: RunConfig) -> dict[str, dict[str, float]]:
    form = """--answers='{"ROLE": {"TEXT": PROBABILITY}}'"""
    try:
        answers = {
            role: {str(answer): float(p) for answer, p in texts.items()}
            for role, texts in json.loads(text, object_pairs_hook=each_once).items()
        }
    except (ValueError, TypeError, AttributeError):
        raise PlanError(f"--answers is {text!r}: give {form}") from None
    if unknown := [role for role in answers if role not in config.roles]:
        raise PlanError(
            f"--answers names '{unknown[0]}', no role of the workflow; there is: {', '.join(config.roles)}"
        )
    return answers
