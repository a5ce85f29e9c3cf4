"""float32 models compute in float32 on every platform, in both directions."""

import jax
import jax.numpy as jnp
import pytest
from traced import all_highest

from marl_jax.models import ModelConfig, forward, init
from marl_jax.models.decode import empty_cache, extend, unstack
from marl_jax.models.scatter import distinct

CONFIG = ModelConfig.preset("xs")


def test_every_product_of_the_forward_and_backward_pass_asks_for_full_precision():
    params, tokens = init(0, CONFIG), jnp.zeros((1, 8), jnp.int32)
    assert all_highest(lambda p: forward(p, CONFIG, tokens), params)
    assert all_highest(jax.grad(lambda p: forward(p, CONFIG, tokens).sum()), params)


def test_every_product_of_cached_decoding_asks_for_full_precision():
    params, cache = init(0, CONFIG), empty_cache(CONFIG, 2, 16)
    none = [None] * CONFIG.num_hidden_layers
    tokens, start = jnp.zeros((2, 1), jnp.int32), jnp.zeros(2, jnp.int32)
    assert all_highest(
        lambda p, c: extend(p, unstack(p, CONFIG), CONFIG, c, tokens, start, none), params, cache
    )


@pytest.mark.parametrize(
    ("setting", "value"), [("numpy_rank_promotion", "raise"), ("numpy_dtype_promotion", "strict")]
)
def test_a_caller_may_be_strict_with_its_own_code(setting, value):
    params, cache = init(0, CONFIG), empty_cache(CONFIG, 2, 16)
    tokens, start, none = jnp.zeros((2, 1), jnp.int32), jnp.zeros(2, jnp.int32), [None] * 2
    with getattr(jax, setting)(value):
        assert jax.eval_shape(lambda p: forward(p, CONFIG, tokens), params).shape == (2, 1, 160)
        jax.eval_shape(lambda p: extend(p, unstack(p, CONFIG), CONFIG, cache, tokens, start, none), params)


def test_places_keep_their_type_where_jax_has_64_bits():
    with jax.enable_x64(True):
        assert distinct(jnp.array([0, 5, 7], jnp.int32), 3).dtype == jnp.int32
