"""The record: written, read back, printed, replayed."""

import dataclasses
import gzip
import subprocess
import sys

import numpy as np
import pytest
from fake_engine import TOKENIZER, FakeEngine

from marl_jax.policies import SamplingSettings, shared
from marl_jax.rollouts import (
    CallRecord,
    Episode,
    Limits,
    ToolRecord,
    read_episodes,
    replay,
    rollout,
    transcript,
    write_episodes,
)
from marl_jax.tasks.task import Task
from marl_jax.workflows import Call, Prompts, Tool, ToolError, load_prompts, voting, workflow

TASK = Task(
    "apps/7",
    "code",
    "Print 42. Ω≈ç",
    tests=({"stdin": "", "stdout": "42\n"},),
    level=2,
    meta={"source": "apps"},
)
FIRST = CallRecord(
    "generator",
    "p0",
    0,
    0,
    (1, 2, 3),
    (4, 5, 6),
    (-0.25, -1.5, -0.0),
    "print(41)",
    "stop",
    "print(41)",
    version=3,
)
SECOND = CallRecord(
    "generator", "p0", 0, 1, (1, 2, 3, 4, 5, 6, 7), (8,), (-0.5,), "\ud800 ¶\n", "length", None,
    reads=(0,), after=0, cut=2, temperature=0.5, kept=((8, 9),),
)  # fmt: skip
TOOL = ToolRecord("run_public_tests", {"passed": False, "got": [41, None, "é"]}, None, 0)
EPISODE = Episode(
    TASK, 1, "self_refine", (FIRST, SECOND), None, (TOOL,), "RuntimeError: boom", 1.25, (0, 3, 9, 1)
)


def test_episodes_are_read_back_as_they_were_written(tmp_path):
    other = dataclasses.replace(
        EPISODE, task=dataclasses.replace(TASK, id="apps/8"), calls=(), tools=(), error=None
    )
    episodes = [EPISODE, dataclasses.replace(EPISODE, sample=2), other, EPISODE]
    write_episodes(tmp_path / "deep" / "0001.jsonl.gz", episodes)
    assert read_episodes(tmp_path / "deep" / "0001.jsonl.gz") == episodes


def test_log_probs_keep_every_bit(tmp_path):
    bits = np.random.default_rng(0).integers(0, 2**32, 5000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = np.append(values[~np.isnan(values)], np.float32([-np.inf, -0.0, 1e-45, -3.4e38]))
    call = dataclasses.replace(FIRST, logprobs=tuple(values.tolist()), tokens=tuple(range(len(values))))
    write_episodes(tmp_path / "e.gz", [dataclasses.replace(EPISODE, calls=(call,))])
    again = np.float32(read_episodes(tmp_path / "e.gz")[0].calls[0].logprobs)
    np.testing.assert_array_equal(again.view(np.uint32), values.view(np.uint32))


def test_a_history_is_stored_once(tmp_path):
    rng = np.random.default_rng(0)
    calls = []
    for turn in range(8):
        before = calls[-1].prompt_tokens + calls[-1].tokens if calls else ()
        new = [tuple(rng.integers(0, 150_000, 500).tolist()) for _ in range(2)]
        calls.append(
            dataclasses.replace(
                FIRST,
                turn=turn,
                prompt_tokens=before + new[0],
                tokens=new[1],
                logprobs=(0.0,) * 500,
                after=turn - 1 if turn else None,
            )
        )
    write_episodes(tmp_path / "e.gz", [dataclasses.replace(EPISODE, calls=tuple(calls))])
    assert read_episodes(tmp_path / "e.gz")[0].calls == tuple(calls)
    assert (tmp_path / "e.gz").stat().st_size < 8 * 1000 * 4  # 8 x 1000 new tokens of 18 random bits


def test_a_prompt_that_does_not_follow_its_history_is_stored_as_it_is(tmp_path):
    stray = dataclasses.replace(SECOND, prompt_tokens=(9, 9))
    write_episodes(tmp_path / "e.gz", [dataclasses.replace(EPISODE, calls=(FIRST, stray))])
    assert read_episodes(tmp_path / "e.gz")[0].calls[1] == stray


def test_a_damaged_file_is_refused_by_name(tmp_path):
    path = tmp_path / "e.gz"
    write_episodes(path, [EPISODE] * 3)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"e\.gz' cannot be read as episodes"):
        read_episodes(path)
    path.write_bytes(b"not gzip")
    with pytest.raises(ValueError, match=r"e\.gz' cannot be read as episodes"):
        read_episodes(path)
    path.write_bytes(gzip.compress(b'{"format": 99}\n'))
    with pytest.raises(ValueError, match="this version reads format 1"):
        read_episodes(path)
    with pytest.raises(FileNotFoundError):
        read_episodes(tmp_path / "none.gz")


def test_whatever_is_broken_in_a_file_it_is_refused_by_name(tmp_path):
    path, dice = tmp_path / "e.gz", np.random.default_rng(0)
    write_episodes(path, [EPISODE] * 3)
    whole = path.read_bytes()
    inside = gzip.decompress(whole)
    for data, pack in ((whole, bytes), (inside, gzip.compress)):
        for _ in range(300):
            broken = bytearray(data)
            broken[dice.integers(len(broken))] = dice.integers(256)
            path.write_bytes(pack(bytes(broken)))
            try:
                read_episodes(path)  # a byte in a text, or in the header, may go unnoticed
            except ValueError as error:
                assert "e.gz' cannot be read as episodes" in str(error)


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "e.gz"
    write_episodes(path, [EPISODE])

    def failing():
        yield dataclasses.replace(EPISODE, sample=2)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_episodes(path, failing())
    assert read_episodes(path) == [EPISODE]


def test_a_transcript_shows_who_said_what_in_order():
    assert transcript(dataclasses.replace(EPISODE, answer="42")) == (
        "task apps/7, sample 1, workflow self_refine\n"
        "    Print 42. Ω≈ç\n"
        "[0] generator/0, turn 0 (policy p0@3; 3+3 tokens; answer 'print(41)')\n"
        "    print(41)\n"
        "[tool] run_public_tests\n"
        "    {'passed': False, 'got': [41, None, 'é']}\n"
        "[1] generator/0, turn 1 (policy p0@0; 7+1 tokens; cut off; prompt cut by 2; after 0; reads 0; answer None)\n"
        "    \ud800 ¶\n"
        "answer: 42\n"
        "error: RuntimeError: boom\n"
    )


# ---------------------------------------------------------------- replay

PROMPTS = Prompts({"speaker": "## user\n{{text}}\n"})
MATH = [Task(f"t{i}", "math", f"{i}+{i}=?") for i in range(4)]


def moody(name):
    if name == "t1":
        raise OSError("moody")
    return {"name": name}


@workflow(roles=("speaker",))
def eventful(task, prompts, *, rng, endless=False):
    heard = yield Call("speaker", prompts.speaker(text=task.question))
    try:
        value = yield Tool(moody, (task.id,))
    except ToolError as error:
        value = str(error)
    for _ in range(rng.integers(1, 4)):
        heard = yield Call("speaker", prompts.speaker(text=f"{value} {rng.integers(100)}"), after=heard)
    while endless:
        heard = yield Call("speaker", prompts.speaker(text="on"), after=heard)
    if task.id == "t2":
        raise ValueError("at the end")
    return heard


def record(flow, limits=None, parse=lambda task, text: text, engine=None):
    engine = engine or FakeEngine(lambda p, r: f"said {r.key[-1]}")
    prompts = PROMPTS if flow.name == "eventful" else load_prompts("math", "micro")
    return rollout(
        flow, MATH, engine, TOKENIZER, shared(flow.roles), prompts=prompts, parse=parse, limits=limits
    )


def test_an_episode_replays_with_its_tool_results_its_dice_and_its_error():
    episodes = record(eventful)
    assert "moody: OSError: moody" in TOKENIZER.decode(episodes[1].calls[1].prompt_tokens)
    assert "ValueError: at the end" in episodes[2].error
    for episode in episodes:
        again = replay(episode, eventful, PROMPTS, TOKENIZER)
        assert dataclasses.replace(again, seconds=episode.seconds) == episode


def test_an_episode_that_was_ended_replays_to_its_end():
    for episode in record(eventful.bind(endless=True), Limits(max_calls=9)):
        replay(episode, eventful.bind(endless=True), PROMPTS, TOKENIZER, limits=Limits(max_calls=9))


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_an_episode_ends_before_the_call_that_could_not_be_made(refused):
    class Small(FakeEngine):
        def submit(self, request):
            if request.key[-1] == refused:
                raise ValueError("too small")
            return super().submit(request)

    for episode in record(voting, engine=Small(lambda p, r: "x")):
        assert "too small" in episode.error and len(episode.calls) == refused
        replay(episode, voting, load_prompts("math", "micro"), TOKENIZER)


def test_an_episode_whose_prompts_were_cut_replays_under_its_limits():
    limits = Limits(context=80, overlong="truncate")
    episodes = rollout(
        eventful, [Task("t0", "math", "1+1=? " * 40)], FakeEngine(lambda p, r: "x"), TOKENIZER, shared(["speaker"]),
        prompts=PROMPTS, parse=lambda task, text: text, limits=limits, settings=SamplingSettings(max_new_tokens=10),
    )  # fmt: skip
    assert episodes[0].calls[0].cut > 0
    replay(episodes[0], eventful, PROMPTS, TOKENIZER, limits=limits, new_tokens=lambda role: 10)


def test_another_tool_result_or_other_dice_do_not_replay():
    episode = record(eventful)[0]
    changed = dataclasses.replace(episode, tools=(dataclasses.replace(episode.tools[0], result="else"),))
    with pytest.raises(ValueError, match="call 1: prompt_tokens is"):
        replay(changed, eventful, PROMPTS, TOKENIZER)
    with pytest.raises(ValueError, match="replay differs"):
        replay(dataclasses.replace(episode, key=(9, 9, 9, 9)), eventful, PROMPTS, TOKENIZER)


def test_records_workflows_and_transcripts_load_without_jax():
    check = "import sys, marl_jax.rollouts, marl_jax.workflows; assert not {'jax', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
