"""The record: written, read back, printed, replayed."""

import dataclasses
import gzip
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from fake_engine import TOKENIZER, FakeEngine

from marl_jax.policies import SamplingSettings, shared
from marl_jax.rewards.credit import format_penalty, own_correctness, with_rewards
from marl_jax.rewards.grading import grade
from marl_jax.rollouts import (
    CallRecord,
    Episode,
    Limits,
    Table,
    ToolRecord,
    read_episodes,
    replay,
    rollout,
    storage,
    transcript,
    write_episodes,
)
from marl_jax.rollouts.storage import _ends
from marl_jax.table import COLUMNS, META, Ragged
from marl_jax.task import Task
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
    "generator", "p0", 0, 1, (1, 2, 3, 4, 5, 6, 7), (8,), (-0.5,), "\0 ¶😀\n", "length", None,
    reads=(0,), after=0, cut=2, temperature=0.5, kept=((8, 9),),
)  # fmt: skip
TOOL = ToolRecord("run_public_tests", {"passed": False, "got": [41, None, "é"]}, None, 0)
EPISODE = Episode(
    TASK, 1, "self_refine", (FIRST, SECOND), None, (TOOL,), "RuntimeError: boom", 1.25, (0, 3, 9, 1)
)


OTHER = dataclasses.replace(
    EPISODE, task=dataclasses.replace(TASK, id="apps/8"), calls=(), tools=(), error=None
)


def test_episodes_are_read_back_as_they_were_written(tmp_path):
    path = tmp_path / "deep" / "step-000001.parquet"
    failed = dataclasses.replace(EPISODE, sample=3, tools=(ToolRecord("shell", None, "timeout", -1),))
    episodes = [EPISODE, dataclasses.replace(EPISODE, sample=2), OTHER, EPISODE, failed]
    write_episodes(path, Table.of(episodes))
    assert read_episodes(path).episodes() == episodes


def worth_of_a_step():
    """A table with every column: rewards that are absent, a call that sampled nothing, one of a frozen policy."""
    silent = dataclasses.replace(FIRST, tokens=(), logprobs=(), text="", answer=None, policy="p1", slot=1)
    kinds = ("solver", "judge", "picker")
    calls = [dataclasses.replace(c, kind=k) for c, k in zip((FIRST, SECOND, silent), kinds)]
    sound = dataclasses.replace(EPISODE, calls=tuple(calls), answer="print(41)", error=None)
    table = grade(Table.of([sound, EPISODE, OTHER]), lambda task, answer: 0.25)
    table = with_rewards(table, lambda t: {**own_correctness(t), **format_penalty(0.5)(t)})
    nothing = np.nan
    return table.replace(
        penalty=np.array([0.0, -0.125, 0.0, 0.0, 0.0]),
        group=np.array([0, 1, -1, 0, 0], np.int32),
        advantage=np.array([1 / 3, -1.25, nothing, 0.0, nothing]),
        weight=np.array([1.0, 0.5, 0.0, 2.0, 1.0]),
        clip_low=np.full(5, 0.1),
        clip_high=np.linspace(0.2, 0.3, 5),
        spoken=Ragged.of([np.arange(n) % 2 == 0 for n in table.length], bool),
        trains=np.array([True, True, False, True, False]),
    )


def test_two_problems_under_one_id_are_neither_played_nor_written(tmp_path):
    @workflow(roles=("speaker",), families=("code",))
    def proposing(task, prompts):
        yield Call(
            "speaker", [{"role": "user", "content": "1"}], about=dataclasses.replace(task, question="1")
        )

    told = f"two tasks have the id '{TASK.id}'"
    with pytest.raises(ValueError, match=told):
        rollout(
            proposing, [TASK], FakeEngine(lambda *_: "1"), TOKENIZER, shared(proposing.roles),
            prompts=load_prompts("code"), parse=lambda task, text: text,
        )  # fmt: skip
    other = Episode(dataclasses.replace(TASK, question="1"), 1, "single", (FIRST,), None)
    with pytest.raises(ValueError, match=told):
        write_episodes(tmp_path / "e.parquet", Table.of([EPISODE, other]))


def test_a_rollout_seeded_by_an_integer_of_numpy_can_be_written(tmp_path):
    options = {"prompts": load_prompts("math", "micro"), "parse": lambda task, text: text}
    play = lambda seed: rollout(
        voting, MATH, FakeEngine(lambda *_: "1"), TOKENIZER, shared(voting.roles), seed=seed, **options
    )
    path = tmp_path / "e.parquet"
    write_episodes(path, play(np.int64(3)))
    assert read_episodes(path).bare_episodes[0].key == play(3).bare_episodes[0].key


def test_a_table_is_read_back_column_by_column(tmp_path):
    table = worth_of_a_step()
    assert all(getattr(table, name) is not None for name in COLUMNS)
    write_episodes(tmp_path / "e.parquet", table)
    again = read_episodes(tmp_path / "e.parquet")
    assert [getattr(again, name) for name in META] == [getattr(table, name) for name in META]
    assert list(again.components) == ["own", "format"]
    columns = {name: (getattr(again, name), getattr(table, name)) for name in COLUMNS}
    columns |= {name: (again.components[name], column) for name, column in table.components.items()}
    for name, (mine, theirs) in columns.items():
        for row in range(len(table)):
            np.testing.assert_array_equal(mine[row], theirs[row], err_msg=name)
        if not isinstance(theirs, Ragged):
            assert mine.dtype == theirs.dtype, name


def test_what_a_table_does_not_have_yet_is_not_there_when_it_is_read(tmp_path):
    for table in (Table.of([EPISODE]), Table.of([OTHER])):
        write_episodes(tmp_path / "e.parquet", table)
        again = read_episodes(tmp_path / "e.parquet")
        assert again.episodes() == table.episodes() and len(again) == len(table)
        missing = ("grade", "outcome", "reward", "penalty", "group", "advantage")
        assert all(getattr(again, name) is None for name in missing) and again.components == {}


def test_a_table_without_episodes_is_read_back(tmp_path):
    write_episodes(tmp_path / "e.parquet", Table.of([]))
    again = read_episodes(tmp_path / "e.parquet")
    assert len(again) == 0 and again.episodes() == [] and again.role.dtype == np.int32


def test_the_file_is_plain_parquet_with_a_row_for_each_call(tmp_path):
    write_episodes(tmp_path / "e.parquet", worth_of_a_step())
    rows = pq.read_table(tmp_path / "e.parquet").to_pylist()
    shown = ("task", "sample", "role", "text", "answer", "kind", "tokens", "reads")
    assert [tuple(row[name] for name in shown) for row in rows[:3]] == [
        ("apps/7", 1, "generator", "print(41)", "print(41)", "solver", [4, 5, 6], []),
        ("apps/7", 1, "generator", "\0 ¶😀\n", None, "judge", [8], [0]),
        ("apps/7", 1, "generator", "", None, "picker", [], []),
    ]
    assert len(rows) == 5 and {row["question"] for row in rows} == {"Print 42. Ω≈ç"}
    # A solver whose answer is worth a quarter; a judge that said nothing of it, a picker that had no right candidate.
    assert [row["reward"] for row in rows] == [0.25, -0.5, -0.5, 0.0, 0.0]
    np.testing.assert_array_equal([row["component/own"] for row in rows], [0.25, 0.0, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal([row["advantage"] for row in rows], [1 / 3, -1.25, np.nan, 0.0, np.nan])
    assert [row["kept"] for row in rows[:2]] == [[], [[8, 9]]]


def test_text_that_is_no_unicode_is_written_readably(tmp_path):
    task = dataclasses.replace(TASK, question="half \ud83d")
    call = dataclasses.replace(FIRST, text="\ud83d x", answer="\ud83d")
    episode = Episode(task, 0, "single", (call,), "\ud83d")
    write_episodes(tmp_path / "e.parquet", Table.of([episode]))
    (again,) = read_episodes(tmp_path / "e.parquet").episodes()
    assert again == dataclasses.replace(episode, calls=(dataclasses.replace(call, text="? x", answer="?"),))


SPLIT = (*"€".encode(), *"é".encode(), *"\ufffd".encode(), ord("a"), 0xFF, *"😀".encode())


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("a€b".encode(), [1, 1, 1, 2, 3]),
        (b"a" + "€".encode()[:2], [1, 1, 2]),  # it ends within a character
        (b"\xff" * 7, [0, 0, 0, 0, 1, 2, 7]),
        (b"", []),
    ],
)
def test_where_tokens_end_in_the_text(said, wanted):
    assert _ends(list(said), as_text) == wanted


def test_tokens_end_where_the_text_does_whatever_their_bytes_are():
    dice = random.Random(0)
    for _ in range(300):
        said = [dice.choice(SPLIT) for _ in range(dice.randrange(1, 30))]
        ends = _ends(said, as_text)
        assert ends == sorted(ends) and ends[-1] == len(as_text(said)), said


def test_each_token_may_hold_the_end_of_one_character_and_the_beginning_of_the_next():
    said = (b"\xe2\x82", b"\xac\xc3", b"\xa9\xe2", b"\x82\xac\xc3", b"\xa9\xe2\x82", b"\xac\xc3\xa9")
    assert _ends(said, lambda tokens: as_text(b"".join(tokens))) == [0, 0, 0, 0, 0, 6]


def test_bytes_that_are_no_text_take_no_more_time_than_others():
    decoded = []
    _ends([0xFF] * 500, lambda tokens: decoded.append(len(tokens)) or as_text(tokens))
    assert sum(decoded) < 500 * 40


def as_text(tokens):
    return bytes(tokens).decode(errors="replace")


def test_log_probs_keep_every_bit(tmp_path):
    bits = np.random.default_rng(0).integers(0, 2**32, 5000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = np.append(values[~np.isnan(values)], np.float32([-np.inf, -0.0, 1e-45, -3.4e38]))
    call = dataclasses.replace(FIRST, logprobs=tuple(values.tolist()), tokens=tuple(range(len(values))))
    write_episodes(tmp_path / "e.parquet", Table.of([dataclasses.replace(EPISODE, calls=(call,))]))
    again = np.float32(read_episodes(tmp_path / "e.parquet").episodes()[0].calls[0].logprobs)
    np.testing.assert_array_equal(again.view(np.uint32), values.view(np.uint32))


def test_a_history_takes_little_more_room_than_what_each_turn_adds(tmp_path):
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
    write_episodes(tmp_path / "e.parquet", Table.of([dataclasses.replace(EPISODE, calls=tuple(calls))]))
    assert read_episodes(tmp_path / "e.parquet").episodes()[0].calls == tuple(calls)
    # 8 x 1000 new numbers of 18 random bits in prompts, and the half of them that was sampled once more.
    assert (tmp_path / "e.parquet").stat().st_size < 8 * 1500 * 4


def test_a_prompt_that_does_not_follow_its_history_is_stored_as_it_is(tmp_path):
    stray = dataclasses.replace(SECOND, prompt_tokens=(9, 9))
    write_episodes(tmp_path / "e.parquet", Table.of([dataclasses.replace(EPISODE, calls=(FIRST, stray))]))
    assert read_episodes(tmp_path / "e.parquet").episodes()[0].calls[1] == stray


def rewritten(path, change):
    """The file with other facts in its metadata."""
    table = pq.read_table(path)
    facts = json.loads(table.schema.metadata[storage.METADATA_KEY])
    pq.write_table(table.replace_schema_metadata({storage.METADATA_KEY: change(facts)}), path)


def test_a_damaged_file_is_refused_by_name(tmp_path):
    path = tmp_path / "e.parquet"
    write_episodes(path, Table.of([EPISODE] * 3))
    whole = path.read_bytes()
    for damaged in (whole[:-20], whole[: len(whole) // 2], b"no parquet", b""):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"e\.parquet' cannot be read as episodes"):
            read_episodes(path)
    path.write_bytes(whole)
    rewritten(path, lambda facts: json.dumps({**facts, "format": 99}))
    with pytest.raises(ValueError, match="its format is 99, this version reads 2"):
        read_episodes(path)
    with pytest.raises(FileNotFoundError):
        read_episodes(tmp_path / "none.parquet")


def test_a_parquet_file_of_something_else_is_refused_by_name(tmp_path):
    pq.write_table(storage.pa.table({"question": ["1+1?"]}), tmp_path / "tasks.parquet")
    with pytest.raises(ValueError, match=r"tasks\.parquet' cannot be read as episodes: its format is None"):
        read_episodes(tmp_path / "tasks.parquet")


def test_whatever_is_broken_in_a_file_it_is_refused_by_name(tmp_path):
    path, dice = tmp_path / "e.parquet", np.random.default_rng(0)
    write_episodes(path, Table.of([EPISODE] * 3))
    whole, table = path.read_bytes(), pq.read_table(path)
    facts = table.schema.metadata[storage.METADATA_KEY]

    def with_facts(broken):
        pq.write_table(table.replace_schema_metadata({storage.METADATA_KEY: bytes(broken)}), path)

    for data, write in ((whole, path.write_bytes), (facts, with_facts)):
        for _ in range(300):
            broken = bytearray(data)
            broken[dice.integers(len(broken))] = dice.integers(256)
            write(broken)
            refused_or_read(path)  # a byte in a text may go unnoticed


@pytest.mark.parametrize("column", ["task", "role", "policy", "kind", "prompt", "tokens", "reads", "text"])
def test_a_file_that_lacks_a_column_is_refused_by_name(tmp_path, column):
    path = tmp_path / "e.parquet"
    write_episodes(path, Table.of([EPISODE]))
    pq.write_table(pq.read_table(path).drop_columns([column]), path)
    with pytest.raises(ValueError, match=rf"e\.parquet' cannot be read as episodes: .*{column}"):
        read_episodes(path)


def refused_or_read(path):
    try:
        read_episodes(path)
    except ValueError as error:
        assert f"{path.name}' cannot be read as episodes" in str(error) and "\n" not in str(error)


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "e.parquet"
    write_episodes(path, Table.of([EPISODE]))

    def fail(table, where, **options):
        Path(where).write_bytes(b"half of it")
        raise OSError("disk full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(storage.pq, "write_table", fail)
        write_episodes(path, Table.of([dataclasses.replace(EPISODE, sample=2)]))
    assert read_episodes(path).episodes() == [EPISODE]


# ---------------------------------------------------------------- files of earlier versions

OLD = Path(__file__).parents[1] / "fixtures" / "episodes" / "step-000004.jsonl.gz"  # by their writer


def in_old_file():
    silent = dataclasses.replace(FIRST, tokens=(), logprobs=(), text="", answer=None)
    no_unicode = dataclasses.replace(SECOND, text="\ud800 ¶\n")
    return [
        dataclasses.replace(EPISODE, calls=(FIRST, no_unicode)),
        dataclasses.replace(
            EPISODE, sample=2, calls=(FIRST, silent), answer="print(42)", tools=(), error=None
        ),
        dataclasses.replace(OTHER, error="OSError: no call"),
    ]


def test_a_file_of_an_earlier_version_is_read_with_what_its_calls_earned():
    table = read_episodes(OLD)
    outcomes = [head.outcome for head in table.bare_episodes]
    assert outcomes == [0.0, 1.0, 0.0] and table.grade is None
    assert [dataclasses.replace(one, outcome=None) for one in table.episodes()] == in_old_file()
    assert table.reward.tolist() == [0.0, 0.0, 1.0, 0.75]
    np.testing.assert_array_equal(table.advantage, [-0.5, -0.5, 1.25, np.nan])


def test_a_file_of_an_earlier_version_is_read_without_what_its_calls_earned(tmp_path):
    table = read_episodes(shutil.copy(OLD, tmp_path))
    assert table.episodes() == in_old_file() and table.reward is None and table.advantage is None


@pytest.mark.parametrize(
    ("line", "times", "message"),
    [
        ('{"outcome": 1.0, "rewards": [], "advantages": []}', 1, "it has 1 lines for 3 episodes"),
        ('{"outcome": 1.0, "rewards": [], "advantages": []}', 3, "it has 0 rewards for 2 calls"),
        ('{"rewards": [1, 1]}', 3, "'outcome'"),
        ("hello", 3, "Expecting value"),
    ],
)
def test_earnings_beside_a_file_of_an_earlier_version_that_do_not_fit_are_refused_by_name(
    tmp_path, line, times, message
):
    path = Path(shutil.copy(OLD, tmp_path))
    (tmp_path / "step-000004.rewards.jsonl").write_text((line + "\n") * times)
    with pytest.raises(ValueError, match=f"rewards.jsonl' cannot be read as rewards: {message}"):
        read_episodes(path)


def test_whatever_is_broken_in_a_file_of_an_earlier_version_it_is_refused_by_name(tmp_path):
    path, dice = tmp_path / "e.jsonl.gz", np.random.default_rng(0)
    whole = OLD.read_bytes()
    inside = gzip.decompress(whole)
    for damaged in (whole[:-20], b"not gzip"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"e\.jsonl\.gz' cannot be read as episodes"):
            read_episodes(path)
    path.write_bytes(gzip.compress(b'{"format": 99}\n'))
    with pytest.raises(ValueError, match="this version reads format 1"):
        read_episodes(path)
    for data, pack in ((whole, bytes), (inside, gzip.compress)):
        for _ in range(300):
            broken = bytearray(data)
            broken[dice.integers(len(broken))] = dice.integers(256)
            path.write_bytes(pack(bytes(broken)))
            refused_or_read(path)  # a byte in a text, or in the header, may go unnoticed


def test_a_transcript_names_the_task_that_a_call_is_about():
    about = dataclasses.replace(EPISODE.task, id="made/1", question="1+1=?", gold="2")
    calls = (dataclasses.replace(EPISODE.calls[0], about=about), *EPISODE.calls[1:])
    shown = transcript(dataclasses.replace(EPISODE, calls=calls))
    assert shown.count("  about made/1: 1+1=? (wanted: '2')\n") == 1


def test_a_transcript_shows_who_said_what_in_order():
    assert transcript(dataclasses.replace(EPISODE, answer="42")) == (
        "task apps/7, sample 1, workflow self_refine\n"
        "    Print 42. Ω≈ç\n"
        "[0] generator/0, turn 0 (policy p0@3; 3+3 tokens; answer 'print(41)')\n"
        "    print(41)\n"
        "[tool] run_public_tests\n"
        "    {'passed': False, 'got': [41, None, 'é']}\n"
        "[1] generator/0, turn 1 (policy p0@0; 7+1 tokens; cut off; prompt cut by 2; after 0; reads 0; answer None)\n"
        "    \\x00 ¶😀\n"
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
    table = rollout(
        flow, MATH, engine, TOKENIZER, shared(flow.roles), prompts=prompts, parse=parse, limits=limits
    )
    return table.episodes()


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
    (episode,) = rollout(
        eventful, [Task("t0", "math", "1+1=? " * 40)], FakeEngine(lambda p, r: "x"), TOKENIZER, shared(["speaker"]),
        prompts=PROMPTS, parse=lambda task, text: text, limits=limits, settings=SamplingSettings(max_new_tokens=10),
    ).episodes()  # fmt: skip
    assert episode.calls[0].cut > 0
    replay(episode, eventful, PROMPTS, TOKENIZER, limits=limits, new_tokens=lambda role: 10)


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
