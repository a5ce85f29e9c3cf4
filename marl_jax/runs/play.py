"""Playing tasks: the parts of a run and its engines come together here, for training and for evaluation alike.

tasks ──rollout──► the table of their calls; each episode as it ends ──finished──► whoever begins with its grade
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marl_jax import fields
from marl_jax.config.run_config import RunConfig
from marl_jax.planning import devices, memory
from marl_jax.planning.plan import PlanError, demand_of
from marl_jax.policies import Tree
from marl_jax.rewards.families import parse
from marl_jax.rollouts import Progress, ToolLog, rollout
from marl_jax.rollouts.serving import Service
from marl_jax.run_folder.folder import CONFIG, FolderError
from marl_jax.runs.parts import Parts, check_answers, digests, load_parts, load_tasks
from marl_jax.sampling.shapes import EngineSettings
from marl_jax.sampling.stability import common_shapes
from marl_jax.table import Episode, Table
from marl_jax.tasks import Task

EVALUATION_NOISE = 0  # the step whose noise every evaluation has: checkpoints are compared on the same draws


@dataclasses.dataclass(frozen=True)
class Named:
    """What a configuration names, loaded, and the digests of all of it."""

    parts: Parts
    splits: dict[str, Sequence[Task]]
    digests: dict[str, str]


def load_named(config: RunConfig, splits: Sequence[str]) -> Named:
    """The parts and the tasks of these splits, which can be graded on this machine."""
    parts = load_parts(config)
    start_graders(config)
    tasks = {split: load_tasks(config.data, split) for split in splits}
    for split, those in tasks.items():
        check_answers(config, split, those)
    return Named(parts, tasks, digests(config, parts, tasks))


def planned_engine(config: RunConfig, parts: Parts, *, training: bool = True) -> EngineSettings:
    """The shapes of each engine, planned from the configuration and the memory that the loaded weights leave here."""
    device, demand = devices.here(), demand_of(config)
    sizes = memory.sizes_of(config, parts.model, device)
    needed = memory.training(config, sizes, demand)[0] if training else ()
    room = memory.room(config, device, device.memory, needed)
    try:
        return memory.engine_settings(config, parts.model, room, demand, device.platform)
    except ValueError as error:
        raise PlanError(f"the engines do not fit: {error}") from error


def settled_shapes(settled: Mapping[str, Any]) -> EngineSettings | None:
    """What an earlier start settled on."""
    if not settled.get("engine"):
        return None
    try:
        return fields.from_json(EngineSettings, fields.filled(EngineSettings, settled["engine"]))
    except ValueError as error:
        raise FolderError(
            f"{CONFIG} has a broken settled.engine ({error}): restore it, or make settled {{}}"
        ) from None


def start_graders(config: RunConfig) -> None:
    """Open the workers that grade, so that a machine that cannot isolate programs says so before anything is played."""
    if config.data.family == "code":
        from marl_jax.rewards.sandbox.pool import default_pool

        default_pool()
    else:
        from marl_jax.rewards.math import math_pool

        math_pool.start()


def make_service(
    config: RunConfig,
    parts: Parts,
    trees: Mapping[str, Tree],
    settings: EngineSettings,
    versions: Mapping[str, int] | None = None,
    *,
    measured: bool = False,
) -> Service:
    """The engines that answer for every policy of the run, all of one shape.

    Shapes that were not `measured` yet are measured, which may leave fewer (see `sampling.stability`).
    """
    make = functools.partial(
        Service,
        parts.specs,
        trees,
        parts.bases,
        parts.model,
        versions=versions,
        lora_scale=parts.lora_scale or 1.0,
        to_text=parts.tokenizer.decode,
    )
    service = make(settings, measured=measured)
    found = [engine.settings for engine in service.engines.values()]
    common = common_shapes(found)
    if all(one == common for one in found):
        return service
    del service  # its caches go before the new ones come
    return make(common, measured=True)


def shapes_of(service: Service) -> EngineSettings:
    """The shapes of its engines."""
    return next(iter(service.engines.values())).settings


def play(
    config: RunConfig,
    parts: Parts,
    service: Service,
    tasks: Sequence[Task],
    *,
    samples: int,
    step: int,
    first_sample: int = 0,
    seed: int | None = None,
    tool_log: ToolLog | None = None,
    progress: Callable[[Progress], None] | None = None,
    finished: Callable[[Episode], None] | None = None,
) -> Table:
    """The table of `samples` episodes of every task.

    Their noise follows from the seed (None: the run's), step, task and sample.

    `finished` is called with each episode as it ends, while the others are still sampled: to begin with its grading.
    """
    settings, engines = shapes_of(service), len({id(engine) for engine in service.engines.values()})
    limits = config.rollout.limits
    context = min(limits.context or settings.context, settings.context)
    return rollout(
        parts.workflow,
        tasks,
        service.engines,
        parts.tokenizer,
        config.policies.map,
        prompts=parts.prompts,
        parse=parse,
        samples=samples,
        first_sample=first_sample,
        seed=config.seed if seed is None else seed,
        step=step,
        settings=config.role_settings,
        limits=dataclasses.replace(limits, context=context),
        versions=service.versions,
        mode=config.rollout.mode,
        tool_delay=config.rollout.tool_delay,
        tool_threads=config.rollout.tool_threads,
        tool_log=tool_log,
        ahead=memory.look_ahead(config, settings, engines),
        progress=progress,
        finished=finished,
    )
