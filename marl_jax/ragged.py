"""Storage of columns: ragged rows end to end, short rows padded with -1, names as integers."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different length, end to end in one array; equal neighbours, such as prompts, are stored once."""

    values: np.ndarray  # [T, ...]
    starts: np.ndarray  # Int[N]
    lengths: np.ndarray  # Int[N]

    @classmethod
    def of(cls, rows: Sequence[Any], dtype: Any) -> "Ragged":
        """From rows of values. Equal neighbours (prompts of a group) are stored once if they are tuples or arrays."""
        parts: list[np.ndarray] = []
        starts, lengths = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        end, last = 0, None
        for i, row in enumerate(rows):
            if row is not last and not _equal(row, last):
                parts.append(np.asarray(row, dtype))
                end += len(parts[-1])
            lengths[i], starts[i], last = len(parts[-1]), end - len(parts[-1]), row
        empty = np.zeros(0, dtype)
        return cls(np.concatenate([part for part in parts if len(part)] or [empty]), starts, lengths)

    @classmethod
    def of_padded(cls, rows: np.ndarray, lengths: np.ndarray) -> "Ragged":
        """From rows [N, M], padded after these lengths; equal neighbours are stored once."""
        valid = np.arange(rows.shape[1]) < lengths[:, None]
        new = np.ones(len(rows), bool)
        new[1:] = (lengths[1:] != lengths[:-1]) | ((rows[1:] != rows[:-1]) & valid[1:]).any(axis=1)
        sizes = np.where(new, lengths, 0).astype(np.int64)
        first = np.maximum.accumulate(np.where(new, np.arange(len(rows)), 0))
        return cls(rows[valid & new[:, None]], (np.cumsum(sizes) - sizes)[first], lengths.astype(np.int64))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.starts[row] : self.starts[row] + self.lengths[row]]

    def take(self, rows: np.ndarray) -> "Ragged":
        """These rows, in this order; nothing is copied."""
        return Ragged(self.values, self.starts[rows], self.lengths[rows])

    def _compact(self) -> "Ragged":
        """The same rows over a copy of only the used values; equal spans are still stored once."""
        spans, span = np.unique(np.stack([self.starts, self.lengths]), axis=1, return_inverse=True)
        values = np.concatenate([self.values[:0], *(self.values[a : a + n] for a, n in spans.T)])
        return Ragged(values, (np.cumsum(spans[1]) - spans[1])[span.ravel()], self.lengths)

    @staticmethod
    def concat(parts: Sequence["Ragged"]) -> "Ragged":
        """The rows of all parts, one after the other. If less than half of an array is used, only that is copied."""
        arrays = {id(part.values): part.values for part in parts}  # parts of one column share its values
        order = {key: number for number, key in enumerate(arrays)}
        owner = np.repeat([order[id(part.values)] for part in parts], [len(part) for part in parts])
        values = list[np.ndarray]()
        starts, lengths = (np.concatenate([getattr(p, n) for p in parts]) for n in ("starts", "lengths"))
        for number, shared in enumerate(arrays.values()):
            rows = owner == number
            used = Ragged(shared, starts[rows], lengths[rows])
            used = used._compact() if 2 * used.lengths.sum() < len(shared) else used
            starts[rows] = used.starts + sum(map(len, values))
            values.append(used.values)
        return Ragged(np.concatenate(values), starts, lengths)


def _equal(row: Any, other: Any) -> bool:
    if type(row) is not type(other) or len(row) != len(other):
        return False
    return (
        row == other if isinstance(row, tuple) else isinstance(row, np.ndarray) and np.array_equal(row, other)
    )


def dense(keys: Iterable[Any]) -> np.ndarray:
    """Int[N]: hashable keys numbered 0, 1, 2, ... in order of appearance."""
    seen: dict[Any, int] = {}
    return ints(seen.setdefault(key, len(seen)) for key in keys)


def padded(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Int[N, R]: rows padded with -1 to the longest."""
    result = np.full((len(rows), max([1, *map(len, rows)])), -1, np.int32)
    for line, row in zip(result, rows):
        line[: len(row)] = row
    return result


def unpadded(rows: np.ndarray) -> list[tuple[int, ...]]:
    """The rows of an array [N, R] as tuples without their padding."""
    return [tuple(entry for entry in row if entry >= 0) for row in rows.tolist()]


def ints(values: Iterable[int]) -> np.ndarray:
    """Int[N]."""
    return np.fromiter(values, np.int32)


def floats(values: Iterable[float | None]) -> np.ndarray:
    """Float[N]; None as NaN."""
    return np.array([np.nan if value is None else value for value in values], np.float64)


def kept_sets(rows: Sequence[Any]) -> Ragged | None:
    """The sets of ids kept at each token, padded with -1; a row without sets has length 0."""
    if all(row is None for row in rows):
        return None
    counts = np.array([0 if row is None else len(row) for row in rows], np.int64)
    tokens = [ids for row in rows if row is not None for ids in row]
    lengths = ints(map(len, tokens))
    flat = np.full((len(tokens), lengths.max(initial=0)), -1, np.int32)
    flat[np.arange(flat.shape[1]) < lengths[:, None]] = ints(itertools.chain.from_iterable(tokens))
    # Sets may come with padding, at any place: move the ids to the front.
    flat = np.take_along_axis(flat, np.argsort(flat < 0, axis=1, kind="stable"), axis=1)
    flat = padded([()] * len(flat)) if not flat.size else flat[:, : max(1, (flat >= 0).sum(axis=1).max())]
    return Ragged(flat, np.cumsum(counts) - counts, counts)


def take(column: Any, rows: np.ndarray) -> Any:
    """These rows of a column; None for a missing column."""
    return column.take(rows) if isinstance(column, Ragged) else None if column is None else column[rows]


def concat(columns: Sequence[Any]) -> Any:
    """The joined column, rows of integers padded to the widest; None if one of the tables lacks it."""
    if any(column is None for column in columns):
        return None
    arrays = [column.values if isinstance(column, Ragged) else column for column in columns]
    if arrays[0].ndim == 2:
        missing = max(array.shape[1] for array in arrays) - np.array([array.shape[1] for array in arrays])
        pad = lambda array, more: np.pad(array, ((0, 0), (0, more)), constant_values=-1) if more else array
        arrays = list(map(pad, arrays, missing))
    if not isinstance(columns[0], Ragged):
        return np.concatenate(arrays)
    return Ragged.concat([dataclasses.replace(column, values=x) for column, x in zip(columns, arrays)])
