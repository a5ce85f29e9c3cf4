"""Policy losses of the GRPO family: sums over tokens, and their denominators as separate numbers.

    loss = sum_t w_t l_t / D,    l_t = max(-A rho, -A clip(rho, 1 - low, 1 + high)),    rho = exp(logp - old)

The aggregation chooses w and D. Numerators and denominators of micro-batches add up, so the loss does not depend on
how a batch is split: `jax.tree.map(jnp.add, loss, other)`. Values at masked tokens have no effect, not even NaN.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, Literal, get_args

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from marl_jax import fields
from marl_jax.fields import require
from marl_jax.learning.estimators.groups import precision
from marl_jax.own import OwnError, call_user_function, in_words, is_own, own_function

Kind = str  # one of KINDS or OBJECTIVES, or a user's own token loss as "module:function"
Aggregation = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"
]
KL = Literal["k1", "k2", "k3"]

KINDS = ("ppo", "gspo", "cispo", "pg")
OBJECTIVES = ("sft", "dpo", "kto", "sppo")  # losses of whole sequences, see `objectives`
AGGREGATIONS = get_args(Aggregation)
LOG_RATIO_LIMIT = 20.0  # log-ratios are clipped to this before `exp`
LARGEST_GAP = 1e4  # differences of log-probs are clipped to this, so that KL estimates and means stay finite


def _of_value(compare: Callable[[Any, Any], Any]) -> Callable[["Mean", Any], Any]:
    return lambda mean, other: compare(mean.value, other)


@flax.struct.dataclass
class Mean:
    """A mean that adds up over micro-batches, as numerator and denominator; its value is 0 if nothing was counted."""

    numerator: jax.Array  # []
    denominator: jax.Array  # []

    @property
    def value(self) -> jax.Array:
        """Numerator / denominator."""
        return self.numerator / jnp.where(self.denominator == 0, 1.0, self.denominator)

    def __add__(self, other: Any) -> "Mean":
        if not isinstance(other, Mean):  # an int has a numerator and a denominator, too
            return NotImplemented
        return Mean(self.numerator + other.numerator, self.denominator + other.denominator)

    # A mean is converted, compared and formatted as its value; for arithmetic, use `value`.
    def __float__(self) -> float:
        return float(self.value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.value, dtype)

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __bool__(self) -> bool:
        return bool(self.value)

    __eq__, __ne__ = _of_value(operator.eq), _of_value(operator.ne)  # type: ignore[assignment]
    __lt__, __le__ = _of_value(operator.lt), _of_value(operator.le)
    __gt__, __ge__ = _of_value(operator.gt), _of_value(operator.ge)

    def item(self) -> float:
        """The mean as a Python float."""
        return float(self)


@flax.struct.dataclass
class Loss:
    """A loss that is summed over micro-batches and then divided once; the denominator carries no gradient."""

    numerator: jax.Array  # []
    denominator: jax.Array  # []
    metrics: dict[str, Mean]  # means over the tokens, such as the clip fractions

    @property
    def value(self) -> jax.Array:
        """Numerator / denominator."""
        return Mean(self.numerator, self.denominator).value


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The static arguments of `policy_loss`, checked before anything is compiled."""

    kind: Kind = "ppo"  # one of KINDS or OBJECTIVES, or "module:function"
    aggregation: Aggregation = "sequence_mean_token_mean"  # how tokens become one number
    clip_low: float = 0.2  # lower bound of the ratio is 1 - this
    clip_high: float = 0.28  # upper bound of the ratio is 1 + this
    dual_clip: float | None = None  # ratio that bounds the loss for negative advantages
    is_cap: float | None = 2.0  # cap of the importance weights for sampler/trainer mismatch; None: no weights
    # Sequences whose mean trainer/sampler ratio is outside of this range get no policy loss; None: no such mask.
    mask_ratio: tuple[float, float] | None = None
    max_length: int | None = None  # divisor of sequence_mean_token_sum_norm
    kl: KL = "k3"  # estimator of the KL to the reference
    entropy_coef: float = 0.0  # weight of the entropy bonus

    def __post_init__(self) -> None:
        fields.check(self)
        check_loss(**vars(self))

    @property
    def corrects_sampler(self) -> bool:
        """Whether the loss corrects for differences between sampler and trainer."""
        return self.is_cap is not None or self.mask_ratio is not None


def policy_loss(
    logp: jax.Array,  # [B, T]
    old_logp: jax.Array,  # [B, T]
    advantages: jax.Array,  # [B] or [B, T]
    mask: jax.Array,  # [B, T], true where a token was sampled
    *,
    clip_low: float | jax.Array = 0.2,  # [] or [B] or [B, T]
    clip_high: float | jax.Array = 0.28,  # [] or [B] or [B, T]
    dual_clip: float | None = None,
    aggregation: Aggregation = "sequence_mean_token_mean",
    sampler_logp: jax.Array | None = None,  # [B, T]
    is_cap: float | None = 2.0,
    mask_ratio: tuple[float, float] | None = None,
    kind: Kind = "ppo",
    max_length: int | None = None,
    ref_logp: jax.Array | None = None,  # [B, T]
    kl_coef: float | jax.Array = 0.0,  # [] or [B] or [B, T]
    kl: KL = "k3",
    entropy: jax.Array | None = None,  # [B, T]
    entropy_coef: float = 0.0,
    sequences: jax.Array | None = None,  # [B, T] ints below B * T; default: each row is one sequence
) -> Loss:
    """The loss of one (micro-)batch, to be minimised; gradients flow through `logp` and `entropy` only.

    With `sampler_logp`, each token is weighted by min(exp(old_logp - sampler_logp), is_cap): truncated importance
    sampling for a sampler whose log-probs differ from the trainer's. Where a sequence's exp(mean(old_logp -
    sampler_logp)) is outside of `mask_ratio`, its policy loss is 0, but it still counts in the denominator. Bounds that
    are traced cannot be checked here and are assumed to be valid.
    """
    require(kind not in OBJECTIVES, f"{kind!r} is a loss of whole sequences, for `learner.loss.kind` only")
    logp, old_logp, mask = map(jnp.asarray, (logp, old_logp, mask))
    chex.assert_rank([logp, old_logp, mask], 2)
    optional = [x for x in (sampler_logp, ref_logp, entropy) if x is not None]
    chex.assert_equal_shape([logp, old_logp, mask, *map(jnp.asarray, optional)])
    if sequences is not None and not any(isinstance(x, jax.core.Tracer) for x in (sequences, mask)):
        valid = (np.asarray(sequences) >= 0) & (np.asarray(sequences) < mask.size) | (np.asarray(mask) == 0)
        require(valid.all(), f"sequences must be numbers from 0 to {mask.size - 1}, one for each valid token")
    shape, (rows, _) = jnp.shape(advantages), mask.shape
    require(
        shape in ((), (rows,), (rows, 1), mask.shape),
        f"advantages have the shape {list(shape)}; give one for each of the {rows} rows, or {list(mask.shape)}",
    )
    mask = mask.astype(bool)
    clean, fixed = functools.partial(_clean, mask), jax.lax.stop_gradient
    logp, old_logp, advantages = clean(logp), clean(fixed(old_logp)), clean(fixed(advantages))
    clip_low, clip_high = (x if _is_number(x) else clean(fixed(x)) for x in (clip_low, clip_high))
    numbers: Any = dual_clip, is_cap, entropy_coef
    dual_clip, is_cap, entropy_coef = (x if _is_number(x) else fixed(x) for x in numbers)
    check_loss(kind, aggregation, clip_low, clip_high, dual_clip, is_cap, max_length, mask_ratio)
    weights, denominator = aggregation_weights(mask, aggregation, max_length=max_length, sequences=sequences)
    weights, denominator = weights.astype(logp.dtype), denominator.astype(logp.dtype)

    log_ratio = _bounded(logp - old_logp)
    if kind == "gspo":
        # Every token has its sequence's mean log-ratio as value and its own log-prob as gradient.
        mean = fixed(_sequence_mean(logp - old_logp, mask, sequences))
        log_ratio = _bounded(mean + (logp - fixed(logp)))
    ratio, bounds = jnp.exp(log_ratio), (clip_low, clip_high, dual_clip)
    if is_own(kind):  # a user's loss may be infinite at masked positions
        loss = jnp.where(mask, _own_loss(kind, logp, ratio, advantages), 0.0)
    else:
        loss = _token_loss(kind, logp, ratio, advantages, *bounds)
    metrics = {name: _mean(flag, mask) for name, flag in clip_flags(kind, ratio, advantages, *bounds).items()}
    metrics |= {"ratio": _mean(ratio, mask), "approx_kl": _mean(kl_estimate(old_logp, logp), mask)}
    if sampler_logp is not None:
        gap = old_logp - clean(fixed(sampler_logp))
        loss, corrections = _correct_for_sampler(loss, gap, mask, sequences, is_cap, mask_ratio)
        metrics |= corrections
    metrics["policy_loss"] = Mean(jnp.sum(weights * loss), denominator)
    if ref_logp is not None:
        divergence = kl_estimate(logp, clean(fixed(ref_logp)), kl)
        loss = loss + (kl_coef if _is_number(kl_coef) else clean(fixed(kl_coef))) * divergence
        metrics["kl"] = _mean(divergence, mask)
    elif not _is_zero(kl_coef):
        raise ValueError(f"kl_coef {kl_coef} needs ref_logp, the log-probs under the reference policy")
    if entropy is not None:
        loss = loss - entropy_coef * clean(entropy)
        metrics["entropy"] = _mean(clean(entropy), mask)
    elif not _is_zero(entropy_coef):
        raise ValueError(f"entropy_coef {entropy_coef} needs entropy, the entropy at each token")
    return Loss(jnp.sum(weights * loss), denominator, jax.lax.stop_gradient(metrics))


def at_least_float32(x: jax.Array | float) -> jax.Array:
    """The values in float32, or in their own type if it is wider."""
    x = x if hasattr(x, "dtype") else jnp.asarray(x)
    return jnp.asarray(x, precision(x.dtype))


def kl_estimate(logp: Any, ref_logp: Any, kind: KL = "k3", xp: Any = jnp) -> Any:
    """KL(policy || reference) at sampled tokens: k1 -d, k2 d^2 / 2, k3 exp(d) - d - 1; d = ref - logp.

    Beyond d = 20 the exponential is continued linearly, so that value and gradient stay finite. `xp` is the array
    module to compute with.
    """
    if xp is jnp:
        logp, ref_logp = at_least_float32(logp), at_least_float32(ref_logp)
    delta = xp.clip(ref_logp - logp, -LARGEST_GAP, LARGEST_GAP)
    if kind == "k1":
        return -delta
    if kind == "k2":
        return delta**2 / 2
    require(kind == "k3", f"kl estimator {kind!r} is unknown; use 'k1', 'k2' or 'k3'")
    bounded = xp.minimum(delta, LOG_RATIO_LIMIT)
    return xp.expm1(bounded) + xp.exp(bounded) * (delta - bounded) - delta


def aggregation_weights(
    mask: jax.Array,  # [B, T]
    aggregation: Aggregation,
    *,
    max_length: int | None = None,
    sequences: jax.Array | None = None,  # [B, T]
) -> tuple[jax.Array, jax.Array]:
    """(weight of each token [B, T], denominator []); sequences without a valid token are not counted."""
    valid = jnp.asarray(mask, float)  # in 64 bits if JAX has them enabled
    if aggregation == "token_mean":
        return valid, jnp.sum(valid)
    length = _over_sequence(valid, sequences)
    # Every token counts 1 / length of its sequence, so the sum over all tokens is the number of sequences.
    per_sequence = valid / jnp.maximum(length, 1.0)
    count = jnp.round(jnp.sum(per_sequence))
    if aggregation == "sequence_mean_token_mean":
        return per_sequence, count
    return valid / (1 if max_length is None else max_length), count


def check_loss(
    kind: str,
    aggregation: str,
    clip_low: float | jax.Array,
    clip_high: float | jax.Array,
    dual_clip: float | None,
    is_cap: float | None,
    max_length: int | None,
    mask_ratio: tuple[float, float] | None = None,
    **_: Any,  # the other settings of `LossConfig` need no check here
) -> None:
    """Refuse settings that make no sense together; traced bounds cannot be checked and are assumed to be valid."""
    if is_own(kind):
        own_function(kind, "loss")
    elif kind not in (*KINDS, *OBJECTIVES):
        raise ValueError(
            f"loss kind {kind!r} is unknown; use one of {KINDS}, or your own as 'module:function'; for whole sequences "
            f"one of {OBJECTIVES}"
        )
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation {aggregation!r} is unknown; use one of {AGGREGATIONS}")
    holds = lambda value, predicate: isinstance(value, jax.core.Tracer) or np.all(predicate(value))
    if not all(holds(bound, lambda value: value >= 0) for bound in (clip_low, clip_high)):
        raise ValueError(f"clip range ({clip_low}, {clip_high}) must be two numbers, not negative")
    if is_cap is not None and not holds(is_cap, lambda value: value > 0):
        raise ValueError(f"is_cap {is_cap} must be positive, or none")
    if mask_ratio is not None:
        is_low = holds(mask_ratio[0], lambda value: (value > 0) & (value < 1))
        if not (is_low and holds(mask_ratio[1], lambda value: value > 1)):
            raise ValueError(
                f"mask_ratio {mask_ratio} must be a number between 0 and 1 and one above 1, such as 0.5,2, or none"
            )
    if kind == "gspo" and aggregation != "sequence_mean_token_mean":
        raise ValueError(
            f"kind 'gspo' cannot use aggregation {aggregation!r}; set it to 'sequence_mean_token_mean'"
        )
    if dual_clip is not None and kind != "ppo":
        raise ValueError(f"dual_clip belongs to kind 'ppo', not {kind!r}; set it to none")
    if dual_clip is not None and not holds(dual_clip, lambda value: value > 1):
        raise ValueError(f"dual_clip {dual_clip} must be above 1, the ratio of an unchanged policy")
    normed = aggregation == "sequence_mean_token_sum_norm"
    if normed and max_length is None:
        raise ValueError(f"{aggregation!r} divides by max_length: set it, such as to max_new_tokens")
    if not normed and max_length is not None:
        raise ValueError(f"max_length {max_length} is for 'sequence_mean_token_sum_norm': leave it out")
    if normed and not holds(max_length, lambda value: value >= 1):
        raise ValueError(f"max_length {max_length} must be at least 1")


def clip_flags(
    kind: str, ratio: Any, advantages: Any, clip_low: Any, clip_high: Any, dual_clip: float | None
) -> dict[str, Any]:
    """Where each bound acts, {"clip_fraction_low": bools, ...}; for numpy and JAX arrays."""
    low, high = ratio < 1 - clip_low, ratio > 1 + clip_high
    if kind == "pg" or is_own(kind):
        return {}
    if kind == "cispo":
        return {"clip_fraction_low": low, "clip_fraction_high": high}
    flags = {"clip_fraction_low": low & (advantages < 0), "clip_fraction_high": high & (advantages > 0)}
    if dual_clip is not None:
        flags["clip_fraction_dual"] = (advantages < 0) & (ratio > dual_clip)
    return flags


def _token_loss(
    kind: str,
    logp: jax.Array,
    ratio: jax.Array,
    advantages: jax.Array,
    clip_low: float | jax.Array,
    clip_high: float | jax.Array,
    dual_clip: float | None,
) -> jax.Array:
    """The loss of every token, [B, T]."""
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    if kind == "pg":
        return -advantages * logp
    if kind == "cispo":
        return -jax.lax.stop_gradient(clipped) * advantages * logp
    # At a bound, such as 1 with a clip of 0, the derivatives of `max` and `clip` would halve the gradient twice.
    beyond = jnp.where(advantages < 0, ratio < 1 - clip_low, ratio > 1 + clip_high)
    loss = -advantages * jnp.where(beyond, clipped, ratio)
    if dual_clip is None:
        return loss
    return jnp.where(advantages < 0, jnp.minimum(loss, -advantages * dual_clip), loss)


def _own_loss(kind: str, logp: jax.Array, ratio: jax.Array, advantages: jax.Array) -> jax.Array:
    """The loss of every token, by a user's `function(logp, ratio, advantages)`, all [B, T]."""
    loss = call_user_function(own_function(kind, "loss"), f"loss '{kind}'", logp, ratio, advantages)
    is_float = jnp.isdtype(getattr(loss, "dtype", object), "real floating")
    if getattr(loss, "shape", None) != logp.shape or not is_float:
        raise OwnError(
            f"loss '{kind}' returned {in_words(loss)}; return an array {list(logp.shape)}, one loss a token"
        )
    return loss


def _correct_for_sampler(
    loss: jax.Array,  # [B, T]
    gap: jax.Array,  # [B, T], old_logp - sampler_logp
    mask: jax.Array,
    sequences: jax.Array | None,
    is_cap: float | jax.Array | None,
    mask_ratio: tuple[float, float] | None,
) -> tuple[jax.Array, dict[str, Mean]]:
    """The loss [B, T], weighted and masked for the difference between sampler and trainer, and what was done."""
    metrics: dict[str, Mean] = {}
    if is_cap is not None:
        weight = jnp.exp(_bounded(gap))
        importance = jnp.minimum(weight, is_cap)
        loss = loss * importance
        metrics |= {"is_weight": _mean(importance, mask), "is_capped": _mean(weight > is_cap, mask)}
    if mask_ratio is not None:
        mean = _sequence_mean(gap, mask, sequences)
        low, high = ((jnp if isinstance(x, jax.Array) else np).log(x) for x in mask_ratio)
        outside = (mean < low) | (mean > high)
        loss = jnp.where(outside, 0.0, loss)
        metrics["ratio_masked"] = _mean(outside, mask)
    return loss, metrics


def _clean(mask: jax.Array, x: jax.Array | float) -> jax.Array:
    """[B, T]: x at valid tokens, and 0 at others, where NaN times a weight of zero would still be NaN."""
    x = at_least_float32(x)
    return jnp.where(mask, jnp.broadcast_to(x[:, None] if x.ndim == 1 else x, mask.shape), 0.0)


def _bounded(log_ratio: jax.Array) -> jax.Array:
    return jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _sequence_mean(x: jax.Array, mask: jax.Array, sequences: jax.Array | None) -> jax.Array:
    """[B, T]: the mean of x over the valid tokens of each sequence, at all of its tokens; x is 0 at other tokens."""
    length = jnp.maximum(_over_sequence(mask.astype(x.dtype), sequences), 1.0)
    return _over_sequence(jnp.clip(x, -LARGEST_GAP, LARGEST_GAP), sequences) / length


def _over_sequence(x: jax.Array, sequences: jax.Array | None) -> jax.Array:
    """[B, T]: the sum over each sequence, at all of its tokens."""
    if sequences is None:
        return jnp.broadcast_to(jnp.sum(x, axis=1, keepdims=True), x.shape)
    sequences = jnp.asarray(sequences)
    chex.assert_equal_shape([x, sequences])
    return jax.ops.segment_sum(x.reshape(-1), sequences.reshape(-1), x.size)[sequences]


def _mean(x: jax.Array, mask: jax.Array) -> Mean:
    return Mean(jnp.sum(x, where=mask), jnp.sum(mask).astype(jnp.float32))


def _is_number(x: Any) -> bool:
    return x is None or isinstance(x, int | float)  # a Python number has no dtype


def _is_zero(coefficient: float | jax.Array) -> bool:
    return not (isinstance(coefficient, jax.core.Tracer) or np.any(coefficient))
