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
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from experiments import cli
from marl_jax.runs import fields
from marl_jax.runs.run_config import ConfigError, load_base, split_argv

if TYPE_CHECKING:
    from marl_jax.pretraining.recipe import Recipe

NO_CONFIG = ConfigError(["--config is missing: give --config=FILE:SCALE"])
FLAGS = flags.FLAGS
flags.DEFINE_string("out", "", "directory of the base; its files are replaced")
flags.DEFINE_integer("problems", 256, "held-out problems of each kind to measure the base on; 0: do not", 0)
flags.DEFINE_integer("samples", 4, "answers to each of them", 1)


def main(recipe: "Recipe | None", _: list[str]) -> None:
    if recipe is None:
        raise NO_CONFIG
    if not FLAGS.out:
        raise ConfigError(["--out is missing: give the directory to write the base to"])
    probe(Path(FLAGS.out))
    make(recipe)


def make(recipe: "Recipe") -> None:
    """Train the base and write its directory."""
    import jax
    import numpy as np

    from marl_jax.models import save_hf
    from marl_jax.models.hf import write_json
    from marl_jax.models.tokenizer import build_micro_tokenizer
    from marl_jax.pretraining.recipe import train

    tokenizer = build_micro_tokenizer()
    began = time.perf_counter()

    def progress(step: int, loss: jax.Array) -> None:
        if step % 100 == 0 or step + 1 == recipe.steps:
            print(f"step {step}: loss {float(loss):.3f}, {time.perf_counter() - began:.0f} s", flush=True)

    config, params = train(recipe, tokenizer, progress)
    half = dataclasses.replace(config, dtype="bfloat16")
    save_hf(FLAGS.out, half, jax.tree.map(lambda leaf: leaf.astype(half.dtype), params), tokenizer)
    about = {
        "command": shlex.join(["python", "-m", "experiments.pretrain", *sys.argv[1:]]),
        "recipe": fields.to_json(recipe),
        "seconds": round(time.perf_counter() - began, 1),
        "machine": _machine(),
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__},
        "single_agent": measure(recipe) if FLAGS.problems else {},
    }
    write_json(Path(FLAGS.out) / "recipe.json", about)


def probe(directory: Path) -> None:
    """Make the directory, and refuse one that cannot be written before anything is trained."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise ConfigError(
            [f"--out={directory} cannot be written ({error.strerror}): choose another"]
        ) from None


def measure(recipe: "Recipe") -> dict[str, Any]:
    """How often the base in --out, as a run would load it, is right alone on held-out problems."""
    from marl_jax.models import load_hf
    from marl_jax.models.tokenizer import load_tokenizer
    from marl_jax.pretraining.measure import accuracy, play_held_out
    from marl_jax.workflows import single

    config, params = load_hf(FLAGS.out, dtype="float32")
    base = (params, config, load_tokenizer(FLAGS.out, config))
    sizes = {"problems": FLAGS.problems, "samples": FLAGS.samples}
    measured = {}
    for kind, levels in recipe.levels.items():
        table = play_held_out(*base, single, kind, levels=levels, split="val", max_prompt=160, **sizes)
        mean, error = accuracy(table, FLAGS.problems)
        print(f"{kind}: {mean:.1%} +- {error:.1%} of {FLAGS.problems} held-out problems, single agent")
        about = {"split": "val", "levels": list(levels), **sizes}
        measured[kind] = {**about, "accuracy": round(mean, 4), "standard_error": round(error, 4)}
    return measured


def _machine() -> str:
    """Number and kind of the processors."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} x {names[0] if names else platform.processor() or platform.machine()}"


def chosen(argv: Sequence[str]) -> tuple["Recipe", list[str]]:
    """The recipe that --config and --config.* ask for, and the rest of the command line."""
    from marl_jax.pretraining.recipe import Recipe

    spec, texts, rest = split_argv(argv)
    if spec is None:
        raise NO_CONFIG
    recipe, problems = fields.change(load_base(spec, "get_recipe", Recipe, texts), texts)
    if problems:
        raise ConfigError(problems)
    return recipe, rest


if __name__ == "__main__":
    cli.run(main, read=chosen)
