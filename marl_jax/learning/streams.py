"""Streams: threads that differentiate the micro-batches of one gradient side by side.

    micro-batches 0, 2, 4, .. -> carry + carry + .. ┐
                                                    ├ sum, in this order
    micro-batches 1, 3, 5, .. -> carry + carry + .. ┘

A CPU runs what one thread dispatches one after the other, and a small model leaves cores idle, enough for a
second thread. Elsewhere there is one stream, dispatched without waiting. The stream of a micro-batch does not depend on
which stream is ready first.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp

from marl_jax import compile_cache
from marl_jax.threads import Workers

Carry = Any
# (carry, micro-batch) -> (carry, outputs of the micro-batch)
Step = Callable[[Carry, Any], tuple[Carry, Any]]


def stream_count(platform: str, devices: int, on_cpu: int) -> int:
    """The number of streams."""
    return on_cpu if platform == "cpu" and devices == 1 else 1


class Streams:
    """The threads, and the programs that they have compiled."""

    def __init__(self, count: int):
        self.count = count
        self._workers = [Workers(f"stream-{k}", finish=True) for k in range(count if count > 1 else 0)]
        self._met: set[Hashable] = set()

    @property
    def threaded(self) -> bool:
        """Whether `run` waits for everything that it dispatches."""
        return bool(self._workers)

    def run(
        self,
        step: Step,
        start: Callable[[], Carry],
        batches: Sequence[Any],
        *,
        program: Callable[[Any], Hashable],
        check: Callable[[], None] | None = None,
    ) -> tuple[Carry, list[Any]]:
        """`step` from `start()` over all micro-batches: the sum of the streams' carries, and the outputs of each step.

        `check` may raise; it is called before every micro-batch, of which few then run at a time, and these finish
        even after an error. `program` gives the program of a micro-batch: the first of each is waited for, or every
        stream would compile it. Settings of JAX made by a `with` do not reach the threads: for these, one stream.
        """
        if not self._workers or not batches:
            compile_cache.make_room()
            carry, outputs = start(), list[Any]()
            for batch in batches:
                _wait_and_check(outputs[-2:-1], check)
                carry, out = step(carry, batch)
                outputs.append(out)
            _wait_and_check(outputs, check)
            return carry, outputs
        count, steps = len(self._workers), list[Future[tuple[Carry, Any]]]()
        try:
            for i, batch in enumerate(batches):
                if check is not None:
                    if i >= 2 * count:
                        steps[i - 2 * count].result()
                    check()
                before = steps[i - count] if i >= count else None
                steps.append(self._workers[i % count].submit(_one, step, start, before, batch))
                if program(batch) not in self._met:
                    steps[-1].result()
                    self._met.add(program(batch))
                    if compile_cache.make_room(lambda: [one.result() for one in steps]):
                        self._met.clear()
            done = [one.result() for one in steps]
        finally:
            for one in steps:
                one.cancel()
        _wait_and_check([], check)
        return functools.reduce(_sum, [carry for carry, _ in done[-count:]]), [out for _, out in done]


def _one(step: Step, start: Callable[[], Carry], before: Future[tuple[Carry, Any]] | None, batch: Any) -> Any:
    return jax.block_until_ready(step(start() if before is None else before.result()[0], batch))


@functools.partial(jax.jit, donate_argnums=0)
def _sum(a: Carry, b: Carry) -> Carry:
    return jax.tree.map(jnp.add, a, b)


def _wait_and_check(outputs: list[Any], check: Callable[[], None] | None) -> None:
    """Programs run behind the host's back: without waiting, all would be dispatched before the first check."""
    if check is not None:
        jax.block_until_ready(outputs)
        check()
