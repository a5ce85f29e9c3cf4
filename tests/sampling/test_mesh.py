"""Sampling over a device mesh: the same tokens from weights and caches that really are spread."""

from pathlib import Path

import eight_devices
import pytest

HERE = Path(__file__).parent


@pytest.mark.long
def test_eight_devices_sample_what_one_does():
    assert "equal on the mesh" in eight_devices.run(HERE / "mesh_run.py", folder=HERE)
