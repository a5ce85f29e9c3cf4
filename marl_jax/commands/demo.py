"""A short run, the test problems that it answers before and after, and whether it learned."""

import sys
import time

from marl_jax.commands.casts import Evaluation
from marl_jax.commands.cli import PATIENCE
from marl_jax.commands.evaluate import evaluate
from marl_jax.config.run_config import RunConfig, load_config
from marl_jax.runs import train
from marl_jax.runs.tables import table
from marl_jax.study.report import write_report

__all__ = ["demo"]

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


def demo(config: RunConfig | None, workdir: str, problems: int, samples: int, accept_changes: bool) -> int:
    """The exit code: 0 where the gain's interval lies above zero, or the run was asked to stop."""
    config = config or load_config(CELL, SMALLER)
    began = time.perf_counter()
    if train(config, workdir, accept_changes=accept_changes, patience=PATIENCE) < config.steps:
        return 0
    trained = time.perf_counter() - began
    asked = Evaluation(problems=problems, samples=samples)
    records = evaluate(workdir, asked, accept_changes=accept_changes)
    seconds = time.perf_counter() - began
    print(table(records))
    print(f"\ntrained in {trained:.0f} s, {seconds:.0f} s in all")
    print(f"the report: {write_report(workdir)}")
    if records[-1]["difference"]["low"] <= 0:
        print("the gain's interval holds zero: this run did not learn", file=sys.stderr)
        return 1
    return 0
