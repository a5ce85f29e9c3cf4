"""Play a workflow on a few problems without training, and show what each role was asked and what it said.

    marl-jax try --config=micro:voting-isolated-s-math --problems=2
    python -m experiments.try --config=configs/micro.py:debate-shared-s-math --config.workflow.settings.agents=2

The policies are those that a run starts from. Problems are from train; nothing is written.
"""

from absl import flags

from marl_jax.commands import cli
from marl_jax.config.run_config import RunConfig

FLAGS = flags.FLAGS
flags.DEFINE_integer("problems", 2, "how many problems", lower_bound=1)
flags.DEFINE_integer("samples", 1, "episodes per problem", lower_bound=1)


def main(config: RunConfig, _: list[str]) -> None:
    from marl_jax.commands.rehearse import rehearse

    for text in rehearse(config, FLAGS.problems, FLAGS.samples):
        print(text)


if __name__ == "__main__":
    cli.run(main, needs="FILE:CELL, such as micro:voting-isolated-s-math", prints=True)
