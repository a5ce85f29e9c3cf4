"""The memory that a plan counts, beside what the process of a training run takes. Long: each case trains two steps."""

import json
import os
import subprocess
import sys

import pytest

CHILD = """
import json, re, sys
import orbax.checkpoint, transformers
from marl_jax.runs import opening, train
from marl_jax.config.run_config import load_config

# Not of `getrusage`: a child begins there with the peak of its parent, here that of the tests before.
peak = lambda: int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
cell, workdir, *texts = sys.argv[1:]
config = load_config(cell, [tuple(text.split("=", 1)) for text in texts])
check, plans = opening.plan.check_fits, []
opening.plan.check_fits = lambda *args, **named: plans.append(check(*args, **named)) or plans[-1]
before = peak()
train(config, workdir)
taken, planned = peak() - before, plans[0]
if config.road == "compiled":
    from marl_jax.planning.step_memory import compiled_plan
    planned = compiled_plan(planned, config, opening.check_before_run(config, planned).planned()[0])
print(json.dumps({"planned": planned.total, "taken": taken}))
"""


def planned_and_taken(cell, workdir, *texts):
    """Bytes, of two steps."""
    few = ["steps=2", "evaluation.every=1000", "evaluation.problems=4", "logging.episodes_every=0"]
    command = [sys.executable, "-c", CHILD, f"configs/micro.py:{cell}", workdir, *few, *texts]
    # Programs that an earlier run left would not be compiled, which takes memory.
    first = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(command, env=first, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(cell, *texts, found)
    return found["planned"], found["taken"]


@pytest.mark.campaign
@pytest.mark.parametrize("train", ["full", "lora"])
@pytest.mark.parametrize("scale", ["xs", "s", "m"])
def test_a_run_takes_what_is_planned(scale, train, tmp_path):
    texts = f"policies.train={train}", "policies.lora_rank=8"
    planned, taken = planned_and_taken(f"voting-isolated-{scale}-math", tmp_path / "run", *texts)
    assert abs(planned - taken) <= 0.15 * taken


@pytest.mark.campaign
@pytest.mark.parametrize(
    "cell", ["single-shared-xs-math", "voting-isolated-xs-math", "voting-isolated-s-math"]
)
def test_a_compiled_run_takes_what_is_planned(cell, tmp_path):
    """Within a quarter: most of it is the compiler's, which works on as many parts at a time as there are cores."""
    planned, taken = planned_and_taken(cell, tmp_path / "run", "road=compiled")
    assert abs(planned - taken) <= 0.25 * taken
