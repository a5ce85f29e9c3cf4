"""What a plan counts is corrected by steps that were measured on this machine, not by the load of a moment."""

import dataclasses

import pytest

from marl_jax.config.run_config import load_config
from marl_jax.planning import devices, step_times
from marl_jax.planning.plan import find_models, make_plan
from marl_jax.terminal.page import plan_page

CELL = "configs/micro.py:voting-isolated-xs-math"


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("MARL_JAX_CACHE", str(tmp_path))


def config_of(cell=CELL, **changes):
    return load_config(cell, [(name.replace("__", "."), str(value)) for name, value in changes.items()])


@pytest.fixture(scope="module")
def plan():
    device = devices.Device("CPU", "cpu", 8 << 30, 1e10, 1e11, 1e11)
    return make_plan(config_of(), find_models(config_of())[0], device)


def leave(config, plan, seconds):
    pace = step_times.Pace(config, plan)
    for each in seconds:
        pace.step(each)
    pace.keep()


def test_steps_of_the_cell_itself_count_but_for_the_first_and_the_slow_ones(plan):
    config = config_of()
    assert step_times.guess(config, plan) is None
    leave(config, plan, [30.0, 2.0, 90.0, 2.5, 80.0, 2.25])
    found = step_times.guess(config, plan)
    assert found.seconds == 2.25 and "5 earlier steps" in found.how  # of 2, 2.25, 2.5, 80, 90


def test_what_changes_no_step_changes_no_guess_and_what_does_is_another_cell(plan):
    leave(config_of(), plan, [9.0, 2.0, 2.0, 2.0])
    same = config_of(steps=7, seed=3, evaluation__every=5, checkpoints__every=1)
    assert step_times.guess(same, plan).seconds == 2.0
    works = [
        dataclasses.replace(work, operations=3 * work.operations, moved=3 * work.moved) for work in plan.works
    ]
    found = step_times.guess(config_of(data__problems=192), dataclasses.replace(plan, works=tuple(works)))
    assert (
        found.seconds == pytest.approx(6.0) and "1 other cell" in found.how
    )  # three times as much is counted


def test_other_cells_of_similar_size_correct_a_plan(plan):
    def sized(times):
        works = (
            dataclasses.replace(w, operations=times * w.operations, moved=times * w.moved) for w in plan.works
        )
        return dataclasses.replace(plan, works=tuple(works))

    counted = sum(plan.seconds.values())
    for number, (times, ratio) in enumerate(
        [(1e-3, 300), (1e-2, 200), (2e-2, 100), (0.5, 1.0), (1, 2.0), (2, 1.5)]
    ):
        seconds = times * counted * ratio
        leave(config_of(data__problems=100 + number), sized(times), [9.0] + [seconds] * 3)
    found = step_times.guess(config_of(), plan)
    assert found.seconds == pytest.approx(1.5 * counted) and "3 other cells of similar size" in found.how


def test_too_few_steps_and_files_of_something_else_say_nothing(plan, tmp_path):
    leave(config_of(), plan, [9.0, 2.0, 2.0])
    assert step_times.guess(config_of(), plan) is None
    leave(config_of(), plan, [9.0, 2.0, 2.0, 2.0])
    (file,) = tmp_path.glob("measured/*/*.json")
    file.write_text('{"seconds": "soon"}')
    assert step_times.guess(config_of(), plan) is None


def test_another_device_has_steps_of_its_own(plan):
    leave(config_of(), plan, [9.0, 2.0, 2.0, 2.0])
    elsewhere = dataclasses.replace(plan, device=dataclasses.replace(plan.device, name="H100"))
    assert step_times.guess(config_of(), elsewhere) is None


def test_the_pages_of_the_plan_say_what_was_measured(plan):
    config, source = config_of(), "here"
    models = find_models(config)[0]
    assert "\nmeasured " not in plan_page(config, models, source, [plan])
    leave(config, plan, [9.0, 2.0, 2.0, 2.0])
    page = plan_page(config, models, source, [plan])
    assert [line.split()[-2:] for line in page.splitlines() if line.startswith("measured ")] == [["2.0", "s"]]
    assert "as in 3 earlier steps here" in page


def test_a_machine_keeps_the_best_rates_that_it_showed(monkeypatch):
    devices._rates.cache_clear()
    quiet = devices.host()
    devices._rates.cache_clear()
    monkeypatch.setattr(devices, "_shortest", lambda work: 1e3)  # as if everything took ages
    busy = devices.host()
    assert (busy.float32, busy.bandwidth) == (quiet.float32, quiet.bandwidth)
