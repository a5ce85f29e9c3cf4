"""Every lane sees its own tokens and no others, whatever the engine copies, evicts, grows or prefills early.

The compiled programs are stood in for by ones that keep, per cell of a cache, which token of which adapter it holds;
each sampled token is a checksum of all cells that its lane attends. So one stray cell changes what is said.
"""

import dataclasses
import math
import zlib

import numpy as np
import pytest
from kit import CONFIG

from marl_jax.sampling import Engine, EngineSettings, Request, banks, programs
from marl_jax.sampling import engine as engine_module
from marl_jax.sampling.requests import noise_key

POLICIES = ("a", "b", None)


class Cells:
    """A cache: [rows][length] of (token, adapter)."""

    def __init__(self, rows, length):
        self.rows, self.length = rows, length
        self.cells = [[None] * length for _ in range(rows)]


def say(cells, noise):
    return zlib.crc32(repr((cells, noise.tolist())).encode()) % CONFIG.vocab_size


def expected(request):
    cells = [(token, POLICIES.index(request.policy)) for token in request.tokens]
    said = []
    for _ in range(request.max_new_tokens):
        said.append(say(cells, noise_key(request.key)))
        cells.append((said[-1], cells[0][1]))
    return said


def decode(params, adapters, rungs, lanes, *, steps, **_):
    lanes = lanes.replace(**{name: getattr(lanes, name).copy() for name in vars(lanes)})
    rows = [row for cache in rungs for row in cache.cells]
    tokens, sampled = np.zeros((2, steps, len(lanes.token)), np.int32)
    for step in range(steps):
        for lane in np.flatnonzero(lanes.active):
            end = lanes.position[lane] + 1
            rows[lane][end - 1] = int(lanes.token[lane]), int(lanes.adapter[lane]) % len(POLICIES)
            tokens[step, lane] = lanes.token[lane] = say(rows[lane][:end], lanes.noise[lane])
            sampled[step, lane] = 1
            lanes.position[lane] += 1
            lanes.generated[lane] += 1
            lanes.active[lane] = lanes.generated[lane] < lanes.max_new[lane]
    logprobs = np.zeros(tokens.shape, np.float32)
    return rungs, programs.Sampled(tokens, logprobs, sampled.astype(bool), lanes.active, None)


def prefill(params, adapters, cache, feeds, **_):
    for row, column, line, index in zip(feeds.rows, feeds.start, feeds.tokens, feeds.adapter):
        if row < cache.rows:
            for i, token in enumerate(line[: cache.length - column].tolist()):
                cache.cells[row][column + i] = token, int(index) % len(POLICIES)
    return cache, sum(feeds.start)


def copy_rows(source, into, from_rows, to_rows):
    length = min(source.length, into.length)
    lines = [source.cells[min(row, source.rows - 1)][:length] for row in from_rows]
    for line, row in zip(lines, to_rows):
        if row < into.rows:
            into.cells[row][:length] = line
    return into


def swap_rows(lower, upper, low, up):
    mine, other = lower.cells[low], upper.cells[up]
    lower.cells[low], upper.cells[up] = other[: lower.length], mine + other[lower.length :]
    return lower, upper


def grow(cache, length):
    wide = Cells(cache.rows, length)
    for line, old in zip(wide.cells, cache.cells):
        line[: cache.length] = old
    return wide


def take(cache, rows):
    taken = Cells(len(rows), cache.length)
    taken.cells = [list(cache.cells[row]) for row in rows]
    return taken


@pytest.fixture
def symbolic(monkeypatch):
    stand_ins = {"decode": decode, "prefill": prefill, "copy_rows": copy_rows, "grow": grow, "take": take}
    stand_ins["swap_rows"] = swap_rows
    stand_ins["copy_rows_within"] = lambda cache, *pairs: copy_rows(cache, cache, *pairs)
    for name, function in stand_ins.items():
        monkeypatch.setattr(programs, name, function)
    for module in (engine_module, banks):
        monkeypatch.setattr(module, "empty_cache", lambda config, rows, length, mesh: Cells(rows, length))
    monkeypatch.setattr(
        engine_module, "stable_shapes", lambda params, adapters, config, settings, *_: settings
    )


@pytest.mark.parametrize("seed", range(70))
def test_every_lane_sees_its_own_tokens_and_no_others(symbolic, seed):
    rng = np.random.default_rng(seed)
    lanes = int(rng.integers(1, 10))
    settings = EngineSettings(
        widths=tuple(sorted({lanes, max(1, lanes // 2), 1}, reverse=True)),
        lengths=((96,), (48, 96), (24, 48, 96))[seed % 3],
        chunks=((4, 8, 16), (8,), (96,))[seed // 3 % 3],
        prefill_tokens=int(rng.integers(1, 100)),
        prefixes=int(rng.integers(1, 12)),
        steps=int(rng.integers(1, 6)),
        banks=1 + seed % 2,
    )
    if seed >= 40:  # lanes over rungs, of any numbers
        at = tuple(int(rng.integers(1, 6)) for _ in settings.lengths)
        settings = dataclasses.replace(settings, widths=(sum(at),), lanes_at=at, banks=1)
    adapters = {"q": {"a": np.zeros((2, 1))}}
    engine = Engine({"w": np.zeros(1)}, CONFIG, settings, adapters=adapters, policies=POLICIES[:2])
    openings = [rng.integers(0, 96, rng.integers(1, 30)).tolist() for _ in range(6)]
    asked, waiting, fed = 0, {}, 0

    def submit(tokens, policy):
        nonlocal asked, fed
        new = int(rng.integers(1, 13))
        request = Request(tuple(tokens), (seed, asked), new, policy, keep=bool(rng.random() < 0.6))
        waiting[engine.submit(request)] = request
        asked, fed = asked + 1, fed + len(tokens) - 1

    while asked < 60 or engine.pending:
        for _ in range(rng.integers(0, 12) if asked < 60 else 0):
            submit(openings[rng.integers(6)], POLICIES[rng.integers(3)])
        finished = engine.step()
        caches = [cache for bank in engine._banks for cache in bank.rungs]
        assert sum(cache.rows * cache.length for cache in caches) <= sum(map(math.prod, settings.caches))
        for ticket, completion in finished:
            request = waiting.pop(ticket)
            assert completion.tokens == expected(request)
            history = [*request.tokens, *completion.tokens]
            if request.keep and len(history) < 75:
                for _ in range(1 + (rng.random() < 0.2)):  # now and then two go on from it
                    submit([*history, *rng.integers(0, 96, rng.integers(1, 9)).tolist()], request.policy)
    assert not waiting
    assert engine.stats.prefilled_tokens + engine.stats.reused_tokens == fed
