"""From rows of numbers to new policies: advantages, losses, batches, the update, role gradients."""

from typing import TYPE_CHECKING

from marl_jax import late
from marl_jax.learning.batching import BatchConfig, make_batches
from marl_jax.learning.by_role.interventions import InterventionConfig, Mixing
from marl_jax.learning.estimators.advantages import agent_advantages, group_advantages, overlong_penalty
from marl_jax.learning.estimators.groups import count_groups, group_ids, group_key, informative
from marl_jax.learning.estimators.worth import AdvantageConfig, with_advantages
from marl_jax.learning.learner_config import LearnerConfig
from marl_jax.learning.losses import LossConfig, kl_estimate, policy_loss
from marl_jax.learning.objectives import PreferenceConfig
from marl_jax.learning.optimiser import OptimiserConfig, ScheduleConfig

if TYPE_CHECKING:
    from marl_jax.learning.by_role.step_report import Report
    from marl_jax.learning.logprobs import token_logprobs
    from marl_jax.learning.network import Network, Qwen3
    from marl_jax.learning.update import Learner, LearnerState, NonFiniteGradients

__all__ = [
    "AdvantageConfig",
    "BatchConfig",
    "InterventionConfig",
    "Learner",
    "LearnerConfig",
    "LearnerState",
    "LossConfig",
    "Mixing",
    "Network",
    "NonFiniteGradients",
    "OptimiserConfig",
    "PreferenceConfig",
    "Qwen3",
    "Report",
    "ScheduleConfig",
    "agent_advantages",
    "count_groups",
    "group_advantages",
    "group_ids",
    "group_key",
    "informative",
    "kl_estimate",
    "make_batches",
    "overlong_penalty",
    "policy_loss",
    "token_logprobs",
    "with_advantages",
]

__getattr__ = late(
    __name__,
    {
        "by_role.step_report": ("Report",),
        "logprobs": ("token_logprobs",),
        "network": ("Network", "Qwen3"),
        "update": ("Learner", "LearnerState", "NonFiniteGradients"),
    },
)
