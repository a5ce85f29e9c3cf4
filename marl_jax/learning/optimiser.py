"""The optimiser of one policy: optax with float32 states, one global-norm clip, and a schedule.

The learning rate is applied outside optax's chain, so that the schedule's clock is explicit: the steps of each policy,
or, as in the study, one clock that all policies share and each advances.
"""

import dataclasses
import math
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Gt, Lt

from marl_jax import fields
from marl_jax.fields import Count, NotNegative, Positive, Whole
from marl_jax.models.weight_table import Tree

Decay = Annotated[float, Ge(0), Lt(1)]


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """Linear warm-up, then `kind` down to `final_ratio` at `total_steps`."""

    learning_rate: NotNegative = 1e-4  # the highest rate of the schedule
    kind: Literal["constant", "cosine", "linear"] = "constant"  # form of the schedule after the warm-up
    warmup_steps: Whole = 0  # length of the linear warm-up from near 0
    total_steps: Count = 1000  # the step at which the schedule ends
    final_ratio: NotNegative = 0.0  # final learning rate, as a share of `learning_rate`
    # `own`: each policy counts its own steps; `shared`: one count for all.
    clock: Literal["own", "shared"] = "own"
    clamped: bool = True  # False: a cosine rises again after `total_steps`

    def __post_init__(self) -> None:
        fields.check(self)
        if self.warmup_steps >= self.total_steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps}; it must be less than total_steps {self.total_steps}"
            )

    @classmethod
    def study(cls, total_steps: int = 500, learning_rate: float = 2e-5) -> "ScheduleConfig":
        """The study's schedule: one cosine for all policies, advanced by each adapter, that rises again at its end."""
        return cls(learning_rate, "cosine", 15, total_steps, clock="shared", clamped=False)

    def __call__(self, step: int) -> float:
        """The learning rate of step 0, 1, 2, ..."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        if self.clamped:
            progress = min(progress, 1.0)
        shape = {
            "constant": 1.0,
            "linear": max(1 - progress, 0.0),
            "cosine": (1 + math.cos(math.pi * progress)) / 2,
        }[self.kind]
        return self.learning_rate * (self.final_ratio + (1 - self.final_ratio) * shape)


@dataclasses.dataclass(frozen=True)
class OptimiserConfig:
    """adamw, sgd, or adafactor: no first moment, second moments factored if two axes have 128 entries or more."""

    kind: Literal["adamw", "sgd", "adafactor"] = "adamw"  # sgd has momentum b1
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)  # of the learning rate
    b1: Decay = 0.9  # decay of the first moment
    b2: Decay = 0.999  # decay of the second moment
    eps: Positive = 1e-8  # AdamW's epsilon
    weight_decay: NotNegative = 0.01  # not applied to norms, biases and embeddings
    grad_clip: Annotated[float | None, Gt(0)] = 1.0  # largest norm of a policy's gradient; None: any

    def __post_init__(self) -> None:
        fields.check(self)


def transformation(config: OptimiserConfig) -> optax.GradientTransformation:
    """The transformation from a gradient to a descent step at learning rate 1."""
    scale = {
        "adamw": lambda: optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=jnp.float32),
        "sgd": lambda: optax.trace(config.b1) if config.b1 else optax.identity(),
        "adafactor": optax.scale_by_factored_rms,
    }[config.kind]()
    # Masked even without decay, so that the state always has the same structure: a phase may change the decay.
    decay = optax.add_decayed_weights(config.weight_decay) if config.weight_decay else optax.identity()
    return optax.chain(scale, optax.masked(decay, decay_mask), optax.scale(-1.0))


def decay_mask(tree: Tree) -> Tree:
    """True for the weights that decay: all but norms, biases and embeddings."""
    decays = lambda path, _: not any(word in jax.tree_util.keystr(path) for word in ("norm", "bias", "embed"))
    return jax.tree_util.tree_map_with_path(decays, tree)


def clip_factor(norm: jax.Array, limit: float | None) -> jax.Array:
    """The factor that scales a gradient of norm `norm` down to the limit."""
    return jnp.ones((), jnp.float32) if limit is None else jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30))
