"""Credit beside a rollout: what a credit is given, when, and what becomes of a slow or a broken one."""

import dataclasses
import threading
import time

import pytest

from marl_jax.rewards.credit import CreditConfig, assign, load_credit, outcome
from marl_jax.rewards.crediting import LEAVE_S, Crediting
from marl_jax.rewards.grading import grade_episodes
from marl_jax.rollouts.episodes import CallRecord, Episode
from marl_jax.tasks.task import Task

TASKS = [Task(f"t{n}", "math", f"{n} + 1?", gold=str(n + 1)) for n in range(3)]
WAIT_S = 20.0


def episode(task, sample, error=None):
    call = CallRecord("generator", "p0", 0, 0, (), (), (), str(sample), "stop", str(sample))
    return Episode(task, sample, "single", (call,), str(sample), error=error, key=(0, 0, 7, 7))


EPISODES = [episode(task, sample) for task in TASKS for sample in range(4)]


def worth_by(credit, episodes):
    graded = grade_episodes(episodes)
    return list(zip(graded, assign(credit, graded)))


@pytest.mark.parametrize(("batch", "threads"), [("task", 1), ("task", 3), ("step", 1)])
def test_the_order_of_ends_and_the_number_of_threads_change_nothing(batch, threads):
    with Crediting(outcome, CreditConfig(batch=batch, threads=threads), samples=4) as crediting:
        for one in reversed(EPISODES):
            crediting.finished(one)
        worth = crediting(EPISODES)
    assert worth == worth_by(outcome, EPISODES)
    assert sum(one.graded.outcome for one in worth) == 3  # sample n + 1 is right for task n


def test_a_task_is_credited_while_others_are_not_there_yet_in_the_order_of_samples():
    called, seen = threading.Event(), []

    def credit(graded):
        seen.append([(one.episode.task.id, one.episode.sample) for one in graded])
        called.set()
        return outcome(graded)

    with Crediting(credit, CreditConfig(), samples=4) as crediting:
        for sample in (2, 0, 3):
            crediting.finished(episode(TASKS[1], sample))
        crediting.finished(episode(TASKS[0], 0))
        assert not called.wait(0.2)
        crediting.finished(episode(TASKS[1], 1))
        assert called.wait(WAIT_S)
        assert seen == [[("t1", 0), ("t1", 1), ("t1", 2), ("t1", 3)]]
        crediting([episode(TASKS[1], sample) for sample in range(4)])
    assert len(seen) == 1


def test_a_step_is_credited_at_once_and_each_draw_of_a_task_by_itself():
    sizes = []

    def credit(graded):
        sizes.append(len(graded))
        return outcome(graded)

    with Crediting(credit, CreditConfig(batch="step"), samples=4) as crediting:
        for one in EPISODES:
            crediting.finished(one)
        assert crediting(EPISODES) == crediting(EPISODES)
    assert sizes == [12]
    again = [episode(TASKS[0], sample) for sample in range(4, 8)]
    with Crediting(credit, CreditConfig(), samples=4) as crediting:
        for one in [*EPISODES[:4], *again]:
            crediting.finished(one)
        assert [one.graded.episode for one in crediting([*again, *EPISODES[:4]])] == [*again, *EPISODES[:4]]
    assert sizes == [12, 4, 4]


def test_finished_does_not_wait_for_a_slow_credit_and_threads_work_side_by_side():
    together = threading.Barrier(3)

    def credit(graded):
        together.wait(WAIT_S)  # broken, and so a failure, unless three calls meet
        return outcome(graded)

    with Crediting(credit, CreditConfig(threads=3), samples=4) as crediting:
        for one in EPISODES:
            crediting.finished(one)
        assert crediting(EPISODES) == worth_by(outcome, EPISODES)


def test_failed_episodes_are_not_shown_to_a_credit_and_have_no_components():
    lost = [dataclasses.replace(one, error="lost") for one in EPISODES[:4]]
    with Crediting(lambda graded: pytest.fail("called"), CreditConfig(), samples=4) as crediting:
        for one in lost:
            crediting.finished(one)
        assert [one.components for one in crediting(lost)] == [[{}]] * 4


@pytest.mark.parametrize("error", [ValueError("no service"), TimeoutError("no service"), SystemExit(3)])
def test_a_credit_that_fails_ends_the_rollout_and_the_step(error):
    def credit(graded):
        raise error

    with Crediting(credit, CreditConfig(), samples=4) as crediting:
        for one in EPISODES[:4]:
            crediting.finished(one)
        with pytest.raises(type(error)) as raised:
            crediting(EPISODES[:4])
        assert raised.value is error
        with pytest.raises(type(error)):
            crediting.finished(EPISODES[4])


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
    with pytest.raises(Stopped), Crediting(credit, CreditConfig(), samples=4, check=check) as crediting:
        crediting(EPISODES)
    assert time.monotonic() - began < LEAVE_S + WAIT_S / 2
    release.set()


def test_what_failed_is_heard_of_while_a_slow_one_is_waited_for_and_the_rest_is_not_tried():
    release, called = threading.Event(), []

    def credit(graded):
        name = graded[0].episode.task.id
        called.append(name)
        if name == "t1":
            raise ValueError("no service")
        release.wait(WAIT_S)
        return outcome(graded)

    began = time.monotonic()
    refused = pytest.raises(ValueError, match="no service")
    with refused, Crediting(credit, CreditConfig(threads=2), samples=4) as crediting:
        crediting(EPISODES)
    assert time.monotonic() - began < WAIT_S / 2 and set(called) == {"t0", "t1"}
    release.set()


def test_no_thread_is_left_and_what_still_waits_when_it_is_given_up_is_dropped():
    release, called = threading.Event(), []

    def credit(graded):
        called.append(len(graded))
        release.wait(WAIT_S)
        return outcome(graded)

    with pytest.raises(KeyboardInterrupt), Crediting(credit, CreditConfig(), samples=4) as crediting:
        for one in EPISODES:
            crediting.finished(one)
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
        Crediting(credit, CreditConfig(), samples=4) as crediting,
        pytest.raises(ValueError, match="returned 3 items"),
    ):
        crediting(EPISODES)


@pytest.mark.parametrize("wrong", [{"batch": "rollout"}, {"threads": 0}, {"batch": "step", "threads": 2}])
def test_senseless_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must be|at least|one call"):
        CreditConfig(**wrong)
