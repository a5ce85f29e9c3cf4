"""Evaluate a run's policies on held-out problems, and compare them with its initial policies.

    python -m experiments.evaluate --workdir=DIR                              # the latest checkpoint, on test
    python -m experiments.evaluate --workdir=DIR --checkpoint=all --samples=4
    python -m experiments.evaluate --workdir=DIR --data=aime25                # the test split of another data set
    python -m experiments.evaluate --workdir=DIR --mode=swapped               # policies rotated among the roles
    python -m experiments.evaluate --workdir=DIR --mode=single_transfer --role=worker
    python -m experiments.evaluate --workdir=DIR --mode=generator_transfer --generator_from=DIR2

Prints a table and appends to DIR/eval.jsonl. All checkpoints are evaluated on the same problems with the same noise,
so that their differences are paired.
"""

import dataclasses

from absl import flags

from marl_jax.commands import cli

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", "", "folder of the run")
flags.DEFINE_string(
    "checkpoint",
    None,
    "all, latest, best (of the saved ones, on val), base or a step; None: latest, or base where the mode needs it",
)
flags.DEFINE_string("split", "test", "test or val")
flags.DEFINE_string("data", None, "another data set of the run's family, such as aime25; None: the run's")
flags.DEFINE_string("data_directory", None, "of its files; None: fetched from where it is published")
flags.DEFINE_integer("samples", 1, "episodes per problem")
flags.DEFINE_integer("problems", None, "only the first so many")
flags.DEFINE_string("mode", "trained", "trained, base, single_transfer, generator_transfer or swapped")
flags.DEFINE_string(
    "role", None, "who plays alone in single_transfer, is replaced in generator_transfer; None: generator"
)
flags.DEFINE_string("generator_from", None, "folder of a single agent's run, for generator_transfer")
flags.DEFINE_string("generator_checkpoint", None, "latest, best, base or a step of that run; None: latest")
flags.DEFINE_integer("seed", None, "of the noise; None: the run's")
flags.DEFINE_string(
    "url", None, "of the run's vLLM server where it has moved; of several, with commas between"
)
flags.DEFINE_string("out", None, "another folder for eval.jsonl, where the run's can only be read")
cli.define_accept_changes()


def main(_config: None, _: list[str]) -> None:
    from marl_jax.commands.casts import Evaluation
    from marl_jax.commands.evaluate import announce, evaluate
    from marl_jax.terminal.tables import table

    asked = Evaluation(**{field.name: FLAGS[field.name].value for field in dataclasses.fields(Evaluation)})
    about = {"accept_changes": FLAGS.accept_changes, "out": FLAGS.out}
    print(table(evaluate(FLAGS.workdir, asked, watch=announce, **about)))


if __name__ == "__main__":
    cli.run(main, read=cli.no_config, prints=True)
