"""Memory and time per step that a cell needs, by kind of device. Nothing is compiled; no weights or data are read.

python -m experiments.plan --config=configs/qwen3.py:voting-isolated-0.6b-math [--config.steps=...]
"""

from absl import flags

from marl_jax.commands import cli
from marl_jax.config.run_config import RunConfig
from marl_jax.planning.account import account
from marl_jax.planning.devices import KINDS, host
from marl_jax.planning.plan import demand_of, find_models, make_plan
from marl_jax.terminal.page import plan_page

FLAGS = flags.FLAGS
flags.DEFINE_float(
    "completion", 0.5, "mean length assumed of completions, as a share of max_new_tokens", 0.0, 1.0
)
flags.DEFINE_bool(
    "compile", False, "compile the programs for the device at hand and say what XLA counts of each"
)


def main(config: RunConfig, _: list[str]) -> None:
    models, source = find_models(config)
    demand = demand_of(config, FLAGS.completion)
    plans = [make_plan(config, models, device, demand) for device in (host(), *KINDS)]
    print(plan_page(config, models, source, plans))
    if FLAGS.compile:
        print(f"\n{account(config, models, demand)}")


if __name__ == "__main__":
    cli.run(main, needs="FILE:CELL")
