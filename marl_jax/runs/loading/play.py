"""From a configuration to a player: the parts of a run and its engines come together here.

parts, shapes ──► engines ──► Player ──play(tasks)──► the table of their calls
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marl_jax import fields, hosts
from marl_jax.config.run_config import RunConfig
from marl_jax.own import is_own
from marl_jax.planning import devices, memory
from marl_jax.planning.memory import Shapes
from marl_jax.planning.plan import PlanError, check_tokens, demand_of
from marl_jax.policies import Tree
from marl_jax.rollouts import EpisodesFailed, Player
from marl_jax.rollouts.history import Chats
from marl_jax.rollouts.progress import Progress
from marl_jax.rollouts.running import Ask, Running
from marl_jax.rollouts.scheduler import task_key
from marl_jax.rollouts.serving import Service
from marl_jax.rollouts.vllm.servers import Servers
from marl_jax.rollouts.voices import Engines
from marl_jax.run_folder.folder import CONFIG, FolderError
from marl_jax.runs.loading.parts import (
    Parts,
    PartsError,
    check_answers,
    digests,
    load_parts,
    load_tasks,
    words,
)
from marl_jax.sampling.shapes import EngineSettings
from marl_jax.sampling.stability import common_shapes
from marl_jax.tasks import DataError, Task
from marl_jax.tasks.micro import KINDS
from marl_jax.workflows import find

BEGUN = 16  # problems that a workflow is tried on before anything is compiled
EVALUATION_NOISE = 0  # every evaluation has this step's noise: checkpoints are compared on the same draws


@dataclasses.dataclass(frozen=True)
class Named:
    """The loaded parts of a configuration, with digests of all of them."""

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


def check_problems(config: RunConfig, tokenizers: Mapping[str, Any], tasks: Sequence[Task]) -> None:
    """Refuse, before anything is compiled, too few problems for a step, and a run without a first answer.

    A problem that is in a batch twice would be played twice with the same noise. The workflow is begun on a few
    problems: either it raises on all, or its shortest prompt is longer than allowed. `tokenizers` are by policy.
    """
    if config.steps and config.data.problems > len(tasks):
        carved = 0 if config.data.name in KINDS else config.data.val_size
        taken = f", or --config.data.val_size ({carved})" if carved else ""
        raise DataError(
            f"data.problems is {config.data.problems} and the train split has {len(tasks)}: lower "
            f"--config.data.problems (--config.rollout.samples gives more episodes of each){taken}"
        )
    lengths, traces, longest = [], [], config.engine.max_prompt
    workflow, prompts = find(config.workflow.name).bind(**config.workflow.settings), words(config)
    chats = Chats(tokenizers, config.policies.map)
    some = [tasks[i] for i in range(min(BEGUN, len(tasks)))]
    limits = dataclasses.replace(config.rollout.limits, context=None)
    for task in some:
        key = (config.seed, 1, task_key(task), 0)
        episode = Running(task, 0, key, workflow, prompts, chats.of, limits)
        lengths += [len(item.prompt) for item in episode.advance() if isinstance(item, Ask)]
        traces += [episode.trace or episode.error or ""] if episode.error else []
        episode.close()
    if some and len(traces) == len(some) and config.rollout.max_failed is not None:
        raise EpisodesFailed(
            f"workflow '{workflow.name}' ended in an error on all {len(some)} problems that it was tried on; the "
            f"first:\n{traces[0].rstrip()}"
        )
    if lengths and min(lengths) > longest and limits.overlong == "refuse":
        raise PartsError(
            f"engine.max_prompt is {longest}, and the shortest prompt of {len(some)} problems has {min(lengths)} "
            f"tokens (the longest {max(lengths)}): raise it, with room for what later prompts show"
        )


def planned_engine(config: RunConfig, parts: Parts, *, training: bool = True) -> Shapes:
    """The shapes of each engine, planned from the configuration and the memory that the loaded weights leave here."""
    device, demand = devices.here(), demand_of(config)
    models = {name: parts.models[spec.base] for name, spec in config.policies.specs.items()}
    check_tokens(config, models)
    sizes = memory.sizes_of(config, models, device)
    needed = memory.training(config, sizes, demand)[0] if training else ()
    try:
        return memory.shapes(config, models, device, device.memory, needed, demand)
    except ValueError as error:
        raise PlanError(f"the engines do not fit: {error}") from error


def settled_form(shapes: Shapes) -> dict[str, Any]:
    """As `config.json` has it: `engine` where all have the same shapes, else `engines` by base."""
    forms = {base: fields.to_json(one) for base, one in shapes.items()}
    return {"engines": forms} if len({*shapes.values()}) > 1 else {"engine": next(iter(forms.values()))}


def settled_shapes(settled: Mapping[str, Any], config: RunConfig) -> Shapes | None:
    """The shapes that an earlier start settled."""
    if not (settled.get("engine") or settled.get("engines")):
        return None
    name = "engine" if settled.get("engine") else "engines"
    try:
        if name == "engine":
            bases = (spec.base for spec in config.policies.specs.values())
            return dict.fromkeys(bases, _settled_engine(settled[name]))
        return {base: _settled_engine(form) for base, form in settled[name].items()}
    except FolderError:
        raise
    except (ValueError, TypeError, AttributeError) as error:
        raise FolderError(
            f"{CONFIG} has a broken settled.{name} ({error}): restore it, or make settled {{}}"
        ) from None


def _settled_engine(form: Mapping[str, Any]) -> EngineSettings:
    """The shapes of one engine. Earlier versions gave all lanes to one cache length after the other."""
    known = {name: value for name, value in form.items() if name != "grows"}
    if len(known) < len(form) and known.get("lanes_at"):
        raise FolderError(
            f"{CONFIG} has settled.engine.lanes_at {known['lanes_at']} of lanes that took turns, and they now lie in "
            "memory together: make settled {} to plan them anew; tokens go on the same but for near-ties"
        )
    whole = fields.filled(EngineSettings, known)
    whole["features"].pop("untempered", None)  # earlier versions could record those log-probs too
    return fields.from_json(EngineSettings, whole)


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
    settings: Shapes,
    versions: Mapping[str, int] | None = None,
    *,
    measured: bool = False,
    log: Path | None = None,
) -> Engines:
    """The engines that answer for every policy of the run, those of one model all of one shape.

    Shapes that were not `measured` yet are measured, which may leave fewer (see `sampling.stability`). A vLLM server
    that is started for them writes to `log`, and several to files beside it.
    """
    if config.engine.kind == "vllm":
        return Servers(
            parts.specs,
            parts.models,
            settings,
            config.engine.vllm,
            parts.tokenizers,
            log,
            versions,
            trees=trees,
            bases=parts.bases,
            lora_scale=parts.lora_scale or 1.0,
        )
    make = functools.partial(
        Service,
        parts.specs,
        trees,
        parts.bases,
        parts.models,
        versions=versions,
        lora_scale=parts.lora_scale or 1.0,
        to_text={base: tokenizer.decode for base, tokenizer in parts.tokenizers.items()},
    )
    service = make(settings, measured=measured)
    found = {name: engine.settings for name, engine in service.engines.items()}
    models = parts.of_policies(parts.models)
    alike = lambda name: [one for other, one in found.items() if models[other] == models[name]]
    common = {parts.specs[name].base: common_shapes(alike(name)) for name in found}
    if all(one == common[parts.specs[name].base] for name, one in found.items()):
        return service
    del service  # its caches are freed before the new ones are made
    return make(common, measured=True)


def player_of(config: RunConfig, parts: Parts, service: Engines) -> Player:
    """The player of a configuration, for training and for evaluation."""
    shapes = service.settings
    one_each = {id(engine): parts.specs[name].base for name, engine in service.engines.items()}
    lanes = sum(shapes[base].lanes for base in one_each.values())
    needless = is_own(config.rewards.name) or config.rewards.name == "own_correctness"
    chosen = config.rollout
    # As asked for, where the engine's own context is rounded up, by so much as the kind of device has it.
    longest = config.engine.max_prompt + max(role.max_new_tokens for role in config.role_settings.values())
    context = min(chosen.limits.context or longest, longest, *(one.context for one in shapes.values()))
    return Player(
        parts.workflow,
        parts.of_policies(parts.models),
        parts.of_policies(parts.tokenizers),
        service,
        config.policies.map,
        config.role_settings,
        parts.prompts,
        limits=dataclasses.replace(chosen.limits, context=context),
        pace={
            "mode": chosen.mode,
            "tool_delay": chosen.tool_delay,
            "tool_threads": chosen.tool_threads,
            "ahead": memory.look_ahead(config, lanes),
        },
        max_failed=chosen.max_failed,
        answers=not (parts.workflow.answers or needless),
        of_all=_of_all,
    )


def _of_all(done: Progress) -> Progress:
    """The progress of all processes, summed: what a rollout is judged by."""
    parts = hosts.together(lambda: done)
    if len(parts) == 1:
        return done
    counts = {name: sum(getattr(one, name) for one in parts) for name in ("episodes", "failed", "silent")}
    return Progress(**counts, trouble=next(filter(None, (one.trouble for one in parts)), ""))
