"""A user's metric in place of accuracy, such as the score of a judge, a game or a constraint.

    graded table ──metric──► one value of 0 to 1 per episode ──► its outcome: accuracy, intervals, pass@k, "best"

The function gets the whole table, so it may read columns (`table.choice`), texts (`table.text`) and episodes
(`table.episodes()`). An episode that ended in an error has the value 0, whatever the function returns. If an episode
forks, only its failed paths count 0.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from marl_jax.own import OwnError, call_user_function, in_words, is_own, own_function
from marl_jax.table import Table

Metric = Callable[[Table], Any]  # returns a value of 0 to 1 for each of `table.bare_episodes`


def load_metric(name: str) -> Metric:
    """The function of that name, `module:function`, with its result checked: Float[episodes]."""
    if not is_own(name):
        raise ValueError(
            f"metric '{name}' is no name of a function: give 'module:function', or none for the grade"
        )
    function, who = own_function(name, "metric"), f"metric '{name}'"

    def metric(table: Table) -> np.ndarray:
        return _checked(call_user_function(function, who, table), len(table.bare_episodes), who)

    return metric


def with_outcomes(table: Table, metric: Metric) -> Table:
    """The table with the metric's values as the outcomes of its episodes; grades of solvers' answers stay."""
    table.need_episodes()
    ends = [bare.leaves or (bare,) for bare in table.bare_episodes]
    sound = np.array([np.mean([end.error is None for end in paths]) for paths in ends])
    raw = np.asarray(metric(table), np.float64)
    values = raw * sound
    episodes = []
    for bare, own, value in zip(table.bare_episodes, raw.tolist(), values.tolist()):
        leaves = (dataclasses.replace(end, outcome=own if end.error is None else 0.0) for end in bare.leaves)
        episodes.append(dataclasses.replace(bare, outcome=value, leaves=tuple(leaves)))
    return table.replace(outcome=values[table.episode], bare_episodes=tuple(episodes))


def _checked(result: Any, episodes: int, who: str) -> np.ndarray:
    try:
        values = np.asarray(result, np.float64)
    except (TypeError, ValueError):
        raise OwnError(f"{who} returned {in_words(result)}; return one number per episode") from None
    if values.shape != (episodes,):
        size = in_words(result) if values.ndim != 1 else f"{len(values)} values"
        raise OwnError(f"{who} returned {size} for {episodes} episodes; return one number per episode")
    wrong = np.flatnonzero(~((values >= 0) & (values <= 1)))
    if len(wrong):
        raise OwnError(
            f"{who} returned {values[wrong[0]]:g} for episode {wrong[0]}; it is shown as a share, so scale it to 0 .. 1"
        )
    return values
