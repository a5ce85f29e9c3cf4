"""Recording of episodes for the run's page, for some problems and within a share of disk; and logs of tools."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from marl_jax import hosts
from marl_jax.config.run_config import RunConfig
from marl_jax.rollouts import ToolLog, write_episodes
from marl_jax.rollouts.transcript import Decoders
from marl_jax.run_folder.files import disk_errors
from marl_jax.run_folder.folder import FolderError, path_errors
from marl_jax.table import Table


def record_step(
    folder: Path,
    config: RunConfig,
    step: int,
    table: Table,
    decode: Decoders,
    trainer: Sequence[np.ndarray | None],
) -> None:
    """Write the first problems of a training step, if the step is one to record."""
    every = config.logging.episodes_every
    if every and (step % every == 0 or step in (1, config.steps)):
        path = folder / f"step-{step:06d}.parquet"
        _write(path, config, step, table, config.logging.episodes_problems, decode, trainer)


def record_evaluation(folder: Path, config: RunConfig, step: int, table: Table, decode: Decoders) -> None:
    """Write the first problems of an evaluation: the same ones each time, with the same noise."""
    if most := config.evaluation.recorded:
        _write(folder / f"val-{step:06d}.parquet", config, step, table, most, decode)


def tool_log(folder: Path, name: str) -> ToolLog:
    """The results of tools in a step or an evaluation; each process writes one file, and reads the files of all."""
    file = f"host{hosts.index()}-{name}" if hosts.index() else name
    try:
        return ToolLog(folder / "tools" / f"{file}.jsonl", sorted((folder / "tools").glob(f"*{name}.jsonl")))
    except ValueError as error:
        raise FolderError(str(error)) from None


def _write(
    path: Path,
    config: RunConfig,
    step: int,
    table: Table,
    most: int,
    decode: Decoders,
    trainer: Sequence[np.ndarray | None] = (),
) -> None:
    """Write up to `most` problems, with all their episodes: as many as fit into a file's share of the budget.

    A single problem above the share is kept while all files are within the part of the budget that is due by this
    step: long texts are recorded less often, but to the end of the run.
    """
    by_task = itertools.groupby(table.bare_episodes, lambda bare: bare.task.id)
    ends = list(itertools.accumulate(len(list(episodes)) for _, episodes in by_task))
    problems = min(most, len(ends))
    budget = 1e6 * config.logging.episodes_size
    share = budget / _files(config)
    while problems:
        part = table.of_episodes(range(ends[problems - 1]))  # the first rows
        with path_errors(path.parent), disk_errors(path.parent):
            write_episodes(path, part, decode, trainer[: len(part)])
        size = path.stat().st_size
        if size <= share:
            return
        if problems == 1:
            # Without later files of a killed process: a resumed run must record what an uninterrupted run does.
            others = [
                other.stat().st_size
                for other in path.parent.glob("*.parquet")
                if _order(other) < _order(path)
            ]
            if sum(others) + size > budget * (step / config.steps if others else 1):
                path.unlink()
            return
        problems = max(1, min(problems - 1, int(problems * share / size)))


def _order(path: Path) -> tuple[str, str]:
    """A sort key: by step, and at one step the episodes of training before those of the evaluation."""
    return path.stem.partition("-")[2], path.stem


def _files(config: RunConfig) -> int:
    """How many files of episodes a complete run writes, of training steps and of evaluations."""
    spans = (config.logging.episodes_every, config.evaluation.recorded and config.evaluation.every)
    return sum(config.steps // every + 2 for every in spans if every) or 1
