"""Opening a run: what its configuration names is loaded and checked, and its newest checkpoint found.

folder -> parts, data, graders -> what an earlier start settled -> policies -> checkpoint -> engines -> records
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marl_jax import fields
from marl_jax.alarms.watch import Watch, judge
from marl_jax.config.run_config import ConfigError, RunConfig
from marl_jax.learning import Qwen3
from marl_jax.planning import devices, plan
from marl_jax.planning.measured import Pace
from marl_jax.planning.walks import left_open
from marl_jax.pretraining.taught import warning_of
from marl_jax.rollouts import Player
from marl_jax.rollouts.serving import Service
from marl_jax.run_folder.boards import Board, TensorBoard, WeightsAndBiases
from marl_jax.run_folder.checkpoints import Checkpoints
from marl_jax.run_folder.folder import begin, open_folder, settle, settled_for, taken_back
from marl_jax.run_folder.metrics import JsonLines, read_lines, recorded
from marl_jax.runs import page
from marl_jax.runs.divergence import refuse_the_same
from marl_jax.runs.live import Live
from marl_jax.runs.parts import Parts, model_config, shared_problems
from marl_jax.runs.phases import Phases, phase_digests
from marl_jax.runs.play import (
    Named,
    check_prompts,
    load_named,
    make_service,
    planned_engine,
    player_of,
    settled_shapes,
    shapes_of,
)
from marl_jax.runs.state import State
from marl_jax.runs.stopping import Stop
from marl_jax.tasks import DataError, Position, Task, TaskIterator
from marl_jax.tasks.micro import KINDS

__all__ = ["Run", "State", "open_run"]


@dataclasses.dataclass(frozen=True)
class Run:
    """All that a step needs and that stays as it is."""

    config: RunConfig
    parts: Parts
    folder: Path
    problems: TaskIterator
    watched: list[Task]  # the problems of evaluations; none: never evaluated
    about: dict[str, Any]  # what its own lines in `eval.jsonl` say that they are of
    service: Service
    player: Player  # plays over the service
    phases: Phases
    checkpoints: Checkpoints
    metrics: JsonLines
    evaluations: JsonLines
    watch: Watch  # the alarms that follow from both
    boards: list[Board]
    live: Live
    stop: Stop
    pace: Pace


def open_run(
    config: RunConfig,
    workdir: str | os.PathLike[str],
    accept_changes: bool,
    live: Live,
    stop: Stop,
    stack: contextlib.ExitStack,
) -> tuple[Run, State]:
    """The run at its start, or where its newest checkpoint is; what it holds open is closed with the stack."""
    folder = stack.enter_context(open_folder(workdir))
    refuse_the_same(folder, config, accept_changes)
    with taken_back(folder):
        named, settled, pace = _load(config, folder, accept_changes, live, stop)
        parts = named.parts
        policies = parts.start(config.seed)
        network = Qwen3(parts.model, parts.lora_scale, config.policies.remat, config.policies.attention)
        phases = Phases(config, parts, network, folder)
        trees = {name: policies[name] for name in parts.trained}
        reference = phases.reference_at_start(trees)
        state = State(0, trees, phases.init(trees), Position(seed=config.seed), reference=reference)
        kinds = {name: getattr(config.checkpoints, name) for name in ("latest", "best", "keep_every")}
        checkpoints = Checkpoints(folder / "checkpoints", passing=("learner", "reference"), **kinds)
        stack.callback(checkpoints.close)
        reached = math.inf if accept_changes else recorded(folder / "metrics.jsonl")
        found = checkpoints.resume(state.arrays, reached)
    if found:
        state = state.restored(*found)
    stop.check()

    metrics, evaluations, boards = _records(config, folder, state.step, stack)
    shapes = settled_shapes(settled) or planned_engine(config, parts)
    measured = settled.get("measured", False)
    service = make_service(config, parts, policies | state.trees, shapes, state.updates, measured=measured)
    if not measured:  # for the starts that follow
        settle(folder, {"engine": fields.to_json(shapes_of(service)), "measured": True})
    watched = list(named.splits["val"][: config.evaluation.problems]) if "val" in named.splits else []
    about = {
        "split": "val",
        "mode": "trained",
        "seed": config.seed,
        "problems": len(watched),
        "of_problems": len(named.splits.get("val", ())),
        "samples": config.evaluation.samples,
        "data": named.digests.get("data val"),
    }
    if config.evaluation.metric:
        about["metric"] = config.evaluation.metric
    stop.check()
    problems = TaskIterator(named.splits["train"], config.data.problems, state.position)
    run = Run(
        config, parts, folder, problems, watched, about, service, player_of(config, parts, service), phases,
        checkpoints, metrics, evaluations, judge(read_lines(metrics.path), read_lines(evaluations.path)), boards,
        live, stop, pace,
    )  # fmt: skip
    return run, state


def _load(
    config: RunConfig, folder: Path, accept_changes: bool, live: Live, stop: Stop
) -> tuple[Named, dict[str, Any], Pace]:
    """All of what is named, checked before anything is compiled; what the first start settled; how fast steps are."""
    if problems := left_open(config):
        raise ConfigError(problems)
    shapes = settled_shapes(settled_for(folder, config))
    # Before the weights are there: it counts them.
    planned = plan.check_fits(config, model_config(config), devices.here(), shapes)
    named = load_named(config, ("train", "val") if config.evaluation.every else ("train",))
    parts, splits = named.parts, named.splits
    _check_enough(config, splits["train"])
    check_prompts(config, parts, splits["train"])
    stop.check()
    engine = lambda: {"engine": fields.to_json(planned_engine(config, parts))}
    found = named.digests | phase_digests(config)
    settled = begin(folder, config, found, engine, accept_changes=accept_changes)
    sizes = {name: len(tasks) for name, tasks in splits.items()}
    shapes = settled_shapes(settled) or planned.engine
    live.note(page.page(config, parts.model, folder=folder, tasks=sizes, engine=shapes, plan=planned))
    if warning := warning_of(config, parts.prompts):
        live.note(warning)
    if "val" in splits and (warning := shared_problems(config.data, "val", splits["val"], splits["train"])):
        live.note(warning)
    return named, settled, Pace(config, planned)


def _records(
    config: RunConfig, folder: Path, step: int, stack: contextlib.ExitStack
) -> tuple[JsonLines, JsonLines, list[Board]]:
    """Metrics and evaluations, and whoever listens. What no checkpoint has seen is forgotten, to be made again."""
    metrics, evaluations = JsonLines(folder / "metrics.jsonl"), JsonLines(folder / "eval.jsonl")
    for record in (metrics, evaluations):
        stack.callback(record.close)
        record.rewind(step or -1)
    boards: list[Board] = []
    if config.logging.tensorboard:
        boards.append(TensorBoard(folder / "tensorboard", step))
        stack.callback(boards[-1].close)
    if config.logging.wandb:
        boards.append(WeightsAndBiases(folder, config.logging.wandb_project, config.to_json()))
        stack.callback(boards[-1].close)
    return metrics, evaluations, boards


def _check_enough(config: RunConfig, train: Sequence[Task]) -> None:
    """A problem that is in a batch twice would be played twice with the same noise."""
    if config.steps and config.data.problems > len(train):
        carved = 0 if config.data.name in KINDS else config.data.val_size
        taken = f", or --config.data.val_size ({carved})" if carved else ""
        raise DataError(
            f"data.problems is {config.data.problems} and the train split has {len(train)}: lower "
            f"--config.data.problems (--config.rollout.samples gives more episodes of each){taken}"
        )
