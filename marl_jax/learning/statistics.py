"""What each role's tokens say about it: how far trainer and sampler are apart, and the signs of capture."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

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
    return {name: float(value) for name, value in stats.items()}


def role_statistics(
    rows: Sequence[Row],
    logp: Sequence[np.ndarray],  # per row, under the policy as it was when its gradient was taken
    old_logp: Sequence[np.ndarray],  # per row, what the ratio is taken against
    entropy: Sequence[np.ndarray],
    ref_logp: Sequence[np.ndarray] | None = None,
    trainer_logp: Sequence[np.ndarray | None]
    | None = None,  # before the step, where known; default: old_logp
) -> dict[str, float]:
    """Numbers for rows of one role that were trained on; means over tokens unless the name says otherwise."""
    new, old, bits = (np.concatenate(x).astype(np.float64) for x in (logp, old_logp, entropy))
    ratio = np.exp(np.clip(new - old, -20, 20))
    stats = row_statistics(rows) | {
        "tokens": float(len(new)),
        "perplexity": np.exp(min(-new.mean(), 700.0)),  # the largest power that float64 holds
        "entropy": bits.mean(),
        "ratio_mean": ratio.mean(),
        **{f"ratio_{name}": np.quantile(ratio, q) for name, q in QUANTILES.items()},
    }
    before = old_logp if trainer_logp is None else trainer_logp
    apart = [own - np.asarray(row.logprobs, np.float64) for row, own in zip(rows, before) if own is not None]
    if apart:
        signed = np.concatenate(apart)  # trainer - sampler
        gap = np.abs(signed)
        stats |= {
            # E_sampler[(p / q)^2] - 1, the chi-squared divergence of the trainer from the sampler
            "chi2": np.mean(np.exp(2 * np.clip(signed, -20, 20))) - 1,
            "gap_mean": gap.mean(),
            **{f"gap_{name}": np.quantile(gap, q) for name, q in QUANTILES.items() if q >= 0.5},
            "gap_max": gap.max(),
        }
    if ref_logp is not None:
        delta = np.clip(np.concatenate(ref_logp) - new, -20, 20)
        stats["kl"] = np.mean(np.expm1(delta) - delta)
    return {name: float(value) for name, value in stats.items()}


def form_drift(now: Mapping[str, float], base: Mapping[str, float]) -> dict[str, float]:
    """How far a role's output has moved from the base model's in form: the first sign that it was captured."""
    return {
        "length_ratio": now["length"] / max(base["length"], 1e-9),
        "truncated_change": now["truncated_share"] - base["truncated_share"],
        "unreadable_change": now["unreadable_share"] - base["unreadable_share"],
    }
