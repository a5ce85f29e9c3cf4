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
from marl_jax.rewards.credit import last_answer_read, own_work
from marl_jax.rewards.grading import RIGHT
from marl_jax.rewards.own_metric import Metric, with_outcomes
from marl_jax.study.intervals import bootstrap, paired_bootstrap, pass_at_k, wilson
from marl_jax.table import KINDS, SOLVER, VERDICTS, Table


def outcomes(table: Table, samples: int) -> np.ndarray:
    """Bool[problems, samples]: whether each episode's answer is right. The episodes come task by task.

    For episodes that fork, Float[problems, samples]: the share of their paths whose answer is right.
    """
    all_episodes = table.bare_episodes
    if samples < 1 or not all_episodes or len(all_episodes) % samples:
        raise ValueError(f"{len(all_episodes)} episodes are not {samples} samples of each problem")
    problems = [all_episodes[start : start + samples] for start in range(0, len(all_episodes), samples)]
    for episodes in problems:
        if len(ids := {bare.task.id for bare in episodes}) > 1:
            raise ValueError(f"episodes of {', '.join(sorted(ids))} are mixed: they must come task by task")
    if table.forked:
        return np.array([[np.mean(_right(bare)) for bare in episodes] for episodes in problems])
    return np.array([[bare.outcome >= RIGHT for bare in episodes] for episodes in problems])


def _right(bare: Episode) -> list[bool]:
    """Whether the answer of each path is right."""
    return [end.outcome >= RIGHT for end in bare.leaves or (bare,)]


def summary(
    table: Table, samples: int, base: Sequence[float] | None = None, metric: Metric | None = None
) -> dict[str, Any]:
    """All values of a line of `eval.jsonl`; `base` is the `per_problem` of the evaluation to compare with.

    With a `metric` the accuracy is the mean of its values, and an episode of value 0.5 or more counts as right.
    """
    table = table if metric is None else with_outcomes(table, metric)
    right = outcomes(table, samples)
    scores = right if metric is None else values(table, samples)
    binary = samples == 1 and not table.forked and np.isin(scores, (0, 1)).all()
    interval = wilson(int(scores.sum()), scores.size) if binary else bootstrap(scores)
    per_problem = scores.mean(axis=1)
    sizes = sorted({samples, *(1 << power for power in range(samples.bit_length()))})
    return {
        "accuracy": float(scores.mean()),  # one sum over all: equal counts give equal numbers
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
    """Float[problems, samples]: the value of a metric for each episode."""
    return np.array([bare.outcome for bare in table.bare_episodes]).reshape(-1, samples)


def any_right(table: Table) -> np.ndarray:
    """Bool[episodes]: whether the workflow, or any of its solvers, gave a right answer to the episode's task."""
    solved = np.array([any(_right(bare)) for bare in table.bare_episodes])
    for row in np.flatnonzero((table.kind == SOLVER) & (table.grade >= RIGHT)).tolist():
        owner = table.episode[row]
        solved[owner] |= table.task_of(row).id == table.bare_episodes[owner].task.id
    return solved


def by_role(table: Table) -> dict[str, dict[str, Any]]:
    """{role: statistics of its calls}; a share of no calls is None."""
    worth, known = own_work(table)
    sound = table.take(table.sound)
    return {
        role: _role(table, table.having(role=role) & table.sound, worth, known) for role in sound.present()
    }


# ---------------------------------------------------------------- one role


def _role(table: Table, rows: np.ndarray, worth: np.ndarray, known: np.ndarray) -> dict[str, Any]:
    kind = KINDS[table.kind[np.argmax(rows)]]
    choice = choices(table, rows)
    return {
        "kind": kind,
        "calls": int(rows.sum()),
        "unreadable": 1 - int(table.readable[rows].sum()) / int(rows.sum()),
        **(_verdicts(table, rows & known, worth) if kind == "judge" else _work(kind, worth[rows & known])),
        **({"choice": choice} if choice else {}),
    }


def _work(kind: str, work: np.ndarray) -> Mapping[str, Any]:
    """For a planner the mean grade of the calls that read it, for others the share that is right."""
    if kind == "planner":
        return {"mean": share(work)}
    right = share(work >= RIGHT)
    return {"pick_when_possible": right, "possible": len(work)} if kind == "picker" else {"accuracy": right}


def _verdicts(table: Table, calls: np.ndarray, worth: np.ndarray) -> dict[str, Any]:
    """A positive is a "Correct"; an unreadable verdict is no positive, and counts as wrong."""
    agreed, accepted = worth[calls] >= RIGHT, table.choice[calls] == VERDICTS["Correct"]
    was_right = last_answer_read(table)[0][calls]
    both = int((accepted & was_right).sum())
    return {
        "accuracy": share(agreed),
        "precision": share(was_right[accepted]),
        "recall": both / int(was_right.sum()) if was_right.any() else None,
        "verdicts": len(was_right),
        "said_correct": int(accepted.sum()),
        "was_correct": int(was_right.sum()),
        "both_correct": both,
    }
