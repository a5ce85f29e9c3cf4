"""How sure an accuracy is: intervals over problems, over problems and seeds, and pass@k.

Samples of one problem are not independent, so the unit that is resampled is the problem. Two checkpoints that
answered the same problems are compared problem by problem, which takes out how hard the problems are. Where all
problems agree there is nothing to resample: Wilson's bound says how many others there may be that do not.

A few seeds are too few to resample; runs of several seeds that answered the same problems get the t interval of a
two-way layout, in which seeds and problems are both drawn at random.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

Array = np.ndarray
LEVEL = 0.95  # of every interval
DRAWS, AT_ONCE = 10_000, 1000  # resamples of a bootstrap, and how many lie in memory at a time
Z2 = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2) ** 2


class Interval(NamedTuple):
    """A mean, and the bounds that hold it at the level."""

    mean: float  # the estimate
    low: float  # lower end of the interval
    high: float  # upper end

    @property
    def excludes_zero(self) -> bool:
        """Whether all of it lies on one side of 0."""
        return self.low > 0 or self.high < 0


def wilson(right: int, count: int) -> Interval:
    """Wilson's score interval of a share of independent trials; (0, 1) where there are none."""
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
    values: Array,  # [P] or [P, k]: of each problem, or of each of its k samples
    *,
    bounds: tuple[float, float] = (0.0, 1.0),  # of any value
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
    base: Array,  # [P] or [P, j], of the same problems in the same order
) -> Interval:
    """Of the mean difference to `base`, problem by problem."""
    values, base = _per_problem(values), _per_problem(base)
    if len(values) != len(base):
        raise ValueError(f"{len(values)} problems cannot be paired with {len(base)}: evaluate the same ones")
    return bootstrap(values - base, bounds=(-1.0, 1.0))


def over_seeds(
    values: Array,  # [S, P]: of each run, of each problem
    *,
    bounds: tuple[float, float] = (0.0, 1.0),  # of any value
) -> Interval:
    """Of the mean over seeds and problems, both drawn at random.

    With mean squares of seeds A, of problems B and of what is left E, the variance of the mean is (A + B - E) / SP,
    with degrees of freedom by Satterthwaite. Where chance makes it less than one of the three alone gives, that one
    counts. Of one seed, or where all values agree, it is the bootstrap over problems; of one problem, that over seeds.
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
    """The t interval of the mean of one number per run; without ends where there is one run."""
    array = np.asarray(values, np.float64)
    mean, count = float(array.mean()), len(array)
    if count < 2:
        return Interval(mean, -math.inf, math.inf)
    half = float(special.stdtrit(count - 1, (1 + LEVEL) / 2) * array.std(ddof=1) / math.sqrt(count))
    return Interval(mean, mean - half, mean + half)


def p_value(values: Array) -> float | None:  # [S, P]
    """Two-sided, of a mean of zero, for claims: the larger p of two t tests.

    One is that which the interval of `over_seeds` inverts, the other that over the means of the seeds. Of few seeds
    that differ, chance often makes the first count problems in the place of seeds, and then it is wrong several times
    as often as it says; the second knows nothing of problems. None for fewer than two seeds or problems, or where all
    values are zero: there is nothing to test by.

    Where all values agree, neither has a variance. One is then that of Wilson's bound over the problems, as the
    interval has it, and the other takes one value for zero, as the next one might be: its t is SP - 1.
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
    """Each corrected for all of them: the chance that any is called too early stays at the level they are held to."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    held, floor = [0.0] * len(p_values), 0.0
    for place, i in enumerate(order):
        floor = max(floor, min(1.0, (len(order) - place) * p_values[i]))
        held[i] = floor
    return held


def _two_way(values: Array) -> tuple[float, float]:
    """The mean square that the variance of the mean of [S, P] rests on, and its degrees of freedom."""
    seeds, problems = values.shape
    mean, by_seed, by_problem = values.mean(), values.mean(axis=1), values.mean(axis=0)
    left = values - by_seed[:, None] - by_problem + mean
    sums = (
        problems * np.sum((by_seed - mean) ** 2),
        seeds * np.sum((by_problem - mean) ** 2),
        np.sum(left**2),
    )
    free = np.array([seeds - 1, problems - 1, (seeds - 1) * (problems - 1)])
    a, b, e = squares = sums / free
    both = a + b - e
    candidates = [(both, both**2 / np.sum(squares**2 / free)), *zip(squares, free)]
    largest = max(candidates)[0]
    return largest, min(freedom for square, freedom in candidates if not square < largest * (1 - 1e-12))


def pass_at_k(
    correct: Array,  # Bool[P, n]: whether each of n samples was right; Float[P, n]: which share of its paths was
    k: int,
) -> Array:
    """Float[P]: 1 - C(n - c, k) / C(n, k), the unbiased chance that one of k samples is right (c of n were).

    Of shares, the chance that one of k samples is right where a path of each is drawn.
    """
    correct = np.asarray(correct)
    if correct.ndim != 2 or not 1 <= k <= correct.shape[1]:
        raise ValueError(f"pass@{k} needs at least {k} samples of each problem, the shape is {correct.shape}")
    n = correct.shape[1]
    if correct.dtype.kind == "f":
        # [:, j]: sums over the sets of j samples, of the chance that all of a set are wrong.
        wrong = np.eye(1, k + 1).repeat(len(correct), axis=0)
        for share in correct.T:
            wrong[:, 1:] += wrong[:, :-1] * (1 - share[:, None])
        return 1 - wrong[:, k] / math.comb(n, k)
    correct = correct.astype(bool)
    of = [1 - math.comb(n - c, k) / math.comb(n, k) for c in range(n + 1)]
    return np.array(of)[correct.sum(axis=1)]


def _agreed(value: float, count: int, bounds: tuple[float, float]) -> Interval:
    """Of a mean over problems that all had this value: Wilson's share of others may lie anywhere in the bounds.

    Where the value is a bound itself this is Wilson's interval: of 10 problems that are all right, 0.72 to 1.
    """
    others = wilson(0, count).high
    low, high = ((1 - others) * value + others * bound for bound in bounds)
    return Interval(value, low, high)


def _per_problem(values: Array) -> Array:
    values = np.asarray(values, np.float64)
    if values.ndim not in (1, 2) or not values.size:
        raise ValueError(f"values have the shape {values.shape}; [problems] or [problems, samples] is needed")
    return values if values.ndim == 1 else values.mean(axis=1)
