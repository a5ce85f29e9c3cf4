"""Judging beside a rollout: what a credit is given, when, and what becomes of a slow or a broken one."""

import dataclasses
import threading
import time

import pytest

from marl_jax.rewards.credit import CreditConfig, assign, grade_episodes, load_credit, outcome
from marl_jax.rewards.judge import Judge
from marl_jax.rollouts.episodes import CallRecord, Episode
from marl_jax.tasks.task import Task

TASKS = [Task(f"t{n}", "math", f"{n} + 1?", gold=str(n + 1)) for n in range(3)]
WAIT_S = 20.0


def episode(task, sample, error=None):
    call = CallRecord("generator", "p0", 0, 0, (), (), (), str(sample), "stop", str(sample))
    return Episode(task, sample, "single", (call,), str(sample), error=error, key=(0, 0, 7, 7))


EPISODES = [episode(task, sample) for task in TASKS for sample in range(4)]


def judged_as(credit, episodes):
    graded = grade_episodes(episodes)
    return list(zip(graded, assign(credit, graded)))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("batch", ["task", "step"])
def test_the_order_of_ends_and_the_number_of_threads_change_nothing(batch, threads):
    with Judge(outcome, CreditConfig(batch=batch, threads=threads), samples=4) as judge:
        for one in reversed(EPISODES):
            judge.finished(one)
        judged = judge(EPISODES)
    assert judged == judged_as(outcome, EPISODES)
    assert sum(one.graded.outcome for one in judged) == 3  # sample n + 1 is right for task n


def test_a_task_is_credited_while_others_are_not_there_yet_in_the_order_of_samples():
    called, seen = threading.Event(), []

    def credit(graded):
        seen.append([(one.episode.task.id, one.episode.sample) for one in graded])
        called.set()
        return outcome(graded)

    with Judge(credit, CreditConfig(), samples=4) as judge:
        for sample in (2, 0, 3):
            judge.finished(episode(TASKS[1], sample))
        judge.finished(episode(TASKS[0], 0))
        assert not called.wait(0.2)
        judge.finished(episode(TASKS[1], 1))
        assert called.wait(WAIT_S)
        assert seen == [[("t1", 0), ("t1", 1), ("t1", 2), ("t1", 3)]]
        judge([episode(TASKS[1], sample) for sample in range(4)])
    assert len(seen) == 1


def test_a_step_is_credited_at_once_and_each_draw_of_a_task_by_itself():
    sizes = []

    def credit(graded):
        sizes.append(len(graded))
        return outcome(graded)

    with Judge(credit, CreditConfig(batch="step"), samples=4) as judge:
        for one in EPISODES:
            judge.finished(one)
        assert judge(EPISODES) == judge(EPISODES)
    assert sizes == [12]
    again = [episode(TASKS[0], sample) for sample in range(4, 8)]
    with Judge(credit, CreditConfig(), samples=4) as judge:
        for one in [*EPISODES[:4], *again]:
            judge.finished(one)
        assert [one.graded.episode for one in judge([*again, *EPISODES[:4]])] == [*again, *EPISODES[:4]]
    assert sizes == [12, 4, 4]


def test_finished_does_not_wait_for_a_slow_credit_and_threads_work_side_by_side():
    together = threading.Barrier(3)

    def credit(graded):
        together.wait(WAIT_S)  # broken, and so a failure, unless three calls meet
        return outcome(graded)

    with Judge(credit, CreditConfig(threads=3), samples=4) as judge:
        for one in EPISODES:
            judge.finished(one)
        assert judge(EPISODES) == judged_as(outcome, EPISODES)


def test_failed_episodes_are_not_shown_to_a_credit_and_have_no_components():
    lost = [dataclasses.replace(one, error="lost") for one in EPISODES[:4]]
    with Judge(lambda graded: pytest.fail("called"), CreditConfig(), samples=4) as judge:
        for one in lost:
            judge.finished(one)
        assert [one.components for one in judge(lost)] == [[{}]] * 4


@pytest.mark.parametrize("error", [ValueError("no service"), TimeoutError("no service"), SystemExit(3)])
def test_a_credit_that_fails_ends_the_rollout_and_the_step(error):
    def credit(graded):
        raise error

    with Judge(credit, CreditConfig(), samples=4) as judge:
        for one in EPISODES[:4]:
            judge.finished(one)
        with pytest.raises(type(error)) as raised:
            judge(EPISODES[:4])
        assert raised.value is error
        with pytest.raises(type(error)):
            judge.finished(EPISODES[4])


def test_who_waits_for_a_slow_credit_can_give_up():
    class Stopped(Exception):
        pass

    asked, release = threading.Event(), threading.Event()

    def check():
        if asked.is_set():
            raise Stopped

    def credit(graded):
        asked.set()
        release.wait(WAIT_S)
        return outcome(graded)

    began = time.monotonic()
    with pytest.raises(Stopped), Judge(credit, CreditConfig(), samples=4, check=check) as judge:
        judge(EPISODES)
    assert time.monotonic() - began < WAIT_S / 2
    release.set()


def test_no_thread_is_left():
    before = threading.active_count()
    for _ in range(3):
        with Judge(outcome, CreditConfig(threads=2), samples=4) as judge:
            judge(EPISODES)
    until = time.monotonic() + WAIT_S
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= before


def one_number_too_few(graded):
    return [1.0] * (len(graded) - 1)


def test_the_complaint_about_a_wrong_result_names_the_function():
    credit = load_credit(f"{__name__}:one_number_too_few")
    with (
        Judge(credit, CreditConfig(), samples=4) as judge,
        pytest.raises(ValueError, match="returned 11 items"),
    ):
        judge(EPISODES)


@pytest.mark.parametrize("wrong", [{"batch": "rollout"}, {"threads": 0}])
def test_senseless_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must be|at least"):
        CreditConfig(**wrong)
