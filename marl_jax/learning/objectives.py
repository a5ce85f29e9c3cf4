"""Objectives besides policy gradients: SFT, DPO, KTO, and SPPO's square, over sequences and a reference.

    s_i = sum_t (log p(t) - log ref(t)) of row i      L(s_1, .., s_n)      dL/dw = sum_i dL/ds_i sum_t d log p(t)/dw

For any L, this is the gradient of a policy loss whose advantages are -dL/ds_i over the weight of a token of row i in
the mean (`token_share`). So an objective is an advantage per row, computed here in float64 from one more pass of
log-probs (kto: two), and the update stays the same: exact under any packing, with the roles' parts, their Gram matrix
and all interventions. SFT needs no pass: its advantages are weights.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from marl_jax import fields
from marl_jax.fields import NotNegative, Positive, Whole
from marl_jax.learning.losses import OBJECTIVES, LossConfig
from marl_jax.own import OwnError
from marl_jax.table import Table, dense

PASSES = {"dpo": 2, "kto": 4, "sppo": 2}  # passes of log-probs before the update, reference included
NEED_REFERENCE = tuple(PASSES)


@dataclasses.dataclass(frozen=True)
class PreferenceConfig:
    """Which calls an objective learns from, and how; each field names the kinds of `loss.kind` that use it."""

    by: Literal["reward", "grade", "outcome", "advantage"] = "reward"  # the column that values are read from
    above: float | None = None  # sft: only calls with a larger value are used; kto: these are desirable
    best: Whole = 0  # sft: the number of best calls of each group that are used; 0: all
    beta: Positive = 0.1  # dpo, kto, sppo: weight of a log-ratio to the reference
    pairs: Literal["best_worst", "all"] = "best_worst"  # dpo: pairs among a role's calls with the same prompt
    gap: NotNegative = 0.0  # dpo: the values of a pair differ by more than this
    wins: Literal["counted", "given"] = "counted"  # sppo: "given": the values are shares of wins themselves
    desirable: NotNegative = 1.0  # kto: weight of desirable calls
    undesirable: NotNegative = 1.0  # kto: weight of undesirable calls

    def __post_init__(self) -> None:
        fields.check(self)


class Value(NamedTuple):
    """An objective evaluated at log-ratios."""

    loss: float
    slope: np.ndarray  # Float[n], dL/ds_i
    metrics: dict[str, float]


# ---------------------------------------------------------------- the formulas


def dpo(scores: np.ndarray, pairs: np.ndarray, beta: float, weight: np.ndarray) -> Value:
    """mean over pairs (a better than b) of -log sigmoid(beta (s_a - s_b)), arXiv 2305.18290 (7).

    The weight of a pair is the product of its rows' weights.
    """
    scores = np.asarray(scores, np.float64)
    better, worse = pairs[:, 0], pairs[:, 1]
    pair_weight = weight[better] * weight[worse]
    margin = beta * (scores[better] - scores[worse])
    pull = -beta * pair_weight * sigmoid(-margin) / len(pairs)
    slope = np.zeros(len(scores))
    np.add.at(slope, better, pull)
    np.add.at(slope, worse, -pull)
    loss = float(np.sum(pair_weight * np.logaddexp(0, -margin))) / len(pairs)
    return Value(loss, slope, {"margin": float(margin.mean()), "preferred": float(np.mean(margin > 0))})


def kto(
    scores: np.ndarray, desirable: np.ndarray, divergence: float, beta: float, weight: np.ndarray
) -> Value:
    """mean of w_i (1 - sigmoid(+-beta (s_i - z))), with - for undesirable rows, arXiv 2402.01306 (8).

    `divergence` is z, an estimate of KL(policy || reference) that carries no gradient.
    """
    scores = np.asarray(scores, np.float64)
    sign = np.where(desirable, 1.0, -1.0)
    value = sigmoid(sign * beta * (scores - divergence))
    slope = -sign * beta * weight * value * (1 - value) / len(scores)
    loss = float(np.mean(weight * (1 - value)))
    return Value(loss, slope, {"desirable_share": float(np.mean(desirable)), "divergence": float(divergence)})


def sppo(scores: np.ndarray, wins: np.ndarray, beta: float, weight: np.ndarray) -> Value:
    """mean of (s_i - (P_i - 1/2) / beta)^2, where P_i is how often row i wins, arXiv 2405.00675 (4)."""
    scores = np.asarray(scores, np.float64)
    error = scores - (wins - 0.5) / beta
    loss = float(np.mean(weight * error**2))
    return Value(loss, 2 * weight * error / len(scores), {"off_target": float(np.mean(np.abs(error)))})


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    return 0.5 * (1 + np.tanh(np.asarray(x, np.float64) / 2))


# ---------------------------------------------------------------- rows and pairs to learn from


def contrasts(values: np.ndarray, groups: np.ndarray, pairing: str, gap: float) -> tuple[np.ndarray, int]:
    """(Int[P, 2] pairs of a group's rows, better one first, that differ by more than `gap`; number of groups without).

    "best_worst" is one pair per group, the first of equal rows; "all" is every pair.
    """
    pairs: list[tuple[int, int]] = []
    without = 0
    for rows in _ranked(values, groups):
        if pairing == "best_worst" and len(rows):
            rows = rows[[0, int(np.argmax(values[rows] == values[rows[-1]]))]]
        candidates = itertools.combinations(rows.tolist(), 2)
        wide_pairs = [pair for pair in candidates if values[pair[0]] - values[pair[1]] > gap]
        pairs += wide_pairs
        without += not wide_pairs
    return np.array(pairs, np.int64).reshape(-1, 2), without


def win_share(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Float[n]: the share of the other rows of its group that a row beats; a tie counts half, a row alone gets 1/2.

    Rows whose value is NaN get 1/2, and do not count for other rows.
    """
    share = np.full(len(values), 0.5)
    for rows in _ranked(values, groups):
        if len(rows) > 1:
            scores = values[rows]
            beats = (scores[:, None] > scores).sum(1) + 0.5 * ((scores[:, None] == scores).sum(1) - 1)
            share[rows] = beats / (len(rows) - 1)
    return share


def _ranked(values: np.ndarray, groups: np.ndarray) -> Iterator[np.ndarray]:
    """For each group, its rows that have a value: the best first, equal ones in their order."""
    for group in np.unique(groups):
        rows = np.flatnonzero((groups == group) & ~np.isnan(values))
        yield rows[np.argsort(-values[rows], kind="stable")]


def same_prompt(rows: Table) -> np.ndarray:
    """Int[n]: equal for calls of one role with the same prompt; only these may be a pair."""
    return dense((role, rows.prompt[i].tobytes()) for i, role in enumerate(rows.role.tolist()))


def mismatched(rows: Table, longest: int) -> Table:
    """Each row with another prompt of its role: the mismatched pairs on which KTO estimates its divergence.

    If a role has a single prompt, its rows keep it, see `has_other_prompt`; so do rows that would have more than
    `longest` inputs.
    """
    prompts = same_prompt(rows)
    first_rows = np.unique(prompts, return_index=True)[1]
    new_prompt = np.empty(len(rows), np.int64)
    for role in np.unique(rows.role):
        of_role = [k for k in range(len(first_rows)) if rows.role[first_rows[k]] == role]
        for k, following in zip(of_role, of_role[1:] + of_role[:1]):
            new_prompt[prompts == k] = first_rows[following]
    too_long = rows.prompt.lengths[new_prompt] + rows.length - 1 > longest
    new_prompt[too_long] = np.flatnonzero(too_long)
    return rows.replace(prompt=rows.prompt.take(new_prompt), kept=None)


def has_other_prompt(rows: Table, other: Table) -> np.ndarray:
    """Bool[n]: the rows whose prompt in `other`, from `mismatched`, is another one."""
    return np.array([not np.array_equal(rows.prompt[i], other.prompt[i]) for i in range(len(rows))], bool)


# ---------------------------------------------------------------- for the learner


@dataclasses.dataclass(frozen=True)
class Aim:
    """What an objective learns from the rows of one policy, before any log-probs are known."""

    kind: str  # one of OBJECTIVES
    beta: float  # weight of a log-ratio to the reference
    rows: np.ndarray  # Int[n], the rows that it learns from, as indices into `subset`
    weight: np.ndarray  # Float[n]
    counts: dict[str, float]  # for the report
    target: np.ndarray | None = None  # kto: Bool[n] desirable; sppo: Float[n] share of wins
    pairs: np.ndarray | None = None  # dpo: Int[P, 2] into the n rows
    together: np.ndarray | None = None  # dpo: Int[n], rows with equal numbers must be in one mini-batch
    missing: str = ""  # why it has nothing to learn, and how to change that

    def value(self, members: np.ndarray, scores: np.ndarray, divergence: float) -> Value:
        """The objective restricted to these rows."""
        weight = self.weight[members]
        if self.kind == "dpo":
            assert self.pairs is not None
            index_of = np.full(len(self.rows), -1)
            index_of[members] = np.arange(len(members))
            pairs = index_of[self.pairs]
            return dpo(scores, pairs[(pairs >= 0).all(1)], self.beta, weight)
        assert self.target is not None
        if self.kind == "kto":
            return kto(scores, self.target[members], divergence, self.beta, weight)
        return sppo(scores, self.target[members], self.beta, weight)


def aim(kind: str, rows: Table, config: PreferenceConfig, subset: np.ndarray | None = None) -> Aim:
    """What the objective learns from the rows `subset` (default: all); unusable rows are counted and left out.

    But for dpo, rows are ranked among all rows of their group, because it may contain calls of several policies.
    """
    subset = np.arange(len(rows)) if subset is None else subset
    column = getattr(rows, config.by)
    if column is None:
        raise ValueError(f"preference.by is {config.by!r}, and the table has no such column: add it first")
    values = np.asarray(column, np.float64)
    weight = np.ones(len(rows)) if rows.weight is None else np.asarray(rows.weight, np.float64)
    if kind == "dpo":
        return _aim_of_pairs(rows.take(subset), values[subset], weight[subset], config)
    groups = lambda: same_prompt(rows) if rows.group is None else np.asarray(rows.group)
    chosen = (weight > 0) & ~np.isnan(values)
    target: np.ndarray | None = None
    calls = f"none of its {len(subset)} calls"
    # What is missing is the condition that removed the last calls: a later one is named only if calls were left.
    missing = f"{calls} has a weight above 0 and a {config.by}: set weights, or preference.by"
    if kind == "sft":
        if config.above is not None:
            if chosen[subset].any():
                missing = f"{calls} has a {config.by} above {config.above}: lower learner.preference.above"
            chosen &= values > config.above
        if config.best:
            if chosen[subset].any():
                missing = f"{calls} is among the best of its group: raise learner.preference.best"
            ranked = _ranked(np.where(chosen, values, np.nan), groups())
            best = [row for rows_of_group in ranked for row in rows_of_group[: config.best]]
            chosen = np.isin(np.arange(len(rows)), best)
    elif kind == "kto":
        assert config.above is not None
        target = values > config.above
        weight = weight * np.where(target, config.desirable, config.undesirable)
    elif config.wins == "given":
        target = values
        if (invalid := values[chosen & ((values < 0) | (values > 1))]).size:
            raise OwnError(
                f"preference.wins is 'given', and a {config.by} is {invalid[0]:g}, which is not a share of wins: "
                "give shares from 0 to 1, or set preference.wins to counted"
            )
    else:
        target = win_share(np.where(chosen, values, np.nan), groups())
    used = np.flatnonzero(chosen[subset])
    counts = {"chosen": float(len(used)), "left_out": float(len(subset) - len(used))}
    target = None if target is None else target[subset[used]]
    return Aim(kind, config.beta, used, weight[subset[used]], counts, target, missing=missing)


def _aim_of_pairs(rows: Table, values: np.ndarray, weight: np.ndarray, config: PreferenceConfig) -> Aim:
    """The pairs of these rows that dpo learns from."""
    prompts = same_prompt(rows)
    pairs, without = contrasts(np.where(weight > 0, values, np.nan), prompts, config.pairs, config.gap)
    used, positions = np.unique(pairs, return_inverse=True)
    counts = {"pairs": float(len(pairs)), "without_contrast": float(without)}
    why = (
        f"none of its {without} prompts has two calls whose {config.by} differs by more than {config.gap:g}: "
        "raise rollout.samples, or lower learner.preference.gap"
    )
    positions = positions.reshape(-1, 2)
    return Aim("dpo", config.beta, used, weight[used], counts, None, positions, prompts[used], why)


def means(values: Sequence[Value]) -> dict[str, float]:
    """Mean loss and metrics over the mini-batches; empty if there are none."""
    numbers = [{**value.metrics, "loss": value.loss} for value in values]
    return {name: float(np.mean([n[name] for n in numbers])) for name in (numbers[0] if numbers else ())}


def surrogate(loss: LossConfig) -> LossConfig:
    """The policy gradient loss with the objective's gradient, if the advantages are its slopes over `token_share`."""
    return dataclasses.replace(loss, kind="pg") if loss.kind in OBJECTIVES else loss


def token_share(loss: LossConfig, lengths: np.ndarray) -> np.ndarray:  # int[n] -> Float64[n]
    """The weight of a token of each sequence in the loss over sequences of these lengths."""
    sequences, tokens = len(lengths), lengths.sum()
    match loss.aggregation:
        case "token_mean":
            return np.full(sequences, 1 / tokens)
        case "sequence_mean_token_mean":
            return 1 / (sequences * lengths)
    return np.full(sequences, 1 / (sequences * (loss.max_length or 1)))


def log_ratios(logp: Sequence[np.ndarray], ref: Sequence[np.ndarray], rows: Table) -> np.ndarray:
    """Float64[n]: s_i, summed over the tokens that count."""
    counted = map(rows.counted, range(len(rows)))
    sums = [
        math.fsum((np.asarray(policy, np.float64) - reference)[mask].tolist())
        for policy, reference, mask in zip(logp, ref, counted, strict=True)
    ]
    return np.array(sums)
