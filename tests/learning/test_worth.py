"""From rewards to advantages: who is compared with whom, what length costs, and what cannot teach."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from marl_jax.episodes import CallRecord, Episode
from marl_jax.errors import UserError
from marl_jax.learning.by_role.role_statistics import row_statistics
from marl_jax.learning.estimators.groups import GroupCounts, count_groups
from marl_jax.learning.estimators.worth import AdvantageConfig, with_advantages
from marl_jax.table import Table
from marl_jax.task import Task
from marl_jax.workflows import voting


def call(role, slot=0, **changes):
    fields = {"policy": "p0", "turn": 0, "prompt_tokens": (1, 2), "tokens": (3, 4), "logprobs": (-1.0, -2.0)}
    return CallRecord(role=role, slot=slot, text="", finish_reason="stop", answer="7", **fields | changes)


EPISODES = [
    Episode(
        Task("t", "math", "?"), sample, "voting", (call("voter", 0), call("voter", 1), call("judge")), "7"
    )
    for sample in range(2)
]
TABLE = Table.of(EPISODES).replace(reward=np.array([1.0, 0.0, 1.0, 0.0, 0.0, 1.0]))
HALF = 0.5 / (math.sqrt(0.5) + 1e-6)  # the advantage of 1 over 0


def test_the_study_groups_each_voter_apart_and_keeps_singletons():
    table, counts = with_advantages(TABLE, AdvantageConfig.study(), voting.groups)
    assert table.advantage.tolist() == pytest.approx([HALF, 0, 0, -HALF, 0, 0])
    assert table.group.tolist() == [0, 1, 2, 0, 1, 2]
    assert counts == {"voter": GroupCounts(2, 0, 1), "judge": GroupCounts(1, 0, 1)}
    alone, counts = with_advantages(TABLE.take(np.arange(1)), AdvantageConfig.study(), voting.groups)
    assert alone.advantage[0] == 1.0 and counts["voter"].singletons == 1


def test_agent_wise_and_overlong_advantages():
    table, _ = with_advantages(TABLE, AdvantageConfig(estimator="agent"))
    assert table.advantage.tolist() == pytest.approx([1.5, -0.5, 0, -0.5, -0.5, 0], abs=1e-5)
    voter = EPISODES[0].calls[0]
    longer = dataclasses.replace(voter, tokens=(3,) * 10, logprobs=(0.0,) * 10)
    both = Table.of([dataclasses.replace(EPISODES[0], calls=(voter, longer))])
    equal = both.replace(reward=np.ones(2))
    table, _ = with_advantages(equal, AdvantageConfig(estimator="dr_grpo", overlong=(10, 5)))
    assert table.advantage.tolist() == [0.5, -0.5]


def test_calls_without_tokens_are_compared_with_nothing():
    """They have no advantage and no group, and those that said something have what they have without them."""
    silent = call("voter", tokens=(), logprobs=())
    first, second = (dataclasses.replace(e, calls=(e.calls[0], silent, e.calls[2])) for e in EPISODES)
    config = AdvantageConfig(overlong=(2, 2))
    table, counts = with_advantages(Table.of([first, second]).replace(reward=TABLE.reward), config)
    said = np.array([True, False, True] * 2)
    alone, wanted = with_advantages(TABLE.take(said), config)
    assert np.isnan(table.advantage).tolist() == (~said).tolist() and (table.group[~said] == -1).all()
    for name in ("advantage", "group", "penalty"):
        np.testing.assert_array_equal(getattr(table, name)[said], getattr(alone, name), err_msg=name)
    assert alone.advantage[:1] == pytest.approx([HALF]) and counts == wanted
    assert count_groups(table.reward, table.group, [*map(table.role_of, range(len(table)))]) == wanted


def test_a_call_about_another_task_is_compared_by_what_that_task_has():
    easy, hard = (Task(name, "math", "?", level=level) for name, level in (("a", 1), ("b", 2)))
    calls = [dataclasses.replace(call("voter", slot), about=(easy, hard)[slot % 2]) for slot in range(4)]
    table = Table.of([dataclasses.replace(EPISODES[0], calls=tuple(calls))]).replace(reward=np.arange(4.0))
    table, _ = with_advantages(table, AdvantageConfig(group="role,task.level"))
    assert table.group.tolist() == [0, 1, 0, 1]


def test_a_table_of_no_calls_has_no_advantages_and_no_counts():
    table, counts = with_advantages(Table.of([]), AdvantageConfig())
    assert (len(table.advantage), len(table.group), counts) == (0, 0, {})


@pytest.mark.parametrize("options", [{}, {"estimator": "agent"}, {"estimator": "rloo", "overlong": (2, 1)}])
def test_another_number_of_rows_compiles_nothing(options, caplog):
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for count in (6, 5, 4):
            with_advantages(TABLE.take(np.arange(count)), AdvantageConfig(**options))
        assert not [record for record in caplog.records if "ompil" in record.getMessage()]
        jax.jit(lambda x: x + 1)(0)
        assert "ompil" in caplog.text  # a compilation would have been seen


def by_reward(table):
    return {"weight": 1 + table.reward, "clip_high": np.full(len(table), 0.3)}


def raising(table):
    raise KeyError("nothing")


def texts(table):
    return {"weight": ["a"] * len(table)}


def wrong(table):
    return {"weight": -np.ones(len(table))}


def test_rows_have_the_weights_and_clips_that_a_users_function_gives_them():
    config = AdvantageConfig(rows="test_worth:by_reward")
    table, _ = with_advantages(TABLE, config)
    assert table.weight.tolist() == [2, 1, 2, 1, 1, 2] and table.clip_high.tolist() == [0.3] * 6
    assert table.clip_low is None
    silent = dataclasses.replace(EPISODES[0], calls=(call("voter"), call("voter", 1, tokens=(), logprobs=())))
    table, _ = with_advantages(Table.of([silent]).replace(reward=np.ones(2)), config)
    assert table.weight.tolist() == [2, 0]  # of the call that said nothing, which trains nothing
    with pytest.raises(UserError, match=r"advantages.rows 'test_worth:raising' raised KeyError: 'nothing'"):
        with_advantages(TABLE, AdvantageConfig(rows="test_worth:raising"))
    with pytest.raises(UserError, match=r"advantages\.rows 'test_worth:texts' returned"):
        with_advantages(TABLE, AdvantageConfig(rows="test_worth:texts"))
    with pytest.raises(UserError, match="6 finite numbers of at least 0; fix 'weight'"):
        with_advantages(TABLE, AdvantageConfig(rows="test_worth:wrong"))
    with pytest.raises(ValueError, match="has no 'nobody'"):
        AdvantageConfig(rows="test_worth:nobody")


def test_config_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="names no field"):
        AdvantageConfig(group="task,rol")
    with pytest.raises(ValueError, match="'gae'"):
        AdvantageConfig(estimator="gae")


def test_what_a_row_pays_for_its_length_is_told_beside_its_reward():
    config = AdvantageConfig(overlong=(2, 2), estimator="dr_grpo", group="task")
    table, _ = with_advantages(TABLE, config)
    paid = table.reward + table.penalty
    assert table.advantage == pytest.approx(paid - paid.mean())  # all calls are about one task
    assert table.penalty.tolist() == [-min(n / 2, 1) for n in table.length]
    stats = row_statistics(table)
    assert stats["overlong_penalty"] == pytest.approx(table.penalty.mean())
    assert stats["reward"] == pytest.approx(TABLE.reward.mean())
    free, _ = with_advantages(TABLE, dataclasses.replace(config, overlong=None))
    assert "overlong_penalty" not in row_statistics(free)


def test_a_penalty_of_before_is_not_paid_again():
    paid, _ = with_advantages(TABLE, AdvantageConfig(overlong=(2, 2), estimator="dr_grpo"))
    again, _ = with_advantages(paid, AdvantageConfig(estimator="dr_grpo"))
    fresh, _ = with_advantages(TABLE, AdvantageConfig(estimator="dr_grpo"))
    assert paid.penalty.tolist() == [-1.0] * 6 and again.penalty is None
    assert again.advantage.tolist() == fresh.advantage.tolist()


def test_a_table_without_rewards_is_told_what_adds_them():
    with pytest.raises(ValueError, match=r"has no column 'reward': rewards.with_rewards\(\) adds it"):
        with_advantages(TABLE.replace(reward=None), AdvantageConfig())
