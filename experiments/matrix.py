"""Train the cells of a file, each under several seeds, play the test split, and write one page over all of them.

    python -m experiments.matrix --config=configs/micro.py --root=runs/study --cells='*-xs-math' --seeds=3 --dry_run
    python -m experiments.matrix --config=configs/micro.py --root=runs/study --cells='*-xs-math' --seeds=3

The runs are ROOT/CELL/seed-N, one after another; the same command goes on where it was stopped, and several of it on
one disk share the work. Fields that are set, such as --config.steps=50, hold for every cell.
"""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from experiments import cli
from marl_jax.planning import devices
from marl_jax.planning.plan import PlanError, find_model, make_plan
from marl_jax.runs import folder
from marl_jax.runs.folder import FolderError
from marl_jax.runs.page import duration
from marl_jax.runs.run_config import ConfigError, split_argv
from marl_jax.runs.tables import aligned
from marl_jax.study import matrix, record, run_tables, seeds
from marl_jax.study.matrix import Job, State

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
cli.define_accept_changes()

Asked = tuple[str | None, list[tuple[str, str | None]]]


def read(argv: Sequence[str]) -> tuple[Asked, list[str]]:
    """What --config and --config.* say, for all cells."""
    spec, texts, rest = split_argv(argv)
    return (spec, texts), rest


def main(asked: Asked | None, _: list[str]) -> int:
    spec, texts = asked or (None, [])
    if spec is None:
        raise ConfigError(["--config is missing: give --config=FILE, such as configs/micro.py"])
    root = checked_root()
    jobs = matrix.make_jobs(spec, texts, root, FLAGS.cells, FLAGS.seeds, FLAGS.accept_changes)
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


def checked_root() -> Path:
    if not FLAGS.root:
        raise FolderError("--root is missing: give the directory that holds the runs")
    root = Path(FLAGS.root).expanduser().absolute()
    if root.exists() and not root.is_dir():
        raise FolderError(f"--root={FLAGS.root} is no directory")
    if around := folder.run_around(root):
        raise FolderError(f"--root={FLAGS.root} lies in the run '{around}': choose another directory")
    return root


# ---------------------------------------------------------------- what there is to do


def overview(jobs: Sequence[Job], root: Path) -> str:
    """How far every run is, and by the plan how long what is left takes."""
    device = devices.here()
    by_cell: dict[str, list[Job]] = {}
    for job in jobs:
        by_cell.setdefault(job.cell, []).append(job)
    states = {job.folder: matrix.state(job) for job in jobs}
    first = next(iter(by_cell.values()))
    same = all(
        [job.config.seed for job in mine] == [job.config.seed for job in first] for mine in by_cell.values()
    )
    titles = [f"seed {job.config.seed}" if same else f"seed +{more}" for more, job in enumerate(first)]
    lines = [["cell", *titles, "a run", "left"]]
    total: float | None = 0.0
    for cell, mine in by_cell.items():
        found = [states[job.folder] for job in mine]
        whole, left = times(mine[0], found, device)
        total = None if total is None or left is None else total + left
        lines.append([cell, *map(str, found), whole, told(left)])
    count = f"{many(len(by_cell), 'cell')} x {many(len(first), 'seed')} = {many(len(jobs), 'run')}"
    notes = [
        "Times are counted by experiments.plan, without compiling, grading and evaluating.",
        *absent(jobs),
        *(f"{job.name}: {text}" for job in jobs for text in states[job.folder].told),
    ]
    title = f"{count} in {root}; left on {device.name}: {told(total)}"
    return "\n\n".join([title, aligned(lines, left=1), "\n".join(notes)])


def times(job: Job, states: Sequence[State], device: devices.Device) -> tuple[str, float | None]:
    """How long a run of a cell takes, in words, and all that is left of the cell, in seconds."""
    try:
        plan = make_plan(job.config, find_model(job.config)[0], device)
    except PlanError:
        return "not known", None
    if not plan.fits:
        return "does not fit", None
    if plan.seconds is None:
        return "not known", None
    step = sum(plan.seconds.values())
    return duration(step * job.config.steps), step * sum(job.config.steps - of.step for of in states)


def told(seconds: float | None) -> str:
    return "not known" if seconds is None else f"about {duration(seconds)}" if seconds else "nothing"


def absent(jobs: Sequence[Job]) -> list[str]:
    """Models that the runs would start from and that are not there."""
    bases = {base for job in jobs for base in (job.config.policies.base, *job.config.policies.bases.values())}
    return [
        f"There is no model in '{base}' yet."
        for base in sorted(bases)
        if not (Path(base) / "config.json").exists()
    ]


def many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


# ---------------------------------------------------------------- what came of it


def results(jobs: Sequence[Job], root: Path) -> None:
    """The tables over all cells, and the page, of the runs that can be read."""
    from marl_jax.study.report import write_overview

    runs = []
    for job in jobs:
        with contextlib.suppress(FolderError):  # the page tells which cannot be read
            runs.append(record.read_run(job.folder))
    for table in seeds.tables_of(runs):
        print(f"{run_tables.plain(table)}\n")
    if runs:
        print(f"the report: {write_overview(root)}")


if __name__ == "__main__":
    cli.run(main, read=read)
