"""The memory that a plan counts, beside what the process of a training run takes. Long: each case trains two steps."""

import json
import os
import subprocess
import sys

import pytest

CHILD = """
import json, resource, sys
import orbax.checkpoint, transformers
from marl_jax.runs import opening, train
from marl_jax.config.run_config import load_config

peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
cell, workdir, *texts = sys.argv[1:]
config = load_config(cell, [tuple(text.split("=", 1)) for text in texts])
check, plans = opening.plan.check_fits, []
opening.plan.check_fits = lambda *args, **named: plans.append(check(*args, **named)) or plans[-1]
before = peak()
train(config, workdir)
print(json.dumps({"planned": plans[0].total, "taken": peak() - before}))
"""


@pytest.mark.campaign
@pytest.mark.parametrize("train", ["full", "lora"])
@pytest.mark.parametrize("scale", ["xs", "s", "m"])
def test_a_run_takes_what_is_planned(scale, train, tmp_path):
    texts = ["steps=2", "evaluation.every=1000", "evaluation.problems=4", "logging.episodes_every=0"]
    texts += [f"policies.train={train}", "policies.lora_rank=8"]
    command = [
        sys.executable,
        "-c",
        CHILD,
        f"configs/micro.py:voting-isolated-{scale}-math",
        tmp_path / "run",
    ]
    # Programs that an earlier run left would not be compiled, which takes memory.
    first = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run([*command, *texts], env=first, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(scale, train, found)
    assert abs(found["planned"] - found["taken"]) <= 0.15 * found["taken"]
