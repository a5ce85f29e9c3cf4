"""Sampling methods: exact frequencies, exact truncation, exact log-probabilities, harmless rounding."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import close
from kit import NEAR_TIE, kept64, softmax64
from scipy.stats import chi2

from marl_jax.sampling import methods, programs

TOY = np.array([2.0, 1.5, 1.5, 0.3, 0.0, -0.4, -1.0, -2.5, 1.1, 0.9, -0.2])
SETTINGS = [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.7, 4, 1.0), (1.0, 0, 0.6), (0.8, 6, 0.7)]
EDGES = [0.0, 2.0**-23, 0.5, 1 - 2.0**-23, 1 - 2.0**-24]


temper, truncate, noise = jax.jit(methods.temper), jax.jit(methods.truncate), jax.jit(methods.noise)
draw = jax.jit(methods.draw)
kept_ids = jax.jit(methods.kept_ids, static_argnames="count")


def log_softmax64(logits):
    with np.errstate(divide="ignore"):
        return np.log(softmax64(logits))


def expected(logits, temperature, top_k, top_p):
    logits = logits / temperature
    return softmax64(np.where(kept64(logits, top_k, top_p), logits, -np.inf))


def chi_squared(tokens, probs):
    counts = np.bincount(tokens, minlength=len(probs))
    assert not counts[probs == 0].any()
    live = probs > 0
    wanted = len(tokens) * probs[live]
    assert wanted.min() >= 5
    return ((counts[live] - wanted) ** 2 / wanted).sum(), chi2.ppf(0.999, live.sum() - 1)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_sampled_frequencies_are_the_exact_ones(temperature, top_k, top_p):
    count = 50_000
    logits = jnp.broadcast_to(jnp.array(TOY, jnp.float32), (count, len(TOY)))
    keys = jnp.array(np.random.default_rng(3).integers(0, 2**32, (count, 2), np.uint32))
    uniforms = noise(keys, jnp.zeros(count, jnp.int32))
    logits = temper(logits, jnp.full(count, temperature))
    logits = truncate(logits, jnp.full(count, top_k), jnp.full(count, top_p))
    drawn = draw(logits, uniforms, jnp.zeros(count, bool))
    probs = expected(TOY, temperature, top_k, top_p)
    statistic, critical = chi_squared(np.asarray(drawn.token), probs)
    assert statistic < critical
    wanted = np.log(probs[drawn.token])
    close(drawn.logprob, wanted, of=1 + np.abs(wanted))


def test_the_frequency_test_notices_a_temperature_that_is_off_by_a_twentieth():
    probs = expected(TOY, 1.0, 0, 1.0)
    tokens = np.random.default_rng(0).choice(len(TOY), 50_000, p=expected(TOY, 1.05, 0, 1.0))
    statistic, critical = chi_squared(tokens, probs)
    assert statistic > critical


def truncated(logits, top_k, top_p):
    rows = jnp.array(logits, jnp.float32)
    count = len(rows)
    out = truncate(rows, jnp.full(count, top_k, jnp.int32), jnp.full(count, top_p, jnp.float32))
    out = np.asarray(out)
    kept = np.isfinite(out)
    np.testing.assert_array_equal(out[kept], np.asarray(rows)[kept])  # what is kept stays as it was
    return kept


@pytest.mark.parametrize("top_p", [1e-45, 1e-6, 0.1, 0.37, 0.9, 0.9999, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 40, 41, 1000])
def test_truncation_is_what_sorting_says(top_k, top_p):
    rng = np.random.default_rng(1)
    spread = rng.normal(size=(8, 41)) * 3
    ties = np.round(rng.normal(size=(8, 41)) * 2)
    ties[:, 3:5] = [0.0, -0.0]
    barred = np.where(rng.random((8, 41)) < 0.7, -np.inf, spread)
    barred[:, 7] = 0.25  # at least one token may be sampled
    flat = np.zeros((1, 41))
    logits = np.concatenate([spread, ties, barred, flat]).astype(np.float32)
    wanted = np.array([kept64(row, top_k, max(top_p, 1e-30)) for row in logits])
    assert wanted.any(1).all()
    np.testing.assert_array_equal(truncated(logits, top_k, top_p), wanted)


def test_truncation_promotes_no_dtype_by_chance():
    given = jnp.zeros((2, 8)), jnp.array([3, 0]), jnp.array([0.5, 1.0])
    with jax.numpy_dtype_promotion("strict"):
        assert np.isfinite(truncate(*given)).sum(axis=1).tolist() == [3, 8]


@pytest.mark.parametrize(("top_k", "top_p"), [(50, 1.0), (0, 0.95), (512, 0.8)])
def test_truncation_of_a_published_vocabulary(top_k, top_p):
    logits = (np.random.default_rng(2).normal(size=(2, 151_936)) * 2).astype(np.float32)
    wanted = np.array([kept64(row, top_k, top_p) for row in logits])
    got = truncated(logits, top_k, top_p)
    if top_k:
        np.testing.assert_array_equal(got, wanted)
    else:  # sums of 10,000 float32 numbers: the boundary may move by one token in ten thousand
        assert (got != wanted).sum() <= 1e-4 * wanted.sum()


def test_selecting_few_candidates_keeps_what_bisection_keeps():
    logits = jnp.round(3 * jax.random.normal(jax.random.key(1), (12, 5000)), 1)  # many equal ones
    top_k, top_p = jnp.array([0, 1, 7, 64] * 3), jnp.repeat(jnp.array([1.0, 0.9, 0.3]), 4)
    top_p = jnp.where(top_k == 0, 1.0, top_p)
    cut, ids = methods.truncate_few(logits, top_k, top_p, 64)
    np.testing.assert_array_equal(cut, methods.truncate(logits, top_k, top_p))
    np.testing.assert_array_equal(ids[top_k > 0], methods.kept_ids(cut, 64)[top_k > 0])


def test_a_large_vocabulary_gives_the_tokens_and_kept_sets_of_a_small_one(monkeypatch):
    """Selection and bisection are two roads of one program."""
    rows, vocab = 48, 5000
    logits = jnp.round(3 * jax.random.normal(jax.random.key(1), (rows, vocab)), 1)  # many equal ones
    full = lambda value, dtype=jnp.int32: jnp.full(rows, value, dtype)
    lanes = programs.Lanes(
        *(full(0), full(0), full(True, bool), jnp.arange(rows) % 3, full(9), full(2)),
        temperature=jnp.array([0.0, 0.7, 1.0] * 16),
        top_k=jnp.array([1, 7, 64, 20] * 12),
        top_p=jnp.array([1.0, 0.9, 0.3] * 16)[::-1],
        stops=jnp.tile(jnp.argmax(logits, -1)[:, None], 2).astype(jnp.int32),
        noise=jax.random.bits(jax.random.key(2), (rows, 2), jnp.uint32),
        adapter=full(-1),
    )
    features = programs.Features(truncate=True, min_new=True, candidates=64)
    selected = programs.sample(logits, lanes, features)
    monkeypatch.setattr(programs, "LARGE_VOCABULARY", vocab + 1)
    monkeypatch.setattr(methods, "truncate_few", lambda *_: pytest.fail("selected"))
    token, logprob, kept = programs.sample(logits, lanes, features)
    np.testing.assert_array_equal(selected[0], token)
    np.testing.assert_allclose(selected[1], logprob, atol=1e-5)
    np.testing.assert_array_equal(selected[2], kept)


def test_every_row_has_its_own_settings():
    logits = np.random.default_rng(4).normal(size=(4, 30)).astype(np.float32)
    top_k, top_p = np.array([0, 3, 0, 9]), np.array([1.0, 1.0, 0.5, 0.4], np.float32)
    out = truncate(jnp.array(logits), jnp.array(top_k), jnp.array(top_p))
    wanted = [kept64(row, k, p) for row, k, p in zip(logits, top_k, top_p)]
    np.testing.assert_array_equal(np.isfinite(out), wanted)


@pytest.mark.parametrize("vocab", [1, 2, 7, 96, 1000])
def test_a_token_of_probability_zero_is_never_drawn(vocab):
    rows = []
    for place in {0, vocab // 2, vocab - 1}:
        alone = np.full(vocab, -np.inf)
        alone[place] = 1.5
        peaked = np.full(vocab, -200.0)  # exp(-200) is 0 in float32
        peaked[place] = 3.0
        rows += [alone, peaked]
    first, last = np.full(vocab, -np.inf), np.full(vocab, -np.inf)
    first[: max(1, vocab // 9)], last[-max(1, vocab // 9) :] = 0.0, 0.0
    holes = np.where(np.arange(vocab) % 3 == 0, 0.0, -np.inf)
    logits = np.array([*rows, first, last, holes], np.float32)
    pairs = np.array([(a, b) for a in EDGES for b in EDGES], np.float32)
    grid = np.repeat(logits, len(pairs), axis=0)
    drawn = draw(jnp.array(grid), jnp.array(np.tile(pairs, (len(logits), 1))), jnp.zeros(len(grid), bool))
    chosen = np.take_along_axis(grid, np.asarray(drawn.token)[:, None], 1)[:, 0]
    assert (np.exp(chosen - grid.max(1)) > 0).all()
    assert np.isfinite(drawn.logprob).all()


def test_the_whole_range_of_the_uniforms_reaches_every_token():
    size = math.isqrt(9 - 1) + 1
    centres = (np.arange(size) + 0.5) / size
    pairs = np.array([(a, b) for a in centres for b in centres], np.float32)
    drawn = draw(jnp.zeros((9, 9)), jnp.array(pairs), jnp.zeros(9, bool))
    np.testing.assert_array_equal(drawn.token, np.arange(9))


def test_greedy_rows_take_the_likeliest_token_and_log_its_probability():
    logits = np.random.default_rng(5).normal(size=(6, 33)).astype(np.float32)
    greedy = jnp.array([True, False] * 3)
    drawn = draw(jnp.array(logits), jnp.full((6, 2), 0.3), greedy)
    np.testing.assert_array_equal(drawn.token[::2], logits.argmax(1)[::2])
    wanted = [log_softmax64(row)[token] for row, token in zip(logits, drawn.token)]
    close(drawn.logprob, wanted, of=1 + np.abs(wanted))


def test_noise_is_a_function_of_key_and_position_alone():
    keys = jnp.array(np.random.default_rng(6).integers(0, 2**32, (40, 2), np.uint32))
    positions = jnp.arange(40) % 7
    together = np.asarray(noise(keys, positions))
    alone = [np.asarray(noise(keys[i : i + 1], positions[i : i + 1]))[0] for i in (0, 13, 39)]
    np.testing.assert_array_equal(together[[0, 13, 39]], alone)
    assert (together >= 0).all()
    assert (together < 1).all()
    with jax.enable_x64(True):
        np.testing.assert_array_equal(together, noise(keys, positions))
    moved = np.asarray(noise(keys, positions + 1))
    assert len(np.unique(np.concatenate([together, moved]))) == 160


def test_rounding_flips_only_near_ties_in_a_published_vocabulary():
    vocab, rows = 151_936, 48
    rng = np.random.default_rng(7)
    logits = (rng.normal(size=(rows, vocab)) * 2).astype(np.float32)
    rounded = logits * (1 + rng.choice([-1, 1], logits.shape) * 2.0**-22).astype(np.float32)
    uniforms = jnp.array(rng.random((rows, 2)), jnp.float32)

    def tokens(x):
        return np.asarray(draw(jnp.array(x), uniforms, jnp.zeros(rows, bool)).token)

    before, after = tokens(logits), tokens(rounded)
    assert (tokens(logits * 1.01) != before).any()  # a real change is not a near-tie
    size = math.isqrt(vocab - 1) + 1
    for row in np.flatnonzero(before != after):
        table = np.pad(softmax64(logits[row]), (0, -vocab % size)).reshape(-1, size)
        blocks = np.cumsum(table.sum(1))
        within = np.cumsum(table[before[row] // size])
        gaps = np.abs(blocks - uniforms[row, 0]), np.abs(within / within[-1] - uniforms[row, 1])
        assert min(gap.min() for gap in gaps) < NEAR_TIE


def test_kept_ids_are_what_truncation_left_likeliest_first():
    logits = np.random.default_rng(8).normal(size=(5, 60)).astype(np.float32) * 2
    cut = truncate(jnp.array(logits), jnp.array([1, 3, 8, 8, 8]), jnp.array([1, 1, 1, 0.5, 0.2]))
    for row, kept in zip(np.asarray(cut), np.asarray(kept_ids(cut, count=8))):
        survivors = np.flatnonzero(np.isfinite(row))
        np.testing.assert_array_equal(kept[: len(survivors)], survivors[np.argsort(-row[survivors])])
        assert (kept[len(survivors) :] == -1).all()


def test_of_equal_logits_top_k_keeps_the_lowest_ids():
    kept = truncated(np.zeros((1, 10)), 3, 1.0)
    np.testing.assert_array_equal(np.flatnonzero(kept[0]), [0, 1, 2])


def test_weights_of_nan_still_give_a_token_of_the_vocabulary():
    drawn = draw(jnp.full((3, 10), jnp.nan), jnp.full((3, 2), 0.99), jnp.zeros(3, bool))
    assert ((drawn.token >= 0) & (drawn.token < 10)).all()
    assert np.isnan(drawn.logprob).all()


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-6, 1e6, 3e38, 1e60])
def test_extreme_temperatures_stay_finite(temperature):
    logits = np.array([[1.0, 3.0, -np.inf, 2.0]], np.float32)
    with np.errstate(over="ignore"):
        heat = np.array([temperature], np.float32)
    tempered = temper(jnp.array(logits), jnp.array(heat))
    drawn = draw(tempered, jnp.array([[0.4, 0.9]]), jnp.array(heat == 0))
    assert np.isfinite(drawn.logprob).all()
    assert int(drawn.token[0]) == 1 if temperature < 1 else int(drawn.token[0]) != 2


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.1, 0.01, 1e-4, 1e-10])
def test_logprobs_are_exact_and_never_above_zero_however_small_the_temperature(temperature):
    rng = np.random.default_rng(0)
    logits = (12 * rng.normal(size=(512, 300))).astype(np.float32)

    @jax.jit
    def drawn(logits, uniforms):
        heat = jnp.full(len(logits), temperature, jnp.float32)
        return draw(temper(logits, heat), uniforms, jnp.zeros(len(logits), bool))

    got = drawn(logits, rng.random((512, 2), np.float32))
    exact = (logits.astype(np.float64) - logits.max(-1, keepdims=True)) / np.float64(np.float32(temperature))
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    assert (np.asarray(got.logprob) <= 0).all()
    wanted = np.take_along_axis(exact, np.asarray(got.token)[:, None], axis=-1)[:, 0]
    close(got.logprob, wanted, of=1 + np.abs(wanted))
