"""Reinforcement learning of a workflow, in minutes on a laptop: three voters and an aggregator learn arithmetic.

    make demo        or        python -m experiments.demo [--config=...] [--workdir=runs/demo]

Trains voting with isolated policies from a committed base model of 0.1 million parameters, then lets base and trained
policies answer the same held-out problems, with the same noise. The same command goes on where it was stopped.
"""

import sys
import time

from absl import flags

from experiments import cli
from marl_jax.runs.run_config import RunConfig, load_config

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", "runs/demo", "the folder of the run")
flags.DEFINE_integer("problems", 256, "held-out problems to answer", lower_bound=1)
flags.DEFINE_integer("samples", 2, "answers of the workflow to each of them", lower_bound=1)
cli.define_accept_changes()

CELL = "configs/micro.py:voting-isolated-xs-math"
SMALLER = (  # than the cell: minutes instead of half an hour
    ("steps", "40"),
    ("data.problems", "32"),
    ("evaluation.every", "20"),
    ("checkpoints.every", "20"),
    ("engine.lanes", "256"),
    ("engine.max_prompt", "192"),
    ("logging.episodes_every", "10"),
)


def main(config: RunConfig | None, _: list[str]) -> int:
    config = config or load_config(CELL, SMALLER)
    from marl_jax.commands.evaluate import evaluate
    from marl_jax.runs import train
    from marl_jax.runs.tables import table
    from marl_jax.study.report import write_report

    began = time.perf_counter()
    accept = {"accept_changes": FLAGS.accept_changes}
    if train(config, FLAGS.workdir, **accept, patience=cli.PATIENCE) < config.steps:
        return 0  # asked to stop
    trained = time.perf_counter() - began
    sizes = {"problems": FLAGS.problems, "samples": FLAGS.samples}
    records = evaluate(FLAGS.workdir, split="test", **sizes, **accept)
    seconds = time.perf_counter() - began
    print(table(records))
    print(f"\ntrained in {trained:.0f} s, {seconds:.0f} s in all")
    print(f"the report: {write_report(FLAGS.workdir)}")
    if records[-1]["difference"]["low"] <= 0:
        print("the gain's interval holds zero: this run did not learn", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    cli.run(main)
