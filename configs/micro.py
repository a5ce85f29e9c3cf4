"""The study at micro scale: procedural tasks and models of 0.1 (xs), 0.4 (s) and 1.6 (m) million parameters.

A cell is meant to run in minutes on two CPU cores: 200 steps of 64 problems x 8 episodes, all weights trained. The
settings are those that took a 0.1M model from 50% to 85% on additions in 200 steps; the results of the cells are to be
measured.
"""

from marl_jax import policies
from marl_jax.config.cells import all_cells, of_study, parse_cell
from marl_jax.config.run_config import (
    DataConfig,
    EngineConfig,
    PoliciesConfig,
    RolloutConfig,
    RunConfig,
    WorkflowConfig,
)
from marl_jax.learning.batching import BatchConfig
from marl_jax.learning.learner_config import LearnerConfig
from marl_jax.learning.optimiser import OptimiserConfig, ScheduleConfig
from marl_jax.pretraining.recipe import Recipe
from marl_jax.pretraining.roles import Skill
from marl_jax.workflows import BUILT_IN

SCALES = ("xs", "s", "m")
CELLS = tuple(map(str, all_cells(SCALES)))
SETS = {"study": tuple(filter(of_study, CELLS))}  # the cells that a matrix runs by default
# Tokens that a voting episode of the base samples, to which single_token_matched is matched: `tokens_per_episode` of
# python -m experiments.train --config=configs/micro.py:voting-shared-SCALE-TASK --workdir=DIR --config.steps=0
# python -m experiments.evaluate --workdir=DIR --checkpoint=base --mode=base --split=val --samples=4
VOTING_TOKENS = {
    "math": {"xs": 70, "s": 70, "m": 70},
    "code": {"xs": 80, "s": 79, "m": 79},
}
# The scripted drafts are right about half the time, so that a base can become better or worse.
RECIPES = {
    "xs": Recipe("xs", steps=3000, learning_rate=3e-3, skill=Skill(draft=0.44), seed=1),
    "s": Recipe("s", steps=2000, learning_rate=2.5e-3, skill=Skill(draft=0.49)),
    "m": Recipe("m", steps=2500, learning_rate=2e-3, skill=Skill(draft=0.48)),
}


def get_config(name: str) -> RunConfig:
    """The configuration of a cell such as voting-isolated-s-math."""
    cell = parse_cell(name, SCALES)
    roles = BUILT_IN[cell.workflow].roles
    matched = cell.workflow == "single_token_matched"
    settings = {"tokens": VOTING_TOKENS[cell.task][cell.scale]} if matched else {}
    kind = f"micro_{cell.task}"
    share = policies.shared if cell.policy == "shared" else policies.isolated
    return RunConfig(
        cell=str(cell),
        workflow=WorkflowConfig(cell.workflow, settings, prompts="micro"),
        policies=PoliciesConfig(share(roles), base=f"configs/bases/micro-{cell.scale}", dtype="float32"),
        data=DataConfig(cell.task, kind, problems=64, levels=RECIPES[cell.scale].levels[kind]),
        sampling=policies.SamplingSettings(max_new_tokens=64, temperature=1.0),
        engine=EngineConfig(max_prompt=448),  # histories of eval_opt are the longest, under 400 tokens
        rollout=RolloutConfig(samples=8),
        learner=LearnerConfig(
            optimiser=OptimiserConfig(schedule=ScheduleConfig(3e-4, total_steps=200)),
            # Short rows, packed: few programs to compile.
            batch=BatchConfig(buckets=(256, 512), token_budget=4096),
        ),
        steps=200,
    )


def get_recipe(scale: str) -> Recipe:
    """The recipe of a scale's base, for `experiments.pretrain`."""
    if scale not in RECIPES:
        raise ValueError(f"scale {scale!r} has no recipe; there is: {', '.join(RECIPES)}")
    return RECIPES[scale]
