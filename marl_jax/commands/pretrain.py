"""Make a micro base model from its recipe: train it, write its directory, and measure it, loaded as a run loads it."""

import dataclasses
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from marl_jax import fields
from marl_jax.commands.console import early_close_allowed
from marl_jax.config.run_config import ConfigError, load_base, split_argv
from marl_jax.models import save_hf
from marl_jax.models.hf import write_json
from marl_jax.models.tokenizer import build_micro_tokenizer
from marl_jax.own import own_function
from marl_jax.pretraining.base_accuracy import accuracy, play_held_out
from marl_jax.pretraining.pairs import count_pairs, write_pairs
from marl_jax.pretraining.recipe import Recipe, train
from marl_jax.pretraining.taught import RECIPE, words_of
from marl_jax.run_folder.folder import output_folder
from marl_jax.user_cache import machine
from marl_jax.workflows import single


def recipe_from_argv(argv: Sequence[str]) -> tuple[Recipe, list[str]]:
    """(the recipe from --config and --config.*, the other arguments of the command line)."""
    spec, texts, rest = split_argv(argv)
    if spec is None:
        raise ConfigError(["--config is missing: give --config=FILE:SCALE"])
    recipe, problems = fields.change(load_base(spec, "get_recipe", Recipe, texts), texts)
    if problems:
        raise ConfigError(problems)
    try:
        for name in recipe.lessons:
            own_function(name, "lesson")
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    return recipe, rest


def make_base(recipe: Recipe, out: str, problems: int, samples: int) -> None:
    """Train the base, write its directory, and measure it on `problems` held-out problems of each kind (0: none)."""
    if not out:
        raise ConfigError(["--out is missing: give the directory to write the base to"])
    out = os.path.expanduser(out)
    output_folder(out)  # refused before training
    tokenizer = build_micro_tokenizer()
    began = time.perf_counter()

    def progress(step: int, loss: jax.Array) -> None:
        if step % 100 == 0 or step + 1 == recipe.steps:
            with early_close_allowed():
                print(f"step {step}: loss {float(loss):.3f}, {time.perf_counter() - began:.0f} s")

    config, params = train(recipe, tokenizer, progress)
    half = dataclasses.replace(config, dtype="bfloat16")
    save_hf(out, half, jax.tree.map(lambda leaf: leaf.astype(half.dtype), params), tokenizer)
    write_pairs(out, count_pairs(recipe, tokenizer))
    about = {
        "command": shlex.join(["python", "-m", "experiments.pretrain", *sys.argv[1:]]),
        "recipe": fields.to_json(recipe),
        "words": words_of(recipe, tokenizer),
        "seconds": round(time.perf_counter() - began, 1),
        "machine": machine(),
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__},
        "single_agent": _measured(recipe, out, problems, samples) if problems else {},
    }
    write_json(Path(out) / RECIPE, about)


def _measured(recipe: Recipe, out: str, problems: int, samples: int) -> dict[str, Any]:
    """The accuracy of a single agent on held-out problems, with the base loaded as a run loads it."""
    sizes: dict[str, Any] = {"problems": problems, "samples": samples}
    measured = {}
    for kind, levels in recipe.levels.items():
        graded = play_held_out(out, single, kind, levels=levels, split="val", max_prompt=160, **sizes)
        mean, error = accuracy(graded, problems)
        with early_close_allowed():
            print(f"{kind}: {mean:.1%} +- {error:.1%} of {problems} held-out problems, single agent")
        about = {"split": "val", "levels": list(levels), **sizes}
        measured[kind] = {**about, "accuracy": round(mean, 4), "standard_error": round(error, 4)}
    return measured
