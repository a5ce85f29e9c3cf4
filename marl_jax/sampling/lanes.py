"""The host's record of the lanes: the request in each, its position, and its tokens so far.

Plain numpy. Each dispatch takes the table's `Lanes`, and `record` adds the sampled tokens.
"""

import dataclasses

import jax
import numpy as np

from marl_jax.sampling.admission import Waiting
from marl_jax.sampling.programs import Features, Lanes, Sampled
from marl_jax.sampling.requests import Completion, Request, noise_key
from marl_jax.sampling.rungs import FREE


class LaneTable:
    """`width` lanes with room for `room` sampled tokens each, all free."""

    def __init__(self, width: int, room: int, stops: int, features: Features):
        zeros = lambda dtype=np.int32, *shape: np.zeros((width, *shape), dtype)
        self.lanes = Lanes(
            token=zeros(),
            position=zeros(),
            active=zeros(bool),
            generated=zeros(),
            max_new=zeros(),
            min_new=zeros(),
            temperature=zeros(np.float32),
            top_k=zeros(),
            top_p=zeros(np.float32) + 1,
            stops=zeros(np.int32, stops) - 1,
            noise=zeros(np.uint32, 2),
            adapter=zeros() - 1,
        )
        self.tickets = np.full(width, FREE, np.int64)
        self.held = zeros(bool)  # the lane idles in the next dispatch, and continues later
        self.tokens = zeros(np.int32, room)
        self.logprobs = zeros(np.float32, room)
        self.kept = zeros(np.int32, room, features.candidates)

    @property
    def decoding(self) -> Lanes:
        """The lanes as the next dispatch takes them: held ones are inactive."""
        if not self.held.any():
            return self.lanes
        return dataclasses.replace(self.lanes, active=self.lanes.active & ~self.held)

    @property
    def reach(self) -> int:
        """How many positions the longest active lane has cached."""
        return int(self.lanes.position.max(where=self.lanes.active, initial=0))

    def occupy(self, lane: int, waiting: Waiting, vocab: int) -> None:
        """Give a request a lane: all of its tokens but the last are cached, the last is fed next.

        A request that gave up a lane continues after its earlier tokens and keeps the log-probs recorded then.
        """
        lanes, request, before, count = self.lanes, waiting.request, waiting.sampled, waiting.so_far
        if before is not None:
            self.tokens[lane, :count], self.logprobs[lane, :count] = before.tokens, before.logprobs
            if before.kept is not None:
                self.kept[lane, :count] = before.kept
        lanes.token[lane], lanes.position[lane] = waiting.tokens[-1], waiting.cached
        lanes.active[lane], lanes.generated[lane] = True, count
        lanes.max_new[lane], lanes.min_new[lane] = request.max_new_tokens, request.min_new_tokens
        lanes.temperature[lane], lanes.top_p[lane] = request.temperature, request.top_p
        lanes.top_k[lane], lanes.adapter[lane] = min(request.top_k, vocab), waiting.adapter
        lanes.stops[lane] = -1
        lanes.stops[lane, : len(request.stop_tokens)] = request.stop_tokens
        lanes.noise[lane] = noise_key(request.key)
        self.tickets[lane] = waiting.ticket

    def take(self, rows: np.ndarray, real: int) -> None:
        """Reorder the lanes by `rows`; those after the first `real` become free."""
        self.lanes = jax.tree.map(lambda x: x[rows], self.lanes)
        for name in ("tickets", "held", "tokens", "logprobs", "kept"):
            setattr(self, name, getattr(self, name)[rows])
        self.tickets[real:] = FREE
        self.lanes.active[real:] = False

    def exchange(self, lower: int, upper: int) -> None:
        """Swap two lanes."""
        record = (self.tickets, self.held, self.tokens, self.logprobs, self.kept)
        for leaf in (*jax.tree.leaves(self.lanes), *record):
            leaf[[lower, upper]] = leaf[[upper, lower]]

    def record(self, out: Sampled) -> int:
        """Advance the lanes by the tokens of a dispatch; returns the number of tokens."""
        count = out.sampled.sum(axis=0)
        lane, step = np.nonzero(out.sampled.T)
        column = self.lanes.generated[lane] + step
        self.tokens[lane, column] = out.token[step, lane]
        self.logprobs[lane, column] = out.logprob[step, lane]
        if out.kept is not None:
            self.kept[lane, column] = out.kept[step, lane]
        moved = np.flatnonzero(count)
        self.lanes.token[moved] = out.token[count[moved] - 1, moved]
        self.lanes.generated[:] += count
        self.lanes.position[:] += count
        self.lanes.active[:] = out.active | self.held
        return int(count.sum())

    def sampled(self, lane: int, last: int | None = None) -> list[int]:
        """The tokens that the lane has sampled, or only the last `last` of them."""
        count = int(self.lanes.generated[lane])
        return self.tokens[lane, 0 if last is None else max(0, count - last) : count].tolist()

    def leave(self, lane: int, request: Request, length: int | None = None) -> Completion:
        """Free the lane; returns what it sampled, cut to `length` tokens if a stop string ended it."""
        tokens = self.sampled(lane)[:length]
        n = len(tokens)
        stopped = length is not None or (n > 0 and tokens[-1] in request.stop_tokens)
        self.tickets[lane], self.lanes.active[lane] = FREE, False
        return Completion(
            tokens,
            self.logprobs[lane, :n].tolist(),
            "stop" if stopped else "length",
            self.kept[lane, :n].copy() if self.kept.shape[2] else None,
        )
