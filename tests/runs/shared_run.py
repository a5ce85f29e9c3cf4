"""Run by test_shared_runs.py, as one of several processes: COORDINATOR PROCESS HOSTS BASE WORKDIR [options].

With --on=K, process K gets the signal when it comes to a place for the Nth time.
"""

import argparse
import dataclasses
import itertools
import signal
import sys

from tiny_run import KINDS, send_before, tiny_config

from marl_jax import hosts
from marl_jax.config.run_config import MeshConfig
from marl_jax.errors import UserError
from marl_jax.learning import Learner
from marl_jax.rollouts import Player
from marl_jax.run_folder.checkpoints import Checkpoints
from marl_jax.runs import loop, opening
from marl_jax.runs.loading import play

PLACES = {
    "opening": (play, "load_parts"),
    "step": (loop, "step"),
    "playing": (Player, "play"),
    "learning": (Learner, "step"),
    "saving": (Checkpoints, "_finish"),  # once Orbax has begun to write
}


def fail_at(owner, name, visit):
    """An error of this process alone, at the Nth call of a function."""
    inner, visits = getattr(owner, name), itertools.count(1)

    def call(*args, **options):
        if next(visits) == visit:
            raise UserError("this process has an error of its own")
        return inner(*args, **options)

    setattr(owner, name, call)


def main():
    parser = argparse.ArgumentParser()
    for name in ("coordinator", "process", "hosts", "base", "workdir"):
        parser.add_argument(name)
    parser.add_argument("--kind", default="plain", choices=KINDS)
    parser.add_argument("--data", type=int, default=1)
    parser.add_argument("--model", type=int, default=1)
    parser.add_argument("--signal", default="SIGKILL")  # or "error"
    parser.add_argument("--on", type=int)
    parser.add_argument("--at", choices=PLACES)
    parser.add_argument("--visit", type=int, default=1)
    parser.add_argument("--changed", type=int, default=-1, help="the process that has another seed")
    parser.add_argument("--blind", type=int, default=-1, help="the process that finds no lock in the folder")
    parser.add_argument("--files", help="a folder of data files, instead of the micro task")
    asked = parser.parse_args()
    count, process = int(asked.hosts), int(asked.process)
    config = KINDS[asked.kind](tiny_config(asked.base))
    config = dataclasses.replace(config, mesh=MeshConfig(asked.data, asked.model, count))
    if asked.files:
        read = dataclasses.replace(
            config.data, name="jsonl", directory=asked.files, train_size=None, val_size=4
        )
        config = dataclasses.replace(config, data=read)
    if asked.blind == process:
        opening.LOCK = "lock of another disk"
    if asked.changed == process:
        config = dataclasses.replace(config, seed=7)
    if asked.on == process and asked.signal == "error":
        fail_at(*PLACES[asked.at], asked.visit)
    elif asked.on == process:
        send_before(*PLACES[asked.at], signal.Signals[asked.signal], asked.visit, 0.0, 0.0)
    where = (asked.coordinator, process) if count > 1 else (None, None)
    try:
        with hosts.joined(count, *where, wait_s=60.0):
            reached = loop.train(config, asked.workdir, patience=2.0)
    except UserError as error:
        print(error)
        sys.exit(2)
    print(f"reached {reached}")


if __name__ == "__main__":
    main()
