"""A run that diverged: its error message, its record on disk, and how it is resumed.

    an update or a log-probability that is not finite ──► one line, diverged.json, its own checkpoint set aside

Everything in a step follows from the seed, so the same configuration would diverge again: it is refused at once until
it changes. Gradients that are not finite are another matter: they are left out (`learner.max_skips`), so the policies
stay good and are saved, and the same command goes on with other problems.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from marl_jax import hosts
from marl_jax.config.run_config import RunConfig
from marl_jax.errors import UserError
from marl_jax.learning import Report
from marl_jax.run_folder.checkpoints import steps
from marl_jax.run_folder.files import write_atomically
from marl_jax.runs.run import Run
from marl_jax.runs.state import State
from marl_jax.sampling.engine import NotFinite

FILE = "diverged.json"


class Diverged(UserError, RuntimeError):
    """Weights or numbers computed from them are not finite; the text is one line that says how to go on."""


def broken_update(report: Report, before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """A text that names a policy whose update is not finite; empty if all are finite."""
    for policy, values in report.policies.items():
        if after[policy] > before[policy] and not math.isfinite(values.get("update_norm", 0.0)):
            return f"the update of policy '{policy}' is not finite"
    return ""


@contextlib.contextmanager
def finite(run: Run, state: State) -> Iterator[None]:
    """A context that uses the policies of this state; after step 0, numbers that are not finite raise `Diverged`."""
    try:
        yield
    except NotFinite as error:
        if not state.step:
            raise
        hosts.from_all(run.checkpoints.wait)
        raise diverged(run.folder, run.config, state.step + 1, str(error), bad=state.step) from error


def diverged(folder: Path, config: RunConfig, step: int, what: str, *, bad: int | None = None) -> Diverged:
    """The error of step `step`; the checkpoint of step `bad` is not finite, and is set aside."""
    return Diverged(hosts.from_first(lambda: _record(folder, config, step, what, bad)))


def ways_out(config: RunConfig) -> str:
    """Settings to change, with their present values."""
    optimiser = config.learner.optimiser
    rates = "".join(f", that of '{name}' {rate:g}" for name, rate in config.learner.learning_rates.items())
    others = f"{rates} by --config.learner.learning_rates" if rates else ""
    return (
        f"lower --config.learner.optimiser.schedule.learning_rate ({optimiser.schedule.learning_rate:g}{others}) or "
        f"--config.learner.optimiser.grad_clip ({optimiser.grad_clip}), and start again with --accept_changes"
    )


def refuse_the_same(folder: Path, config: RunConfig, accept_changes: bool) -> None:
    """Refuse at once a configuration that is known to diverge; the record stays until a run has opened."""
    path = folder / FILE
    if not path.exists():
        return
    try:
        before: Any = json.loads(path.read_text(encoding="utf-8"))
        same = before["config"] == config.to_json()
    except (OSError, ValueError, TypeError, KeyError):
        same = False
    if same and not accept_changes:
        raise Diverged(f"this run diverged with this configuration: {before['text']}")


def _record(folder: Path, config: RunConfig, step: int, what: str, bad: int | None) -> str:
    """The text of the error, which is also written to the folder; the bad checkpoint is set aside."""
    checkpoints = folder / "checkpoints"
    if bad is not None and (checkpoints / str(bad)).exists():
        aside = checkpoints / f"{bad}.diverged"
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(checkpoints / str(bad), aside)
    good = steps(checkpoints)
    where = f"the last good checkpoint is of step {good[-1]}" if good else "nothing was saved before"
    whose = f"seed {config.seed}, " if config.seeds > 1 else ""
    text = f"{whose}step {step}: {what}; {where}: {ways_out(config)}"
    write_atomically(
        folder / FILE, json.dumps({"step": step, "text": text, "config": config.to_json()}) + "\n"
    )
    return text
