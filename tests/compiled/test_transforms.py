"""The step goes under the transformations of JAX, and gives what it gives alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.campaign
def test_scan_over_steps_vmap_over_seeds_and_shard_map_and_pmap_over_devices():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}",
    }
    run = subprocess.run(
        [sys.executable, Path(__file__).parent / "transforms_run.py"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "pmap agrees" in run.stdout
