"""Credit is the same under `jit` as on the host, call by call, and what it comes to by hand."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_jax.episodes import CallRecord, Episode
from marl_jax.learning.estimators.advantages import group_advantages, overlong_penalty
from marl_jax.own import OwnError
from marl_jax.rewards import credit
from marl_jax.rewards.grading import grade
from marl_jax.table import Table
from marl_jax.task import Task
from marl_jax.workflows import BUILT_IN

TASK = Task("one", "math", "1?", gold="1")
SOLVED = ("1", "2", None)  # right, wrong, unreadable
KINDS = {role: flow.kind_of(role) for flow in BUILT_IN.values() for role in flow.roles}


def call(role, answer, reads=(), tokens=3):
    return CallRecord(
        role, "p0", 0, 0, (1,), tuple(range(tokens)), (0.0,) * tokens, "", "stop", answer, tuple(reads),
        kind=KINDS[role],
    )  # fmt: skip


def voting(rng):
    voters = [
        call("generator", rng.choice(SOLVED), tokens=rng.randrange(1, 30)) for _ in range(rng.randrange(1, 5))
    ]
    pick = rng.choice(("1", "2", "3", "9", "0", None))
    return [*voters, call("aggregator", pick, range(len(voters)))]


def eval_opt(rng):
    calls = []
    for turn in range(rng.randrange(1, 4)):
        calls.append(call("generator", rng.choice(SOLVED), range(len(calls)), tokens=rng.randrange(1, 30)))
        verdict = rng.choice(("Correct", "Incorrect", None))
        calls.append(call("evaluator", verdict, rng.choice(([], range(2 * turn + 1), [2 * turn]))))
    return calls


def orch_workers(rng):
    workers = [call("worker", rng.choice(SOLVED), rng.choice(([0], []))) for _ in range(rng.randrange(0, 4))]
    return [
        call("orchestrator", rng.choice(("plan", None))),
        *workers,
        call("synthesizer", rng.choice(SOLVED), range(1, len(workers) + 1)),
    ]


def table_of(shapes, seed, count=60):
    rng = random.Random(seed)
    made = []
    for sample in range(count):
        calls, error = tuple(rng.choice(shapes)(rng)), rng.choice((None, None, None, "broke"))
        made.append(Episode(TASK, sample, "w", calls, rng.choice(SOLVED), error=error))
    return graded(*made)


def graded(*episodes):
    return grade(Table.of(episodes), lambda task, answer: float(answer == "1"))


def on_host(rule, table):
    """The table's rewards and components, with the columns that only a host can hold."""
    return credit.with_rewards(table, rule)


def on_device(rule, table):
    """The same on arrays of JAX, operation by operation."""
    return credit.with_rewards(jax.tree.map(jnp.asarray, table.numbers()), rule)


def under_jit(rule, table):
    """The same as one compiled function of the columns of numbers."""
    return jax.jit(lambda table: credit.with_rewards(table, rule))(table.numbers())


EVERY = (voting, eval_opt, orch_workers)
RULES = {
    "outcome": (credit.outcome, EVERY),
    "voting_rubric": (credit.voting_rubric, (voting,)),
    "own_correctness": (credit.own_correctness, EVERY),
    "team_and_local": (credit.team_and_local(0.3), EVERY),
    "length": (credit.length_penalty(0.5, 4, 20), EVERY),
    "format": (credit.format_penalty(0.2), EVERY),
    "format of some roles": (credit.format_penalty(0.2, ("generator", "synthesizer")), EVERY),
    "combined": (credit.combine(credit.outcome, credit.own_correctness, credit.outcome), EVERY),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RULES)
def test_every_credit_gives_each_call_the_same_reward_under_jit(name, seed):
    rule, shapes = RULES[name]
    table = table_of(shapes, seed)
    expected, found = on_host(rule, table), under_jit(rule, table)
    assert len(set(expected.reward.tolist())) > 1
    np.testing.assert_allclose(found.reward, expected.reward, atol=1e-6)
    assert found.components.keys() == expected.components.keys()
    for component, column in expected.components.items():
        np.testing.assert_allclose(found.components[component], column, atol=1e-6)  # NaN where that has NaN


@pytest.mark.parametrize(("free", "limit"), [(3, 16), (0, 20), (7, 30)])
def test_what_lengths_cost_is_rounded_as_on_the_host(free, limit):
    rule, table = credit.length_penalty(0.3, free, limit), table_of(EVERY, seed=4)
    overlong = lambda lengths: overlong_penalty(lengths, max_length=limit, buffer=limit - free)
    lengths = np.arange(1, limit + 3, dtype=np.int32)
    with jax.enable_x64(True):  # as the compiled road has it
        found, penalty = under_jit(rule, table).reward, jax.jit(overlong)(lengths)
    np.testing.assert_array_equal(np.float32(found), np.float32(on_host(rule, table).reward))
    np.testing.assert_array_equal(penalty, overlong(lengths))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("road", [under_jit, on_device, on_host])
def test_an_empty_table_earns_nothing(name, road):
    assert road(RULES[name][0], graded()).reward.shape == (0,)
    assert road(RULES[name][0], table_of((lambda rng: [],), 0, 3)).reward.shape == (0,)


def test_the_rubric_refuses_other_roles_and_under_jit_gives_them_no_finite_reward():
    table = graded(Episode(TASK, 0, "w", (call("generator", "1"), call("evaluator", "Correct", [0])), "1"))
    for road in (on_host, on_device):
        with pytest.raises(OwnError, match="'voting_rubric' has no rule for role 'evaluator'"):
            road(credit.voting_rubric, table)
    assert np.isfinite(under_jit(credit.voting_rubric, table).reward).tolist() == [True, False]
    broken = table.replace(sound=np.zeros(2, bool))
    for road in (on_host, on_device, under_jit):
        assert road(credit.voting_rubric, broken).reward.tolist() == [0.0, 0.0]


def test_the_voting_rubric_by_hand():
    def of(sample, answers, pick, answer):
        calls = (*(call("generator", a) for a in answers), call("aggregator", pick, range(len(answers))))
        return Episode(TASK, sample, "voting", calls, answer)

    table = graded(
        of(0, ("1", "2", None), "1", "1"), of(1, ("1", "2", None), "2", "2"), of(2, ("2", None), "1", "2")
    )
    for road in (on_host, under_jit):
        rewards = road(credit.voting_rubric, table).reward.tolist()
        assert rewards == [1.0, -0.5, 0.5, 1.0, 0.5, -1.0, 0.0, -1.0, -1.0, 0.0, 0.0]


def test_credit_and_advantages_are_one_jitted_function():
    table = table_of((voting,), seed=9)
    group = table.episode // 8 * 2 + table.having(role="aggregator")

    def advantages(table):
        return group_advantages(credit.with_rewards(table, credit.voting_rubric).reward, group)

    got = jax.jit(advantages)(table.numbers())
    rewards = on_host(credit.voting_rubric, table).reward
    expected = np.zeros(len(rewards))
    for g in set(group.tolist()):
        mine = rewards[group == g]
        expected[group == g] = (mine - mine.mean()) / (mine.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(got, expected, atol=1e-4)
