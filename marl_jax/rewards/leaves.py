"""Values of calls before a fork: a function of their values on each of the paths that they are on.

    rows of a tree [N] --Table.paths--> rows of its paths [M], a credit's values [M] --over_leaves--> [N]

A path without a value for the call counts as 0, as does a path with an error. NaN stays if no path has a value.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from marl_jax.fields import nearest
from marl_jax.own import call_user_function, is_own, own_function
from marl_jax.rewards.grading import finite

FUNCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: math.fsum(values) / len(values),
    "max": max,
    "min": min,
}


def over_leaves(values: Any, rows: np.ndarray, count: int, how: str = "mean") -> np.ndarray:
    """Float[count]: the values [M] on paths, combined for each row by a name of `FUNCTIONS` or "module:function".

    A user's function receives the values of a call that is on several paths as a list, path by path.
    """
    function = function_of(how)
    order = np.argsort(rows, kind="stable")
    ends = np.cumsum(np.bincount(rows, minlength=count))
    of_row = np.split(np.asarray(values, np.float64)[order], ends)[:-1]
    return np.array([_combined(function, each.tolist(), how) for each in of_row], np.float64)


def function_of(how: str) -> Callable[[Sequence[float]], Any]:
    """The function of this name, from `FUNCTIONS` or "module:function"; other names are refused."""
    if is_own(how):
        return own_function(how, "function of leaves")
    if how not in FUNCTIONS:
        raise ValueError(f"leaves are {how!r}{nearest(how, FUNCTIONS)}; or your own, as 'module:function'")
    return FUNCTIONS[how]


def _combined(function: Callable[[Sequence[float]], Any], values: Sequence[float], how: str) -> float:
    if len(values) == 1 or all(map(math.isnan, values)):
        return values[0]
    filled = [0.0 if math.isnan(value) else value for value in values]
    result = call_user_function(function, f"leaves '{how}'", filled)
    return finite(result, f"leaves {how!r}: the value for the {len(filled)} leaves of a call")
