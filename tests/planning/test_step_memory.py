"""Memory of the compiled road, counted from its trace: beside XLA's own analysis, and by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from test_plan import HERE, QUICK, with_memory

from marl_jax.compiled import NoArrayForm
from marl_jax.config.run_config import MeshConfig, load_config
from marl_jax.planning.account import needed
from marl_jax.planning.devices import KINDS
from marl_jax.planning.liveness import count_equations, made_bytes
from marl_jax.planning.memory import COPIES, OF_SEEDS
from marl_jax.planning.plan import find_models, make_plan
from marl_jax.planning.step_memory import EQUATION_BYTES, StepMemory, compiled_plan, seeds_that_fit
from marl_jax.runs.opening import check_before_run

K = 1 << 10


@pytest.fixture(scope="module")
def cell():
    changes = {"road": "compiled", "data.problems": "16", "data.train_size": "64"}
    return load_config("configs/micro.py:single-shared-xs-math", [*changes.items()])


@pytest.fixture(scope="module")
def road(cell):
    return check_before_run(cell, make_plan(cell, find_models(cell)[0], HERE))


@pytest.mark.long
def test_the_step_takes_the_memory_that_xla_counts(road):
    """Within 40%: a compiler keeps some arrays apart that are counted in one place, and writes others nowhere."""
    step, traced = road.planned()
    counted = step.needed(1, together=False)
    assert counted == pytest.approx(needed(traced.lower().compile(QUICK).memory_analysis()), rel=0.4)


def made(function, *shapes):
    return made_bytes(jax.make_jaxpr(function)(*(jnp.zeros(shape) for shape in shapes)).jaxpr)


def test_what_is_live_at_the_same_time_is_counted_by_hand():
    """float32 arrays of K numbers have 4 KiB."""
    assert made(lambda x: jnp.sin(jnp.cos(x)), K) == 4 * K  # one after the other, in one place
    assert made(lambda x: jnp.sin(x) + jnp.cos(x), K) == 8 * K
    assert made(lambda x, y: x @ y, (K, 2), (2, K)) == 4 * K * K
    assert made(lambda x: (x @ x) @ x, (32, 32)) == 8 * K  # a product is not written where it reads
    assert made(lambda x: x + jnp.zeros(K), K) == 4 * K  # zeros are nowhere


def test_a_loop_holds_what_it_carries_once_and_a_switch_its_widest_branch():
    turn = lambda i, x: jnp.sin(x)
    assert made(lambda x: jax.lax.fori_loop(0, 9, turn, jnp.sin(x)), K) <= 8 * K + 16
    few, many = lambda x: x + 1, lambda x: jnp.outer(x, x) @ x
    assert made(lambda x: jax.lax.switch(0, [few, few], x), 64) < 1 * K
    assert 16 * K <= made(lambda i, x: jax.lax.switch(i.astype(int), [few, many], x), (), 64) < 33 * K


def test_equations_of_loops_and_branches_are_counted_once():
    count = lambda function: count_equations(jax.make_jaxpr(function)(jnp.zeros(3)).jaxpr)
    assert count(lambda x: jnp.sin(x) + x) == 2
    assert count(lambda x: jax.lax.fori_loop(0, 9, lambda _, y: jnp.sin(jnp.cos(y)), x)) == count(
        lambda x: jax.lax.fori_loop(0, 900, lambda _, y: jnp.sin(jnp.cos(y)), x)
    )
    once = count(lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x))
    assert count(lambda x: jax.lax.cond(x[0] > 0, lambda y: jnp.sin(jnp.sin(y)), jnp.cos, x)) == once + 1


@pytest.mark.long
def test_compiling_is_planned_by_the_equations_of_the_step(cell, road):
    step, _ = road.planned()
    hosted = make_plan(cell, find_models(cell)[0], HERE)
    more = dataclasses.replace(step, equations=step.equations + 1000)
    added = compiled_plan(hosted, cell, more).total - compiled_plan(hosted, cell, step).total
    assert step.equations > 1000 and added == 1000 * EQUATION_BYTES


def test_where_accelerators_cut_weights_the_step_is_counted_as_cut(cell, road):
    step = dataclasses.replace(road.planned()[0], devices=2)
    models = find_models(cell)[0]

    def arrays(model, device):
        one = dataclasses.replace(cell, mesh=MeshConfig(data=2, model=model))
        parts = compiled_plan(make_plan(one, models, device), one, step).parts
        return {part.name: part.bytes for part in parts if "compiled step" in part.name}

    one, other = arrays(1, KINDS[0]), arrays(2, KINDS[0])
    assert len(one) == 2 and other == {name: size // 2 for name, size in one.items()}
    assert arrays(1, HERE) == arrays(2, HERE)  # a host has one memory


def test_seeds_in_turn_keep_their_states_and_share_working_memory(cell):
    step = StepMemory(given=10, results=20, scratch=100, devices=2)
    assert step.needed(4, together=False) == 4 * 30 + 2 * 100
    assert step.fitting(4, 290, together=False) == 3
    assert step.needed(4, together=True) == 130
    assert step.fitting(4, 130, together=True) == 4 and step.fitting(4, 129, together=True) == 2


def test_seeds_in_one_program_are_stacked_next_to_the_states_of_their_runs(cell):
    step, models = StepMemory(given=10, results=20, scratch=100), find_models(cell)[0]

    def parts(seeds, data):
        several = dataclasses.replace(cell, seeds=seeds, mesh=MeshConfig(data=data))
        planned = compiled_plan(make_plan(several, models, KINDS[0]), several, step).parts
        return {part.name: part.bytes for part in planned}

    of_seed = sum(parts(1, 1).get(name, 0) for name in OF_SEEDS)
    assert parts(4, 1)[COPIES] == 4 * of_seed and parts(4, 2)[COPIES] == 2 * of_seed > 0
    assert COPIES not in parts(1, 1)


def test_the_plan_says_how_many_seeds_fit(cell, road):
    step, _ = road.planned()
    hosted = make_plan(cell, find_models(cell)[0], HERE)
    eight = dataclasses.replace(cell, seeds=8)
    all_of_them = compiled_plan(hosted, eight, step).total
    names = {part.name for part in compiled_plan(hosted, cell, step).parts}
    assert "working memory of the compiled step" in names and "gradient trees" not in names
    assert seeds_that_fit(hosted, eight, step) == 8
    short = dataclasses.replace(hosted, device=with_memory(all_of_them - 1))
    assert seeds_that_fit(short, eight, step) == 7
    # One seed alone is cut over the devices, so it may need more than two: as many fit as the largest number that does.
    four = dataclasses.replace(step, devices=4)
    need = [
        compiled_plan(hosted, dataclasses.replace(cell, seeds=seeds), four).total for seeds in range(1, 9)
    ]
    for free in (need[1] - 1, need[1], need[0], need[4]):
        less = dataclasses.replace(hosted, device=with_memory(free))
        most = max((seeds for seeds, total in enumerate(need, 1) if total <= free), default=0)
        assert seeds_that_fit(less, eight, four) == most
    assert "lower --config.seeds (8)" in compiled_plan(short, eight, step).trouble(eight)


def test_seeds_on_the_hosted_road_take_their_states_and_their_time(cell):
    """One after the other; what is not of a seed is there once."""
    hosted = dataclasses.replace(cell, road="hosted")
    models = find_models(cell)[0]
    one, three = (make_plan(dataclasses.replace(hosted, seeds=seeds), models, HERE) for seeds in (1, 3))
    for part, other in zip(one.parts, three.parts):
        assert other.bytes == part.bytes * (3 if part.name in OF_SEEDS else 1), part.name
    for work, other in zip(one.works, three.works):
        assert (other.operations, other.moved) == pytest.approx((3 * work.operations, 3 * work.moved)), (
            work.name
        )


def test_devices_that_hold_copies_read_and_step_all_of_them(cell):
    """Activations and operations are spread over them."""
    plans = {}
    for data in (1, 2):
        one = dataclasses.replace(cell, road="hosted", mesh=MeshConfig(data=data))
        works = make_plan(one, find_models(one)[0], KINDS[0]).works
        plans[data] = {work.name: work for work in works}
    assert plans[2]["optimiser"].moved == plans[1]["optimiser"].moved > 0
    assert plans[2]["gradient"].operations == plans[1]["gradient"].operations / 2
    for name in ("gradient", "decode"):
        assert plans[1][name].moved / 2 < plans[2][name].moved < plans[1][name].moved


def test_a_plan_refuses_settings_that_the_road_does_not_take():
    """Its base need not be here."""
    config = load_config("configs/qwen3.py:single-shared-0.6b-math", [("road", "compiled")])
    with pytest.raises(NoArrayForm, match="tasks of dapo_math"):
        check_before_run(config, None)
