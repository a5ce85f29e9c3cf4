"""How calls of given lengths fill the lanes of an engine: the engine's own admission is run, without a model.

episodes, waves of calls ─► Admission (which calls enter, move, wait, lose their lane) ─► dispatches, lanes in use, ...
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from marl_jax.sampling.admission import Admission, Waiting
from marl_jax.sampling.requests import Completion, Request
from marl_jax.sampling.rungs import FREE, Swap
from marl_jax.sampling.shapes import EngineSettings


@dataclasses.dataclass(frozen=True)
class Length:
    """A call: its prompt, how many tokens it samples, and how many it may sample."""

    prompt: tuple[int, ...]
    new: int
    most: int


# The calls of one episode; a wave is submitted when all calls of the wave before have ended.
Waves = Sequence[Sequence[Length]]


@dataclasses.dataclass
class Occupancy:
    """Counts of a replay; a lane is in use while it decodes, not while it waits for a longer lane."""

    dispatches: float = 0
    in_use: float = 0.0  # share of the lanes, the mean over all dispatches
    in_use_busy: float = 0.0  # the mean over the dispatches while requests waited
    attended: float = 0  # cache tokens that the dispatches read, filled or not
    sampled: float = 0
    fed: float = 0  # prompt tokens that were not in a cache
    recomputed: float = 0  # tokens fed once more
    given_up: float = 0  # calls that lost their lane
    moved: float = 0  # swaps of two lanes


def occupancy(settings: EngineSettings, episodes: Sequence[Waves], ahead: int) -> Occupancy:
    """Replay episodes; a new one begins while fewer than `ahead` calls are unfinished."""
    return _replay(settings, episodes, ahead)[0]


def occupancy_at_length(
    settings: EngineSettings, episodes: Sequence[Waves], times: int, ahead: int
) -> Occupancy:
    """`occupancy` of the episodes repeated `times` times, each time as other problems of the same lengths.

    Only some are replayed. Their counts until the last one begins are extended to the others. Shares of lanes in use
    are those of the replayed episodes.
    """
    first = np.cumsum([len(waves[0]) for waves in episodes] * times)
    at_once = 1 + int(np.searchsorted(first, ahead))
    count = min(len(first), max(at_once + 1, 1 + int(np.searchsorted(first, 3 * ahead // 2))))
    replayed = copies(episodes, count)
    out, steady = _replay(settings, replayed, ahead)
    if rest := times * _tokens(episodes) - _tokens(replayed):
        for name in ("dispatches", "attended", "fed", "recomputed", "given_up", "moved"):
            each = getattr(steady, name) / steady.sampled
            setattr(out, name, getattr(out, name) + rest * each)
        out.sampled += rest
    return out


def copies(episodes: Sequence[Waves], count: int) -> list[Waves]:
    """`count` episodes: these, and others of the same lengths whose prompts begin differently: other problems."""

    def other(call: Length, copy: int) -> Length:
        return dataclasses.replace(call, prompt=(-copy, *call.prompt[1:]))

    return [
        [[other(call, copy) if copy else call for call in wave] for wave in episodes[which]]
        for copy, which in (divmod(number, len(episodes)) for number in range(count))
    ]


def _replay(settings: EngineSettings, episodes: Sequence[Waves], ahead: int) -> tuple[Occupancy, Occupancy]:
    """The counts of all dispatches, and those before the last episode began."""
    replay = _Replay(settings, episodes)
    out, before = replay.out, Occupancy()
    while replay.go_on(ahead):
        replay.admit()
        replay.decode()
        if replay.begun < len(episodes):
            before = dataclasses.replace(out)
    out.in_use /= max(1, out.dispatches)
    out.in_use_busy /= max(1, replay.busy)
    return out, before


def _tokens(episodes: Sequence[Waves]) -> int:
    return sum(call.new for waves in episodes for wave in waves for call in wave)


class _Replay:
    """The lanes and the episodes under way; the admission is the engine's, and each step is as in `Engine.step`."""

    def __init__(self, settings: EngineSettings, episodes: Sequence[Waves]):
        self.out, self.busy = Occupancy(), 0
        self._settings, self._admission = settings, Admission(settings)
        self._waves = [iter(waves) for waves in episodes]
        self._unfinished, self.begun = [0] * len(episodes), 0
        self._calls: list[tuple[Length, int, Waiting]] = []  # by ticket, with the episode
        # For each lane: its ticket, and its tokens: cached, sampled so far, to sample and allowed to sample.
        self._lanes = np.zeros((5, settings.lanes), int)
        self._lanes[0] = FREE

    def go_on(self, ahead: int) -> bool:
        """Begin new episodes; returns whether any calls are unfinished."""
        while self.begun < len(self._waves) and sum(self._unfinished) < ahead:
            self.begun += 1
            self._submit(self.begun - 1)
        return any(self._unfinished)

    def admit(self) -> None:
        """Admit calls, as the engine does before a dispatch."""
        tickets, cached, so_far, _, most = self._lanes
        given_up = []
        for lane in self._admission.grow(cached, most - so_far):
            waiting, count = self._calls[tickets[lane]][2], int(so_far[lane])
            sampled = Completion([-1 - waiting.ticket] * count, [], "length") if count else None
            given_up.append(waiting._replace(sampled=sampled))
            tickets[lane] = FREE
        self.out.given_up += len(given_up)
        self._admission.resume(given_up)
        self._swap(self._admission.places.settle())
        while (wave := self._admission.wave(())).seats:
            self._swap(wave.swaps)
            for feed in wave.feeds:
                self.out.fed += 0 if feed.recomputed else len(feed.tokens)
                self.out.recomputed += len(feed.tokens) if feed.recomputed else 0
            for lane, _, waiting in wave.seats:
                call = self._calls[waiting.ticket][0]
                count = call.most - waiting.left
                self._lanes[:, lane] = waiting.ticket, waiting.cached, count, call.new, call.most

    def decode(self) -> None:
        """One dispatch; calls that end with it leave their lanes."""
        tickets, cached, so_far, new, _ = self._lanes
        lanes = np.flatnonzero((tickets != FREE) & ~self._admission.places.held)
        sampled = np.minimum(self._settings.steps, new[lanes] - so_far[lanes])
        cached[lanes] += sampled
        so_far[lanes] += sampled
        longest = int(np.searchsorted(np.cumsum(self._settings.lanes_at), lanes.max(), side="right"))
        self.out.attended += sum(count * length for count, length in self._settings.rungs[: longest + 1])
        self.out.dispatches += 1
        self.out.sampled += int(sampled.sum())
        self.out.in_use += len(lanes) / len(tickets)
        if len(self._admission):
            self.busy += 1
            self.out.in_use_busy += len(lanes) / len(tickets)
        for lane in lanes[so_far[lanes] >= new[lanes]].tolist():
            episode = self._calls[tickets[lane]][1]
            tickets[lane] = FREE
            self._admission.places.leave(lane)
            self._unfinished[episode] -= 1
            if not self._unfinished[episode]:
                self._submit(episode)

    def _submit(self, episode: int) -> None:
        for call in next(self._waves[episode], ()):
            ticket = len(self._calls)
            waiting = Waiting(ticket, Request(call.prompt, (ticket,), call.most), -1)
            self._calls.append((call, episode, waiting))
            self._admission.submit(waiting)
            self._unfinished[episode] += 1

    def _swap(self, swaps: Sequence[Swap]) -> None:
        self.out.moved += len(swaps)
        for lower, upper in swaps:
            self._lanes[:, [lower, upper]] = self._lanes[:, [upper, lower]]
