"""What the processes of a run tell each other: values of all, of the first, and errors; nothing where there is one.

    together(make)      what `make` gives on each, in order        from_first(make)    what it gives on process 0
    after_first(make)   what it gives here, once process 0 is done any_of(flag)        whether it is set on one of them

All processes make the same calls in the same order. What is raised inside of one, on any process, is raised on all of
them, so no process waits for one that gave up. Values travel as bytes, so they are equal to the bit.
"""

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from marl_jax.errors import RunError

T = TypeVar("T")
SMALL = 1 << 12  # bytes of a message, its size included, that is sent in one go


def count() -> int:
    """How many processes share the run."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def index() -> int:
    """The number of this one."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


def is_first() -> bool:
    """Whether this is process 0, which writes the folder and settles what depends on the machine."""
    return index() == 0


def share(items: Sequence[T]) -> list[T]:
    """Those of the items that are this process's to work on."""
    return list(items[index() :: count()])


def together(make: Callable[[], T]) -> list[T]:
    """What `make` gives on each process."""
    if count() == 1:
        return [make()]
    try:
        said: tuple[Any, BaseException | None] = make(), None
    except Exception as error:
        if _is_told(error):
            raise
        said = None, error
    return _exchanged(*said)


def from_first(make: Callable[[], T]) -> T:
    """What `make` gives on process 0, which alone calls it."""
    return together(lambda: make() if is_first() else None)[0]  # type: ignore[return-value]


def after_first(make: Callable[[], T]) -> T:
    """What `make` gives here; process 0 calls it alone, then all others do."""
    made = list[T]()  # which need not be of a kind that travels
    from_first(lambda: made.append(make()))
    return made[0] if made else make()


def any_of(flag: bool) -> bool:
    """Whether it is set on a process."""
    return any(together(lambda: flag))


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """What is raised in here on one process is raised by the next call of the others, too."""
    try:
        yield
    except Exception as error:
        if count() > 1 and not _is_told(error):
            _exchanged(None, error)
        raise


@contextlib.contextmanager
def untold() -> Iterator[None]:
    """Around a program of all devices: the others are in it, and would not hear. They end with this process."""
    try:
        yield
    except Exception as error:
        _mark(error)
        raise


def _exchanged(value: Any, error: BaseException | None) -> list[Any]:
    """The values of all processes; an error of this one is raised, or else one of another."""
    said = [pickle.loads(one) for one in _gathered(_packed(value, error))]
    if error is not None:
        _mark(error)
        raise error
    # A process that was asked to stop has no error to speak of: those of others count more.
    errors = [one for _, one in said if one is not None]
    if errors:
        chosen = min(errors, key=lambda one: getattr(one, "gives_way", False))
        _mark(chosen)
        raise chosen
    return [value for value, _ in said]


def _packed(value: Any, error: BaseException | None) -> bytes:
    if error is None:
        return pickle.dumps((value, None))
    try:
        packed = pickle.dumps((None, error))
        if str(pickle.loads(packed)[1]) == str(error):
            return packed
    except Exception:
        pass  # of a kind that does not travel: its text does
    text = f"process {index()}: {type(error).__name__}: {error}"
    return pickle.dumps((None, RunError(text)))


def _gathered(mine: bytes) -> list[bytes]:
    """The bytes of every process, in order; padded to few lengths, so that few programs are compiled."""
    from jax.experimental import multihost_utils

    def padded(data: bytes, size: int) -> np.ndarray:
        return np.frombuffer(data.ljust(size, b"\0"), np.uint8)

    begun = len(mine).to_bytes(8, "little") + mine
    heads = multihost_utils.process_allgather(padded(begun[:SMALL], SMALL))
    sizes = [int.from_bytes(head[:8].tobytes(), "little") for head in heads]
    if max(sizes) <= SMALL - 8:
        return [head[8 : 8 + size].tobytes() for head, size in zip(heads, sizes)]
    whole = multihost_utils.process_allgather(padded(mine, 1 << (max(sizes) - 1).bit_length()))
    return [row[:size].tobytes() for row, size in zip(whole, sizes)]


def _mark(error: BaseException) -> None:
    error._told = True  # type: ignore[attr-defined]


def _is_told(error: BaseException) -> bool:
    return getattr(error, "_told", False)
