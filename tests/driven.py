"""Workflows driven by hand: the calls that they make, where a test says what is answered."""

from marl_jax.rewards.math.boxed import extract_boxed
from marl_jax.workflows import Completion, Tool, ToolError


def drive(script, say, run_tool=None):
    """The calls of a workflow that has begun, and what it returns, where `say(call, calls before)` is each text.

    A completion is as many tokens as its text has letters, and its answer is what is in its box if no reader is given.
    """
    calls, reply = [], None
    try:
        while True:
            asked = script.throw(reply) if isinstance(reply, ToolError) else script.send(reply)
            replies = []
            for item in asked if isinstance(asked, list) else [asked]:
                if isinstance(item, Tool):
                    replies.append(run_tool(*item.args))
                    continue
                text = say(item, len(calls))
                answer, n = item.read(text) if item.read else extract_boxed(text), len(text)
                replies.append(Completion(text, (1,) * n, (0.0,) * n, "stop", answer, len(calls)))
                calls.append(item)
            reply = replies if isinstance(asked, list) else replies[0]
    except StopIteration as stop:
        return calls, stop.value
