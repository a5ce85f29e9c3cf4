"""The optimiser of one policy: optax with float32 states, one global-norm clip, and a schedule.

The learning rate is applied outside optax's chain, so that the schedule's clock is explicit: the steps of the policy,
or in the study's regime one clock that all policies share and each of them advances.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

Tree = Any


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """Linear warm-up, then `kind` down to `final_ratio` at `total_steps`."""

    learning_rate: float = 1e-4
    kind: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 1000
    final_ratio: float = 0.0
    clock: Literal["own", "shared"] = "own"
    clamped: bool = True  # False: a cosine rises again after its end

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "cosine", "linear"):
            raise ValueError(f"schedule {self.kind!r} is unknown; use 'constant', 'cosine' or 'linear'")
        if self.clock not in ("own", "shared"):
            raise ValueError(f"schedule clock {self.clock!r} is unknown; use 'own' or 'shared'")
        if not (0 <= self.learning_rate < math.inf and 0 <= self.final_ratio < math.inf):
            raise ValueError(
                f"learning_rate {self.learning_rate} and final_ratio {self.final_ratio} must be finite and not negative"
            )
        if self.total_steps < 1:
            raise ValueError(f"total_steps {self.total_steps} must be at least 1")
        if not 0 <= self.warmup_steps < self.total_steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} must be at least 0 and less than total_steps {self.total_steps}"
            )

    @classmethod
    def study(cls, total_steps: int = 500, learning_rate: float = 2e-5) -> "ScheduleConfig":
        """The original study's: one cosine for all policies, stepped once per adapter, that rises again at its end."""
        return cls(learning_rate, "cosine", 15, total_steps, clock="shared", clamped=False)

    def __call__(self, step: int) -> float:
        """The learning rate of step 0, 1, 2, ..."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        if self.clamped:
            progress = min(progress, 1.0)
        left = {
            "constant": 1.0,
            "linear": max(1 - progress, 0.0),
            "cosine": (1 + math.cos(math.pi * progress)) / 2,
        }[self.kind]
        return self.learning_rate * (self.final_ratio + (1 - self.final_ratio) * left)


@dataclasses.dataclass(frozen=True)
class OptimiserConfig:
    """adamw, sgd (with momentum b1), or adafactor, which keeps factored second moments and no first moment."""

    kind: Literal["adamw", "sgd", "adafactor"] = "adamw"
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01  # not of norms, biases and embeddings
    grad_clip: float | None = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ("adamw", "sgd", "adafactor"):
            raise ValueError(f"optimiser {self.kind!r} is unknown; use 'adamw', 'sgd' or 'adafactor'")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must lie in [0, 1)")
        if not self.eps > 0:
            raise ValueError(f"eps {self.eps} must be positive")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay {self.weight_decay} must not be negative")
        if self.grad_clip is not None and not self.grad_clip > 0:
            raise ValueError(f"grad_clip {self.grad_clip} must be positive, or none")


def transformation(config: OptimiserConfig) -> optax.GradientTransformation:
    """Gradient -> step of learning rate 1, in the direction of descent."""
    scale = {
        "adamw": lambda: optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=jnp.float32),
        "sgd": lambda: optax.trace(config.b1) if config.b1 else optax.identity(),
        "adafactor": optax.scale_by_factored_rms,
    }[config.kind]()
    decay = (
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask)
        if config.weight_decay
        else optax.identity()
    )
    return optax.chain(scale, decay, optax.scale(-1.0))


def decay_mask(tree: Tree) -> Tree:
    """True for the weights that decay: all but norms, biases and embeddings."""

    def decays(path: Any, _: Any) -> bool:
        names = [str(getattr(key, "key", key)) for key in path]
        return not any(word in name for name in names for word in ("norm", "bias", "embed"))

    return jax.tree_util.tree_map_with_path(decays, tree)


def clip_factor(norm: jax.Array, limit: float | None) -> jax.Array:
    """The factor that reduces a gradient of this norm to the limit."""
    return jnp.ones(()) if limit is None else jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30))
