"""A workflow walked with answers that are made up: what it asks for, without a model."""

from collections.abc import Callable, Iterator
from typing import Any

from marl_jax.workflows.api import Call, Script, Tool


def walk(
    script: Script,
    answer: Callable[[Call | Tool, int], Any],  # to an entry; a call comes with its index in the episode
) -> Iterator[list[Call | Tool]]:
    """What the workflow yields, turn by turn, for as long as it is asked for; what it raises is raised here."""
    calls = 0
    reply = None
    try:
        while True:
            try:
                asked = script.send(reply)
            except StopIteration:
                return
            many = asked if isinstance(asked, list) else [asked]
            yield many
            answers = []
            for entry in many:
                answers.append(answer(entry, calls))
                calls += isinstance(entry, Call)
            reply = answers if isinstance(asked, list) else answers[0]
    finally:
        script.close()
