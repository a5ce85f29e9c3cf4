"""What `plan` makes of a device."""

import dataclasses
import math

import pytest

from marl_jax.models import ModelConfig
from marl_jax.models.decode import cache_bytes
from marl_jax.sampling import EngineSettings, Load, plan
from marl_jax.sampling.programs import Features
from marl_jax.sampling.shapes import MAX_PROGRAMS, lane_bytes, memory_bytes

CONFIG = dataclasses.replace(ModelConfig.preset("xs"), max_position_embeddings=4096)


def cells(settings):
    """How many tokens fit into the lanes."""
    return sum(map(math.prod, settings.caches))


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_an_accelerator_gets_all_its_lanes_at_once_over_aligned_columns(platform):
    settings = plan(CONFIG, Load(900, 500), budget_bytes=1 << 33, platform=platform)
    assert settings.widths == (settings.lanes,)
    assert len(settings.lengths) > 1 and all(length % 128 == 0 for length in settings.lengths)
    assert 1400 <= settings.context < 1400 + 128


def test_a_cpu_gets_narrower_batches_too():
    settings = plan(CONFIG, Load(90, 50), budget_bytes=1 << 33, platform="cpu")
    assert len(settings.widths) > 1
    assert settings.context == 144 and all(length % 16 == 0 for length in settings.lengths)


def test_histories_get_the_room_that_lanes_leave():
    def shapes(histories=0, **options):
        return plan(CONFIG, Load(90, 50, histories=histories), platform="cpu", **options)

    roomy = shapes(lanes=8, budget_bytes=1 << 33)
    need = memory_bytes(CONFIG, roomy)
    assert shapes(lanes=8, budget_bytes=1 << 33, histories=50).prefixes == roomy.prefixes + 50
    assert shapes(lanes=8, budget_bytes=need, histories=50) == roomy
    tight = shapes(lanes=8, budget_bytes=need + 3 * cache_bytes(CONFIG, 1, roomy.context), histories=50)
    assert tight.prefixes == roomy.prefixes + 3
    free = shapes(budget_bytes=1 << 26)
    assert shapes(budget_bytes=1 << 26, histories=10_000).lanes == free.lanes


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_an_accelerator_that_is_short_of_memory_has_lanes_over_rungs(platform):
    config, budget = ModelConfig.preset("0.6b"), 40 << 30
    settings = plan(config, Load(20480, 5120), budget_bytes=budget, platform=platform)
    assert memory_bytes(config, settings) <= budget < memory_bytes(config, _with_another_lane(settings))
    assert settings.lanes == sum(settings.lanes_at) and len(settings.lanes_at) == len(settings.lengths)
    assert settings.context == 25600 and settings.lanes > 2 * cells(settings) // settings.context
    assert len(settings.shapes) <= MAX_PROGRAMS
    asked = plan(config, Load(20480, 5120), lanes=2, budget_bytes=budget, platform=platform)
    assert asked.widths == (2,) and not asked.lanes_at  # so many were asked for
    roomy = plan(CONFIG, Load(900, 500), budget_bytes=budget, platform=platform)
    assert not roomy.lanes_at  # nothing would be gained


@pytest.mark.parametrize("budget", [20 << 30, 40 << 30])
def test_devices_that_share_the_lanes_have_more_of_them(budget):
    """Each holds its part of rows and heads, and no more than the budget of one."""
    config = ModelConfig.preset("0.6b")
    shapes = lambda devices, **more: plan(
        config, Load(20480, 5120, **more), budget_bytes=budget, platform="gpu", devices=devices
    )
    alone = shapes((1, 1))
    for devices in ((8, 1), (4, 2), (3, 1)):
        mesh = shapes(devices, histories=50)
        assert mesh.lanes > 0.8 * math.prod(devices) * alone.lanes or mesh.lanes == 512
        assert memory_bytes(config, mesh, 0, devices) <= budget
        assert all(count % devices[0] == 0 for count in (*mesh.lanes_at, mesh.prefixes))
    held = lambda devices: lane_bytes(config, alone, devices)
    assert held((1, 2)) * 2 == held((1, 1)) and held((1, 3)) == held((1, 1))  # 8 heads


def test_kept_sets_are_no_larger_than_the_vocabulary():
    features = Features(candidates=10**6)
    assert plan(CONFIG, Load(20, 12, features=features)).features.candidates == CONFIG.vocab_size


def _with_another_lane(settings):
    at = (*settings.lanes_at[:-1], settings.lanes_at[-1] + 1)
    return dataclasses.replace(settings, widths=(sum(at),), lanes_at=at)


def test_lanes_over_rungs_follow_the_calls_that_are_expected():
    def lanes(*calls):
        settings = plan(
            ModelConfig.preset("0.6b"), Load(20480, 5120, calls=calls), budget_bytes=40 << 30, platform="gpu"
        )
        return settings.lanes, sum(n for n, length in settings.rungs if length > 4096)

    (many, long_ones), (few, more) = lanes((100, 1000)), lanes((100, 1000), (9000, 1000))
    assert many > 4 * few  # nine times as long calls beside as many short ones
    assert long_ones == 1  # which any call that is allowed can have
    assert more == pytest.approx(few / 2, abs=2)  # calls of either kind take as many steps


def test_what_takes_turns_with_the_engine_has_its_room_beside_the_caches():
    def shapes(budget, beside):
        return plan(CONFIG, Load(900, 500), budget_bytes=budget, update_bytes=beside, platform="gpu")

    budget, beside = 1 << 30, 3 << 28
    settings = shapes(budget, beside)
    assert memory_bytes(CONFIG, settings) < memory_bytes(CONFIG, settings, beside) <= budget
    assert cells(settings) < cells(shapes(budget, 0))
    working = memory_bytes(CONFIG, settings) - memory_bytes(CONFIG, settings, beside) + beside
    assert shapes(budget, working) == shapes(budget, 0)  # the engine's own working memory will do


@pytest.mark.parametrize("lanes_at", [(8,), (8, 0), (4, 2)])
def test_lanes_that_do_not_go_with_their_lengths_are_refused(lanes_at):
    with pytest.raises(ValueError, match="lanes_at is"):
        EngineSettings((8,), (32, 64), (8,), prefill_tokens=8, prefixes=1, lanes_at=lanes_at)


def test_lanes_by_length_are_refused_in_more_than_one_bank():
    with pytest.raises(ValueError, match="with 2 banks; it is for one bank"):
        EngineSettings((8,), (32, 64), (8,), prefill_tokens=8, prefixes=1, lanes_at=(4, 4), banks=2)


@pytest.mark.parametrize(("lanes", "banks"), [(64, 1), (127, 1), (128, 2), (129, 1), (192, 2), (512, 2)])
def test_a_host_decodes_in_two_banks_where_each_has_enough_lanes(lanes, banks):
    asked = {"load": Load(64, 64), "lanes": lanes, "budget_bytes": 1 << 30}
    settings = plan(CONFIG, platform="cpu", **asked)
    assert (settings.banks, settings.lanes) == (banks, lanes)
    assert min(settings.widths) >= min(64, lanes)
    assert plan(CONFIG, platform="gpu", **asked).banks == 1
