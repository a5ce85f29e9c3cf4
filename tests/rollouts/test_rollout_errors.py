import asyncio
import dataclasses
import re
import sys
import types

import pytest
from fake_engine import TOKENIZER, FakeEngine
from rollout_kit import MATH, PROMPTS, TASKS, ragged, run, speak, timeless

from marl_jax.policies import SamplingSettings, isolated, shared
from marl_jax.rollouts import Limits, prompts_of, replay
from marl_jax.task import Task
from marl_jax.workflows import (
    Call,
    Tool,
    eval_opt,
    single,
    voting,
    workflow,
)

# ---------------------------------------------------------------- what a workflow may do


def test_helpers_branches_loops_and_calls_made_up_on_the_way():
    def ask_twice(text):
        first = yield speak(text)
        second = yield speak("again", after=first)
        return second

    @workflow(roles=("speaker", "other"))
    def free_form(task, prompts):
        last = yield from ask_twice(task.question)
        for word in last.text[:2]:
            other = prompts.other(text=word) + prompts.speaker(text="and more")
            last = yield Call("other", other, reads=[last])
        whole = yield from voting(task, MATH)
        return whole if last.answer else None

    with_voters = dataclasses.replace(free_form, roles=(*free_form.roles, *voting.roles))
    for episode in run(with_voters):
        assert episode.error is None
        assert [c.role for c in episode.calls][:2] == ["speaker", "speaker"]
        assert [c.role for c in episode.calls][-4:] == ["generator"] * 3 + ["aggregator"]
        assert episode.calls[1].after == 0
        first, second = episode.calls[:2]
        assert (
            second.prompt_tokens[: len(first.prompt_tokens + first.tokens)]
            == first.prompt_tokens + first.tokens
        )


def test_an_answer_can_be_a_completion_a_text_or_nothing():
    @workflow(roles=("speaker",))
    def answers(task, prompts):
        heard = yield speak()
        return {"t0": heard, "t1": "text", "t2": None, "t3": 7}[task.id]

    episodes = run(answers, TASKS[:4], FakeEngine(lambda p, r: r"\boxed{5}"))
    assert [e.answer for e in episodes] == ["5", "text", None, None]
    assert episodes[3].error == "workflow 'answers' returned int; return a Completion, a text or None"


def test_messages_that_the_chat_template_refuses_are_told_in_a_line(monkeypatch):
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    monkeypatch.setattr(TOKENIZER, "chat_template", refusal + TOKENIZER.chat_template)

    @workflow(roles=("speaker",))
    def instructed(task, prompts):
        yield Call("speaker", [{"role": "system", "content": "Be brief."}])

    troubles = []
    (episode,) = run(instructed, TASKS[:1], progress=lambda progress: troubles.append(progress.first_error))
    assert episode.error == "the chat template of the tokenizer '' cannot be rendered: no system message"
    assert troubles == [episode.error]


def test_turns_count_within_role_and_slot():
    @workflow(roles=("speaker",))
    def turns(task, prompts):
        yield [speak(slot=0), speak(slot=1)]
        yield speak(slot=1)
        yield speak(slot=0)

    calls = run(turns, TASKS[:1])[0].calls
    assert [(c.slot, c.turn) for c in calls] == [(0, 0), (1, 0), (1, 1), (0, 1)]


# ---------------------------------------------------------------- errors stay in their episode


class Strange(BaseException):
    """No Exception, and nobody's wish to stop the run."""


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def broken(kind):
    stray = []

    @workflow(roles=("speaker",))
    def flow(task, prompts):
        heard = yield speak()
        stray.append(heard)
        if task.id == "t2":
            if kind == "raises":
                raise RuntimeError("boom")
            if kind == "finds nothing":
                next(line for line in heard.text.splitlines() if line == "a line that nobody wrote")
            if kind == "exits":
                raise SystemExit(1)
            if kind == "is cancelled":
                raise asyncio.CancelledError
            if kind == "leaves in its own way":
                raise Strange("gone")
            if kind == "leaves while it is closed":
                try:
                    yield "hello"
                finally:
                    raise Strange("gone")
            if kind == "unspeakable":
                raise Unspeakable
            if kind == "bad time-out":
                yield Tool(len, ("x",), timeout_s=None)
            if kind == "not a call":
                yield "hello"
            if kind == "list of not calls":
                yield [speak(), 3]
            if kind == "a list in a list":
                yield [[speak()]]
            if kind == "unknown role":
                yield Call("speakr", [{"role": "user", "content": "x"}])
            if kind == "bad call":
                yield speak(text=5)
            if kind == "same slot":
                yield [speak(), speak()]
            if kind == "foreign completion":
                yield speak(reads=[dataclasses.replace(heard)])
            if kind == "bad reader":
                yield speak(read=lambda text: 5)
            if kind == "raising reader":
                yield speak(read=lambda text: text[1000])
            if kind == "exiting reader":
                yield speak(read=sys.exit)
            if kind == "endless":
                while True:
                    yield speak()
            if kind == "endless tools":
                while True:
                    yield Tool(len, ("x",))
            if kind == "endless nothing":
                while True:
                    yield []
            if kind == "too many at once":
                yield [speak(slot=i) for i in range(1000)]
            if kind == "clings to life":
                try:
                    raise ValueError("once")
                finally:
                    yield "more"
        return "fine"

    return flow


ERRORS = {
    "raises": r"RuntimeError: boom \(in flow, line \d+\)",
    "finds nothing": r"^StopIteration: \(in flow, line \d+\)$",
    "exits": "SystemExit: 1",
    "is cancelled": "CancelledError:",
    "leaves in its own way": "Strange: gone",
    "leaves while it is closed": "workflow 'flow' yielded str",
    "unspeakable": r"Unspeakable \(in flow, line \d+\)",
    "bad time-out": "ValueError: timeout_s of tool 'len' is None",
    "not a call": "workflow 'flow' yielded str; yield a Call, a Tool, a list of them, or a Fork",
    "list of not calls": "workflow 'flow' yielded int in a list; yield a Call",
    "a list in a list": "workflow 'flow' yielded list in a list; yield a Call",
    "unknown role": "workflow 'flow' calls 'speakr', but declares only: speaker",
    "bad call": "ValueError: a message to 'speaker' needs 'role' and 'content'",
    "same slot": "two parallel calls of 'speaker' share slot 0: give each its own slot",
    "foreign completion": "refers to no completion of this episode",
    "bad reader": "TypeError: the reader of 'speaker' returned int, not text or None",
    "raising reader": "IndexError",
    "exiting reader": "SystemExit",
    "endless": "call budget of 20 exhausted",
    "endless tools": "call budget of 20 exhausted",
    "endless nothing": "call budget of 20 exhausted",
    "too many at once": "call budget of 20 exhausted",
    "clings to life": "yielded str",
}


@pytest.mark.parametrize(("kind", "message"), ERRORS.items(), ids=list(ERRORS))
def test_a_broken_workflow_ends_its_own_episode_and_harms_no_other(kind, message):
    flow, limits = broken(kind), Limits(max_calls=20)
    episodes = run(flow, limits=limits)
    assert re.search(message, episodes[2].error)
    assert episodes[2].answer is None
    assert 1 <= len(episodes[2].calls) <= 20
    assert all(e.answer == "fine" and e.error is None for e in episodes if e.task.id != "t2")
    again = replay(episodes[2], flow, PROMPTS, TOKENIZER, limits=limits)
    assert timeless([again]) == timeless([episodes[2]])


@pytest.mark.parametrize("where", ["workflow", "reader"])
def test_ctrl_c_ends_the_rollout_wherever_it_comes(where):
    def stop(text):
        raise KeyboardInterrupt

    @workflow(roles=("speaker",))
    def flow(task, prompts):
        yield speak(read=stop if where == "reader" else None)
        stop("")

    engine = FakeEngine(ragged)
    with pytest.raises(KeyboardInterrupt):
        run(flow, engine=engine)
    assert engine.pending == 0


@pytest.mark.parametrize("error", [AttributeError, SystemExit, asyncio.CancelledError, Strange, Unspeakable])
@pytest.mark.parametrize(
    ("flow", "calls"), [(voting, 3), (single, 1), (eval_opt, 1)], ids=["voting", "single", "eval_opt"]
)
def test_a_parser_that_raises_ends_the_episode_it_was_asked_in(flow, calls, error):
    def parser(task, text):
        if task.id == "t1":
            raise error
        return "1"

    episodes = run(flow, prompts=MATH, parse=parser)
    assert episodes[1].error.startswith(error.__name__)
    assert len(episodes[1].calls) == calls
    assert replay(episodes[1], flow, MATH, TOKENIZER) == episodes[1]
    assert [e.error is None for e in episodes] == [True, False, True, True, True, True]


def test_a_request_that_the_engine_refuses_ends_its_own_episode():
    class Small(FakeEngine):
        def submit(self, request):
            if "3+3" in TOKENIZER.decode(request.tokens):
                raise ValueError("this engine is too small")
            return super().submit(request)

    episodes = run(voting, engine=Small(ragged), prompts=MATH)
    assert [e.error is None for e in episodes] == [True, True, True, False, True, True]
    assert "this engine is too small" in episodes[3].error


def test_an_engine_that_loses_requests_is_found_out():
    class Leaky(FakeEngine):
        def step(self):
            return [pair for pair in super().step() if pair[0] != 1]

    with pytest.raises(RuntimeError, match="lost the requests of 1 paths"):
        run(voting, engine=Leaky(ragged), prompts=MATH)


# ---------------------------------------------------------------- refused before anything runs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy_map": {"generator": "p0"}}, "lacks the role 'aggregator'"),
        ({"policy_map": {**shared(voting.roles), "agregator": "p0"}}, "did you mean 'aggregator'"),
        ({"settings": {"generator": SamplingSettings()}}, "sampling settings are for"),
        ({"samples": 0}, "samples is 0; it must be at least 1"),
        ({"tasks": [TASKS[0], TASKS[1], TASKS[0]]}, "task 't0' is given more than once"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        ({"step": 1.5}, "step is 1.5; it must be at least 0, and an integer"),
        ({"mode": "fast"}, "'fixed' or 'free'"),
        ({"tasks": [Task("c", "proof", "?")]}, "task 'c' is proof; workflow 'voting' is for: math, code"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(options, message):
    engine = FakeEngine(ragged)
    with pytest.raises(ValueError, match=message):
        run(voting, engine=engine, prompts=MATH, **options)
    assert engine.requests == []


def test_a_policy_without_an_engine_is_refused():
    with pytest.raises(ValueError, match="no engine serves the policy 'p1'"):
        run(voting, engine={"p0": FakeEngine(ragged)}, policy_map=isolated(voting.roles), prompts=MATH)


def test_a_voter_without_a_policy_is_told_so():
    voters = {"generator/0": "a", "generator/1": "b", "aggregator": "c"}
    episodes = run(voting, policy_map=voters, prompts=MATH)
    assert all("neither 'generator/2' nor 'generator'" in e.error for e in episodes)


# ---------------------------------------------------------------- the context


@workflow(roles=("speaker",))
def wordy(task, prompts):
    heard = yield speak("start " + "long " * (40 if task.id == "t1" else 0) + "stop")
    return heard.text


def test_a_prompt_longer_than_the_context_is_refused_and_counted():
    last = []
    options = {
        "settings": SamplingSettings(max_new_tokens=20),
        "progress": lambda p: last.append(dataclasses.replace(p)),
    }
    reply = FakeEngine(lambda p, r: "ok")
    episodes = run(wordy, TASKS[:3], reply, limits=Limits(context=150), **options)
    assert [e.error is None for e in episodes] == [True, False, True]
    way_out = "raise max_prompt (and the limits' context, if set), or set overlong=truncate in the limits"
    assert episodes[1].error.endswith(way_out)
    assert (last[-1].prompts_refused, last[-1].prompts_cut, last[-1].failed) == (1, 0, 1)


@pytest.mark.parametrize("limits", [None, Limits(), Limits(overlong="truncate")])
def test_the_context_is_the_engines_own_unless_it_is_given(limits):
    last = []
    engine = FakeEngine(lambda p, r: "ok")
    engine.settings = types.SimpleNamespace(context=150)
    episodes = run(
        wordy, TASKS[:3], engine, limits=limits, settings=SamplingSettings(max_new_tokens=20),
        progress=lambda p: last.append(dataclasses.replace(p)),
    )  # fmt: skip
    cut = limits is not None and limits.overlong == "truncate"
    assert [e.error is None for e in episodes] == [True, cut, True]
    assert (last[-1].prompts_refused, last[-1].prompts_cut) == (int(not cut), int(cut))


def test_a_prompt_longer_than_the_context_is_cut_in_the_middle_and_counted():
    last = []
    options = {
        "settings": SamplingSettings(max_new_tokens=20),
        "progress": lambda p: last.append(dataclasses.replace(p)),
    }
    limits = Limits(context=150, overlong="truncate")
    episodes = run(wordy, TASKS[:3], FakeEngine(lambda p, r: "ok"), limits=limits, **options)
    assert all(e.error is None for e in episodes)
    first = episodes[1].calls[0]
    assert first.cut > 0 and len(first.prompt_tokens) + 20 <= 150
    assert "start" in TOKENIZER.decode(first.prompt_tokens) and "stop" in TOKENIZER.decode(
        first.prompt_tokens
    )
    assert (last[-1].prompts_refused, last[-1].prompts_cut, last[-1].failed) == (0, 1, 0)


def test_cutting_a_later_turn_leaves_its_history_whole():
    @workflow(roles=("speaker",))
    def growing(task, prompts):
        heard = yield speak("start")
        heard = yield speak("y" * 200, after=heard)
        return heard.text

    limits = Limits(context=120, overlong="truncate")
    episode = run(
        growing,
        TASKS[:1],
        FakeEngine(lambda p, r: "ok"),
        limits=limits,
        settings=SamplingSettings(max_new_tokens=20),
    )[0]
    first, second = episode.calls
    history = first.prompt_tokens + first.tokens
    assert second.cut > 0 and second.prompt_tokens[: len(history)] == history
    asked = prompts_of(episode, TOKENIZER.decode)
    assert asked[1] == TOKENIZER.decode(second.prompt_tokens[len(history) :])
