"""Run by test_shared_runs.py in each process: COORDINATOR PROCESS HOSTS BASE WHOLE WORKDIR KIND DATA MODEL OUT.

From each state that the run in WHOLE saved, all make one step, and each keeps what it came to.
"""

import contextlib
import dataclasses
import pickle
import sys
from pathlib import Path

import jax
import numpy as np
from run_kit import quiet
from tiny_run import KINDS, tiny_config

from marl_jax import hosts
from marl_jax.config.run_config import MeshConfig
from marl_jax.run_folder.checkpoints import restore, steps
from marl_jax.runs.opening import open_runs
from marl_jax.runs.step_metrics import Clock
from marl_jax.runs.stopping import Stop

COORDINATOR, PROCESS, HOSTS, BASE, WHOLE, WORKDIR, KIND, DATA, MODEL, OUT = sys.argv[1:]


def steps_from(states):
    config = dataclasses.replace(
        KINDS[KIND](tiny_config(BASE)), mesh=MeshConfig(int(DATA), int(MODEL), int(HOSTS))
    )
    with contextlib.ExitStack() as stack:
        road, (run,), (first,) = open_runs(config, WORKDIR, False, quiet(), Stop(), stack)
        like = first.arrays
        for step in [0, *states]:
            state = first.restored(*restore(Path(WHOLE) / "checkpoints", step, like)) if step else first
            run.problems.position = state.position
            at = run.phases.at(state.step)
            (made,) = road.step([run], [run.phases.enter(at, state)], at, Clock())
            yield step, made


def main():
    whole = Path(WHOLE) / "checkpoints"
    kept = {}
    where = (COORDINATOR, int(PROCESS)) if int(HOSTS) > 1 else (None, None)
    with hosts.joined(int(HOSTS), *where, wait_s=60.0):
        for step, made in steps_from(steps(whole)[:-1]):
            arrays = jax.tree.map(on_host, {"policies": made.trees, "learner": made.learner})
            kept[step + 1] = {"table": made.table, "arrays": arrays, "norms": norms(made.report)}
    Path(f"{OUT}-{PROCESS}.pickle").write_bytes(pickle.dumps(kept))


def on_host(leaf):
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf


def norms(report):
    return {policy: said["grad_norm"] for policy, said in report.policies.items()}


if __name__ == "__main__":
    main()
