"""The alarms and the steps since which they hold: a pure function of the rows and evaluations so far, fed one by one.

watch = Watch()
watch.row(line)              the new alarms at a line of `metrics.jsonl`; feed lines in order of their steps
watch.evaluation(record)     the alarms that begin with a line of `eval.jsonl`
judge(rows, evaluations)     a watch of a folder, of any version: an alarm whose numbers are missing stays silent
watch_of(alarms)             a watch of alarms that were judged before, if the rows were not kept
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
    step: int  # the step at which it began
    evidence: Mapping[str, Any]  # the numbers at that step
    until: int | None = None  # the first step at which it no longer held; None: it still holds

    @property
    def title(self) -> str:
        """The monitor's name, and the role or policy."""
        return f"{self.monitor.name} ({self.who})" if self.who else self.monitor.name

    @property
    def text(self) -> str:
        """The evidence, the meaning, and where to look."""
        text = self.monitor.text.format(who=self.who, **self.evidence)
        return f"{text}. {self.monitor.means} Look at {self.monitor.where}."

    def to_json(self) -> dict[str, Any]:
        """The alarm as it is written to `metrics.jsonl`."""
        return {
            "name": self.monitor.name,
            "who": self.who,
            "step": self.step,
            "evidence": dict(self.evidence),
        }


class Watch:
    """The alarms of one run."""

    def __init__(self) -> None:
        self._history = History()
        self._alarms: dict[tuple[str, str], Alarm] = {}  # the latest of each kind
        self._ended: list[Alarm] = []  # alarms that ended and then began again
        self._unreported: list[Alarm] = []  # alarms that began since the last row
        self._evaluated_step = -1

    @property
    def alarms(self) -> list[Alarm]:
        """All alarms that ever began, the earliest first; an alarm that ended and began again is listed twice."""
        return sorted([*self._ended, *self._alarms.values()], key=lambda alarm: alarm.step)

    @property
    def holding(self) -> list[Alarm]:
        """The alarms that hold now."""
        return [alarm for alarm in self.alarms if alarm.until is None]

    def row(self, line: Line) -> list[Alarm]:
        """After a step: the alarms that began with an evaluation since the last step, then those of this row.

        An alarm that ended and begins again is not reported again.
        """
        self._history.row(line)
        self._look(line["step"])
        new, self._unreported = self._unreported, []
        return new

    def evaluation(self, record: Line) -> list[Alarm]:
        """After an evaluation of the run: the alarms that begin with it, without alarms that began before."""
        if record["step"] <= self._evaluated_step or not is_along(record):
            return []
        self._evaluated_step, self._history.evaluation = record["step"], record
        return self._look(record["step"])

    def _look(self, step: int) -> list[Alarm]:
        holding = {
            (monitor.name, who): Alarm(monitor, who, step, evidence)
            for monitor in MONITORS
            for who, evidence in monitor.find(self._history, monitor.limits)
        }
        new = [alarm for key, alarm in holding.items() if key not in self._alarms]
        for key, alarm in self._alarms.items():
            if key not in holding:
                self._alarms[key] = dataclasses.replace(alarm, until=alarm.until or step)
            elif alarm.until is not None:
                self._ended.append(alarm)
                self._alarms[key] = holding[key]
        self._alarms |= {(alarm.monitor.name, alarm.who): alarm for alarm in new}
        self._unreported += new
        return new


def judge(rows: Iterable[Line], evaluations: Iterable[Line] = ()) -> Watch:
    """A watch that was fed these rows and evaluations; at a step with both, the row is first."""
    watch = Watch()
    events = [(row["step"], 0, row) for row in rows] + [(record["step"], 1, record) for record in evaluations]
    for _, kind, line in sorted(events, key=lambda event: event[:2]):
        if kind:
            watch.evaluation(line)
        else:
            watch.row(line)
    return watch


def watch_of(alarms: Iterable[Line]) -> Watch:
    """A watch with these alarms, from `Alarm.to_json` with `until`; alarms of removed monitors are left out."""
    watch, known = Watch(), {monitor.name: monitor for monitor in MONITORS}
    watch._ended = [
        Alarm(known[line["name"]], line["who"], line["step"], line["evidence"], line.get("until"))
        for line in alarms
        if line["name"] in known
    ]
    return watch


def is_along(record: Line) -> bool:
    """Whether the run itself made this evaluation, of its own policies on val."""
    usual = record.get("mode", "trained") == "trained" and record.get("split", "val") == "val"
    return usual and "checkpoint" not in record
