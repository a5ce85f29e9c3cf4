"""What can be set of a run: every field with its type, its default and its bounds, in groups.

`RunConfig` (see `run_config`) is these fields, checked.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from marl_jax.fields import Count, OptionalCount, Positive, Whole
from marl_jax.learning.learner_config import LARGEST_SEED, LearnerConfig
from marl_jax.learning.worth import AdvantageConfig
from marl_jax.policies import SamplingSettings, role_settings
from marl_jax.rewards.credit import CreditConfig
from marl_jax.rollouts import Limits
from marl_jax.task import Family
from marl_jax.workflows import find

Seed = Annotated[int, Ge(0), Le(LARGEST_SEED)]


@dataclasses.dataclass(frozen=True)
class WorkflowConfig:
    """Which workflow, its own settings (votes, rounds, workers, calls...), and its words."""

    name: str = "single"  # a built-in one, or your own as "module:workflow"
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prompts: Literal["full", "micro"] = "full"
    prompts_folder: str | None = None  # your own, of the layout of marl_jax/workflows/prompts


@dataclasses.dataclass(frozen=True)
class PoliciesConfig:
    """Who answers for which role, what it starts from, and what of it is trained."""

    map: Mapping[str, str] = dataclasses.field(default_factory=dict)  # role or role/slot -> policy
    frozen_roles: tuple[str, ...] = ()  # a policy of frozen roles alone is served, not trained
    base: str = ""  # directory of the model that policies start from
    bases: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of those that start elsewhere
    dtype: Literal["float32", "bfloat16"] | None = None  # None: as the base is stored
    train: Literal["full", "lora"] = "full"
    lora_rank: Count = 64
    lora_alpha: Positive = 32.0
    remat: Literal["none", "layer", "dots"] = "none"  # what the backward pass computes again to save memory
    attention: Literal["blocks", "plain"] | None = None  # of the update; None: the fastest of the platform


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The problems. The draw or the carving of val follows `seed`, the order of problems the run's own."""

    family: Family = "math"
    name: str = "micro_math"  # a data set of `marl_jax.tasks`, or your own function (split) -> tasks, "module:function"
    directory: str | None = None  # of its files; None: fetched from where it is published
    cache: str | None = None
    problems: Count = 64  # per step
    seed: Seed = 0
    val_size: Annotated[int | None, Ge(0)] = None  # 0: none is carved, for runs without evaluation
    train_size: OptionalCount = None  # of procedural data, like the next two
    test_size: OptionalCount = None
    levels: tuple[int, ...] = (1, 2, 3)
    bad_rows: Literal["refuse", "skip"] = "refuse"


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How episodes are made."""

    samples: Count = 8  # episodes per problem
    draws: Count = (
        1  # above 1, dynamic sampling: problems that teach nothing are drawn again, so often in all
    )
    limits: Limits = dataclasses.field(default_factory=Limits)
    mode: Literal["fixed", "free"] = "fixed"
    tool_delay: Count = 4
    tool_threads: Count = 8
    ahead: OptionalCount = None  # requests that may wait before new episodes begin; None: twice the lanes


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The engine's limits; the shapes that follow from them are settled at the first start."""

    max_prompt: Count = 512  # tokens, of any call
    lanes: OptionalCount = None
    budget_bytes: OptionalCount = None
    steps: OptionalCount = None  # decode steps per dispatch; None: as the platform likes
    # Your own, "module:function": tempered logits [lanes, V] to the same with -inf for tokens that shall not be drawn.
    sampler: str | None = None


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many devices share the work: `data` copies of the weights, each cut over `model` devices."""

    data: Count = 1
    model: Count = 1


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Of the val split, while training."""

    every: Whole = 10  # 0: never
    problems: Count = 64
    samples: Count = 1


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and what to keep."""

    every: Count = 10
    latest: Count = 2
    best: bool = True
    keep_every: OptionalCount = None


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """What a run leaves behind besides its numbers."""

    # Of every so many steps, of the first and of the last, episodes are written; 0: none.
    episodes_every: Whole = 10
    episodes_problems: Count = 4  # problems of such a step
    tensorboard: bool = True
    wandb: bool = False
    wandb_project: str = "marl_jax"


@dataclasses.dataclass(frozen=True)
class RunFields:
    """All of a run."""

    cell: str
    workflow: WorkflowConfig
    policies: PoliciesConfig
    data: DataConfig
    sampling: SamplingSettings = dataclasses.field(default_factory=SamplingSettings)
    role_sampling: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    rewards: CreditConfig = dataclasses.field(default_factory=CreditConfig)
    advantages: AdvantageConfig = dataclasses.field(default_factory=AdvantageConfig)
    learner: LearnerConfig = dataclasses.field(default_factory=LearnerConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    checkpoints: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    logging: LogConfig = dataclasses.field(default_factory=LogConfig)
    steps: Whole = 200
    seed: Seed = 0

    @property
    def roles(self) -> tuple[str, ...]:
        return find(self.workflow.name).roles

    @property
    def role_settings(self) -> dict[str, SamplingSettings]:
        """{role: how it samples}."""
        return role_settings(self.roles, self.sampling, self.role_sampling)
