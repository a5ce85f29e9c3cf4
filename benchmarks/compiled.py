"""How fast is a step of training on the compiled road, compared with the hosted one?

    python -m benchmarks.compiled [--cells=CELL,CELL] [--rounds=8] [--steps=24] [--config.FIELD=VALUE ...]

Runs of `experiments.train` from a fresh folder, each in a process of its own, the roads in turn. A step is
`time/step` of metrics.jsonl, from the problems to the table, the report and the new weights. The first half of a
run's steps is left out on both roads, since the hosted one gets new shapes, and compiles them, up to about its tenth
step. So a ratio compares steady steps: the hosted road's time over the compiled one's, the median over rounds, with a
95% bootstrap interval. `hosted_first` and `compiled_first` are the times of the first half in the first run of each
road, with nothing compiled before. `cold` is the first step of the first run on the compiled road; `cached` that of
its second run, which finds the programs of the first. With `--programs` all runs use that folder of compiled programs,
so that a long measurement can be made in parts; the first run may then not be a cold one.
`auto` is the faster road, which a run with `road=auto` should take here. `--estimate` runs nothing and counts a step's
kernels, operations and bytes in the program compiled for this machine (`program_costs`), an estimate for accelerators,
where a step may be bound by its kernels' launches. Prints one JSON object on the last line.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags

from benchmarks.program_costs import count_loops, program_costs
from marl_jax import compiled
from marl_jax.config.run_config import load_config
from marl_jax.run_folder.json_lines import read_lines

FLAGS = flags.FLAGS
flags.DEFINE_list("cells", ["voting-isolated-xs-math"], "cells of configs/micro.py")
flags.DEFINE_integer("rounds", 8, "runs of each road", lower_bound=1)
flags.DEFINE_string("programs", None, "folder of compiled programs that is kept; by default a fresh one")
flags.DEFINE_bool("estimate", False, "count a step of the compiled road instead of timing it")
flags.DEFINE_integer("steps", 24, "steps of a run, of which the first half is left out", lower_bound=2)


class Refused(Exception):
    """A run that the compiled road does not take."""


def main(argv: list[str]) -> None:
    report: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "rounds": FLAGS.rounds}
    for cell in FLAGS.cells:
        try:
            report[cell] = found = (estimate if FLAGS.estimate else compare)(cell, argv[1:])
        except Refused as error:
            report[cell] = found = {"auto": "hosted", "refused": str(error)}
        print(cell, json.dumps(found), flush=True)
    print(json.dumps(report))


def compare(cell: str, overrides: list[str]) -> dict[str, Any]:
    """Seconds of a step on each road, and of the first step on the compiled road."""
    with tempfile.TemporaryDirectory() as folder:
        taken: dict[str, list[list[float]]] = {"hosted": [], "compiled": []}
        for number in range(FLAGS.rounds):
            for road, runs in taken.items():
                runs.append(steps(cell, road, Path(folder), number, overrides))
            latest = {
                road: round(statistics.median(runs[-1][FLAGS.steps // 2 :]), 3)
                for road, runs in taken.items()
            }
            print(cell, "round", number, json.dumps(latest), flush=True)
    half = FLAGS.steps // 2
    typical = {road: [statistics.median(run[half:]) for run in runs] for road, runs in taken.items()}
    first = [run[0] for run in taken["compiled"]]
    ratios = np.array([a / b for a, b in zip(*typical.values())])
    return {
        **{road: round(statistics.median(times), 3) for road, times in typical.items()},
        "ratio": round(float(np.median(ratios)), 2),
        "interval": median_interval(ratios),
        "auto": "compiled" if np.median(ratios) >= 1 else "hosted",
        "ratios": ratios.round(3).tolist(),
        **{f"{road}_first": round(sum(runs[0][:half]), 1) for road, runs in taken.items()},
        "cold": round(first[0], 1),
        "cached": round(first[1], 1) if len(first) > 1 else None,
    }


def estimate(cell: str, overrides: list[str]) -> dict[str, Any]:
    """The counts of a step whose calls all sample `max_new_tokens`."""
    words = [word.removeprefix("--config.").partition("=")[::2] for word in overrides]
    config = load_config(f"configs/micro.py:{cell}", words)
    halves, inputs = compiled.make_halves(config), (compiled.start(config), *next(compiled.batches(config)))
    columns = jax.eval_shape(halves.play, *inputs)[0]
    step = halves.step
    if config.seeds > 1:
        step = jax.vmap(compiled.make_step(config, seeds_axis="seeds"), axis_name="seeds")
        inputs = jax.tree.map(lambda leaf: np.stack([leaf] * config.seeds), inputs)
    text = jax.jit(step).lower(*inputs).compile().as_text()
    rounds = max(role.max_new_tokens for role in config.role_settings.values())
    learned = sum(
        new + prompt * (not shared) for (prompt, new), shared in zip(columns.widths, columns.shared)
    )
    packs = len(columns.answer) * learned / config.learner.batch.slice_tokens / count_loops(text, "packs")
    return {"estimate": program_costs(text, rounds, {"packs": math.ceil(packs)})._asdict()}


def median_interval(values: np.ndarray) -> list[float]:
    """A 95% bootstrap interval of the median."""
    drawn = np.random.default_rng(0).choice(values, (10_000, len(values)))
    return np.percentile(np.median(drawn, axis=1), [2.5, 97.5]).round(2).tolist()


def steps(cell: str, road: str, folder: Path, number: int, overrides: list[str]) -> list[float]:
    """Seconds of every step of one run."""
    workdir = folder / f"{road}-{number}"
    command = [sys.executable, "-m", "experiments.train", f"--config=configs/micro.py:{cell}"]
    settings = {"road": road, "steps": FLAGS.steps, "evaluation.every": 0, "checkpoints.best": "false"}
    command += [f"--workdir={workdir}", *(f"--config.{name}={value}" for name, value in settings.items())]
    # A cache of this benchmark's own, so that the first run finds no compiled program.
    programs = FLAGS.programs or str(folder / "programs")
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": programs}
    run = subprocess.run([*command, *overrides], env=environment, capture_output=True, text=True)
    if run.returncode == 2 and road == "compiled":  # a refusal is the last line of its output
        raise Refused(run.stderr.strip().splitlines()[-1])
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {run.returncode}: {run.stderr[-2000:]}")
    return [line["time/step"] for line in read_lines(workdir / "metrics.jsonl")]


if __name__ == "__main__":
    app.run(main, flags_parser=lambda argv: FLAGS(argv, known_only=True))
