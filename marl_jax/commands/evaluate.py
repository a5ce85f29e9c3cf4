"""The accuracy of a run's policies on held-out problems: of one checkpoint, or of all.

    checkpoint ──► policies ──► the same problems, the same noise ──► lines of eval.jsonl, each paired with the base

Only this and `recipes.run` read the test split. The mode decides which policies play, see `contenders`.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import logging

from marl_jax.commands.console import print_to_stderr
from marl_jax.commands.contenders import Contender, Evaluation, make_comparison
from marl_jax.config.config_checks import unused_fields
from marl_jax.config.run_config import DataConfig, RunConfig
from marl_jax.own import is_own
from marl_jax.planning.memory import Shapes, memories
from marl_jax.policies import decode_groups
from marl_jax.rewards.warn import newly_ungraded
from marl_jax.rollouts import Progress, progress_bar, write_episodes
from marl_jax.run_folder import folder
from marl_jax.run_folder.checkpoints import CheckpointError, Damaged, steps
from marl_jax.run_folder.files import disk_errors
from marl_jax.run_folder.folder import FolderError, open_folder
from marl_jax.run_folder.json_lines import append_line, read_lines
from marl_jax.runs.evaluation import summary
from marl_jax.runs.loading.parts import Parts, data_digest, load_tasks, shared_problems
from marl_jax.runs.loading.play import (
    load_all,
    make_service,
    planned_engine,
    play_graded,
    player_of,
    settled_shapes,
)
from marl_jax.runs.loading.stored import (
    Stored,
    WhichCheckpoint,
    check_unchanged,
    config_of,
    on_these_devices,
    path_of,
    policies_at,
    read_which,
)
from marl_jax.sampling.shapes import EngineSettings, free_bytes, memory_bytes
from marl_jax.table import Table
from marl_jax.tasks import Task
from marl_jax.user_cache import digest

Watch = Callable[[str], Callable[[Progress], None] | None]


def evaluate(
    workdir: str | os.PathLike[str],
    evaluation: Evaluation,
    *,
    accept_changes: bool = False,
    watch: Watch = lambda name: None,
    out: str | os.PathLike[str] | None = None,
) -> list[dict[str, Any]]:
    """Play the evaluation: one record per checkpoint, appended to `eval.jsonl` if it is new.

    A checkpoint with a record in the run's `eval.jsonl`, of the same problems, noise, configuration, code and data, is
    not played again, except in the mode "generator_transfer".

    With `out`, the file is written to that folder, and nothing to the run's.

    The base comes first; each other record has its difference to the base. `accept_changes` evaluates although the
    base, the data or the prompts differ from those at the start of the run. `watch` is called with the name of the next
    checkpoint; the object that it returns receives the progress.
    """
    path, split, samples = path_of(workdir), evaluation.split, evaluation.samples
    wanted = _wanted(path, evaluation.checkpoint, evaluation.mode)
    with contextlib.ExitStack() as stack:
        if out is None:  # records go to the run's folder, which is locked meanwhile
            target = stack.enter_context(open_folder(path, "give --out=DIR to write elsewhere"))
        else:
            target = folder.output_folder(out)
        records = _Records(path, target)
        trained_on, config = _configs(path, evaluation)
        loaded = load_all(config, [split])
        parts, problems, digests = loaded.parts, loaded.splits[split], dict(loaded.digests)
        train = _train(trained_on, config.data)
        if not accept_changes:
            replaced = ("data ", "code of data") if evaluation.data else ()
            inputs = digests if train is None else digests | {"data train": data_digest(train)}
            check_unchanged(path, {name: x for name, x in inputs.items() if not name.startswith(replaced)})
        remaining = _each(path, config, parts, wanted)
        first = list(itertools.islice(remaining, 1))  # a missing one is reported before anything is played
        if wanted and not first:
            raise CheckpointError(
                f"every checkpoint in '{path / 'checkpoints'}' is damaged: nothing to evaluate"
            )
        start = policies_at(path, config, parts, "base")
        pair = make_comparison(evaluation, config, parts, accept_changes)
        settings, measured = _shapes(path, config, pair.parts)
        log = target / "vllm.log"
        service = make_service(
            pair.base.config, pair.parts, start.trees, settings, measured=measured, log=log
        )
        stack.callback(service.close)
        tasks = list(problems[: evaluation.problems])
        newly_ungraded()  # resets the count: earlier answers of this process are not of the first checkpoint
        if train is not None and (warning := shared_problems(config.data, split, problems, train)):
            logging.warning("%s", warning)
        noise = config.seed if evaluation.seed is None else evaluation.seed
        metric = pair.base.config.evaluation.metric
        made_of = {"data": digests.pop(f"data {split}"), "of_problems": len(problems)}
        if evaluation.data:  # a name of its own keeps its records apart from those of the run's problems
            split = "-".join([re.sub(r"\W+", "_", evaluation.data), split])
        made_of["made_with"] = folder.versions() | digests | {"config": _digest(config)}

        def play(contender: Contender, saved: Stored, base: list[float] | None) -> dict[str, Any]:
            service.update(saved.trees, saved.updates)
            player = player_of(contender.config, pair.parts, service)
            table = play_graded(player, tasks, samples, noise, progress=watch(saved.name))
            results = summary(table, samples, base, pair.parts.metric)
            results |= {"ungraded": count} if (count := newly_ungraded()) else {}
            about = {
                "split": split,
                "mode": contender.mode,
                "seed": noise,
                "checkpoint": saved.name,
                **contender.about,
            }
            about |= {"metric": metric} if metric else {}
            record = {**about, **records.run_name, **results, **made_of}
            record["episodes"] = _keep(target, saved.step, table, record)
            return records.write({"step": saved.step, **record})

        same = {"split": split, "seed": noise, "samples": samples, "problems": len(tasks), **made_of}
        same["metric"] = metric
        base = records.base(pair.base, {**same, **pair.base.about}) or play(pair.base, start, None)
        checkpoints = itertools.chain(first, remaining)
        known = lambda saved: records.known(pair.contender, saved, {**same, **pair.contender.about})
        return [base, *(known(c) or play(pair.contender, c, base["per_problem"]) for c in checkpoints)]


class _Records:
    """The records of a run's `eval.jsonl`, and those of the folder that new records are written to."""

    def __init__(self, run: Path, target: Path):
        self._run, self._file = run, target / "eval.jsonl"
        self._of_run = list(read_lines(run / "eval.jsonl"))
        elsewhere = target != run
        self.run_name = {"run": os.path.realpath(run)} if elsewhere else {}  # a folder may serve several runs
        self._of_target = list(read_lines(self._file)) if elsewhere else []

    def write(self, record: dict[str, Any]) -> dict[str, Any]:
        """Append the record; returns it."""
        append_line(self._file, record["step"], record)
        return record

    def base(self, contender: Contender, about: Mapping[str, Any]) -> dict[str, Any] | None:
        """The record of the base on the same problems and noise, by the same code, if it was played before.

        The run's evaluation at step 0 counts, too: it was made with the inputs in `config.json`, if no change was
        accepted. A record of another run with the same base is written again for this run.
        """
        modes = ("base", "trained") if contender.mode == "base" else (contender.mode,)
        start = folder.read(self._run)
        of_run = {
            **start.get("versions", {}),
            **start.get("digests", {}),
            "config": about["made_with"]["config"],
        }
        inputs = None if start.get("changes") else {name: of_run.get(name) for name in about["made_with"]}
        own_first = sorted(self._of_target, key=lambda line: not _matches(line, self.run_name))
        for line in [*self._of_run, *own_first]:
            record = line if "checkpoint" in line else {**line, "made_with": inputs}
            if _matches(record, about) and line["step"] == 0 and line.get("mode") in modes:
                other = "run" in line and not _matches(line, self.run_name)
                return self.write(line | self.run_name) if other else line
        return None

    def known(self, contender: Contender, saved: Stored, about: Mapping[str, Any]) -> dict[str, Any] | None:
        """The run's record of a checkpoint that was played before; none if another run takes part in the mode.

        Records elsewhere may be of a checkpoint that was trained again since; a run drops such records of its own.
        """
        about = {**about, "mode": contender.mode, "checkpoint": saved.name}
        lines = [] if contender.mode == "generator_transfer" else self._of_run
        return next((line for line in lines if _matches(line, about)), None)


def announce(name: str) -> Callable[[Progress], None]:
    """Print which checkpoint is played, and return its progress bar."""
    print_to_stderr(f"evaluating {name}")
    return progress_bar()


def _keep(path: Path, step: int, table: Table, record: Mapping[str, Any]) -> str:
    """Write the table's episodes, as those of a step; returns the path relative to the folder of the records."""
    text = json.dumps([record[name] for name in sorted(record) if name not in ("per_problem", "roles")])
    name = f"{record['split']}-{step:06d}-{record['mode']}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    file = path / "episodes" / f"{name}.parquet"
    with disk_errors(file.parent):
        write_episodes(file, table)
    return str(file.relative_to(path))


def _configs(path: Path, evaluation: Evaluation) -> tuple[DataConfig, RunConfig]:
    """The settings of the data that the run trained on, and the configuration to evaluate with."""
    config = on_these_devices(config_of(path))
    trained_on = config.data
    if evaluation.url is not None:
        server = dataclasses.replace(config.engine.vllm, url=evaluation.url, start=False)
        config = dataclasses.replace(config, engine=dataclasses.replace(config.engine, vllm=server))
    if evaluation.data:
        data = _data(trained_on, evaluation.data, evaluation.data_directory)
        config = dataclasses.replace(config, data=data)
    return trained_on, config


def _data(trained_on: DataConfig, name: str, directory: str | None) -> DataConfig:
    """The settings of the training data for another data set; those that it does not use get their defaults."""
    defaults = {field: getattr(DataConfig, field) for field in unused_fields(name)}
    return dataclasses.replace(trained_on, **defaults | {"name": name, "directory": directory})  # type: ignore[arg-type]


def _train(trained_on: DataConfig, played: DataConfig) -> Sequence[Task] | None:
    """The training tasks, if either data set is the user's; published data is not read for this."""
    if any(is_own(data.name) or data.directory for data in (trained_on, played)):
        with contextlib.suppress(Exception):  # it may be missing, and a user's function may raise anything
            return load_tasks(trained_on, "train")
    return None


def _wanted(path: Path, checkpoint: str | None, mode: str) -> list[WhichCheckpoint]:
    """The checkpoints to play in addition to the base; a run without any is refused."""
    recast = mode in ("generator_transfer", "swapped")  # the initial policies, too, play in other roles
    default = "base" if mode in ("base", "generator_transfer") else "latest"
    every = checkpoint == "all"
    which = "latest" if every else read_which(checkpoint or default, "--checkpoint", also=("all",))
    if mode == "base" and which != "base":
        raise FolderError(f"--mode=base plays the base, not --checkpoint={checkpoint}: leave one of them out")
    if which == "base":
        return ["base"] if recast else []
    saved = steps(path / "checkpoints")
    if not saved:
        raise CheckpointError(
            f"there is no checkpoint in '{path / 'checkpoints'}': train first, up to the first one"
        )
    return list(saved) if every else [which]


def _each(path: Path, config: RunConfig, parts: Parts, wanted: list[WhichCheckpoint]) -> Iterator[Stored]:
    """Load the checkpoints one by one, on demand; of several, damaged ones and those removed meanwhile are left out."""
    for which in wanted:
        try:
            if len(wanted) > 1 and which not in steps(path / "checkpoints"):
                raise Damaged(f"checkpoint {which} was removed by its run")
            yield policies_at(path, config, parts, which)
        except Damaged as error:
            if len(wanted) == 1:
                raise
            logging.warning("%s: it is left out", error)


def _digest(config: RunConfig) -> str:
    """A digest of the fields that decide how episodes are played, which `--accept_changes` may change."""
    fields = config.to_json()
    return digest(*(functools.reduce(operator.getitem, path.split("."), fields) for path in folder.PLAYED_BY))


def _matches(record: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    return all(record.get(name) == value for name, value in about.items())


def _shapes(path: Path, config: RunConfig, parts: Parts) -> tuple[Shapes, bool]:
    """(the shapes settled by the run if they fit into memory here, else new ones; whether they were measured)."""
    settled = folder.read(path).get("settled", {})
    if shared := settled_shapes(settled, config):
        shapes = _by_base(shared, parts)
        bases = [parts.specs[group[0]].base for group in decode_groups(parts.specs)]
        devices = memories(config, jax.default_backend())
        if sum(memory_bytes(parts.models[base], shapes[base], 0, devices) for base in bases) <= free_bytes():
            return shapes, settled.get("measured", False)
    return _by_base(planned_engine(config, parts, training=False), parts), False


def _by_base(shapes_of: Shapes, parts: Parts) -> dict[str, EngineSettings]:
    """The shapes of every base; a policy from another run uses those of the same model."""
    of_models = {parts.models[base]: shapes for base, shapes in shapes_of.items()}
    return {base: of_models[model] for base, model in parts.models.items()}
