"""Splits: pure functions from row numbers to train, val and test.

    DAPO-Math:  order = default_rng(42).permutation(14116); test = order[:1412]; train = order[1412:]
    DeepCoder:  order = default_rng(42).permutation(n);     test = order[:1000]; train = order[1000:]

These are the study's splits: `train_test_split(test_size=0.1, seed=42)` takes the first ceil(0.1 n) rows of this
permutation, `shuffle(seed=42)` its first thousand. Val is taken from train by seed. (The study shuffled only the code
rows that remained after its own trial runs of the tests; that list is not part of the data set.)
"""

import math
from collections.abc import Mapping

import numpy as np

from marl_jax.tasks.row_files import DataError

STUDY_SEED = 42
Split = tuple[str, np.ndarray]  # (published split, row numbers from 0 in it)


def held_out(rows: int, test: int | float) -> tuple[np.ndarray, np.ndarray]:
    """(train, test) row numbers; `test` is a count, or a fraction that is rounded up."""
    size = math.ceil(rows * test) if isinstance(test, float) else test
    if not 0 < size < rows:
        raise DataError(f"cannot hold out {size} test rows of {rows}: give a directory with more rows")
    order = np.random.default_rng(STUDY_SEED).permutation(rows)
    return order[size:], order[:size]


def carve(train: np.ndarray, size: int | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(train, val): val is a random `size` of train (default: a tenth, at most 256), train keeps its order."""
    if size is None:
        size = max(1, min(256, len(train) // 10))
    if not 0 < size < len(train):
        way = "lower data.val_size" if size > 0 else "data.val_size counts rows; 0 makes no val split"
        raise DataError(f"cannot carve {size} val rows out of {len(train)} train rows: {way}")
    chosen = np.random.default_rng(seed).permutation(len(train))[:size]
    kept = np.ones(len(train), bool)
    kept[chosen] = False
    return train[kept], train[chosen]


def assign(
    rows: Mapping[str, int], test: int | float, *, val_size: int | None = None, seed: int = 0
) -> dict[str, Split]:
    """Train, val and test from the published splits, whose sizes are `rows`.

    A published test or val split is used as it is; a missing one is taken from train. A data set with only a test
    split gets no other. `val_size=0` makes no val split and leaves train whole, as in the study.
    """
    splits: dict[str, Split] = {name: (name, np.arange(size)) for name, size in rows.items()}
    if "train" in splits:
        if "test" not in splits:
            train, held = held_out(rows["train"], test)
            splits |= {"train": ("train", train), "test": ("train", held)}
        if "val" not in splits and val_size != 0:
            train, val = carve(splits["train"][1], val_size, seed)
            splits |= {"train": ("train", train), "val": ("train", val)}
    return splits
