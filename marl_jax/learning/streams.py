"""Streams: threads that differentiate the micro-batches of one gradient in parallel.

    micro-batches 0, 2, 4, .. -> carry + carry + .. ┐
                                                    ├ sum, in this order
    micro-batches 1, 3, 5, .. -> carry + carry + .. ┘

A CPU runs the programs of one thread one after the other, and a small model leaves cores idle, enough for a second
thread. Elsewhere there is one stream, dispatched without waiting. The stream of a micro-batch does not depend on which
stream is ready first, so the sums are always the same.
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
    """The number of streams: `on_cpu` on a single CPU device, else 1."""
    return on_cpu if platform == "cpu" and devices == 1 else 1


class Streams:
    """The threads, and keys of the programs that they have compiled."""

    def __init__(self, count: int):
        self.count = count
        self._workers = [Workers(f"stream-{k}", finish=True) for k in range(count if count > 1 else 0)]
        self._compiled: set[Hashable] = set()

    def run(
        self,
        step: Step,
        start: Callable[[], Carry],
        batches: Sequence[Any],
        *,
        program: Callable[[Any], Hashable],
        check: Callable[[], None] | None = None,
    ) -> tuple[Carry, list[Any]]:
        """`step` from `start()` over all micro-batches -> (the sum of the streams' carries, outputs by micro-batch).

        `check` may raise. It is called before every micro-batch and after the last; few of them then run at a time, and
        these finish even after an error. `program` returns a key of the program of a micro-batch: the first batch of
        each is waited for, or every stream would compile it. JAX settings made by a `with` do not reach the threads:
        use one stream then.
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
        count, futures = len(self._workers), list[Future[tuple[Carry, Any]]]()
        try:
            for i, batch in enumerate(batches):
                if check is not None:
                    if i >= 2 * count:
                        futures[i - 2 * count].result()
                    check()
                before = futures[i - count] if i >= count else None
                futures.append(self._workers[i % count].submit(_step, step, start, before, batch))
                if program(batch) not in self._compiled:
                    futures[-1].result()
                    self._compiled.add(program(batch))
                    if compile_cache.make_room(lambda: [future.result() for future in futures]):
                        self._compiled.clear()
            results = [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
        _wait_and_check([], check)
        return functools.reduce(_sum, [carry for carry, _ in results[-count:]]), [out for _, out in results]


def _step(
    step: Step, start: Callable[[], Carry], before: Future[tuple[Carry, Any]] | None, batch: Any
) -> Any:
    return jax.block_until_ready(step(start() if before is None else before.result()[0], batch))


@functools.partial(jax.jit, donate_argnums=0)
def _sum(a: Carry, b: Carry) -> Carry:
    return jax.tree.map(jnp.add, a, b)


def _wait_and_check(outputs: list[Any], check: Callable[[], None] | None) -> None:
    """Wait, then check: dispatch is asynchronous, so all steps would otherwise be dispatched before the first check."""
    if check is not None:
        jax.block_until_ready(outputs)
        check()
