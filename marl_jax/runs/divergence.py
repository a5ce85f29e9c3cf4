"""A run that diverged: its error message, its record on disk, and how it is resumed.

    an update or a log-probability that is not finite ──► one line, diverged.json, its own checkpoint set aside

Everything in a step follows from the seed, so the same configuration would diverge again: it is refused at once until
it changes. Gradients that are not finite are another matter: they are left out (`learner.max_skips`), so the policies
stay good and are saved, and the same command goes on with other problems.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

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
        raise diverged(run, state.step + 1, str(error), bad=state.step) from error


def diverged(run: Run, step: int, what: str, *, bad: int | None = None) -> Diverged:
    """The error of step `step`, recorded in the folder; the checkpoint of step `bad`, not finite, is set aside."""
    config, checkpoints = run.config, run.folder / "checkpoints"

    def record() -> str:
        if bad is not None and (checkpoints / str(bad)).exists():
            run.checkpoints.set_aside(bad, "diverged")
        good = steps(checkpoints)
        where = f"the last good checkpoint is of step {good[-1]}" if good else "nothing was saved before"
        whose = f"seed {config.seed}, " if config.seeds > 1 else ""
        text = f"{whose}step {step}: {what}; {where}: {ways_out(config)}"
        about = {"step": step, "text": text, "config": config.to_json()}
        write_atomically(run.folder / FILE, json.dumps(about) + "\n")
        return text

    return Diverged(hosts.from_first(record))


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
    try:
        before = json.loads((folder / FILE).read_text(encoding="utf-8"))
        same, text = before["config"] == config.to_json(), before["text"]
    except (OSError, ValueError, TypeError, KeyError):  # there is no record, or it is damaged
        return
    if same and not accept_changes:
        raise Diverged(f"this run diverged with this configuration: {text}")
