"""Lanes over rungs: caches of several lengths in memory at the same time, and the lane of each request.

A request begins in a short cache and changes its lane as it grows. It needs a rung with room for what a dispatch
writes, and may have a lane of a longer one. So at most as many requests may need a rung or a longer one as these
rungs have lanes. If more do, the youngest of the requests that have grown are held: they keep their lanes and idle.
If more than a tenth of all lanes are held, the youngest requests beyond that give up their lanes and continue later.

    lanes   [ 0 .. 95 ] of 512   [ 96 .. 143 ] of 1,024   [ 144 .. 159 ] of 2,048 tokens
                     grows ──── change places ───▲  │
                       ▲ a request that needs less, or a free lane

Plain numpy: this module decides which lanes change places, the engine moves their caches.
"""

from collections.abc import Iterable, Sequence

import numpy as np

FREE = -1  # the need and the ticket of a free lane
Swap = tuple[int, int]  # two lanes of neighbouring rungs that change places


class Places:
    """The lane of each request. `lanes_at` counts the lanes of each rung, the shortest first."""

    def __init__(self, lanes_at: Sequence[int]):
        self.rung = np.repeat(np.arange(len(lanes_at)), np.array(lanes_at, int))  # by lane
        self.tickets = np.full(len(self.rung), FREE, np.int64)
        self.need = np.full(len(self.rung), FREE)  # the rung that the lane's request needs
        self.held = np.zeros(len(self.rung), bool)  # the request idles until a longer lane is free
        self._capacity = np.cumsum(lanes_at[::-1])[::-1]  # lanes of a rung and of longer ones

    @property
    def taken(self) -> np.ndarray:
        """The lanes with a request."""
        return np.flatnonzero(self.tickets != FREE)

    def lane_of(self, ticket: int) -> int:
        """The lane of a request."""
        return int(np.flatnonzero(self.tickets == ticket)[0])

    @property
    def room(self) -> int:
        """The longest rung that one more request may need; -1 if there is no lane for it."""
        full = np.flatnonzero(self._demand() >= self._capacity)
        return int(full[0]) - 1 if full.size else len(self._capacity) - 1

    def enter(self, ticket: int, need: int) -> list[Swap]:
        """Give a request a lane, for which `room` must suffice; returns the lanes that swap for it, in this order."""
        free = np.flatnonzero(self.tickets == FREE)
        fits = free[self.rung[free] >= need]
        lane = int(fits[0] if fits.size else free[-1])
        self.tickets[lane], self.need[lane] = ticket, need
        return self._lift(lane)

    def leave(self, lane: int) -> None:
        """Free the lane."""
        self.tickets[lane] = self.need[lane] = FREE
        self.held[lane] = False

    def hold_excess(self) -> list[int]:
        """Hold the requests whose needs exceed the lanes; returns the lanes that were given up."""
        self.held[:] = False
        if (self._demand() <= self._capacity).all():
            return []
        for rung in range(len(self._capacity))[::-1]:
            lanes = np.flatnonzero(self.need >= rung)
            excess = max(0, len(lanes) - int(self._capacity[rung]))
            grown = lanes[self.rung[lanes] < rung]
            youngest = grown[np.argsort(self.tickets[grown])][len(grown) - excess :]
            self.need[youngest], self.held[youngest] = self.rung[youngest], True
        held = np.flatnonzero(self.held)
        given_up = held[np.argsort(self.tickets[held])][len(self.held) // 10 :].tolist()
        for lane in given_up:
            self.leave(lane)
        return given_up

    def settle(self) -> list[Swap]:
        """Swap lanes until each request has the rung that it needs; returns the swaps in order."""
        swaps: list[Swap] = []
        while (short := np.flatnonzero(self.need > self.rung)).size:
            swaps += self._lift(int(short[-1]))
        return swaps

    def _demand(self) -> np.ndarray:
        """The number of requests that need each rung or a longer one."""
        return np.bincount(self.need[self.taken], minlength=len(self._capacity))[::-1].cumsum()[::-1]

    def _lift(self, lane: int) -> list[Swap]:
        """Move a request up to the rung that it needs, which must have room for it."""
        swaps: list[Swap] = []
        while self.need[lane] > self.rung[lane]:
            below = int(self.rung[lane])
            # The nearest lane above that is free, or whose request needs no longer lane than this one.
            other = int(np.flatnonzero((self.rung > below) & (self.need <= below))[0])
            while self.rung[other] > below + 1:  # brought down rung by rung; others get longer lanes
                between = np.flatnonzero(self.rung == self.rung[other] - 1)
                neighbour = int(between[np.argmax(self.need[between])])
                swaps.append(self._swap(neighbour, other))
                other = neighbour
            swaps.append(self._swap(lane, other))
            lane = other
        return swaps

    def _swap(self, lower: int, upper: int) -> Swap:
        for column in (self.tickets, self.need, self.held):
            column[[lower, upper]] = column[[upper, lower]]
        return lower, upper


# ---------------------------------------------------------------- how many lanes of which lengths


def best_lengths(
    calls: Iterable[tuple[int, int]], context: int, *, multiple: int, steps: int, most: int
) -> tuple[tuple[int, ...], np.ndarray]:
    """Up to `most` lengths, of which `context` is the last, and the share of all steps that need each length.

    `calls` are (prompt, sampled) tokens. The lengths, multiples of `multiple`, take the least memory if each request
    always has a lane of the shortest rung that it needs.
    """
    ends = multiple * np.arange(1, context // multiple + 1)
    steps_at = np.zeros(len(ends) + 1)  # steps by the number of multiples that they need
    for prompt, new in calls:
        token = np.arange(new)
        # Positions written by the token's dispatch.
        columns = prompt - 1 + np.minimum(token - token % steps + steps, new)
        steps_at += np.bincount(-(-columns // multiple), minlength=len(steps_at))
    sums = np.cumsum(steps_at)
    # least[j]: the least cost of steps of up to ends[j - 1], over `count` lengths of which ends[j - 1] is the last.
    costs = np.where(np.tri(len(sums), k=-1).T, (sums[None] - sums[:, None]) * np.r_[0, ends], np.inf)
    least, previous = np.where(np.arange(len(sums)) > 0, np.inf, 0.0), []
    best: tuple[float, int] = (np.inf, 0)
    for count in range(most):
        total = least[:, None] + costs
        previous.append(total.argmin(axis=0))
        least = total.min(axis=0)
        best = min(best, (least[-1], count))
    chosen, end = [], len(sums) - 1
    for table in previous[: best[1] + 1][::-1]:
        chosen.append(end)
        end = int(table[end])
    chosen = chosen[::-1]
    return tuple(ends[np.array(chosen) - 1].tolist()), np.diff(sums[[0, *chosen]]) / max(1.0, sums[-1])


def apportion(lanes: int, shares: np.ndarray) -> tuple[int, ...]:
    """Split `lanes` over rungs in these shares; the longest rung gets at least one."""
    exact = (lanes - 1) * shares
    counts = np.floor(exact).astype(int)
    for rung in np.argsort(counts - exact, kind="stable")[: lanes - 1 - int(counts.sum())]:
        counts[rung] += 1
    counts[-1] += 1
    return tuple(counts.tolist())
