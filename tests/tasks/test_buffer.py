"""A buffer of tasks: bounded, drawn as it says, a pure function of its state; calls about tasks of their own."""

import collections
import dataclasses
import json

import numpy as np
import pytest

from marl_jax.episodes import CallRecord, Episode
from marl_jax.rewards.grading import grade
from marl_jax.rollouts import read_episodes, write_episodes
from marl_jax.table import SharedId, Table
from marl_jax.task import Task
from marl_jax.tasks.buffer import UNTRIED, BufferConfig, Entry, draw, problems_of_step, updated
from marl_jax.workflows import Call


def task(name, gold="1"):
    return Task(name, "math", f"{name}?", gold=gold)


def entries(count, tries=0, right=0.0):
    return tuple(Entry(task(f"made/{i}"), i, tries, right) for i in range(count))


DATA = [task(f"data/{i}") for i in range(8)]


def ids(tasks):
    return [one.id for one in tasks]


def test_an_empty_buffer_leaves_the_data_set_as_it_is():
    config = BufferConfig(capacity=4, share=1.0)
    assert problems_of_step(DATA, (), config, 0, 1) == DATA
    assert problems_of_step(DATA, entries(4), BufferConfig(), 0, 1) == DATA  # and so does one without room


def test_the_share_of_the_buffer_is_as_large_as_it_has_tasks():
    config = BufferConfig(capacity=9, share=0.5)
    assert [name.split("/")[0] for name in ids(problems_of_step(DATA, entries(2), config, 0, 1))] == [
        "data"
    ] * 6 + ["made"] * 2
    assert [name.split("/")[0] for name in ids(problems_of_step(DATA, entries(9), config, 0, 1))] == [
        "data"
    ] * 4 + ["made"] * 4
    again = problems_of_step(DATA, entries(9), config, 0, 1)
    assert (
        ids(again)
        == ids(problems_of_step(DATA, entries(9), config, 0, 1))
        != ids(problems_of_step(DATA, entries(9), config, 0, 2))
    )
    for share, count, made in ((0.29, 100, 29), (0.58, 50, 29), (0.57, 100, 57), (0.5, 5, 2)):
        batch = problems_of_step(
            [task(f"data/{i}") for i in range(count)], entries(99), BufferConfig(99, share), 0, 1
        )
        assert sum(name.startswith("made") for name in ids(batch)) == made
    # A problem is in a batch once.
    twice = tuple(Entry(one, 0) for one in DATA)
    assert ids(problems_of_step(DATA, twice, config, 0, 1)) == ids(DATA)


def of_type(name, kind):
    return Entry(dataclasses.replace(task(name), meta={"type": kind}), 0)


def test_streams_have_equal_parts_and_fill_up_where_one_has_too_few():
    """Eight of a, three of b, one of c: of six drawn two each if there are, and c's second place goes on."""
    some = (
        *(of_type(f"a{i}", "a") for i in range(8)),
        *(of_type(f"b{i}", "b") for i in range(3)),
        of_type("c0", "c"),
    )
    config = BufferConfig(capacity=20, share=0.75, streams="type")
    first = set()
    for step in range(30):
        drawn = problems_of_step(DATA, some, config, 0, step)[2:]
        counts = collections.Counter(one.meta["type"] for one in drawn)
        assert len({*ids(drawn)}) == 6 and counts["c"] == 1 and {counts["a"], counts["b"]} <= {2, 3}
        assert ids(drawn) == ids(problems_of_step(DATA, some, config, 0, step)[2:])
        first.add(drawn[0].meta["type"])
    assert first == {"a", "b", "c"}  # none is always served first
    plain = problems_of_step(DATA, some, dataclasses.replace(config, streams=""), 0, 1)
    assert ids(plain) == ids(problems_of_step(DATA, some, BufferConfig(capacity=20, share=0.75), 0, 1))
    # Tasks that lack the entry are one stream.
    assert len(problems_of_step(DATA, entries(9), config, 0, 1)) == 8


def test_newest_first():
    assert ids(draw(entries(5), 2, "newest", np.random.default_rng(0))) == ["made/4", "made/3"]


def test_draws_by_learnability_are_in_proportion_and_those_without_come_last():
    some = (Entry(task("half"), 0, 4, 2.0), Entry(task("all"), 0, 4, 4.0), Entry(task("tenth"), 0, 10, 1.0))
    assert [entry.learnability for entry in some] == pytest.approx([0.25, 0.0, 0.09])
    assert Entry(task("new"), 0).learnability == UNTRIED
    rng = np.random.default_rng(0)
    orders = [ids(draw(some, 3, "learnability", rng)) for _ in range(2000)]
    assert all(order[2] == "all" for order in orders)
    first = collections.Counter(order[0] for order in orders)["half"] / 2000
    # 0.25 / 0.34 of the draws; the deviation of such a share of 2000 is 0.01
    assert first == pytest.approx(0.25 / 0.34, abs=0.04)


def call(role, answer, kind, about=None, slot=0):
    return CallRecord(
        role,
        "p0",
        slot,
        0,
        (1, 2),
        (3,),
        (-1.0,),
        f"\\boxed{{{answer}}}",
        "stop",
        answer,
        kind=kind,
        about=about,
    )


MADE, OTHER = task("made/a", gold="7"), task("made/b", gold="9")


def episodes():
    """A proposer, and solvers about what it made; the second episode's own task is one of those."""
    solvers = call("solver", "7", "solver", MADE), call("solver", "8", "solver", MADE, 1)
    own = call("solver", "7", "solver"), call("solver", "9", "solver", OTHER, 1)
    first = Episode(DATA[0], 0, "propose", (call("proposer", None, "team"), *solvers), "1")
    second = Episode(MADE, 0, "propose", own, "7")
    return [first, second]


def test_a_call_is_graded_and_grouped_by_the_task_that_it_is_about(tmp_path):
    table = grade(Table.of(episodes()))
    np.testing.assert_array_equal(table.grade, [np.nan, 1.0, 0.0, 1.0, 1.0])
    assert [head.outcome for head in table.bare_episodes] == [1.0, 1.0]
    assert table.task.tolist() == [0, 1, 1, 1, 2]  # of three calls about one task two are of another episode
    assert [table.task_of(row).id for row in range(5)] == ["data/0", "made/a", "made/a", "made/a", "made/b"]
    both = Table.concat([table.of_episodes([1]), table.of_episodes([0])])
    assert [both.task_of(row).id for row in range(5)] == ["made/a", "made/b", "data/0", "made/a", "made/a"]
    assert both.task.tolist() == [0, 1, 2, 0, 0]
    assert [one.calls[-1].about for one in both.episodes()] == [OTHER, MADE]
    write_episodes(tmp_path / "calls.parquet", table)
    found = read_episodes(tmp_path / "calls.parquet")
    assert found.task.tolist() == table.task.tolist() and found.about == table.about
    plain = Table.of([dataclasses.replace(episodes()[1], calls=episodes()[1].calls[:1])])
    assert plain.about == () and Table.concat([plain, table]).task.tolist() == [0, 1, 0, 0, 0, 2]


def test_a_task_of_another_family_is_no_problem_of_the_run():
    table = grade(Table.of(episodes()))
    assert updated((), table, BufferConfig(capacity=2), 5, "code") == (
        (),
        {"buffer/size": 0.0, "buffer/added": 0.0},
    )


def test_what_calls_were_about_is_kept_with_how_often_solvers_were_right():
    table, config = grade(Table.of(episodes())), BufferConfig(capacity=2)
    found, said = updated((), table, config, 5, "math")
    assert found == (Entry(MADE, 5, 3, 2.0), Entry(OTHER, 5, 1, 1.0))
    assert said == {"buffer/size": 2.0, "buffer/added": 2.0, "buffer/learnability": pytest.approx(1 / 9)}
    again, said = updated(found, table, config, 6, "math")
    assert again == (Entry(MADE, 5, 6, 4.0), Entry(OTHER, 5, 2, 2.0)) and said["buffer/added"] == 0
    older = (Entry(task("old"), 1), Entry(task("older"), 1))
    assert updated(older, table, config, 6, "math")[0] == (Entry(MADE, 6, 3, 2.0), Entry(OTHER, 6, 1, 1.0))
    assert updated(older, table, BufferConfig(), 6, "math") == (older, {})
    failed = Table.of([dataclasses.replace(episodes()[0], error="no")])
    assert updated((), grade(failed), config, 5, "math")[0] == ()
    assert (
        updated(found, grade(failed), config, 6, "math")[0] == found
    )  # its right answers are no failed tries


def test_other_words_under_the_id_of_a_task_that_is_kept_are_refused():
    other = dataclasses.replace(MADE, question="another?", gold="8")
    first = dataclasses.replace(episodes()[0], calls=(call("solver", "8", "solver", other),))
    with pytest.raises(SharedId, match=r"two tasks have the id 'made/a', with the questions 'made/a\?' and"):
        updated((Entry(MADE, 1),), grade(Table.of([first])), BufferConfig(capacity=2), 5, "math")


def test_a_task_is_kept_as_a_checkpoint_gives_it_back():
    made = dataclasses.replace(MADE, meta={"pair": (1, (2, float("inf")))}, tests=({"args": (1,)},))
    first = dataclasses.replace(episodes()[0], calls=(call("solver", "7", "solver", made),))
    (entry,), _ = updated((), grade(Table.of([first])), BufferConfig(capacity=2), 5, "math")
    assert entry.task.meta == {"pair": [1, [2, float("inf")]]} and entry.task.tests == ({"args": [1]},)
    assert Entry.from_json(json.loads(json.dumps(entry.to_json()))) == entry


def test_entries_come_back_from_json():
    programs = dataclasses.replace(
        MADE, tests=({"call": "f", "args": [1], "expected": 2},), meta={"preamble": "x"}
    )
    for entry in (*entries(2, 3, 1.5), Entry(programs, 3)):
        assert Entry.from_json(json.loads(json.dumps(entry.to_json()))) == entry


def test_examples_are_shown_to_problems_of_the_data_set_alone():
    config = BufferConfig(capacity=9, share=0.25, examples=2)
    tasks = problems_of_step(DATA, entries(5), config, 0, 1)
    assert [len(one.meta.get("examples", ())) for one in tasks] == [2] * 6 + [0] * 2
    assert tasks[0].meta["examples"][0].keys() == {"question", "answer"}
    assert tasks[0].meta["examples"] != tasks[1].meta["examples"]
    own = (Entry(DATA[0], 0), *entries(1))  # a call may be about a problem of the data set
    first, *_ = problems_of_step(DATA, own, BufferConfig(capacity=9, share=0.0, examples=2), 0, 1)
    assert [example["question"] for example in first.meta["examples"]] == ["made/0?"]


def test_a_call_about_something_else_than_a_task_is_refused():
    with pytest.raises(ValueError, match="about of a call to 'solver' is '1 \\+ 1'; it must be a Task"):
        Call("solver", [{"role": "user", "content": "?"}], about="1 + 1")
