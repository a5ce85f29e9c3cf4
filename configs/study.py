"""The cells of `micro` and `qwen3` under the original study's regime, confounds included, to be measured against them.

An optimiser update for every 512 sequences, so that voting's generator gets three times as many as its aggregator; one
cosine schedule that every adapter steps, so that isolated policies reach its end early and it rises again; groups
pooled as in the study, where a group of one has its reward as advantage; no weights for differences of sampler and
trainer, and the dual clip, which the cells of `micro` lack. Run a cell of this file and the same cell of its own file
with equal seeds: only the regime differs.
"""

import dataclasses
from pathlib import Path

from marl_jax.config.cells import parse_cell
from marl_jax.config.run_config import RunConfig, config_module
from marl_jax.learning import AdvantageConfig, LearnerConfig
from marl_jax.learning.optimiser import ScheduleConfig
from marl_jax.workflows import find

micro, qwen3 = (config_module(Path(__file__).with_name(f"{name}.py")) for name in ("micro", "qwen3"))
SCALES = (*micro.SCALES, *qwen3.SCALES)
CELLS = (*micro.CELLS, *qwen3.CELLS)
SETS = {"study": (*micro.SETS["study"], *qwen3.SETS["study"])}


def get_config(name: str) -> RunConfig:
    """The configuration of a cell such as voting-isolated-xs-math or voting-isolated-1.7b-math."""
    cell = parse_cell(name, SCALES)
    return under_regime((micro if cell.scale in micro.SCALES else qwen3).get_config(name))


def under_regime(clean: RunConfig) -> RunConfig:
    """A configuration with the original's updates, schedule and groups."""
    regime, kept = LearnerConfig.study(clean.steps), clean.learner
    rate = kept.optimiser.schedule.learning_rate
    learner = dataclasses.replace(
        kept,
        updates=regime.updates,
        loss=regime.loss,
        optimiser=dataclasses.replace(kept.optimiser, schedule=ScheduleConfig.study(clean.steps, rate)),
    )
    advantages = AdvantageConfig.study()
    if "study" not in find(clean.workflow.name).groups:  # controls and workflows that the study did not have
        advantages = dataclasses.replace(advantages, group=clean.advantages.group)
    return dataclasses.replace(clean, learner=learner, advantages=advantages)
