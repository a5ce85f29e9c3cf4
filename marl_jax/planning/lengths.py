"""How long completions are assumed to be: a share of max_new_tokens with a spread, or as a run has recorded.

0.5                     each is half as long as allowed
mean:0.5,sigma:0.6      lognormal, cut at max_new_tokens; 0.5 is the mean after the cut
"""

import dataclasses
import functools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from marl_jax.errors import UserError


class PlanError(UserError, ValueError):
    """A run needs something that its configuration, its model or its device lacks; the text is one line."""


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Lengths of completions, as shares of the longest that is allowed."""

    mean: float = 0.5
    sigma: float = 0.6  # standard deviation of the logarithm; 0: all are equal. Assumed; a micro run had 0.57
    # {role: recorded lengths in tokens}, used instead of the distribution, and where they were recorded.
    recorded: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    source: str = ""

    def __str__(self) -> str:
        spread = f" on average (lognormal, sigma {self.sigma:g}, cut at the longest)" if self.sigma else ""
        share = f"{self.mean:.0%} of max_new_tokens{spread}"
        return (
            f"as long as those in '{self.source}' ({share} for roles without any)" if self.recorded else share
        )

    def draw(self, role: str, most: int, rng: np.random.Generator) -> int:
        """The length of one completion that may have `most` tokens."""
        if role in self.recorded:
            return int(np.clip(rng.choice(self.recorded[role]), 1, most))
        share = self.mean
        if self.sigma:
            share = min(1.0, math.exp(_location(self.mean, self.sigma) + self.sigma * rng.normal()))
        return max(1, round(share * most))


SPREAD = Lengths()


def read_lengths(text: str) -> Lengths:
    """The lengths of a flag: a number, without spread, or mean:NUMBER,sigma:NUMBER with a sigma of 0.6 by default."""
    try:
        if ":" not in text:
            mean, sigma = float(text), 0.0
        else:
            parts = dict(part.split(":") for part in text.replace(" ", "").split(","))
            mean, sigma = float(parts.pop("mean")), float(parts.pop("sigma", Lengths().sigma))
            if parts:
                raise ValueError
        if not (0 < mean <= 1 and 0 <= sigma <= 3) or (mean == 1 and sigma):
            raise ValueError
    except (ValueError, KeyError):
        raise PlanError(
            f"--completion is '{text}'; it must be a share of max_new_tokens as in 0.5, or mean:0.5,sigma:0.6 with a "
            "mean above 0 and below 1 and a sigma of 0 to 3"
        ) from None
    return Lengths(mean, sigma)


def recorded_lengths(folder: str, otherwise: Lengths) -> Lengths:
    """The lengths of all completions in the episodes of a run's folder, or of a folder of such files."""
    from marl_jax.rollouts import read_episodes

    place = Path(os.path.expanduser(folder))
    place = place / "episodes" if (place / "episodes").is_dir() else place
    files = sorted([*place.glob("*.parquet"), *place.glob("*.jsonl.gz")])
    by_role: dict[str, list[int]] = {}
    for file in (file for file in files if ".rewards." not in file.name):
        try:
            table = read_episodes(file)
        except ValueError as error:
            raise PlanError(f"--lengths: {error}") from None
        for role, count in zip(table.role.tolist(), table.tokens.lengths.tolist()):
            by_role.setdefault(table.roles[role], []).append(count)
    if not by_role:
        raise PlanError(
            f"--lengths is '{folder}', which has no recorded episodes: give the folder of a run, or its episodes/"
        )
    return dataclasses.replace(otherwise, recorded=by_role, source=folder)


@functools.cache
def _location(mean: float, sigma: float) -> float:
    """The location at which a lognormal that is cut at 1 has this mean."""
    normal = lambda x: 0.5 * (1 + math.erf(x / math.sqrt(2)))
    low, high = -30.0, 30.0
    for _ in range(80):
        at = (low + high) / 2
        # E min(X, 1) = exp(at + sigma^2/2) P(Z < -at/sigma - sigma) + P(Z > -at/sigma)
        cut_mean = math.exp(at + sigma**2 / 2) * normal(-at / sigma - sigma) + normal(at / sigma)
        low, high = (at, high) if cut_mean < mean else (low, at)
    return at
