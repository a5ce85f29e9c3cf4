"""The scheduler: drives all episodes at once over one engine or several, without any barrier.

    due tools -> episodes with all results submit calls -> new episodes, while few requests wait -> one dispatch

In mode "fixed", which requests share a batch follows from the schedule alone: episodes submit calls in a fixed order,
and a tool's result re-enters a fixed number of dispatches after its call, however long it took: the schedule waits for
it. Where nothing can be decoded, the clock jumps to the next result.
"""

import collections
import dataclasses
import hashlib
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from marl_jax.episodes import Episode
from marl_jax.fields import is_whole
from marl_jax.policies import PolicyMap, SamplingSettings
from marl_jax.rollouts.history import Chats
from marl_jax.rollouts.progress import Progress
from marl_jax.rollouts.replay import Batch, branches, tree
from marl_jax.rollouts.running import Limits, Parser, Running
from marl_jax.rollouts.tools import ToolJobs, ToolLog
from marl_jax.rollouts.voices import Engine, Voices
from marl_jax.table import Table
from marl_jax.task import Task
from marl_jax.threads import Workers
from marl_jax.workflows.api import Tool, Workflow
from marl_jax.workflows.render import Prompts


def rollout(
    workflow: Workflow,
    tasks: Sequence[Task],
    engines: Engine | Mapping[str, Engine],
    tokenizer: Any | Mapping[str, Any],
    policy_map: PolicyMap,
    *,
    prompts: Prompts,
    parse: Parser,
    samples: int = 1,
    first_sample: int = 0,
    path: Sequence[int] = (),
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
      workflow: the workflow to play.
      tasks: of the family that `prompts` and `parse` are for.
      engines: one engine for all policies, or {policy: engine}; several take turns, dispatch by dispatch.
      tokenizer: with a chat template; one for all policies, or {policy: tokenizer}.
      policy_map: role (or "role/slot") -> policy.
      prompts: the prompts of the roles.
      parse: reads the task's answer from a completion's text.
      samples: episodes per task, numbered from `first_sample` on.
      path: the branch to take at the first fork, at the second, ...; of later forks all branches are played, as of all
        forks by default. The path is the same, to the bit, as in the complete episode.
      seed: seed of the run. All noise follows from it, the step, the task, the sample, the path and the call.
      step: step of the run.
      settings: how every role samples, or {role: settings} (see `policies.role_settings`).
      limits: what ends an episode early; `context` defaults to the engine's (the shortest, if there are several).
      versions: {policy: update count}, for the record.
      mode: "fixed" lets tool results re-enter `tool_delay` dispatches after their call; "free" as soon as
        they arrive, which never waits, but lets timing decide which requests share a batch.
      tool_threads: how many tools run at the same time.
      tool_log: results on disk, replayed if this rollout was begun before.
      ahead: new episodes begin while fewer requests than this are unfinished; it should exceed the lanes.
      progress: called after every dispatch and at the end; an exception in it ends the rollout cleanly.
      finished: called with every episode as it ends, while others still run: grading can begin.

    Cached prompts are dropped first: an episode's last bit must not depend on earlier work of the engine. However
    the rollout ends (Ctrl-C included), the engines are ready for the next.
    """
    _check_whole(samples=(samples, 1), ahead=(ahead, 1), tool_delay=(tool_delay, 1))
    _check_whole(first_sample=(first_sample, 0), seed=(seed, 0), step=(step, 0))
    if mode not in ("fixed", "free"):
        raise ValueError(f"mode is {mode!r}; it must be 'fixed' or 'free'")
    _check_tasks(tasks, workflow)
    chats = Chats(tokenizer, policy_map)
    voices = Voices(workflow, policy_map, engines, settings or SamplingSettings(), chats, versions or {})
    voices.clear_engines()
    limits = limits or Limits()
    if limits.context is None:
        limits = dataclasses.replace(limits, context=voices.context)

    def begin(task: Task, sample: int) -> Running:
        key = (int(seed), int(step), task_key(task), sample)  # numpy's integers cannot be written as JSON
        return Running(task, sample, key, workflow, prompts, chats.of, limits, voices.new_tokens, tuple(path))

    numbers = range(first_sample, first_sample + samples)
    fresh = ([begin(task, sample) for sample in numbers] for task in tasks)  # made as they begin
    tools = ToolJobs(Workers("tool", tool_threads), tool_log, tool_delay, mode == "free")
    schedule = _Schedule(voices, tools, parse, Progress(len(tasks) * samples), finished)
    try:
        for _ in schedule.run(fresh, ahead):
            if progress:
                progress(schedule.progress)
    except BaseException:
        voices.abandon()
        raise
    finally:
        schedule.close()
    table = Table.of([schedule.done[index] for index in range(len(schedule.done))])
    table.need_own_ids()
    return table


def _check_whole(**bounds: tuple[Any, int]) -> None:
    """Refuse an argument, given as (value, least), that is no integer or too small."""
    for name, (value, least) in bounds.items():
        if not is_whole(value) or value < least:
            raise ValueError(f"{name} is {value!r:.80}; it must be at least {least}, and an integer")


def _check_tasks(tasks: Sequence[Task], workflow: Workflow) -> None:
    repeated = [name for name, count in collections.Counter(task.id for task in tasks).items() if count > 1]
    if repeated:
        raise ValueError(
            f"task '{repeated[0]}' is given more than once: its episodes would be equal; raise samples"
        )
    for task in tasks:
        if task.family not in workflow.families:
            known = ", ".join(workflow.families)
            raise ValueError(f"task '{task.id}' is {task.family}; workflow '{workflow.name}' is for: {known}")


def task_key(task: Task) -> int:
    """A 32-bit number for the task's id, the same in every process."""
    return int.from_bytes(hashlib.sha256(task.id.encode("utf-8", "surrogatepass")).digest()[:4], "little")


class _Schedule:
    """The state of one rollout: episodes by their number, in the order of the tasks."""

    def __init__(
        self,
        voices: Voices,
        tools: ToolJobs,
        parse: Parser,
        progress: Progress,
        finished: Callable[[Episode], None] | None,
    ):
        self.voices, self.tools, self.parse, self.progress = voices, tools, parse, progress
        self.finished = finished
        self.live: dict[Running, int] = {}  # each path that has not ended, with the number of its episode
        self.done: dict[int, Episode] = {}
        # By episode: the number of its running paths, and the paths that have ended.
        self._open = collections.Counter[int]()
        self._ended = collections.defaultdict[int, list[tuple[Running, Episode]]](list)
        # (id of the engine, ticket) -> (the waiting path, position in its batch, facts for the record)
        self._calls: dict[tuple[int, int], tuple[Running, int, dict[str, Any]]] = {}
        self._now = 0  # the clock of the schedule: dispatches, and jumps to the next result of a tool
        self._turn = 0  # the engine whose turn it is
        self._began = time.monotonic()

    def run(self, fresh: Iterator[list[Running]], ahead: int) -> Iterator[None]:
        """Run all episodes to their ends; yields after each dispatch, and once at the end."""
        started = 0
        ready: list[Running] = []
        while True:
            ready += self._take_tools()
            for running in sorted(ready, key=lambda one: (self.live[one], one.path)):
                self._run_path(running, running.advance())
            ready = []
            while self._pending() < ahead and (group := next(fresh, None)) is not None:
                for running in group:
                    self._begin(started, running, running.advance())
                    started += 1
            if self._pending():
                ready = self._dispatch()
                yield
            elif self.tools.jobs:
                self._now = max(self._now, self.tools.next_due())
            elif self.live:
                raise RuntimeError(f"the engine lost the requests of {len(self.live)} paths")
            else:
                break
        self.progress.seconds = time.monotonic() - self._began
        yield

    def close(self) -> None:
        """Stop the threads of tools, and close the workflows that have not ended."""
        self.tools.pool.close()
        for running in self.live:
            running.close()

    def _pending(self) -> int:
        return sum(engine.pending for engine in self.voices.engines)

    def _begin(self, number: int, running: Running, batch: Batch) -> None:
        """Run a path of an episode from its first batch on."""
        self.live[running] = number
        self._open[number] += 1
        self._run_path(running, batch)

    def _run_path(self, running: Running, batch: Batch) -> None:
        """Run a path, and its other branches, from this batch to a batch that has to wait, or to the end."""
        while True:
            self._send(running, batch)
            for other, first_batch in branches(running):
                self._begin(self.live[running], other, first_batch)
            if not batch:
                return self._end(running)
            if running.waiting:
                return None
            batch = running.advance()

    def _send(self, running: Running, batch: Batch) -> None:
        calls, tools = len(running.calls), len(running.tools)
        for position, item in enumerate(batch):
            if isinstance(item, Tool):
                # When a step is played again, a vLLM server may sample other tokens before the tool.
                digest = zlib.crc32(repr([call.tokens for call in running.calls]).encode())
                key = (*running.key, *running.path, tools, digest)
                self.tools.send(item, self._now, running, position, key, calls - 1)
                tools += 1
                continue
            calls += 1
            self.progress.prompts_cut += item.cut > 0
            try:
                engine, ticket, facts = self.voices.submit(item, running.key)
            except (ValueError, TypeError) as error:  # a refused request ends only its episode
                running.fail(position, error)
            else:
                self._calls[id(engine), ticket] = running, position, facts

    def _end(self, running: Running) -> None:
        number = self.live.pop(running)
        self._open[number] -= 1
        self._ended[number].append((running, running.episode()))
        if self._open[number]:
            return
        paths, episodes = zip(*self._ended.pop(number))
        self.done[number] = episode = tree(episodes)
        if self.finished:
            self.finished(episode)
        progress = self.progress  # an episode is silent, refused or failed only if all of its paths are
        progress.done += 1
        progress.silent += all(path.silent for path in paths)
        progress.prompts_refused += all(path.refused for path in paths)
        if all(path.error for path in paths):
            progress.failed += 1
            progress.first_error = progress.first_error or paths[0].trace or paths[0].error or ""

    def _dispatch(self) -> list[Running]:
        """One dispatch of the next engine that has work; returns the paths that now have all results."""
        engines = self.voices.engines
        while not (engine := engines[self._turn % len(engines)]).pending:
            self._turn += 1
        finished = engine.step()
        self._turn, self._now = self._turn + 1, self._now + 1
        answered = []
        for ticket, completion in finished:
            running, position, facts = self._calls.pop((id(engine), ticket))
            running.give_call(position, completion, self.parse, **facts)
            self.progress.calls += 1
            self.progress.tokens += len(completion.tokens)
            answered.append(running)
        self.progress.dispatches += 1
        self.progress.seconds = time.monotonic() - self._began
        return _ready(answered)

    def _take_tools(self) -> list[Running]:
        """Fill in the tool results that are due; returns the paths that now have all results."""
        jobs = self.tools.due_results(self._now)
        for job in jobs:
            job.running.put(job.position, job.record)
            self.progress.tools += 1
            self.progress.tools_failed += job.record.error is not None
        return _ready(job.running for job in jobs)


def _ready(paths: Iterable[Running]) -> list[Running]:
    """The paths that have all results."""
    return [path for path in dict.fromkeys(paths) if not path.waiting]
