"""Widths and lengths of an engine: compacting, widening and growing change no bit, or are not done."""

import dataclasses
import itertools

import numpy as np
import pytest
from kit import (
    CONFIG,
    SETTINGS,
    ask,
    compilations,
    make_adapters,
    make_params,
    prompt,
    same_bits,
    serve,
    warm_up,
    with_adapters,
)

from marl_jax.sampling import Engine, Features, Load, plan, stability
from marl_jax.sampling.shapes import STABLE_WIDTH


def test_stable_shapes_are_measured_to_the_bit(monkeypatch):
    """Shapes are dropped exactly when their bits differ; the largest always stays."""
    settings = dataclasses.replace(SETTINGS, widths=(32, 16, 8), lengths=(16, 32, 48))
    honest = np.random.default_rng(0).normal(size=(4, 32))

    def measured(params, adapters, config, settings, mesh, scale, shape, filled):
        width, length = shape
        moved = 1e-7 * (width == 16 or length == 16)
        return honest[:, :width] + moved

    monkeypatch.setattr(stability, "_outcome", measured)
    config = dataclasses.replace(CONFIG, rope_theta=77.0)
    chosen = stability.stable_shapes(None, None, config, settings, None, 1.0)
    assert (chosen.widths, chosen.lengths) == ((32, 8), (32, 48))


def test_the_measure_of_stability_sees_a_single_bit_of_a_single_lane(params, monkeypatch):
    settings = dataclasses.replace(SETTINGS, widths=(64,), lengths=(32, 48))
    asked = (params, None, CONFIG, settings, None, 1.0)
    same = stability._outcome(*asked, (64, 32), 32)
    np.testing.assert_array_equal(same, stability._outcome(*asked, (64, 32), 32))
    scale = stability.programs.decode

    def moved(*args, **kwargs):
        (cache,), out = scale(*args, **kwargs)
        keys = cache.keys[-1]
        nudged = keys.at[7, 0, 0, 3].set(np.nextafter(np.float32(keys[7, 0, 0, 3]), np.float32(2)))
        return (dataclasses.replace(cache, keys=(*cache.keys[:-1], nudged)),), out

    monkeypatch.setattr(stability.programs, "decode", moved)
    other = stability._outcome(*asked, (64, 32), 32)
    assert set(np.flatnonzero((same != other).any(axis=0))) == {7}


@pytest.mark.campaign
@pytest.mark.parametrize("head_dim", [8, 32])
def test_compaction_of_a_thinning_batch_changes_no_bit(params, head_dim):
    """Whatever the model's shape: widths whose bits differ from the full one's are not used."""
    config = dataclasses.replace(CONFIG, head_dim=head_dim)
    if head_dim != CONFIG.head_dim:
        params = make_params(config)
    asked = dataclasses.replace(
        SETTINGS,
        widths=(4 * STABLE_WIDTH, 2 * STABLE_WIDTH),
        lengths=(64,),
        chunks=(16,),
        features=Features(),
    )
    requests = [ask(prompt(1 + i % 9, i), i, new=24 if i % 10 == 0 else 9) for i in range(160)]
    engine = Engine(params, config, asked)
    if head_dim == 32 and len(engine.settings.widths) < 2:
        pytest.skip("this machine computes other bits at 128 rows than at 256: nothing is ever compacted")
    tickets = [engine.submit(request) for request in requests]
    widths, done = set(), {}
    while engine.pending:
        done.update(engine.step())
        widths.add(engine._banks[0].rungs[0].rows)
    assert widths == set(engine.settings.widths)
    never = Engine(params, config, dataclasses.replace(asked, widths=asked.widths[:1]))
    full = serve(never, requests)
    assert all(same_bits(done[ticket], completion) for ticket, completion in zip(tickets, full))


@pytest.mark.shipped
def test_a_batch_of_adapters_that_widens_and_thins_compiles_nothing_and_changes_no_bit():
    config = dataclasses.replace(CONFIG, head_dim=32)
    params, served = make_params(config), with_adapters(make_adapters(config))
    features = Features(truncate=True, candidates=8)
    wide = dataclasses.replace(
        SETTINGS, widths=(256, 128), lengths=(64,), chunks=(16,), features=features, prefixes=8
    )
    engine = Engine(params, config, wide, **served)
    if len(engine.settings.widths) < 2:
        pytest.skip("this machine computes other bits at 128 rows than at 256: nothing is ever compacted")
    warm_up(engine)
    requests = [
        ask(prompt(1 + i % 9, i), i, new=24 if i % 3 == 0 else 9, policy="abc"[i % 3], top_k=1 + i % 8)
        for i in range(160)
    ]
    tickets, done, widths = [], {}, []
    with compilations() as counted:
        for some in (requests[:90], requests[90:]):
            tickets += [engine.submit(request) for request in some]
            done.update(engine.step())
            widths.append(engine._banks[0].rungs[0].rows)
        while engine.pending:
            done.update(engine.step())
            widths.append(engine._banks[0].rungs[0].rows)
        late = [engine.submit(request) for request in requests[:90]]
        while engine.pending:
            done.update(engine.step())
    assert counted == [0]
    assert [width for width, _ in itertools.groupby(widths)] == [128, 256, 128]
    never = serve(Engine(params, config, dataclasses.replace(wide, widths=(256,)), **served), requests)
    assert [done[ticket] for ticket in tickets] == never
    assert [done[ticket] for ticket in late] == never[:90]


@pytest.mark.shipped
def test_every_cache_length_in_use_gives_the_same_bits(params):
    planned = plan(CONFIG, Load(21, 40), lanes=8, budget_bytes=1 << 28)
    planned = dataclasses.replace(planned, lengths=(32, 48, 64))
    requests = [ask(prompt(1 + i % 20, i), i, new=40) for i in range(12)]
    growing, full = (
        serve(Engine(params, CONFIG, dataclasses.replace(planned, lengths=lengths)), requests)
        for lengths in (planned.lengths, planned.lengths[-1:])
    )
    assert all(same_bits(a, b) for a, b in zip(growing, full))
