"""Lanes over rungs: caches of several lengths in memory at the same time, and the lane of each request.

A request begins in a short cache and changes its lane as it grows. It needs a rung with room for what a dispatch
writes, and may have a lane of a longer one. So the requests that need a rung or a longer one must be no more than
the lanes of these. Where they are more, the youngest of those that have grown are held: they stay where they are and
idle. Of more than a tenth of all lanes the youngest give their lanes up, and are continued later.

    lanes   [ 0 .. 95 ) of 512   [ 96 .. 143 ) of 1,024   [ 144 .. 159 ) of 2,048 tokens
                     grows ──── change places ───▲  │
                       ▲ a request that needs less, or a free lane

Plain numpy: which lanes change places is decided here, the engine moves their caches.
"""

from collections.abc import Iterable, Sequence

import numpy as np

FREE = -1  # the need and the ticket of a free lane
Swap = tuple[int, int]  # two lanes of neighbouring rungs that change places


class Places:
    """Which request has which lane. `lanes_at` counts the lanes of each rung, the shortest first."""

    def __init__(self, lanes_at: Sequence[int]):
        self.rung = np.repeat(np.arange(len(lanes_at)), np.array(lanes_at, int))  # of each lane
        self.tickets = np.full(len(self.rung), FREE, np.int64)
        self.need = np.full(len(self.rung), FREE)  # the rung that the lane's request needs
        self.held = np.zeros(len(self.rung), bool)  # waits in its lane for a longer one
        self._capacity = np.cumsum(lanes_at[::-1])[::-1]  # lanes of a rung and of longer ones

    @property
    def taken(self) -> np.ndarray:
        """The lanes that have a request."""
        return np.flatnonzero(self.tickets != FREE)

    def lane_of(self, ticket: int) -> int:
        """Where a request is."""
        return int(np.flatnonzero(self.tickets == ticket)[0])

    @property
    def room(self) -> int:
        """The longest rung that one more request may need, -1 where there is no lane for it."""
        full = np.flatnonzero(self._asked() >= self._capacity)
        return int(full[0]) - 1 if full.size else len(self._capacity) - 1

    def enter(self, ticket: int, need: int) -> list[Swap]:
        """Give a request a lane, where there is room; the lanes that change places for it, in this order."""
        free = np.flatnonzero(self.tickets == FREE)
        fits = free[self.rung[free] >= need]
        lane = int(fits[0] if fits.size else free[-1])
        self.tickets[lane], self.need[lane] = ticket, need
        return self._lift(lane)

    def leave(self, lane: int) -> None:
        """The lane is free."""
        self.tickets[lane] = self.need[lane] = FREE
        self.held[lane] = False

    def surplus(self) -> list[int]:
        """Hold the requests without a lane under these needs; returns the lanes that were given up."""
        self.held[:] = False
        if (self._asked() <= self._capacity).all():
            return []
        for rung in range(len(self._capacity))[::-1]:
            those = np.flatnonzero(self.need >= rung)
            over = max(0, len(those) - int(self._capacity[rung]))
            grown = those[self.rung[those] < rung]
            late = grown[np.argsort(self.tickets[grown])][len(grown) - over :]
            self.need[late], self.held[late] = self.rung[late], True
        held = np.flatnonzero(self.held)
        gone = held[np.argsort(self.tickets[held])][len(self.held) // 10 :].tolist()
        for lane in gone:
            self.leave(lane)
        return gone

    def settle(self) -> list[Swap]:
        """The lanes that change places, in this order, so that each request has what it needs."""
        swaps: list[Swap] = []
        while (short := np.flatnonzero(self.need > self.rung)).size:
            swaps += self._lift(int(short[-1]))
        return swaps

    def _asked(self) -> np.ndarray:
        """The number of requests that need each rung or a longer one."""
        return np.bincount(self.need[self.taken], minlength=len(self._capacity))[::-1].cumsum()[::-1]

    def _lift(self, lane: int) -> list[Swap]:
        """Move a request up to the rung that it needs, where there is room for it."""
        swaps: list[Swap] = []
        while self.need[lane] > self.rung[lane]:
            below = int(self.rung[lane])
            # The nearest lane above that is free, or whose request can do with the lane here.
            other = int(np.flatnonzero((self.rung > below) & (self.need <= below))[0])
            while self.rung[other] > below + 1:  # comes down rung by rung; others have longer lanes for it
                between = np.flatnonzero(self.rung == self.rung[other] - 1)
                beside = int(between[np.argmax(self.need[between])])
                swaps.append(self._swap(beside, other))
                other = beside
            swaps.append(self._swap(lane, other))
            lane = other
        return swaps

    def _swap(self, lower: int, upper: int) -> Swap:
        for of in (self.tickets, self.need, self.held):
            of[[lower, upper]] = of[[upper, lower]]
        return lower, upper


# ---------------------------------------------------------------- how many lanes of which lengths


def best_lengths(
    calls: Iterable[tuple[int, int]], context: int, *, multiple: int, steps: int, most: int
) -> tuple[tuple[int, ...], np.ndarray]:
    """Up to `most` lengths, the last of them `context`, and the share of its steps that a lane needs each of them.

    `calls` are (prompt, sampled) tokens. The lengths, multiples of `multiple`, are those over which lanes that always
    have the shortest rung that they need take the least memory.
    """
    ends = multiple * np.arange(1, context // multiple + 1)
    steps_at = np.zeros(len(ends) + 1)  # steps that need so many multiples
    for prompt, new in calls:
        token = np.arange(new)
        # Positions written by the token's dispatch.
        columns = prompt - 1 + np.minimum(token - token % steps + steps, new)
        steps_at += np.bincount(-(-columns // multiple), minlength=len(steps_at))
    until = np.cumsum(steps_at)
    # least[j]: the cost of the steps below ends[j - 1] with so many lengths, the last of them ends[j - 1].
    costs = np.where(np.tri(len(until), k=-1).T, (until[None] - until[:, None]) * np.r_[0, ends], np.inf)
    least, before = np.where(np.arange(len(until)) > 0, np.inf, 0.0), []
    best: tuple[float, int] = (np.inf, 0)
    for count in range(most):
        through = least[:, None] + costs
        before.append(through.argmin(axis=0))
        least = through.min(axis=0)
        best = min(best, (least[-1], count))
    chosen, at = [], len(until) - 1
    for table in before[: best[1] + 1][::-1]:
        chosen.append(at)
        at = int(table[at])
    chosen = chosen[::-1]
    return tuple(ends[np.array(chosen) - 1].tolist()), np.diff(until[[0, *chosen]]) / max(1.0, until[-1])


def apportion(lanes: int, shares: np.ndarray) -> tuple[int, ...]:
    """This many lanes over rungs in these shares, at least one over the longest."""
    wanted = (lanes - 1) * shares
    whole = np.floor(wanted).astype(int)
    for rung in np.argsort(whole - wanted, kind="stable")[: lanes - 1 - int(whole.sum())]:
        whole[rung] += 1
    whole[-1] += 1
    return tuple(whole.tolist())
