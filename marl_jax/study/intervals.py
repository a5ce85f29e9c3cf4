"""The uncertainty of accuracies: intervals over problems, over problems and seeds, and pass@k.

Samples of one problem are not independent, so problems are resampled, not samples. Two checkpoints that answered the
same problems are compared problem by problem, which removes the variance between hard and easy problems. If all
problems agree, there is nothing to resample: Wilson's bound limits the share of other problems that do not.

A few seeds are too few to resample; runs of several seeds that answered the same problems get the t interval of a
two-way layout, in which seeds and problems are both random effects.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

Array = np.ndarray
LEVEL = 0.95  # the confidence of every interval
DRAWS, AT_ONCE = 10_000, 1000  # resamples of a bootstrap, and how many are in memory at a time
Z2 = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2) ** 2


class Interval(NamedTuple):
    """A mean and its confidence bounds at LEVEL."""

    mean: float  # the estimate
    low: float  # lower end of the interval
    high: float  # upper end

    @property
    def excludes_zero(self) -> bool:
        """Whether 0 is outside of it."""
        return self.low > 0 or self.high < 0


def wilson(right: int, count: int) -> Interval:
    """Wilson's score interval of a share of independent trials; (0, 1) without trials."""
    if not 0 <= right <= count:
        raise ValueError(f"{right} of {count} cannot be right: the first must lie in 0..{count}")
    if count == 0:
        return Interval(math.nan, 0.0, 1.0)
    share = right / count
    centre = (share + Z2 / (2 * count)) / (1 + Z2 / count)
    half = math.sqrt(Z2 * (share * (1 - share) / count + Z2 / (4 * count**2))) / (1 + Z2 / count)
    low = 0.0 if right == 0 else centre - half
    high = 1.0 if right == count else centre + half
    return Interval(share, low, high)


def bootstrap(
    values: Array,  # [P] or [P, k]: a value for each problem, or for each of its k samples
    *,
    bounds: tuple[float, float] = (0.0, 1.0),  # least and greatest possible value
) -> Interval:
    """Percentile bootstrap of the mean over problems; a pure function of its arguments."""
    values = _per_problem(values)
    if np.ptp(values) < 1e-9:
        return _agreed(float(values.mean()), len(values), bounds)
    rng = np.random.default_rng(0)
    count, means = len(values), []
    for _ in range(DRAWS // AT_ONCE):
        drawn = rng.integers(count, size=(AT_ONCE, count))
        means.append(values[drawn].mean(axis=1))
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return Interval(float(values.mean()), float(low), float(high))


def paired_bootstrap(
    values: Array,  # [P] or [P, k]
    base: Array,  # [P] or [P, j], for the same problems in the same order
) -> Interval:
    """Percentile bootstrap of the mean difference to `base`, problem by problem."""
    values, base = _per_problem(values), _per_problem(base)
    if len(values) != len(base):
        raise ValueError(f"{len(values)} problems cannot be paired with {len(base)}: evaluate the same ones")
    return bootstrap(values - base, bounds=(-1.0, 1.0))


def over_seeds(
    values: Array,  # [S, P]: a value for each run and problem
    *,
    bounds: tuple[float, float] = (0.0, 1.0),  # least and greatest possible value
) -> Interval:
    """The t interval of the mean over seeds and problems, both random effects.

    With mean squares A of seeds, B of problems and E of the residuals, the variance of the mean is (A + B - E) / SP,
    with Satterthwaite's degrees of freedom. If chance makes it less than one of the three alone gives, that one is
    used. One seed, or equal values, give the bootstrap over problems; one problem gives the bootstrap over seeds.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 2 or not values.size:
        raise ValueError(f"values have the shape {values.shape}; [seeds, problems] is needed")
    seeds, problems = values.shape
    if min(seeds, problems) == 1 or np.ptp(values) < 1e-9:
        return bootstrap(values.mean(axis=1 if problems == 1 else 0), bounds=bounds)
    mean, (square, freedom) = values.mean(), _two_way(values)
    half = special.stdtrit(freedom, (1 + LEVEL) / 2) * math.sqrt(square / values.size)
    low, high = bounds
    return Interval(float(mean), max(low, float(mean - half)), min(high, float(mean + half)))


def over_runs(values: Sequence[float] | Array) -> Interval:
    """The t interval of the mean of one number per run; infinite for one run."""
    array = np.asarray(values, np.float64)
    mean, count = float(array.mean()), len(array)
    if count < 2:
        return Interval(mean, -math.inf, math.inf)
    half = float(special.stdtrit(count - 1, (1 + LEVEL) / 2) * array.std(ddof=1) / math.sqrt(count))
    return Interval(mean, mean - half, mean + half)


def p_value(values: Array) -> float | None:  # [S, P]
    """Two-sided p of a zero mean, for claims: the larger p of two t tests.

    The first is the test that the interval of `over_seeds` inverts, the second tests the means of the seeds. With few
    seeds that differ, chance often gives the first the degrees of freedom of problems instead of seeds, and it is then
    wrong several times as often as its p says; the second ignores problems. None for fewer than two seeds or problems,
    or if all values are zero: there is nothing to test then.

    If all values are equal, neither test has a variance. The first then uses Wilson's bound over the problems, as the
    interval does, and the second counts one value as zero, as the next one might be: its t is SP - 1.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 2 or min(values.shape) < 2 or not np.any(abs(values) >= 1e-9):
        return None
    seeds, problems = values.shape
    if np.ptp(values) < 1e-9:
        of_problems = special.ndtr(-math.sqrt(problems * abs(float(values.mean()))))
        return float(2 * max(of_problems, special.stdtr(seeds - 1, 1 - values.size)))
    of_seeds = max(problems * float(values.mean(axis=1).var(ddof=1)), 1e-12), seeds - 1
    mean = abs(float(values.mean()))
    tails = [
        special.stdtr(free, -mean / math.sqrt(sq / values.size)) for sq, free in (_two_way(values), of_seeds)
    ]
    return float(2 * max(tails))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's corrected p values: if claims are those at most a level, that level bounds the chance of any false one."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected, floor = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        floor = max(floor, min(1.0, (len(order) - rank) * p_values[i]))
        corrected[i] = floor
    return corrected


def _two_way(values: Array) -> tuple[float, float]:
    """The mean square from which the variance of the mean of [S, P] follows, and its degrees of freedom."""
    seeds, problems = values.shape
    mean, by_seed, by_problem = values.mean(), values.mean(axis=1), values.mean(axis=0)
    residuals = values - by_seed[:, None] - by_problem + mean
    sums = (
        problems * np.sum((by_seed - mean) ** 2),
        seeds * np.sum((by_problem - mean) ** 2),
        np.sum(residuals**2),
    )
    freedoms = np.array([seeds - 1, problems - 1, (seeds - 1) * (problems - 1)])
    a, b, e = squares = sums / freedoms
    both = a + b - e
    candidates = [(both, both**2 / np.sum(squares**2 / freedoms)), *zip(squares, freedoms)]
    largest = max(candidates)[0]
    return largest, min(freedom for square, freedom in candidates if not square < largest * (1 - 1e-12))


def pass_at_k(
    correct: Array,  # Bool[P, n]: whether each of n samples was right; Float[P, n]: the share of its right paths
    k: int,
) -> Array:
    """Float[P]: 1 - C(n - c, k) / C(n, k), the unbiased chance that one of k samples is right (c of n were).

    For shares: the chance that one of k samples is right if one path of each is drawn.
    """
    correct = np.asarray(correct)
    if correct.ndim != 2 or not 1 <= k <= correct.shape[1]:
        raise ValueError(f"pass@{k} needs at least {k} samples of each problem, the shape is {correct.shape}")
    n = correct.shape[1]
    if correct.dtype.kind == "f":
        # wrong[:, j]: the sum, over all sets of j samples, of the chance that all samples of the set are wrong.
        wrong = np.eye(1, k + 1).repeat(len(correct), axis=0)
        for share in correct.T:
            wrong[:, 1:] += wrong[:, :-1] * (1 - share[:, None])
        return 1 - wrong[:, k] / math.comb(n, k)
    correct = correct.astype(bool)
    chances = [1 - math.comb(n - c, k) / math.comb(n, k) for c in range(n + 1)]
    return np.array(chances)[correct.sum(axis=1)]


def _agreed(value: float, count: int, bounds: tuple[float, float]) -> Interval:
    """Interval of the mean if all problems had this value: Wilson's share of other problems is at either bound.

    If the value is a bound itself, this is Wilson's interval: 0.72 to 1 for 10 problems that are all right.
    """
    share = wilson(0, count).high
    low, high = ((1 - share) * value + share * bound for bound in bounds)
    return Interval(value, low, high)


def _per_problem(values: Array) -> Array:
    values = np.asarray(values, np.float64)
    if values.ndim not in (1, 2) or not values.size:
        raise ValueError(f"values have the shape {values.shape}; [problems] or [problems, samples] is needed")
    return values if values.ndim == 1 else values.mean(axis=1)
