"""Opening a run: the parts that its configuration names are loaded and checked, and its newest checkpoint is restored.

folder -> parts, data, graders -> settings of an earlier start -> policies -> checkpoint -> records -> road

Seeds that train side by side share everything but their folders.
"""

import contextlib
import dataclasses
import functools
import math
import os
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from marl_jax import hosts
from marl_jax.alarms.watch import Watch, judge
from marl_jax.compiled.cast import check_settings
from marl_jax.config.run_config import ConfigError, RunConfig
from marl_jax.config.run_fields import TRACKERS
from marl_jax.own import is_own
from marl_jax.packaged import resolve_path
from marl_jax.planning import devices, plan
from marl_jax.planning.memory import OF_SEEDS
from marl_jax.planning.plan import PlanError
from marl_jax.planning.step_times import Pace
from marl_jax.planning.walks import unset_settings
from marl_jax.pretraining.taught import untaught_warning
from marl_jax.run_folder.boards import Board, TensorBoard, Tracker
from marl_jax.run_folder.checkpoints import CheckpointError, Checkpoints, steps
from marl_jax.run_folder.folder import (
    CONFIG,
    EVALUATIONS,
    LOCK,
    METRICS,
    FolderError,
    begin,
    differences,
    enclosing_run,
    has_results,
    open_folder,
    path_errors,
    read,
    restored_on_error,
    settled_for,
    versions,
)
from marl_jax.run_folder.json_lines import last_complete_step, read_lines, rewind
from marl_jax.runs.divergence import FILE as DIVERGED
from marl_jax.runs.divergence import refuse_the_same
from marl_jax.runs.in_arrays import Compiled
from marl_jax.runs.loading.parts import (
    Parts,
    check_answers,
    load_parts,
    load_tasks,
    model_configs,
    shared_problems,
    tokenizers_of,
)
from marl_jax.runs.loading.play import (
    Loaded,
    check_problems,
    load_all,
    planned_engine,
    settled_form,
    settled_shapes,
)
from marl_jax.runs.loading.roads import chosen_road, compiled_road
from marl_jax.runs.phases import Phases, phase_digests
from marl_jax.runs.run import Road, Run
from marl_jax.runs.state import State
from marl_jax.runs.stopping import Stop
from marl_jax.tasks import Position, TaskIterator
from marl_jax.tasks.micro import KINDS
from marl_jax.terminal import page
from marl_jax.terminal.live import Live

FILES, OWN_FILES = 4, 64  # open files of each run, measured; and other open files of a process
SEEN_S = 15.0  # seconds within which a shared disk shows every host what process 0 has written


def folders_of(config: RunConfig, workdir: str | os.PathLike[str]) -> list[Path]:
    """The folder of each seed: the directory itself, or DIR/seed-N if several train side by side."""
    if not os.fspath(workdir):
        raise FolderError("--workdir is missing: give the directory of the run")
    path = Path(os.path.expanduser(workdir)).absolute()
    return [path] if config.seeds == 1 else [path / f"seed-{c.seed}" for c in _each_seed(config)]


def open_runs(
    config: RunConfig,
    workdir: str | os.PathLike[str],
    accept_changes: bool,
    live: Live,
    stop: Stop,
    stack: contextlib.ExitStack,
) -> tuple[Road, list[Run], list[State]]:
    """The road, and for every seed the run and its state: at the start, or of the newest checkpoint.

    Open files and workers are closed with the stack.
    """
    if unset := unset_settings(config):
        raise ConfigError(unset)
    if config.seeds > 1:
        _check_room(config)
    configs = _each_seed(config)
    _agree({"config": config.to_json(), "versions": versions(), "workdir": os.fspath(workdir)})

    @path_errors(Path(workdir), "choose another --workdir")
    def opened() -> list[Path]:
        places = folders_of(config, workdir)
        _check_seeds(config, workdir)
        new = [place for place in places if not (place / CONFIG).exists()]
        for around in filter(None, (enclosing_run(place.parent) for place in new)):
            raise FolderError(f"--workdir={workdir} lies in the run '{around}': choose another --workdir")
        claimed = [stack.enter_context(open_folder(place)) for place in places]
        for seed_config, folder in zip(configs, claimed):
            refuse_the_same(folder, seed_config, accept_changes)
        return claimed

    folders = hosts.from_first(opened)
    _check_seen(folders)
    with contextlib.ExitStack() as changes:
        for folder in folders if hosts.is_first() else ():
            changes.enter_context(restored_on_error(folder))
        loaded, compiled, settled, pace = _load(configs, folders, accept_changes, live, stop)
        parts = loaded.parts
        networks = parts.networks(config.policies.remat, config.policies.attention)
        phases = [Phases(c, parts, networks, folder) for c, folder in zip(configs, folders)]
        states = [_initial_state(c, parts, run_phases) for c, run_phases in zip(configs, phases)]
        retention = {name: getattr(config.checkpoints, name) for name in ("latest", "best", "keep_every")}
        only = ("learner", "reference")
        stores = (Checkpoints(folder / "checkpoints", resume_only=only, **retention) for folder in folders)
        checkpoints = [stack.enter_context(contextlib.closing(store)) for store in stores]
        reached = hosts.from_first(lambda: min(last_complete_step(folder / METRICS) for folder in folders))
        unsaved = math.inf if accept_changes else 2 * config.checkpoints.every
        states = _resumed(states, checkpoints, math.inf if accept_changes else reached, unsaved)
        states = [_within(state, len(loaded.splits["train"])) for state in states]
    for folder in folders if hosts.is_first() else ():
        (folder / DIVERGED).unlink(missing_ok=True)
    stop.check_together()

    runs = list[Run]()
    for seed_config, folder, run_phases, store, state in zip(configs, folders, phases, checkpoints, states):
        view = live if not runs else live.for_seed(f"seed {seed_config.seed}")
        boards = _begin_records(seed_config, folder, state.step, view, stack)
        watched = loaded.splits.get("val", ())[: config.evaluation.problems]
        problems = TaskIterator(loaded.splits["train"], seed_config.data.problems, state.position)
        watch = Watch()
        if hosts.is_first():
            watch = judge(read_lines(folder / METRICS), read_lines(folder / EVALUATIONS))
        runs.append(
            Run(seed_config, parts, folder, problems, list(watched), _about(seed_config, loaded), run_phases, store,
                watch, boards, view, stop, pace)
        )  # fmt: skip
    return chosen_road(compiled, settled, runs, states, stack), runs, states


def check_before_run(config: RunConfig, planned: plan.Plan) -> Compiled | None:
    """The checks of a start that need no data files, for a plan: those of bases that exist, and of generated tasks.

    The device is not checked. Returns the compiled road, if the configuration names it and tasks are generated.
    """
    if config.road == "compiled":
        check_settings(config)
    specs = config.policies.specs.values()
    if not all((resolve_path(spec.base) / "config.json").is_file() for spec in specs):
        return None
    tokenizers = tokenizers_of(config, model_configs(config))
    if unset_settings(config):
        return None
    plan.check_prompts(config, planned, tokenizers)
    if config.data.name in KINDS or is_own(config.data.name):
        splits = {split: _cached_tasks(config.data, split) for split in _splits(config)}
        for split, tasks in splits.items():
            check_answers(config, split, tasks)
        check_problems(config, tokenizers, splits["train"])
        if config.road == "compiled":
            return Compiled(config, load_parts(config), splits["train"], None)
    return None


_cached_tasks = functools.lru_cache(maxsize=4)(load_tasks)  # shared by the cells of a matrix


def _splits(config: RunConfig) -> Sequence[str]:
    """The splits that a run reads."""
    return ("train", "val") if config.evaluation.every else ("train",)


def _agree(facts: Mapping[str, Any]) -> None:
    """Refuse to go on if a process has other facts than process 0; the message names them."""
    first, *others = hosts.from_all(lambda: facts)
    lines = [
        f"process {number}: {line}"
        for number, other in enumerate(others, 1)
        for line in differences(first, other)
    ]
    if lines:
        raise hosts.HostsError(
            "the processes differ (values of process 0 -> of another):\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nstart the same command, with the same code and data, on every host"
        )


def _check_seen(folders: Sequence[Path]) -> None:
    """Refuse a folder that only process 0 sees: the others read checkpoints there, and write results of tools."""

    def locks() -> list[str]:
        return [(folder / LOCK).read_text() if (folder / LOCK).exists() else "" for folder in folders]

    first = hosts.from_first(locks)
    deadline = time.monotonic() + SEEN_S
    while (unseen := locks() != first) and time.monotonic() < deadline:
        time.sleep(0.1)
    for number, missing in enumerate(hosts.from_all(lambda: unseen)):
        if missing:
            raise FolderError(
                f"process {number} does not see the run folder '{folders[0]}' that process 0 has opened: put it on a "
                "disk that all hosts share, at the same path"
            )


def _each_seed(config: RunConfig) -> list[RunConfig]:
    return [dataclasses.replace(config, seed=config.seed + more) for more in range(config.seeds)]


def _check_room(config: RunConfig) -> None:
    """Refuse seeds if their open files or weights alone are too many, before a folder is made for each."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and (files := FILES * config.seeds + OWN_FILES) > limit:
        raise FolderError(
            f"{config.seeds} seeds keep {files} files open and a process may open {limit} here: raise "
            "the limit (ulimit -n), or lower --config.seeds"
        )
    device = devices.here()
    alone = plan.make_plan(dataclasses.replace(config, seeds=1), model_configs(config), device)
    each = sum(part.bytes for part in alone.parts if part.name in OF_SEEDS)
    # Devices of a CPU share one memory.
    fit = device.memory // max(each, 1) * (1 if device.platform == "cpu" else len(jax.local_devices()))
    if fit < config.seeds:
        raise PlanError(
            f"{config.seeds} seeds side by side do not fit in memory: the weights and optimiser states of {fit} do; "
            "lower --config.seeds"
        )


def _check_seeds(config: RunConfig, workdir: str | os.PathLike[str]) -> None:
    """Refuse folders of a run of another kind (one seed, or several), and seeds that do not begin together."""
    path = Path(os.path.expanduser(workdir)).absolute()
    existing = sorted(place.parent.name for place in path.glob(f"seed-*/{CONFIG}"))
    if config.seeds == 1 and existing and not (path / CONFIG).exists():
        raise FolderError(
            f"'{path}' holds the runs {', '.join(existing)}: name one of them, or ask for --config.seeds"
            f"={len(existing)}, or choose another --workdir"
        )
    if config.seeds == 1:
        return
    if (path / CONFIG).exists():
        if read(path)["config"].get("seeds", 1) > 1:
            raise FolderError(f"'{path}' is the run of one of several seeds: start them in '{path.parent}'")
        raise FolderError(f"'{path}' is a run of one seed: leave seeds out, or choose another --workdir")
    folders = folders_of(config, path)
    new = [place.name for place in folders if not (place / CONFIG).exists()]
    if new and (begun := [place.name for place in folders if has_results(place)]):
        raise FolderError(
            f"'{path}' has results of {begun[0]} and no {new[0]}: seeds side by side begin together; ask for the seeds "
            f"that exist ({', '.join(existing)}), or choose another --workdir"
        )


def _initial_state(config: RunConfig, parts: Parts, phases: Phases) -> State:
    """The state before the first step."""
    policies = parts.start(config.seed)
    trees = {name: policies[name] for name in parts.trained}
    phases.check(trees)
    reference = phases.reference_at_start(trees)
    return State(0, trees, phases.init(trees), Position(seed=config.seed), reference=reference)


def _resumed(
    states: list[State], checkpoints: Sequence[Checkpoints], reached: float, unsaved: float
) -> list[State]:
    """The states of the newest step that all seeds have a complete checkpoint of; unchanged if there is none.

    A run that was killed while its first checkpoint was saved has recorded `unsaved` steps at most. A run that
    `reached` more steps has lost its checkpoints, and its first step would remove its records.
    """
    source = METRICS
    while True:
        if empty := hosts.from_first(
            lambda: [str(store.directory) for store in checkpoints if not steps(store.directory)]
        ):
            if reached > unsaved:
                raise CheckpointError(
                    f"{reached} steps are recorded, but there is no checkpoint in '{empty[0]}': restore it, train in "
                    "another folder, or begin again here without these records by --accept_changes"
                )
            for store in checkpoints if hosts.is_first() else ():
                for step in steps(store.directory):
                    store.set_aside(step, "unrecorded")
            return states
        found = [store.resume(state.arrays, reached, source) for state, store in zip(states, checkpoints)]
        resumed = [state.restored(*one) for state, one in zip(states, found) if one]
        if len({state.step for state in resumed}) == 1:
            return resumed
        reached, source = min(state.step for state in resumed), "another seed"


def _within(state: State, size: int) -> State:
    """The state; moved to the next epoch if the accepted data have fewer problems than this epoch has used."""
    at = state.position
    return (
        state if at.index < size else dataclasses.replace(state, position=Position(at.epoch + 1, 0, at.seed))
    )


def _about(config: RunConfig, loaded: Loaded) -> dict[str, Any]:
    """The fields that mark the run's lines in `eval.jsonl`."""
    val = loaded.splits.get("val", ())
    about = {
        "split": "val",
        "mode": "trained",
        "seed": config.seed,
        "problems": min(len(val), config.evaluation.problems),
        "of_problems": len(val),
        "samples": config.evaluation.samples,
        "data": loaded.digests.get("data val"),
    }
    return about | ({"metric": config.evaluation.metric} if config.evaluation.metric else {})


def _load(
    configs: Sequence[RunConfig], folders: Sequence[Path], accept_changes: bool, live: Live, stop: Stop
) -> tuple[Loaded, Compiled | None, dict[str, Any], Pace]:
    """The parts of the run, checked before compilation; its compiled road; settings of the first start; step times."""
    config = configs[0]
    earlier = hosts.from_first(lambda: settled_for(folders[0], config))
    shapes = settled_shapes(earlier, config)
    # Before the weights are loaded, because the plan counts them.
    planned = plan.check_fits(config, model_configs(config), devices.here(), shapes)
    # One process prepares missing data.
    loaded = hosts.after_first(lambda: load_all(config, _splits(config)))
    parts, splits = loaded.parts, loaded.splits
    check_problems(config, parts.of_policies(parts.tokenizers), splits["train"])
    compiled, road = compiled_road(config, parts, splits["train"], earlier)
    stop.check_together()
    inexact = {"bit_exact": False} if config.engine.kind == "vllm" else {}
    # Planned once, for all seeds.
    engine = functools.cache(lambda: settled_form(planned_engine(config, parts)) | inexact)
    digests = loaded.digests | phase_digests(config)
    _agree({"digests": digests})

    def begin_all() -> dict[str, Any]:
        for seed_config, folder in zip(configs, folders):
            settled = begin(folder, seed_config, digests, engine, accept_changes=accept_changes)
        return settled

    settled = hosts.from_first(begin_all)
    sizes = {name: len(tasks) for name, tasks in splits.items()}
    shapes = settled_shapes(settled, config) or planned.shapes
    where = folders[0] if len(folders) == 1 else folders[0].parent / "seed-N"
    live.note(
        page.page(
            config,
            parts.of_policies(parts.models),
            folder=where,
            tasks=sizes,
            engine=shapes,
            plan=planned,
            road=road,
        )
    )
    if warning := untaught_warning(config, parts.prompts):
        live.note(warning)
    if "val" in splits and (warning := shared_problems(config.data, "val", splits["val"], splits["train"])):
        live.note(warning)
    return loaded, compiled, settled, Pace(config, planned)


def _begin_records(
    config: RunConfig, folder: Path, step: int, live: Live, stack: contextlib.ExitStack
) -> list[Board]:
    """Remove the lines after the newest checkpoint, which will be made again; returns the boards of this process.

    Evaluations by `experiments.evaluate` are not made again: those of the base stay, and a warning is shown for others.
    """
    if not hosts.is_first():
        return []
    rewind(folder / METRICS, step or -1)
    forgotten = rewind(folder / EVALUATIONS, step or -1, "base")
    if lost := [str(line["checkpoint"]) for line in forgotten if "checkpoint" in line]:
        live.note(
            f"{len(lost)} evaluations by experiments.evaluate of checkpoints after step {step} are removed from "
            f"eval.jsonl ({', '.join(dict.fromkeys(lost))}): evaluate these checkpoints again when they are made again"
        )
    boards: list[Board] = []
    opened = lambda board: stack.enter_context(contextlib.closing(board))
    if config.logging.tensorboard:
        boards.append(opened(TensorBoard(folder / "tensorboard", step)))
    for package in TRACKERS:
        if getattr(config.logging, package):
            project = config.logging.wandb_project
            boards.append(opened(Tracker(package, folder, project, config.to_json())))
    return boards
