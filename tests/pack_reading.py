"""What a place of a pack sees, read from its arrays."""

import numpy as np

from marl_jax.learning.batching import BLOCK, STEM


def seen_from(arrays, g, place):
    """The tokens that a place of a pack may see by its table, in order of their positions."""
    piece, line = next(
        (piece, line)
        for piece in arrays.table
        for line in range(piece.shape[1])
        if piece[g, line].max() == place // BLOCK
    )
    blocks = piece[g, line][piece[g, line] >= 0]
    at = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
    segment = arrays.segments[g, at]
    at = at[(segment == STEM) | (segment == arrays.segments[g, place])]
    at = at[arrays.positions[g, at] <= arrays.positions[g, place]]
    at = at[np.argsort(arrays.positions[g, at])]
    np.testing.assert_array_equal(arrays.positions[g, at], np.arange(len(at)))  # each position once
    return arrays.tokens[g, at].tolist()
