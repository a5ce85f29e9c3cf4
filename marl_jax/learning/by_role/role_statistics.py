"""Statistics of each role's tokens: differences between trainer and sampler, and signs of capture."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from marl_jax.learning.losses import LOG_RATIO_LIMIT, LossConfig, clip_flags, kl_estimate
from marl_jax.table import Table

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


@dataclasses.dataclass
class Evidence:
    """Numbers about the tokens of each trained row, one array per row; None for rows that were not trained on."""

    logp: list[Any]  # under the weights at which the row's last gradient was taken
    entropy: list[Any]  # under the same weights
    old_logp: list[Any]  # the log-probs that the ratio is taken against
    ref_logp: list[Any]  # under the reference
    trainer_logp: list[Any]  # under the weights before the step; None where unknown

    @classmethod
    def empty(cls, rows: int) -> "Evidence":
        """Columns of `rows` rows, all None."""
        return cls(*([None] * rows for _ in dataclasses.fields(cls)))

    def write(self, name: str, rows: Iterable[int], values: Iterable[Any]) -> None:
        """Write the values of these rows into a column."""
        column = getattr(self, name)
        for row, value in zip(rows, values, strict=True):
            column[row] = value


def row_statistics(rows: Table) -> dict[str, float]:
    """Statistics of the rows of one role, including rows that are not trained on (masked or frozen)."""
    stats = {
        "rows": len(rows),
        "reward": np.mean(rows.reward),
        "advantage_mean": rows.advantage.mean(),
        "advantage_std": rows.advantage.std(),
        "advantage_zero_share": np.mean(rows.advantage == 0),
        "length": np.mean(rows.length),
        "truncated_share": np.mean(rows.truncated),
        "unreadable_share": np.mean(~rows.readable),
    }
    if rows.penalty is not None:
        stats["overlong_penalty"] = np.mean(rows.penalty)
    return {name: float(value) for name, value in stats.items()}


def role_statistics(
    rows: Table, trained: Sequence[int], evidence: Evidence, loss: LossConfig, corrected: bool
) -> dict[str, float]:
    """Statistics of the rows `trained` of one role, each at the last update with it.

    Means are over tokens unless named otherwise. `corrected`: the loss corrects for differences between sampler and
    trainer.
    """

    def of_rows(column: Any) -> list[Any]:
        """The values of these rows, of the tokens that count in the loss."""
        values = [column[i] for i in trained]
        if rows.spoken is None:  # all count: thousands of rows are not copied
            return values
        return [x if x is None else np.asarray(x)[rows.spoken[i]] for x, i in zip(values, trained)]

    joined = lambda column: np.concatenate(of_rows(column)).astype(np.float64)
    new, old, entropy = map(joined, (evidence.logp, evidence.old_logp, evidence.entropy))
    tokens = [len(values) for values in of_rows(evidence.logp)]
    by_token = lambda column: np.repeat(column[trained], tokens)
    row_means = lambda values: [row.mean() for row in np.split(values, np.cumsum(tokens)[:-1])]
    bounded = lambda gap: np.clip(gap, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    log_ratio = new - old
    if loss.kind == "gspo":  # every token has its sequence's mean
        log_ratio = np.repeat(row_means(log_ratio), tokens)
    ratio = np.exp(bounded(log_ratio))
    low, high = (
        getattr(loss, name) if getattr(rows, name) is None else by_token(getattr(rows, name))
        for name in ("clip_low", "clip_high")
    )
    advantages = rows.advantage if rows.weight is None else rows.advantage * rows.weight
    flags = clip_flags(loss.kind, ratio, by_token(advantages), low, high, loss.dual_clip)
    stats = {
        "tokens": float(len(new)),
        "perplexity": np.exp(min(-new.mean(), 700.0)),  # a larger power may overflow float64
        "entropy": entropy.mean(),
        "ratio_mean": ratio.mean(),
        "approx_kl": np.mean(kl_estimate(old, new, xp=np)),
        **{f"ratio_{name}": np.quantile(ratio, q) for name, q in QUANTILES.items()},
        **{name: flag.mean() for name, flag in flags.items()},
    }
    sampler = [values.astype(np.float64) for values in of_rows(rows.logprobs)]
    distance = old - np.concatenate(sampler)
    if corrected and loss.mask_ratio is not None:
        low, high = np.log(loss.mask_ratio)
        outside = [not low <= mean <= high for mean in row_means(distance)]
        stats["ratio_masked"] = np.average(outside, weights=tokens)
    if corrected and loss.is_cap is not None:
        weight = np.exp(bounded(distance))
        stats["is_weight"] = np.minimum(weight, loss.is_cap).mean()
        stats["is_capped"] = np.mean(weight > loss.is_cap)
    pairs = zip(of_rows(evidence.trainer_logp), sampler)
    gaps = [trainer - values for trainer, values in pairs if trainer is not None]
    if gaps:
        signed = np.concatenate(gaps)  # trainer - sampler
        gap = np.abs(signed)
        stats |= {
            # E_sampler[(p / q)^2] - 1, the chi-squared divergence of the trainer from the sampler
            "chi2": np.mean(np.exp(2 * np.clip(signed, -20, 20))) - 1,
            "ppl_ratio": np.exp(-signed.mean()),
            "gap_mean": gap.mean(),
            **{f"gap_{name}": np.quantile(gap, q) for name, q in QUANTILES.items() if q >= 0.5},
            "gap_max": gap.max(),
        }
    if all(evidence.ref_logp[i] is not None for i in trained):
        divergence = kl_estimate(new, joined(evidence.ref_logp), xp=np)
        stats |= {"kl": divergence.mean(), "kl_max": divergence.max()}
    return {name: float(value) for name, value in stats.items()}


def form_drift(now: Mapping[str, float], base: Mapping[str, float]) -> dict[str, float]:
    """How far the form of a role's output has moved from its start: the first sign of capture."""
    return {
        "length_ratio": now["length"] / max(base["length"], 1e-9),
        "truncated_change": now["truncated_share"] - base["truncated_share"],
        "unreadable_change": now["unreadable_share"] - base["unreadable_share"],
    }
