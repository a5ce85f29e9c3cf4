"""How long is a complete GRPO step, compared with TRL's GRPOTrainer and tunix's GRPOLearner on the same work?

    python -m benchmarks.step [--peers=trl,tunix] [--rounds=2] [--steps=3]

The work: a model of 0.85M parameters, 64 prompts of 64 tokens x 8 completions, all of 64 tokens (`fixed`) or of 4 to 64
(`ragged`). All get the same lengths: our engine limits each call, TRL's `generate` takes a stopping criterion, tunix
samples to the longest and is cut. The reward is the share of even token ids. One optimiser step over all completions.

Contenders take turns, each in a process and an environment of its own; a peer's environment is first made below
`--environments`, by pip. A process makes one step that is not measured, then `--steps`; its time is their median. A
contender that cannot be installed is reported and left out. Prints one JSON object on the last line.
"""

import json
import os
import statistics
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_list("peers", ["trl", "tunix"], "whom to run beside ours")
flags.DEFINE_integer("rounds", 2, "processes of each contender and kind of lengths", lower_bound=1)
flags.DEFINE_integer("steps", 3, "measured steps of a process", lower_bound=1)
flags.DEFINE_integer("prompts", 64, "different prompts")
flags.DEFINE_integer("samples", 8, "completions of each prompt")
flags.DEFINE_integer("prompt", 64, "tokens of a prompt")
flags.DEFINE_integer("new", 64, "tokens of the longest completion")
flags.DEFINE_string("environments", ".cache/peers", "where the environments of the peers are made")

HERE = Path(__file__).parent
PACKAGES = {"trl": ("trl", "torch"), "tunix": ("google-tunix", "jax")}


def main(_: list[str]) -> None:
    kinds = ("fixed", "ragged")
    contenders = {"marl_jax": [sys.executable, "-m", "benchmarks.step_ours"]}
    missing: dict[str, str] = {}
    for peer in FLAGS.peers:
        try:
            contenders[peer] = [str(environment(peer)), str(HERE / f"step_{peer}.py")]
        except subprocess.CalledProcessError as error:
            missing[peer] = (error.stderr or str(error)).strip().splitlines()[-1]
            print(f"{peer} cannot be installed here: {missing[peer]}", flush=True)
    seconds: dict[str, dict[str, list[float]]] = {kind: {who: [] for who in contenders} for kind in kinds}
    for _ in range(FLAGS.rounds):
        for kind in kinds:
            for who, command in list(contenders.items()):
                try:
                    times = measure(command, work(kind))
                except subprocess.CalledProcessError as error:
                    if who == "marl_jax":  # there is nothing to compare
                        raise SystemExit(error.stderr) from None
                    missing[who] = error.stderr.strip().splitlines()[-1]
                    print(f"{who} failed: {missing[who]}", flush=True)
                    del contenders[who]
                    continue
                seconds[kind][who].append(statistics.median(times))
                print(f"{kind:7s} {who:9s} {seconds[kind][who][-1]:7.2f} s", flush=True)
    report: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "missing": missing}
    for kind, taken in seconds.items():
        ours = taken["marl_jax"]
        report[kind] = {who: round(statistics.median(times), 2) for who, times in taken.items() if times}
        for who in contenders:
            if who != "marl_jax":
                times = statistics.median(a / b for a, b in zip(taken[who], ours))
                report[kind][f"times_{who}"] = round(times, 2)
    print(json.dumps(report))


def work(kind: str) -> dict[str, Any]:
    """The input of a process: the model as a published configuration, prompts, and the length of every completion."""
    from benchmarks import BENCH

    rng = np.random.default_rng(0)
    # 0 ends a text for the peers, so no prompt contains it.
    prompts = rng.integers(1, BENCH.vocab_size, (FLAGS.prompts, FLAGS.prompt)).tolist()
    count = FLAGS.prompts * FLAGS.samples
    lengths = [FLAGS.new] * count if kind == "fixed" else rng.integers(4, FLAGS.new + 1, count).tolist()
    return {
        "model": BENCH.to_hf(),
        "prompts": prompts,
        "samples": FLAGS.samples,
        "new": FLAGS.new,
        "lengths": lengths,
        "steps": FLAGS.steps,
        "learning_rate": 1e-4,
    }


def measure(command: list[str], job: dict[str, Any]) -> list[float]:
    """Seconds of the measured steps of one process."""
    run = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def environment(peer: str) -> Path:
    """The Python of a peer's environment, which is made if there is none."""
    folder = Path(FLAGS.environments) / peer
    python, done = folder / "bin" / "python", folder / ".installed"
    if not done.exists():
        start = time.perf_counter()
        venv.create(folder, with_pip=True)
        install = [python, "-m", "pip", "install", "--quiet", "--no-compile", *PACKAGES[peer]]
        subprocess.run(install, check=True, capture_output=True, text=True)
        done.touch()
        print(f"installed {peer} in {time.perf_counter() - start:.0f} s", flush=True)
    return python.absolute()


if __name__ == "__main__":
    app.run(main)
