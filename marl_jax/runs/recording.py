"""Recording of episodes for the run's page, for some problems and within a share of disk; and logs of tools."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from marl_jax import hosts
from marl_jax.config.run_config import RunConfig
from marl_jax.rollouts import ToolLog, write_episodes
from marl_jax.rollouts.transcript import Decoders
from marl_jax.run_folder.files import disk_errors
from marl_jax.run_folder.folder import FolderError, path_errors
from marl_jax.table import Table


def tool_log(folder: Path, name: str) -> ToolLog:
    """The results of tools in a step or an evaluation; each process writes one file, and reads the files of all."""
    file = f"host{hosts.index()}-{name}" if hosts.index() else name
    try:
        return ToolLog(folder / "tools" / f"{file}.jsonl", sorted((folder / "tools").glob(f"*{name}.jsonl")))
    except ValueError as error:
        raise FolderError(str(error)) from None


def record(
    folder: Path,
    kind: Literal["step", "val"],
    config: RunConfig,
    step: int,
    table: Table,
    decode: Decoders,
    trainer: Sequence[np.ndarray | None] = (),
) -> None:
    """Write the first problems of a training step, if it is one to record, or of an evaluation on val.

    All their episodes are written, and as many problems as fit into a file's share of the budget. A single problem
    above the share is kept while all files are within the part of the budget that is due by this step: long texts are
    recorded less often, but to the end of the run. Evaluations record the same problems each time.
    """
    every, most = config.logging.episodes_every, config.logging.episodes_problems
    if kind == "val":
        most = config.evaluation.recorded
    elif not every or (step % every and step not in (1, config.steps)):
        return
    path = folder / f"{kind}-{step:06d}.parquet"
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
            # Without `experiments.evaluate`'s files, which have more dashes, and later ones of a killed process: a
            # resumed run must record what an uninterrupted run does.
            others = [
                other.stat().st_size
                for other in path.parent.glob("*.parquet")
                if other.stem.count("-") == 1 and _order(other) < _order(path)
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
