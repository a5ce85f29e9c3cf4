"""A bank: lanes that are decoded together, what the host knows of them, and the dispatch that is under way.

An engine has one, or several that take turns: while the host looks at what one has sampled, and prefills what enters it
next, the others decode. On a CPU that also fills the cores, which one small program does not.

    open -> occupy (table) -> reach -> begin ─ on the device ─ wait -> record (table) -> begin -> ..
"""

import concurrent.futures
import contextlib
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from marl_jax.models import ModelConfig
from marl_jax.models.decode import Cache, empty_cache
from marl_jax.sampling import programs
from marl_jax.sampling.admission import Waiting
from marl_jax.sampling.lanes import FREE, LaneTable
from marl_jax.sampling.plan import EngineSettings
from marl_jax.sampling.transfer import fetch

Decode = Callable[[Cache, programs.Lanes], tuple[Cache, programs.Sampled]]


class Bank:
    """Idle lanes at first, as many as the settings have at most."""

    cache: Cache
    table: LaneTable

    def __init__(self, config: ModelConfig, settings: EngineSettings, mesh: Mesh | None):
        self._config, self._settings, self._mesh = config, settings, mesh
        self.requests: dict[int, Waiting] = {}  # those in lanes, by ticket
        # Programs that one thread dispatches to a CPU run one after the other. Those of a mesh have to.
        beside = settings.banks > 1 and mesh is None
        self._thread = concurrent.futures.ThreadPoolExecutor(1) if beside else None
        self._under_way: concurrent.futures.Future[programs.Sampled] | None = None
        self.open(settings.widths[0], settings.lengths[0])

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

    def fit(self, widths: tuple[int, ...], wanted: int) -> None:
        """Compact or widen to the narrowest of these widths that has so many lanes, or to the widest."""
        best = min((width for width in widths if width >= wanted), default=widths[0])
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
        """Dispatch; does not wait."""

        def run() -> programs.Sampled:
            self.cache, sampled = decode(self.cache, self.table.lanes)
            return sampled

        if self._thread is not None:
            self._under_way = self._thread.submit(lambda: jax.block_until_ready(run()))
        else:
            sampled = run()  # where this is interrupted, nothing is under way
            self._under_way = concurrent.futures.Future()
            self._under_way.set_result(sampled)

    def wait(self) -> programs.Sampled:
        """What the dispatch under way sampled, on the host. Where this is interrupted, it may be called again."""
        assert self._under_way is not None
        sampled = fetch(self._under_way.result())
        self._under_way = None
        return sampled

    def abandon(self) -> None:
        """Let what is under way come to its end, whatever it is."""
        if self._under_way is not None:
            with contextlib.suppress(Exception):  # it holds the cache until it ends
                jax.block_until_ready(self._under_way.result())
        self._under_way = None

    def _take(self, rows: np.ndarray, real: int) -> None:
        self.cache = programs.take(self.cache, rows.astype(np.int32))
        self.table.take(rows, real)
