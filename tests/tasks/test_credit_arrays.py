"""Credit over arrays equals credit over episodes, call by call."""

import random

import jax
import numpy as np
import pytest

from marl_jax.learning.advantages import group_advantages
from marl_jax.rewards import credit
from marl_jax.rewards.grading import grade_episodes
from marl_jax.rollouts.episodes import CallRecord, Episode
from marl_jax.tasks import credit_arrays as arrays
from marl_jax.tasks.task import Task

TASK = Task("one", "math", "1?", gold="1")
SOLVED = ("1", "2", None)  # right, wrong, unreadable


def call(role, answer, reads=(), tokens=3):
    return CallRecord(
        role, "p0", 0, 0, (1,), tuple(range(tokens)), (0.0,) * tokens, "", "stop", answer, tuple(reads)
    )


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


def episodes(shapes, seed, count=60):
    rng = random.Random(seed)
    made = []
    for sample in range(count):
        calls, error = tuple(rng.choice(shapes)(rng)), rng.choice((None, None, None, "broke"))
        made.append(Episode(TASK, sample, "w", calls, rng.choice(SOLVED), error=error))
    return grade_episodes(made, lambda task, answer: {"1": 1.0, "2": 0.0}[answer])


def text_road(rule, graded):
    return np.concatenate([np.array(row) for row in credit.totals(credit.assign(rule, graded))])


EVERY = (voting, eval_opt, orch_workers)
RULES = {
    "outcome": (credit.outcome, arrays.outcome, EVERY),
    "voting_rubric": (credit.voting_rubric, arrays.voting_rubric, (voting,)),
    "own_correctness": (credit.own_correctness, arrays.own_correctness, EVERY),
    "team_and_local": (credit.team_and_local(0.3), lambda calls: arrays.team_and_local(calls, 0.3), EVERY),
    "length": (
        credit.length_penalty(0.5, 4, 20),
        lambda calls: arrays.length_penalty(calls, 0.5, 4, 20),
        EVERY,
    ),
    "format": (credit.format_penalty(0.2), lambda calls: arrays.format_penalty(calls, 0.2), EVERY),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", RULES)
def test_every_credit_gives_each_call_the_same_reward_on_both_roads(rule, seed):
    of_episodes, of_arrays, shapes = RULES[rule]
    graded = episodes(shapes, seed)
    expected = text_road(of_episodes, graded)
    assert len(set(expected.tolist())) > 1
    np.testing.assert_allclose(jax.jit(of_arrays)(arrays.calls_of(graded)), expected, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("road", [jax.jit, lambda rule: rule], ids=["jit", "eager"])
def test_an_empty_batch_earns_nothing(rule, road):
    assert road(RULES[rule][1])(arrays.calls_of([])).shape == (0,)
    assert road(arrays.outcome)(arrays.calls_of(episodes((lambda rng: [],), 0, 3))).shape == (0,)


def test_the_rubric_refuses_the_roles_that_the_text_road_refuses():
    (graded,) = grade_episodes(
        [Episode(TASK, 0, "w", (call("generator", "1"), call("evaluator", "Correct", [0])), "1")],
        lambda task, answer: 1.0,
    )
    with pytest.raises(ValueError, match="'voting_rubric' has no rule for role 'evaluator'"):
        credit.voting_rubric([graded])
    calls = arrays.calls_of([graded])
    with pytest.raises(ValueError, match="'voting_rubric' has no rule for a judge; use it for voting"):
        arrays.voting_rubric(calls)
    np.testing.assert_array_equal(jax.jit(arrays.voting_rubric)(calls), [1.0, np.nan])
    broken = calls._replace(sound=np.zeros(2, bool))
    assert arrays.voting_rubric(broken).tolist() == [0.0, 0.0]


def test_the_voting_rubric_by_hand():
    graded = grade_episodes(
        [
            Episode(
                TASK,
                0,
                "voting",
                (*(call("generator", a) for a in ("1", "2", None)), call("aggregator", "1", range(3))),
                "1",
            ),
            Episode(
                TASK,
                1,
                "voting",
                (*(call("generator", a) for a in ("1", "2", None)), call("aggregator", "2", range(3))),
                "2",
            ),
            Episode(
                TASK,
                2,
                "voting",
                (*(call("generator", a) for a in ("2", None)), call("aggregator", "1", range(2))),
                "2",
            ),
        ],
        lambda task, answer: float(answer == "1"),
    )
    rewards = jax.jit(arrays.voting_rubric)(arrays.calls_of(graded)).tolist()
    assert rewards == [1.0, -0.5, 0.5, 1.0, 0.5, -1.0, 0.0, -1.0, -1.0, 0.0, 0.0]


def test_credit_and_advantages_are_one_jitted_function():
    graded = episodes((voting,), seed=9)
    calls = arrays.calls_of(graded)
    group = np.concatenate(
        [[i // 8 * 2 + (c.role == "aggregator") for c in g.episode.calls] for i, g in enumerate(graded)]
    )
    got = jax.jit(lambda calls: group_advantages(arrays.voting_rubric(calls), group.astype(np.int32)))(calls)
    rewards = text_road(credit.voting_rubric, graded)
    expected = np.zeros(len(rewards))
    for g in set(group.tolist()):
        mine = rewards[group == g]
        expected[group == g] = (mine - mine.mean()) / (mine.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(got, expected, atol=1e-4)
