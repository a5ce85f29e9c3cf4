"""What graded episodes say of a workflow: one line of `eval.jsonl`, as pure functions of the episodes.

    graded, task by task ──► right [problems, samples] ──► accuracy, interval, pass@k, difference to base
                        └──► calls by role ──► own answers, verdicts, picks, plans

The unit of every interval is the problem. An episode that ended by an error is wrong, and its calls are in no role's
numbers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from marl_jax.rewards.credit import own_work
from marl_jax.rewards.grading import RIGHT, Graded, Kind, is_right
from marl_jax.runs.intervals import bootstrap, paired_bootstrap, pass_at_k, wilson


def outcomes(graded: Sequence[Graded], samples: int) -> np.ndarray:
    """Bool[problems, samples]: whether each episode's answer is right. The episodes come task by task."""
    if samples < 1 or not graded or len(graded) % samples:
        raise ValueError(f"{len(graded)} episodes are not {samples} of each of some problems")
    problems = [graded[start : start + samples] for start in range(0, len(graded), samples)]
    for episodes in problems:
        if len(ids := {one.episode.task.id for one in episodes}) > 1:
            raise ValueError(f"episodes of {', '.join(sorted(ids))} are mixed: they must come task by task")
    return np.array([[one.outcome >= RIGHT for one in episodes] for episodes in problems])


def summary(graded: Sequence[Graded], samples: int, base: Sequence[float] | None = None) -> dict[str, Any]:
    """All that a line of `eval.jsonl` says of the episodes; `base` is the `per_problem` of what to compare with."""
    right = outcomes(graded, samples)
    interval = wilson(int(right.sum()), right.size) if samples == 1 else bootstrap(right)
    per_problem = right.mean(axis=1)
    sizes = sorted({samples, *(1 << power for power in range(samples.bit_length()))})
    return {
        "accuracy": interval.mean,
        "ci_low": interval.low,
        "ci_high": interval.high,
        "problems": len(right),
        "samples": samples,
        "any_correct": _share([any_right(one) for one in graded]),
        "pass_at_k": {str(k): float(pass_at_k(right, k).mean()) for k in sizes},
        "difference": None if base is None else paired_bootstrap(per_problem, np.array(base))._asdict(),
        "roles": by_role(graded),
        "calls_per_episode": _share([len(one.episode.calls) for one in graded]),
        "tokens_per_episode": _share([sum(len(c.tokens) for c in one.episode.calls) for one in graded]),
        "errors": sum(one.episode.error is not None for one in graded),
        "per_problem": per_problem.tolist(),
    }


def any_right(graded: Graded) -> bool:
    """Whether a right answer was there: the workflow's, or one of a solver's own."""
    return any(map(is_right, (graded.outcome, *graded.answers)))


def by_role(graded: Sequence[Graded]) -> dict[str, dict[str, Any]]:
    """{role: how its own work went}; a share of nothing is None."""
    sound = [one for one in graded if one.episode.error is None]
    roles = dict.fromkeys(call.role for one in sound for call in one.episode.calls)
    return {role: _role([one for one in sound if role in _roles(one)], role) for role in roles}


# ---------------------------------------------------------------- one role


def _role(graded: Sequence[Graded], role: str) -> dict[str, Any]:
    calls = [
        (one, index, own)
        for one in graded
        for index, own in enumerate(own_work(one))
        if one.episode.calls[index].role == role
    ]
    one, index, _ = calls[0]
    kind = one.kinds[index]
    readable = [one.episode.calls[index].answer is not None for one, index, _ in calls]
    work = [own for _, _, own in calls if own is not None]
    return {
        "kind": kind,
        "calls": len(calls),
        "unreadable": 1 - sum(readable) / len(calls),
        **(_verdicts([(one, index) for one, index, _ in calls]) if kind == "judge" else _own(kind, work)),
    }


def _own(kind: Kind, work: Sequence[float]) -> Mapping[str, Any]:
    """Of a planner the mean of what it led to, of all others the share that is right."""
    if kind == "planner":
        return {"mean": _share(work)}
    right = _share([own >= RIGHT for own in work])
    return {"pick_when_possible": right, "possible": len(work)} if kind == "picker" else {"accuracy": right}


def _verdicts(calls: Sequence[tuple[Graded, int]]) -> dict[str, Any]:
    """A positive is a "Correct"; a verdict that cannot be read is none, and wrong."""
    said, was = [], []
    for one, index in calls:
        call = one.episode.calls[index]
        if seen := [grade for i in call.reads if (grade := one.answers[i]) is not None]:
            said.append(call.answer)
            was.append(seen[-1] >= RIGHT)
    accepted = [right for verdict, right in zip(said, was) if verdict == "Correct"]
    agreed = [verdict == ("Correct" if right else "Incorrect") for verdict, right in zip(said, was)]
    return {
        "accuracy": _share(agreed),
        "precision": _share(accepted),
        "recall": sum(accepted) / sum(was) if any(was) else None,
        "verdicts": len(said),
        "said_correct": len(accepted),
        "was_correct": sum(was),
        "both_correct": sum(accepted),
    }


def _roles(graded: Graded) -> set[str]:
    return {call.role for call in graded.episode.calls}


def _share(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None
