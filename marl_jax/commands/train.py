"""Training from the command line: a run with its report, and the demo, which checks that a short run learned."""

import sys
import time

from marl_jax import hosts
from marl_jax.commands.console import print_to_stderr
from marl_jax.commands.contenders import Evaluation
from marl_jax.commands.evaluate import evaluate
from marl_jax.config.run_config import ConfigError, RunConfig, load_config
from marl_jax.runs import train
from marl_jax.study.report.html_page import write_overview, write_report
from marl_jax.study.results import read_study
from marl_jax.terminal.tables import table

PATIENCE = 15.0  # seconds, for `runs.train`: a machine that is preempted shuts down after 30
CELL = "configs/micro.py:voting-isolated-xs-math"
SMALLER = (  # changes that make the cell smaller: minutes instead of half an hour
    ("steps", "40"),
    ("data.problems", "32"),
    ("evaluation.every", "20"),
    ("checkpoints.every", "20"),
    ("engine.lanes", "256"),
    ("engine.max_prompt", "224"),  # both roads support it
    ("logging.episodes_every", "10"),
)


def demo(config: RunConfig | None, workdir: str, problems: int, samples: int, accept_changes: bool) -> int:
    """Returns the exit code: 0 if the gain's interval is above zero, or if the run was stopped."""
    config = config or load_config(CELL, SMALLER)
    if config.seeds > 1:
        raise ConfigError([f"the demo trains one seed and seeds is {config.seeds}: leave --config.seeds out"])
    began = time.perf_counter()
    if train(config, workdir, accept_changes=accept_changes, patience=PATIENCE) < config.steps:
        return 0
    trained = time.perf_counter() - began
    evaluation = Evaluation(problems=problems, samples=samples)
    records = evaluate(workdir, evaluation, accept_changes=accept_changes)
    seconds = time.perf_counter() - began
    print(table(records))
    print(f"\ntrained in {trained:.0f} s, {seconds:.0f} s in all")
    print(f"the report: {write_report(workdir)}")
    if records[-1]["difference"]["low"] <= 0:
        print("the gain's interval contains zero: this run did not learn", file=sys.stderr)
        return 1
    return 0


def train_and_report(
    config: RunConfig,
    workdir: str,
    *,
    accept_changes: bool = False,
    report: bool = True,
    coordinator: str | None = None,
    process: int | None = None,
) -> None:
    """Train, then write report.html; several seeds get a page each, and one page over all.

    A run that was stopped, perhaps because its machine is preempted, writes no page.

    In a run with mesh.hosts, `coordinator` and `process` are the address and number of a process, see `hosts.joined`.
    """
    devices = config.mesh.data * config.mesh.model
    with hosts.joined(config.mesh.hosts, coordinator, process, devices=devices):
        step = train(config, workdir, accept_changes=accept_changes, patience=PATIENCE)
        report = report and hosts.is_first()
    if step < config.steps or not report:
        return
    page = write_report(workdir) if config.seeds == 1 else write_overview(read_study(workdir))[0]
    print_to_stderr(f"the report is {page}")
