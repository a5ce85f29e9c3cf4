"""Episodes that fork: a tree is its paths, each as it is when it is played alone, and what they share is there once."""

import random
import re

import jax
import numpy as np
import pytest
from fake_engine import TOKENIZER, FakeEngine
from micro_engine import CONFIG, SETTINGS
from rollout_kit import PROMPTS, TASKS, parse, ragged, speak, timeless

from marl_jax.learning.estimators.worth import AdvantageConfig, group_column
from marl_jax.models import init
from marl_jax.policies import SamplingSettings, shared
from marl_jax.rollouts import Limits, ToolLog, read_episodes, replay, rollout, transcript, write_episodes
from marl_jax.rollouts.scheduler import task_key
from marl_jax.sampling import Engine
from marl_jax.workflows import Call, Fork, Tool, ToolError, workflow

RAN = []  # the arguments of every tool that ran


def note(*told):
    RAN.append(told)
    if told[-1] == "t1":
        raise OSError("moody")
    return list(told)


@workflow(roles=("speaker", "other"))
def growing(task, prompts, *, rng, ways=3):
    """A tree of uneven branches: the first ends at once, the second forks again, the third calls in parallel."""
    before = rng.integers(1000)
    design = yield speak(f"{task.question} {before}", keep=True)
    try:
        seen = yield Tool(note, ("prefix", task.id))
    except ToolError as error:
        seen = str(error)
    branch = yield Fork(ways)
    draw = rng.integers(1 << 30)
    answer = yield speak(f"{seen} {draw}", after=design, keep=True)
    if branch == 0:
        return answer
    if branch == 1:
        inner = yield Fork(2)
        deeper = yield Fork(2)
        answer = yield speak(f"{inner}{deeper}{rng.integers(1 << 30)}", after=answer, labels={"inner": inner})
    else:
        both = yield [speak("a"), speak("b", slot=1, reads=[design])]
        yield Tool(note, ("leaf", task.id if task.id != "t1" else "-", both[0].text))
    return answer


OVER = "call budget of 64 exhausted: the workflow asks for more; if it should, raise rollout.limits.max_calls"
PATHS = [(0,), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1), (2,)]


def play(flow=growing, tasks=TASKS[:2], engine=None, **options):
    return rollout(
        flow, tasks, engine or FakeEngine(ragged), TOKENIZER, shared(flow.roles), prompts=PROMPTS, parse=parse,
        **{"samples": 2, "seed": 5, "step": 7, **options},
    )  # fmt: skip


def real_engine():
    return Engine(init(jax.random.key(0), CONFIG), CONFIG, SETTINGS, policies=("p0",))


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize("make", [lambda: FakeEngine(ragged), real_engine], ids=["fake", "real"])
def test_a_tree_is_its_paths_played_alone(make):
    engine, settings = make(), SamplingSettings(max_new_tokens=12)
    whole = timeless(play(engine=engine, settings=settings).episodes())
    assert [one.path for one in whole] == PATHS * 4
    for path in PATHS:
        alone = timeless(play(engine=engine, settings=settings, path=path).episodes())
        assert alone == [one for one in whole if one.path == path]


def test_neither_lanes_nor_timing_nor_company_reach_a_path():
    wanted = timeless(play().episodes())
    for options in ({"mode": "free"}, {"tool_delay": 9}, {"ahead": 1}):
        assert timeless(play(engine=FakeEngine(ragged, lanes=1), **options).episodes()) == wanted
    assert timeless(play(tasks=TASKS[1:2], engine=FakeEngine(ragged, lanes=64)).episodes()) == wanted[12:]


def test_noise_follows_from_the_path_and_a_prefix_has_that_of_an_episode_without_forks():
    engine = FakeEngine(ragged)
    play(tasks=TASKS[:1], samples=1, engine=engine)
    mine = (5, 7, task_key(TASKS[0]), 0)
    keys = {request.key for request in engine.requests}
    wanted = {(*mine, 0), (*mine, 0, 1), (*mine, 1, 1), (*mine, 2, 1), (*mine, 2, 2), (*mine, 2, 3)}
    assert keys == wanted | {(*mine, 1, inner, deeper, 2) for inner in (0, 1) for deeper in (0, 1)}
    assert len(engine.requests) == len(keys)


def test_what_a_workflow_draws_follows_from_the_path():
    """Before a fork as without it, behind it anew in each branch."""
    (task,), sown = TASKS[:1], (5, 7, task_key(TASKS[0]), 0)
    episodes = play(tasks=[task], samples=1).episodes()
    words = {one.path: [_shown(call) for call in one.calls] for one in episodes}
    before = np.random.default_rng(sown).integers(1000)
    assert {said[0] for said in words.values()} == {f"{task.question} {before}"}
    draws = {path: re.search(r"\d{4,}", said[1])[0] for path, said in words.items()}
    for path, draw in draws.items():
        seeds = np.random.SeedSequence(sown, spawn_key=path[:1])
        assert int(draw) == np.random.default_rng(seeds).integers(1 << 30)
    assert len({draws[path] for path in ((0,), (1, 0, 0), (2,))}) == 3


@workflow(roles=("speaker",))
def spawning(task, prompts, *, rng):
    yield Fork(2)
    inner = rng.spawn(1)[0]
    return (yield speak(str(inner.integers(1 << 30))))


def test_generators_that_a_branch_spawns_are_its_own():
    said = [one.calls[0] for one in play(spawning, tasks=TASKS[:1], samples=1).episodes()]
    assert len(said) == len({*map(_shown, said)}) == 2
    alone = [play(spawning, tasks=TASKS[:1], samples=1, path=(way,)).episodes()[0].calls[0] for way in (0, 1)]
    assert alone == said


def _shown(call):
    return TOKENIZER.decode(call.prompt_tokens).rsplit("user\n", 1)[1].partition("<|im_end|>")[0]


# ---------------------------------------------------------------- once


def test_what_branches_share_is_one_row_and_its_tools_run_once(tmp_path):
    RAN.clear()
    log = tmp_path / "tools.jsonl"
    table = play(samples=1, tool_log=ToolLog(log))
    assert sorted(told[0] for told in RAN) == ["leaf"] * 2 + ["prefix"] * 2
    # Of each of two trees: the prefix, three branches, four calls behind the inner forks, two in parallel.
    assert len(table) == 2 * (1 + 3 + 4 + 2) and len(table.bare_episodes) == 2 and len(table.episodes()) == 12
    assert [sum(tool.path == () for tool in head.tools) for head in table.bare_episodes] == [1, 1]
    RAN.clear()
    again = play(samples=1, tool_log=ToolLog(log))
    assert RAN == [] and timeless(again.episodes()) == timeless(table.episodes())


def test_rows_say_whose_branch_they_are():
    table = play(tasks=TASKS[:1], samples=1)
    assert table.path.tolist() == [
        [-1] * 3, [0, -1, -1], [1, -1, -1], *([1, i, j] for i in (0, 1) for j in (0, 1)), *[[2, -1, -1]] * 3,
    ]  # fmt: skip
    assert table.call.tolist() == [0, 1, 1, 2, 2, 2, 2, 1, 2, 3]
    assert table.branch.tolist() == [-1, 0, 1, 0, 1, 0, 1, 2, 2, 2]
    assert table.parent.tolist() == [-1, 0, 0, 1, 1, 2, 2, 0, 0, 0]
    assert table.labels[3:7] == ({"inner": 0}, {"inner": 0}, {"inner": 1}, {"inner": 1})
    assert table.labels[0] is None


def test_siblings_are_prefilled_once():
    """Eight branches cost the engine no more prompt tokens than one: a new prompt, and a history that goes on."""

    @workflow(roles=("speaker",))
    def flow(task, prompts):
        first = yield speak(task.question, keep=True)
        yield Fork(8)
        yield [speak("the same words", slot=1), speak("more", after=first)]

    fed = []
    for path in ((), (3,)):
        engine = real_engine()
        table = play(
            flow, TASKS[:1], engine, samples=1, settings=SamplingSettings(max_new_tokens=8), path=path
        )
        assert len(table) == 1 + 2 * (1 if path else 8)
        fed.append(engine.stats.prefilled_tokens)
    assert fed[0] == fed[1] > 0


def test_trees_are_stored_read_back_replayed_and_shown(tmp_path):
    table = play(tasks=TASKS[:3])
    write_episodes(tmp_path / "e.parquet", table)
    again = read_episodes(tmp_path / "e.parquet")
    assert again.episodes() == table.episodes() and again.bare_episodes == table.bare_episodes
    assert again.parent.tolist() == table.parent.tolist()
    for episode in table.episodes():
        replayed = replay(episode, growing, PROMPTS, TOKENIZER)
        assert timeless([replayed]) == timeless([episode])
    assert transcript(table.episodes()[3]).startswith("task t0, sample 0, workflow growing, path 1.1.0\n")


# ---------------------------------------------------------------- shapes of trees


def test_a_fork_may_stand_first_and_last_and_have_one_way():
    @workflow(roles=("speaker",))
    def flow(task, prompts):
        first = yield Fork(2)
        heard = yield speak(f"branch {first}")
        last = yield Fork(1 + first)
        return f"{first}{last}{heard.answer}"

    table = play(flow, TASKS[:1], samples=1)
    assert [leaf.path for leaf in table.bare_episodes[0].leaves] == [(0, 0), (1, 0), (1, 1)]
    answers = [leaf.answer for leaf in table.bare_episodes[0].leaves]
    assert [answer[:2] for answer in answers] == ["00", "10", "11"] and answers[1][2:] == answers[2][2:]
    assert len(table) == 2 and table.path.tolist() == [[0], [1]]


def test_candidates_from_one_state_are_a_list_of_calls_and_a_pick():
    """AT-GRPO's choice: no fork is needed, and the group `state` holds the candidates of a turn."""

    @workflow(roles=("speaker",))
    def flow(task, prompts, *, candidates=3):
        best = None
        for _ in range(2):
            ask = [speak(task.question, slot=slot, after=best, keep=True) for slot in range(candidates)]
            best = max((yield ask), key=lambda said: int(said.answer))
        return best

    table = play(flow, TASKS[:1])
    groups = group_column(table, AdvantageConfig(group="state"))
    assert groups.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    for group in range(4):
        assert len({table.prompt[row].tobytes() for row in np.flatnonzero(groups == group)}) == 1


# ---------------------------------------------------------------- limits and mistakes


def ends(flow, **options):
    (head,) = play(flow, TASKS[:1], samples=1, **options).bare_episodes
    return head


@pytest.mark.parametrize("ways", [0, -1, 2.0, True, "3", None])
def test_a_fork_without_ways_is_refused(ways):
    with pytest.raises(ValueError, match=r"ways of a fork are .*; they must be an integer from 1 on"):
        Fork(ways)


def test_forks_that_would_not_end_end():
    @workflow(roles=("speaker",))
    def narrow(task, prompts):
        while True:
            yield Fork(1)

    @workflow(roles=("speaker",))
    def wide(task, prompts):
        while True:
            yield Fork(2)

    assert ends(narrow).error == OVER
    head = ends(wide, limits=Limits(max_leaves=8))
    assert {leaf.error for leaf in head.leaves} == {
        "a fork of 2 ways could give this episode 16 paths, if all branches fork alike; at most 8 are allowed: fork "
        "fewer ways, or raise rollout.limits.max_leaves"
    }
    assert len(head.leaves) == 8


def test_a_design_of_a_thousand_calls_ends_its_own_path_alone():
    @workflow(roles=("speaker",))
    def flow(task, prompts):
        branch = yield Fork(2)
        yield [speak(slot=slot) for slot in range(1000 if branch else 2)]

    one, other = ends(flow).leaves
    assert one.error is None and other.error == OVER


def test_a_branch_that_fails_leaves_the_others_alone():
    @workflow(roles=("speaker",))
    def flow(task, prompts):
        heard = yield speak()
        branch = yield Fork(3)
        if branch == 1:
            raise LookupError("no way")
        return heard

    table = play(flow, TASKS[:1], samples=1)
    errors = [leaf.error for leaf in table.bare_episodes[0].leaves]
    assert errors[0] is errors[2] is None and errors[1].startswith("LookupError: no way (in flow, line ")
    assert table.bare_episodes[0].error == errors[1] and table.sound.tolist() == [True]
    flat, _ = table.paths()
    assert flat.sound.tolist() == [True, False, True]


def test_a_workflow_that_does_not_come_to_its_fork_again_ends_that_branch():
    chance, memory = random.Random(0), []

    @workflow(roles=("speaker",))
    def moody(task, prompts):
        yield speak(str(chance.random()))
        yield Fork(2)

    @workflow(roles=("speaker",))
    def gone(task, prompts):
        memory.append(1)
        if len(memory) == 1:
            yield speak()
            yield Fork(2)

    for flow, why in ((moody, "prompt_tokens is"), (gone, r"it ends at path \(\) \(None\)")):
        one, other = ends(flow).leaves
        assert one.error is None
        assert re.match(f"the workflow did not reach its fork again: .*{why}", other.error)


def test_a_fork_in_a_list_and_a_branch_that_is_not_there_are_refused():
    @workflow(roles=("speaker",))
    def listed(task, prompts):
        yield [speak(), Fork(2)]

    @workflow(roles=("speaker",))
    def two(task, prompts):
        yield Fork(2)

    assert ends(listed).error.endswith(
        "yielded Fork in a list; yield a Call, a Tool, a list of them, or a Fork"
    )
    assert ends(two, path=(2,)).error == "path (2,) takes branch 2; the fork has branches 0..1"


@pytest.mark.parametrize("labels", [{"type": None}, {1: "a"}, ["type"]])
def test_labels_are_names_with_texts_or_numbers(labels):
    with pytest.raises(ValueError, match="labels of a call to 'speaker' are"):
        Call("speaker", [{"role": "user", "content": ""}], labels=labels)


# ---------------------------------------------------------------- counts


def branching(*ends):
    """One fork; each branch returns this, or raises it."""

    @workflow(roles=("speaker",))
    def ending(task, prompts):
        yield speak(task.question)
        end = ends[(yield Fork(len(ends)))]
        if isinstance(end, Exception):
            raise end
        return end

    return ending


@pytest.mark.parametrize(
    ("ends", "failed", "silent"),
    [
        ((None, "1"), 0, 0),
        ((None, None), 0, 4),
        ((ValueError("bad"), "1"), 0, 0),
        ((ValueError("bad"), KeyError("worse")), 4, 0),
    ],
)
def test_an_episode_fails_or_is_silent_where_all_its_paths_are(ends, failed, silent):
    told = []
    play(branching(*ends), progress=told.append)
    assert (told[-1].done, told[-1].failed, told[-1].silent) == (4, failed, silent)
    assert bool(told[-1].first_error) == bool(told[-1].failed)


def test_a_refused_prompt_is_counted_once_for_an_episode():
    @workflow(roles=("speaker",))
    def long(task, prompts):
        yield speak(task.question)
        yield Fork(2)
        yield speak("x" * 500)

    told = []
    play(long, limits=Limits(context=200), progress=told.append)
    assert (told[-1].prompts_refused, told[-1].failed) == (4, 4)
