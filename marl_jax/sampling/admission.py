"""Admission: which requests enter the lanes next, and the prompts that the prefix cache needs for them.

Decisions are made on the host, in the order in which requests arrive and lanes become free. The engine executes them.
"""

import bisect
import collections
import dataclasses
import heapq
import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from marl_jax.sampling.prefixes import Key, Owner, Prefixes, Tokens
from marl_jax.sampling.requests import Completion, Request
from marl_jax.sampling.rungs import FREE, Places, Swap
from marl_jax.sampling.shapes import EngineSettings

LOOK_AHEAD = 128  # waiting requests that are searched for prompts to prefill early
NOWHERE = 1 << 30  # a row out of range: reads of it are harmless, writes to it are dropped


class Waiting(NamedTuple):
    """A submitted request: it waits in a queue, then a bank keeps it while it has a lane."""

    ticket: int
    request: Request
    adapter: int
    sampled: Completion | None = None  # so far, if it gave up its lane; why it ended says nothing then

    @property
    def tokens(self) -> Tokens:
        """Its prompt and the tokens of `sampled`."""
        return self.request.tokens if self.sampled is None else (*self.request.tokens, *self.sampled.tokens)

    @property
    def so_far(self) -> int:
        """The number of tokens of `sampled`."""
        return 0 if self.sampled is None else len(self.sampled.tokens)

    @property
    def cached(self) -> int:
        """The number of tokens that must be cached when it enters a lane."""
        return len(self.request.tokens) - 1 + self.so_far

    @property
    def left(self) -> int:
        """How many more tokens it may sample."""
        return self.request.max_new_tokens - self.so_far

    @property
    def key(self) -> Key:
        """Its key in the prefix cache: its policy, and all tokens but the last, which the first decode step feeds."""
        return self.request.policy, self.tokens[:-1]


_arrival = operator.attrgetter("ticket")  # requests are compared by the order in which they arrived


class Feed(NamedTuple):
    """Prompt tokens to put into a row of the prefix cache, from position `start` on."""

    row: int
    tokens: Tokens
    start: int
    adapter: int
    recomputed: bool = False  # a lane that was given up had them in its cache


@dataclasses.dataclass
class Wave:
    """Requests that enter lanes together, and what is done on the device before that, in the order of the fields."""

    swaps: list[Swap] = dataclasses.field(default_factory=list)  # lanes to swap
    moves: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (from, to) rows to copy
    feeds: list[Feed] = dataclasses.field(default_factory=list)
    seats: list[tuple[int, int, Waiting]] = dataclasses.field(default_factory=list)  # lane, row, request
    locked: set[int] = dataclasses.field(default_factory=set)  # rows that the wave uses


class Admission:
    """The waiting requests, and the contents of the rows of the prefix cache.

    Requests wait in one queue per cache length. With one cache, which grows with its longest lane, a queue is served
    until it is empty, and a request waits for the length that it may need in the end. With rungs, a request waits for
    the rung that it needs now; of all requests that fit into a free lane, the first to arrive enters.
    """

    def __init__(self, settings: EngineSettings):
        self._settings = settings
        self.places = Places(settings.lanes_at)  # the lane of each request; used with rungs only
        self._queues: list[collections.deque[Waiting]] = [collections.deque() for _ in settings.lengths]
        self._turn = 0  # index of the length whose queue is being served
        self._prefixes = Prefixes(settings.prefixes)

    def __len__(self) -> int:
        """How many requests wait."""
        return sum(map(len, self._queues))

    def submit(self, waiting: Waiting) -> None:
        """Queue a request."""
        self._queues[self._rung(waiting)].append(waiting)
        self._prefixes.want(waiting.key)

    def resume(self, given_up: Sequence[Waiting]) -> None:
        """Queue requests that gave up their lanes, each at its place in the order of arrival."""
        for waiting in given_up:
            bisect.insort(self._queues[self._rung(waiting)], waiting, key=_arrival)
            self._prefixes.want(waiting.key)

    def advance(self) -> None:
        """If the current queue is empty, serve the next. Lengths take turns, since all lanes attend equally far."""
        order = (*range(self._turn, len(self._queues)), *range(self._turn))
        self._turn = next((i for i in order if self._queues[i]), self._turn)

    def wave(self, lanes: Sequence[int]) -> Wave:
        """The next requests for these free lanes, as many as the prefix cache has rows for."""
        wave = Wave()
        if self._settings.lanes_at:
            self._fill_rungs(wave)
        else:
            self._fill(wave, lanes)
        self._look_ahead(wave)
        return wave

    def grow(self, position: np.ndarray, left: np.ndarray) -> list[int]:
        """Update the rungs that lanes [W] need, by their cached tokens and tokens left; returns the lanes given up."""
        taken = self.places.taken
        columns = position[taken] + np.minimum(self._settings.steps, left[taken])
        self.places.need[taken] = np.searchsorted(self._settings.lengths, columns)
        return self.places.hold_excess()

    def keep(self, owner: Owner, tokens: Tokens) -> int | None:
        """The row to copy a lane to, for a later turn that continues these tokens; None without need or room."""
        key = owner, tokens
        return None if self._prefixes.keep(key) else self._prefixes.add(key, set(), kept=True)

    def _fill(self, wave: Wave, lanes: Sequence[int]) -> None:
        for lane in lanes:
            self.advance()
            queue = self._queues[self._turn]
            row = self._row(queue[0], wave) if queue else None
            if row is None:
                break
            self._seat(lane, row, queue.popleft(), wave)

    def _fill_rungs(self, wave: Wave) -> None:
        places = self.places
        while fitting := [rung for rung in range(places.room + 1) if self._queues[rung]]:
            need = min(fitting, key=lambda rung: self._queues[rung][0].ticket)
            row = self._row(self._queues[need][0], wave)
            if row is None:
                break
            waiting = self._queues[need].popleft()
            wave.swaps += places.enter(waiting.ticket, need)
            self._seat(FREE, row, waiting, wave)
        # Only now, because each request that enters may swap lanes of earlier ones.
        wave.seats = [(places.lane_of(waiting.ticket), row, waiting) for _, row, waiting in wave.seats]

    def _rung(self, waiting: Waiting) -> int:
        """The index of the request's queue."""
        ahead = min(self._settings.steps, waiting.left) if self._settings.lanes_at else waiting.left + 1
        return bisect.bisect_left(self._settings.lengths, waiting.cached + ahead)

    def _seat(self, lane: int, row: int, waiting: Waiting, wave: Wave) -> None:
        wave.seats.append((lane, row, waiting))
        self._prefixes.served(waiting.key)

    def _row(self, waiting: Waiting, wave: Wave) -> int | None:
        """The row that contains, or will contain, the request's prompt; None if the wave uses every row."""
        _, prefix = key = waiting.key
        if not prefix:
            return NOWHERE
        row = self._prefixes.find(key)
        if row is None:
            place = (
                self._prefixes.extend(key, wave.locked, alone=True)
                or self._new_row(key, wave)
                or self._prefixes.extend(key, wave.locked, alone=False)
            )
            if place is None:
                return None
            row, start = place
            wave.feeds.append(Feed(row, prefix[start:], start, waiting.adapter, waiting.sampled is not None))
        wave.locked.add(row)
        return row

    def _new_row(self, key: Key, wave: Wave) -> tuple[int, int] | None:
        """A row for the prompt, and how many of its tokens are copied there."""
        source, start = self._prefixes.longest(key)
        row = self._prefixes.add(key, wave.locked | {source})
        if row is None:
            return None
        if start:
            wave.moves.append((source, row))
        return row, start

    def _look_ahead(self, wave: Wave) -> None:
        """Fill rows of prefills that would be empty with prompts of requests that wait for a lane."""
        chunk_of, rows_of = self._settings.chunk_of, self._settings.prefill_rows
        counts = collections.Counter(chunk_of(len(feed.tokens)) for feed in wave.feeds if not feed.start)
        empty_rows = {chunk: -count % rows_of(chunk) for chunk, count in counts.items()}
        window = LOOK_AHEAD if any(empty_rows.values()) else 0
        queues = self._queues if self._settings.lanes_at else [self._queues[self._turn]]
        for waiting in itertools.islice(heapq.merge(*queues, key=_arrival), window):
            chunk = chunk_of(waiting.cached)
            if waiting.sampled is not None or not 0 < waiting.cached <= chunk or not empty_rows.get(chunk):
                continue
            _, prefix = key = waiting.key
            if self._prefixes.find(key) is not None or self._prefixes.longest(key)[1]:
                continue
            row = self._prefixes.add(key, wave.locked, spare=True)
            if row is None:
                break
            wave.feeds.append(Feed(row, prefix, 0, waiting.adapter))
            wave.locked.add(row)
            empty_rows[chunk] -= 1
