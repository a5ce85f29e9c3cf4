"""An answer as it is shown: a sentence, numbers with their intervals and runs, and tables."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from marl_jax.study.intervals import Interval
from marl_jax.study.wording import Table

NOT_RUN = "Not run."
LEVEL = 0.05  # of the chance that any of a question's tests is wrong where nothing differs


class Bar(NamedTuple):
    """A number with its interval, and its value in each run."""

    label: str
    value: Interval
    runs: Sequence[float]
    verdict: str = ""
    level: float = 0.0  # what it is to be compared with


@dataclasses.dataclass(frozen=True)
class Finding:
    """What the runs say of one question."""

    question: str
    answer: str
    doubt: str  # what would change our mind
    bars: Sequence[Bar] = ()
    unit: str = "points"
    against: str = "zero"  # what the level of each bar is
    tables: Sequence[Table] = ()

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the greatest of all that is drawn."""
        values = [x for bar in self.bars for x in (*bar.runs, *bar.value, bar.level) if math.isfinite(x)]
        return min(values), max(values)

    def number(self, value: float) -> str:
        """As it is shown."""
        return f"{value:+.1f}" if self.unit == "points" else f"{value:.2f}"

    def place(self, value: float) -> float:
        """Of a value between the ends, as a share; what lies beyond them is at an end."""
        low, high = self.ends
        return min(max((value - low) / ((high - low) or 1.0), 0.0), 1.0)
