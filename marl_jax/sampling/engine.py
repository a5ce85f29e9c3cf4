"""The engine: static shapes under a moving crowd.

Requests wait in a queue; as many as there are free lanes are admitted, one dispatch decodes a few tokens in every
lane, and what finished is handed out. A prompt that several requests share is prefilled once and copied.

    submit -> queue -> prefix cache (prefill) -> lanes (decode, n tokens per dispatch) -> completion

Where requests wait for lanes, `step` leaves the next dispatch under way, so that the device works while the caller
looks at what finished. What is submitted meanwhile enters with the dispatch after that.
"""

import bisect
import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from marl_jax.models import ModelConfig
from marl_jax.models.decode import Cache, empty_cache
from marl_jax.models.lora import num_adapters
from marl_jax.sampling import programs
from marl_jax.sampling.lanes import FREE, LaneTable
from marl_jax.sampling.plan import EngineSettings
from marl_jax.sampling.prefixes import Owner, Prefixes, Tokens
from marl_jax.sampling.requests import Completion, Request, check
from marl_jax.sampling.stability import stable_shapes
from marl_jax.sampling.transfer import fetch

COPY_ROWS = 64  # how many lanes one copy from the prefix cache fills
LOOK_AHEAD = 128  # how many waiting requests are looked through for prompts to prefill early
NOWHERE = 1 << 30  # a row out of range: reads there are harmless, writes are dropped


@dataclasses.dataclass
class Stats:
    """What the engine did so far."""

    dispatches: int = 0
    prefilled_tokens: int = 0  # prompt tokens fed, padding not counted
    reused_tokens: int = 0  # prompt tokens that did not have to be
    sampled_tokens: int = 0  # those behind a stop string included
    lane_steps: int = 0  # lanes x steps computed: sampled_tokens / lane_steps is the useful share


class Feed(NamedTuple):
    """Prompt tokens to put into a row of the prefix cache, from position `start` on."""

    row: int
    tokens: Tokens
    start: int
    adapter: int


@dataclasses.dataclass
class Wave:
    """Requests that enter lanes together, and what has to happen to the prefix cache first, in this order."""

    seats: list[tuple[int, int, int, Request]] = dataclasses.field(
        default_factory=list
    )  # lane, row, ticket, ..
    locked: set[int] = dataclasses.field(default_factory=set)  # the rows that it uses
    moves: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # rows to copy, from and to
    feeds: list[Feed] = dataclasses.field(default_factory=list)


Queue = collections.deque[tuple[int, Request]]  # tickets and their requests


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
        self._queues: list[Queue] = [collections.deque() for _ in settings.lengths]
        self._turn = 0  # the queue that is being served
        self._requests: dict[int, Request] = {}  # those in lanes, by ticket
        self._under_way: programs.Sampled | None = None  # what the dispatch under way will have sampled
        self._next_ticket = 0
        self._prefixes: Prefixes
        self._prefix_cache: Cache
        self._cache: Cache
        self._table: LaneTable
        self.abandon()

    @property
    def pending(self) -> int:
        """How many requests are not finished."""
        return sum(map(len, self._queues)) + len(self._requests)

    def submit(self, request: Request) -> int:
        """Queue a request, at any time; its completion comes out of a later `step` under the returned ticket."""
        check(request, self.config, self.settings, self._adapter_of, self._to_text)
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        rung = bisect.bisect_left(self.settings.lengths, self._columns(request))
        self._queues[rung].append((ticket, request))
        self._prefixes.want(self._owner(request), request.tokens[:-1])
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
        if self.pending and (self.pending >= self.settings.lanes or not finished):
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
        self._prefixes = Prefixes(self.settings.prefixes)

    def abandon(self) -> None:
        """Start over: drop every request that is not finished, and every cached prompt.

        Whatever moment the engine was stopped at, what follows is as from a new one.
        """
        for queue in self._queues:
            queue.clear()
        self._turn = 0
        self._requests.clear()
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # it holds the caches until it ends
            jax.block_until_ready(self._under_way)
        self._under_way = None
        self._prefixes = Prefixes(self.settings.prefixes)
        self._prefix_cache = Cache((), ())  # the old one goes before the new one comes
        self._prefix_cache = self._empty(self.settings.prefixes, self.settings.context)
        self._open_lanes(self.settings.lanes, self.settings.lengths[0])

    def warm_up(self) -> None:
        """Compile every program this engine can need."""
        if self.pending:
            raise RuntimeError("warm up before requests are submitted")
        settings, nowhere = self.settings, next(_parts([(0, NOWHERE)]))
        widths = settings.widths
        for chunk in settings.chunks:
            for start in {0, settings.context - 1}:
                self._prefill([Feed(NOWHERE, (0,), start, -1)], chunk)
        self._prefix_cache = programs.copy_rows_within(self._prefix_cache, *nowhere)
        for length, longer in zip(settings.lengths, (*settings.lengths[1:], None)):
            for wider, width, narrower in zip((None, *widths), widths, (*widths[1:], None)):
                self._open_lanes(width, length)
                self._cache = programs.copy_rows(self._prefix_cache, self._cache, *nowhere)
                self._prefix_cache = programs.copy_rows(self._cache, self._prefix_cache, *nowhere)
                self._decode()
                for other in filter(None, (wider, narrower)):
                    programs.take(self._empty(width, length), np.zeros(other, np.int32))
                if longer:
                    programs.grow(self._empty(width, length), longer)
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
        """The narrowest width that holds all requests, those that wait included; all lanes where none does."""
        live, widths = len(self._requests), self.settings.widths
        best = min((width for width in widths if width >= self.pending), default=widths[0])
        if not live and (self._cache.rows, self._cache.length) != (best, self.settings.lengths[0]):
            self._open_lanes(best, self.settings.lengths[0])
        for width in sorted(w for w in widths if self._cache.rows < w <= best):  # one rung at a time
            self._take_lanes(np.arange(width) % self._cache.rows, self._cache.rows)
        for width in (w for w in widths if best <= w < self._cache.rows):
            occupied_first = np.argsort(self._table.tickets == FREE, kind="stable")
            self._take_lanes(occupied_first[:width], width)

    def _take_lanes(self, rows: np.ndarray, real: int) -> None:
        self._cache = programs.take(self._cache, rows.astype(np.int32))
        self._table.take(rows, real)

    def _reach(self, length: int) -> None:
        """Let the cache grow, rung by rung, until `length` columns fit or the whole context is there."""
        for rung in self.settings.lengths:
            if self._cache.length < min(length, self.settings.context) and rung > self._cache.length:
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
        """How many columns of a cache the request may come to need."""
        return len(request.tokens) + request.max_new_tokens

    def _waiting(self) -> Queue | None:
        """The queue to take from. One is emptied before the next: every lane attends as far as the longest needs."""
        order = (*range(self._turn, len(self._queues)), *range(self._turn))
        self._turn = next((i for i in order if self._queues[i]), self._turn)
        return self._queues[self._turn] or None

    def _admit(self) -> None:
        """Fill free lanes from the queue, in waves of as many prompts as the prefix cache can hold at once."""
        free = collections.deque(np.flatnonzero(self._table.tickets == FREE).tolist())
        while free and self._waiting():
            wave = Wave()
            while free and (queue := self._waiting()):
                ticket, request = queue[0]
                row = self._prefix_row(request, wave)
                if row is None:
                    break
                queue.popleft()
                wave.seats.append((free.popleft(), row, ticket, request))
                self.stats.reused_tokens += len(request.tokens) - 1  # less what is fed for it
            for part in _parts(wave.moves):
                self._prefix_cache = programs.copy_rows_within(self._prefix_cache, *part)
            self._look_ahead(wave)
            self._prefill_all(wave.feeds)
            self._reach(max(len(request.tokens) for *_, request in wave.seats))
            for part in _parts([(row, lane) for lane, row, *_ in wave.seats if row != NOWHERE]):
                self._cache = programs.copy_rows(self._prefix_cache, self._cache, *part)
            for lane, _, ticket, request in wave.seats:
                adapter = self._adapter_of[request.policy]
                self._table.occupy(lane, ticket, request, adapter, self.config.vocab_size)
                self._requests[ticket] = request
                self._prefixes.served(self._owner(request), request.tokens[:-1])

    def _prefix_row(self, request: Request, wave: Wave) -> int | None:
        """The row that holds, or will hold, the request's prompt; None if the wave uses every row."""
        prefix, owner = request.tokens[:-1], self._owner(request)
        if not prefix:
            return NOWHERE
        row = self._prefixes.find(owner, prefix)
        if row is None:
            kept, start = self._prefixes.longest(owner, prefix)
            row = self._prefixes.add(owner, prefix, wave.locked | {kept})
            if row is None:  # then the kept row itself is continued, if it may be given up
                row = self._prefixes.add(owner, prefix, wave.locked)
            if row is None:
                return None
            if start and row != kept:
                wave.moves.append((kept, row))
            wave.feeds.append(self._feed(row, request, start))
        wave.locked.add(row)
        return row

    def _look_ahead(self, wave: Wave) -> None:
        """Fill the rows that prefills would leave empty with prompts that wait for a lane."""
        begun = collections.Counter(self._chunk(len(feed.tokens)) for feed in wave.feeds if not feed.start)
        empty = {chunk: -count % self.settings.prefill_rows(chunk) for chunk, count in begun.items()}
        window = LOOK_AHEAD if any(empty.values()) else 0
        for _, request in itertools.islice(self._queues[self._turn], window):
            length = len(request.tokens) - 1
            chunk = self._chunk(length)
            if not 0 < length <= chunk or not empty.get(chunk):
                continue
            prefix, owner = request.tokens[:-1], self._owner(request)
            if self._prefixes.find(owner, prefix) is not None or self._prefixes.longest(owner, prefix)[1]:
                continue
            row = self._prefixes.add(owner, prefix, wave.locked, spare=True)
            if row is None:
                break
            wave.feeds.append(self._feed(row, request, 0))
            wave.locked.add(row)
            empty[chunk] -= 1

    def _feed(self, row: int, request: Request, start: int) -> Feed:
        tokens = request.tokens[start:-1]
        self.stats.prefilled_tokens += len(tokens)
        self.stats.reused_tokens -= len(tokens)
        return Feed(row, tokens, start, self._adapter_of[request.policy])

    def _chunk(self, length: int) -> int:
        """The chunk that takes so many tokens, or the first part of them."""
        chunks = self.settings.chunks
        return next((chunk for chunk in chunks if chunk >= length), chunks[-1])

    def _prefill_all(self, feeds: list[Feed]) -> None:
        """Prefill prompts grouped by the chunk they need; what is longer than the largest chunk takes several."""
        largest = self.settings.chunks[-1]
        while feeds:
            groups: dict[tuple[int, bool], list[Feed]] = collections.defaultdict(list)
            for feed in feeds:
                chunk = self._chunk(len(feed.tokens))
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
                f"{len(self._requests[ticket].tokens)} tokens): are its weights finite?"
            )

    def _finished(self) -> list[tuple[int, Completion]]:
        done = []
        kept: dict[int, int] = {}  # row of the prefix cache -> the lane that it is to hold
        for lane in np.flatnonzero(self._table.tickets != FREE).tolist():
            ticket = int(self._table.tickets[lane])
            request = self._requests[ticket]
            length = self._stop_string(lane, request) if request.stop_strings else None
            if length is None and self._table.lanes.active[lane]:
                continue
            completion = self._table.leave(lane, request, length)
            del self._requests[ticket]
            if request.keep:
                row = self._kept_row(self._owner(request), (*request.tokens, *completion.tokens[:-1]))
                if row is not None:
                    kept[row] = lane
            done.append((ticket, completion))
        for part in _parts([(lane, row) for row, lane in kept.items()]):
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

    def _kept_row(self, owner: Owner, tokens: Tokens) -> int | None:
        """The row to copy a lane to, so that a later turn can begin with these tokens; None if one holds them."""
        if self._prefixes.keep(owner, tokens):
            return None
        row = self._prefixes.add(owner, tokens, set(), kept=True)
        assert row is not None  # nothing is locked between admissions
        return row

    def _owner(self, request: Request) -> Owner:
        return request.policy, self._version


def mesh_of(params: Any) -> Mesh | None:
    """The mesh that sharded parameters lie on, if they do."""
    sharding = getattr(jax.tree.leaves(params)[0], "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) else None


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def _parts(pairs: list[tuple[int, int]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(from, to) pairs in order, as pairs of index arrays of the one length that copies are compiled for."""
    for i in range(0, len(pairs), COPY_ROWS):
        source, target = np.zeros(COPY_ROWS, np.int32), np.full(COPY_ROWS, NOWHERE, np.int32)
        part = np.array(pairs[i : i + COPY_ROWS], np.int32)
        source[: len(part)], target[: len(part)] = part.T
        yield source, target
