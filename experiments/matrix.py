"""Train the cells of a file, each under several seeds, play the test split, and write one page over all of them.

    python -m experiments.matrix --config=configs/micro.py --root=runs/study --cells='*-xs-math' --seeds=3 --dry_run
    python -m experiments.matrix --config=configs/micro.py --root=runs/study --cells='*-xs-math' --seeds=3

The runs are ROOT/CELL/seed-N, one after another; the same command goes on where it was stopped, and several of it on
one disk share the work. Fields that are set, such as --config.steps=50, hold for every cell.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from experiments import cli
from marl_jax.runs import devices
from marl_jax.runs.config import ConfigError, split_argv
from marl_jax.runs.folder import FolderError
from marl_jax.runs.page import duration
from marl_jax.runs.plan import find_model, make_plan
from marl_jax.runs.tables import aligned
from marl_jax.study import matrix, record, seeds, tables
from marl_jax.study.matrix import Job, Kind

FLAGS = flags.FLAGS
flags.DEFINE_string("root", "", "the directory that holds the runs")
flags.DEFINE_string("cells", "*", "patterns of cells, with commas between: voting-*,single-shared-*")
flags.DEFINE_integer("seeds", 1, "runs of every cell; seeds count up from the configuration's", lower_bound=1)
flags.DEFINE_integer(
    "test_samples",
    1,
    "episodes of every test problem, of base, best and final policies; 0: none",
    lower_bound=0,
)
flags.DEFINE_bool("dry_run", False, "only say what there is to do")

Asked = tuple[str | None, list[tuple[str, str | None]]]


def read(argv: Sequence[str]) -> tuple[Asked, list[str]]:
    """What --config and --config.* say, for all cells."""
    spec, texts, rest = split_argv(argv)
    return (spec, texts), rest


def main(asked: Asked | None, _: list[str]) -> int:
    spec, texts = asked or (None, [])
    if spec is None:
        raise ConfigError(["--config is missing: give --config=FILE, such as configs/micro.py"])
    if not FLAGS.root:
        raise FolderError("--root is missing: give the directory that holds the runs")
    root = Path(FLAGS.root).expanduser().absolute()
    jobs = matrix.make_jobs(spec, texts, root, FLAGS.cells, FLAGS.seeds)
    if FLAGS.dry_run:
        print(overview(jobs, root))
        return 0
    matrix.check(jobs)
    trouble = matrix.work(jobs, FLAGS.test_samples, lambda text: print(text, file=sys.stderr, flush=True))
    if trouble is None:
        return 0  # asked to stop
    results(jobs, root)
    for text in trouble:
        print(text, file=sys.stderr)
    return 1 if trouble else 0


def overview(jobs: Sequence[Job], root: Path) -> str:
    """What there is to do: how far every run is, and how long what is left takes by the plan."""
    device = devices.here()
    by_cell: dict[str, list[Job]] = {}
    for job in jobs:
        by_cell.setdefault(job.cell, []).append(job)
    count = len(next(iter(by_cell.values())))
    lines = [["cell", *(f"seed {job.config.seed}" for job in jobs[:: len(by_cell)]), "a run", "left"]]
    total: float | None = 0.0
    changes = []
    for cell, mine in by_cell.items():
        config = mine[0].config
        seconds = make_plan(config, find_model(config)[0], device).seconds
        states = [matrix.state(job) for job in mine]
        changes += [f"{job.folder}: {text}" for job, of in zip(mine, states) for text in of.changes]
        step = None if seconds is None else sum(seconds.values())
        left = None if step is None else step * sum(of.steps - of.step for of in states)
        total = None if total is None or left is None else total + left
        told = [
            "not known" if value is None else duration(value)
            for value in (step and step * config.steps, left)
        ]
        lines.append([cell, *map(str, states), *told])
    left = "not known" if total is None else f"about {duration(total)}"
    title = (
        f"{len(by_cell)} cells x {count} seeds = {len(jobs)} runs in {root}; left on {device.name}: {left}"
    )
    how = "Times are counted by experiments.plan, without compiling, grading and evaluating."
    return "\n\n".join([title, aligned(lines, left=1), how, *changes])


def many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def results(jobs: Sequence[Job], root: Path) -> None:
    """The table over all cells, and the page."""
    from marl_jax.study.report import write_overview

    runs = [record.read_run(job.folder) for job in jobs if matrix.state(job).kind is not Kind.NEW]
    if not runs:
        return
    for table in seeds.tables_of(runs):
        print(f"{tables.plain(table)}\n")
    print(f"the report: {write_overview(root)}")


if __name__ == "__main__":
    cli.run(main, read=read)
