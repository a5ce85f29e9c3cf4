"""A walk hears all that a workflow asks for, in turns."""

import itertools

import pytest

from marl_jax.workflows import Call, Tool, workflow
from marl_jax.workflows.walk import walk

SAY = [{"role": "user", "content": "?"}]


@workflow(roles=("a", "b"))
def mixed(task, prompts):
    alone = yield Call("a", SAY)
    tool, left, right = yield [Tool(len, ("xy",)), Call("a", SAY, slot=0), Call("b", SAY, slot=1)]
    nothing = yield []
    last = yield Tool(len, ("z",))
    task.append((alone, tool, left, right, nothing, last))


@workflow(roles=("a",))
def endless(task, prompts):
    try:
        while True:
            yield task
    finally:
        closed.append(task)


closed = []


def test_answers_come_in_the_shape_of_what_was_asked_and_calls_are_counted_without_tools():
    heard = []
    answer = lambda entry, index: (entry.role, index) if isinstance(entry, Call) else "tool"
    turns = list(walk(mixed(heard, None), answer))
    assert [len(turn) for turn in turns] == [1, 3, 0, 1]
    assert heard == [(("a", 0), "tool", ("a", 1), ("b", 2), [], "tool")]


@pytest.mark.parametrize("asked", [Call("a", SAY), [Call("a", SAY)] * 3, []])
def test_a_walk_goes_on_until_it_is_given_up_and_closes_its_workflow(asked):
    closed.clear()
    turns = walk(endless(asked, None), lambda entry, index: None)
    assert [len(turn) for turn in itertools.islice(turns, 5)] == [
        len(asked) if isinstance(asked, list) else 1
    ] * 5
    assert not closed
    turns.close()
    assert closed == [asked]
