"""Replay: a workflow driven by an episode's record instead of a model must make the same calls.

`replay` checks a record in this way, and `branches` brings the other branches to a fork: a generator cannot be copied.

    one path plays --fork--> it goes on as branch 0; each other branch: a new generator, sent the recorded results
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from marl_jax.episodes import CallRecord, Episode, Leaf, ToolRecord
from marl_jax.rollouts.history import Chats
from marl_jax.rollouts.running import Ask, Limits, Running
from marl_jax.workflows.api import Tool, Workflow
from marl_jax.workflows.render import Prompts

Batch = list[Ask | Tool]


class Differs(ValueError):
    """The workflow does not repeat its record."""


def branches(running: Running) -> Iterator[tuple[Running, Batch]]:
    """The other branches of the forks that `running` has just passed, each with its first batch after the fork."""
    if not running.others:
        return
    past = dataclasses.replace(running.episode(), error=None)
    paths, running.others = running.others, []
    for path in paths:
        other = dataclasses.replace(running, due=path)  # from the beginning
        yield other, _replay_to_fork(other, path, past)


def tree(paths: Sequence[Episode]) -> Episode:
    """One episode with all of its paths; calls that they share are stored once."""
    if not any(episode.path for episode in paths):
        (flat,) = paths
        return flat
    calls = {(call.path, place): call for episode in paths for place, call in enumerate(episode.calls)}
    tools = {(tool.path, place): tool for episode in paths for place, tool in enumerate(episode.tools)}
    ordered = sorted(paths, key=lambda episode: episode.path)
    return dataclasses.replace(
        ordered[0],
        path=(),
        answer=None,
        calls=tuple(calls[key] for key in sorted(calls)),
        tools=tuple(tools[key] for key in sorted(tools)),
        error=next((episode.error for episode in ordered if episode.error), None),
        seconds=max(episode.seconds for episode in ordered),
        leaves=tuple(Leaf(episode.path, episode.answer, episode.error) for episode in ordered),
    )


def replay(
    episode: Episode,
    workflow: Workflow,
    prompts: Prompts,
    tokenizer: Any | Mapping[str, Any],
    *,
    limits: Limits | None = None,
    new_tokens: Callable[[str], int] = lambda role: 1,
) -> Episode:
    """Run the workflow on the recorded completions and tool results; returns the resulting episode.

    `episode` has no forks, or is one path. Raises ValueError at the first call, tool or ending that differs.
    `tokenizer` is one for all policies, or {policy: tokenizer}.
    `new_tokens`, the longest completion of a role, matters only if `limits.context` cut prompts.
    """
    chats = Chats(tokenizer, {f"{call.role}/{call.slot}": call.policy for call in episode.calls})
    running = Running(
        episode.task,
        episode.sample,
        episode.key,
        workflow,
        prompts,
        chats.of,
        limits or Limits(),
        new_tokens,
        episode.path,
    )
    try:
        while batch := running.advance():
            if not _answer(running, batch, episode):
                return episode
    finally:
        running.close()
    result = running.episode()
    for name in ("answer", "error", "path"):
        _expect(episode, "ending", name, getattr(result, name), getattr(episode, name))
    _expect(episode, "ending", "number of calls", len(result.calls), len(episode.calls))
    _expect(episode, "ending", "number of tools", len(result.tools), len(episode.tools))
    return result


def _replay_to_fork(other: Running, path: tuple[int, ...], past: Episode) -> Batch:
    """Send a branch the results from before its fork; returns its next batch, empty if it has ended."""
    try:
        while batch := other.advance():
            if (len(other.calls), len(other.tools)) == (len(past.calls), len(past.tools)):
                break
            _answer(other, batch, past)
        if other.path[: len(path)] != path:
            raise Differs(f"it ends at path {other.path} ({other.error})")
        return batch
    except Differs as error:
        other.stop(
            f"the workflow did not reach its fork again: {error}; what it yields may depend only on its task, its "
            "results and rng"
        )
        return []


def _answer(running: Running, batch: Sequence[Ask | Tool], episode: Episode) -> bool:
    """Fill in the batch from the record; False where the record of a failed episode ends."""
    calls, tools, unread = len(running.calls), len(running.tools), False
    for position, item in enumerate(batch):
        ended = (calls >= len(episode.calls)) if isinstance(item, Ask) else (tools >= len(episode.tools))
        if ended and episode.error:
            return False  # this call could not be made or read
        if isinstance(item, Ask):
            call = _same_call(item, episode)
            running.put(position, call)
            calls, unread = calls + 1, unread or call.answer is None
        else:
            running.put(position, _same_tool(item, tools, episode))
            tools += 1
    used_up = (calls, tools) == (len(episode.calls), len(episode.tools))
    return not (episode.error and unread and used_up)  # a reader raised, and does not run again


def _same_tool(tool: Tool, number: int, episode: Episode) -> ToolRecord:
    """The record of the tool, after comparing names."""
    recorded = episode.tools[number].name if number < len(episode.tools) else None
    _expect(episode, f"tool {number}", "name", tool.name, recorded)
    return episode.tools[number]


def _same_call(ask: Ask, episode: Episode) -> CallRecord:
    """The record of the call, after comparing all that the workflow decides."""
    place = f"call {ask.index}"
    _expect(episode, place, "it", "made", "made" if ask.index < len(episode.calls) else "absent")
    record = episode.calls[ask.index]
    call = ask.call
    for name, value in {
        "role": call.role,
        "slot": call.slot,
        "turn": ask.turn,
        "after": call.after.call if call.after else None,
        "reads": tuple(read.call for read in call.reads),
        "prompt_tokens": ask.prompt,
        "cut": ask.cut,
        "about": call.about,
    }.items():
        _expect(episode, place, name, value, getattr(record, name))
    return record


def _expect(episode: Episode, place: str, name: str, now: Any, recorded: Any) -> None:
    if now != recorded:
        title = f"task '{episode.task.id}', sample {episode.sample}, {place}"
        raise Differs(f"replay differs at {title}: {name} is {now!r:.80}, recorded {recorded!r:.80}")
