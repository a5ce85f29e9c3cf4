"""What each role's tokens say about it: how far trainer and sampler are apart, and the signs of capture."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from marl_jax.learning.losses import LOG_RATIO_LIMIT, LossConfig, clip_flags, kl_estimate
from marl_jax.learning.rows import Row

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


@dataclasses.dataclass(frozen=True)
class Seen:
    """A row that was trained on, and what the learner computed of its tokens."""

    row: Row
    logp: np.ndarray  # under the policy as it was when its gradient was taken
    old_logp: np.ndarray  # what the ratio is taken against
    entropy: np.ndarray
    ref_logp: np.ndarray | None
    trainer_logp: np.ndarray | None  # before the step, where known


def last_seen(
    rows: Sequence[Row],
    members: Sequence[Sequence[int]],  # by update: which rows
    found: Sequence[Sequence[Sequence[np.ndarray]]],  # by update: log-probs and entropies of these
    old_logp: Sequence[np.ndarray] | None,  # None: what its only update computed
    ref_logp: Sequence[np.ndarray] | None,
    old_logprobs: Literal["trainer", "sampler"],
) -> list[Seen]:
    """Every row as the last of the updates saw it."""
    logp, entropy = (
        {i: own for some, values in zip(members, found) for i, own in zip(some, values[k])} for k in (0, 1)
    )
    before: Any = logp if old_logp is None else old_logp
    # With the sampler's as the old ones, the trainer's are known of the rows of the first update, which computed them.
    trainer: dict[int, np.ndarray] = {i: before[i] for i in range(len(rows))}
    if old_logprobs == "sampler":
        trainer = dict(zip(members[0], found[0][0]))
    return [
        Seen(row, logp[i], before[i], entropy[i], None if ref_logp is None else ref_logp[i], trainer.get(i))
        for i, row in enumerate(rows)
    ]


def row_statistics(rows: Sequence[Row]) -> dict[str, float]:
    """Numbers for the rows of one role, those that are not trained on (masked or frozen) among them."""
    advantages = np.array([row.advantage for row in rows])
    stats = {
        "rows": len(rows),
        "reward": np.mean([row.reward for row in rows]),
        "advantage_mean": advantages.mean(),
        "advantage_std": advantages.std(),
        "advantage_zero_share": np.mean(advantages == 0),
        "length": np.mean([len(row.tokens) for row in rows]),
        "truncated_share": np.mean([row.truncated for row in rows]),
        "unreadable_share": np.mean([not row.readable for row in rows]),
    }
    if rows[0].penalty is not None:
        stats["overlong_penalty"] = np.mean([row.penalty for row in rows])
    return {name: float(value) for name, value in stats.items()}


def role_statistics(seen: Sequence[Seen], loss: LossConfig, corrected: bool) -> dict[str, float]:
    """Numbers for the trained rows of one role, as the last update saw them; means over tokens unless named otherwise.

    `corrected`: the loss weighs tokens for what the sampler computed otherwise.
    """
    new, old, bits = (
        np.concatenate(x).astype(np.float64)
        for x in ([s.logp for s in seen], [s.old_logp for s in seen], [s.entropy for s in seen])
    )
    apart = [_log_ratio(s, loss) for s in seen]
    ratio = np.exp(np.concatenate(apart))
    advantages = np.concatenate([np.full(len(s.logp), s.row.advantage) for s in seen])
    flags = clip_flags(loss.kind, ratio, advantages, loss.clip_low, loss.clip_high, loss.dual_clip)
    stats = {
        "tokens": float(len(new)),
        "perplexity": np.exp(min(-new.mean(), 700.0)),  # the largest power that float64 holds
        "entropy": bits.mean(),
        "ratio_mean": ratio.mean(),
        "approx_kl": np.mean(kl_estimate(old, new, xp=np)),
        **{f"ratio_{name}": np.quantile(ratio, q) for name, q in QUANTILES.items()},
        **{name: flag.mean() for name, flag in flags.items()},
    }
    sampler = [np.asarray(s.row.logprobs, np.float64) for s in seen]
    if corrected and loss.is_cap is not None:
        weight = np.exp(np.clip(old - np.concatenate(sampler), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        stats |= {
            "is_weight": np.minimum(weight, loss.is_cap).mean(),
            "is_capped": np.mean(weight > loss.is_cap),
        }
    gaps = [s.trainer_logp - own for s, own in zip(seen, sampler) if s.trainer_logp is not None]
    if gaps:
        signed = np.concatenate(gaps)  # trainer - sampler
        gap = np.abs(signed)
        stats |= {
            # E_sampler[(p / q)^2] - 1, the chi-squared divergence of the trainer from the sampler
            "chi2": np.mean(np.exp(2 * np.clip(signed, -20, 20))) - 1,
            "gap_mean": gap.mean(),
            **{f"gap_{name}": np.quantile(gap, q) for name, q in QUANTILES.items() if q >= 0.5},
            "gap_max": gap.max(),
        }
    anchors = [s.ref_logp for s in seen if s.ref_logp is not None]
    if len(anchors) == len(seen):
        stats["kl"] = np.mean(kl_estimate(new, np.concatenate(anchors).astype(np.float64), xp=np))
    return {name: float(value) for name, value in stats.items()}


def _log_ratio(seen: Seen, loss: LossConfig) -> np.ndarray:
    """Of every token, as the loss takes it: bounded, and with gspo its sequence's mean."""
    own = np.clip(seen.logp.astype(np.float64) - seen.old_logp, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return np.full_like(own, own.mean()) if loss.kind == "gspo" else own


def form_drift(now: Mapping[str, float], base: Mapping[str, float]) -> dict[str, float]:
    """How far a role's output has moved in form from what it was: the first sign that it was captured."""
    return {
        "length_ratio": now["length"] / max(base["length"], 1e-9),
        "truncated_change": now["truncated_share"] - base["truncated_share"],
        "unreadable_change": now["unreadable_share"] - base["unreadable_share"],
    }
