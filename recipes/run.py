"""Train the arms of a recipe at equal seeds, problems and sampled tokens, and write their results.

    python -m recipes.run dr_mas --seeds=3 --root=runs/recipes [--arms=agent,task]

The runs are ROOT/NAME/seed-N/ARM; the same command continues after it was stopped. All arms of a seed are compared at
the number of tokens that the thriftiest arm sampled: each at its last checkpoint up to it. The numbers are written to
results/recipes/NAME.json, from which `python -m recipes.report` makes the tables of docs/recipes.md; those of a user's
recipe to ROOT/MODULE.json. With --arms they are only printed, since the token budget depends on all arms.
"""

import contextlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from marl_jax.commands import cli
from marl_jax.config.phase_fields import phase_at
from marl_jax.config.run_config import ConfigError, RunConfig
from marl_jax.errors import RunError
from marl_jax.fields import nearest, to_json
from marl_jax.rewards.own_metric import with_outcomes
from marl_jax.run_folder import folder as run_folder
from marl_jax.run_folder.checkpoints import steps as saved_steps
from marl_jax.run_folder.files import write_atomically
from marl_jax.run_folder.json_lines import plain, read_lines
from marl_jax.runs import train
from marl_jax.runs.loading.play import load_all, make_service, planned_engine, play_graded, player_of
from marl_jax.runs.loading.stored import policies_at
from marl_jax.table import Table
from marl_jax.terminal.live import Live
from marl_jax.user_cache import machine
from recipes.recipe import COMMON, RESULTS, Measure, Recipe, Trained, changed, find, names
from recipes.report import claim_rows

SAMPLES = 2  # episodes of each test problem

FLAGS = flags.FLAGS
flags.DEFINE_integer("seeds", 3, "number of runs of each arm; their seeds count from 0", lower_bound=1)
flags.DEFINE_string("root", "runs/recipes", "the directory that holds the runs")
flags.DEFINE_list("arms", [], "arms to train, separated by commas, a name with a comma in quotes; none: all")


def trained(config: RunConfig, folder: Path) -> None:
    """Train to the end. A run that was finished under another configuration is refused, as `train` does."""
    last = max(saved_steps(folder / "checkpoints"), default=0)
    if last >= config.steps and (before := run_folder.earlier(folder)):
        if changes := run_folder.differences(before["config"], config.to_json()):
            raise RunError(
                f"'{folder}' was trained with another configuration ({'; '.join(changes)}): choose another --root"
            )
    else:
        last = train(config, folder, live=Live(config.steps, config.roles, io.StringIO()))
    if last < config.steps:
        raise RunError(f"stopped after step {last} of '{folder}'; the same command goes on from there")


def sampled(config: RunConfig, lines: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Int[steps]: tokens sampled up to each step, in all draws; tokens of collected calls are not counted again."""
    played = [
        not config.phases or phase_at(config.phases, i).phase.source == "play" for i in range(len(lines))
    ]
    return np.cumsum([line.get("draws/tokens", line["tokens"]) * new for line, new in zip(lines, played)])


def played(config: RunConfig, folder: Path, step: int) -> Table:
    """The test problems, played by the policies of a step; 0: by the initial policies."""
    named = load_all(config, ["test"])
    stored = policies_at(folder, config, named.parts, step or "base")
    engine = planned_engine(config, named.parts, training=False)
    service = make_service(config, named.parts, stored.trees, engine, stored.updates, measured=True)
    player, tasks = player_of(config, named.parts, service), list(named.splits["test"])
    graded, metric = play_graded(player, tasks, SAMPLES, config.seed), named.parts.metric
    return graded if metric is None else with_outcomes(graded, metric)


def compared(recipe: Recipe, configs: Mapping[str, RunConfig], root: Path) -> dict[str, dict[str, Any]]:
    """{arm: the results of its run of this seed}, at equal tokens."""
    lines = {arm: list(read_lines(root / arm / "metrics.jsonl")) for arm in configs}
    spent = {arm: sampled(configs[arm], lines[arm]) for arm in configs}
    # An arm that only learns from collected calls samples nothing, and sets no budget.
    budget = min((int(tokens[-1]) for tokens in spent.values() if len(tokens) and tokens[-1]), default=0)
    against_base = {claim.measure for claim in recipe.claims if claim.than == "base"}
    of_base = {n: m for n, m in {**COMMON, **recipe.measures}.items() if n in COMMON or n in against_base}
    found = {}
    for arm, config in configs.items():
        saved = saved_steps(root / arm / "checkpoints") or [0]  # without training there are no checkpoints
        step = max((s for s in saved if s and spent[arm][s - 1] <= budget), default=min(saved))
        if step and spent[arm][step - 1] > budget:
            print(
                f"{arm}: its first checkpoint, step {step}, was saved after {spent[arm][step - 1]} tokens, more than "
                f"the {budget} of this seed's comparison: set checkpoints.every and keep_every lower"
            )
        setup = changed(config, recipe.examined)
        table, base = (played(setup, root / arm, at) for at in (step, 0))
        result = Trained(
            table=table,
            samples=SAMPLES,
            by_metric=setup.evaluation.metric is not None,
            base=base,
            also={name: played(changed(setup, more), root / arm, step) for name, more in recipe.also.items()},
            lines=lines[arm][:step],
            folder=root / arm,
        )
        found[arm] = {
            "step": step,
            "seconds": round(sum(line["time/wall"] for line in lines[arm]), 1),
            "sampled": int(spent[arm][step - 1]) if step else 0,
            "values": _measured({**COMMON, **recipe.measures}, result),
            "base": _measured(of_base, Trained(base, SAMPLES, result.by_metric)),
        }
    return found


def _measured(measures: Mapping[str, Measure], result: Trained) -> dict[str, Any]:
    found = {name: np.asarray(measure(result), float) for name, measure in measures.items()}
    for name, value in found.items():
        if value.shape not in ((), (problems := len(result.table.bare_episodes) // result.samples,)):
            raise RunError(
                f"measure '{name}' gave {list(value.shape)} numbers: give one, or one for each of {problems} problems"
            )
    return {name: plain(np.round(value, 4)) for name, value in found.items()}


def of_arm(recipe: Recipe, arm: str, place: Path, seed: int) -> RunConfig:
    """The configuration of an arm; `{arms}` in a text stands for the folder of the arms of its seed.

    Mistakes in the fields of its evaluations raise here, before anything is trained.
    """
    values = json.loads(json.dumps(to_json(recipe.arms[arm])).replace("{arms}", place.absolute().as_posix()))
    config = changed(recipe.config(), {**values, "seed": seed})
    if config.seeds > 1:
        raise ConfigError([f"arm '{arm}' has seeds={config.seeds}: leave seeds out, and use --seeds"])
    for more in ({}, *recipe.also.values()):
        changed(changed(config, recipe.examined), more)
    return config


def run(
    name: str, seeds: int, root: Path, arms: Sequence[str] = (), results: Path = RESULTS
) -> dict[str, Any]:
    """Train and compare, seed by seed; results are written after each seed, a user's recipe's next to its runs."""
    recipe = find(name)
    written = (results if name in names() else root) / f"{name}.json"
    for arm in arms:
        if arm not in recipe.arms:
            raise ConfigError([f"--arms: '{arm}' is no arm of {name}{nearest(arm, recipe.arms)}"])
    chosen = {arm: values for arm, values in recipe.arms.items() if not arms or arm in arms}
    record: dict[str, Any] = {
        "recipe": name,
        "command": f"python -m recipes.run {name} --seeds={seeds}",
        "machine": machine(),
        "versions": run_folder.versions(),
        "samples": SAMPLES,
        "seconds": 0.0,
        "arms": {arm: to_json(v) for arm, v in chosen.items()},
        "runs": [],
    }
    keeps_results = not arms and not _has_more_runs(written, seeds)
    if not keeps_results:
        reason = "some arms" if arms else f"{seeds} seeds, and '{written}' has results of more"
        print(f"numbers are shown and not kept: these are of {reason}", flush=True)
    for seed in range(seeds):
        folder = root / name / f"seed-{seed}"
        configs = {arm: of_arm(recipe, arm, folder, seed) for arm in chosen}
        for arm, config in configs.items():
            trained(config, folder / arm)
        of_seed = compared(recipe, configs, folder)
        record["runs"].append(of_seed)
        record["seconds"] = round(sum(one["seconds"] for run in record["runs"] for one in run.values()), 1)
        if keeps_results:
            written.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(written, json.dumps(record) + "\n")
        shown = {
            arm: {n: round(float(np.mean(np.array(v, float))), 4) for n, v in one["values"].items()}
            for arm, one in of_seed.items()
        }
        print(f"{name}, seed {seed}, {record['seconds']:.0f} s: {shown}", flush=True)
    for row in claim_rows(name, recipe, record):
        print(" | ".join(row))
    if keeps_results:
        print(f"written: {written}")
    return record


def _has_more_runs(path: Path, seeds: int) -> bool:
    """Whether a file has results of more seeds, which these must not replace."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return len(json.loads(path.read_text())["runs"]) > seeds
    return False


def main(_: None, left: list[str]) -> None:
    """The command."""
    if len(left) != 1:
        raise ConfigError(["give one recipe: python -m recipes.run NAME"])
    run(left[0], FLAGS.seeds, Path(os.path.expanduser(FLAGS.root)), FLAGS.arms)


if __name__ == "__main__":
    cli.run(main, words=1, read=cli.no_config)
