"""The table of calls: episodes go in and come back, and rows are taken, joined and computed with."""

import dataclasses

import jax
import numpy as np
import pytest

from marl_jax import workflows
from marl_jax.episodes import CallRecord, Episode, ToolRecord
from marl_jax.own import OwnError
from marl_jax.rewards.credit import outcome, own_work, with_rewards
from marl_jax.rewards.grading import grade
from marl_jax.table import JUDGE, KINDS, PICKER, SOLVER, TEAM, Ragged, Table
from marl_jax.task import Task

ONE, TWO = Task("one", "math", "1?", gold="1"), Task("two", "math", "2?", gold="2")


def call(role="writer", kind="solver", answer="1", **changes):
    plain = CallRecord(role, "p0", 0, 0, (1, 2), (3, 4), (-1.0, -0.5), "say", "stop", answer, kind=kind)
    return dataclasses.replace(plain, **changes)


FIRST = call(version=3, temperature=0.7)
JUDGED = call("critic", "judge", "Incorrect", prompt_tokens=(1, 2, 3, 4, 5), reads=(0,))
SECOND = call(
    answer=None, turn=1, prompt_tokens=(1, 2, 3), tokens=(5,), logprobs=(-0.25,), text="\ud800 ¶\n",
    finish_reason="length", reads=(0, 1), after=0, cut=2,
)  # fmt: skip
PICKED = call("picker", "picker", "2", policy="p1", slot=2, tokens=(6, 7), kept=((6,), (7, 8, 9)))
SILENT = call("helper", "team", None, tokens=(), logprobs=(), text="")

DEBATED = Episode(
    ONE, 0, "debate", (FIRST, JUDGED, SECOND), "1", (ToolRecord("run", {"passed": [1]}, None, 0),), None, 1.25,
    (0, 3, 9, 0),
)  # fmt: skip
VOTED = Episode(TWO, 1, "voting", (call(answer="2"), call(answer="7", slot=1), PICKED), "2", key=(0, 3, 8, 1))
BROKEN = Episode(ONE, 1, "debate", (SILENT,), None, error="RuntimeError: boom")
UNHEARD = Episode(TWO, 0, "debate", (), None)
EPISODES = [DEBATED, UNHEARD, VOTED, BROKEN]

GRADED = [
    dataclasses.replace(DEBATED, outcome=1.0, answers=(1.0, None, 0.0)),
    dataclasses.replace(UNHEARD, outcome=0.0),
    dataclasses.replace(VOTED, outcome=0.25, answers=(0.25, 0.0, None)),
    dataclasses.replace(BROKEN, outcome=0.0, answers=(None,)),
]


@pytest.fixture
def table():
    return Table.of(EPISODES)


# ---------------------------------------------------------------- episodes


@pytest.mark.parametrize("episodes", [EPISODES, GRADED, EPISODES[::-1], [UNHEARD], []])
def test_episodes_come_back_as_they_went_in(episodes):
    assert Table.of(episodes).episodes() == episodes


def test_columns_say_what_the_calls_were(table):
    columns = {
        "episode": [0, 0, 0, 2, 2, 2, 3],
        "task": [0, 0, 0, 1, 1, 1, 0],
        "call": [0, 1, 2, 0, 1, 2, 0],
        "role": [0, 1, 0, 0, 0, 2, 3],
        "slot": [0, 0, 0, 0, 1, 2, 0],
        "turn": [0, 0, 1, 0, 0, 0, 0],
        "policy": [0, 0, 0, 0, 0, 1, 0],
        "version": [3, 0, 0, 0, 0, 0, 0],
        "reads": [[-1, -1], [0, -1], [0, 1], [-1, -1], [-1, -1], [-1, -1], [-1, -1]],
        "after": [-1, -1, 0, -1, -1, -1, -1],
        "length": [2, 2, 1, 2, 2, 2, 0],
        "temperature": [0.7, 1, 1, 1, 1, 1, 1],
        "truncated": [False, False, True, False, False, False, False],
        "cut": [0, 0, 2, 0, 0, 0, 0],
        "kind": [SOLVER, JUDGE, SOLVER, SOLVER, SOLVER, PICKER, TEAM],
        "readable": [True, True, False, True, True, True, False],
        "choice": [-1, 0, -1, -1, -1, 2, -1],
        "sound": [True] * 6 + [False],
    }
    for name, column in columns.items():
        assert getattr(table, name).tolist() == column, name
    assert (table.roles, table.policies) == (("writer", "critic", "picker", "helper"), ("p0", "p1"))
    assert (table.text[2], table.answer[2]) == (SECOND.text, None)
    assert table.prompt[1].tolist() == [1, 2, 3, 4, 5] and table.tokens[2].tolist() == [5]
    assert table.logprobs[0].tolist() == [-1.0, -0.5] and len(table.tokens[6]) == 0
    assert table.kept[5].tolist() == [[6, -1, -1], [7, 8, 9]] and len(table.kept[0]) == 0


def test_in_a_notebook_a_table_is_one_line(table):
    assert repr(table).startswith(f"Table({len(table)} calls, {len(table.bare_episodes)} episodes, roles=(")
    assert len(repr(table)) < 120


@pytest.mark.parametrize(
    ("kind", "answer", "choice"),
    [
        ("judge", "Correct", 1),
        ("judge", "Incorrect", 0),
        ("judge", None, -1),
        ("picker", "3", 3),
        ("picker", "0", 0),
        ("picker", "one", -1),
        ("picker", None, -1),
        ("solver", "3", -1),
        ("team", "Correct", -1),
    ],
)
def test_verdicts_and_picks_are_numbers(kind, answer, choice):
    episode = dataclasses.replace(DEBATED, calls=(call(kind=kind, answer=answer),))
    assert Table.of([episode]).choice.tolist() == [choice]


def test_a_table_where_nothing_was_cut_from_the_distribution_has_no_kept_sets():
    assert Table.of([DEBATED, BROKEN]).kept is None


# ---------------------------------------------------------------- grades


def test_calls_without_a_grade_have_none_in_the_column():
    table = Table.of(GRADED)
    assert np.isnan(table.grade).tolist() == [False, True, False, False, False, True, True]
    assert table.grade[~np.isnan(table.grade)].tolist() == [1.0, 0.0, 0.25, 0.0]
    assert table.outcome.tolist() == [1.0] * 3 + [0.25] * 3 + [0.0]


def test_a_table_that_is_not_graded_has_no_grades(table):
    assert table.grade is None and table.outcome is None
    assert all(one.outcome is None and one.answers == () for one in table.episodes())


def test_grades_are_seen_in_the_views(table):
    by = lambda task, answer: {"1": 1.0, "2": 0.25}.get(answer, 0.0)
    assert grade(table, by).episodes() == GRADED
    debated, *_ = GRADED
    assert debated.kinds == ("solver", "judge", "solver") and debated.episode is debated


# ---------------------------------------------------------------- rows


def credited(table):
    """With numbers that tell rows apart in the columns which come later."""
    count = np.arange(len(table)) + 0.5
    return table.replace(reward=count, components={"own": count, "team": -count})


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([5, 0, 2], [5, 0, 2]),
        ([3, 3], [3, 3]),
        ([True, False] * 3 + [True], [0, 2, 4, 6]),
        ([], []),
        ([False] * 7, []),
    ],
    ids=["some", "one twice", "by a mask", "none", "none by a mask"],
)
def test_rows_are_taken_with_all_that_is_known_of_them(table, rows, wanted):
    whole = credited(table)
    some = whole.take(rows)
    assert len(some) == len(wanted) and some.bare_episodes == whole.bare_episodes
    for place, row in enumerate(wanted):
        assert some._record(place) == whole._record(row)
        assert (some.reward[place], some.components["team"][place]) == (row + 0.5, -row - 0.5)
        assert some.episode[place] == whole.episode[row] and some.call[place] == whole.call[row]


def test_a_mask_of_another_table_takes_no_rows(table):
    for mask in ([True, False], [False] * 7 + [True]):
        with pytest.raises(IndexError, match=rf"axis is 7 but .* is {len(mask)}"):
            table.take(mask)


def test_columns_may_be_given_as_lists(table):
    given = table.replace(reward=[1, 0, None, 2, 0, 1, 0], trains=[True, False] * 3 + [True])
    np.testing.assert_array_equal(given.take([2, 3]).reward, [np.nan, 2.0])
    assert (given.reward.dtype, given.trains.dtype) == (np.float64, bool)


def test_whole_episodes_are_taken_in_the_order_asked_for(table):
    some = credited(table).of_episodes([3, 1, 0])
    assert some.episodes() == [BROKEN, UNHEARD, DEBATED]
    assert some.episode.tolist() == [0, 2, 2, 2] and some.reward.tolist() == [6.5, 0.5, 1.5, 2.5]
    assert some.of_episodes([2, 0]).episodes() == [DEBATED, BROKEN]
    assert some.of_episodes([]).episodes() == []


def test_roles_and_policies_are_found_by_name(table):
    assert table.present() == ["writer", "critic", "picker", "helper"] and table.role_of(5) == "picker"
    assert table.take([6, 5]).present() == ["helper", "picker"] and table.present("policy") == ["p0", "p1"]
    assert np.flatnonzero(table.having(role="writer")).tolist() == [0, 2, 3, 4]
    assert np.flatnonzero(table.having(role="picker", policy="p1")).tolist() == [5]
    assert not table.having(role="stranger").any() and not table.having(policy="p9").any()


# ---------------------------------------------------------------- tables below each other


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("episodes", [EPISODES, GRADED], ids=["plain", "graded"])
def test_tables_below_each_other_are_the_table_of_all_their_episodes(episodes, cut):
    joined = Table.concat([Table.of(episodes[:cut]), Table.of(episodes[cut:])])
    assert joined.episodes() == episodes
    whole = Table.of(episodes)
    for name in ("episode", "task", "role", "policy", "call", "choice", "length"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name), err_msg=name)
    assert (joined.roles, joined.policies) == (whole.roles, whole.policies)


def test_parts_of_one_table_share_its_values_when_they_are_joined():
    whole = Table.of(EPISODES)
    joined = Table.concat([whole.of_episodes([number]) for number in range(len(EPISODES))])
    assert joined.episodes() == whole.episodes()
    assert len(joined.tokens.values) == len(whole.tokens.values)


def test_one_name_in_two_tables_is_one_role_policy_and_task():
    """Whatever number it has in each of them."""
    first, second = Table.of([VOTED]), Table.of([BROKEN, DEBATED, VOTED])
    joined = Table.concat([first, second])
    assert joined.roles == ("writer", "picker", "helper", "critic") and joined.policies == ("p0", "p1")
    names = [joined.role_of(row) for row in range(len(joined))]
    assert names == [c.role for one in (VOTED, BROKEN, DEBATED, VOTED) for c in one.calls]
    assert joined.task.tolist() == [0] * 3 + [1] * 4 + [0] * 3
    assert joined.episode.tolist() == [0] * 3 + [1] + [2] * 3 + [3] * 3


def test_groups_of_two_tables_stay_apart():
    """A loop that compares calls after it has joined the steps would compare those of different tasks."""
    one, two = Table.of([VOTED]), Table.of([DEBATED])
    one, two = (
        one.replace(group=np.array([0, 0, 1], np.int32)),
        two.replace(group=np.array([0, -1, 1], np.int32)),
    )
    assert Table.concat([one, two, two]).group.tolist() == [0, 0, 1, 2, -1, 3, 4, -1, 5]


def test_kept_sets_of_different_width_are_joined_and_rows_without_them_have_none():
    wider = dataclasses.replace(VOTED, calls=(dataclasses.replace(PICKED, kept=((1,), (2, 3, 4, 5, 6))),))
    for order in ([VOTED, DEBATED, wider], [wider, VOTED, DEBATED], [DEBATED, wider, VOTED]):
        joined = Table.concat([Table.of([one]) for one in order])
        assert joined.kept.values.shape[1] == 5 and joined.episodes() == order
    plain = Table.of([DEBATED])
    assert Table.concat([plain, plain]).kept is None


def test_a_column_that_one_table_lacks_is_left_out_and_a_component_is_none_there():
    one, two = credited(Table.of([BROKEN])), Table.of([DEBATED]).replace(components={"own": np.ones(3)})
    joined = Table.concat([one, two.replace(reward=None)])
    assert joined.reward is None
    assert joined.components["own"].tolist() == [0.5, 1, 1, 1]
    assert joined.components["team"][0] == -0.5 and np.isnan(joined.components["team"][1:]).all()
    assert Table.concat([one, credited(two)]).reward.tolist() == [0.5, 0.5, 1.5, 2.5]


def test_a_column_left_out_of_one_table_stands_for_its_value_there():
    one, two = Table.of([BROKEN]), Table.of([DEBATED])
    spoken = Ragged.of([np.arange(n) > 0 for n in two.length], bool)
    given = two.replace(weight=np.zeros(3), penalty=-np.ones(3), spoken=spoken)
    for joined, mine, others in (
        (Table.concat([one, given]), [1, 2, 3], [0]),
        (Table.concat([given, one]), [0, 1, 2], [3]),
    ):
        assert (joined.weight[mine] == 0).all() and (joined.weight[others] == 1).all()
        assert (joined.penalty[mine] == -1).all() and (joined.penalty[others] == 0).all()
        assert [joined.spoken[k].tolist() for k in mine] == [spoken[k].tolist() for k in range(3)]
        assert joined.spoken[others[0]].all() and len(joined.spoken[others[0]]) == one.length[0]
    with pytest.raises(ValueError, match="set them in all, or in none"):
        Table.concat([one, two.replace(clip_low=np.ones(3))])


# ---------------------------------------------------------------- rows of different length


def test_equal_neighbours_are_stored_once():
    prompt = (1, 2, 3)
    rows = Ragged.of([prompt, (1, 2, 3), (4,), prompt], np.int32)
    assert rows.values.tolist() == [1, 2, 3, 4, 1, 2, 3]  # the last is no neighbour of its like
    assert [rows[i].tolist() for i in range(4)] == [[1, 2, 3], [1, 2, 3], [4], [1, 2, 3]]
    same = [7, 8]  # one object, whatever its type
    assert Ragged.of([same, same], np.int32).values.tolist() == [7, 8]


@pytest.mark.parametrize(
    "rows", [[], [()], [(1, 2), (1, 2), (1,), (), (), (1, 2)], [(1, 2, 9), (1, 2), (1, 2), (5, 2)]]
)
def test_padded_rows_are_the_same_ragged_ones(rows):
    width, lengths = 4, np.array([len(row) for row in rows], np.int32)
    padded = np.full((len(rows), width), 7, np.int32)
    for line, row in zip(padded, rows):
        line[: len(row)] = row
    ours, theirs = Ragged.of_padded(padded, lengths), Ragged.of(rows, np.int32)
    for field in ("values", "starts", "lengths"):
        np.testing.assert_array_equal(getattr(ours, field), getattr(theirs, field), field)


def test_rows_without_entries_take_no_place():
    rows = Ragged.of([(), (1,), (), ()], np.int32)
    assert rows.values.tolist() == [1] and [rows[i].tolist() for i in range(4)] == [[], [1], [], []]
    assert len(Ragged.of([], np.int32)) == 0


def test_the_calls_of_a_group_share_their_prompt():
    long = tuple(range(1000))
    samples = [dataclasses.replace(DEBATED, calls=(call(prompt_tokens=long),), sample=n) for n in range(8)]
    table = Table.of(samples)
    assert len(table.prompt.values) == 1000
    assert len(Table.concat([table, Table.of(samples)]).prompt.values) == 2000
    assert all(one.calls[0].prompt_tokens == long for one in table.take([7, 0]).of_episodes([0]).episodes())


# ---------------------------------------------------------------- for a learner, and under jit


def test_two_problems_under_one_id_are_told_of():
    other = dataclasses.replace(ONE, question="9?")
    told = r"two tasks have the id 'one', with the questions '1\?' and '9\?': give each an id of its own"
    made = dataclasses.replace(DEBATED, calls=(call(about=other),))
    for episodes in ([made], [DEBATED, dataclasses.replace(BROKEN, task=other)]):
        with pytest.raises(ValueError, match=told):
            Table.of(episodes).need_own_ids()
        with pytest.raises(ValueError, match=told):  # of two draws, or of two steps that were collected
            Table.concat([Table.of([DEBATED]), Table.of(episodes[-1:])])


@pytest.mark.parametrize(
    "change", [{"meta": {"order": 2}}, {"level": 3}, {"tests": ({"args": [1], "call": "f"},)}]
)
def test_one_problem_may_be_made_twice(change):
    """With another note about it, or with lists where it had tuples before a file."""
    task = dataclasses.replace(ONE, tests=({"call": "f", "args": (1,)},))
    again = dataclasses.replace(task, **change)
    made = (call(about=task), call(about=again))
    table = Table.of([dataclasses.replace(DEBATED, task=task, calls=made)])
    table.need_own_ids()
    assert table.task.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("column", "told"),
    [
        ({"prompt": [(1,)]}, "prompt has 1 rows, and there are 2 roles"),
        ({"policy": ["p0"] * 3}, "policy has 3 rows"),
        ({"reward": [1.0]}, "reward has 1 rows"),
        ({"kept": [None]}, "kept has 1 rows"),
        ({"logprobs": [(-1.0,), (-2.0,)]}, "row 1 has 2 tokens and 1 log-probs"),
    ],
)
def test_columns_of_another_length_are_refused(column, told):
    given = {
        "role": ["a", "a"], "policy": ["p0", "p0"], "prompt": [np.array([1, 2]), (1, 2)], "tokens": [(3,), (4, 5)],
        "logprobs": [(-1.0,), (-2.0, -3.0)],
    }  # fmt: skip
    assert len(Table.make(**given)) == 2
    with pytest.raises(ValueError, match=told):
        Table.make(**{**given, **column})


def test_a_learners_table_says_what_it_was_given_and_plain_values_else():
    table = Table.make(
        role=["b", "a", "b"], policy=["p1", "p0", "p1"], prompt=[(1,), (2, 3), (1,)], tokens=[(4,), (5, 6), (7,)],
        logprobs=[(-1.0,), (-2.0, -3.0), (-4.0,)], task=["t", "u", "t"], slot=[0, 0, 1], advantage=[1, -1, 0.5],
        labels=[{"type": "x"}, None, {"type": "y"}], text=["one", "two", "three"],
    )  # fmt: skip
    assert (table.roles, table.role.tolist()) == (("b", "a"), [0, 1, 0])
    assert (table.policies, table.policy.tolist()) == (("p1", "p0"), [0, 1, 0])
    assert table.task.tolist() == [0, 1, 0] and table.slot.tolist() == [0, 0, 1]
    assert table.advantage.tolist() == [1.0, -1.0, 0.5] and table.length.tolist() == [1, 2, 1]
    assert table.temperature.tolist() == [1.0] * 3 and table.readable.all() and table.sound.all()
    assert not table.truncated.any() and table.kept is None and table.penalty is None
    assert table.labels == ({"type": "x"}, None, {"type": "y"}) and table.take([2]).text == ("three",)


def test_the_numbers_of_a_table_enter_jit_and_columns_come_back(table):
    graded = grade(table, lambda task, answer: 1.0)

    earn = jax.jit(lambda rows: with_rewards(rows, outcome))
    earned = earn(graded.numbers())
    assert earned.reward.tolist() == [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    assert np.isnan(earned.components["outcome"]).tolist() == [False] * 6 + [True]
    assert earned.roles == graded.roles and earned.choice.tolist() == graded.choice.tolist()
    # Another text is no other program.
    earn(grade(Table.of([DEBATED, VOTED, BROKEN]), lambda task, answer: 0.0).numbers())
    assert earn._cache_size() == 1


def test_absent_grades_stay_absent_under_jit():
    numbers = Table.of(GRADED).numbers()
    mean = jax.jit(lambda rows: jax.numpy.nanmean(rows.grade))(numbers)
    assert float(mean) == pytest.approx(1.25 / 4)


def test_kinds_are_those_that_workflows_declare():
    kinds = (workflows.solver, workflows.judge, workflows.picker, workflows.planner, workflows.team)
    assert tuple(kind.name for kind in kinds) == KINDS


def test_a_table_of_bare_calls_says_what_it_is_not_for():
    bare = Table.make(role=["g"], policy=["p0"], prompt=[(1,)], tokens=[(2,)], logprobs=[(-1.0,)])
    for use in (bare.episodes, lambda: bare.of_episodes([0]), lambda: grade(bare)):
        with pytest.raises(ValueError, match="not graded, stored or shown"):
            use()


def test_rows_that_are_no_whole_episodes_have_no_credit():
    call = CallRecord("generator", "p0", 0, 0, (1,), (2,), (-1.0,), "7", "stop", "7", kind="solver")
    picker = dataclasses.replace(call, role="aggregator", answer="1", reads=(0,), kind="picker")
    episodes = [Episode(Task("t", "math", "?", gold="7"), n, "voting", (call, picker), "7") for n in range(2)]
    table = grade(Table.of(episodes))
    assert own_work(table)[0].tolist() == own_work(table.of_episodes([1, 0]))[0].tolist() == [1.0] * 4
    for rows in ([1, 3], [0, 3], [2, 3, 0, 1]):
        with pytest.raises(OwnError, match="select them with of_episodes"):
            own_work(table.take(rows))


def test_values_that_few_rows_use_are_left_behind_when_tables_are_joined():
    """A draw from collected calls takes a few problems of many files."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        values = rng.integers(0, 99, 400)
        starts = rng.integers(0, 390, 12)
        lengths = np.minimum(rng.integers(0, 12, 12), 400 - starts)
        whole = Ragged(values, starts, lengths)
        parts = [whole.take(rng.integers(0, 12, count)) for count in (3, 1, 0, 2)]
        other = Ragged.of([[7, 8], [], [9]], np.int64)
        joined = Ragged.concat([*parts, other])
        want = [row.tolist() for part in (*parts, other) for row in (part[i] for i in range(len(part)))]
        assert [joined[i].tolist() for i in range(len(joined))] == want
        assert len(joined.values) <= sum(part.lengths.sum() for part in parts) + 3
