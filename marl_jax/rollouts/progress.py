"""Progress of a rollout: counts after every dispatch, and a bar that shows them."""

import dataclasses
import math
import sys
import time
from collections.abc import Callable
from typing import TextIO


@dataclasses.dataclass
class Progress:
    """Counts of one rollout; the scheduler updates it and hands it to the callback after each dispatch."""

    episodes: int  # episodes that the rollout will play
    done: int = 0  # episodes that have ended
    failed: int = 0  # episodes that ended in an error on all of their paths
    silent: int = 0  # episodes whose workflow returned nothing on all of their paths
    calls: int = 0  # answered calls
    tokens: int = 0  # sampled tokens
    prompts_cut: int = 0  # prompts shortened to fit the context
    prompts_refused: int = 0  # episodes ended because a prompt did not fit, on all of their paths
    tools: int = 0  # tools that have ended
    tools_failed: int = 0  # tools that ended in an error
    dispatches: int = 0  # dispatches of all engines
    seconds: float = 0.0  # since the rollout began
    first_error: str = ""  # traceback (or error, if there is none) of the first failed episode

    def __str__(self) -> str:
        seconds = max(self.seconds, 1e-9)
        rates = f"{self.calls / seconds:.0f} calls/s, {self.tokens / seconds:.0f} tokens/s"
        line = f"{self.done}/{self.episodes} episodes, {rates}"
        counts = {
            "failed": self.failed,
            "prompts cut": self.prompts_cut,
            "prompts refused": self.prompts_refused,
            "tools failed": self.tools_failed,
        }
        return line + "".join(f", {count} {name}" for name, count in counts.items() if count)


def progress_bar(stream: TextIO | None = None, every_s: float | None = None) -> Callable[[Progress], None]:
    """A callback that draws a bar on a terminal, and writes a plain line now and then anywhere else.

    `stream` None is standard error. A broken stream ends the bar, not the rollout.
    """
    stream = sys.stderr if stream is None else stream
    terminal = stream is not None and stream.isatty()
    pause = every_s if every_s is not None else (0.1 if terminal else 10.0)
    next_time = math.inf if stream is None else 0.0

    def show(progress: Progress) -> None:
        nonlocal next_time
        finished = progress.done == progress.episodes
        if next_time == math.inf or (time.monotonic() < next_time and not finished):
            return
        next_time = math.inf if finished else time.monotonic() + pause
        filled = 30 * progress.done // max(progress.episodes, 1)
        bar = f"\r\033[K|{'#' * filled:<30}| {progress}" + "\n" * finished
        try:
            print(bar if terminal else f"{progress}\n", end="", file=stream, flush=True)
        except OSError:
            next_time = math.inf

    return show
