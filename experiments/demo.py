"""Reinforcement learning of a workflow, in minutes on a laptop: three voters and an aggregator learn arithmetic.

    make demo        or        python -m experiments.demo [--config=...] [--workdir=runs/demo]

Trains voting with isolated policies from a committed base model of 0.1 million parameters, then lets base and trained
policies answer the same held-out problems, with the same noise. The same command resumes a stopped run.
"""

from absl import flags

from marl_jax.commands import cli
from marl_jax.config.run_config import RunConfig

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", "runs/demo", "the folder of the run")
flags.DEFINE_integer("problems", 256, "held-out problems to answer", lower_bound=1)
flags.DEFINE_integer("samples", 2, "answers of the workflow to each of them", lower_bound=1)
cli.define_accept_changes()


def main(config: RunConfig | None, _: list[str]) -> int:
    from marl_jax.commands.train import demo

    return demo(config, FLAGS.workdir, FLAGS.problems, FLAGS.samples, FLAGS.accept_changes)


if __name__ == "__main__":
    cli.run(main)
