"""Make a micro base model, from which the cells of configs/micro.py start.

    python -m experiments.pretrain --config=configs/micro.py:s --out=configs/bases/micro-s

Writes a model directory with bfloat16 weights and its tokenizer, and `recipe.json`: the command, the recipe, the time,
the machine, and how often the finished base answers held-out problems rightly. The same recipe on the same machine
gives the same bytes.
"""

from collections.abc import Sequence
from typing import Any

from absl import flags

from marl_jax.commands import cli

FLAGS = flags.FLAGS
flags.DEFINE_string("out", "", "directory of the base; its files are replaced")
flags.DEFINE_integer("problems", 256, "held-out problems per kind to measure the base on; 0: none", 0)
flags.DEFINE_integer("samples", 4, "answers to each of them", 1)


def read(argv: Sequence[str]) -> tuple[Any, list[str]]:
    from marl_jax.commands.pretrain import recipe_from_argv

    return recipe_from_argv(argv)


def main(recipe: Any, _: list[str]) -> None:
    from marl_jax.commands.pretrain import make_base

    make_base(recipe, FLAGS.out, FLAGS.problems, FLAGS.samples)


if __name__ == "__main__":
    cli.run(main, read=read, needs="FILE:SCALE")
