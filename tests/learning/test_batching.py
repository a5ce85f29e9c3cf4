"""Every row is in exactly one place, in a micro-batch of its own unit, and little is padding."""

import dataclasses

import numpy as np
import pytest
from learning_rows import Row, as_table, make_row, make_rows

from marl_jax.errors import UserError
from marl_jax.learning import batching
from marl_jax.learning.batching import BatchConfig, first_fit_decreasing, padding_share

CONFIG = BatchConfig(buckets=(4, 8, 16, 32), token_budget=64)


def make_batches(rows, *given, **options):
    return batching.make_batches(as_table(rows), *given, **options)


def read_back(batch, placement):
    """Prompt and completion of a placement, from what the model would be fed."""
    a, p = batch.arrays, placement
    g, place = p.sequence, slice(p.start, p.stop)
    source = a.source[g, place]
    segment = a.segments[g, source[-1]]
    if a.prefix:
        prompt = a.tokens[g, : a.prefix][a.segments[g, : a.prefix] == 1]
        seen = a.tokens[g, source[1:]]
    else:
        whole = a.tokens[g][a.segments[g] == segment]
        prompt, seen = whole[: len(whole) - len(source) + 1], whole[len(whole) - len(source) + 1 :]
    np.testing.assert_array_equal(seen, a.targets[g, place][:-1])  # what is read was just predicted
    np.testing.assert_array_equal(a.positions[g, source], len(prompt) - 1 + np.arange(len(source)))
    return prompt.tolist(), a.targets[g, place].tolist()


@pytest.mark.parametrize("share", [True, False])
def test_every_row_is_placed_once_with_its_numbers(share):
    rng = np.random.default_rng(0)
    rows = make_rows(rng, prompts=4, samples=5, slots=2, prompt=(3, 13), lengths=(2, 9))
    rows += make_rows(rng, prompts=3, samples=1, role="judge", prompt=(3, 13))
    batches = make_batches(rows, [r.role for r in rows], BatchConfig((4, 8, 16, 32), 64, share_prompts=share))
    placed = [p.row for b in batches for p in b.placements]
    assert sorted(placed) == list(range(len(rows)))
    for batch in batches:
        assert batch.size <= 64
        assert batch.arrays.mask.sum() == sum(p.stop - p.start for p in batch.placements)
        for p in batch.placements:
            row, place = rows[p.row], (p.sequence, slice(p.start, p.stop))
            assert row.role == batch.unit
            assert read_back(batch, p) == (list(row.prompt), list(row.tokens))
            np.testing.assert_array_equal(batch.arrays.advantages[place], np.float32(row.advantage))
            np.testing.assert_array_equal(batch.arrays.sampler_logp[place], np.float32(row.logprobs))
            assert np.unique(batch.arrays.sequences[place]).size == 1
        ids = [batch.arrays.sequences[p.sequence, p.start] for p in batch.placements]
        assert len(set(ids)) == len(ids)


def test_a_prompt_is_shared_where_that_computes_fewer_tokens():
    rng = np.random.default_rng(0)
    long_prompt, short_prompt = [1] * 30, [2]
    rows = [make_row(rng, long_prompt, 5) for _ in range(8)] + [
        make_row(rng, short_prompt, 17) for _ in range(2)
    ]
    batches = make_batches(rows, [0] * 10, CONFIG)
    shared = {p.row: bool(b.arrays.prefix) for b in batches for p in b.placements}
    assert shared == {i: i < 8 for i in range(10)}


def test_shared_prompts_halve_the_tokens_of_the_benchmark_shape():
    rng = np.random.default_rng(0)
    rows = [make_row(rng, [t] * 64, 64, task=t) for t in range(8) for _ in range(8)]
    tokens = sum(b.size for b in make_batches(rows, [0] * 64, BatchConfig()))
    assert tokens == 8 * (64 + 8 * 64)  # against 64 x 128


def test_a_completion_of_one_token_needs_no_token_of_its_own():
    rng = np.random.default_rng(0)
    rows = [make_row(rng, [3] * 8, 1) for _ in range(3)]
    [batch] = make_batches(rows, [0] * 3, CONFIG)
    assert batch.arrays.prefix == 8 and (batch.arrays.source[0, :3] == 7).all()


def test_first_fit_decreasing():
    assert first_fit_decreasing([2, 5, 4, 7, 1, 3], 8) == [[3, 4], [1, 5], [2, 0]]
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 100, 500)
    bins = first_fit_decreasing(lengths.tolist(), 100)
    assert sorted(i for b in bins for i in b) == list(range(500))
    assert all(lengths[b].sum() <= 100 for b in bins)
    assert len(bins) <= 1.1 * lengths.sum() / 100


def test_packing_leaves_little_padding():
    rng = np.random.default_rng(0)
    rows = [make_row(rng, rng.integers(1, 30, 9).tolist(), int(n)) for n in rng.integers(2, 120, 200)]
    packed = padding_share(make_batches(rows, [0] * 200, BatchConfig((128,), 2048)))
    rectangle = 1 - sum(len(r.prompt) + len(r.tokens) - 1 for r in rows) / (200 * 128)
    assert packed < 0.1 < 0.4 < rectangle


def test_micro_batches_divide_over_devices():
    rows = make_rows(np.random.default_rng(0), prompts=5, samples=3)
    for batch in make_batches(rows, [0] * len(rows), CONFIG, multiple_of=4):
        assert batch.arrays.tokens.shape[0] % 4 == 0


def test_rows_that_cannot_be_computed_are_refused():
    rng = np.random.default_rng(0)
    # As a run says it, of a flattened episode.
    with pytest.raises(UserError, match=r"\(longest 32\): add a longer one to learner.batch.buckets"):
        make_batches([make_row(rng, [1] * 30, 9)], [0], CONFIG)
    with pytest.raises(ValueError, match="empty prompt"):
        make_batches([make_row(rng, [], 9)], [0], CONFIG)
    with pytest.raises(ValueError, match="has a token id below 0"):
        make_batches([make_row(rng, [1, 2], 3), make_row(rng, [1, -100], 3)], [0, 0], CONFIG)
    with pytest.raises(ValueError, match="increasing"):
        BatchConfig(buckets=(8, 4))


def test_a_run_meets_few_shapes_however_its_lengths_vary():
    """Every shape is a program to compile: voting's rows of many steps come in a handful of them."""
    rng = np.random.default_rng(0)
    shapes = set()
    for _ in range(60):
        rows = []
        for task in range(8):
            prompt = tuple(rng.integers(5, 100, rng.integers(12, 17)))
            for _ in range(24):
                rows.append(row_of(rng, prompt, int(np.clip(rng.normal(21, 5), 8, 60)), task, "generator"))
            for _ in range(8):
                longer = tuple(rng.integers(5, 100, rng.integers(85, 115)))
                rows.append(row_of(rng, longer, 5, task, "aggregator"))
        for batch in make_batches(rows, [row.role for row in rows], BatchConfig(token_budget=4096)):
            shapes.add((batch.arrays.tokens.shape, batch.arrays.mask.shape, batch.arrays.prefix))
    assert len(shapes) <= 8


def row_of(rng, prompt, tokens, task, role):
    spoken = tuple(rng.integers(5, 100, tokens))
    return Row("p0", role, task, 0, 0, prompt, spoken, (0.0,) * tokens)


def test_a_greedy_row_cannot_be_learned_from():
    row = dataclasses.replace(make_row(np.random.default_rng(0), (1, 2), 3), temperature=0.0)
    with pytest.raises(UserError, match=r"a row of role 'generator' has temperature 0\.0"):
        make_batches([row], ["generator"], BatchConfig())


def test_only_rows_beyond_the_budget_make_micro_batches_beyond_it():
    rng = np.random.default_rng(0)
    rows = [make_row(rng, [1] * 4, length) for length in (5, 26, 5, 27, 5, 5, 5)]
    batches = make_batches(rows, [0] * 7, BatchConfig((4, 8, 16, 32), 16, share_prompts=False))
    placed = {tuple(sorted(p.row for p in batch.placements)): batch.size for batch in batches}
    assert {members: size for members, size in placed.items() if size > 16} == {(1,): 32, (3,): 32}
    assert sorted(i for members in placed for i in members) == list(range(7))


def test_rows_carry_the_sets_that_top_k_and_top_p_kept():
    row = dataclasses.replace(make_row(np.random.default_rng(0), (1, 2), 2), kept=((3,), (4, 9, 2)))
    (batch,) = make_batches([row], ["generator"], BatchConfig((16,)))
    np.testing.assert_array_equal(batch.arrays.kept[0, :2], [[3, -1, -1, -1], [4, 9, 2, -1]])


def test_a_micro_batch_is_as_wide_as_its_own_kept_sets():
    rng = np.random.default_rng(0)
    narrow = dataclasses.replace(make_row(rng, (1, 2), 2), kept=((3,), (4, 9)))
    wide = dataclasses.replace(make_row(rng, (1, 2), 2, role="judge"), kept=((3,) * 9, (4,) * 9))
    batches = make_batches([narrow, wide], ["generator", "judge"], BatchConfig((16,)))
    assert [batch.arrays.kept.shape[2] for batch in batches] == [2, 16]
    np.testing.assert_array_equal(batches[0].arrays.kept[0, :2], [[3, -1], [4, 9]])


def test_of_rows_without_kept_sets_all_tokens_are_kept():
    rows = [make_row(np.random.default_rng(0), (1, 2), 2) for _ in range(2)]
    rows[0] = dataclasses.replace(rows[0], kept=((3,), (4, 9, 2)))
    (both,) = make_batches(rows, ["generator"] * 2, BatchConfig((16,)))
    sizes = (np.asarray(both.arrays.kept) >= 0).sum(axis=-1)
    assert sorted(sizes[sizes > 0]) == [1, 3]
    apart = make_batches(rows, ["generator", "judge"], BatchConfig((16,)))
    assert [batch.arrays.kept is None for batch in apart] == [False, True]
