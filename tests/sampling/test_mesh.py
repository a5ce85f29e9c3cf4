"""Sampling over a device mesh: the same tokens from weights and caches that really are spread."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_eight_devices_sample_what_one_does():
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(root),
    }
    run = subprocess.run(
        [sys.executable, Path(__file__).parent / "mesh_run.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "equal on the mesh" in run.stdout
