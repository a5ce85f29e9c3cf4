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
flags.DEFINE_string("data_directory", None, "directory of its files; None: downloaded from its publisher")
flags.DEFINE_integer("samples", 1, "episodes per problem")
flags.DEFINE_integer("problems", None, "number of problems, from the first on; None: all")
flags.DEFINE_string("mode", "trained", "trained, base, single_transfer, generator_transfer or swapped")
flags.DEFINE_string(
    "role", None, "role that plays alone or is replaced, for the two transfers; None: generator"
)
flags.DEFINE_string("generator_from", None, "folder of a single agent's run, for generator_transfer")
flags.DEFINE_string("generator_checkpoint", None, "latest, best, base or a step of that run; None: latest")
flags.DEFINE_integer("seed", None, "seed of the noise; None: the run's")
flags.DEFINE_string(
    "url", None, "new address of the run's vLLM server; several are separated by commas; None: the run's"
)
flags.DEFINE_string("out", None, "another folder for eval.jsonl, if the run's is read-only")
cli.define_accept_changes()


def main(_config: None, _: list[str]) -> None:
    from marl_jax.commands.contenders import Evaluation
    from marl_jax.commands.evaluate import announce, evaluate
    from marl_jax.terminal.tables import table

    asked = Evaluation(**{field.name: FLAGS[field.name].value for field in dataclasses.fields(Evaluation)})
    about = {"accept_changes": FLAGS.accept_changes, "out": FLAGS.out}
    print(table(evaluate(FLAGS.workdir, asked, watch=announce, **about)))


if __name__ == "__main__":
    cli.run(main, read=cli.no_config, prints=True)
