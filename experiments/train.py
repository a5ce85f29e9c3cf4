"""Train a cell: the roles of a workflow, end to end, in a folder that the same command goes on in after any stop.

    python -m experiments.train --config=configs/micro.py:voting-isolated-s-math --workdir=runs/voting

Any field can be set: --config.steps=50 --config.learner.optimiser.schedule.learning_rate=1e-4.
"""

import contextlib
import sys

from absl import flags

from experiments import cli
from marl_jax.runs.run_config import ConfigError, RunConfig

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", "", "the folder of the run")
flags.DEFINE_bool("report", True, "write report.html when the run ends")
cli.define_accept_changes()


def main(config: RunConfig | None, _: list[str]) -> int:
    if config is None:
        raise ConfigError(
            ["--config is missing: give --config=FILE:CELL, such as configs/micro.py:voting-isolated-s-math"]
        )
    from marl_jax.runs import train

    step = train(config, FLAGS.workdir, accept_changes=FLAGS.accept_changes, patience=cli.PATIENCE)
    if step < config.steps:  # asked to stop, perhaps by a machine that goes away soon: no time for pictures
        return 0
    if FLAGS.report:
        from marl_jax.study.report import write_report

        page = write_report(FLAGS.workdir)
        with contextlib.suppress(OSError):  # of a stream that nobody reads any more
            print(f"the report is {page}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    cli.run(main)
