"""A bank: lanes that are decoded together, their records on the host, and the running dispatch.

An engine has one bank, or several that take turns: while the host reads the tokens of one, and prefills new requests
for it, the others decode. On a CPU that also fills the cores, which one small program does not.

    open -> occupy (table) -> reach -> begin ─ on the device ─ wait -> record (table) -> begin -> ..

A CPU runs the programs that one thread dispatches one after the other. There, each bank has its own thread, which
dispatches and waits. The thread changes no state: `wait` stores its results.
"""

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import jax
import numpy as np
from jax.sharding import Mesh

from marl_jax.models import ModelConfig
from marl_jax.models.decode import Cache, empty_cache
from marl_jax.sampling import programs
from marl_jax.sampling.admission import Waiting
from marl_jax.sampling.lanes import LaneTable
from marl_jax.sampling.rungs import FREE, Swap
from marl_jax.sampling.shapes import EngineSettings
from marl_jax.threads import Workers

Rungs = tuple[Cache, ...]
Decoded = tuple[Rungs, programs.Sampled]
Decode = Callable[[Rungs, programs.Lanes], Decoded]


class Bank:
    """A bank has no lanes before `open`. They are the rows of one cache that grows, or of all rungs in their order."""

    rungs: list[Cache]  # the first is the cache that grows, or the shortest rung
    table: LaneTable
    fed: jax.Array | None = None  # ready once the last prefill for its lanes is done

    def __init__(self, config: ModelConfig, settings: EngineSettings, mesh: Mesh | None):
        self._config, self._settings, self._mesh = config, settings, mesh
        self.requests: dict[int, Waiting] = {}  # requests in lanes, by ticket
        # Programs that several devices of a mesh run together must begin in one order everywhere.
        threaded = settings.banks > 1 and mesh is None and jax.default_backend() == "cpu"
        self._worker = Workers("bank", finish=True) if threaded else None
        self.under_way: Future[Decoded] | None = None  # the running dispatch

    def open(self, *rungs: tuple[int, int]) -> None:
        """Start over with idle lanes in caches of (lanes, length) each."""
        self.requests.clear()
        self.fed = None
        self.rungs = []  # frees the old caches before the new ones are allocated
        self.rungs = [empty_cache(self._config, lanes, length, self._mesh) for lanes, length in rungs]
        width = sum(lanes for lanes, _ in rungs)
        self.table = LaneTable(width, self._settings.context, self._settings.stops, self._settings.features)

    def fit(self, best: int) -> None:
        """Compact or widen the bank to `best` lanes."""
        widths, rows = self._settings.widths, self.rungs[0].rows
        for width in sorted(w for w in widths if rows < w <= best):  # one width at a time
            self._take(np.arange(width) % self.rungs[0].rows, self.rungs[0].rows)
        for width in (w for w in widths if best <= w < rows):
            occupied_first = np.argsort(self.table.tickets == FREE, kind="stable")
            self._take(occupied_first[:width], width)

    def reach(self, length: int) -> None:
        """Grow the cache until `length` columns fit, or to its greatest length."""
        for longer in self._settings.lengths:
            if self.rungs[0].length < min(length, self._settings.context) and longer > self.rungs[0].length:
                self.rungs[0] = programs.grow(self.rungs[0], longer)

    def swap(self, swaps: Iterable[Swap]) -> None:
        """Swap lanes of neighbouring rungs, pair by pair."""
        for lower, upper in swaps:
            (rung, low), (_, up) = self.place_of(lower), self.place_of(upper)
            both = programs.swap_rows(*self.rungs[rung : rung + 2], np.int32(low), np.int32(up))
            self.rungs[rung : rung + 2] = both
            self.table.exchange(lower, upper)

    def place_of(self, lane: int) -> tuple[int, int]:
        """A lane's rung, and its row there."""
        row = lane
        for rung, cache in enumerate(self.rungs):
            if row < cache.rows:
                return rung, row
            row -= cache.rows
        raise IndexError(f"there is no lane {lane}: the bank has {lane - row}")

    def by_rung(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, list[tuple[int, int]]]]:
        """Group pairs of a lane and something else by the lane's rung; its row there replaces the lane."""
        groups: dict[int, list[tuple[int, int]]] = {}
        for lane, other in pairs:
            rung, row = self.place_of(lane)
            groups.setdefault(rung, []).append((row, other))
        return sorted(groups.items())

    def begin(self, decode: Decode) -> None:
        """Dispatch without waiting. If this is interrupted, call `abandon()`."""
        lanes = self.table.decoding
        last_rung, _ = self.place_of(int(np.flatnonzero(lanes.active).max(initial=0)))
        rungs = tuple(self.rungs[: last_rung + 1])  # longer rungs have no active lane
        if self._worker is not None:
            self.under_way = self._worker.submit(lambda: jax.block_until_ready(decode(rungs, lanes)))
        else:
            decoded = decode(rungs, lanes)
            self.under_way = Future()
            self.under_way.set_result(decoded)

    def wait(self) -> programs.Sampled:
        """The samples of the running dispatch, on the host. After an interrupt, it may be called again."""
        assert self.under_way is not None
        rungs, sampled = self.under_way.result()
        on_host = jax.device_get(sampled)
        self.rungs[: len(rungs)], self.under_way, self.fed = rungs, None, None
        return on_host

    def abandon(self) -> None:
        """Wait until all dispatched work has ended; the bank must be opened again."""
        if self._worker is not None:  # an interrupted `begin` may not have stored its job
            self._worker.submit(lambda: None).result()
        if self.under_way is not None and self.under_way.done() and self.under_way.exception() is None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the dispatch uses the cache until it ends
                jax.block_until_ready(self.under_way.result())
        self.under_way = self.fed = None

    def _take(self, rows: np.ndarray, real: int) -> None:
        self.rungs[0] = programs.take(self.rungs[0], rows.astype(np.int32))
        self.table.take(rows, real)
