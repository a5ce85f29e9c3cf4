"""A cache of verdicts on programs: equal submissions to a pool share one verdict, while they run and afterwards."""

import dataclasses
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

_CAPACITY = 1 << 16


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a program on its tests."""

    passed: bool  # whether it passed every test
    reason: str  # why it failed, or how many tests it passed, in words
    lost: bool = False  # the sandbox itself failed: no verdict on the program


class Verdicts:
    """The latest verdicts of a pool, by a digest of the submission."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a finished future calls `_keep` from within `get`
        self._known: OrderedDict[bytes, Future[Verdict] | Verdict] = OrderedDict()

    def get(self, key: bytes, submit: Callable[[], "Future[Verdict]"]) -> "Future[Verdict]":
        """The verdict for the key: from the cache, a pending submission, or a new one."""
        with self._lock:
            entry = self._known.get(key)
            if entry is None:
                entry = self._known[key] = submit()
                entry.add_done_callback(functools.partial(self._keep, key))
                if len(self._known) > _CAPACITY:
                    self._known.popitem(last=False)
            else:
                self._known.move_to_end(key)
            return resolved(entry) if isinstance(entry, Verdict) else entry

    def _keep(self, key: bytes, future: "Future[Verdict]") -> None:
        with self._lock:
            if self._known.get(key) is not future:
                return
            if future.exception() is None and not future.result().lost:
                self._known[key] = future.result()
            else:  # the sandbox failed: there is no verdict on the program
                del self._known[key]


def resolved(verdict: Verdict) -> "Future[Verdict]":
    """A finished future with the verdict."""
    future: Future[Verdict] = Future()
    future.set_result(verdict)
    return future
