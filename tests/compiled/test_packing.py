"""Packs in arrays hold what is learned of every row once, behind its prompt, and waste little."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pack_reading import seen_from

from marl_jax.compiled.packing import Rows, line_of, take

SIZE, SAMPLED = 256, 256


def made_up(seed, prompts, samples, shared, lengths=(1, 40), learn=0.8):
    """Rows in arrays, and of each: its prompt, what it says, and whether it is learned.

    Prompts of a group are equal, or begin alike and go on for 10 to 29 tokens of their own.
    """
    rng = np.random.default_rng(seed)
    some = lambda size: rng.integers(1, 99, size).tolist()
    stem = [some(size) for size in rng.integers(1, 70, prompts)]
    group = np.repeat(np.arange(prompts), samples)
    rest = [[] if shared else some(size) for size in rng.integers(10, 30, len(group))]
    texts = [some(size) for size in rng.integers(*lengths, len(group))]
    learned = rng.random(len(group)) < learn
    padded = lambda rows, width: jnp.array([row + [0] * (width - len(row)) for row in rows], jnp.int32)
    count = jnp.arange(len(group))
    rows = Rows(
        row=count,
        group=jnp.array(group),
        stem=padded(stem, 80),
        stem_length=jnp.array([*map(len, stem)]),
        tokens=padded([own + text for own, text in zip(rest, texts)], 45 if shared else 75),
        rest=jnp.array([*map(len, rest)]),
        target_count=jnp.array(np.where(learned, [*map(len, texts)], 0)),
        targets=padded(texts, 45),
        logprobs=-1.0 * padded(texts, 45),
        advantage=1.0 * count,
        temperature=1.0 + count,
        kl_coef=0.5 * count,
    )
    return rows, [
        (stem[g] + own, text, bool(taught)) for g, own, text, taught in zip(group, rest, texts, learned)
    ]


def packs_of(rows, size=SIZE, sampled=SAMPLED):
    line = line_of(rows)
    pack = jax.jit(lambda first: take(rows, line, first, size, sampled))
    first, packs = 0, []
    while first < len(rows.row) and int(rows.target_count.sum() - line.target[first]) > 0:
        packs.append(jax.tree.map(np.asarray, pack(jnp.int32(first))))
        first = int(packs[-1].stop)
    return packs


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_learned_of_a_row_lies_in_one_pack_and_sees_its_prompt_and_itself(shared, seed):
    rows, wanted = made_up(seed, prompts=7, samples=6, shared=shared)
    found = {}
    for pack in packs_of(rows):
        # The columns of its table that the pack says it needs.
        a, batch = pack.batch.replace(table=(pack.batch.table[0][..., -int(pack.need) :],)), {}
        for place in np.flatnonzero(a.mask[0]).tolist():
            row, column = int(pack.row[place]), int(pack.column[place])
            prompt, text, _ = wanted[row]
            batch.setdefault(row, []).append(column)
            assert seen_from(a, 0, a.source[0, place]) == [*prompt, *text[:column]]
            assert a.targets[0, place] == text[column] == -a.sampler_logp[0, place] == -a.old_logp[0, place]
            assert [a.advantages[0, place], a.temperature[0, place], a.kl_coef[0, place]] == [
                row,
                1 + row,
                row / 2,
            ]
        numbers = {row: {int(n) for n in a.sequences[0][a.mask[0] & (pack.row == row)]} for row in batch}
        assert sorted(n for some in numbers.values() for n in some) == list(range(len(batch)))
        assert not found.keys() & batch.keys()
        found |= batch
    assert found == {i: [*range(len(text))] for i, (_, text, taught) in enumerate(wanted) if taught}


def test_targets_may_be_what_a_pack_has_no_more_room_for():
    rows, wanted = made_up(0, prompts=5, samples=4, shared=False)
    packs = packs_of(rows, sampled=64)
    assert all(pack.batch.mask.shape == (1, 64) for pack in packs)
    assert sum(int(pack.batch.mask.sum()) for pack in packs) == sum(
        len(t) for _, t, taught in wanted if taught
    )
    assert len(packs) > len(packs_of(rows))


@pytest.mark.parametrize("shared", [True, False])
def test_little_is_computed_in_vain(shared):
    """A pack is left with room for less than its next row; here that was 9 and 11% of the tokens."""
    rows, _ = made_up(1, prompts=32, samples=16, shared=shared, learn=1.0)
    live, size = int(rows.stem_length.sum() + rows.fed.sum()), 1024
    assert len(packs_of(rows, size, size)) * size <= 1.12 * live


def test_nothing_is_packed_of_rows_that_nobody_learns():
    assert packs_of(made_up(0, prompts=3, samples=2, shared=True, learn=0.0)[0]) == []
