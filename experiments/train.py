"""Train a cell: the roles of a workflow, end to end, in a folder from which the same command resumes after any stop.

    python -m experiments.train --config=configs/micro.py:voting-isolated-s-math --workdir=runs/voting

Any field can be set: --config.steps=50 --config.learner.optimiser.schedule.learning_rate=1e-4.
"""

from absl import flags

from marl_jax.commands import cli
from marl_jax.config.run_config import RunConfig

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", "", "the folder of the run")
flags.DEFINE_bool("report", True, "write report.html when the run ends")
cli.define_training()


def main(config: RunConfig, _: list[str]) -> None:
    from marl_jax.commands.train import train_and_report

    train_and_report(config, FLAGS.workdir, report=FLAGS.report, **cli.training_flags())


if __name__ == "__main__":
    cli.run(main, needs="FILE:CELL, such as configs/micro.py:voting-isolated-s-math")
