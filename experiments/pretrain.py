"""Makes a micro base model: what the cells of configs/micro.py start from.

    python -m experiments.pretrain --config=configs/micro.py:s --out=configs/bases/micro-s

Writes a model directory with bfloat16 weights and its tokenizer, and `recipe.json`: the command, the recipe, the time,
the machine, and how often the finished base answers held-out problems rightly. The same recipe on the same machine
gives the same bytes.
"""

import dataclasses
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from absl import app, flags

from marl_jax.runs import fields
from marl_jax.runs.config import ConfigError, load_file, split_argv

FLAGS = flags.FLAGS
flags.DEFINE_string("out", None, "directory of the base; its files are replaced", required=True)
flags.DEFINE_integer("problems", 256, "held-out problems of each kind to measure the base on; 0: do not")
flags.DEFINE_integer("samples", 4, "answers to each of them")


def main(recipe: Any, command: str) -> None:
    import jax
    import numpy as np

    from marl_jax.models import load_hf, save_hf
    from marl_jax.models.hf import write_json
    from marl_jax.models.tokenizer import build_micro_tokenizer
    from marl_jax.pretraining.measure import accuracy, play_held_out
    from marl_jax.pretraining.recipe import train
    from marl_jax.workflows import single

    tokenizer = build_micro_tokenizer()
    began = time.perf_counter()

    def progress(step: int, loss: jax.Array) -> None:
        if step % 100 == 0 or step + 1 == recipe.steps:
            print(f"step {step}: loss {float(loss):.3f}, {time.perf_counter() - began:.0f} s", flush=True)

    config, params = train(recipe, tokenizer, progress)
    half = dataclasses.replace(config, dtype="bfloat16")
    save_hf(FLAGS.out, half, jax.tree.map(lambda leaf: leaf.astype(half.dtype), params), tokenizer)
    seconds = time.perf_counter() - began
    about = {
        "command": command,
        "recipe": fields.to_json(recipe),
        "seconds": round(seconds, 1),
        "machine": _machine(),
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__},
    }
    config, params = load_hf(FLAGS.out, dtype="float32")  # what a run starts from
    measured = {}
    levels = {"micro_math": recipe.math_levels, "micro_code": recipe.code_levels}
    for kind in levels if FLAGS.problems else ():
        graded = play_held_out(
            params,
            config,
            tokenizer,
            single,
            kind,
            levels=levels[kind],
            problems=FLAGS.problems,
            samples=FLAGS.samples,
        )
        mean, error = accuracy(graded, FLAGS.problems)
        measured[kind] = {
            "split": "val",
            "levels": list(levels[kind]),
            "problems": FLAGS.problems,
            "samples": FLAGS.samples,
            "accuracy": round(mean, 4),
            "standard_error": round(error, 4),
        }
        print(f"{kind}: {mean:.1%} +- {error:.1%} of {FLAGS.problems} held-out problems, single agent")
    write_json(Path(FLAGS.out) / "recipe.json", {**about, "single_agent": measured})
    print(f"{FLAGS.out}: {seconds:.0f} s")


def _machine() -> str:
    """Kind and number of the processors."""
    names = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    kind = names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()
    return f"{os.cpu_count()} x {kind}"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


if __name__ == "__main__":
    try:
        spec, texts, rest = split_argv(sys.argv)
        if spec is None:
            raise ConfigError(["--config is missing: give --config=FILE:SCALE"])
        get_recipe, scale = load_file(spec, "get_recipe")
        chosen, problems = fields.change(get_recipe(scale), texts)
        if problems:
            raise ConfigError(problems)
    except ValueError as error:
        sys.exit(str(error))
    words = shlex.join(["python", "-m", "experiments.pretrain", *sys.argv[1:]])
    app.run(lambda _: main(chosen, words), argv=rest)
