"""The engine: continuous batching of requests over lanes of static shapes.

Requests wait to be admitted to free lanes, one dispatch decodes a few tokens in every lane of a bank, and
finished completions are returned. A prompt that several requests share is prefilled once and copied.

    submit -> admission -> prefix cache (prefill) -> bank of lanes (decode, n tokens per dispatch) -> completion

Banks take turns, always in the same order: `step` waits for one while the others decode. If no lane would stay free, or
nothing finished, `step` also begins the bank's next dispatch before it returns: the device works while the caller looks
at the completions, and a request that the caller then submits enters with the dispatch after that one.
"""

import bisect
import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from marl_jax.errors import UserError
from marl_jax.models import ModelConfig
from marl_jax.models.decode import Cache, empty_cache
from marl_jax.models.lora import num_adapters
from marl_jax.models.weight_table import check_mesh
from marl_jax.sampling import programs
from marl_jax.sampling.admission import NOWHERE, Admission, Feed, Waiting
from marl_jax.sampling.banks import Bank, Rungs
from marl_jax.sampling.lanes import LaneTable
from marl_jax.sampling.requests import Completion, Request, check
from marl_jax.sampling.rungs import FREE
from marl_jax.sampling.shapes import EngineSettings
from marl_jax.sampling.stability import stable_shapes
from marl_jax.stopwatch import Stopwatch


class NotFinite(UserError, FloatingPointError):
    """The logits of a model are not finite, so no token can be sampled."""


@dataclasses.dataclass
class Stats:
    """Counts of the engine's work so far."""

    dispatches: int = 0  # decode programs that have ended
    prefilled_tokens: int = 0  # prompt tokens fed, padding not counted
    reused_tokens: int = 0  # prompt tokens that were in the prefix cache already
    sampled_tokens: int = 0  # including tokens after a stop string
    lane_steps: int = 0  # lanes x steps computed: sampled_tokens / lane_steps is the useful share
    moved: int = 0  # swaps of two lanes
    given_up: int = 0  # lanes that were taken from a younger request for an older one
    recomputed_tokens: int = 0  # fed again when those requests continued; not in prefilled_tokens


class Engine:
    """Serves one base model and the adapters stacked on it. Not thread-safe: drive it from one thread.

    On a CPU each of several banks decodes in a thread of its own. JAX settings made by a `with` statement do not apply
    there.
    """

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
        """`policies` names the adapters in their stacked order; `to_text` decodes tokens, for stop strings.

        `measured` says that the widths and lengths of the settings are known to agree to the bit. Otherwise they are
        measured here, and those that do not agree are removed from `self.settings`.
        """
        if len(set(policies)) < len(policies):
            raise ValueError(f"policies names a policy twice: {', '.join(policies)}")
        if adapters is not None and len(policies) > num_adapters(adapters):
            raise ValueError(f"{len(policies)} policies are named for {num_adapters(adapters)} adapters")
        self._mesh = mesh_of(params)
        if not measured:
            settings = stable_shapes(params, adapters, config, settings, self._mesh, float(adapter_scale))
        self.config, self.settings, self.stats = config, settings, Stats()
        self.watch = Stopwatch()  # time of the caller's thread in prefill and decode: dispatching and waiting
        self._params, self._adapters, self._scale = params, adapters, float(adapter_scale)
        self._adapter_of: dict[str | None, int] = {None: -1}
        self._adapter_of |= {name: -1 if adapters is None else i for i, name in enumerate(policies)}
        self._to_text = to_text
        self._next_ticket = 0
        self._admission = Admission(settings)
        self._prefix_cache = Cache((), ())
        banks = (Bank(config, settings, self._mesh) for _ in range(settings.banks))
        self._banks = collections.deque(banks)  # the first is next
        self.abandon()

    @property
    def pending(self) -> int:
        """How many requests are not finished."""
        return len(self._admission) + sum(len(bank.requests) for bank in self._banks)

    def check(self, request: Request) -> None:
        """Refuse, in one line, a request that this engine cannot serve."""
        check(request, self.config, self.settings, self._adapter_of, self._to_text)

    def submit(self, request: Request) -> int:
        """Queue a request, at any time; its completion comes out of a later `step` under the returned ticket."""
        self.check(request)
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self._admission.submit(Waiting(ticket, request, self._adapter_of[request.policy]))
        return ticket

    def step(self) -> list[tuple[int, Completion]]:
        """Wait for one dispatch and return the finished completions, in the order of lanes.

        After an error or an interrupt, call `abandon()`. If only the wait was interrupted, `step` may be called again.
        """
        if not self.pending:
            return []
        for bank in self._banks:
            if not bank.under_way:
                self._dispatch(bank)
        bank = next(bank for bank in self._banks if bank.under_way)
        with self.watch("prefill"):
            jax.block_until_ready(bank.fed)
        with self.watch("decode"):
            out = bank.wait()
        self._banks.rotate(-1 - self._banks.index(bank))  # its next turn is last
        self._check_finite(bank, out)
        self.stats.dispatches += 1
        self.stats.sampled_tokens += bank.table.record(out)
        self.stats.lane_steps += out.sampled.size
        finished = self._finished(bank)
        # With free lanes, the next dispatch waits for requests that the caller submits after these completions.
        if self.pending >= self.settings.lanes or (self.pending and not finished):
            self._dispatch(bank)
        return finished

    def update(self, *, params: Any = None, adapters: Any = None) -> None:
        """Serve new weights from the next request on. Raises while requests are unfinished."""
        if self.pending:
            raise RuntimeError(
                f"{self.pending} requests are under way: finish them before the weights change"
            )
        for what, new, old in (("params", params, self._params), ("adapters", adapters, self._adapters)):
            if new is not None and _shapes(new) != _shapes(old):
                raise ValueError(f"the new {what} differ in shape from those that this engine was built with")
        self._params = self._params if params is None else params
        self._adapters = self._adapters if adapters is None else adapters
        self._admission = Admission(self.settings)  # cached prompts were computed with the old weights

    def abandon(self) -> None:
        """Drop all unfinished requests and cached prompts; the engine is then like a new one.

        The engine may have been interrupted at any moment.
        """
        for bank in self._banks:
            bank.abandon()
        # If every request has finished, all cached values are known to be finite.
        if self.pending or not _is_usable(self._prefix_cache):
            self._prefix_cache = Cache((), ())  # frees the old one before the new one is allocated
            self._prefix_cache = empty_cache(
                self.config, self.settings.prefixes, self.settings.context, self._mesh
            )
        self._admission = Admission(self.settings)
        for bank in self._banks:
            bank.open(*self.settings.rungs)

    def _dispatch(self, bank: Bank) -> None:
        """Admit the requests that fit into the bank and begin to decode, if it has any; does not wait."""
        live, waiting = len(bank.requests), len(self._admission)
        if not live and not waiting:
            return
        if self.settings.lanes_at:
            self._move_up(bank)
            self._admit(bank)
            bank.table.held[:] = self._admission.places.held
        else:
            self._admission.advance()
            # Enough lanes for the bank's share of all requests, or for those that it has if they are more.
            share = -(-self.pending // self.settings.banks)
            wanted = min(live + waiting, max(live, share))
            widths = self.settings.widths
            best = min((width for width in widths if width >= wanted), default=widths[0])
            cache, shortest = bank.rungs[0], self.settings.lengths[0]
            if not live and (cache.rows, cache.length) != (best, shortest):
                bank.open((best, shortest))
            bank.fit(best)
            self._admit(bank)
            bank.reach(bank.table.reach + self.settings.steps)
        if bank.requests:
            with self.watch("decode"):
                bank.begin(self._decode)

    def _move_up(self, bank: Bank) -> None:
        """Move grown requests to longer rungs; if these are full, the youngest are held or give up their lanes."""
        table, admission = bank.table, self._admission
        given_up = []
        for lane in admission.grow(table.lanes.position, table.lanes.max_new - table.lanes.generated):
            waiting = bank.requests.pop(int(table.tickets[lane]))
            sampled = table.leave(lane, waiting.request)
            given_up.append(waiting._replace(sampled=sampled if sampled.tokens else None))
        admission.resume(given_up)
        bank.swap(swaps := admission.places.settle())
        self.stats.moved += len(swaps)
        self.stats.given_up += len(given_up)

    def _decode(self, rungs: Rungs, lanes: programs.Lanes) -> tuple[Rungs, programs.Sampled]:
        return programs.decode(
            self._params,
            self._adapters,
            rungs,
            lanes,
            config=self.config,
            features=self.settings.features.resolved(),
            steps=self.settings.steps,
            scale=self._scale,
        )

    # -- admission ------------------------------------------------------------------------------------------

    def _admit(self, bank: Bank) -> None:
        """Fill free lanes, wave by wave."""
        free = np.flatnonzero(bank.table.tickets == FREE).tolist()
        while (wave := self._admission.wave(free)).seats:
            bank.swap(wave.swaps)
            self.stats.moved += len(wave.swaps)
            for part in self._parts(wave.moves):
                self._prefix_cache = programs.copy_rows_within(self._prefix_cache, *part)
            with self.watch("prefill"):
                last = self._prefill_all(wave.feeds)
                bank.fed = bank.fed if last is None else last
            if not self.settings.lanes_at:
                bank.reach(max(len(waiting.request.tokens) for *_, waiting in wave.seats))
            for rung, pairs in bank.by_rung((lane, row) for lane, row, _ in wave.seats if row != NOWHERE):
                for part in self._parts([(row, lane) for lane, row in pairs]):
                    bank.rungs[rung] = programs.copy_rows(self._prefix_cache, bank.rungs[rung], *part)
            for lane, _, waiting in wave.seats:
                bank.table.occupy(lane, waiting, self.config.vocab_size)
                bank.requests[waiting.ticket] = waiting
            fed = sum(len(feed.tokens) for feed in wave.feeds if not feed.recomputed)
            prompt_tokens = sum(waiting.cached for *_, waiting in wave.seats if waiting.sampled is None)
            self.stats.prefilled_tokens += fed
            self.stats.reused_tokens += prompt_tokens - fed
            self.stats.recomputed_tokens += sum(len(feed.tokens) for feed in wave.feeds if feed.recomputed)
            free = free[len(wave.seats) :]

    def _parts(self, pairs: list[tuple[int, int]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(from, to) pairs in order, as pairs of index arrays of the one length that copies are compiled for."""
        size = self.settings.copied
        for i in range(0, len(pairs), size):
            source, target = np.zeros(size, np.int32), np.full(size, NOWHERE, np.int32)
            part = np.array(pairs[i : i + size], np.int32)
            source[: len(part)], target[: len(part)] = part.T
            yield source, target

    def _prefill_all(self, feeds: list[Feed]) -> jax.Array | None:
        """Prefill prompts grouped by the chunk they need; one longer than the largest chunk takes several prefills.

        Returns an array that is ready once all prompts are fed; None without prompts.
        """
        largest, fed = self.settings.chunks[-1], None
        while feeds:
            groups: dict[tuple[int, bool], list[Feed]] = collections.defaultdict(list)
            for feed in feeds:
                chunk = self.settings.chunk_of(len(feed.tokens))
                groups[chunk, feed.start > 0].append(feed._replace(tokens=feed.tokens[:chunk]))
            for (chunk, _), group in sorted(groups.items()):
                size = self.settings.prefill_rows(chunk)
                for i in range(0, len(group), size):
                    fed = self._prefill(group[i : i + size], chunk)
            feeds = [Feed(r, t[largest:], s + largest, a) for r, t, s, a, _ in feeds if len(t) > largest]
        return fed

    def _prefill(self, group: list[Feed], chunk: int) -> jax.Array:
        first = [jax.tree.leaves(tree)[0] for tree in (self._params, self._adapters) if tree]
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in first):
            raise RuntimeError(
                "an update took the memory of this engine's weights: pass the new ones to update()"
            )
        size = self.settings.prefill_rows(chunk)
        rows, starts = np.full(size, NOWHERE, np.int32), np.zeros(size, np.int32)
        tokens, adapters = np.zeros((size, chunk), np.int32), np.full(size, -1, np.int32)
        for i, feed in enumerate(group):
            rows[i], starts[i], adapters[i] = feed.row, feed.start, feed.adapter
            tokens[i, : len(feed.tokens)] = feed.tokens
        self._prefix_cache, fed = programs.prefill(
            self._params,
            self._adapters,
            self._prefix_cache,
            programs.Feeds(rows, tokens, starts, adapters),
            config=self.config,
            # A prompt that continues a cached one attends to the whole context.
            attended=self.settings.context if starts.any() else min(chunk, self.settings.context),
            scale=self._scale,
        )
        return fed

    # -- results --------------------------------------------------------------------------------------------

    def _check_finite(self, bank: Bank, out: programs.Sampled) -> None:
        broken = np.flatnonzero((out.sampled & ~np.isfinite(out.logprob)).any(axis=0))
        if broken.size:
            ticket = int(bank.table.tickets[broken[0]])
            raise NotFinite(
                f"the model gives no finite log-probability for request {ticket} (prompt of "
                f"{len(bank.requests[ticket].request.tokens)} tokens): are its weights finite"
                + (f", and does {own} keep a token?" if (own := self.settings.features.sampler) else "?")
            )

    def _finished(self, bank: Bank) -> list[tuple[int, Completion]]:
        completions = []
        kept: dict[int, int] = {}  # row of the prefix cache -> the lane to copy there
        for lane in np.flatnonzero(bank.table.tickets != FREE).tolist():
            ticket = int(bank.table.tickets[lane])
            request = bank.requests[ticket].request
            length, active = None, bank.table.lanes.active[lane]
            if request.stop_strings and (not active or self._is_near_stop(bank.table, lane, request)):
                length = self._stop_string(bank.table.sampled(lane), request)
            if length is None and active:
                continue
            completion = bank.table.leave(lane, request, length)
            if self.settings.lanes_at:
                self._admission.places.leave(lane)
            del bank.requests[ticket]
            if request.keep:
                row = self._admission.keep(request.policy, (*request.tokens, *completion.tokens[:-1]))
                if row is not None:
                    kept[row] = lane
            completions.append((ticket, completion))
        for rung, pairs in bank.by_rung((lane, row) for row, lane in kept.items()):
            for part in self._parts(pairs):
                self._prefix_cache = programs.copy_rows(bank.rungs[rung], self._prefix_cache, *part)
        return completions

    def _is_near_stop(self, table: LaneTable, lane: int, request: Request) -> bool:
        """Whether the end of the lane's text contains a stop string; to decode the complete text would take long.

        A character has at most 4 bytes, a token at least 1. A stop string missed here is found when the lane ends.
        """
        assert self._to_text is not None
        span = self.settings.steps + 4 * max(map(len, request.stop_strings)) + 8
        text = self._to_text(table.sampled(lane, last=span))
        return any(stop in text for stop in request.stop_strings)

    def _stop_string(self, tokens: list[int], request: Request) -> int | None:
        """The least number of tokens whose text contains a stop string; None if no stop string is there yet."""
        to_text = self._to_text
        assert to_text is not None  # checked at submission
        least = max(1, request.min_new_tokens)
        # Length of the text in which no stop string may end. A character whose bytes are not complete ends later.
        before = len(to_text(tokens[: least - 1]).rstrip("\ufffd"))

        def ends(n: int) -> bool:
            text = to_text(tokens[:n])
            return any(text.find(stop, max(0, before - len(stop) + 1)) >= 0 for stop in request.stop_strings)

        if len(tokens) < least or not ends(len(tokens)):
            return None
        # Bisection is valid: a text that contains a stop string still does as it grows.
        return bisect.bisect_left(range(len(tokens)), True, lo=least, key=ends)


def mesh_of(params: Any) -> Mesh | None:
    """The mesh over which the parameters are sharded; None if they are not."""
    sharding = getattr(jax.tree.leaves(params)[0], "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    if not isinstance(mesh, Mesh):
        return None
    check_mesh(mesh)
    return mesh


def _is_usable(cache: Cache) -> bool:
    """Whether the cache can be used: a program that failed or was interrupted may have deleted it."""
    if not cache.keys or any(leaf.is_deleted() for leaf in jax.tree.leaves(cache)):
        return False
    try:
        jax.block_until_ready(cache)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
