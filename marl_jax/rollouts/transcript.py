"""A readable transcript of an episode: the prompt and completion of every call, in order.

Model output is not trusted: control characters are spelled out, so that a terminal obeys none of them.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence

from marl_jax.episodes import CallRecord, Episode, ToolRecord

Decode = Callable[[Sequence[int]], str]  # the text of tokens
Decoders = Decode | Mapping[str, Decode]  # one for all policies, or by policy

INDENT = "    "


def transcript(episode: Episode, asked: Sequence[str] | None = None, width: int | None = None) -> str:
    """The question, every call and tool result in the order they were issued, and how it ended.

    With `asked` (see `prompts_of`), each completion follows its prompt. With `width`, lines are wrapped.
    """
    lines = [f"task {episode.task.id}, sample {episode.sample}, workflow {episode.workflow}"]
    lines[0] += f", path {'.'.join(map(str, episode.path))}" if episode.path else ""
    lines += [_block(str(episode.task.question), width)]
    tools = list(episode.tools)
    for index, call in enumerate(episode.calls):
        while tools and tools[0].after_call < index:
            lines += _tool(tools.pop(0), width)
        lines += [*_call(index, call, width, asked), *_about(call, width), *_graded(episode, index)]
    for tool in tools:
        lines += _tool(tool, width)
    lines += [f"answer: {_inert(str(episode.answer))}"]
    lines += [f"error: {_inert(episode.error)}"] if episode.error else []
    return "\n".join(lines) + "\n"


def decoder_of(decode: Decoders, policy: str) -> Decode:
    """The decoder of a policy's tokens."""
    return decode[policy] if isinstance(decode, Mapping) else decode


def prompts_of(episode: Episode, decode: Decoders) -> list[str]:
    """The prompt of each call as text; for a call that continues a history, only the added part."""
    texts = []
    for call in episode.calls:
        start = 0
        if call.after is not None:
            before = episode.calls[call.after]
            start = len(before.prompt_tokens) + len(before.tokens)
        texts.append(decoder_of(decode, call.policy)(call.prompt_tokens[start:]))
    return texts


def _call(index: int, call: CallRecord, width: int | None, asked: Sequence[str] | None) -> list[str]:
    facts = [f"policy {call.policy}@{call.version}", f"{len(call.prompt_tokens)}+{len(call.tokens)} tokens"]
    facts += ["cut off"] if call.finish_reason == "length" else []
    facts += [f"prompt cut by {call.cut}"] if call.cut else []
    facts += [f"after {call.after}"] if call.after is not None else []
    facts += [f"reads {', '.join(map(str, call.reads))}"] if call.reads else []
    facts += [f"answer {call.answer!r}"]
    head = _wrapped(f"[{index}] {call.role}/{call.slot}, turn {call.turn} ({'; '.join(facts)})", width)
    if asked is None:
        return [head, _block(call.text, width)]
    return [head, "  was asked:", _block(asked[index], width), "  said:", _block(call.text, width)]


def _about(call: CallRecord, width: int | None) -> list[str]:
    """The lines about `Call.about`, where it is set."""
    task = call.about
    if task is None:
        return []
    wanted = f" (wanted: {task.gold!r})" if task.gold else ""
    return [_wrapped(f"  about {task.id}: {task.question}{wanted}", width)]


def _graded(episode: Episode, index: int) -> list[str]:
    """The grade of a solver's answer, where there is one."""
    grade = episode.answers[index] if index < len(episode.answers) else None
    return [] if grade is None else [f"  its own answer is worth {grade:g}"]


def _tool(tool: ToolRecord, width: int | None) -> list[str]:
    return [
        f"[tool] {_inert(tool.name)}",
        _block(f"error: {tool.error}" if tool.error else str(tool.result), width),
    ]


def _block(text: str, width: int | None) -> str:
    lines = (text.strip() or "(nothing)").split("\n")
    return "\n".join(_wrapped(INDENT + line, width) for line in lines)


def _wrapped(line: str, width: int | None) -> str:
    """The line, wrapped if it is too long; leading spaces stay."""
    line = _inert(line)
    if width is None or len(line) <= width:
        return line
    return textwrap.fill(
        line, width, subsequent_indent=INDENT, drop_whitespace=False, replace_whitespace=False
    )


def _inert(text: str) -> str:
    """The text with control characters spelled as in Python, so that a terminal obeys none."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
