"""An episode as a person reads it: who said what to whom, in order."""

import textwrap

from marl_jax.table import CallRecord, Episode, ToolRecord


def transcript(episode: Episode) -> str:
    """The question, every call and tool result in the order they were issued, and how it ended."""
    lines = [f"task {episode.task.id}, sample {episode.sample}, workflow {episode.workflow}"]
    lines += [_block(episode.task.question)]
    tools = list(episode.tools)
    for index, call in enumerate(episode.calls):
        while tools and tools[0].after_call < index:
            lines += _tool(tools.pop(0))
        lines += _call(index, call)
    for tool in tools:
        lines += _tool(tool)
    lines += [f"answer: {episode.answer}"] + ([f"error: {episode.error}"] if episode.error else [])
    return "\n".join(lines) + "\n"


def _call(index: int, call: CallRecord) -> list[str]:
    facts = [f"policy {call.policy}@{call.version}", f"{len(call.prompt_tokens)}+{len(call.tokens)} tokens"]
    facts += ["cut off"] if call.finish_reason == "length" else []
    facts += [f"prompt cut by {call.cut}"] if call.cut else []
    facts += [f"after {call.after}"] if call.after is not None else []
    facts += [f"reads {', '.join(map(str, call.reads))}"] if call.reads else []
    facts += [f"answer {call.answer!r}"]
    return [f"[{index}] {call.role}/{call.slot}, turn {call.turn} ({'; '.join(facts)})", _block(call.text)]


def _tool(tool: ToolRecord) -> list[str]:
    return [f"[tool] {tool.name}", _block(f"error: {tool.error}" if tool.error else str(tool.result))]


def _block(text: str) -> str:
    return textwrap.indent(text.strip() or "(nothing)", "    ", lambda line: True)
