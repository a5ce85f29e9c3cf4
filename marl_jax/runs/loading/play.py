"""From a configuration to a player: here the parts of a run are joined with its engines.

parts, shapes ──► engines ──► Player ──play(tasks)──► the table of their calls
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marl_jax import fields, hosts
from marl_jax.config.run_config import RunConfig
from marl_jax.own import is_own
from marl_jax.planning import devices, memory
from marl_jax.planning.memory import Shapes
from marl_jax.planning.plan import PlanError, check_tokens, demand_of
from marl_jax.policies import Tree, decode_groups
from marl_jax.rewards.grading import Grader, grade
from marl_jax.rollouts import EpisodesFailed, Player
from marl_jax.rollouts.history import Chats
from marl_jax.rollouts.progress import Progress
from marl_jax.rollouts.running import Ask, Running
from marl_jax.rollouts.scheduler import task_key
from marl_jax.rollouts.serving import Embedded, Service, Specs
from marl_jax.rollouts.vllm.client import Vllm
from marl_jax.rollouts.vllm.vllm_config import urls_of
from marl_jax.rollouts.vllm.weights import plain
from marl_jax.rollouts.voices import PolicyEngine
from marl_jax.run_folder.folder import CONFIG, FolderError
from marl_jax.runs.loading.parts import (
    Parts,
    PartsError,
    check_answers,
    digests,
    load_parts,
    load_tasks,
    read_prompts,
)
from marl_jax.sampling.shapes import EngineSettings
from marl_jax.sampling.stability import common_shapes
from marl_jax.table import Table
from marl_jax.tasks import DataError, Task
from marl_jax.tasks.micro import KINDS
from marl_jax.workflows import find

TRIAL_PROBLEMS = 16  # problems that a workflow is tried on before anything is compiled
EVALUATION_NOISE = 0  # every evaluation has this step's noise: checkpoints are compared on the same draws


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The loaded parts of a configuration, with digests of all of them."""

    parts: Parts
    splits: dict[str, Sequence[Task]]
    digests: dict[str, str]


def load_all(config: RunConfig, splits: Sequence[str]) -> Loaded:
    """The parts and the tasks of these splits, which can be graded on this machine."""
    parts = load_parts(config)
    start_graders(config)
    tasks = {split: load_tasks(config.data, split) for split in splits}
    for split, split_tasks in tasks.items():
        check_answers(config, split, split_tasks)
    return Loaded(parts, tasks, digests(config, parts, tasks))


def check_problems(config: RunConfig, tokenizers: Mapping[str, Any], tasks: Sequence[Task]) -> None:
    """Refuse, before anything is compiled, too few problems for a step, and a run that cannot get a first answer.

    A problem that is in a batch twice would be played twice with the same noise. The workflow is begun on a few
    problems, and refused if it raises on all or if its shortest prompt is too long. `tokenizers` are by policy.
    """
    if config.steps and config.data.problems > len(tasks):
        carved = 0 if config.data.name in KINDS else config.data.val_size
        taken = f", or --config.data.val_size ({carved})" if carved else ""
        raise DataError(
            f"data.problems is {config.data.problems} and the train split has {len(tasks)}: lower "
            f"--config.data.problems (--config.rollout.samples gives more episodes of each){taken}"
        )
    lengths, traces, allowed = [], [], config.engine.max_prompt
    workflow, prompts = find(config.workflow.name).bind(**config.workflow.settings), read_prompts(config)
    chats = Chats(tokenizers, config.policies.map)
    tried = [tasks[i] for i in range(min(TRIAL_PROBLEMS, len(tasks)))]
    limits = dataclasses.replace(config.rollout.limits, context=None)
    for task in tried:
        key = (config.seed, 1, task_key(task), 0)
        episode = Running(task, 0, key, workflow, prompts, chats.of, limits)
        lengths += [len(item.prompt) for item in episode.advance() if isinstance(item, Ask)]
        traces += [episode.trace or episode.error] if episode.error else []
        episode.close()
    if tried and len(traces) == len(tried) and config.rollout.max_failed is not None:
        raise EpisodesFailed(
            f"workflow '{workflow.name}' ended in an error on all {len(tried)} problems that it was tried on; the "
            f"first:\n{traces[0].rstrip()}"
        )
    if lengths and min(lengths) > allowed and limits.overlong == "refuse":
        raise PartsError(
            f"engine.max_prompt is {allowed}, and the shortest prompt of {len(tried)} problems has {min(lengths)} "
            f"tokens (the longest {max(lengths)}): raise it, with room for what later prompts show"
        )


def planned_engine(config: RunConfig, parts: Parts, *, training: bool = True) -> Shapes:
    """The shapes of each engine, planned from the configuration and the memory that the loaded weights leave here."""
    device, demand = devices.here(), demand_of(config)
    models = {name: parts.models[spec.base] for name, spec in config.policies.specs.items()}
    check_tokens(config, models)
    sizes = memory.sizes_of(config, models, device)
    parts_of_training = memory.training(config, sizes, demand)[0] if training else ()
    try:
        return memory.shapes(config, models, device, device.memory, parts_of_training, demand)
    except ValueError as error:
        raise PlanError(f"the engines do not fit: {error}") from error


def settled_form(shapes: Shapes) -> dict[str, Any]:
    """The shapes as in `config.json`: `engine` if all engines have the same, else `engines` by base."""
    forms = {base: fields.to_json(engine) for base, engine in shapes.items()}
    return {"engines": forms} if len({*shapes.values()}) > 1 else {"engine": next(iter(forms.values()))}


def settled_shapes(settled: Mapping[str, Any], config: RunConfig) -> Shapes | None:
    """The shapes that an earlier start settled."""
    name, forms = "engines", settled.get("engines")
    if common := settled.get("engine"):
        name, forms = "engine", {spec.base: common for spec in config.policies.specs.values()}
    if not forms:
        return None
    try:
        return {base: _settled_engine(form) for base, form in forms.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise FolderError(
            f"{CONFIG} has a broken settled.{name} ({error}): restore it, or make settled {{}}"
        ) from None


def _settled_engine(form: Mapping[str, Any]) -> EngineSettings:
    """The shapes of one engine. In earlier versions all lanes moved from one cache length to the next."""
    known = {name: value for name, value in form.items() if name != "grows"}
    if len(known) < len(form) and known.get("lanes_at"):
        raise FolderError(
            f"{CONFIG} has settled.engine.lanes_at {known['lanes_at']} of lanes that took turns, and they now lie in "
            "memory together: make settled {} to plan them anew; tokens go on the same but for near-ties"
        )
    complete = fields.with_defaults(EngineSettings, known)
    complete["features"].pop("untempered", None)  # earlier versions could record those log-probs too
    return fields.from_json(EngineSettings, complete)


def start_graders(config: RunConfig) -> None:
    """Start the graders; a machine that cannot isolate programs is refused here, before anything is played."""
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
) -> Service:
    """The engines that answer for every policy of the run; engines of one model have the same shapes.

    Shapes that were not `measured` yet are measured, which may leave fewer (see `sampling.stability`). A vLLM server
    that is started for the engines writes to `log`, and several servers to files next to it.
    """
    scale, vllm, groups = parts.lora_scale or 1.0, config.engine.vllm, decode_groups(parts.specs)

    def service_of(shapes: Shapes, measured: bool) -> Service:
        def make(own: Specs) -> PolicyEngine:
            first = next(iter(own))
            base = own[first].base
            common = own, trees, parts.bases, parts.models[base], shapes[base]
            tokenizer = parts.tokenizers[base]
            if config.engine.kind == "embedded":
                to_text = tokenizer.decode
                return Embedded(*common, lora_scale=scale, to_text=to_text, measured=measured)
            urls = dict(zip(groups, urls_of(vllm) or [""] * len(groups), strict=True))
            server = dataclasses.replace(vllm, url=urls[tuple(own)])
            path = log and log.with_stem(f"{log.stem}-{plain(first)}") if len(groups) > 1 else log
            return Vllm(*common, server=server, tokenizer=tokenizer, lora_scale=scale, log=path)

        return Service(parts.specs, make, versions)

    service = service_of(settings, measured)
    if config.engine.kind == "vllm":
        return service
    by_policy = {name: engine.settings for name, engine in service.engines.items()}
    models = parts.of_policies(parts.models)
    alike = lambda name: [one for other, one in by_policy.items() if models[other] == models[name]]
    common = {parts.specs[name].base: common_shapes(alike(name)) for name in by_policy}
    if all(one == common[parts.specs[name].base] for name, one in by_policy.items()):
        return service
    del service  # its caches are freed before the new ones are made
    return service_of(common, measured=True)


def player_of(config: RunConfig, parts: Parts, service: Service) -> Player:
    """The player of a configuration, for training and for evaluation."""
    shapes = service.settings
    base_of = {id(engine): parts.specs[name].base for name, engine in service.engines.items()}
    lanes = sum(shapes[base].lanes for base in base_of.values())
    needs_no_answer = is_own(config.rewards.name) or config.rewards.name == "own_correctness"
    options = config.rollout
    # The longest call: the engine's own context is rounded up by an amount that depends on the kind of device.
    longest = config.engine.max_prompt + max(role.max_new_tokens for role in config.role_settings.values())
    context = min(options.limits.context or longest, longest, *(one.context for one in shapes.values()))
    return Player(
        parts.workflow,
        parts.of_policies(parts.models),
        parts.of_policies(parts.tokenizers),
        service,
        config.policies.map,
        config.role_settings,
        parts.prompts,
        limits=dataclasses.replace(options.limits, context=context),
        options={
            "mode": options.mode,
            "tool_delay": options.tool_delay,
            "tool_threads": options.tool_threads,
            "ahead": memory.look_ahead(config, lanes),
        },
        max_failed=options.max_failed,
        answers=not (parts.workflow.answers or needs_no_answer),
        combined=_summed,
    )


def play_graded(player: Player, tasks: Sequence[Task], samples: int, seed: int, **options: Any) -> Table:
    """The graded table of an evaluation; `options` are those of `play`."""
    grader = Grader()
    table = player.play(
        tasks, samples=samples, step=EVALUATION_NOISE, seed=seed, finished=grader.start, **options
    )
    return grade(table, grader)


def _summed(progress: Progress) -> Progress:
    """The progress summed over all processes, by which a rollout is judged."""
    parts = hosts.from_all(lambda: progress)
    if len(parts) == 1:
        return progress
    counts = {name: sum(getattr(part, name) for part in parts) for name in ("episodes", "failed", "silent")}
    return Progress(**counts, first_error=next(filter(None, (part.first_error for part in parts)), ""))
