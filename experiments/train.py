"""Train a cell: the roles of a workflow, end to end, in a folder that the same command goes on in after any stop.

    python -m experiments.train --config=configs/micro.py:voting-isolated-s-math --workdir=runs/voting

Any field can be set: --config.steps=50 --config.learner.optimiser.schedule.learning_rate=1e-4.
"""

import os
import sys

from absl import flags

from experiments import cli
from marl_jax.runs.config import ConfigError, RunConfig

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", "", "the folder of the run")
flags.DEFINE_bool("accept_changes", False, "go on although configuration, data or code are not the old ones")
flags.DEFINE_bool("report", True, "write report.html when the run ends")


def main(config: RunConfig | None, left: list[str]) -> int:
    if config is None:
        raise ConfigError(
            ["--config is missing: give --config=FILE:CELL, such as configs/micro.py:voting-isolated-s-math"]
        )
    if left:
        raise ConfigError(
            [f"'{left[0]}' is no flag: fields of the configuration are set by --config.FIELD=VALUE"]
        )
    # Deterministic kernels, before a GPU is touched: a run that was killed ends with the bits of one that was not.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true".strip()
    from marl_jax.runs import train

    step = train(config, FLAGS.workdir, accept_changes=FLAGS.accept_changes)
    if step < config.steps:  # asked to stop, perhaps by a machine that goes away soon: no time for pictures
        return 0
    if FLAGS.report:
        from marl_jax.study.report import write_report

        print(f"the report is {write_report(FLAGS.workdir)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    cli.run(main)
