"""Replay: a workflow driven by an episode's record instead of a model must make the same calls."""

from collections.abc import Callable, Sequence
from typing import Any

from marl_jax.rollouts.history import Chat
from marl_jax.rollouts.running import Ask, Limits, Running
from marl_jax.table import CallRecord, Episode, ToolRecord
from marl_jax.workflows.api import Tool, Workflow
from marl_jax.workflows.render import Prompts


def replay(
    episode: Episode,
    workflow: Workflow,
    prompts: Prompts,
    tokenizer: Any,
    *,
    limits: Limits | None = None,
    new_tokens: Callable[[str], int] = lambda role: 1,
) -> Episode:
    """Run the workflow on what the record says came back, tool results included; the episode that comes out.

    Raises ValueError at the first call, tool or ending that differs. `new_tokens`, the longest completion of a
    role, matters only where `limits.context` cut prompts.
    """
    running = Running(
        episode.task,
        episode.sample,
        episode.key,
        workflow,
        prompts,
        Chat(tokenizer),
        limits or Limits(),
        new_tokens,
    )
    try:
        while batch := running.advance():
            if not _answer(running, batch, episode):
                return episode
    finally:
        running.close()
    again = running.episode()
    for name in ("answer", "error"):
        _expect(episode, "ending", name, getattr(again, name), getattr(episode, name))
    _expect(episode, "ending", "number of calls", len(again.calls), len(episode.calls))
    _expect(episode, "ending", "number of tools", len(again.tools), len(episode.tools))
    return again


def _answer(running: Running, batch: Sequence[Ask | Tool], episode: Episode) -> bool:
    """Fill the batch in; False where the record of a failed episode ends."""
    calls, tools, unread = len(running.calls), len(running.tools), False
    for position, item in enumerate(batch):
        ended = (calls >= len(episode.calls)) if isinstance(item, Ask) else (tools >= len(episode.tools))
        if ended and episode.error:
            return False  # this call could not be made, or not be read
        if isinstance(item, Ask):
            call = _same_call(item, episode)
            running.put(position, call)
            calls, unread = calls + 1, unread or call.answer is None
        else:
            running.put(position, _same_tool(item, tools, episode))
            tools += 1
    used_up = (calls, tools) == (len(episode.calls), len(episode.tools))
    return not (episode.error and unread and used_up)  # a reader may have raised, and is not asked again


def _same_tool(tool: Tool, number: int, episode: Episode) -> ToolRecord:
    """The record of the tool, after comparing names."""
    recorded = episode.tools[number].name if number < len(episode.tools) else None
    _expect(episode, f"tool {number}", "name", tool.name, recorded)
    return episode.tools[number]


def _same_call(ask: Ask, episode: Episode) -> CallRecord:
    """The record of the call, after comparing all that the workflow decides."""
    where = f"call {ask.index}"
    _expect(episode, where, "existence", True, ask.index < len(episode.calls))
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
    }.items():
        _expect(episode, where, name, value, getattr(record, name))
    return record


def _expect(episode: Episode, where: str, name: str, now: Any, recorded: Any) -> None:
    if now != recorded:
        title = f"task '{episode.task.id}', sample {episode.sample}, {where}"
        raise ValueError(f"replay differs at {title}: {name} is {now!r:.80}, recorded {recorded!r:.80}")
