"""Episodes and tables made by hand, for what recipes pay and measure."""

import numpy as np

from marl_jax.episodes import CallRecord, Episode
from marl_jax.table import Table
from marl_jax.task import Task
from recipes.recipe import Trained

TASK = Task("micro_math/1+1=?", "math", "1+1=?", gold="2", level=1, meta={"kind": "add", "terms": [1, 1]})


def call(role, text="", answer=None, *, kind="team", tokens=3, **facts):
    said = {"tokens": (1,) * tokens, "logprobs": (0.0,) * tokens, "finish_reason": "stop"}
    where = {"policy": "p0", "slot": 0, "turn": 0, "prompt_tokens": (1,), **facts}
    return CallRecord(role=role, text=text, answer=answer, kind=kind, **said, **where)


def episode(*calls, outcome=0.0, answers=None, sample=0, answer=None, task=TASK):
    answers = answers or tuple(None for _ in calls)
    return Episode(task, sample, "made", calls, answer, outcome=outcome, answers=tuple(answers))


def kept(*tables):
    """A run whose phases have collected these."""

    class Kept(Trained):
        def collected(self):
            return list(tables)

    return Kept(tables[0])


def table_of(*episodes, grades=None, reward=None):
    """A graded table of them; `grades` and `reward` call by call."""
    made = Table.of(list(episodes))
    outcome = np.array([one.outcome for one in episodes], float)[made.episode]
    grade = np.array(grades if grades is not None else [np.nan] * len(made), float)
    return made.replace(
        outcome=outcome, grade=grade, reward=None if reward is None else np.array(reward, float)
    )
