"""The alarms and the steps since which they hold: a pure function of the rows and evaluations so far, fed one by one.

watch = Watch()
watch.row(line)              the alarms for this line of `metrics.jsonl`; lines and evaluations by rising step
watch.evaluation(record)     those that begin with a line of `eval.jsonl`
judge(rows, evaluations)     all of a folder, whatever version wrote it: an alarm without its numbers is silent
watch_of(alarms)             of alarms that were judged before, where the rows are not kept
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from marl_jax.alarms.monitors import MONITORS, History, Monitor

Line = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Alarm:
    """A monitor whose condition held."""

    monitor: Monitor
    who: str  # the role or policy; "" for the workflow as a whole
    step: int  # where it began
    evidence: Mapping[str, Any]  # the numbers there
    until: int | None = None  # the first step where it no longer held; None: it holds at the last one

    @property
    def title(self) -> str:
        """Its name and whom it is about."""
        return f"{self.monitor.name} ({self.who})" if self.who else self.monitor.name

    @property
    def text(self) -> str:
        """The evidence, the meaning, and where to look."""
        text = self.monitor.says.format(who=self.who, **self.evidence)
        return f"{text}. {self.monitor.means} Look at {self.monitor.look}."

    def to_json(self) -> dict[str, Any]:
        """As the lines of `metrics.jsonl` have it."""
        return {
            "name": self.monitor.name,
            "who": self.who,
            "step": self.step,
            "evidence": dict(self.evidence),
        }


class Watch:
    """The alarms of one run."""

    def __init__(self) -> None:
        self._past = History()
        self._alarms: dict[tuple[str, str], Alarm] = {}  # the latest of each kind
        self._over: list[Alarm] = []  # that ended, and then began again
        self._new: list[Alarm] = []  # since the last row
        self._evaluated = -1

    @property
    def alarms(self) -> list[Alarm]:
        """All alarms that ever began, the earliest first; one that ended and began again is there twice."""
        return sorted([*self._over, *self._alarms.values()], key=lambda alarm: alarm.step)

    @property
    def holding(self) -> list[Alarm]:
        """The alarms that hold now."""
        return [alarm for alarm in self.alarms if alarm.until is None]

    def row(self, line: Line) -> list[Alarm]:
        """After a step: the alarms that began with it, and before those of an evaluation since the last step.

        One that ended and begins again is not reported again.
        """
        self._past.row(line)
        self._look(line["step"])
        new, self._new = self._new, []
        return new

    def evaluation(self, record: Line) -> list[Alarm]:
        """After an evaluation along the run: the alarms that begin with it. A known one does not begin again."""
        if record["step"] <= self._evaluated or not is_along(record):
            return []
        self._evaluated, self._past.evaluation = record["step"], record
        return self._look(record["step"])

    def _look(self, step: int) -> list[Alarm]:
        holding = {
            (monitor.name, who): Alarm(monitor, who, step, evidence)
            for monitor in MONITORS
            for who, evidence in monitor.find(self._past, monitor.limits)
        }
        new = [alarm for key, alarm in holding.items() if key not in self._alarms]
        for key, alarm in self._alarms.items():
            if key not in holding:
                self._alarms[key] = dataclasses.replace(alarm, until=alarm.until or step)
            elif alarm.until is not None:
                self._over.append(alarm)
                self._alarms[key] = holding[key]
        self._alarms |= {(alarm.monitor.name, alarm.who): alarm for alarm in new}
        self._new += new
        return new


def judge(rows: Iterable[Line], evaluations: Iterable[Line] = ()) -> Watch:
    """A watch that has seen these; at a step with both, the evaluation comes after the row."""
    watch = Watch()
    events = [(row["step"], 0, row) for row in rows] + [(one["step"], 1, one) for one in evaluations]
    for _, kind, line in sorted(events, key=lambda event: event[:2]):
        if kind:
            watch.evaluation(line)
        else:
            watch.row(line)
    return watch


def watch_of(alarms: Iterable[Line]) -> Watch:
    """A watch with these alarms, each as `Alarm.to_json` has it with `until`; monitors that are gone are left out."""
    watch, known = Watch(), {monitor.name: monitor for monitor in MONITORS}
    watch._over = [
        Alarm(known[one["name"]], one["who"], one["step"], one["evidence"], one.get("until"))
        for one in alarms
        if one["name"] in known
    ]
    return watch


def is_along(record: Line) -> bool:
    """Whether an evaluation belongs to the run's course: of its policies, on val, and made by the run."""
    usual = record.get("mode", "trained") == "trained" and record.get("split", "val") == "val"
    return usual and "checkpoint" not in record
