"""The engine: static shapes under a moving crowd.

Requests wait to be admitted to free lanes, one dispatch decodes a few tokens in every lane, and what finished is
handed out. A prompt that several requests share is prefilled once and copied.

    submit -> admission -> prefix cache (prefill) -> lanes (decode, n tokens per dispatch) -> completion

Where requests wait for lanes, `step` leaves the next dispatch under way, so that the device works while the caller
looks at what finished. What is submitted meanwhile enters with the dispatch after that.
"""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from marl_jax.models import ModelConfig
from marl_jax.models.decode import Cache, empty_cache
from marl_jax.models.lora import num_adapters
from marl_jax.sampling import programs
from marl_jax.sampling.admission import NOWHERE, Admission, Feed, Waiting
from marl_jax.sampling.lanes import FREE, LaneTable
from marl_jax.sampling.plan import EngineSettings
from marl_jax.sampling.requests import Completion, Request, check
from marl_jax.sampling.stability import stable_shapes
from marl_jax.sampling.transfer import fetch

COPY_ROWS = 64  # how many lanes one copy from the prefix cache fills, at most


@dataclasses.dataclass
class Stats:
    """What the engine did so far."""

    dispatches: int = 0
    prefilled_tokens: int = 0  # prompt tokens fed, padding not counted
    reused_tokens: int = 0  # prompt tokens that did not have to be
    sampled_tokens: int = 0  # those behind a stop string included
    lane_steps: int = 0  # lanes x steps computed: sampled_tokens / lane_steps is the useful share


class Engine:
    """Serves one base model and the adapters stacked on it. Not thread-safe: drive it from one thread."""

    def __init__(
        self,
        params: Any,
        config: ModelConfig,
        settings: EngineSettings,
        *,
        adapters: Any = None,
        adapter_scale: float = 1.0,
        policies: Sequence[str] = (),
        to_text: Callable[[Sequence[int]], str] | None = None,
        measured: bool = False,
    ):
        """policies names the adapters in their stacked order; to_text decodes tokens, for stop strings.

        The widths and lengths of `measured` settings are known to agree to the bit; others are measured first, and
        those that do not are left out of the engine's own `settings`.
        """
        if len(set(policies)) < len(policies):
            raise ValueError(f"policies names one twice: {', '.join(policies)}")
        if adapters is not None and len(policies) > num_adapters(adapters):
            raise ValueError(f"{len(policies)} policies are named for {num_adapters(adapters)} adapters")
        self._mesh = mesh_of(params)
        if not measured:
            settings = stable_shapes(params, adapters, config, settings, self._mesh, float(adapter_scale))
        self.config, self.settings, self.stats = config, settings, Stats()
        self._params, self._adapters, self._scale = params, adapters, float(adapter_scale)
        self._adapter_of: dict[str | None, int] = {None: -1}
        self._adapter_of |= {name: -1 if adapters is None else i for i, name in enumerate(policies)}
        self._version = 0  # of the weights: how often they were replaced
        self._to_text = to_text
        self._in_lanes: dict[int, Waiting] = {}  # the requests in lanes, by ticket
        self._under_way: programs.Sampled | None = None  # what the dispatch under way will have sampled
        self._next_ticket = 0
        self._admission = Admission(settings)
        self._prefix_cache = Cache((), ())
        self._cache: Cache
        self._table: LaneTable
        self.abandon()

    @property
    def pending(self) -> int:
        """How many requests are not finished."""
        return len(self._admission) + len(self._in_lanes)

    def submit(self, request: Request) -> int:
        """Queue a request, at any time; its completion comes out of a later `step` under the returned ticket."""
        check(request, self.config, self.settings, self._adapter_of, self._to_text)
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        owner = request.policy, self._version
        waiting = Waiting(ticket, request, owner, self._adapter_of[request.policy])
        self._admission.submit(waiting, self._columns(request))
        return ticket

    def step(self) -> list[tuple[int, Completion]]:
        """Wait for one dispatch and return what finished, in the order of lanes. After an error: `abandon()`."""
        if not self.pending:
            return []
        self._under_way = self._under_way or self._dispatch()
        out = fetch(self._under_way)
        self._under_way = None
        self._check_finite(out)
        self.stats.dispatches += 1
        self.stats.sampled_tokens += self._table.record(out)
        self.stats.lane_steps += out.sampled.size
        finished = self._finished()
        # With lanes to spare, what the caller submits on seeing what finished is waited for.
        lanes = self.settings.widths_at(self._admission.turn)[0]
        full = len(self._in_lanes) + self._admission.ready >= lanes
        if self.pending and (full or not finished):
            self._under_way = self._dispatch()
        return finished

    def update(self, *, params: Any = None, adapters: Any = None) -> None:
        """Serve new weights from the next request on. Refused while requests are under way."""
        if self.pending:
            raise RuntimeError(
                f"{self.pending} requests are under way: finish them before the weights change"
            )
        for what, new, old in (("params", params, self._params), ("adapters", adapters, self._adapters)):
            if new is not None and _shapes(new) != _shapes(old):
                raise ValueError(f"the new {what} are not of the shapes that this engine was built with")
        self._params = self._params if params is None else params
        self._adapters = self._adapters if adapters is None else adapters
        self._version += 1
        self._admission = Admission(self.settings)

    def abandon(self) -> None:
        """Start over: drop every request that is not finished, and every cached prompt.

        Whatever moment the engine was stopped at, what follows is as from a new one.
        """
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # it holds the caches until it ends
            jax.block_until_ready(self._under_way)
        self._under_way = None
        # If every request came to its end, all that was cached is known to be finite.
        if self.pending or not _is_whole(self._prefix_cache):
            self._prefix_cache = Cache((), ())  # the old one goes before the new one comes
            self._prefix_cache = self._empty(self.settings.prefixes, self.settings.context)
        self._in_lanes.clear()
        self._admission = Admission(self.settings)
        self._open_lanes(self.settings.lanes, self.settings.lengths[0])

    def warm_up(self) -> None:
        """Compile every program this engine can need."""
        if self.pending:
            raise RuntimeError("warm up before requests are submitted")
        settings, nowhere = self.settings, next(self._parts([(0, NOWHERE)]))
        for chunk in settings.chunks:
            for start in {0, settings.context - 1}:
                self._prefill([Feed(NOWHERE, (0,), start, -1)], chunk)
        self._prefix_cache = programs.copy_rows_within(self._prefix_cache, *nowhere)
        for width, length in settings.shapes:
            self._open_lanes(width, length)
            self._cache = programs.copy_rows(self._prefix_cache, self._cache, *nowhere)
            self._prefix_cache = programs.copy_rows(self._cache, self._prefix_cache, *nowhere)
            self._decode()
            for one, other in itertools.pairwise((*settings.widths, *settings.widths[-2::-1])):
                if one == width:
                    programs.take(self._empty(width, length), np.zeros(other, np.int32))
            for longer in [n for w, n in settings.shapes if w == width and n > length][:1]:
                self._cache = programs.grow(self._cache, longer)
        self._open_lanes(settings.lanes, settings.lengths[0])

    def _dispatch(self) -> programs.Sampled:
        """Admit what fits and decode; does not wait."""
        self._fit()
        self._admit()
        self._reach(self._table.reach + self.settings.steps)
        return self._decode()

    # -- lanes and their cache ------------------------------------------------------------------------------

    def _empty(self, rows: int, length: int) -> Cache:
        return empty_cache(self.config, rows, length, self._mesh)

    def _open_lanes(self, width: int, length: int) -> None:
        """Start over with idle lanes."""
        self._cache = Cache((), ())  # the old one goes before the new one comes
        self._cache = self._empty(width, length)
        settings = self.settings
        self._table = LaneTable(width, settings.context, settings.stops, settings.features)

    def _fit(self) -> None:
        """Turn to the requests that are served next, at the narrowest width that holds all, those that wait included.

        Where none does: all lanes.
        """
        live = len(self._in_lanes)
        self._admission.advance(idle=not live)
        widths = self.settings.widths_at(self._admission.turn)
        opening = self.settings.opening_at(self._admission.turn)
        best = min((width for width in widths if width >= self.pending), default=widths[0])
        if not live and (self._cache.rows, self._cache.length) != (best, opening):
            self._open_lanes(best, opening)
        for width in sorted(w for w in widths if self._cache.rows < w <= best):  # one rung at a time
            self._take_lanes(np.arange(width) % self._cache.rows, self._cache.rows)
        for width in (w for w in widths if best <= w < self._cache.rows):
            occupied_first = np.argsort(self._table.tickets == FREE, kind="stable")
            self._take_lanes(occupied_first[:width], width)

    def _take_lanes(self, rows: np.ndarray, real: int) -> None:
        self._cache = programs.take(self._cache, rows.astype(np.int32))
        self._table.take(rows, real)

    def _reach(self, length: int) -> None:
        """Let the cache grow, rung by rung, until `length` columns fit or it is as long as it may become."""
        longest = self.settings.longest_at(self._admission.turn)
        for rung in self.settings.lengths:
            if self._cache.length < min(length, longest) and rung > self._cache.length:
                self._cache = programs.grow(self._cache, rung)

    def _decode(self) -> programs.Sampled:
        self._cache, out = programs.decode(
            self._params,
            self._adapters,
            self._cache,
            self._table.lanes,
            config=self.config,
            features=self.settings.features,
            steps=self.settings.steps,
            scale=self._scale,
        )
        return out

    # -- admission ------------------------------------------------------------------------------------------

    def _columns(self, request: Request) -> int:
        """How many columns of a lane the request may come to need."""
        return len(request.tokens) + request.max_new_tokens

    def _admit(self) -> None:
        """Fill free lanes, wave by wave."""
        free = np.flatnonzero(self._table.tickets == FREE).tolist()
        while (wave := self._admission.wave(free)).seats:
            for part in self._parts(wave.moves):
                self._prefix_cache = programs.copy_rows_within(self._prefix_cache, *part)
            self._prefill_all(wave.feeds)
            self._reach(max(len(waiting.request.tokens) for *_, waiting in wave.seats))
            for part in self._parts([(row, lane) for lane, row, _ in wave.seats if row != NOWHERE]):
                self._cache = programs.copy_rows(self._prefix_cache, self._cache, *part)
            for lane, _, waiting in wave.seats:
                self._table.occupy(
                    lane, waiting.ticket, waiting.request, waiting.adapter, self.config.vocab_size
                )
                self._in_lanes[waiting.ticket] = waiting
            fed = sum(len(feed.tokens) for feed in wave.feeds)
            self.stats.prefilled_tokens += fed
            self.stats.reused_tokens += sum(len(waiting.prefix) for *_, waiting in wave.seats) - fed
            free = free[len(wave.seats) :]

    def _parts(self, pairs: list[tuple[int, int]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(from, to) pairs in order, as pairs of index arrays of the one length that copies are compiled for."""
        size = min(COPY_ROWS, self.settings.widths_at(len(self.settings.lengths) - 1)[0])
        for i in range(0, len(pairs), size):
            source, target = np.zeros(size, np.int32), np.full(size, NOWHERE, np.int32)
            part = np.array(pairs[i : i + size], np.int32)
            source[: len(part)], target[: len(part)] = part.T
            yield source, target

    def _prefill_all(self, feeds: list[Feed]) -> None:
        """Prefill prompts grouped by the chunk they need; what is longer than the largest chunk takes several."""
        largest = self.settings.chunks[-1]
        while feeds:
            groups: dict[tuple[int, bool], list[Feed]] = collections.defaultdict(list)
            for feed in feeds:
                chunk = self.settings.chunk_of(len(feed.tokens))
                groups[chunk, feed.start > 0].append(feed._replace(tokens=feed.tokens[:chunk]))
            for (chunk, _), group in sorted(groups.items()):
                size = self.settings.prefill_rows(chunk)
                for i in range(0, len(group), size):
                    self._prefill(group[i : i + size], chunk)
            feeds = [Feed(r, t[largest:], s + largest, a) for r, t, s, a in feeds if len(t) > largest]

    def _prefill(self, group: list[Feed], chunk: int) -> None:
        size = self.settings.prefill_rows(chunk)
        rows, starts = np.full(size, NOWHERE, np.int32), np.zeros(size, np.int32)
        tokens, adapters = np.zeros((size, chunk), np.int32), np.full(size, -1, np.int32)
        for i, feed in enumerate(group):
            rows[i], starts[i], adapters[i] = feed.row, feed.start, feed.adapter
            tokens[i, : len(feed.tokens)] = feed.tokens
        self._prefix_cache = programs.prefill(
            self._params,
            self._adapters,
            self._prefix_cache,
            rows,
            tokens,
            starts,
            adapters,
            config=self.config,
            # A prompt that continues a cached one looks over the whole context.
            attended=self.settings.context if starts.any() else min(chunk, self.settings.context),
            scale=self._scale,
        )

    # -- results --------------------------------------------------------------------------------------------

    def _check_finite(self, out: programs.Sampled) -> None:
        broken = np.flatnonzero((out.sampled & ~np.isfinite(out.logprob)).any(axis=0))
        if broken.size:
            ticket = int(self._table.tickets[broken[0]])
            raise FloatingPointError(
                f"the model gives no finite log-probability for request {ticket} (prompt of "
                f"{len(self._in_lanes[ticket].request.tokens)} tokens): are its weights finite?"
            )

    def _finished(self) -> list[tuple[int, Completion]]:
        done = []
        kept: dict[int, int] = {}  # row of the prefix cache -> the lane that it is to hold
        for lane in np.flatnonzero(self._table.tickets != FREE).tolist():
            ticket = int(self._table.tickets[lane])
            request = self._in_lanes[ticket].request
            length = self._stop_string(lane, request) if request.stop_strings else None
            if length is None and self._table.lanes.active[lane]:
                continue
            completion = self._table.leave(lane, request, length)
            owner = self._in_lanes.pop(ticket).owner
            if request.keep:
                row = self._admission.keep(owner, (*request.tokens, *completion.tokens[:-1]))
                if row is not None:
                    kept[row] = lane
            done.append((ticket, completion))
        for part in self._parts([(lane, row) for row, lane in kept.items()]):
            self._prefix_cache = programs.copy_rows(self._cache, self._prefix_cache, *part)
        return done

    def _stop_string(self, lane: int, request: Request) -> int | None:
        """The number of tokens after which a stop string stands in the text; None if there is none yet."""
        assert self._to_text is not None  # checked at submission
        tokens = self._table.sampled(lane)
        if len(tokens) < request.min_new_tokens:
            return None
        for n in (len(tokens), *range(max(1, request.min_new_tokens), len(tokens))):
            found = any(s in self._to_text(tokens[:n]) for s in request.stop_strings)
            if n == len(tokens) and not found:
                return None
            if found and n < len(tokens):
                return n
        return len(tokens)


def mesh_of(params: Any) -> Mesh | None:
    """The mesh that sharded parameters lie on, if they do."""
    sharding = getattr(jax.tree.leaves(params)[0], "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) else None


def _is_whole(cache: Cache) -> bool:
    """Whether it is there: a program that failed, or was stopped halfway, may have given it up."""
    if not cache.keys or any(leaf.is_deleted() for leaf in jax.tree.leaves(cache)):
        return False
    try:
        jax.block_until_ready(cache)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
