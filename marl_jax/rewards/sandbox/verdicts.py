"""Cache of verdicts: equal submissions to a pool share one verdict, while they run and afterwards."""

import functools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from marl_jax.rewards.sandbox.pool import Pool, Verdict

__all__ = ["Verdicts", "done", "verdicts_of"]

_MOST = 1 << 16


class Verdicts:
    """The latest verdicts of a pool, by a digest of what was submitted."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a finished future calls `_keep` from within `get`
        self._known: OrderedDict[bytes, Future[Verdict] | Verdict] = OrderedDict()

    def get(self, key: bytes, submit: Callable[[], "Future[Verdict]"]) -> "Future[Verdict]":
        """The verdict for the key: cached, pending, or of a new submission."""
        with self._lock:
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = submit()
                known.add_done_callback(functools.partial(self._keep, key))
                if len(self._known) > _MOST:
                    self._known.popitem(last=False)
            else:
                self._known.move_to_end(key)
            return done(known) if isinstance(known, Verdict) else known

    def _keep(self, key: bytes, future: "Future[Verdict]") -> None:
        with self._lock:
            if self._known.get(key) is not future:
                return
            if future.exception() is None and not future.result().lost:
                self._known[key] = future.result()
            else:  # the sandbox failed: that says nothing about the program
                del self._known[key]


def verdicts_of(pool: Pool) -> Verdicts:
    """The cache of a pool, kept as long as the pool lives."""
    with _lock:
        return _of_pools.setdefault(pool, Verdicts())


def done(verdict: Verdict) -> "Future[Verdict]":
    """A finished future with the verdict."""
    future: Future[Verdict] = Future()
    future.set_result(verdict)
    return future


_of_pools: "weakref.WeakKeyDictionary[Pool, Verdicts]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # the thread that held it may not exist in the child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
