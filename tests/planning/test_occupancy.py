"""Calls of given lengths in lanes over rungs: the replay counts what an engine does, and how full lanes become."""

import dataclasses
import os

import jax
import numpy as np
import pytest
from plan_kit import of_all, plan_of

from marl_jax.config.run_config import load_config
from marl_jax.models import ModelConfig, init
from marl_jax.planning.devices import KINDS
from marl_jax.planning.lengths import Lengths, PlanError, read_lengths, recorded_lengths
from marl_jax.planning.occupancy import Length, copies, occupancy, occupancy_at_length
from marl_jax.planning.plan import demand_of, with_demand
from marl_jax.rollouts import read_episodes
from marl_jax.sampling import Engine, EngineSettings, Request
from marl_jax.terminal.page import plan_page

H100 = next(device for device in KINDS if device.name == "H100")
SMALL = EngineSettings((16,), (16, 32, 48, 64), (16, 64), prefill_tokens=64, prefixes=4, steps=4)
OVER_RUNGS = dataclasses.replace(SMALL, lanes_at=(12, 2, 1, 1))


@pytest.fixture(scope="module")
def flagship():
    """Its configuration, and its plan for an H100."""
    config = load_config("configs/qwen3.py:voting-isolated-0.6b-math")
    return config, plan_of(config, ModelConfig.preset("0.6b"), H100)


def voting(rng, episodes, lengths, most=5120):
    """Three calls on a problem, eight times, and a fourth that reads what they said."""
    drawn = lambda: lengths.draw("any", most, rng)
    for episode in range(episodes):
        said = [drawn() for _ in range(3)]
        question = (episode // 8, *[1] * 169)
        report = (episode, *[2] * (245 + sum(said)))
        yield [[Length(question, new, most) for new in said], [Length(report, drawn(), most)]]


@pytest.mark.long
def test_the_replay_counts_what_an_engine_does():
    model = ModelConfig.preset("xs")
    model = dataclasses.replace(model, num_hidden_layers=1, vocab_size=64)
    calls = [
        Length(tuple(range(2 + i % 7, 3 + i % 7 * 6)) or (1,), 1 + i * 7 % 24, 1 + i * 7 % 24)
        for i in range(40)
    ]
    engine = Engine(init(jax.random.key(0), model), model, OVER_RUNGS)
    for i, call in enumerate(calls):
        engine.submit(Request(call.prompt, (i,), call.most))
    while engine.pending:
        engine.step()
    stats, counted = engine.stats, occupancy(OVER_RUNGS, [[calls]], ahead=1)
    assert stats.given_up > 0 and stats.moved > 0
    assert counted.sampled == stats.sampled_tokens and counted.dispatches == stats.dispatches
    assert (counted.moved, counted.given_up) == (stats.moved, stats.given_up)
    assert (counted.fed, counted.recomputed) == (stats.prefilled_tokens, stats.recomputed_tokens)


def test_lanes_in_use_are_worked_out_by_hand():
    """Two lanes of 16 tokens and one of 32, dispatches of four steps; three calls that end after 4, 8 and 16 tokens."""
    settings = dataclasses.replace(
        SMALL, widths=(3,), lengths=(16, 32), lanes_at=(2, 1), chunks=(8,), prefill_tokens=8
    )
    # The first has 9 prompt tokens cached. Its second dispatch reaches beyond 16, and the last has the long lane.
    calls = [Length((*range(10),), 16, 16), Length((1, 2), 4, 4), Length((1, 3), 8, 8)]
    counted = occupancy(settings, [[calls]], ahead=1)
    assert counted.dispatches == 4 and counted.sampled == 28 and counted.moved == 1
    assert counted.attended == 4 * (2 * 16 + 32)  # the long lane is in use at all times
    assert counted.in_use == pytest.approx((3 + 2 + 1 + 1) / (4 * 3)) and counted.in_use_busy == 0


# Twentieths of 10,176 completions that a run of voting-isolated-xs-math recorded, of 64 tokens at most.
RECORDED = (5, 5, 19, 20, 20, 20, 20, 20, 21, 21, 22, 22, 23, 24, 25, 28, 31, 46, 64, 64)


@pytest.mark.long
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param(Lengths(), marks=pytest.mark.long),
        Lengths(recorded={"any": [count * 5120 // 64 for count in RECORDED]}),
    ],
)
def test_a_step_of_the_flagship_keeps_its_lanes_busy(flagship, lengths):
    """512 episodes: other draws of what its lanes were planned for, and lengths of a micro run, stretched to 5,120."""
    _, plan = flagship
    (engine,) = plan.each_shape
    episodes = list(voting(np.random.default_rng(1), 512, lengths))
    counted = occupancy(engine, episodes, 2 * engine.lanes)
    assert counted.sampled == sum(call.new for waves in episodes for wave in waves for call in wave)
    assert counted.in_use > 0.85 and counted.recomputed < 0.05 * counted.sampled


@pytest.mark.long
def test_lanes_suit_longer_completions_than_were_assumed(flagship):
    """They cost up to a quarter of the reads where lengths are as assumed, and save more where they are not."""
    config, plan = flagship
    bare = dataclasses.replace(demand_of(config), longest=())
    for_assumed = plan_of(config, ModelConfig.preset("0.6b"), H100, bare)

    def read(plan, lengths):
        (engine,) = plan.each_shape
        return occupancy(
            engine, list(voting(np.random.default_rng(1), 32, lengths)), 2 * engine.lanes
        ).attended

    assert read(plan, Lengths()) < 1.25 * read(for_assumed, Lengths())
    assert read(plan, Lengths(0.75)) < 0.75 * read(for_assumed, Lengths(0.75))


@pytest.mark.long
def test_many_episodes_are_counted_from_some(flagship):
    (engine,) = flagship[1].each_shape
    episodes = list(voting(np.random.default_rng(2), 64, Lengths()))
    whole = occupancy(engine, copies(episodes, 4 * 64), 64)
    some = occupancy_at_length(engine, episodes, 4, 64)
    assert some.sampled == whole.sampled
    assert some.attended == pytest.approx(whole.attended, rel=0.1)
    assert some.dispatches == pytest.approx(whole.dispatches, rel=0.1)


@pytest.mark.parametrize("wave", [1, 3, 8, 16])
def test_however_many_calls_begin_at_once_the_rest_is_counted_from_those_that_follow(wave):
    """A wave may reach what is asked ahead and half as much again by itself."""
    episodes = [[[Length((n, 1, 1), 4, 8)] * wave] for n in range(16)]
    for ahead in range(1, 25):
        assert occupancy_at_length(OVER_RUNGS, episodes, 8, ahead).sampled == 8 * 16 * wave * 4


def test_a_plan_reads_all_rungs_and_all_weights_at_each_step(flagship):
    config, plan = flagship
    decode = next(work for work in plan.works if work.name == "decode")
    (engine,) = plan.each_shape
    # No fewer steps than with full lanes, and no more than were all lanes but half in use.
    steps = sum(call.new for call in demand_of(config).calls) * 16 / engine.lanes
    per_step = 1.19e9 + sum(lanes * length for lanes, length in engine.rungs) * 2 * 28 * 8 * 128 * 2
    assert steps * per_step < decode.moved < 2 * steps * per_step


def test_lanes_are_those_of_the_run_whatever_lengths_a_plan_is_told(flagship):
    config, plan = flagship
    other = with_demand(
        plan, config, of_all(config, ModelConfig.preset("0.6b")), demand_of(config, Lengths(0.25))
    )
    assert other.shapes == plan.shapes and other.seconds["decode"] < 0.6 * plan.seconds["decode"]


# ---------------------------------------------------------------- lengths


def test_a_spread_keeps_the_mean_with_what_is_cut():
    rng = np.random.default_rng(0)
    for mean, sigma in ((0.5, 0.6), (0.9, 0.3), (0.2, 1.5)):
        drawn = [Lengths(mean, sigma).draw("any", 1000, rng) for _ in range(20_000)]
        assert max(drawn) <= 1000 and np.mean(drawn) == pytest.approx(1000 * mean, rel=0.03)
    assert {Lengths(0.25, 0.0).draw("any", 64, rng) for _ in range(9)} == {16}


@pytest.mark.parametrize(
    ("text", "means"),
    [("0.5", (0.5, 0.0)), ("mean:0.3", (0.3, 0.6)), ("mean:0.3, sigma:1", (0.3, 1.0)), ("1", (1.0, 0.0))],
)
def test_lengths_are_read_from_a_flag(text, means):
    assert (read_lengths(text).mean, read_lengths(text).sigma) == means


@pytest.mark.parametrize(
    "text",
    ["", "0", "1.2", "nan", "half", "mean:0.5,spread:1", "sigma:1", "mean:1,sigma:1", "mean:0.5,sigma:-1"],
)
def test_lengths_that_mean_nothing_are_refused_in_one_line(text):
    with pytest.raises(PlanError, match=r"must be a share of max_new_tokens.*mean:0.5,sigma:0.6"):
        read_lengths(text)


def test_an_engine_elsewhere_takes_as_long_as_its_throughput_says(flagship):
    config, _ = flagship
    demand = demand_of(config, 0.5, tokens_per_second=1000.0)
    plan = plan_of(config, ModelConfig.preset("0.6b"), H100, demand)
    assert plan.seconds["rollouts elsewhere"] == pytest.approx(512 * 4 * 2560 / 1000)
    assert "decode" not in plan.seconds and "prefill" not in plan.seconds
    assert "1,000 tokens per second" in plan_page(
        config, of_all(config, ModelConfig.preset("0.6b")), "a preset", [plan]
    )


def test_lengths_are_those_that_a_run_recorded(monkeypatch):
    monkeypatch.setenv("HOME", os.path.abspath("tests/fixtures"))
    assert recorded_lengths("~/episodes", Lengths()).recorded
    folder = "tests/fixtures/episodes"
    lengths, rng = recorded_lengths(folder, Lengths(0.5, 0.0)), np.random.default_rng(0)
    table = read_episodes(f"{folder}/step-000004.jsonl.gz")
    for role in table.roles:
        own = {max(1, int(n)) for n, at in zip(table.length, table.role) if table.roles[at] == role}
        assert {lengths.draw(role, 10_000, rng) for _ in range(300)} == own
    assert lengths.draw("nobody", 64, rng) == 32
    assert max(lengths.draw(table.roles[0], 3, rng) for _ in range(9)) <= 3


def test_a_folder_without_episodes_is_refused_by_name(tmp_path):
    with pytest.raises(PlanError, match="which has no recorded episodes: give the folder of a run"):
        recorded_lengths(str(tmp_path), Lengths())
