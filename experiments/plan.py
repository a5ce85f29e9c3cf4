"""Memory and time per step that a cell needs, by kind of device; what `train` would refuse is refused.

python -m experiments.plan --config=configs/qwen3.py:voting-isolated-0.6b-math [--config.steps=...]
    [--completion=mean:0.3,sigma:0.8 | --lengths=runs/mine] [--tokens_per_second=20000]

Nothing is compiled; no weights and no files of data are read. With --config.road=compiled, the step is traced, with its
bases, and its arrays are counted.
"""

import math

from absl import flags

from marl_jax.commands import cli
from marl_jax.config.run_config import RunConfig
from marl_jax.planning.account import account, line_of
from marl_jax.planning.devices import KINDS, host
from marl_jax.planning.lengths import PlanError, read_lengths, recorded_lengths
from marl_jax.planning.plan import demand_of, find_models, make_plan, told
from marl_jax.terminal.page import plan_page

FLAGS = flags.FLAGS
flags.DEFINE_string(
    "completion",
    "mean:0.5,sigma:0.6",
    "lengths assumed of completions: mean:0.5,sigma:0.6 is their mean as a share of max_new_tokens and the spread of "
    "their logarithm (lognormal, cut at max_new_tokens); 0.5 alone: all are as long",
)
flags.DEFINE_string(
    "lengths", None, "take the lengths of completions, role by role, from the episodes of this run's folder"
)
flags.DEFINE_float(
    "tokens_per_second",
    0.0,
    "count rollouts on an engine elsewhere, as vLLM, that samples so many tokens",
    0.0,
)
flags.DEFINE_bool(
    "compile", False, "compile the programs for the device at hand and say what XLA counts of each"
)


def main(config: RunConfig, _: list[str]) -> None:
    from marl_jax.planning.step_memory import in_one_program, seeds_that_fit
    from marl_jax.runs.in_arrays import cpu_devices
    from marl_jax.runs.opening import check_foreseen

    if config.road == "compiled":
        cpu_devices()
    models, source = find_models(config)
    lengths = read_lengths(FLAGS.completion)
    if FLAGS.lengths:
        lengths = recorded_lengths(FLAGS.lengths, lengths)
    if not math.isfinite(FLAGS.tokens_per_second):
        raise PlanError(
            f"--tokens_per_second is {FLAGS.tokens_per_second}; it must be a number, or 0 for none"
        )
    usual, demand = demand_of(config), demand_of(config, lengths, FLAGS.tokens_per_second)
    plans = [make_plan(config, models, device, usual) for device in (host(), *KINDS)]
    road = check_foreseen(config, plans[0])
    plans = [told(plan, config, models, demand) for plan in plans]
    hosted, traced = plans, None
    if road is not None:
        step, traced = road.planned()
        plans = [in_one_program(plan, config, step) for plan in plans]
    print(plan_page(config, models, source, plans))
    if road is not None and config.seeds > 1:
        fitting = (f"{seeds_that_fit(plan, config, step)} on {plan.device.name}" for plan in hosted)
        print(f"of {config.seeds} seeds fit: {', '.join(fitting)}")
    if FLAGS.compile:
        print(f"\n{account(config, models, usual)}")
        if road is not None:
            print(line_of("step", road.compiled(traced)))


if __name__ == "__main__":
    cli.run(main, needs="FILE:CELL")
