"""Runs of both roads that nothing ties together learn alike, over seeds; each samples tokens of its own."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from marl_jax.study.intervals import over_seeds, p_value

pytestmark = pytest.mark.campaign

HOME = Path(__file__).parents[2]
CELL = "voting-isolated-xs-math"
SEEDS, STEPS = 5, 40


def answers(root, *options):
    """{step: Float[S, P]}, the accuracy of every seed on every problem at each evaluation."""
    command = [
        *(sys.executable, "-m", "experiments.matrix", "--config=configs/micro.py", f"--cells={CELL}"),
        *(f"--root={root}", f"--seeds={SEEDS}", "--test_samples=0", f"--config.steps={STEPS}"),
        *("--config.evaluation.every=20", "--config.evaluation.problems=256", *options),
    ]
    subprocess.run(command, cwd=HOME, check=True, capture_output=True)
    seeds = []
    for seed in range(SEEDS):
        lines = map(json.loads, (root / CELL / f"seed-{seed}" / "eval.jsonl").read_text().splitlines())
        seeds.append({line["step"]: line["per_problem"] for line in lines})
    return {step: np.array([seed[step] for seed in seeds]) for step in seeds[0]}


def test_both_roads_raise_accuracy_alike(tmp_path):
    hosted = answers(tmp_path / "hosted", "--config.road=hosted")
    compiled = answers(tmp_path / "compiled", "--config.road=compiled")
    assert hosted.keys() == compiled.keys() == {0, STEPS // 2, STEPS}
    np.testing.assert_array_equal(hosted[0], compiled[0])  # the same base, problems and noise
    gain = over_seeds(hosted[STEPS] - hosted[0], bounds=(-1.0, 1.0))
    assert gain.low > 0.1
    for step in (STEPS // 2, STEPS):
        apart = over_seeds(compiled[step] - hosted[step], bounds=(-1.0, 1.0))
        print(f"step {step}: {hosted[step].mean():.3f} hosted, {compiled[step].mean():.3f} compiled, {apart}")
        # One run in a thousand would be refused by chance; a road that learned a quarter less would be, too.
        p = p_value(compiled[step] - hosted[step])  # None: all answers are equal
        assert (p is None or p > 1e-3) and abs(apart.mean) < gain.mean / 4
