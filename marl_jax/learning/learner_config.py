"""The learner's part of a configuration: how rows become updates."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from marl_jax import fields
from marl_jax.fields import Count, NotNegative, Positive
from marl_jax.learning.batching import BatchConfig
from marl_jax.learning.by_role.interventions import InterventionConfig, Mixing
from marl_jax.learning.losses import OBJECTIVES, LossConfig
from marl_jax.learning.objectives import PreferenceConfig
from marl_jax.learning.optimiser import OptimiserConfig, ScheduleConfig

LARGEST_SEED = 2**31 - 1  # JAX would cut a larger one to 32 bits
Seed = Annotated[int, Ge(0), Le(LARGEST_SEED)]


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """The static settings of an optimiser step, see `update_programs.apply`."""

    optimiser: OptimiserConfig  # the optimiser, without its schedule
    mixing: Mixing  # how the roles' parts are weighted
    split_by_role: bool = True  # the gradient has one part for each role; False: one part for all rows
    layer_norms: bool = False  # also split every part's norm by layer


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
    """All settings of the learner; `LearnerConfig.study()` has those of the original study."""

    loss: LossConfig = dataclasses.field(default_factory=LossConfig)  # the loss
    optimiser: OptimiserConfig = dataclasses.field(default_factory=OptimiserConfig)  # the optimiser
    batch: BatchConfig = dataclasses.field(default_factory=BatchConfig)  # shapes of micro-batches
    # Changes to the roles' parts of a gradient.
    interventions: InterventionConfig = dataclasses.field(default_factory=InterventionConfig)
    gradients: Literal["off", "roles", "slots"] = "roles"  # the parts of every gradient that are measured
    layer_norms: bool = False  # also split every part's norm by layer
    updates: Literal["one", "fixed", "sequences"] = "one"  # how many mini-batches a policy has per epoch
    updates_fixed: Count = 1  # mini-batches per epoch with updates "fixed"
    sequences_per_update: Count = 512  # most rows of a mini-batch with updates "sequences"
    epochs: Count = 1  # number of passes over the rows of a step
    old_logprobs: Literal["trainer", "sampler"] = "trainer"  # the log-probs that the ratio is taken against
    mask_truncated: bool = False  # leave out completions that were cut off
    # Tokens whose logits exist at the same time; at least one of each sequence.
    logprob_chunk: Count = 4096
    gap_tolerance: Positive = 1e-3  # larger differences of sampler and trainer log-probs give a warning
    max_skips: Count = 10  # non-finite gradients of a policy before the run stops
    # {policy: its highest learning rate}, instead of the schedule's.
    learning_rates: Mapping[str, NotNegative] = dataclasses.field(default_factory=dict)
    seed: Seed = 0  # seed of the order of rows in an epoch
    # Settings of the objectives over whole sequences.
    preference: PreferenceConfig = dataclasses.field(default_factory=PreferenceConfig)

    def __post_init__(self) -> None:
        fields.check(self)
        if self.loss.kind == "kto" and self.preference.above is None:
            raise ValueError(
                "loss.kind 'kto' needs preference.above, the value above which a call is desirable: such as 0.5"
            )
        without_ratios = self.old_logprobs == "sampler" or self.loss.kind in OBJECTIVES
        if without_ratios and self.loss.mask_ratio is not None:
            raise ValueError(
                "loss.mask_ratio needs old_logprobs=trainer and a loss.kind of single tokens, and these are "
                f"{self.old_logprobs} and {self.loss.kind}: change them, or set mask_ratio to none"
            )
        if self.layer_norms and self.gradients == "off":
            raise ValueError(
                "layer_norms needs gradients split by role or slot: set gradients to roles or slots"
            )

    @property
    def split_by_role(self) -> bool:
        """Whether gradients are split by role or slot."""
        return self.gradients != "off" or self.interventions.needs_roles

    @property
    def step_settings(self) -> StepSettings:
        """The static settings of an optimiser step; they exclude the schedule, as the learning rate is an argument."""
        optimiser = dataclasses.replace(self.optimiser, schedule=ScheduleConfig())
        return StepSettings(optimiser, self.interventions.mixing, self.split_by_role, self.layer_norms)

    def schedule_of(self, policy: str) -> ScheduleConfig:
        """The schedule, with the policy's own learning rate if one is set."""
        schedule = self.optimiser.schedule
        rate = self.learning_rates.get(policy, schedule.learning_rate)
        return dataclasses.replace(schedule, learning_rate=rate)

    def unit(self, role: str, slot: int) -> Any:
        """The part of the gradient that a row adds to: its role, its (role, slot), or None if there is one part."""
        if self.gradients == "slots":
            return role, slot
        return role if self.split_by_role else None

    @classmethod
    def study(cls, total_steps: int = 500, **changes: Any) -> "LearnerConfig":
        """The study's settings: an update per 512 sequences, dual clip, one schedule that every adapter advances."""
        defaults: dict[str, Any] = {
            "loss": LossConfig(dual_clip=3.0, is_cap=None),
            "optimiser": OptimiserConfig(schedule=ScheduleConfig.study(total_steps)),
            "updates": "sequences",
        }
        return cls(**defaults | changes)
