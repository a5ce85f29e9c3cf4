"""`make demo` keeps its promise: a workflow that learned, in minutes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from marl_jax.commands.train import CELL, SMALLER
from marl_jax.run_folder.json_lines import read_lines

ROOT = Path(__file__).parents[1]
LIMIT_S = 600  # twice what is promised of a quiet machine


@pytest.mark.campaign
@pytest.mark.parametrize("road", ["hosted", "compiled"])
def test_the_demo_learns_in_minutes_with_nothing_compiled_before(road, tmp_path):
    workdir, began = tmp_path / "demo", time.monotonic()
    asked = [f"--config={CELL}", "--config.road=compiled"] if road == "compiled" else []
    asked += [f"--config.{name}={value}" for name, value in SMALLER] if asked else []
    done = subprocess.run(
        [sys.executable, "-m", "experiments.demo", f"--workdir={workdir}", *asked],
        cwd=ROOT,
        env={**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")},
    )
    seconds = time.monotonic() - began
    assert done.returncode == 0
    base, trained = [line for line in read_lines(workdir / "eval.jsonl") if line["split"] == "test"]
    gain = trained["difference"]
    found = (
        f"{base['accuracy']:.1%} to {trained['accuracy']:.1%}, gain {gain['low']:.3f} .. {gain['high']:.3f}"
    )
    print(f"the demo, {road}: {seconds:.0f} s, held-out accuracy {found}")
    assert (base["step"], trained["step"]) == (0, 40) and gain["low"] > 0
    assert (workdir / "report.html").exists() and seconds < LIMIT_S


@pytest.mark.campaign
def test_adapters_learn_too_and_answer_over_their_base(tmp_path):
    asked = (
        "--config=configs/micro.py:voting-isolated-xs-math",
        "--config.policies.train=lora",
        "--config.policies.lora_rank=16",
        "--config.learner.optimiser.schedule.learning_rate=0.002",
        "--config.steps=40",
        "--config.data.problems=32",
        "--config.evaluation.every=20",
        "--config.checkpoints.every=20",
        "--config.engine.lanes=256",
        "--config.engine.max_prompt=224",
    )
    done = subprocess.run(
        [sys.executable, "-m", "experiments.demo", *asked, f"--workdir={tmp_path}"], cwd=ROOT
    )
    assert done.returncode == 0
    base, trained = [line for line in read_lines(tmp_path / "eval.jsonl") if line["split"] == "test"]
    gain = trained["difference"]
    print(
        f"adapters: {base['accuracy']:.1%} to {trained['accuracy']:.1%}, {gain['low']:.3f} .. {gain['high']:.3f}"
    )
    assert gain["low"] > 0.05
    for line in read_lines(tmp_path / "metrics.jsonl"):
        for role in ("generator", "aggregator"):  # what samples is what was trained
            assert line[f"role/{role}/gap_max"] < 1e-4
