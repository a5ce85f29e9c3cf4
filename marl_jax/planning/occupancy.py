"""How calls of given lengths fill the lanes of an engine: its own admission decides, and no model computes.

episodes, waves of calls ─► Admission (who enters, moves, waits, gives its lane up) ─► dispatches, lanes in use, ...
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from marl_jax.sampling.admission import Admission, Waiting
from marl_jax.sampling.requests import Request, Said
from marl_jax.sampling.rungs import FREE, Swap
from marl_jax.sampling.shapes import EngineSettings

NOTHING: Any = np.zeros(0)


@dataclasses.dataclass(frozen=True)
class Length:
    """A call: its prompt, how many tokens it samples, and how many it may."""

    prompt: tuple[int, ...]
    new: int
    most: int


# Of one episode; the calls of a wave are asked when all of the one before have ended.
Waves = Sequence[Sequence[Length]]


@dataclasses.dataclass
class Occupancy:
    """What was counted; lanes are in use where they decode, not where they wait for a longer one."""

    dispatches: float = 0
    in_use: float = 0.0  # share of the lanes, the mean over all dispatches
    in_use_busy: float = 0.0  # the mean over the dispatches while requests waited
    attended: float = 0  # tokens of the caches that the dispatches read, whatever lies there
    sampled: float = 0
    fed: float = 0  # tokens of prompts that lay in no cache
    recomputed: float = 0  # tokens fed once more
    given_up: float = 0
    moved: float = 0


def occupancy(settings: EngineSettings, episodes: Sequence[Waves], ahead: int) -> Occupancy:
    """Play episodes over rungs; a new one begins while fewer than `ahead` calls are unfinished."""
    return _played(settings, episodes, ahead)[0]


def occupancy_at_length(
    settings: EngineSettings, episodes: Sequence[Waves], times: int, ahead: int
) -> Occupancy:
    """`occupancy` of the episodes so many times, each time of other problems that are as long.

    Some are played: all but how these end goes on alike for the others. Shares of lanes in use are those of the
    episodes that are played.
    """
    first = np.cumsum([len(waves[0]) for waves in episodes] * times)
    at_once = 1 + int(np.searchsorted(first, ahead))
    some = min(len(first), max(at_once + 1, 1 + int(np.searchsorted(first, 3 * ahead // 2))))
    played = copies(episodes, some)
    out, alike = _played(settings, played, ahead)
    if left := times * _tokens(episodes) - _tokens(played):
        for name in ("dispatches", "attended", "fed", "recomputed", "given_up", "moved"):
            each = getattr(alike, name) / alike.sampled
            setattr(out, name, getattr(out, name) + left * each)
        out.sampled += left
    return out


def _played(settings: EngineSettings, episodes: Sequence[Waves], ahead: int) -> tuple[Occupancy, Occupancy]:
    """What was counted in all, and before the last episode began."""
    played = _Play(settings, episodes)
    out, before = played.out, Occupancy()
    while played.go_on(ahead):
        played.admit()
        played.decode()
        if played.begun < len(episodes):
            before = dataclasses.replace(out)
    out.in_use /= max(1, out.dispatches)
    out.in_use_busy /= max(1, played.busy)
    return out, before


def copies(episodes: Sequence[Waves], count: int) -> list[Waves]:
    """So many episodes: these, and others that are as long, of other problems: their prompts begin otherwise."""

    def other(call: Length, copy: int) -> Length:
        return dataclasses.replace(call, prompt=(-copy, *call.prompt[1:]))

    found = (divmod(number, len(episodes)) for number in range(count))
    return [
        [[other(call, copy) if copy else call for call in wave] for wave in episodes[which]]
        for copy, which in found
    ]


def _tokens(episodes: Sequence[Waves]) -> int:
    return sum(call.new for waves in episodes for wave in waves for call in wave)


class _Play:
    """The lanes and the episodes under way; the admission is the engine's, and each step is one of `Engine.step`."""

    def __init__(self, settings: EngineSettings, episodes: Sequence[Waves]):
        self.out, self.busy = Occupancy(), 0
        self._settings, self._admission = settings, Admission(settings)
        self._waves = [iter(waves) for waves in episodes]
        self._unfinished, self.begun = [0] * len(episodes), 0
        self._calls: list[tuple[Length, int, Waiting]] = []  # by ticket, with the episode
        # Of each lane: its ticket, the tokens that it holds, has sampled, will sample and may sample.
        self._lanes = np.zeros((5, settings.lanes), int)
        self._lanes[0] = FREE

    def go_on(self, ahead: int) -> bool:
        """Whether there is anything to do, once new episodes have begun."""
        while self.begun < len(self._waves) and sum(self._unfinished) < ahead:
            self.begun += 1
            self._submit(self.begun - 1)
        return any(self._unfinished)

    def admit(self) -> None:
        """What the engine does before a dispatch."""
        tickets, held, done, _, most = self._lanes
        given_up = []
        for lane in self._admission.grow(held, most - done):
            waiting, count = self._calls[tickets[lane]][2], int(done[lane])
            said = Said((-1 - waiting.ticket,) * count, NOTHING, NOTHING) if count else None
            given_up.append(waiting._replace(said=said))
            tickets[lane] = FREE
        self.out.given_up += len(given_up)
        self._admission.resume(given_up)
        self._swap(self._admission.places.settle())
        while (wave := self._admission.wave(())).seats:
            self._swap(wave.swaps)
            for feed in wave.feeds:
                self.out.fed += 0 if feed.again else len(feed.tokens)
                self.out.recomputed += len(feed.tokens) if feed.again else 0
            for lane, _, waiting in wave.seats:
                call = self._calls[waiting.ticket][0]
                count = call.most - waiting.left
                self._lanes[:, lane] = waiting.ticket, waiting.cached, count, call.new, call.most

    def decode(self) -> None:
        """One dispatch, and what ends with it."""
        tickets, held, done, new, _ = self._lanes
        lanes = np.flatnonzero((tickets != FREE) & ~self._admission.places.held)
        sampled = np.minimum(self._settings.steps, new[lanes] - done[lanes])
        held[lanes] += sampled
        done[lanes] += sampled
        longest = int(np.searchsorted(np.cumsum(self._settings.lanes_at), lanes.max(), side="right"))
        self.out.attended += sum(count * length for count, length in self._settings.rungs[: longest + 1])
        self.out.dispatches += 1
        self.out.sampled += int(sampled.sum())
        self.out.in_use += len(lanes) / len(tickets)
        if len(self._admission):
            self.busy += 1
            self.out.in_use_busy += len(lanes) / len(tickets)
        for lane in lanes[done[lanes] >= new[lanes]].tolist():
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
