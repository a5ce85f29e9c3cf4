"""The engine: static shapes under a moving crowd.

Requests wait in a queue; each `step` admits as many as there are free lanes, decodes a few tokens in every lane
with one dispatch, and hands out what finished. A prompt that several requests share is prefilled once and copied.

    submit -> queue -> prefix cache (prefill) -> lanes (decode, n tokens per dispatch) -> completion
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
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
    ):
        """policies names the adapters in their stacked order; to_text decodes tokens, for stop strings."""
        if len(set(policies)) < len(policies):
            raise ValueError(f"policies names one twice: {', '.join(policies)}")
        if adapters is not None and len(policies) > num_adapters(adapters):
            raise ValueError(f"{len(policies)} policies are named for {num_adapters(adapters)} adapters")
        self._mesh = mesh_of(params)
        settings = stable_shapes(params, adapters, config, settings, self._mesh, float(adapter_scale))
        self.config, self.settings, self.stats = config, settings, Stats()
        self._params, self._adapters, self._scale = params, adapters, float(adapter_scale)
        self._adapter_of: dict[str | None, int] = {None: -1}
        self._adapter_of |= {name: -1 if adapters is None else i for i, name in enumerate(policies)}
        self._version = 0  # of the weights: how often they were replaced
        self._to_text = to_text
        self._queue: collections.deque[tuple[int, Request]] = collections.deque()
        self._requests: dict[int, Request] = {}  # those in lanes, by ticket
        self._next_ticket = 0
        self._prefixes: Prefixes
        self._prefix_cache: Cache
        self._cache: Cache
        self._table: LaneTable
        self.abandon()

    @property
    def pending(self) -> int:
        """How many requests are not finished."""
        return len(self._queue) + len(self._requests)

    def submit(self, request: Request) -> int:
        """Queue a request, at any time; its completion comes out of a later `step` under the returned ticket."""
        check(request, self.config, self.settings, self._adapter_of, self._to_text)
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self._queue.append((ticket, request))
        self._prefixes.want(self._owner(request), request.tokens[:-1])
        return ticket

    def step(self) -> list[tuple[int, Completion]]:
        """Admit what fits, decode one dispatch, return what finished, in the order of lanes."""
        if not self.pending:
            return []
        self._fit()
        self._admit()
        self._reach(self._table.reach + self.settings.steps)
        out = fetch(self._decode())
        self._check_finite(out)
        self.stats.dispatches += 1
        self.stats.sampled_tokens += self._table.record(out)
        self.stats.lane_steps += out.sampled.size
        return self._finished()

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
        self._queue.clear()
        self._requests.clear()
        self._prefixes = Prefixes(self.settings.prefixes)
        self._prefix_cache = Cache((), ())  # the old one goes before the new one comes
        self._prefix_cache = self._empty(self.settings.prefixes, self.settings.context)
        self._open_lanes(self.settings.lanes, self.settings.lengths[0])

    def warm_up(self) -> None:
        """Compile every program this engine can need."""
        if self.pending:
            raise RuntimeError("warm up before requests are submitted")
        settings, nowhere = self.settings, _padded([])
        for chunk in settings.chunks:
            for start in {0, settings.context - 1}:
                self._prefill([Feed(NOWHERE, (0,), start, -1)], chunk)
        self._prefix_cache = programs.copy_rows_within(self._prefix_cache, *nowhere)
        for length, longer in zip(settings.lengths, (*settings.lengths[1:], None)):
            for width, narrower in zip(settings.widths, (*settings.widths[1:], None)):
                self._open_lanes(width, length)
                self._cache = programs.copy_rows(self._prefix_cache, self._cache, *nowhere)
                self._prefix_cache = programs.copy_rows(self._cache, self._prefix_cache, *nowhere)
                self._decode()
                for other in {narrower or settings.lanes, settings.lanes} - {width}:
                    programs.take(self._cache, np.zeros(other, np.int32))
                if longer:
                    programs.grow(self._cache, longer)
        self._open_lanes(settings.lanes, settings.lengths[0])

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
        """Choose the width: all lanes while requests wait, fewer as the batch thins out."""
        live, widths, now = len(self._requests), self.settings.widths, self._cache.rows
        if not live and (now, self._cache.length) != (widths[0], self.settings.lengths[0]):
            self._open_lanes(widths[0], self.settings.lengths[0])
        elif self._queue and now < widths[0]:
            self._take_lanes(np.arange(widths[0]) % now, now)
        elif not self._queue:
            for width in (w for w in widths if live <= w < now):
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

    def _admit(self) -> None:
        """Fill free lanes from the queue, in waves of as many prompts as the prefix cache can hold at once."""
        free = collections.deque(np.flatnonzero(self._table.tickets == FREE).tolist())
        while free and self._queue:
            wave: list[tuple[int, int, int, Request]] = []  # lane, prefix row, ticket, request
            locked: set[int] = set()
            feeds: list[Feed] = []
            while free and self._queue:
                ticket, request = self._queue[0]
                row = self._prefix_row(request, locked, feeds)
                if row is None:
                    break
                self._queue.popleft()
                wave.append((free.popleft(), row, ticket, request))
            self._prefill_all(feeds)
            self._reach(max(len(request.tokens) for *_, request in wave))
            pairs = [(row, lane) for lane, row, *_ in wave if row != NOWHERE]
            for i in range(0, len(pairs), COPY_ROWS):
                part = _padded(pairs[i : i + COPY_ROWS])
                self._cache = programs.copy_rows(self._prefix_cache, self._cache, *part)
            for lane, _, ticket, request in wave:
                adapter = self._adapter_of[request.policy]
                self._table.occupy(lane, ticket, request, adapter, self.config.vocab_size)
                self._requests[ticket] = request
                self._prefixes.served(self._owner(request), request.tokens[:-1])

    def _prefix_row(self, request: Request, locked: set[int], feeds: list[Feed]) -> int | None:
        """The row that holds, or after `feeds` will hold, the request's prompt; None if every row is locked."""
        prefix, owner = request.tokens[:-1], self._owner(request)
        if not prefix:
            return NOWHERE
        row = self._prefixes.find(owner, prefix)
        start = len(prefix)
        if row is None:
            kept, start = self._prefixes.longest(owner, prefix)
            row = self._prefixes.add(owner, prefix, locked | {kept})
            if row is None:  # then the kept row itself is continued, if it may be given up
                row = self._prefixes.add(owner, prefix, locked)
            if row is None:
                return None
            if start and row != kept:
                self._prefix_cache = programs.copy_rows_within(self._prefix_cache, *_padded([(kept, row)]))
            feeds.append(Feed(row, prefix[start:], start, self._adapter_of[request.policy]))
        self.stats.prefilled_tokens += len(prefix) - start
        self.stats.reused_tokens += start
        locked.add(row)
        return row

    def _prefill_all(self, feeds: list[Feed]) -> None:
        """Prefill prompts grouped by the chunk they need; what is longer than the largest chunk takes several."""
        largest = self.settings.chunks[-1]
        while feeds:
            groups: dict[tuple[int, bool], list[Feed]] = collections.defaultdict(list)
            for feed in feeds:
                chunk = next((c for c in self.settings.chunks if c >= len(feed.tokens)), largest)
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
        for lane in np.flatnonzero(self._table.tickets != FREE).tolist():
            ticket = int(self._table.tickets[lane])
            request = self._requests[ticket]
            length = self._stop_string(lane, request) if request.stop_strings else None
            if length is None and self._table.lanes.active[lane]:
                continue
            completion = self._table.leave(lane, request, length)
            del self._requests[ticket]
            if request.keep:
                self._keep(lane, self._owner(request), (*request.tokens, *completion.tokens[:-1]))
            done.append((ticket, completion))
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

    def _keep(self, lane: int, owner: Owner, tokens: Tokens) -> None:
        """Hold the lane's cache for a later turn that begins with these tokens."""
        if not self._prefixes.keep(owner, tokens):
            row = self._prefixes.add(owner, tokens, set(), kept=True)
            assert row is not None  # nothing is locked between admissions
            self._prefix_cache = programs.copy_rows(self._cache, self._prefix_cache, *_padded([(lane, row)]))

    def _owner(self, request: Request) -> Owner:
        return request.policy, self._version


def mesh_of(params: Any) -> Mesh | None:
    """The mesh that sharded parameters lie on, if they do."""
    sharding = getattr(jax.tree.leaves(params)[0], "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) else None


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def _padded(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """(from, to) pairs as two index arrays of the one length that copies are compiled for."""
    source, target = np.zeros(COPY_ROWS, np.int32), np.full(COPY_ROWS, NOWHERE, np.int32)
    for i, (a, b) in enumerate(pairs):
        source[i], target[i] = a, b
    return source, target
