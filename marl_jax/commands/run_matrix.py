"""A matrix of runs from its jobs to its page: the remaining jobs, running them, the tables over all cells."""

import contextlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from marl_jax.commands.console import early_close_allowed, print_to_stderr
from marl_jax.config.run_config import ConfigError
from marl_jax.errors import RunError, UserError
from marl_jax.packaged import resolve_path
from marl_jax.planning import devices
from marl_jax.planning.plan import Plan, PlanError, find_models, make_plan
from marl_jax.planning.step_times import guess
from marl_jax.run_folder import folder
from marl_jax.run_folder.folder import FolderError
from marl_jax.runs.opening import check_before_run
from marl_jax.study import seed_tables, wording
from marl_jax.study.jobs import matrix
from marl_jax.study.jobs.launchers import LauncherError, launch
from marl_jax.study.jobs.matrix import Job, State
from marl_jax.study.results import read_study
from marl_jax.study.wording import Table
from marl_jax.terminal.page import duration
from marl_jax.terminal.tables import filled


def checked_root(root: str | os.PathLike[str]) -> Path:
    """The directory for the runs; it must not be a file or be in a run."""
    if not os.fspath(root):
        raise FolderError("--root is missing: give the directory that holds the runs")
    path = Path(os.path.expanduser(root)).absolute()
    if path.exists() and not path.is_dir():
        raise FolderError(f"--root={root} is no directory")
    if run := folder.enclosing_run(path):
        raise FolderError(f"--root={root} lies in the run '{run}': choose another directory")
    return path


def _plans(jobs: Sequence[Job]) -> dict[str, Plan | None]:
    """{cell: its plan for this machine; None if its base does not exist yet}.

    If runs of some cells would be refused at their start, this reports all such cells together. It opens the devices,
    so it must not be called while runs use them.
    """
    device, plans, refused = devices.here(), dict[str, Plan | None](), dict[str, list[str]]()
    for cell, config in {job.cell: job.config for job in jobs}.items():
        plans[cell] = None
        with contextlib.suppress(PlanError):
            models, _ = find_models(config)
            try:
                plans[cell] = plan = make_plan(config, models, device)
                check_before_run(config, plan)
            except (UserError, RunError) as error:
                refused.setdefault(str(error), []).append(cell)
    if refused:
        raise ConfigError([matrix.in_cells(text, cells, list(plans)) for text, cells in refused.items()])
    return plans


def run_matrix(
    jobs: Sequence[Job],
    root: Path,
    test_samples: int,
    launcher: str = "local",
    options: Mapping[str, float | str] | None = None,
) -> int:
    """Run the remaining jobs, here or with a launcher, and show their results; returns the exit code."""
    matrix.check(jobs)
    if launcher == "local":
        failures = matrix.work(jobs, test_samples, print_to_stderr)
    else:
        failures = launch(launcher, jobs, test_samples, root / "launcher", print_to_stderr, options or {})
    if failures is None:
        return 0  # stopped by the user
    with early_close_allowed():
        show_results(jobs, root)
    for text in failures:
        print(text, file=sys.stderr)
    return 1 if failures else 0


def options_of(launcher: str, texts: Sequence[str]) -> dict[str, float | str]:
    """{name: value} of the launcher's options, each written NAME=VALUE; values become numbers if they can."""
    if texts and launcher == "local":
        raise LauncherError(
            "--launcher_options are for --launcher=submitit or ray: give a launcher, or leave them out"
        )
    pairs = [text.partition("=") for text in texts]
    if wrong := [text for text, (name, sign, _) in zip(texts, pairs) if not (name and sign)]:
        raise LauncherError(f"--launcher_options has {wrong[0]!r}: give NAME=VALUE, with commas between")
    return {name: _number(value) for name, _, value in pairs}


def _number(text: str) -> float | str:
    """The text as a number, such as 0.5 for half a GPU; the text itself if it is no number."""
    if re.fullmatch(r"\d*\.\d+", text, re.ASCII):
        return float(text)
    return int(text) if re.fullmatch(r"\d+", text, re.ASCII) else text


def show_results(jobs: Sequence[Job], root: Path) -> None:
    """Print the tables over all cells and write the page, for the runs that can be read."""
    from marl_jax.study.report.html_page import write_overview

    try:
        study = read_study(root)
    except FolderError:
        return  # no run has begun
    page, study = write_overview(study)
    folders = {job.folder for job in jobs}
    for table in seed_tables.terminal_tables(
        {name: run for name, run in study.runs.items() if run.folder in folders}
    ):
        print(f"{wording.plain(table)}\n")
    print(f"the report: {page}")


def overview(jobs: Sequence[Job], root: Path) -> str:
    """The progress of every run, and an estimate of the remaining time."""
    device, plans = devices.here(), _plans(jobs)
    cells: dict[str, list[tuple[Job, State]]] = {}
    for job in jobs:
        cells.setdefault(job.cell, []).append((job, matrix.state(job)))
    rows, remaining = [], []
    for cell, runs in cells.items():
        per_run, seconds = _times(runs, plans[cell])
        remaining.append(seconds)
        rows.append([cell, *(str(state) for _, state in runs), per_run, _about(seconds)])
    seeds_of = [tuple(job.config.seed for job, _ in runs) for runs in cells.values()]
    same = len(set(seeds_of)) == 1
    titles = [f"seed {seed}" if same else f"seed +{more}" for more, seed in enumerate(seeds_of[0])]
    sizes = f"{_many(len(cells), 'cell')} x {_many(len(titles), 'seed')} = {_many(len(jobs), 'run')}"
    total = None if None in remaining else sum(filter(None, remaining))
    title = f"{sizes} in {root}; time left on {device.name}: {_about(total)}"
    bases = {base for job in jobs for base in (job.config.policies.base, *job.config.policies.bases.values())}
    notes = [
        filled(
            "Times are of this machine: those of a cell's recorded steps or, without any, the estimate of `plan`, "
            "corrected by other cells' steps. Compilation and evaluation are not included."
        ),
        *(
            f"There is no model in '{base}' yet."
            for base in sorted(bases)
            if not (resolve_path(base) / "config.json").exists()
        ),
        *(f"{job.name}: {text}" for runs in cells.values() for job, state in runs for text in state.problems),
    ]
    table = Table(title, rows, ("cell", *titles, "a run", "left"))
    return wording.plain(table) + "\n\n" + "\n".join(notes)


def _times(runs: Sequence[tuple[Job, State]], plan: Plan | None) -> tuple[str, float | None]:
    """(time of one run of a cell as text, seconds that remain for all runs of the cell)."""
    if plan is None:
        return "not known", None
    config = runs[0][0].config
    known = guess(config, plan)
    if not plan.fits:
        return "does not fit", None
    if plan.seconds is None and known is None:
        return "not known", None
    step = known.seconds if known else sum((plan.seconds or {}).values())
    return duration(step * config.steps), step * sum(
        config.steps - state.step for _, state in runs
    ) / config.seeds


def _about(seconds: float | None) -> str:
    return "not known" if seconds is None else f"about {duration(seconds)}" if seconds else "nothing"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
