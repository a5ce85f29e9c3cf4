"""Seconds that training steps took on this machine, which correct the times of a plan.

    run ──Pace──► home/measured/MACHINE/CELL.json: {counted, seconds, steps}  ──guess──► the next plan

The load of a moment makes steps slower, never faster: the lower quartile of several steps stands for all of them.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marl_jax import fields, user_cache
from marl_jax.config.run_config import RunConfig
from marl_jax.planning.plan import Plan

LEAST, RECENT = 3, 50  # fewest steps that are enough; newest steps that are used
# Cells of similar size that correct the times of another: small steps are mostly work of the host.
NEAREST = 3
# Fields that do not change how long a step takes.
_ASIDE = ("cell", "steps", "seed", "alarms", "evaluation", "checkpoints", "logging")


def quartile(seconds: Sequence[float]) -> float:
    """The lower quartile: of up to four values the smallest."""
    return sorted(seconds)[(len(seconds) - 1) // 4]


class Pace:
    """Times of the steps of a run; the first includes the compilation and does not count."""

    def __init__(self, config: RunConfig, plan: Plan) -> None:
        self._file = _file(config, plan)
        self._about = {"cell": config.cell, "counted": sum((plan.seconds or {}).values())}
        self._seconds: list[float] = []

    def step(self, seconds: float) -> None:
        """Add the time of one step."""
        self._seconds.append(seconds)

    def keep(self) -> None:
        """Store the times for later plans."""
        recent = self._seconds[1:][-RECENT:]
        if len(recent) >= LEAST:
            measured = {"seconds": quartile(recent), "steps": len(recent)}
            user_cache.store(self._file, self._about | measured)


@dataclasses.dataclass(frozen=True)
class Guess:
    """How long a step takes, and how that is known."""

    seconds: float
    how: str
    name: str = "measured"


def guess(config: RunConfig, plan: Plan) -> Guess | None:
    """From steps of this configuration here, else from how far plans of others were off; None if none ran."""
    if measured := _numbers(_file(config, plan)):
        return Guess(measured["seconds"], f"as in {measured['steps']} earlier steps here")
    known = [found for file in sorted(_file(config, plan).parent.glob("*.json")) if (found := _numbers(file))]
    known = [found for found in known if found["counted"] > 0]
    counted = sum((plan.seconds or {}).values())
    if not known or not counted:
        return None
    near = sorted(known, key=lambda found: abs(math.log(found["counted"] / counted)))[:NEAREST]
    factor = statistics.median(found["seconds"] / found["counted"] for found in near)
    cells = f"{len(near)} other cells of similar size" if len(near) > 1 else "1 other cell"
    return Guess(
        counted * factor, f"{factor:.2g} times the calculated time, as in steps of {cells} here", "corrected"
    )


def _file(config: RunConfig, plan: Plan) -> Path:
    values = {name: value for name, value in fields.to_json(config).items() if name not in _ASIDE}
    del values["learner"]["optimiser"]["schedule"]
    machine = f"{plan.device.name}-{user_cache.digest(user_cache.processor())}"
    return user_cache.home() / "measured" / machine / f"{user_cache.digest(values)}.json"


def _numbers(file: Path) -> dict[str, Any]:
    """The numbers that a run has stored; empty if the file has not all of them."""
    numbers = user_cache.load(file)
    types = {"steps": int, "seconds": int | float, "counted": int | float}
    return numbers if all(isinstance(numbers.get(name), kind) for name, kind in types.items()) else {}
