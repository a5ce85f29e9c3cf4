"""Dynamic sampling: flat problems are drawn again with new sample numbers, so often and no more, and counted.

And which calls of a step an update learns from.
"""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_run import tiny_config

from marl_jax.config.phase_fields import Phase
from marl_jax.config.run_config import load_config
from marl_jax.episodes import CallRecord, Episode
from marl_jax.learning.estimators.worth import AdvantageConfig, with_advantages
from marl_jax.run_folder.folder import digest_model
from marl_jax.runs.hosted import ResampleCounts, resample
from marl_jax.runs.phases import Phases, other_base
from marl_jax.table import Table
from marl_jax.task import Task
from marl_jax.workflows import voting

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
        return Table.of(
            [Episode(task, n, "w", calls, str(right(task, n))) for task in tasks for n in numbers]
        )


def rewarded(earned):
    """A reward of what a function gives for each call: (episode, place of the call) -> number."""
    return lambda table: table.replace(
        reward=np.array([earned(one, i) for one in table.episodes() for i in range(len(one.calls))], float)
    )


def by_role(*earned):
    """Each role always earns the same."""
    return rewarded(lambda episode, call: earned[call])


reward = rewarded(lambda episode, call: episode.answer == "True")


def test_flat_problems_are_drawn_again_with_samples_of_their_own_until_they_vary():
    sample = Sampler()
    table, counts = resample(sample, reward, TASKS, GROUPS, draws=4)
    everything, flat, hopeless = ["easy", "fair", "hard", "late"], ["easy", "hard", "late"], ["easy", "hard"]
    assert sample.asked == [(everything, 0), (flat, 4), (flat, 8), (hopeless, 12)]
    assert [(head.task.id, head.sample) for head in table.bare_episodes] == [
        (task, first + i)
        for task, first in zip(everything, (12, 0, 12, 8))
        for i in range(SAMPLES)
    ]  # fmt: skip
    assert table.reward.tolist() == [float(right(head.task, head.sample)) for head in table.bare_episodes]
    assert table.episode.tolist() == list(range(16)) and table.task.tolist() == [n // 4 for n in range(16)]
    # First draw: 4 of 4, 2 of 4, none and none.
    assert counts == ResampleCounts(
        problems=4,
        flat=3,
        rescued=1,
        draws=4,
        episodes=16 + 12 + 12 + 8,
        tokens=16 + 12 + 12 + 8,
        first_reward=6 / 16,
    )


def test_one_draw_is_plain_sampling_and_a_draw_where_all_vary_is_the_last():
    sample = Sampler()
    table, counts = resample(sample, reward, TASKS, GROUPS, draws=1)
    plain = reward(Sampler()(TASKS, 0))
    assert table.episodes() == plain.episodes() and table.reward.tolist() == plain.reward.tolist()
    assert dataclasses.astuple(counts) == (4, 3, 0, 1, 16, 16, 6 / 16)
    sample = Sampler()
    _, counts = resample(sample, reward, TASKS[1:2], GROUPS, draws=5)
    assert len(sample.asked) == counts.draws == 1 and counts.flat == 0


def test_a_problem_varies_where_one_of_its_groups_does():
    """Roles that earn differently are no variance by role; all calls of a problem as one group have some.

    That of calls that nobody learns from does not count.
    """
    sample, roles = Sampler(("voter", "judge")), by_role(1, 0)
    flat = lambda *given, **options: resample(sample, *given, draws=2, **options)[1].flat
    assert flat(roles, TASKS, GROUPS) == 4
    assert flat(roles, TASKS, AdvantageConfig(group="task")) == 0
    one_judge = rewarded(lambda episode, call: call == 0 or episode.sample == 0)
    assert flat(one_judge, TASKS, GROUPS) == 0
    voters = lambda table: table.having(role="voter")  # the judge is frozen
    assert flat(one_judge, TASKS, GROUPS, learns=voters) == 4
    # Voters in slots of their own are compared each with itself.
    study = AdvantageConfig(group="study")
    with pytest.raises(ValueError, match=r"this workflow declares no group 'study'"):
        flat(one_judge, TASKS, study)
    assert flat(one_judge, TASKS, study, presets=voting.groups) == 0


@pytest.mark.parametrize(
    ("over", "flat"),
    [(("task", "task"), 0), (("task", "role"), 1), (("role", "task"), 1), (("role", "role"), 1)],
)
def test_agent_wise_problems_teach_where_an_advantage_is_not_0(over, flat):
    """Each role always earns its own: over the whole task that is variance, and a role's own scale is 0."""
    sample = Sampler(("voter", "judge"))
    agent = AdvantageConfig(estimator="agent", agent_mean=over[0], agent_scale=over[1])
    table, counts = resample(sample, by_role(1, 0), TASKS[:1], agent, draws=3)
    assert (counts.flat, counts.draws) == (flat, 3 if flat else 1)
    table, groups = with_advantages(table, agent)
    assert table.advantage.any() == (not flat)
    assert {role: count.zero_variance for role, count in groups.items()} == {"voter": flat, "judge": flat}


def test_contrast_in_calls_that_are_not_learned_from_teaches_nothing():
    """A frozen judge is right of one draft and wrong of another, and the voter earns the same each time."""
    sample = Sampler(("voter", "judge"))
    judged = rewarded(lambda episode, call: call == 1 and episode.sample % 2)
    voters = lambda table: table.having(role="voter")
    assert resample(sample, judged, TASKS, GROUPS, draws=2)[1].flat == 0
    assert resample(sample, judged, TASKS, GROUPS, draws=2, learns=voters)[1].flat == 4


def test_a_single_sample_teaches_where_its_reward_is_its_advantage():
    by_sample = rewarded(lambda episode, call: episode.sample == 2)
    alone = lambda tasks, first: Sampler()(tasks, first).of_episodes([0])
    _, counts = resample(alone, by_sample, TASKS[:1], AdvantageConfig(singleton="reward"), draws=5)
    assert (counts.flat, counts.rescued, counts.draws) == (1, 1, 3)


def test_episodes_without_a_call_teach_nothing_and_nothing_is_no_error():
    table, counts = resample(Sampler(()), reward, TASKS, GROUPS, draws=2)
    assert counts == ResampleCounts(4, 4, 0, 2, 32, 0, 0.0)
    assert len(table) == 0 and [head.sample for head in table.bare_episodes] == [4, 5, 6, 7] * 4
    table, counts = resample(Sampler(), reward, [], GROUPS, draws=3)
    assert counts == ResampleCounts(0, 0, 0, 0, 0, 0, 0.0) and table.episodes() == []


def test_a_penalty_for_length_makes_a_problem_worth_learning_from():
    def sample(tasks, first):
        call = CallRecord("generator", "p0", 0, 0, (1,), (2,), (-1.0,), "", "stop", "")
        longer = dataclasses.replace(call, tokens=(2,) * 7, logprobs=(-1.0,) * 7)
        return Table.of(
            [Episode(task, first + n, "w", ((call, longer)[n],), "") for task in tasks for n in range(2)]
        )

    overlong = AdvantageConfig(overlong=(8, 4))
    assert resample(sample, by_role(1), TASKS, overlong, draws=3)[1].flat == 0
    assert resample(sample, by_role(1), TASKS, GROUPS, draws=3)[1].flat == 4


def test_a_reward_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        resample(Sampler(), by_role(float("nan")), TASKS, GROUPS, draws=2)


@pytest.mark.parametrize(
    ("frozen", "phase", "trains", "described"),
    [
        ((), Phase(1), [True, False, True], [True, False, True]),
        ((), Phase(1, roles=("generator",)), [True, False, False], [True, False, True]),
        (("generator",), Phase(1), [False, False, True], [False, False, True]),
    ],
)
def test_an_update_leaves_out_calls_without_sampled_tokens_and_roles_that_do_not_train(
    frozen, phase, trains, described
):
    spoke = CallRecord("generator", "p0", 0, 0, (1,), (2,), (-1.0,), "", "stop", "")
    # Its prompt left no room for an answer.
    silent = dataclasses.replace(spoke, slot=1, tokens=(), logprobs=())
    last = dataclasses.replace(spoke, role="aggregator", policy="p1", turn=1)
    table = Table.of([Episode(TASKS[0], 0, "voting", (spoke, silent, last), "1")])
    config = tiny_config("no base is read")
    config = dataclasses.replace(config, policies=dataclasses.replace(config.policies, frozen_roles=frozen))
    phases = Phases(config, SimpleNamespace(mesh=None), {}, None)
    assert phases.trains(phase, table).tolist() == trains
    assert phases.reported(table).tolist() == described


def test_an_adapter_of_another_run_is_over_the_same_base(tmp_path):
    config = load_config("configs/micro.py:voting-isolated-xs-math", [("policies.train", "lora")])
    mine, other = "configs/bases/micro-xs", "configs/bases/recipes-xs"
    record = {"config": config.to_json(), "digests": {f"base {mine}": digest_model(mine)}}
    record |= {"versions": {}, "settled": {}, "changes": []}
    (tmp_path / "config.json").write_text(json.dumps(record))
    specs = config.policies.specs
    assert other_base(tmp_path, specs) == ""
    moved = specs | {"p1": dataclasses.replace(specs["p1"], base=other)}
    told = f"the adapter of 'p1' was trained over '{mine}', whose weights differ from '{other}' here"
    assert other_base(tmp_path, moved) == told
    whole = {name: dataclasses.replace(spec, lora=False) for name, spec in moved.items()}
    assert other_base(tmp_path, whole) == ""  # the weights are all that it is
