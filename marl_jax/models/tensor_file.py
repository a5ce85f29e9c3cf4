"""Safetensors, written whole and read piece by piece: a checked header, then rows of one tensor at a time.

The reader of the safetensors package maps the whole file, and mapped pages count as memory of the process
until the end; plain reads keep the peak at the model plus one piece.

    file:  [u64 header size][JSON header: name -> dtype, shape, data_offsets][bytes of all tensors]
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["Tensor", "save_tensors", "tensors"]

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_PIECE = 8 << 20  # bytes read at a time
_LARGEST_HEADER = 100_000_000  # the limit of the format's own reader


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: its file, the dtype and shape stated there, and the offset of its first byte."""

    path: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    def rows(self) -> Iterator[tuple[slice, np.ndarray]]:
        """The tensor in pieces along its first dimension."""
        width = math.prod(self.shape[1:])
        step = max(1, _PIECE // (width * self.dtype.itemsize))
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for start in range(0, self.shape[0], step):
                rows = slice(start, min(start + step, self.shape[0]))
                piece = np.fromfile(file, self.dtype, (rows.stop - rows.start) * width)
                yield rows, piece.reshape(-1, *self.shape[1:])


def save_tensors(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write one file, with the permissions that new files have."""
    from safetensors.numpy import save_file

    save_file(
        dict(arrays), path, metadata={"format": "pt"}
    )  # which makes a file that only its owner may read
    umask = os.umask(0o077)  # it can be read only by setting another
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def tensors(path: Path) -> dict[str, Tensor]:
    """What the file holds, by name; a file that is cut short or contradicts itself is refused."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = int.from_bytes(file.read(8), "little") + 8
        if size < 8 or start > min(size, _LARGEST_HEADER):
            raise ValueError(f"{path} is truncated or not a safetensors file: its header does not fit in it")
        try:
            header = json.loads(file.read(start - 8), object_pairs_hook=_no_duplicates)
            header.pop("__metadata__", None)
            found = {name: _tensor(path, name, entry, start) for name, entry in header.items()}
        except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is not a safetensors file: its header cannot be read") from error
        except ValueError as error:
            raise ValueError(f"{path} is corrupt: {error}") from error
    end = start
    for tensor in sorted(found.values(), key=lambda t: t.offset):
        if tensor.offset != end:
            raise ValueError(
                f"{path} is corrupt: {tensor.name} does not begin where the tensor before it ends"
            )
        end += math.prod(tensor.shape) * tensor.dtype.itemsize
    if end != size:
        kind = "truncated" if end > size else "corrupt"
        raise ValueError(
            f"{path} is {kind}: its header promises {end:,} bytes, it has {size:,}; fetch it again"
        )
    return found


def _tensor(path: Path, name: str, entry: dict[str, Any], start: int) -> Tensor:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{name} is stored as {entry['dtype']}; weights are {', '.join(_DTYPES)}")
    shape, dtype = tuple(entry["shape"]), _DTYPES[entry["dtype"]]
    begin, end = entry["data_offsets"]
    if (
        any(not isinstance(n, int) or n < 1 for n in shape)
        or end - begin != math.prod(shape) * dtype.itemsize
    ):
        raise ValueError(f"{name} has shape {list(shape)} but {end - begin} bytes")
    return Tensor(path, name, dtype, shape, start + begin)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)} is there twice")
    return found
