"""The live view of a training run: a few lines redrawn in place on a terminal, plain lines anywhere else.

    step      37/200 |#####-------------------------|  18%
    now       sampling 212/512 episodes, 410 calls/s, 3120 tokens/s
    alarms    one choice (aggregator) since step 31
    accuracy  57.8% (50.1 .. 65.2) at step 30, base 42.1%, best 58.3% at step 20
    curve     ▁▅█▇ 42.1% .. 58.3%
    reward    0.55   generator 0.52   aggregator 0.61
    time      8.2 s a step, 61% of it learn, about 22 min left, 3,054 tokens/s

Lasting lines (evaluations, new alarms, notes) scroll away above the redrawn ones. The cursor always rests at the start
of the line below them and is never hidden, so a killed run leaves nothing to restore; a broken stream ends the view,
not the run.
"""

import io
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TextIO

from rich.cells import cell_len, set_cell_size

from marl_jax.alarms.watch import Alarm
from marl_jax.planning.step_times import quartile
from marl_jax.rollouts.progress import Progress
from marl_jax.terminal.tables import printable, share

BAR = 30
REDRAW_S = 0.1  # least time between redraws by dispatches
LINE_S = 10.0  # least time between plain lines of steps
ROLLOUT_LINE_S = 60.0  # time without output after which a plain line shows the progress of a rollout
CURVE = "▁▂▃▄▅▆▇█"  # from the lowest to the highest of the last EVALUATIONS
EVALUATIONS = 24
RECENT = 20  # steps whose lower quartile gives the time left


class Live:
    """Shows a run to a person. Close it, so that its last state stays on the screen."""

    def __init__(
        self,
        steps: int,
        roles: Sequence[str],
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        frozen: Collection[str] = (),
    ) -> None:
        self._steps, self._roles, self._clock = steps, tuple(roles), clock
        self._frozen = frozenset(frozen)  # roles that do not learn, so that their reward means nothing
        self._stream: TextIO | None = sys.stderr if stream is None else stream
        self._terminal = (
            self._stream is not None and self._stream.isatty() and os.environ.get("TERM") != "dumb"
        )
        self._step = 0
        self._some_failed = False  # whether a note has said that some episodes failed
        self._metrics: Mapping[str, Any] = {}
        self._phase, self._progress = "starting", ""
        self._evaluations: list[Mapping[str, Any]] = []
        self._durations: list[float] = []  # of all steps; the first includes compilation
        self._holding: Sequence[Alarm] = ()
        self._others: dict[str, Live] = {}  # views of runs that train side by side, by name
        self._failing: str | None = None  # the first error of the last step, if all its episodes failed
        self._step_began = self._last_line = clock()
        self._next_draw = 0.0
        self._drawn: list[str] = []

    def resumed(
        self,
        step: int,
        metrics: Mapping[str, Any],
        evaluations: Iterable[Mapping[str, Any]],
        holding: Sequence[Alarm] = (),
    ) -> None:
        """Call before the first step of a resumed run, with the line of its last step, all evaluations, its alarms."""
        self._step, self._metrics, self._phase = step, metrics, ""
        self._evaluations += evaluations
        self.note(f"resumed after step {step}")
        self.alarms(holding, holding)

    def phase(self, name: str) -> None:
        """Show the current work of the run: sampling, grading, learning, evaluating, saving."""
        self._phase, self._progress = name, ""
        self._draw()

    def rollout(self, progress: Progress) -> None:
        """Call after every dispatch of a rollout; cheap, because most calls return at once."""
        if self._phase not in ("sampling", "evaluating"):
            self._phase = "sampling"
        now = self._clock()
        ended = progress.done == progress.episodes
        if self._terminal:
            if now < self._next_draw and not ended:
                return
            self._progress = str(progress)
            self._draw()
        elif now >= self._last_line + ROLLOUT_LINE_S and not ended:
            self._line(f"{self._position(self._step + 1)}: {self._phase}, {progress}")

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Call after every training step, with the metrics that go to `metrics.jsonl`."""
        now = self._clock()
        first = not self._durations
        # The view begins before the run is opened; `time/wall` and its parts leave that time out.
        self._durations.append(metrics.get("time/wall", now - self._step_began))
        self._step_began, self._step, self._metrics = now, step, metrics
        self._phase, self._progress = "", ""
        if self._terminal:
            self._draw()
        elif first or step >= self._steps or now >= self._last_line + LINE_S:
            self._line(f"{self._position(step)}: reward {self._rewards(', ')}, {self._pace()}")

    def failures(self, step: int, errors: Sequence[str | None], what: str = "episode") -> None:
        """Call after every training step, with the errors of its episodes or paths. A note is shown if all failed with
        a new first error, and once if some failed.
        """
        failed = [error for error in errors if error]
        before, self._failing = self._failing, failed[0] if failed and len(failed) == len(errors) else None
        if self._failing not in (None, before):
            self.note(f"step {step}: every {what} ended in an error, the first: {self._failing}")
        elif failed and self._failing is None and not self._some_failed:
            self._some_failed = True
            counts = f"{len(failed)} of {len(errors)} {what}s"
            self.note(
                f"step {step}: {counts} ended in an error, the first: {failed[0]}; `failed` counts them"
            )

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Call after every evaluation, with the line that goes to `eval.jsonl`."""
        self._evaluations.append(record)
        self._phase, self._progress = "", ""
        problems = f", {record['problems']} problems" if record.get("problems") is not None else ""
        split = f"{record.get('split', '')} accuracy {_accuracy(record)}".strip()
        self.note(f"step {record.get('step')}: {split}{problems}{_difference(record)}")

    def alarms(self, begun: Sequence[Alarm], holding: Sequence[Alarm]) -> None:
        """Call after every training step and evaluation, with the alarms that begin now, and all that hold."""
        self._holding = holding
        for alarm in begun:
            self.note(f"ALARM at step {alarm.step}: {alarm.title}: {alarm.text}")

    def note(self, text: str) -> None:
        """Show lines that stay on the screen: the start-up page, warnings, where the run was resumed."""
        if self._terminal:
            self._write(self._up() + "\r\033[J")
            self._drawn = []
        for line in text.splitlines():
            self._line(line)
        self._draw()

    def close(self) -> None:
        """Draw the last state and leave the cursor below it; nothing is shown after that."""
        if self._terminal and self._drawn:
            self._progress = ""
            self._draw()
        self._stream = None

    def for_seed(self, name: str) -> "Live":
        """A view for another run that trains side by side: its lasting lines are shown here, with its name."""
        other = Live(self._steps, self._roles, io.StringIO())
        self._others[name] = other
        other.note = lambda text: self.note(f"{name}: {text}")  # type: ignore[method-assign]
        other.close()
        return other

    # ---------------------------------------------------------------- the display

    def _position(self, step: int) -> str:
        return f"step {step}/{self._steps}"

    def _lines(self) -> list[str]:
        made = min(max(self._step / self._steps, 0.0), 1.0) if self._steps else 1.0
        filled = int(BAR * made)
        doing = " ".join(part for part in (self._phase, self._progress) if part)
        lines = [f"step      {self._step}/{self._steps} |{'#' * filled}{'-' * (BAR - filled)}| {made:4.0%}"]
        lines += [f"now       {doing}"]
        # Early, since a low terminal shows the first lines only.
        for name, view in {"": self, **self._others}.items():
            of_seed, error = f"{name}: " if name else "", view._failing
            titles = ", ".join(f"{one.title} since step {one.step}" for one in view._holding)
            lines += [f"alarms    {of_seed}{titles}"] if titles else []
            lines += [f"errors    {of_seed}in all episodes, the first: {error}"] if error else []
        if self._evaluations:
            step = self._evaluations[-1].get("step")
            parts = [f"{_accuracy(self._evaluations[-1])} at step {step}"]
            base = [record for record in self._evaluations if record.get("step") == 0]
            if base and step != 0:
                parts += [f"base {share(base[-1].get('accuracy'))}"]
            known = [record for record in self._evaluations if record.get("accuracy") is not None]
            best = max(known, key=lambda record: record["accuracy"], default=self._evaluations[-1])
            if best.get("step") != step:
                parts += [f"best {share(best['accuracy'])} at step {best.get('step')}"]
            lines += ["accuracy  " + ", ".join(parts)]
            if curve := self._curve([record["accuracy"] for record in known][-EVALUATIONS:]):
                lines += [f"curve     {curve}"]
        if self._metrics:
            lines += [f"reward    {self._rewards('   ')}", f"time      {self._pace()}"]
        return lines

    def _rewards(self, separator: str) -> str:
        roles = [
            f"{role} {'frozen' if role in self._frozen else _number(self._metrics.get(f'reward/{role}'))}"
            for role in self._roles
        ]
        return separator.join([_number(self._metrics.get("reward")), *roles])

    def _curve(self, values: Sequence[float]) -> str:
        """A curve of two evaluations or more, with its ends; empty if the stream cannot encode its characters."""
        try:
            CURVE.encode(getattr(self._stream, "encoding", None) or "utf-8")
        except UnicodeEncodeError:
            return ""
        if len(values) < 2:
            return ""
        low, high = min(values), max(values)
        indices = [
            round((value - low) / (high - low) * (len(CURVE) - 1)) if high > low else 0 for value in values
        ]
        return f"{''.join(CURVE[i] for i in indices)} {share(low)} .. {share(high)}"

    def _pace(self) -> str:
        parts = []
        if measured := self._durations[1:][-RECENT:]:
            parts += [f"{_duration(step_time := quartile(measured))} a step"]
        elif self._durations:  # not typical, because it compiled
            parts += [f"first step {_duration(self._durations[0])}"]
        if parts and (slow := self._slowest()):
            parts += [slow]
        if measured and self._step < self._steps:
            parts += [f"about {_duration(step_time * (self._steps - self._step))} left"]
        rate = self._metrics.get("time/tokens_per_second")
        return ", ".join([*parts, *([f"{rate:,.0f} tokens/s"] if rate is not None else [])])

    def _slowest(self) -> str:
        """The part that took most of the last step."""
        parts = {
            key.removeprefix("time/"): value
            for key, value in self._metrics.items()
            if key.startswith("time/")
            and key.count("/") == 1  # no parts of parts
            and key not in ("time/step", "time/wall", "time/tokens_per_second")
            and value
        }
        name = max(parts, key=lambda part: parts[part], default="")
        return f"{parts[name] / sum(parts.values()):.0%} of it {name}" if len(parts) > 1 else ""

    # ---------------------------------------------------------------- output

    def _line(self, text: str) -> None:
        self._last_line = self._clock()
        self._write(printable(text) + "\n")

    def _draw(self) -> None:
        if not self._terminal:
            return
        self._next_draw = self._clock() + REDRAW_S
        columns, rows = self._size()
        lines = [printable(line) for line in self._lines()[: max(rows - 1, 1)]]
        lines = [set_cell_size(line, min(cell_len(line), columns - 1)) for line in lines]
        self._write(self._up() + "".join(f"\r\033[K{line}\n" for line in lines) + "\033[J")
        self._drawn = lines

    def _up(self) -> str:
        """Code that moves the cursor to the first drawn line; a terminal that became narrower has wrapped the lines."""
        columns, _ = self._size()
        rows = sum(max(1, -(-cell_len(line) // columns)) for line in self._drawn)
        return f"\033[{rows}A" if rows else ""

    def _size(self) -> tuple[int, int]:
        try:
            columns, rows = os.get_terminal_size(self._stream.fileno() if self._stream else -1)
        except (OSError, ValueError, AttributeError):
            columns, rows = shutil.get_terminal_size()
        return max(columns, 2), max(rows, 2)

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()
        except (OSError, ValueError):  # closed or broken: the terminal is gone
            self._stream = None


# ---------------------------------------------------------------- words


def _accuracy(record: Mapping[str, Any]) -> str:
    return share(record.get("accuracy")) + _interval(record.get("ci_low"), record.get("ci_high"), ".1f")


def _difference(record: Mapping[str, Any]) -> str:
    by = record.get("difference")
    if not by or by.get("mean") is None:
        return ""
    interval = _interval(by.get("low"), by.get("high"), "+.1f")
    return f", {100 * by['mean']:+.1f} points{interval} over base"


def _interval(low: float | None, high: float | None, form: str) -> str:
    return "" if low is None or high is None else f" ({100 * low:{form}} .. {100 * high:{form}})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours / 24:.1f} days"
