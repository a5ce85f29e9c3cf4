import dataclasses
import io
import sys
import threading
import time

import pytest
from fake_engine import FakeEngine
from rollout_kit import MATH, TASKS, run, speak

from marl_jax.commands.evaluate import announce
from marl_jax.rollouts import progress_bar
from marl_jax.workflows import (
    Tool,
    voting,
    workflow,
)


def test_progress_counts_episodes_calls_and_tokens():
    seen = []
    episodes = run(voting, prompts=MATH, samples=2, progress=lambda p: seen.append(dataclasses.replace(p)))
    end = seen[-1]
    assert (end.episodes, end.done, end.calls, end.failed) == (12, 12, 48, 0)
    assert end.tokens == sum(len(call.tokens) for e in episodes for call in e.calls)
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert end.seconds > 0


def test_the_bar_writes_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    run(voting, prompts=MATH, progress=progress_bar(stream, every_s=0))
    lines = stream.getvalue().splitlines()
    assert lines[-1].startswith("6/6 episodes, ") and "tokens/s" in lines[-1]
    assert sum(line.startswith("6/6") for line in lines) == 1


def test_the_bar_redraws_one_line_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    run(voting, prompts=MATH, progress=progress_bar(stream, every_s=0))
    assert stream.getvalue().count("\n") == 1
    assert "#" * 30 + "| 6/6 episodes" in stream.getvalue()


def test_a_stream_that_is_closed_or_breaks_ends_the_bar_and_not_the_rollout(monkeypatch):
    class Broken(io.StringIO):
        def flush(self):
            raise BrokenPipeError

    for stream in (Broken(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        run(voting, prompts=MATH, progress=announce("base"))


def test_ctrl_c_ends_generators_and_threads_and_the_engine_can_be_used_again():
    closed = []

    @workflow(roles=("speaker",))
    def tidy(task, prompts):
        try:
            heard = yield speak()
            yield Tool(time.sleep, (0.01,))
            yield speak("more", after=heard)
        finally:
            closed.append(task.id)

    def interrupt(progress):
        if progress.dispatches == 3:
            raise KeyboardInterrupt

    engine = FakeEngine(lambda p, r: "x" * 30)
    with pytest.raises(KeyboardInterrupt):
        run(tidy, engine=engine, progress=interrupt)
    assert engine.pending == 0
    assert sorted(closed) == [task.id for task in TASKS]
    deadline = time.monotonic() + 60
    while any(thread.name == "tool" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(thread.name == "tool" for thread in threading.enumerate())
    assert [e.error for e in run(tidy, engine=engine)] == [None] * len(TASKS)
