"""Memory and time per step that a cell needs, by kind of device; refuses a cell that `train` would refuse.

python -m experiments.plan --config=configs/qwen3.py:voting-isolated-0.6b-math [--config.steps=...]
    [--completion=mean:0.3,sigma:0.8 | --lengths=runs/mine] [--tokens_per_second=20000]
    [--answers='{"evaluator": {"\\\\boxed{Correct}": 0.5}}']

Without --compile nothing is compiled; no weights and no files of data are read. With --config.road=compiled, the
step is traced, with its bases, and its arrays are counted.
"""

from absl import flags

from marl_jax.commands import cli
from marl_jax.commands.run_plan import run_plan
from marl_jax.config.run_config import RunConfig

FLAGS = flags.FLAGS
flags.DEFINE_string(
    "completion",
    "mean:0.5,sigma:0.6",
    "assumed lengths of completions: mean:0.5,sigma:0.6 is a lognormal distribution, cut at max_new_tokens: its mean "
    "as a share of max_new_tokens, and the spread of the logarithm; 0.5 alone: all have this length",
)
flags.DEFINE_string(
    "lengths", None, "take the lengths of completions, role by role, from the episodes of this run's folder"
)
flags.DEFINE_float(
    "tokens_per_second",
    0.0,
    "time rollouts as on an engine elsewhere, such as vLLM, that samples this many tokens per second",
    0.0,
)
flags.DEFINE_string(
    "answers",
    "{}",
    "verdicts and other answers that roles are assumed to give, with their probabilities, as JSON: "
    '{"evaluator": {"\\\\boxed{Correct}": 0.5}}; without them no verdict ends an episode early',
)
flags.DEFINE_bool(
    "compile", False, "compile the programs for the device here and show the memory that XLA counts"
)


def main(config: RunConfig, _: list[str]) -> None:
    assumed = FLAGS.completion, FLAGS.lengths, FLAGS.tokens_per_second, FLAGS.answers
    for text in run_plan(config, *assumed, compiles=FLAGS.compile):
        print(text)


if __name__ == "__main__":
    cli.run(main, needs="FILE:CELL", prints=True)
