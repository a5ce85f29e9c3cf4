"""Exchange between the processes of a run: values of all or of process 0, and errors; a single process exchanges none.

    from_all(make)      results of `make` on each, in order        from_first(make)    its result on process 0
    after_first(make)   its result here, after process 0's         any_of(flag)        whether any process sets it

All processes make the same calls in the same order. An error raised inside of such a call on one process is raised
on all, so no process waits for one that gave up. Values are sent as bytes, so they are equal to the bit.
"""

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from marl_jax.errors import RunError

T = TypeVar("T")
SMALL = 1 << 12  # bytes, size included, of a message that takes a single exchange


def count() -> int:
    """How many processes share the run."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def index() -> int:
    """The number of this process."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


def is_first() -> bool:
    """Whether this is process 0, which writes the folder and settles what depends on the machine."""
    return index() == 0


def share(items: Sequence[T]) -> list[T]:
    """The items that this process works on."""
    return list(items[index() :: count()])


def from_all(make: Callable[[], T]) -> list[T]:
    """The results of `make` on all processes."""
    if count() == 1:
        return [make()]
    try:
        result: tuple[Any, BaseException | None] = make(), None
    except Exception as error:
        if _is_known(error):
            raise
        result = None, error
    return _exchange(*result)


def from_first(make: Callable[[], T]) -> T:
    """The result of `make` on process 0, the only one that calls it."""
    return from_all(lambda: make() if is_first() else None)[0]  # type: ignore[return-value]


def after_first(make: Callable[[], T]) -> T:
    """The result of `make` here; process 0 calls it first, then all others do."""
    made = list[T]()  # the result is not sent, so it may be of any type
    from_first(lambda: made.append(make()))
    return made[0] if made else make()


def any_of(flag: bool) -> bool:
    """Whether the flag is set on any process."""
    return any(from_all(lambda: flag))


@contextlib.contextmanager
def sharing_errors() -> Iterator[None]:
    """A context whose error on one process is also raised by the next exchange of the others."""
    try:
        yield
    except Exception as error:
        if count() > 1 and not _is_known(error):
            _exchange(None, error)
        raise


@contextlib.contextmanager
def local_errors() -> Iterator[None]:
    """A context for programs of all devices: the others wait in them and end with this process, so no error is sent."""
    try:
        yield
    except Exception as error:
        _mark_known(error)
        raise


def _exchange(value: Any, error: BaseException | None) -> list[Any]:
    """The values of all processes; raises this process's error or, if there is none, that of another."""
    results = [pickle.loads(one) for one in _gather(_pack(value, error))]
    if error is not None:
        _mark_known(error)
        raise error
    # Errors of other processes come before that of a process that was only asked to stop.
    errors = [one for _, one in results if one is not None]
    if errors:
        chosen = min(errors, key=lambda one: getattr(one, "gives_way", False))
        _mark_known(chosen)
        raise chosen
    return [value for value, _ in results]


def _pack(value: Any, error: BaseException | None) -> bytes:
    if error is None:
        return pickle.dumps((value, None))
    try:
        packed = pickle.dumps((None, error))
        if str(pickle.loads(packed)[1]) == str(error):
            return packed
    except Exception:
        pass  # an error that cannot be pickled: its text is sent
    text = f"process {index()}: {type(error).__name__}: {error}"
    return pickle.dumps((None, RunError(text)))


def _gather(payload: bytes) -> list[bytes]:
    """The bytes of every process, in order; padded to few lengths, so that few programs are compiled."""
    from jax.experimental import multihost_utils

    def padded(data: bytes, size: int) -> np.ndarray:
        return np.frombuffer(data.ljust(size, b"\0"), np.uint8)

    message = len(payload).to_bytes(8, "little") + payload
    heads = multihost_utils.process_allgather(padded(message[:SMALL], SMALL))
    sizes = [int.from_bytes(head[:8].tobytes(), "little") for head in heads]
    if max(sizes) <= SMALL - 8:
        return [head[8 : 8 + size].tobytes() for head, size in zip(heads, sizes)]
    gathered = multihost_utils.process_allgather(padded(payload, 1 << (max(sizes) - 1).bit_length()))
    return [row[:size].tobytes() for row, size in zip(gathered, sizes)]


def _mark_known(error: BaseException) -> None:
    error._known = True  # type: ignore[attr-defined]


def _is_known(error: BaseException) -> bool:
    return getattr(error, "_known", False)
