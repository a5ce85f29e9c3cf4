"""The compiled road: a whole training step as one pure function, as in a notebook.

python -m examples.compiled_step [--config=configs/micro.py:voting-isolated-xs-math] [--config.steps=20 ...]
"""

import sys

import jax

from marl_jax import compiled
from marl_jax.config.run_config import from_argv

config, _ = from_argv(["--config=configs/micro.py:single-shared-xs-math", *sys.argv[1:]])

step, state = jax.jit(compiled.make_step(config)), compiled.start(config)
for number, (key, tasks) in zip(range(config.steps), compiled.batches(config)):
    state, table, metrics = step(state, key, tasks)
    print(number + 1, f"reward {metrics['reward']:.3f}", f"tokens {metrics['tokens']}")
