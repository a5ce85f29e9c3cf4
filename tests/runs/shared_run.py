"""Run by the tests, as one of several processes: COORDINATOR PROCESS HOSTS BASE WORKDIR [--kind=KIND] [...]."""

import argparse
import dataclasses
import sys

from tiny_run import KINDS, tiny_config

from marl_jax import hosts
from marl_jax.config.run_config import MeshConfig
from marl_jax.errors import UserError
from marl_jax.runs import loop


def main():
    parser = argparse.ArgumentParser()
    for name in ("coordinator", "process", "hosts", "base", "workdir"):
        parser.add_argument(name)
    parser.add_argument("--kind", default="plain", choices=KINDS)
    parser.add_argument("--data", type=int, default=1)
    parser.add_argument("--model", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    asked = parser.parse_args()
    count = int(asked.hosts)
    config = KINDS[asked.kind](tiny_config(asked.base))
    config = dataclasses.replace(config, steps=asked.steps, mesh=MeshConfig(count, asked.data, asked.model))
    where = (asked.coordinator, int(asked.process)) if count > 1 else (None, None)
    try:
        with hosts.joined(count, *where, wait_s=60.0):
            reached = loop.train(config, asked.workdir, patience=2.0)
    except UserError as error:
        print(error)
        sys.exit(2)
    print(f"reached {reached}")


if __name__ == "__main__":
    main()
