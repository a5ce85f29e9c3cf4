"""What does it cost if several processes share a run: gathering rows, and one update over all processes?

    python -m benchmarks.hosts [--cell=CELL] [--processes=1,2,4] [--steps=12] [--cores_each=N] [--config.F=V ...]

Runs of `experiments.train` from a fresh folder, with 1, 2, 4 processes on this machine, over loopback. Seconds are
medians of the second half of a run's steps, from the lines of process 0: `gather` is the wait for the others and the
gathering of their rows, `learn` the update. By default the processes share all cores of one machine, so more processes
make no step faster: the saving by more hosts is counted from the problems that each plays, not measured. With
`--cores_each` every process has that many cores to itself, like a host: then one process that plays half of the
problems (`--config.data.problems`) is as fast as two that need not exchange anything.
Prints one JSON object on the last line.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from absl import app, flags

from marl_jax.config.run_config import load_config
from marl_jax.planning.devices import host
from marl_jax.planning.memory import count_units, sizes_of
from marl_jax.planning.plan import demand_of, find_models
from marl_jax.planning.workload import batches_of
from marl_jax.policies import trained_policies
from marl_jax.run_folder.json_lines import read_lines

FLAGS = flags.FLAGS
flags.DEFINE_string("cell", "voting-isolated-xs-math", "of configs/micro.py")
flags.DEFINE_list("processes", ["1", "2", "4"], "how many processes share a run, run by run")
flags.DEFINE_integer("steps", 12, "steps of a run, of which the first half is left out", lower_bound=2)
flags.DEFINE_integer("cores_each", 0, "cores that a process has to itself; 0: all share all", lower_bound=0)
PARTS = ("step", "rollout", "grade", "gather", "learn")


def main(argv: list[str]) -> None:
    report: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "cell": FLAGS.cell}
    for count in map(int, FLAGS.processes):
        report[str(count)] = found = measured(count, argv[1:])
        print(count, json.dumps(found), flush=True)
    print(json.dumps(report))


def measured(count: int, overrides: list[str]) -> dict[str, Any]:
    """Seconds of the parts of a step that `count` processes share, and the problems and bytes of each process."""
    with tempfile.TemporaryDirectory() as folder:
        lines = run(count, Path(folder) / "run", overrides)
    half = lines[len(lines) // 2 :]
    seconds = {
        name: round(statistics.median(line.get(f"time/{name}", 0.0) for line in half), 3) for name in PARTS
    }
    return seconds | counted(count, overrides, lines[-1])


def run(count: int, workdir: Path, overrides: list[str]) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a run that fails ends the benchmark and prints its logs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "experiments.train", *settings(count), *overrides]
    command += [f"--workdir={workdir}", "--noreport"]
    where = [[f"--coordinator={coordinator}", f"--process={k}"] if count > 1 else [] for k in range(count)]
    logs = [workdir.with_name(f"{k}.log") for k in range(count)]
    processes = []
    for words, log, cores in zip(where, logs, places(count)):
        with open(log, "w") as file:
            processes.append(subprocess.Popen([*cores, *command, *words], stdout=file, stderr=file))
    codes = [process.wait() for process in processes]
    if any(codes):
        sys.exit("\n".join(log.read_text() for log in logs))
    return list(read_lines(workdir / "metrics.jsonl"))


def places(count: int) -> list[list[str]]:
    """The start of each process's command line, which binds it to its cores."""
    cores, each = sorted(os.sched_getaffinity(0)), FLAGS.cores_each
    if count * each > len(cores):
        sys.exit(
            f"{count} processes of --cores_each={each} need {count * each} cores, and there are {len(cores)}"
        )
    groups = (cores[k * each : (k + 1) * each] for k in range(count))
    return [["taskset", "-c", ",".join(map(str, one))] if one else [] for one in groups]


def settings(count: int) -> list[str]:
    return [
        f"--config=configs/micro.py:{FLAGS.cell}",
        f"--config.mesh.hosts={count}",
        f"--config.steps={FLAGS.steps}",
        "--config.evaluation.every=0",
        "--config.checkpoints.best=false",
        f"--config.checkpoints.every={FLAGS.steps}",
    ]


def counted(count: int, overrides: list[str], last: dict[str, Any]) -> dict[str, Any]:
    """Problems of the process with the most, and bytes that the update of a step sums over the processes.

    Each optimiser step sums every part of its gradient once.
    """
    texts = [
        word.removeprefix("--config.").partition("=")[::2] for word in [*settings(count)[1:], *overrides]
    ]
    config = load_config(f"configs/micro.py:{FLAGS.cell}", texts)
    sizes = sizes_of(config, find_models(config)[0], host())
    demand = demand_of(config, problems=config.data.problems)
    batches = {
        policy: sum(number for _, number in batches_of(config, demand, policy, "cpu"))
        for policy in trained_policies(config.policies.map, config.policies.frozen_roles)
    }
    return {
        "problems": -(-config.data.problems // count),
        "micro_batches": sum(batches.values()),
        "gradient_bytes": sum(
            4 * sizes[policy].trained * count_units(config, demand, policy) * last[f"policy/{policy}/updates"]
            for policy in batches
        )
        // FLAGS.steps
        if count > 1
        else 0,
    }


if __name__ == "__main__":
    app.run(main, flags_parser=lambda argv: FLAGS(argv, known_only=True))
