"""Packs in arrays hold what is learned of every row once, behind its prompt, and waste little."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pack_reading import seen_from

from marl_jax.compiled.packing import Rows, line_of, take

SIZE, SAMPLED = 256, 256


def made_up(seed, prompts, samples, shared, lengths=(1, 40), learn=0.8):
    """Rows in arrays, and of each: its prompt, what it says, and whether it is learned."""
    rng = np.random.default_rng(seed)
    shown = rng.integers(1, 70, prompts)
    prompt = [rng.integers(1, 99, size).tolist() for size in shown]
    said = rng.integers(*lengths, (prompts * samples))
    texts = [rng.integers(1, 99, size).tolist() for size in said]
    learned = rng.random(len(said)) < learn
    group = np.repeat(np.arange(prompts), samples)
    padded = lambda rows, width: jnp.array([row + [0] * (width - len(row)) for row in rows], jnp.int32)
    whole = [prompt[g] + text for g, text in zip(group, texts)]
    count = jnp.arange(len(said))
    rows = Rows(
        row=count,
        group=jnp.array(group) if shared else count,
        prompt=padded(prompt, 80) if shared else jnp.zeros((len(said), 0), jnp.int32),
        shown=jnp.array(shown) if shared else jnp.zeros_like(count),
        tokens=padded(texts, 45) if shared else padded(whole, 80 + 45),
        ahead=jnp.zeros_like(count) if shared else jnp.array(shown[group]),
        said=jnp.array(np.where(learned, said, 0)),
        targets=padded(texts, 45),
        logprobs=-1.0 * padded(texts, 45),
        advantage=1.0 * count,
        temperature=1.0 + count,
        anchor=0.5 * count,
    )
    return rows, [(prompt[g], text, bool(taught)) for g, text, taught in zip(group, texts, learned)]


def packs_of(rows, size=SIZE, sampled=SAMPLED):
    line = line_of(rows)
    pack = jax.jit(lambda first: take(rows, line, first, size, sampled, rows.seen))
    first, packs = 0, []
    while first < len(rows.row) and int(rows.said.sum() - line.target[first]) > 0:
        packs.append(jax.tree.map(np.asarray, pack(jnp.int32(first))))
        first = int(packs[-1].stop)
    return packs


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_learned_of_a_row_lies_in_one_pack_and_sees_its_prompt_and_itself(shared, seed):
    rows, wanted = made_up(seed, prompts=7, samples=6, shared=shared)
    found = {}
    for pack in packs_of(rows):
        a, batch = pack.batch, {}
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
    rows, wanted = made_up(1, prompts=32, samples=16, shared=shared, learn=1.0)
    prompts = [prompt for prompt, _, _ in wanted[:: 16 if shared else 1]]
    live = sum(map(len, prompts)) + sum(len(text) - 1 for _, text, _ in wanted)
    size = 1024
    assert len(packs_of(rows, size, size)) * size <= (1.15 if shared else 1.1) * live


def test_nothing_is_packed_of_rows_that_nobody_learns():
    assert packs_of(made_up(0, prompts=3, samples=2, shared=True, learn=0.0)[0]) == []
