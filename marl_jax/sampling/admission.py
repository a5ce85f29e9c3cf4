"""Which requests enter the lanes next, and which prompts the prefix cache needs for them.

Decided on the host, in the order in which requests arrive and lanes become free; the engine carries it out.
"""

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from marl_jax.sampling.prefixes import Owner, Prefixes, Tokens
from marl_jax.sampling.requests import Request
from marl_jax.sampling.shapes import EngineSettings

__all__ = ["NOWHERE", "Admission", "Feed", "Waiting", "Wave"]

LOOK_AHEAD = 128  # how many waiting requests are looked through for prompts to prefill early
NOWHERE = 1 << 30  # a row out of range: reads there are harmless, writes are dropped


class Waiting(NamedTuple):
    """A request that is not in a lane yet."""

    ticket: int
    request: Request
    adapter: int

    @property
    def owner(self) -> Owner:
        """Whose prompt cache the request may use."""
        return self.request.policy

    @property
    def prefix(self) -> Tokens:
        """The tokens that are prefilled: all but the last, which the first decode step feeds."""
        return self.request.tokens[:-1]


class Feed(NamedTuple):
    """Prompt tokens to put into a row of the prefix cache, from position `start` on."""

    row: int
    tokens: Tokens
    start: int
    adapter: int


@dataclasses.dataclass
class Wave:
    """Requests that enter lanes together, and what has to happen to the prefix cache first, in this order."""

    moves: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # rows to copy, from and to
    feeds: list[Feed] = dataclasses.field(default_factory=list)
    seats: list[tuple[int, int, Waiting]] = dataclasses.field(default_factory=list)  # lane, row, ..
    locked: set[int] = dataclasses.field(default_factory=set)  # the rows that it uses


class Admission:
    """The requests that wait, in one queue per cache length, and what lies in the rows of the prefix cache."""

    def __init__(self, settings: EngineSettings):
        self._settings = settings
        self._queues: list[collections.deque[Waiting]] = [collections.deque() for _ in settings.lengths]
        self.turn = 0  # the queue that is being served: which of the lengths
        self._prefixes = Prefixes(settings.prefixes)

    def __len__(self) -> int:
        """How many requests wait."""
        return sum(map(len, self._queues))

    def submit(self, waiting: Waiting, columns: int) -> None:
        """Queue a request that may come to need so many columns of a lane."""
        self._queues[self._settings.rung_of(columns)].append(waiting)
        self._prefixes.want(waiting.owner, waiting.prefix)

    @property
    def ready(self) -> int:
        """How many requests may enter as soon as lanes are free."""
        return len(self._queues[self.turn]) if self._settings.lanes_at else len(self)

    def advance(self, idle: bool) -> None:
        """Serve the next queue once one is empty. Lengths are served in turn, since all lanes attend equally far.

        If each length has its own number of lanes, the lanes must also be `idle`.
        """
        order = (*range(self.turn, len(self._queues)), *range(self.turn))
        if idle or not self._settings.lanes_at:
            self.turn = next((i for i in order if self._queues[i]), self.turn)

    def wave(self, lanes: Sequence[int]) -> Wave:
        """The next requests for these free lanes, as far as the prefix cache has rows for their prompts."""
        wave = Wave()
        for lane in lanes:
            self.advance(idle=False)
            queue = self._queues[self.turn]
            row = self._row(queue[0], wave) if queue else None
            if row is None:
                break
            waiting = queue.popleft()
            wave.seats.append((lane, row, waiting))
            self._prefixes.served(waiting.owner, waiting.prefix)
        self._look_ahead(wave)
        return wave

    def keep(self, owner: Owner, tokens: Tokens) -> int | None:
        """The row to copy a lane to, so that a later turn can go on from these tokens; None without need or room."""
        if self._prefixes.keep(owner, tokens):
            return None
        return self._prefixes.add(owner, tokens, set(), kept=True)

    def _row(self, waiting: Waiting, wave: Wave) -> int | None:
        """The row that holds, or will hold, the request's prompt; None if the wave uses every row."""
        prefix, owner = waiting.prefix, waiting.owner
        if not prefix:
            return NOWHERE
        row = self._prefixes.find(owner, prefix)
        if row is None:
            found = (
                self._prefixes.extend(owner, prefix, wave.locked, alone=True)
                or self._new_row(owner, prefix, wave)
                or self._prefixes.extend(owner, prefix, wave.locked, alone=False)
            )
            if found is None:
                return None
            row, start = found
            wave.feeds.append(Feed(row, prefix[start:], start, waiting.adapter))
        wave.locked.add(row)
        return row

    def _new_row(self, owner: Owner, prefix: Tokens, wave: Wave) -> tuple[int, int] | None:
        """A row for the prompt, and how many of its tokens are copied there."""
        kept, start = self._prefixes.longest(owner, prefix)
        row = self._prefixes.add(owner, prefix, wave.locked | {kept})
        if row is None:
            return None
        if start:
            wave.moves.append((kept, row))
        return row, start

    def _look_ahead(self, wave: Wave) -> None:
        """Fill the rows that prefills would leave empty with prompts that wait for a lane."""
        chunk_of, rows_of = self._settings.chunk_of, self._settings.prefill_rows
        begun = collections.Counter(chunk_of(len(feed.tokens)) for feed in wave.feeds if not feed.start)
        empty = {chunk: -count % rows_of(chunk) for chunk, count in begun.items()}
        window = LOOK_AHEAD if any(empty.values()) else 0
        for waiting in itertools.islice(self._queues[self.turn], window):
            prefix, owner = waiting.prefix, waiting.owner
            chunk = chunk_of(len(prefix))
            if not 0 < len(prefix) <= chunk or not empty.get(chunk):
                continue
            if self._prefixes.find(owner, prefix) is not None or self._prefixes.longest(owner, prefix)[1]:
                continue
            row = self._prefixes.add(owner, prefix, wave.locked, spare=True)
            if row is None:
                break
            wave.feeds.append(Feed(row, prefix, 0, waiting.adapter))
            wave.locked.add(row)
            empty[chunk] -= 1
