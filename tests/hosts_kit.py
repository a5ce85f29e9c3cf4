"""Processes of one run on this machine, over loopback, each with a log of its own."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def free_port():
    """One that is free, as is the one after it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(script: Path, logs, hosts, *words, devices=1, coordinator=None, only=None, cwd=None, **environment):
    """The processes of `SCRIPT COORDINATOR PROCESS HOSTS WORDS`, or only some of them."""
    coordinator = coordinator or f"127.0.0.1:{free_port()}"
    logs.mkdir(parents=True, exist_ok=True)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", script.parent)))
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": paths, **environment
    }  # fmt: skip
    processes = []
    for k in only if only is not None else range(hosts):
        with open(logs / f"{k}.log", "w") as log:
            command = [sys.executable, "-u", script, coordinator, str(k), str(hosts), *map(str, words)]
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=cwd))
    return processes


def ended(processes, seconds=300.0):
    """Their exit codes; those that live longer are killed, and have none."""
    deadline, codes = time.monotonic() + seconds, []
    for process in processes:
        try:
            codes.append(process.wait(max(0.1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            codes.append(None)
    return codes


def said(logs, process):
    return (logs / f"{process}.log").read_text()


def play(script, logs, hosts, *words, **options):
    """All of them, which end well."""
    codes = ended(start(script, logs, hosts, *words, **options))
    assert codes == [0] * hosts, "\n".join(said(logs, k)[-3000:] for k in range(hosts))
