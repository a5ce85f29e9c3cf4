"""Credit beside a rollout: what a credit is given, when, and what becomes of a slow or a broken one."""

import dataclasses
import threading
import time

import numpy as np
import pytest

from marl_jax.episodes import CallRecord, Episode
from marl_jax.rewards.background_credit import LEAVE_S, BackgroundCredit
from marl_jax.rewards.credit import CreditConfig, by_episodes, load_credit, outcome, with_rewards
from marl_jax.rewards.grading import grade
from marl_jax.table import Table
from marl_jax.task import Task

TASKS = [Task(f"t{n}", "math", f"{n} + 1?", gold=str(n + 1)) for n in range(3)]
WAIT_S = 20.0


def episode(task, sample, error=None):
    answer = str(sample)
    call = CallRecord("generator", "p0", 0, 0, (), (), (), answer, "stop", answer, kind="solver")
    return Episode(task, sample, "single", (call,), answer, error=error, key=(0, 0, 7, 7))


EPISODES = [episode(task, sample) for task in TASKS for sample in range(4)]
STEP = Table.of(EPISODES)


def worth(table):
    """The graded episodes of a table, and what each call earned."""
    components = {name: column.tolist() for name, column in table.components.items()}
    return table.episodes(), components, table.reward.tolist()


def worth_by(credit, table):
    return worth(with_rewards(grade(table), credit))


@pytest.mark.parametrize(("batch", "threads"), [("task", 1), ("task", 3), ("step", 1)])
def test_the_order_of_ends_and_the_number_of_threads_change_nothing(batch, threads):
    with BackgroundCredit(outcome, CreditConfig(batch=batch, threads=threads), samples=4) as background:
        for one in reversed(EPISODES):
            background.finished(one)
        table = background(STEP)
    assert worth(table) == worth_by(outcome, STEP)
    assert sum(head.outcome for head in table.bare_episodes) == 3  # sample n + 1 is right for task n


def test_a_task_is_credited_while_others_are_not_there_yet_in_the_order_of_samples():
    called, seen = threading.Event(), []

    def credit(table):
        seen.append([(head.task.id, head.sample) for head in table.bare_episodes])
        called.set()
        return outcome(table)

    with BackgroundCredit(credit, CreditConfig(), samples=4) as background:
        for sample in (2, 0, 3):
            background.finished(episode(TASKS[1], sample))
        background.finished(episode(TASKS[0], 0))
        assert not called.wait(0.2)
        background.finished(episode(TASKS[1], 1))
        assert called.wait(WAIT_S)
        assert seen == [[("t1", 0), ("t1", 1), ("t1", 2), ("t1", 3)]]
        background(Table.of([episode(TASKS[1], sample) for sample in range(4)]))
    assert len(seen) == 1


def test_a_step_is_credited_at_once_and_each_draw_of_a_task_by_itself():
    sizes = []

    def credit(table):
        sizes.append(len(table.bare_episodes))
        return outcome(table)

    with BackgroundCredit(credit, CreditConfig(batch="step"), samples=4) as background:
        for one in EPISODES:
            background.finished(one)
        assert worth(background(STEP)) == worth(background(STEP))
    assert sizes == [12]
    again = [episode(TASKS[0], sample) for sample in range(4, 8)]
    with BackgroundCredit(credit, CreditConfig(), samples=4) as background:
        for one in [*EPISODES[:4], *again]:
            background.finished(one)
        both = Table.of([*again, *EPISODES[:4]])
        assert worth(background(both)) == worth_by(outcome, both)
    assert sizes == [12, 4, 4]


def test_finished_does_not_wait_for_a_slow_credit_and_threads_work_side_by_side():
    together = threading.Barrier(3)

    def credit(table):
        together.wait(WAIT_S)  # broken, and so a failure, unless three calls meet
        return outcome(table)

    with BackgroundCredit(credit, CreditConfig(threads=3), samples=4) as background:
        for one in EPISODES:
            background.finished(one)
        assert worth(background(STEP)) == worth_by(outcome, STEP)


def test_failed_episodes_are_not_shown_to_a_credit_and_have_no_components():
    lost = [dataclasses.replace(one, error="lost") for one in EPISODES[:4]]
    credit = by_episodes(lambda graded: pytest.fail("called"))
    with BackgroundCredit(credit, CreditConfig(), samples=4) as background:
        for one in lost:
            background.finished(one)
        table = background(Table.of(lost))
    assert table.components == {} and table.reward.tolist() == [0.0] * 4


def test_episodes_without_calls_keep_their_places_and_components_are_absent_where_no_batch_has_them():
    silent = dataclasses.replace(EPISODES[5], calls=(), answer=None, error="no call was made")
    step = Table.of([*EPISODES[:5], silent, *EPISODES[6:8]])
    mine = by_episodes(lambda graded: [[{graded[0].task.id: 0.5}] for _ in graded])
    with BackgroundCredit(mine, CreditConfig(), samples=4) as background:
        for one in step.episodes():
            background.finished(one)
        table = background(step)
    assert [(one.task.id, one.sample, len(one.calls)) for one in table.episodes()] == [
        (one.task.id, one.sample, len(one.calls)) for one in step.episodes()
    ]
    none = np.nan
    np.testing.assert_equal(
        dict(table.components), {"t0": [0.5] * 4 + [none] * 3, "t1": [none] * 4 + [0.5] * 3}
    )
    assert table.reward.tolist() == [0.5] * 7


@pytest.mark.parametrize("error", [ValueError("no service"), TimeoutError("no service"), SystemExit(3)])
def test_a_credit_that_fails_ends_the_rollout_and_the_step(error):
    def credit(table):
        raise error

    with BackgroundCredit(credit, CreditConfig(), samples=4) as background:
        for one in EPISODES[:4]:
            background.finished(one)
        with pytest.raises(type(error)) as raised:
            background(Table.of(EPISODES[:4]))
        assert raised.value is error
        with pytest.raises(type(error)):
            background.finished(EPISODES[4])


def test_who_waits_for_a_slow_credit_can_give_up():
    class Stopped(Exception):
        pass

    asked, release = threading.Event(), threading.Event()

    def check():
        if asked.is_set():
            raise Stopped

    def credit(table):
        asked.set()
        release.wait(WAIT_S)
        return outcome(table)

    began = time.monotonic()
    with (
        pytest.raises(Stopped),
        BackgroundCredit(credit, CreditConfig(), samples=4, check=check) as background,
    ):
        background(STEP)
    assert time.monotonic() - began < LEAVE_S + WAIT_S / 2
    release.set()


def test_what_failed_is_heard_of_while_a_slow_one_is_waited_for_and_the_rest_is_not_tried():
    release, called = threading.Event(), []

    def credit(table):
        name = table.bare_episodes[0].task.id
        called.append(name)
        if name == "t1":
            raise ValueError("no service")
        release.wait(WAIT_S)
        return outcome(table)

    began = time.monotonic()
    refused = pytest.raises(ValueError, match="no service")
    with refused, BackgroundCredit(credit, CreditConfig(threads=2), samples=4) as background:
        background(STEP)
    assert time.monotonic() - began < WAIT_S / 2 and set(called) == {"t0", "t1"}
    release.set()


def test_no_thread_is_left_and_what_still_waits_when_it_is_given_up_is_dropped():
    release, called = threading.Event(), []

    def credit(table):
        called.append(len(table.bare_episodes))
        release.wait(WAIT_S)
        return outcome(table)

    with pytest.raises(KeyboardInterrupt), BackgroundCredit(credit, CreditConfig(), samples=4) as background:
        for one in EPISODES:
            background.finished(one)
        raise KeyboardInterrupt
    release.set()
    until = time.monotonic() + WAIT_S
    while any(thread.name == "credit" for thread in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(thread.name == "credit" for thread in threading.enumerate())
    assert len(called) <= 1


def one_number_too_few(graded):
    return [1.0] * (len(graded) - 1)


def test_the_complaint_about_a_wrong_result_names_the_function():
    credit = load_credit(f"{__name__}:one_number_too_few")
    with (
        BackgroundCredit(credit, CreditConfig(), samples=4) as background,
        pytest.raises(ValueError, match="returned 3 items"),
    ):
        background(STEP)


@pytest.mark.parametrize("wrong", [{"batch": "rollout"}, {"threads": 0}, {"batch": "step", "threads": 2}])
def test_senseless_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must be|at least|one call"):
        CreditConfig(**wrong)
