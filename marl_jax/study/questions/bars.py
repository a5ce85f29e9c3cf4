"""The parts of an answer: a sentence, numbers with their intervals and runs, and tables."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from marl_jax.study.intervals import Interval
from marl_jax.study.wording import Table

NOT_RUN = "Not run."
LEVEL = 0.05  # bound of the chance that any of a question's tests is wrong if nothing differs


class Bar(NamedTuple):
    """A number with its interval, and its value in each run."""

    label: str
    value: Interval
    runs: Sequence[float]
    verdict: str = ""
    level: float = 0.0  # the value that it is compared with
    scale: int = 0  # bars with the same number share an axis


@dataclasses.dataclass(frozen=True)
class Finding:
    """The answer of the runs to one question."""

    question: str
    answer: str
    doubt: str  # what would change our mind
    bars: Sequence[Bar] = ()
    unit: str = "points"
    against: str = "zero"  # the name of the bars' levels
    tables: Sequence[Table] = ()

    @property
    def parts(self) -> list["Finding"]:
        """The finding for each axis, with its bars."""
        scales = dict.fromkeys(bar.scale for bar in self.bars)
        return [dataclasses.replace(self, bars=[b for b in self.bars if b.scale == one]) for one in scales]

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the greatest value that is drawn."""
        values = [x for bar in self.bars for x in (*bar.runs, *bar.value, bar.level) if math.isfinite(x)]
        return min(values), max(values)

    def number(self, value: float) -> str:
        """A value as it is shown."""
        return f"{value:+.1f}" if self.unit == "points" else f"{value:.2f}"

    def place(self, value: float) -> float:
        """The position of a value between the ends, as a share; values beyond them are put at an end."""
        low, high = self.ends
        return min(max((value - low) / ((high - low) or 1.0), 0.0), 1.0)
