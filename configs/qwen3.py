"""The study at its own scale: Qwen3 of 0.6b, 1.7b and 4b parameters on DAPO-Math and DeepCoder.

Its published settings: LoRA of rank 64, 500 steps of 64 problems x 8 episodes, temperature 0.7, completions of
5,120 (math) or 2,048 (code) tokens. Every policy has its own clamped schedule and one update per step, where the
original shares one schedule among its adapters (`LearnerConfig.study()` has that regime). For a GPU or TPU host;
put the model's directory at models/Qwen3-0.6B, or name it with --config.policies.base. What a cell reaches has not
been measured here.
"""

from marl_jax import policies
from marl_jax.config.cells import all_cells, of_study, parse_cell
from marl_jax.config.run_config import (
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    PoliciesConfig,
    RolloutConfig,
    RunConfig,
    WorkflowConfig,
)
from marl_jax.learning.batching import BatchConfig
from marl_jax.learning.learner_config import LearnerConfig
from marl_jax.learning.losses import LossConfig
from marl_jax.learning.optimiser import OptimiserConfig, ScheduleConfig
from marl_jax.workflows import BUILT_IN

SCALES = ("0.6b", "1.7b", "4b")
# single_token_matched is not listed, because the number of tokens to match has not been measured. The cell runs if
# --config.workflow.settings.tokens is set.
CELLS = tuple(str(cell) for cell in all_cells(SCALES) if cell.workflow != "single_token_matched")
SETS = {"study": tuple(filter(of_study, CELLS))}  # the cells that a matrix runs by default
MAX_PROMPT = {
    "math": {
        "single": 15360,
        "voting": 20480,
        "orch_workers": 20480,
        "eval_opt": 30720,
        "single_matched": 15360,
        "single_token_matched": 15360,
        "debate": 20480,
    },
    "code": {
        "single": 4096,
        "voting": 10240,
        "orch_workers": 10240,
        "eval_opt": 10240,
        "single_matched": 4096,
        "single_token_matched": 4096,
        "debate": 10240,
        "planner_coder": 6144,
        "self_refine_with_tests": 10240,
    },
}
MAX_NEW = {"math": 5120, "code": 2048}
DATA = {"math": "dapo_math", "code": "deepcoder"}
STEPS = 500


def get_config(name: str) -> RunConfig:
    """The configuration of a cell such as voting-isolated-1.7b-math."""
    cell = parse_cell(name, SCALES)
    roles, longest = BUILT_IN[cell.workflow].roles, MAX_PROMPT[cell.task]
    share = policies.shared if cell.policy == "shared" else policies.isolated
    return RunConfig(
        cell=str(cell),
        workflow=WorkflowConfig(cell.workflow),
        policies=PoliciesConfig(
            share(roles),
            base=f"models/Qwen3-{cell.scale.upper()}",
            train="lora",
            lora_rank=64,
            lora_alpha=32.0,
            remat="layer",
        ),
        data=DataConfig(cell.task, DATA[cell.task], problems=64),
        sampling=policies.SamplingSettings(max_new_tokens=MAX_NEW[cell.task], temperature=0.7),
        engine=EngineConfig(max_prompt=longest.get(cell.workflow, max(longest.values()))),
        rollout=RolloutConfig(samples=8),
        learner=LearnerConfig(
            gap_tolerance=1.0,  # for the largest gap in bfloat16: 0.12 in 2,048 tokens of 12 random layers
            loss=LossConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0),
            optimiser=OptimiserConfig(
                schedule=ScheduleConfig(2e-5, "cosine", warmup_steps=15, total_steps=STEPS),
                weight_decay=0.01,
                grad_clip=1.0,
            ),
            batch=BatchConfig(buckets=(512, 1024, 2048, 4096, 8192, 16384, 24576, 36864)),
        ),
        evaluation=EvaluationConfig(every=10, problems=128),
        checkpoints=CheckpointConfig(every=5, latest=2, keep_every=5),
        steps=STEPS,
    )
