"""Scripts in a process of their own, which has eight virtual CPU devices."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*arguments, folder, seconds=600, **environment):
    """`python ARGUMENTS` with the modules of a folder of tests at hand: what it says, if it ends well."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", folder)))
    devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | devices | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
