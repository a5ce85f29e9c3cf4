"""A bank: lanes that are decoded together, what the host knows of them, and the dispatch that is under way.

An engine has one, or several that take turns: while the host looks at what one has sampled, and prefills what enters it
next, the others decode. On a CPU that also fills the cores, which one small program does not.

    open -> occupy (table) -> reach -> begin ─ on the device ─ wait -> record (table) -> begin -> ..

A CPU runs the programs that one thread dispatches one after the other, so there each bank has a thread, which
dispatches and waits. It writes nothing: what it returns is taken over by `wait`.
"""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future

import jax
import numpy as np
from jax.sharding import Mesh

from marl_jax.models import ModelConfig
from marl_jax.models.decode import Cache, empty_cache
from marl_jax.sampling import programs
from marl_jax.sampling.admission import Waiting
from marl_jax.sampling.lanes import FREE, LaneTable
from marl_jax.sampling.shapes import EngineSettings
from marl_jax.sampling.transfer import fetch
from marl_jax.threads import Workers

__all__ = ["Bank"]

Decoded = tuple[Cache, programs.Sampled]
Decode = Callable[[Cache, programs.Lanes], Decoded]


class Bank:
    """Has no lanes before it is opened."""

    cache: Cache
    table: LaneTable

    def __init__(self, config: ModelConfig, settings: EngineSettings, mesh: Mesh | None):
        self._config, self._settings, self._mesh = config, settings, mesh
        self.requests: dict[int, Waiting] = {}  # those in lanes, by ticket
        # Programs that several devices of a mesh run together must begin in one order everywhere.
        threaded = settings.banks > 1 and mesh is None and jax.default_backend() == "cpu"
        self._worker = Workers("bank", finish=True) if threaded else None
        self._under_way: Future[Decoded] | None = None

    @property
    def under_way(self) -> bool:
        """Whether a dispatch is."""
        return self._under_way is not None

    def open(self, width: int, length: int) -> None:
        """Start over with idle lanes."""
        self.requests.clear()
        self.cache = Cache((), ())  # the old one goes before the new one comes
        self.cache = empty_cache(self._config, width, length, self._mesh)
        self.table = LaneTable(width, self._settings.context, self._settings.stops, self._settings.features)

    def free(self) -> list[int]:
        """The lanes without a request."""
        return np.flatnonzero(self.table.tickets == FREE).tolist()

    def fit(self, widths: tuple[int, ...], best: int) -> None:
        """Compact or widen to the best of these widths."""
        for width in sorted(w for w in widths if self.cache.rows < w <= best):  # one rung at a time
            self._take(np.arange(width) % self.cache.rows, self.cache.rows)
        for width in (w for w in widths if best <= w < self.cache.rows):
            occupied_first = np.argsort(self.table.tickets == FREE, kind="stable")
            self._take(occupied_first[:width], width)

    def reach(self, length: int, longest: int) -> None:
        """Let the cache grow, rung by rung, until `length` columns fit or it is as long as it may become."""
        for rung in self._settings.lengths:
            if self.cache.length < min(length, longest) and rung > self.cache.length:
                self.cache = programs.grow(self.cache, rung)

    def begin(self, decode: Decode) -> None:
        """Dispatch; does not wait. Where this is interrupted: `abandon()`."""
        cache, lanes = self.cache, self.table.lanes
        if self._worker is not None:
            self._under_way = self._worker.submit(lambda: jax.block_until_ready(decode(cache, lanes)))
        else:
            self.cache, sampled = decode(cache, lanes)
            self._under_way = Future()
            self._under_way.set_result((self.cache, sampled))

    def wait(self) -> programs.Sampled:
        """What the dispatch under way sampled, on the host. Where this is interrupted, it may be called again."""
        assert self._under_way is not None
        cache, sampled = self._under_way.result()
        on_host = fetch(sampled)
        self.cache, self._under_way = cache, None
        return on_host

    def abandon(self) -> None:
        """Let whatever was dispatched come to its end; the bank has to be opened again."""
        if self._worker is not None:  # also what an interrupt kept `begin` from noting
            self._worker.submit(lambda: None).result()
        if self._under_way is not None and self._under_way.done() and self._under_way.exception() is None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # it holds the cache until it ends
                jax.block_until_ready(self._under_way.result())
        self._under_way = None

    def _take(self, rows: np.ndarray, real: int) -> None:
        self.cache = programs.take(self.cache, rows.astype(np.int32))
        self.table.take(rows, real)
