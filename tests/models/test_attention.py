"""Every way to compute attention agrees with the plain one, and the plain one with the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import close, close_trees

from marl_jax.models import attention


@pytest.fixture(autouse=True)
def _float32_products():
    """Elsewhere the callers of attention ask for them; a GPU would take TF32."""
    with jax.default_matmul_precision("highest"):
        yield


def qkv(batch, length, heads, kv_heads, dim, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda n: jnp.array(rng.standard_normal((batch, length, n, dim)), jnp.float32)
    return draw(heads), draw(kv_heads), draw(kv_heads)


def packed(batch, length):
    """Rows of up to three sequences and some padding at the end; rows of one token are one sequence."""
    rng = np.random.default_rng(1)
    ends = np.sort(rng.integers(1, max(length, 2), (batch, 3)), axis=1)
    ids = (np.arange(length)[None, :, None] >= ends[:, None, :2]).sum(-1) + 1
    return jnp.array(np.where(np.arange(length) < ends[:, 2:], ids, 0))


def by_definition(q, k, v, segment_ids):
    """Token by token in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    group = q.shape[2] // k.shape[2]
    for b, t, n in np.ndindex(q.shape[:3]):
        seen = [s for s in range(t + 1) if segment_ids is None or segment_ids[b, s] == segment_ids[b, t]]
        scores = np.array([q[b, t, n] @ k[b, s, n // group] for s in seen]) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        out[b, t, n] = (weights / weights.sum()) @ v[b, seen, n // group]
    return out


@pytest.mark.parametrize("with_segments", [False, True])
def test_plain_attention_is_the_definition(with_segments):
    q, k, v = qkv(2, 9, 6, 2, 4)
    segments = packed(2, 9) if with_segments else None
    out = attention.self_attention(q, k, v, segments, "plain")
    close(out, by_definition(q, k, v, segments), of=np.max(np.abs(v)))  # means of values


@pytest.mark.parametrize("with_segments", [False, True])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200, 700])
def test_blocks_equal_plain(length, with_segments):
    q, k, v = qkv(2, length, 4, 2, 8)
    segments = packed(2, length) if with_segments else None
    both = jax.jit(
        lambda q, k, v: [attention.self_attention(q, k, v, segments, x) for x in ("plain", "blocks")]
    )
    plain, blocks = both(q, k, v)
    close(blocks, plain, of=np.max(np.abs(v)))


def test_gradients_of_blocks_equal_those_of_plain():
    q, k, v = qkv(2, 150, 4, 2, 8)
    segments = packed(2, 150)

    def gradients(how):
        loss = lambda q, k, v: (attention.self_attention(q, k, v, segments, how) ** 3).sum()
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)

    close_trees(gradients("blocks"), gradients("plain"), roundings=4)


@pytest.mark.parametrize("with_segments", [False, True])
def test_the_tpu_kernel_computes_the_same_in_interpreter_mode(with_segments):
    q, k, v = qkv(2, 128, 4, 2, 128)
    segments = packed(2, 128) if with_segments else None
    out = attention._splash(q, k, v, segments, interpret=True)
    plain = attention.self_attention(q, k, v, segments, "plain")
    close(out, plain, of=np.max(np.abs(v)), roundings=16)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("with_segments", [False, True])
def test_cudnn_equals_plain(with_segments):
    q, k, v = (x.astype(jnp.bfloat16) for x in qkv(2, 256, 16, 8, 128))
    segments = packed(2, 256) if with_segments else None
    out = attention.self_attention(q, k, v, segments, "cudnn").astype(jnp.float32)
    plain = attention.self_attention(q, k, v, segments, "plain").astype(jnp.float32)
    np.testing.assert_allclose(out, plain, atol=0.02)


@pytest.mark.parametrize(
    ("platform", "shape", "dtype", "capability", "expected"),
    [
        ("cpu", (8, 128, 4, 32), "float32", "", "blocks"),
        ("gpu", (8, 128, 16, 128), "bfloat16", "9.0", "cudnn"),
        ("gpu", (8, 128, 16, 128), "float32", "9.0", "blocks"),
        ("gpu", (8, 127, 16, 128), "bfloat16", "9.0", "blocks"),
        ("gpu", (8, 128, 16, 20), "bfloat16", "9.0", "blocks"),
        ("gpu", (8, 128, 16, 128), "float16", "8.0", "cudnn"),
        ("gpu", (8, 128, 16, 128), "bfloat16", "12.0", "cudnn"),
        ("gpu", (8, 128, 16, 128), "float16", "7.5", "blocks"),
        ("gpu", (8, 128, 16, 128), "bfloat16", "gfx942", "blocks"),
        ("gpu", (8, 128, 16, 128), "bfloat16", "", "blocks"),
        ("tpu", (8, 128, 16, 128), "bfloat16", "", "splash"),
        ("tpu", (8, 100, 16, 128), "bfloat16", "", "blocks"),
        ("tpu", (8, 128, 16, 64), "bfloat16", "", "blocks"),
    ],
)
def test_each_device_gets_a_kernel_that_takes_the_shape(platform, shape, dtype, capability, expected):
    assert attention.choose(platform, shape, dtype, capability) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (None, False),
        ("--xla_force_host_platform_device_count=4", False),
        ("--xla_gpu_deterministic_ops", True),
        ("--xla_gpu_deterministic_ops=true --xla_dump_to=/tmp/x", True),
        ("--xla_gpu_deterministic_ops=1", True),
        ("--xla_gpu_deterministic_ops=false", False),
        ("--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=False", False),
        ("--xla_gpu_deterministic_ops=0 --xla_gpu_exclude_nondeterministic_ops=true", True),
        ("--xla_gpu_deterministic_ops_of_another_kind=true", False),
    ],
)
def test_deterministic_kernels_are_read_from_the_flags(monkeypatch, flags, expected):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if flags is not None:
        monkeypatch.setenv("XLA_FLAGS", flags)
    assert attention.deterministic_kernels() == expected


def test_an_unknown_implementation_is_refused():
    with pytest.raises(
        ValueError, match="attention is 'flash'; it must be one of blocks, cudnn, splash, plain"
    ):
        attention.self_attention(*qkv(1, 4, 2, 1, 4), implementation="flash")
