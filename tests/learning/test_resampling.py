"""Dynamic sampling: flat problems are drawn again with new sample numbers, so often and no more, and counted."""

import dataclasses

import pytest

from marl_jax.learning.resampling import ResampleCounts, resample
from marl_jax.learning.rows import AdvantageConfig, rows_of, with_advantages
from marl_jax.rollouts.episodes import CallRecord, Episode
from marl_jax.tasks.task import Task

SAMPLES, GROUPS = 4, AdvantageConfig()
TASKS = [Task(name, "math", "?") for name in ("easy", "fair", "hard", "late")]


def right(task, sample):
    """What the model gets right: everything, half, nothing, and only the tenth sample."""
    return {"easy": True, "fair": sample % 2 == 0, "hard": False, "late": sample == 9}[task.id]


class Sampler:
    """Stands for a rollout; keeps what it was asked for."""

    def __init__(self, roles=("generator",)):
        self.roles, self.asked = roles, []

    def __call__(self, tasks, first_sample):
        self.asked.append(([task.id for task in tasks], first_sample))
        calls = tuple(
            CallRecord(role, "p0", 0, 0, (1,), (2,), (-1.0,), "", "stop", "") for role in self.roles
        )
        numbers = range(first_sample, first_sample + SAMPLES)
        return [Episode(task, n, "w", calls, str(right(task, n))) for task in tasks for n in numbers]


def reward(episodes):
    return [[float(episode.answer == "True")] * len(episode.calls) for episode in episodes]


def test_flat_problems_are_drawn_again_with_samples_of_their_own_until_they_vary():
    sample = Sampler()
    done = resample(sample, reward, TASKS, GROUPS, draws=4)
    everything, flat, hopeless = ["easy", "fair", "hard", "late"], ["easy", "hard", "late"], ["easy", "hard"]
    assert sample.asked == [(everything, 0), (flat, 4), (flat, 8), (hopeless, 12)]
    assert [(e.task.id, e.sample) for e in done.episodes] == [
        (task, first + i)
        for task, first in zip(everything, (12, 0, 12, 8))
        for i in range(SAMPLES)
    ]  # fmt: skip
    assert done.rewards == [[float(right(e.task, e.sample))] for e in done.episodes]
    # First draw: 4 of 4, 2 of 4, none and none.
    assert done.counts == ResampleCounts(
        problems=4, flat=3, rescued=1, draws=4, episodes=16 + 12 + 12 + 8, first_reward=6 / 16
    )


def test_one_draw_is_plain_sampling_and_a_draw_where_all_vary_is_the_last():
    sample = Sampler()
    plain = resample(sample, reward, TASKS, GROUPS, draws=1)
    assert plain.episodes == Sampler()(TASKS, 0) and plain.rewards == reward(plain.episodes)
    assert dataclasses.astuple(plain.counts) == (4, 3, 0, 1, 16, 6 / 16)
    sample = Sampler()
    lively = resample(sample, reward, TASKS[1:2], GROUPS, draws=5)
    assert len(sample.asked) == lively.counts.draws == 1 and lively.counts.flat == 0


def test_a_problem_varies_where_one_of_its_groups_does():
    """Roles that earn differently are no variance by role; all calls of a problem as one group have some."""
    by_role = lambda episodes: [[1.0, 0.0] for _ in episodes]
    sample = Sampler(("voter", "judge"))
    assert resample(sample, by_role, TASKS, GROUPS, draws=2).counts.flat == 4
    assert resample(sample, by_role, TASKS, AdvantageConfig(group="task"), draws=2).counts.flat == 0
    one_judge = lambda episodes: [[1.0, float(episode.sample == 0)] for episode in episodes]
    assert resample(sample, one_judge, TASKS, GROUPS, draws=2).counts.flat == 0
    # Voters in slots of their own are compared each with itself.
    study = AdvantageConfig(group="study")
    with pytest.raises(ValueError, match="not for workflow None"):
        resample(sample, one_judge, TASKS, study, draws=2)
    assert resample(sample, one_judge, TASKS, study, draws=2, workflow="voting").counts.flat == 0


@pytest.mark.parametrize(
    ("over", "flat"),
    [(("task", "task"), 0), (("task", "role"), 1), (("role", "task"), 1), (("role", "role"), 1)],
)
def test_agent_wise_problems_teach_where_an_advantage_is_not_0(over, flat):
    """Each role always earns its own: over the whole task that is variance, and a role's own scale is 0."""
    sample = Sampler(("voter", "judge"))
    agent = AdvantageConfig(estimator="agent", agent_mean=over[0], agent_scale=over[1])
    done = resample(sample, lambda some: [[1.0, 0.0] for _ in some], TASKS[:1], agent, draws=3)
    assert (done.counts.flat, done.counts.draws) == (flat, 3 if flat else 1)
    rows, counts = with_advantages(rows_of(done.episodes, done.rewards), agent)
    assert any(row.advantage for row in rows) == (not flat)
    assert {role: count.zero_variance for role, count in counts.items()} == {"voter": flat, "judge": flat}


def test_a_single_sample_teaches_where_its_reward_is_its_advantage():
    by_sample = lambda some: [[float(episode.sample == 2)] for episode in some]
    alone = lambda tasks, first: [e for e in Sampler()(tasks, first) if e.sample == first]
    done = resample(alone, by_sample, TASKS[:1], AdvantageConfig(singleton="reward"), draws=5)
    assert (done.counts.flat, done.counts.rescued, done.counts.draws) == (1, 1, 3)


def test_episodes_without_a_call_teach_nothing_and_nothing_is_no_error():
    silent = resample(Sampler(()), reward, TASKS, GROUPS, draws=2)
    assert silent.counts == ResampleCounts(4, 4, 0, 2, 32, 0.0)
    assert resample(Sampler(), reward, [], GROUPS, draws=3).counts == ResampleCounts(0, 0, 0, 0, 0, 0.0)


def test_a_sampler_that_cannot_be_right_is_refused():
    with pytest.raises(ValueError, match="draws is 0"):
        resample(Sampler(), reward, TASKS, GROUPS, draws=0)
    with pytest.raises(ValueError, match="pass first_sample on"):
        resample(lambda tasks, first: Sampler()(tasks, 0), reward, TASKS, GROUPS, draws=2)
    with pytest.raises(ValueError, match="differs on 'late'"):
        resample(lambda tasks, first: Sampler()(tasks[:-1], first), reward, TASKS, GROUPS, draws=2)


def test_a_penalty_for_length_makes_a_problem_worth_learning_from():
    def sample(tasks, first):
        call = CallRecord("generator", "p0", 0, 0, (1,), (2,), (-1.0,), "", "stop", "")
        longer = dataclasses.replace(call, tokens=(2,) * 7, logprobs=(-1.0,) * 7)
        return [Episode(task, first + n, "w", ((call, longer)[n],), "") for task in tasks for n in range(2)]

    equal = lambda episodes: [[1.0] for _ in episodes]
    overlong = AdvantageConfig(overlong=(8, 4))
    assert resample(sample, equal, TASKS, overlong, draws=3).counts.flat == 0
    assert resample(sample, equal, TASKS, GROUPS, draws=3).counts.flat == 4


def test_a_reward_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        resample(Sampler(), lambda some: [[float("nan")] for _ in some], TASKS, GROUPS, draws=2)
