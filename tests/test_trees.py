"""A tree in the table: its paths, what its calls are worth over them, whom they are compared with, what they teach."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from closeness import close

from marl_jax.episodes import CallRecord, Episode, Leaf, ToolRecord
from marl_jax.learning.batching import BatchConfig, make_batches
from marl_jax.learning.estimators.worth import AdvantageConfig, group_column, with_advantages
from marl_jax.learning.learner_config import LearnerConfig
from marl_jax.learning.losses import LossConfig
from marl_jax.learning.optimiser import OptimiserConfig, ScheduleConfig
from marl_jax.learning.update import Learner
from marl_jax.own import OwnError
from marl_jax.rewards.background_credit import BackgroundCredit
from marl_jax.rewards.credit import (
    CreditConfig,
    by_episodes,
    format_penalty,
    outcome,
    own_correctness,
    own_work,
    with_rewards,
)
from marl_jax.rewards.grading import grade
from marl_jax.runs.evaluation import outcomes, summary
from marl_jax.runs.step_metrics import branching
from marl_jax.study.intervals import pass_at_k
from marl_jax.table import Table
from marl_jax.task import Task

ONE = Task("one", "math", "1?", gold="1", level=3, meta={"hops": 2})
TWO = Task("two", "math", "2?", gold="2", level=3, meta={"hops": 2, "source": "book"})


def call(role, path, answer, *, turn=0, tokens=(3, 4), reads=(), after=None, kind="solver", labels=None):
    return CallRecord(
        role, "p0", 0, turn, (1, 2), tokens, (-1.0,) * len(tokens), answer or "", "stop", answer, reads, after,
        kind=kind, path=path, labels=labels,
    )  # fmt: skip


def designed(task, answers, sample=0):
    """A designer, and an executor in each branch; one that answers "fail" ends in an error."""
    plan = call("designer", (), "plan", kind="planner", tokens=(5,))
    runs = [call("executor", (i,), answer, tokens=(6, 7 + i), reads=(0,)) for i, answer in enumerate(answers)]
    leaves = [Leaf((i,), answer, "Boom" if answer == "fail" else None) for i, answer in enumerate(answers)]
    tools = (
        ToolRecord("look", 1, None, 0),
        *(ToolRecord("run", i, None, 1, (i,)) for i in range(len(answers))),
    )
    error = next((leaf.error for leaf in leaves if leaf.error), None)
    return Episode(
        task,
        sample,
        "designed",
        (plan, *runs),
        None,
        tools,
        error,
        key=(0, 1, 2, sample),
        leaves=tuple(leaves),
    )


FLAT = Episode(
    ONE, 2, "designed", (call("designer", (), "plan", kind="planner"), call("executor", (), "1")), "1"
)
GOOD, POOR = designed(ONE, ["1", "0", "1", "1"]), designed(ONE, ["0", "0", "1", "fail"], 1)
NESTED = Episode(
    TWO, 0, "nested",
    (
        call("a", (), "2"), call("b", (0,), "2", reads=(0,)), call("c", (0, 0), "2", reads=(1,)),
        call("c", (0, 1), None, reads=(1, 0)), call("b", (1,), "0", reads=(0,)), call("b", (1,), "2", turn=1, after=1),
    ),
    None, leaves=(Leaf((0, 0), "2"), Leaf((0, 1), None), Leaf((1,), "2")),
)  # fmt: skip


@pytest.fixture
def table():
    return grade(Table.of([GOOD, POOR, FLAT, NESTED]))


@pytest.mark.parametrize("batch", ["task", "step"])
def test_trees_are_credited_in_the_background_with_all_of_their_branches(batch):
    episodes = [GOOD, POOR, FLAT]
    with BackgroundCredit(outcome, CreditConfig(batch=batch), samples=3) as background:
        for episode in reversed(episodes):
            background.finished(episode)
        credited = background(Table.of(episodes))
    at_once = with_rewards(grade(Table.of(episodes)), outcome)
    assert [head.leaves for head in credited.bare_episodes] == [head.leaves for head in at_once.bare_episodes]
    assert credited.text == at_once.text and credited.reward.tolist() == at_once.reward.tolist()


# ---------------------------------------------------------------- rows and paths


def test_each_path_is_an_episode_without_forks(table):
    flat, rows = table.paths()
    assert table.paths()[0] is flat  # made once
    assert rows.tolist() == [
        0,
        1,
        0,
        2,
        0,
        3,
        0,
        4,
        5,
        6,
        5,
        7,
        5,
        8,
        5,
        9,
        10,
        11,
        12,
        13,
        14,
        12,
        13,
        15,
        12,
        16,
        17,
    ]
    assert not flat.forked and flat.paths()[0] is flat
    views = table.episodes()
    assert views == flat.episodes() and len(views) == 4 + 4 + 1 + 3
    second = views[1]
    assert (second.path, second.answer, second.outcome, second.answers) == ((1,), "0", 0.0, (None, 0.0))
    assert [tool.result for tool in second.tools] == [1, 1] and second.leaves == ()
    assert [one.calls[-1].role for one in views[-3:]] == ["c", "c", "b"]
    assert views[-1].calls[2].after == 1 and views[-1].calls[1].text == "0"


def test_a_flat_table_is_its_own_paths():
    flat = Table.of([FLAT])
    same, rows = flat.paths()
    assert same is flat and rows.tolist() == [0, 1]
    assert flat.parent.tolist() == flat.branch.tolist() == [-1, -1]


def test_trees_are_taken_and_joined(table):
    again = Table.concat([table.of_episodes([3]), table.of_episodes([1, 0])])
    assert [head.sample for head in again.bare_episodes] == [0, 1, 0] and again.path.shape == (16, 2)
    assert again.episodes() == [*table.episodes()[-3:], *table.episodes()[4:8], *table.episodes()[:4]]
    assert again.parent.tolist() == [-1, 0, 1, 1, 0, 0, -1, 2, 2, 2, 2, -1, 3, 3, 3, 3]
    with pytest.raises(ValueError, match=r"episodes that fork: call paths\(\).numbers"):
        table.numbers()
    table.paths()[0].numbers()


# ---------------------------------------------------------------- worth


def test_an_outcome_is_the_mean_over_the_paths_that_a_call_is_on(table):
    assert [head.outcome for head in table.bare_episodes] == [0.75, 0.25, 1.0, pytest.approx(2 / 3)]
    assert table.outcome[:10].tolist() == [0.75, 1, 0, 1, 1, 0.25, 0, 0, 1, 0]
    np.testing.assert_allclose(table.outcome[12:], [2 / 3, 0.5, 1, 0, 1, 1])
    assert table.sound.tolist() == [True] * 9 + [False] + [True] * 8
    assert table.grade[8:10].tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("leaves", "designers"),
    [
        ("mean", [0.75, 0.25]),
        ("max", [1, 1]),
        ("min", [0, 0]),
        ("test_trees:last", [1, 0]),
        ("test_trees:spread", [1, 1]),
    ],
)
def test_a_call_before_a_fork_earns_a_function_of_its_leaves(table, leaves, designers):
    rewarded = with_rewards(table, outcome, leaves)
    assert rewarded.reward[[0, 5]].tolist() == designers
    assert rewarded.reward[1:5].tolist() == [1, 0, 1, 1] and rewarded.reward[10:12].tolist() == [1, 1]


def last(values):
    return values[-1]


def spread(values):
    """Of several values; a call on one path has that path's."""
    return max(values) - min(values)


def wordy(values):
    return "much"


def test_components_are_told_apart_and_failed_paths_earn_nothing(table):
    both = with_rewards(table, lambda t: {**outcome(t), **format_penalty(0.5)(t)})
    np.testing.assert_allclose(both.reward[12:16], [2 / 3, 0.5, 1, -0.5])
    assert both.components["format"][12:16].tolist() == [0, 0, 0, -0.5]
    assert np.isnan(both.components["outcome"][9]) and both.components["outcome"][5] == 0.25


def test_a_reward_of_ones_own_sees_paths(table):
    seen = []

    def own(graded):
        seen.extend(one.path for one in graded)
        return [[one.outcome + 10 * i for i in range(len(one.calls))] for one in graded]

    rewarded = with_rewards(table, by_episodes(own))
    assert seen == [(0,), (1,), (2,), (3,), (0,), (1,), (2,), (), (0, 0), (0, 1), (1,)]
    # Of POOR three paths are sound: the fourth is worth nothing.
    assert rewarded.reward[:10].tolist() == [0.75, 11, 10, 11, 11, 0.25, 10, 10, 11, 0]


def test_a_planner_is_worth_the_solvers_that_read_it_over_all_paths(table):
    value, known = own_work(table)
    assert known.all() and value[0] == 0.75
    rewarded = with_rewards(table, own_correctness)
    assert rewarded.reward[0] == 0.75 and rewarded.reward[5] == 0.25


def test_what_cannot_be_a_worth_is_refused(table):
    with pytest.raises(OwnError, match="use with_rewards"):
        by_episodes(list)(table)
    with pytest.raises(ValueError, match="leaves are 'maen': did you mean 'mean'"):
        CreditConfig(leaves="maen")
    with pytest.raises(OwnError, match="wordy': the value for the 4 leaves of a call is 'much'"):
        with_rewards(table, outcome, "test_trees:wordy")


# ---------------------------------------------------------------- groups


def groups_of(table, key):
    return group_column(table, AdvantageConfig(group=key)).tolist()


def test_groups_by_fork_branch_and_path(table):
    trees = table.of_episodes([0, 1, 2])
    assert groups_of(trees, "role") == [0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0, 1]
    # Designers have no fork above them and are compared by task; executors with those of their design.
    assert groups_of(trees, "siblings") == [0, 1, 1, 1, 1, 0, 2, 2, 2, 2, 0, 3]
    assert groups_of(trees, "task,branch") == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 0]
    assert groups_of(trees, "path") == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10]


def test_groups_by_attributes_of_tasks_and_calls(table):
    trees = table.of_episodes([2, 3])
    assert groups_of(trees, "task.hops") == [0] * 8 and groups_of(trees, "role,task.level") == [
        0,
        1,
        2,
        3,
        4,
        4,
        3,
        3,
    ]
    labelled = dataclasses.replace(
        FLAT, calls=tuple(dataclasses.replace(c, labels={"type": t}) for c, t in zip(FLAT.calls, "xy"))
    )
    both = Table.of([labelled, dataclasses.replace(labelled, task=TWO)])
    assert groups_of(both, "call.type") == [0, 1, 0, 1]
    tagged = [dataclasses.replace(task, meta={"tags": ["a", {"b": task.id}]}) for task in (FLAT.task, TWO)]
    assert groups_of(Table.of([dataclasses.replace(FLAT, task=task) for task in tagged]), "task.tags") == [
        0,
        0,
        1,
        1,
    ]
    with pytest.raises(OwnError, match=r"'task\.source': task 'one' has no attribute 'source'; it has: hops"):
        groups_of(trees, "task,task.source")
    with pytest.raises(
        OwnError, match=r"'call\.type': a call of 'designer' has no attribute 'type'; it has no attributes"
    ):
        groups_of(trees, "call.type")
    with pytest.raises(ValueError, match="names no fields"):
        AdvantageConfig(group="task,call.")


# ---------------------------------------------------------------- what it teaches


@dataclasses.dataclass(frozen=True)
class LogitTable:
    """logits = weights[last token]"""

    size: int

    def hidden(self, trained, frozen, batch):
        return jnp.eye(self.size)[batch.tokens]

    def head(self, trained, frozen):
        return trained["w"]


@pytest.mark.parametrize("share_prompts", [False, True])
def test_the_gradient_of_a_tree_is_that_of_its_rows(share_prompts):
    """Against float64: a designer's row counts once, by the mean over its leaves; its executors' by their own."""
    size, rate = 12, 0.5
    # Enough trees that sharing prompts saves enough to be done.
    trees = [
        designed(ONE, answers, i)
        for i, answers in enumerate((["1", "0", "1", "1"], ["0", "0", "1", "0"]) * 4)
    ]
    long = [
        dataclasses.replace(
            t, calls=tuple(dataclasses.replace(c, prompt_tokens=(1, 2) * 12, path=c.path) for c in t.calls)
        )
        for t in trees
    ]
    table, _ = with_advantages(
        with_rewards(grade(Table.of(long)), outcome), AdvantageConfig(group="siblings")
    )
    start = np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)
    learner = Learner(
        LogitTable(size),
        LearnerConfig(
            LossConfig("pg", "token_mean", is_cap=None),
            OptimiserConfig("sgd", ScheduleConfig(rate), b1=0.0, weight_decay=0.0, grad_clip=None),
            BatchConfig((16, 32, 64), 256, share_prompts=share_prompts),
        ),
        {"designer": "p0", "executor": "p0"},
    )
    packed = make_batches(table, [table.role_of(row) for row in range(len(table))], learner.config.batch)
    assert all(bool(batch.arrays.prefix) == share_prompts for batch in packed)
    weights = {"p0": {"w": jnp.asarray(start)}}
    after, _, report = learner.step(weights, learner.init(weights), table)
    moved = (start - np.asarray(after["p0"]["w"], np.float64)) / rate

    # By hand: designers 3/4 and 1/4 of four each, compared with each other; executors 1 or 0 with those of their tree.
    wanted, added, tokens = np.zeros((size, size)), np.zeros((size, size)), 0
    designs = np.array([0.75, 0.25] * 4)
    for tree, worth in zip(trees, designs):
        runs = np.array([float(leaf.answer == "1") for leaf in tree.leaves])
        advantages = [
            (worth - designs.mean()) / (designs.std(ddof=1) + 1e-6),
            *((runs - runs.mean()) / (runs.std(ddof=1) + 1e-6)),
        ]
        for one, advantage in zip(tree.calls, advantages):
            before = 2
            for token in one.tokens:
                logits = start[before].astype(np.float64)
                gradient = np.exp(logits - logits.max())
                gradient /= gradient.sum()
                gradient[token] -= 1  # of -log p
                wanted[before] += advantage * gradient
                added[before] += np.abs(advantage * gradient)
                before, tokens = token, tokens + 1
    assert report.policies["p0"]["updates"] == 1 and math.isclose(tokens, table.length.sum())
    close(moved, wanted / tokens, of=np.linalg.norm(wanted / tokens), roundings=64)


def test_a_prefix_call_teaches_what_its_copies_in_all_paths_would_on_average(table):
    """The gradient is linear in advantages: one row with the mean is L rows with a share of 1/L each."""
    tree = with_rewards(table.of_episodes([0]), outcome)
    flat, rows = tree.paths()
    copies = with_rewards(flat, outcome).reward[rows == 0]
    assert copies.tolist() == [1, 0, 1, 1] and tree.reward[0] == copies.mean()


# ---------------------------------------------------------------- what is said of it


def test_an_evaluation_counts_a_tree_by_its_paths(table):
    trees = table.of_episodes([0, 1])
    assert outcomes(trees, 2).tolist() == [[0.75, 0.25]]
    found = summary(trees, 2)
    assert found["accuracy"] == 0.5 and found["per_problem"] == [0.5]
    assert found["pass_at_k"] == {"1": 0.5, "2": pytest.approx(1 - 0.25 * 0.75)}
    assert found["any_correct"] == 1.0 and found["errors"] == 1 and found["calls_per_episode"] == 5
    assert found["roles"]["designer"]["calls"] == 2 and found["roles"]["designer"]["mean"] == 0.5
    assert found["roles"]["executor"] == {"kind": "solver", "calls": 7, "unreadable": 0.0, "accuracy": 4 / 7}


def test_one_tree_per_problem_is_no_yes_or_no(table):
    found = summary(table.of_episodes([0, 3]), 1)
    assert found["accuracy"] == pytest.approx((0.75 + 2 / 3) / 2) and found["ci_low"] >= 2 / 3 - 1e-9


def test_pass_at_k_of_shares_is_that_of_a_drawn_path():
    shares = np.array([[0.5, 0.25, 1.0], [0.0, 0.0, 0.5]])
    # Over pairs of samples: 1 - (1 - p)(1 - q), by hand.
    wanted = [(1 - 0.5 * 0.75 + 1 + 1) / 3, (0 + 0.5 + 0.5) / 3]
    np.testing.assert_allclose(pass_at_k(shares, 2), wanted)
    right = np.array([[True, False, True], [False, False, False]])
    for k in (1, 2, 3):
        np.testing.assert_allclose(pass_at_k(right.astype(float), k), pass_at_k(right, k))


def test_metrics_say_how_far_branches_are_apart(table):
    found = branching(table.of_episodes([0, 3]).bare_episodes)
    # Level 1: outcomes 1, 0, 1, 1 and means 1/2, 1; level 2: 1 and 0.
    assert found == {
        "tree/paths": 3.5,
        "tree/apart/1": pytest.approx((math.sqrt(3) / 4 + 0.25) / 2),
        "tree/apart/2": 0.5,
    }
    assert branching(table.of_episodes([2]).bare_episodes) == {}
