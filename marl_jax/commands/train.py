"""A run from the command line, and its report when it has reached its last step."""

import contextlib
import sys

from marl_jax.commands.cli import PATIENCE
from marl_jax.config.run_config import RunConfig
from marl_jax.runs import train

__all__ = ["train_and_report"]


def train_and_report(
    config: RunConfig, workdir: str, *, accept_changes: bool = False, report: bool = True
) -> None:
    """Train, and write report.html; one that was asked to stop, perhaps by a machine that goes away, has no time to."""
    step = train(config, workdir, accept_changes=accept_changes, patience=PATIENCE)
    if step < config.steps or not report:
        return
    from marl_jax.study.report import write_report

    page = write_report(workdir)
    with contextlib.suppress(OSError):  # of a stream that nobody reads any more
        print(f"the report is {page}", file=sys.stderr, flush=True)
