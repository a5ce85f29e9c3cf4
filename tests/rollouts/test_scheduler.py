import dataclasses
import random
import threading
import time

import pytest
from fake_engine import END_ID, FakeEngine
from rollout_kit import MATH, TASKS, ragged, run, speak, timeless, tool_user

from marl_jax.policies import SamplingSettings, isolated, role_settings
from marl_jax.task import Task
from marl_jax.workflows import (
    Tool,
    ToolError,
    single,
    voting,
    workflow,
)

# ---------------------------------------------------------------- order and randomness


def test_episodes_come_back_task_by_task_whatever_order_they_ended_in():
    episodes = run(voting, prompts=MATH, samples=2)
    assert [(e.task.id, e.sample) for e in episodes] == [(t.id, s) for t in TASKS for s in (0, 1)]
    assert all(e.error is None and len(e.calls) == 4 for e in episodes)


def test_an_episode_does_not_depend_on_its_company():
    everything = run(voting, prompts=MATH, samples=2)
    alone = [run(voting, [task], FakeEngine(ragged, lanes=1), prompts=MATH, samples=2) for task in TASKS]
    assert timeless(everything) == timeless(e for episodes in alone for e in episodes)


def test_more_samples_of_a_task_can_be_drawn_later():
    at_once = run(voting, prompts=MATH, samples=3)
    later = run(voting, prompts=MATH, samples=1, first_sample=2)
    assert timeless(later) == timeless(episode for episode in at_once if episode.sample == 2)


def test_every_call_has_noise_of_its_own():
    engine = FakeEngine(ragged)
    for step in (0, 1):
        run(voting, engine=engine, prompts=MATH, samples=3, step=step)
    keys = [request.key for request in engine.requests]
    assert len(set(keys)) == len(keys) == 2 * 6 * 3 * 4


def test_other_seeds_and_steps_are_other_episodes():
    first, seed, step = (run(voting, prompts=MATH, **o) for o in ({}, {"seed": 1}, {"step": 1}))
    assert len({run[0].calls[0].logprobs for run in (first, seed, step)}) == 3


def test_rng_is_a_function_of_seed_step_task_and_sample():
    @workflow(roles=("speaker",))
    def dice(task, prompts, *, rng):
        yield speak()
        return str(rng.integers(1 << 30))

    thrown = [e.answer for e in run(dice, samples=3)]
    assert len(set(thrown)) == 18
    assert thrown == [e.answer for e in run(dice, samples=3)]
    assert thrown != [e.answer for e in run(dice, samples=3, seed=1)]


# ---------------------------------------------------------------- the schedule


def test_there_is_no_barrier_between_turns_or_roles():
    def one_slow_voter(prompt, request):
        return "x" * (400 if request.key[3:] == (0, 0) else 4)

    engine = FakeEngine(one_slow_voter, lanes=64)
    run(voting, TASKS[:2], engine, prompts=MATH, samples=2, settings=SamplingSettings(max_new_tokens=500))
    together = [{key[-1] for key in batch} for batch in engine.batches]
    assert {0, 3} in together  # an aggregator speaks while a voter of another episode still does


def test_an_episode_is_told_of_as_it_ends_while_others_go_on():
    engine, told = FakeEngine(ragged), []
    episodes = run(
        voting,
        engine=engine,
        prompts=MATH,
        samples=2,
        finished=lambda episode: told.append((episode, engine.pending)),
    )
    assert timeless(sorted((episode for episode, _ in told), key=episodes.index)) == timeless(episodes)
    assert sum(pending > 0 for _, pending in told) > len(episodes) // 2


def test_engines_take_turns():
    order = []

    class Named(FakeEngine):
        def step(self):
            order.append(self.name)
            return super().step()

    engines = {policy: Named(lambda prompt, request: "x" * 40) for policy in ("p0", "p1")}
    for name, engine in engines.items():
        engine.name = name

    @workflow(roles=("speaker", "other"))
    def both(task, prompts):
        yield [speak(), dataclasses.replace(speak(), role="other")]

    run(both, engine=engines, policy_map=isolated(both.roles))
    assert order == ["p0", "p1"] * (len(order) // 2)


def test_new_episodes_begin_only_while_few_requests_wait():
    seen = []

    class Watched(FakeEngine):
        def step(self):
            seen.append(self.pending)
            return super().step()

    engine = Watched(ragged, lanes=4)
    many = [Task(f"t{i}", "math", f"{i}=?") for i in range(60)]
    run(voting, many, engine, prompts=MATH, ahead=6)
    assert max(seen) <= 6 + 3


def test_the_clock_has_no_say_in_the_schedule():
    runs = []
    for seed in range(3):
        dice = random.Random(seed)

        def jitter(name, text, dice=dice):
            time.sleep(dice.random() / 50)
            return [name, len(text)]

        engine = FakeEngine(ragged)
        episodes = run(tool_user(jitter), engine=engine, samples=4, tool_delay=2)
        assert [tool.error for e in episodes for tool in e.tools] == [None] * len(episodes)
        runs.append((timeless(episodes), engine.batches))
    for episodes, batches in runs[1:]:
        assert batches == runs[0][1]
        assert episodes == runs[0][0]


@pytest.mark.parametrize(("mode", "outcome"), [("fixed", "failed: wait: timeout"), ("free", "done")])
def test_free_mode_never_waits_for_a_tool(mode, outcome):
    """A tool that another episode's last call sets free: only a schedule that goes on meanwhile can end it."""
    free = threading.Event()

    def wait():
        return "done" if free.wait(60) else "too late"

    @workflow(roles=("speaker",))
    def pair(task, prompts):
        if task.id == "t0":
            try:
                return (yield Tool(wait, timeout_s=0.3 if mode == "fixed" else 30.0))
            except ToolError as error:
                return f"failed: {error}"
        for _ in range(20):
            yield speak()
        free.set()

    episodes = run(pair, TASKS[:2], mode=mode, tool_delay=1)
    assert episodes[0].answer == outcome


def test_a_rollout_of_tools_alone_ends():
    @workflow(roles=("speaker",))
    def silent(task, prompts):
        values = yield [Tool(str.upper, (task.id,)), Tool(len, (task.id,))]
        return f"{values}"

    for mode in ("fixed", "free"):
        assert [e.answer for e in run(silent, mode=mode)] == [f"['{t.id.upper()}', 2]" for t in TASKS]


def test_no_tasks_are_no_episodes():
    assert run(voting, [], prompts=MATH) == []


# ---------------------------------------------------------------- who answers, and how


def test_policies_versions_and_settings_reach_request_and_record():
    engine = FakeEngine(ragged)
    voters = {"generator": "a", "generator/1": "b", "aggregator": "c"}
    settings = role_settings(
        voting.roles,
        SamplingSettings(temperature=0.5, max_new_tokens=64),
        {"aggregator": {"max_new_tokens": 9}},
    )
    episode = run(
        voting, TASKS[:1], engine, voters, prompts=MATH, settings=settings, versions={"a": 3, "b": 5}
    )[0]
    assert [(c.policy, c.version, c.temperature) for c in episode.calls] == [
        ("a", 3, 0.5), ("b", 5, 0.5), ("a", 3, 0.5), ("c", 0, 0.5),
    ]  # fmt: skip
    assert [(r.policy, r.max_new_tokens, r.stop_tokens) for r in engine.requests] == [
        ("a", 64, (END_ID,)), ("b", 64, (END_ID,)), ("a", 64, (END_ID,)), ("c", 9, (END_ID,)),
    ]  # fmt: skip
    assert len(episode.calls[3].tokens) <= 9


def test_thousands_of_episodes_run_at_once():
    waiting = []

    class Watched(FakeEngine):
        def step(self):
            waiting.append(self.pending)
            return super().step()

    engine = Watched(ragged, lanes=1000, steps=20)
    episodes = run(single, TASKS, engine, prompts=MATH, samples=500, ahead=10_000)
    assert waiting[0] == len(episodes) == 3000
    assert all(episode.error is None for episode in episodes)
