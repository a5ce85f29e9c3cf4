"""Safetensors, written whole and read piece by piece: a header that the package checks, then rows of one tensor.

The package's own reader of tensors maps the whole file, and mapped pages count as memory of the process until the
end; plain reads keep the peak at the model plus one piece.

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
    """The place of one tensor: its file, the dtype and shape stated there, and the offset of its first byte."""

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
    # Until here only its owner may read it.
    user_cache.as_usual(path, 0o666)


def tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name; a file that is cut short or contradicts itself is refused."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, Tensor] = {}
    try:
        with path.open("rb") as file:
            offset = int.from_bytes(file.read(8), "little") + 8  # behind the header
        with safe_open(path, "numpy") as whole:  # which has checked that the tensors fill the file
            for name in whole.offset_keys():
                part = whole.get_slice(name)
                kind, shape = part.get_dtype(), tuple(part.get_shape())
                if kind not in _DTYPES or 0 in shape:
                    what = f"stored as {kind} {list(shape)}"
                    raise ValueError(
                        f"{path} cannot be used: {name} is {what}; weights are {', '.join(_DTYPES)}, and none is empty"
                    )
                found[name] = Tensor(path, _DTYPES[kind], shape, offset)
                offset += math.prod(shape) * _DTYPES[kind].itemsize
    except SafetensorError as error:
        raise ValueError(
            f"{path} is truncated, corrupt or no safetensors file ({error}): fetch it again"
        ) from None
    return found
