"""The scheduler: drives all episodes at once over one engine or several, without a barrier anywhere.

    due tools -> episodes that lack no result speak -> new episodes, while few requests wait -> one dispatch

Which requests share a batch follows from the schedule alone: episodes speak in a fixed order, and a tool's
result re-enters a fixed number of dispatches after its call (waited for, if need be): the clock has no say.
"""

import collections
import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from marl_jax.policies import PolicyMap, SamplingSettings
from marl_jax.rollouts.history import Chat
from marl_jax.rollouts.progress import Progress
from marl_jax.rollouts.running import Ask, Limits, Parser, Running
from marl_jax.rollouts.tools import Errands, ToolLog
from marl_jax.rollouts.voices import Engine, Voices
from marl_jax.table import Episode, Table
from marl_jax.task import Task
from marl_jax.threads import Workers
from marl_jax.workflows.api import Tool, Workflow
from marl_jax.workflows.render import Prompts


def rollout(
    workflow: Workflow,
    tasks: Sequence[Task],
    engines: Engine | Mapping[str, Engine],
    tokenizer: Any,
    policy_map: PolicyMap,
    *,
    prompts: Prompts,
    parse: Parser,
    samples: int = 1,
    first_sample: int = 0,
    seed: int = 0,
    step: int = 0,
    settings: SamplingSettings | Mapping[str, SamplingSettings] | None = None,
    limits: Limits | None = None,
    versions: Mapping[str, int] | None = None,
    mode: Literal["fixed", "free"] = "fixed",
    tool_delay: int = 4,
    tool_threads: int = 8,
    tool_log: ToolLog | None = None,
    ahead: int = 1024,
    progress: Callable[[Progress], None] | None = None,
    finished: Callable[[Episode], None] | None = None,
) -> Table:
    """Run `samples` episodes of the workflow on every task: the table of their calls, task by task.

    Args:
      workflow: who talks, and how it goes.
      tasks: of the family that `prompts` and `parse` are for.
      engines: one engine for all policies, or {policy: engine}; several take turns, dispatch by dispatch.
      tokenizer: with a chat template.
      policy_map: role (or "role/slot") -> policy.
      prompts: the words of the roles.
      parse: how the task's answer is read in a completion's text.
      samples: episodes per task, numbered from `first_sample` on.
      seed, step: of the run. All noise follows from them, the task, the sample and the call.
      settings: how every role samples, or {role: settings} (see `policies.role_settings`).
      limits: what ends an episode early; its `context` is the engine's own (the shortest of them) unless given.
      versions: {policy: update count}, for the record.
      mode: "fixed" lets tool results re-enter `tool_delay` dispatches after their call; "free" as soon as
        they are there, which never waits, and lets timing decide which requests share a batch.
      tool_threads: how many tools run at a time.
      tool_log: results on disk, replayed where this rollout was begun before.
      ahead: new episodes begin while fewer requests than this are unfinished; more than the lanes.
      progress: called after every dispatch; what it raises ends the rollout cleanly.
      finished: called with every episode as it ends, while others go on: to begin with its grading, say.

    Prompts cached before are dropped: an episode's last bit must not depend on what the engine did earlier. However
    the rollout ends (Ctrl-C included), the engines are ready for the next.
    """
    bounds = {"samples": (samples, 1), "ahead": (ahead, 1), "tool_delay": (tool_delay, 1)}
    bounds |= {"first_sample": (first_sample, 0), "seed": (seed, 0), "step": (step, 0)}
    for name, (value, least) in bounds.items():
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    if mode not in ("fixed", "free"):
        raise ValueError(f"mode is {mode!r}; it must be 'fixed' or 'free'")
    repeated = [name for name, count in collections.Counter(task.id for task in tasks).items() if count > 1]
    if repeated:
        raise ValueError(
            f"task '{repeated[0]}' is given more than once: its episodes would be equal; raise samples"
        )
    for task in tasks:
        if task.family not in workflow.families:
            known = ", ".join(workflow.families)
            raise ValueError(f"task '{task.id}' is {task.family}; workflow '{workflow.name}' is for: {known}")
    chat = Chat(tokenizer)
    voices = Voices(
        workflow, policy_map, engines, settings or SamplingSettings(), chat.end_of_turn, versions or {}
    )
    limits = limits or Limits()
    if limits.context is None:
        limits = dataclasses.replace(limits, context=voices.context)
    for engine in voices.engines:
        if engine.pending:
            raise RuntimeError(f"an engine has {engine.pending} requests under way: finish or abandon() them")
        engine.abandon()

    def begin(task: Task, sample: int) -> Running:
        key = (seed, step, task_key(task), sample)
        return Running(task, sample, key, workflow, prompts, chat, limits, voices.new_tokens)

    numbers = range(first_sample, first_sample + samples)
    fresh = ([begin(task, sample) for sample in numbers] for task in tasks)  # made when their time comes
    tools = Errands(Workers("tool", tool_threads), tool_log, tool_delay, mode == "free")
    schedule = _Schedule(voices, tools, parse, Progress(len(tasks) * samples), finished)
    try:
        for _ in schedule.run(fresh, ahead):
            if progress:
                progress(schedule.progress)
    except BaseException:
        for engine in voices.engines:
            engine.abandon()
        raise
    finally:
        schedule.close()
    return Table.of([schedule.done[index] for index in range(len(schedule.done))])


def task_key(task: Task) -> int:
    """A 32-bit number for the task's id, the same in every process."""
    return int.from_bytes(hashlib.sha256(task.id.encode()).digest()[:4], "little")


class _Schedule:
    """The state of one rollout: episodes by their number, in the order of the tasks."""

    def __init__(
        self,
        voices: Voices,
        tools: Errands,
        parse: Parser,
        progress: Progress,
        finished: Callable[[Episode], None] | None,
    ):
        self.voices, self.tools, self.parse, self.progress = voices, tools, parse, progress
        self.finished = finished
        self.live: dict[int, Running] = {}
        self.done: dict[int, Episode] = {}
        # (engine, ticket) -> the episode that waits for it, the position in its batch, what its record says
        self._calls: dict[tuple[int, int], tuple[int, int, dict[str, Any]]] = {}
        self._now = 0  # dispatches so far: the clock of the schedule
        self._turn = 0  # the engine whose turn it is
        self._began = time.monotonic()

    def run(self, fresh: Iterator[list[Running]], ahead: int) -> Iterator[None]:
        """Drive everything to its end; yields after each dispatch."""
        started = 0
        ready: list[int] = []
        while True:
            ready += self._take_tools()
            for number in sorted(ready):
                self._speak(number)
            ready = []
            while self._pending() < ahead and (group := next(fresh, None)) is not None:
                for running in group:
                    self.live[started] = running
                    self._speak(started)
                    started += 1
            if self._pending():
                ready = self._dispatch()
                yield
            elif self.tools.errands:
                self._now = max(self._now, self.tools.idle_until())
            elif self.live:
                raise RuntimeError(f"the engine lost the requests of {len(self.live)} episodes")
            else:
                break
        self.progress.seconds = time.monotonic() - self._began
        yield

    def close(self) -> None:
        self.tools.pool.close()
        for running in self.live.values():
            running.close()

    def _pending(self) -> int:
        return sum(engine.pending for engine in self.voices.engines)

    def _speak(self, number: int) -> None:
        """Let an episode run on to a batch that it has to wait for, or to its end."""
        running = self.live[number]
        while batch := running.advance():
            calls, tools = len(running.calls), len(running.tools)
            for position, item in enumerate(batch):
                if isinstance(item, Tool):
                    key = (*running.key, tools)
                    self.tools.send(item, self._now, number, position, key, calls - 1)
                    tools += 1
                else:
                    self._ask(item, number, position)
                    calls += 1
            if running.waiting:
                return
        del self.live[number]
        self.done[number] = running.episode()
        if self.finished:
            self.finished(self.done[number])
        self.progress.done += 1
        self.progress.failed += running.error is not None
        self.progress.prompts_refused += running.refused

    def _ask(self, ask: Ask, number: int, position: int) -> None:
        running = self.live[number]
        self.progress.prompts_cut += ask.cut > 0
        try:
            engine, ticket, facts = self.voices.submit(ask, running.key)
        except (ValueError, TypeError) as error:  # a request that the engine refuses ends its own episode
            running.fail(position, error)
        else:
            self._calls[engine, ticket] = number, position, facts

    def _dispatch(self) -> list[int]:
        """One dispatch of the next engine that has work; the episodes that lack nothing now."""
        engines = self.voices.engines
        while not engines[self._turn % len(engines)].pending:
            self._turn += 1
        which = self._turn % len(engines)
        finished = engines[which].step()
        self._turn, self._now = which + 1, self._now + 1
        ready = []
        for ticket, completion in finished:
            number, position, facts = self._calls.pop((which, ticket))
            running = self.live[number]
            running.give_call(position, completion, self.parse, **facts)
            self.progress.calls += 1
            self.progress.tokens += len(completion.tokens)
            ready += [] if running.waiting else [number]
        self.progress.dispatches += 1
        self.progress.seconds = time.monotonic() - self._began
        return ready

    def _take_tools(self) -> list[int]:
        """Hand out the tool results that enter now; the episodes that lack nothing now."""
        come = self.tools.come(self._now)
        for errand in come:
            assert errand.record is not None
            self.live[errand.episode].put(errand.position, errand.record)
            self.progress.tools += 1
            self.progress.tools_failed += errand.record.error is not None
        return [n for n in dict.fromkeys(errand.episode for errand in come) if not self.live[n].waiting]
