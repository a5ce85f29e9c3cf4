"""Train the cells of a file, each under several seeds, play the test split, and write one page over all of them.

    python -m experiments.matrix --config=configs/micro.py --root=runs/study --cells='*-xs-math' --seeds=3 --dry_run
    python -m experiments.matrix --config=configs/micro.py --root=runs/study --cells='*-xs-math' --seeds=3

The runs are ROOT/CELL/seed-N, one after another; the same command continues after a stop, and several processes of it
on one disk share the work. Fields that are set, such as --config.steps=50, apply to every cell. On a cluster
(docs/hosts.md#slurm-and-ray): --launcher=submitit or --launcher=ray.
"""

from collections.abc import Sequence

from absl import flags

from marl_jax.commands import cli, run_matrix
from marl_jax.commands.console import early_close_allowed
from marl_jax.config.run_config import ConfigError, split_argv
from marl_jax.study.jobs.launchers import LAUNCHERS
from marl_jax.study.jobs.matrix import make_jobs

FLAGS = flags.FLAGS
flags.DEFINE_string("root", "", "the directory that holds the runs")
flags.DEFINE_string(
    "cells",
    "",
    "patterns of cells or names of sets, with commas between: voting-*,single-shared-*; none: the study's cells",
)
flags.DEFINE_integer("seeds", 1, "runs of every cell; seeds count up from the configuration's", lower_bound=1)
flags.DEFINE_integer(
    "test_samples",
    1,
    "episodes of every test problem, for the base, best and final policies; 0: no test",
    lower_bound=0,
)
flags.DEFINE_enum(
    "launcher", "local", LAUNCHERS, "where the runs train: this machine, SLURM by submitit, or a Ray cluster"
)
flags.DEFINE_list(
    "launcher_options",
    [],
    "options of the launcher as NAME=VALUE, such as slurm_partition=gpu,gpus_per_node=1 or num_gpus=1",
)
flags.DEFINE_bool("dry_run", False, "only show what remains to be done")
cli.define_accept_changes()

Cells = tuple[str | None, list[tuple[str, str | None]]]


def read(argv: Sequence[str]) -> tuple[Cells, list[str]]:
    """The values of --config and --config.*, for all cells."""
    spec, texts, rest = split_argv(argv)
    return (spec, texts), rest


def main(cells: Cells | None, _: list[str]) -> int:
    spec, texts = cells or (None, [])
    if spec is None:
        raise ConfigError(["--config is missing: give --config=FILE, such as configs/micro.py"])
    root = run_matrix.checked_root(FLAGS.root)
    options = run_matrix.options_of(FLAGS.launcher, FLAGS.launcher_options)
    jobs = make_jobs(spec, texts, root, FLAGS.cells, FLAGS.seeds, FLAGS.accept_changes)
    if not FLAGS.dry_run:
        return run_matrix.run_matrix(jobs, root, FLAGS.test_samples, FLAGS.launcher, options)
    with early_close_allowed():
        print(run_matrix.overview(jobs, root))
    return 0


if __name__ == "__main__":
    cli.run(main, read=read)
