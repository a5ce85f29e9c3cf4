"""Safetensors files, written at once and read piece by piece: the package checks the header, this module reads rows.

The package's own reader maps the file into memory, and mapped pages count as memory of the process until its end;
plain reads keep the peak at the model plus one piece.

    file:  [u64 header size][JSON header: name -> dtype, shape, data_offsets][bytes of all tensors, without gaps]
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from marl_jax import user_cache

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_PIECE = 8 << 20  # bytes read at a time


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor in a file: its path, the dtype and shape in the header, and the offset of its first byte."""

    path: Path
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

    save_file(dict(arrays), path, metadata={"format": "pt"})
    # `save_file` lets only the owner read the file.
    user_cache.apply_umask(path, 0o666)


def tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name; a truncated or inconsistent file is refused."""
    from safetensors import SafetensorError, safe_open

    by_name: dict[str, Tensor] = {}
    try:
        with path.open("rb") as file:
            offset = int.from_bytes(file.read(8), "little") + 8  # the first byte after the header
        with safe_open(path, "numpy") as reader:  # this checks that the tensors fill the file
            for name in reader.offset_keys():
                slice_ = reader.get_slice(name)
                kind, shape = slice_.get_dtype(), tuple(slice_.get_shape())
                if kind not in _DTYPES or 0 in shape:
                    form = f"stored as {kind} {list(shape)}"
                    raise ValueError(
                        f"{path} cannot be used: {name} is {form}; weights are {', '.join(_DTYPES)}, and none is empty"
                    )
                by_name[name] = Tensor(path, _DTYPES[kind], shape, offset)
                offset += math.prod(shape) * _DTYPES[kind].itemsize
    except SafetensorError as error:
        raise ValueError(
            f"{path} is truncated, corrupt or no safetensors file ({error}): fetch it again"
        ) from None
    return by_name
