"""Evaluation of a graded table: one line of `eval.jsonl`, as pure functions of the columns.

    table, task by task ──► right [problems, samples] ──► accuracy, interval, pass@k, difference to base
                            (or the values of a user's metric)
                       └──► rows by role ──► answers, verdicts, picks, plans

The unit of every interval is the problem. An episode that forks counts by the share of its paths that are right.
An episode, or path, that ended by an error is wrong, and its calls count in no role's numbers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from marl_jax.alarms.signs import choices, share
from marl_jax.episodes import Episode
from marl_jax.rewards.credit import last_read, own_work
from marl_jax.rewards.grading import RIGHT
from marl_jax.rewards.own_metric import Metric, with_metric
from marl_jax.study.intervals import bootstrap, paired_bootstrap, pass_at_k, wilson
from marl_jax.table import KINDS, SOLVER, VERDICTS, Table


def outcomes(table: Table, samples: int) -> np.ndarray:
    """Bool[problems, samples]: whether each episode's answer is right. The episodes come task by task.

    For episodes that fork, Float[problems, samples]: the share of their paths whose answer is right.
    """
    every = table.bare_episodes
    if samples < 1 or not every or len(every) % samples:
        raise ValueError(f"{len(every)} episodes are not {samples} of each of some problems")
    problems = [every[start : start + samples] for start in range(0, len(every), samples)]
    for episodes in problems:
        if len(ids := {bare.task.id for bare in episodes}) > 1:
            raise ValueError(f"episodes of {', '.join(sorted(ids))} are mixed: they must come task by task")
    if table.forked:
        return np.array([[np.mean(_right(bare)) for bare in episodes] for episodes in problems])
    return np.array([[bare.outcome >= RIGHT for bare in episodes] for episodes in problems])


def _right(bare: Episode) -> list[bool]:
    """Of each path."""
    return [end.outcome >= RIGHT for end in bare.leaves or (bare,)]


def summary(
    table: Table, samples: int, base: Sequence[float] | None = None, metric: Metric | None = None
) -> dict[str, Any]:
    """All values of a line of `eval.jsonl`; `base` is the `per_problem` of the evaluation to compare with.

    With a `metric` the accuracy is the mean of its values, and an episode of value 0.5 or more counts as right.
    """
    table = table if metric is None else with_metric(table, metric)
    right = outcomes(table, samples)
    worth = right if metric is None else values(table, samples)
    binary = samples == 1 and not table.forked and np.isin(worth, (0, 1)).all()
    interval = wilson(int(worth.sum()), worth.size) if binary else bootstrap(worth)
    per_problem = worth.mean(axis=1)
    sizes = sorted({samples, *(1 << power for power in range(samples.bit_length()))})
    return {
        "accuracy": float(worth.mean()),  # one sum of all, so that as many right answers are the same number
        "ci_low": interval.low,
        "ci_high": interval.high,
        "problems": len(right),
        "samples": samples,
        "any_correct": share(any_right(table)),
        "pass_at_k": {str(k): float(pass_at_k(right, k).mean()) for k in sizes},
        "difference": None if base is None else paired_bootstrap(per_problem, np.array(base))._asdict(),
        "roles": by_role(table),
        "calls_per_episode": len(table) / len(table.bare_episodes),
        "tokens_per_episode": int(table.length.sum()) / len(table.bare_episodes),
        "errors": sum(bare.error is not None for bare in table.bare_episodes),
        "per_problem": per_problem.tolist(),
    }


def values(table: Table, samples: int) -> np.ndarray:
    """Float[problems, samples]: what a metric has made of each episode."""
    return np.array([bare.outcome for bare in table.bare_episodes]).reshape(-1, samples)


def any_right(table: Table) -> np.ndarray:
    """Bool[episodes]: whether the workflow, or any of its solvers, gave a right answer to the episode's task."""
    there = np.array([any(_right(bare)) for bare in table.bare_episodes])
    for row in np.flatnonzero((table.kind == SOLVER) & (table.grade >= RIGHT)).tolist():
        owner = table.episode[row]
        there[owner] |= table.task_of(row).id == table.bare_episodes[owner].task.id
    return there


def by_role(table: Table) -> dict[str, dict[str, Any]]:
    """{role: statistics of its calls}; a share without calls is None."""
    worth, known = own_work(table)
    sound = table.take(table.sound)
    return {
        role: _role(table, table.having(role=role) & table.sound, worth, known) for role in sound.present()
    }


# ---------------------------------------------------------------- one role


def _role(table: Table, mine: np.ndarray, worth: np.ndarray, known: np.ndarray) -> dict[str, Any]:
    kind = KINDS[table.kind[np.argmax(mine)]]
    chosen = choices(table, mine)
    return {
        "kind": kind,
        "calls": int(mine.sum()),
        "unreadable": 1 - int(table.readable[mine].sum()) / int(mine.sum()),
        **(_verdicts(table, mine & known, worth) if kind == "judge" else _own(kind, worth[mine & known])),
        **({"choice": chosen} if chosen else {}),
    }


def _own(kind: str, work: np.ndarray) -> Mapping[str, Any]:
    """For a planner the mean grade of the calls that read it, for others the share that is right."""
    if kind == "planner":
        return {"mean": share(work)}
    right = share(work >= RIGHT)
    return {"pick_when_possible": right, "possible": len(work)} if kind == "picker" else {"accuracy": right}


def _verdicts(table: Table, calls: np.ndarray, worth: np.ndarray) -> dict[str, Any]:
    """A positive is a "Correct"; a verdict that cannot be read is none, and wrong."""
    agreed, accepted = worth[calls] >= RIGHT, table.choice[calls] == VERDICTS["Correct"]
    was = last_read(table)[0][calls]
    both = int((accepted & was).sum())
    return {
        "accuracy": share(agreed),
        "precision": share(was[accepted]),
        "recall": both / int(was.sum()) if was.any() else None,
        "verdicts": len(was),
        "said_correct": int(accepted.sum()),
        "was_correct": int(was.sum()),
        "both_correct": both,
    }
