"""How near two computations of one float32 sum must be: within a few roundings of what was added up.

A sum is off by a few roundings of its terms. Where they cancel, it is small and its error is not, so a tolerance
relative to the sum would ask for the bits of one machine: the width of a processor's vectors decides which terms are
added first. An entry of a gradient is such a sum, of terms about as large as the whole gradient.
"""

import jax
import numpy as np

EPS = float(np.finfo(np.float32).eps)
ROUNDINGS = (
    64 * EPS
)  # of norms and cosines of gradients of some hundred terms an entry, relative to the norms


def close(actual, expected, *, of, roundings=8, err_msg=""):
    """Every entry within so many roundings of `of`: the absolute terms added up, as one number or entry by entry."""
    of = np.maximum(np.asarray(of, np.float64), np.finfo(np.float64).tiny)  # of nothing: equal
    scaled = (np.asarray(x, np.float64) / of for x in (actual, expected))
    np.testing.assert_allclose(*scaled, rtol=0, atol=roundings * EPS, err_msg=err_msg)


def close_trees(actual, expected, *, roundings=8):
    """Every entry within so many roundings of the norm of the whole expected tree."""
    norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(expected)))
    for (path, want), got in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(actual), strict=True):
        close(got, want, of=norm, roundings=roundings, err_msg=jax.tree_util.keystr(path))
