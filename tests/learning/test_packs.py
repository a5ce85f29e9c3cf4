"""Packs hold every row once, waste little, and are evenly dealt out."""

import dataclasses

import numpy as np
import pytest
from learning_rows import as_table, make_row, make_rows
from pack_reading import seen_from

from marl_jax.learning.batching import BatchConfig
from marl_jax.learning.packs import make_packs


def packs_of(rows, units=None, config=None, **options):
    units = [0] * len(rows) if units is None else units
    return make_packs(as_table(rows), units, config or BatchConfig(), **options)


def groups(rng, lengths, prompt=64):
    """Rows of eight completions for each prompt."""
    prompts = [rng.integers(1, 32, prompt).tolist() for _ in range(len(lengths) // 8)]
    return [make_row(rng, prompts[i // 8], int(length), task=i // 8) for i, length in enumerate(lengths)]


def live(rows):
    """Tokens that are fed where each prompt lies once; the last one of a completion is not."""
    return sum(map(len, {row.prompt for row in rows})) + sum(len(row.tokens) - 1 for row in rows)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("prompt", [(5, 60), (200, 300)], ids=["short", "long"])
def test_every_row_is_placed_once_and_sees_its_prompt_and_itself(share, prompt):
    rng = np.random.default_rng(0)
    rows = make_rows(rng, prompts=4, samples=5, slots=2, prompt=prompt, lengths=(1, 90))
    rows += make_rows(rng, prompts=3, samples=1, role="judge", prompt=(3, 130), lengths=(1, 9))
    config = BatchConfig(share_prompts=share, slice_tokens=512)
    batches = packs_of(rows, [row.role for row in rows], config, streams=2)
    assert sorted(p.row for b in batches for p in b.placements) == list(range(len(rows)))
    for batch in batches:
        a = batch.arrays
        assert a.mask.sum() == sum(p.stop - p.start for p in batch.placements)
        for p in batch.placements:
            row, place = rows[p.row], (p.sequence, slice(p.start, p.stop))
            assert row.role == batch.unit and a.targets[place].tolist() == list(row.tokens)
            np.testing.assert_array_equal(a.sampler_logp[place], np.float32(row.logprobs))
            for k, source in enumerate(a.source[place]):
                assert seen_from(a, p.sequence, source) == [*row.prompt, *row.tokens[:k]]


@pytest.mark.parametrize(("shortest", "longest"), [(4, 64), (64, 64)], ids=["ragged", "fixed"])
@pytest.mark.parametrize("seed", range(3))
def test_of_the_rows_of_the_benchmark_a_tenth_is_computed_in_vain(shortest, longest, seed):
    rng = np.random.default_rng(seed)
    rows = groups(rng, rng.integers(shortest, longest + 1, 512))
    batches = packs_of(rows, streams=2)
    assert sum(batch.size for batch in batches) <= 1.1 * live(rows)
    assert len({batch.shapes for batch in batches}) <= 2
    assert {batch.arrays.table[0].shape[2] for batch in batches} == {4}  # two of the prompt, two of a row


def test_rows_that_would_leave_much_of_a_block_empty_run_on_into_one_more():
    rng = np.random.default_rng(0)
    rows = groups(rng, [50] * 512)
    assert sum(batch.size for batch in packs_of(rows, streams=2)) <= 1.13 * live(rows)


def test_what_is_left_of_a_pack_is_computed_in_quarters():
    rng = np.random.default_rng(0)
    assert [batch.size for batch in packs_of(groups(rng, [20] * 8, prompt=32))] == [256]
    sizes = [batch.size for batch in packs_of(groups(rng, [33] * 72, prompt=32))]
    assert sizes == [2048, 768]  # of 9 * (32 + 8 * 32) tokens


def test_a_row_that_is_longer_than_a_pack_has_a_longer_one():
    rng = np.random.default_rng(0)
    rows = [*groups(rng, [40] * 16), make_row(rng, [1] * 1500, 100)]
    lengths = {p.row: b.arrays.tokens.shape[1] for b in packs_of(rows) for p in b.placements}
    assert lengths == {i: 1024 if i < 16 else 2048 for i in range(17)}


def test_packs_are_dealt_out_evenly_to_streams_and_devices():
    rng = np.random.default_rng(0)
    rows = groups(rng, rng.integers(4, 65, 512))
    counts = [batch.size // batch.arrays.tokens.shape[1] for batch in packs_of(rows, streams=3)]
    assert len(counts) >= 3 and max(counts[:3]) - min(counts[:3]) <= 1
    for batch in packs_of(rows, multiple_of=4):
        filled = batch.arrays.segments.any(axis=1)
        of_devices = filled.reshape(4, -1).sum(axis=1)
        assert of_devices.max() - of_devices.min() <= 1
        assert all(row[:n].all() for row, n in zip(filled.reshape(4, -1), of_devices))  # empty ones come last


def test_rows_that_vary_meet_few_shapes():
    """Every shape is a program to compile: those of voting over many steps."""
    rng, shapes = np.random.default_rng(0), set()
    for _ in range(10):
        rows = []
        for task in range(8):
            prompt = rng.integers(1, 32, rng.integers(12, 17)).tolist()
            new = np.clip(rng.normal(21, 5, 24), 8, 60).astype(int)
            rows += [make_row(rng, prompt, int(n), task=task) for n in new]
            longer = rng.integers(1, 32, rng.integers(85, 115)).tolist()
            rows += [make_row(rng, longer, 5, task=task, role="aggregator") for _ in range(8)]
        batches = packs_of(rows, [row.role for row in rows], BatchConfig(token_budget=4096))
        shapes |= {batch.shapes for batch in batches}
    assert len(shapes) <= 8


def test_rows_that_cannot_be_computed_are_refused():
    row = dataclasses.replace(make_row(np.random.default_rng(0), (1, 2), 3), temperature=0.0)
    with pytest.raises(ValueError, match=r"a row of role 'generator' has temperature 0\.0"):
        packs_of([row])
