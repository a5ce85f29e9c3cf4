"""What `plan` makes of a device."""

import dataclasses

import pytest

from marl_jax.models import ModelConfig
from marl_jax.models.decode import cache_bytes
from marl_jax.sampling import plan
from marl_jax.sampling.plan import memory_bytes

CONFIG = dataclasses.replace(ModelConfig.preset("xs"), max_position_embeddings=4096)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_an_accelerator_gets_all_its_lanes_at_once_over_aligned_columns(platform):
    settings = plan(CONFIG, max_prompt=900, max_new=500, budget_bytes=1 << 33, platform=platform)
    assert settings.widths == (settings.lanes,)
    assert len(settings.lengths) > 1 and all(length % 128 == 0 for length in settings.lengths)
    assert 1400 <= settings.context < 1400 + 128


def test_a_cpu_gets_narrower_batches_too():
    settings = plan(CONFIG, max_prompt=90, max_new=50, budget_bytes=1 << 33, platform="cpu")
    assert len(settings.widths) > 1
    assert settings.context == 144 and all(length % 16 == 0 for length in settings.lengths)


def test_histories_get_the_room_that_lanes_leave():
    def shapes(**options):
        return plan(CONFIG, max_prompt=90, max_new=50, platform="cpu", **options)

    roomy = shapes(lanes=8, budget_bytes=1 << 33)
    need = memory_bytes(CONFIG, roomy)
    assert shapes(lanes=8, budget_bytes=1 << 33, histories=50).prefixes == roomy.prefixes + 50
    assert shapes(lanes=8, budget_bytes=need, histories=50) == roomy
    tight = shapes(lanes=8, budget_bytes=need + 3 * cache_bytes(CONFIG, 1, roomy.context), histories=50)
    assert tight.prefixes == roomy.prefixes + 3
    free = shapes(budget_bytes=1 << 26)
    assert shapes(budget_bytes=1 << 26, histories=10_000).lanes == free.lanes
