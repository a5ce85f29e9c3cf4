"""Peak and terminal accuracy, and whether there is a cliff between them: for a run, and for runs of several seeds.

    evaluations [E, P] ─┬─► peak      the checkpoint is chosen on one half of the problems and reported on the other,
                        │             both ways round, so that luck in choosing does not count
                        └─► terminal  mean of the last TERMINAL evaluations
    drop = peak - terminal;  a cliff: the interval of the drop excludes zero, and it is at least GAIN_SHARE of the gain

The gain is peak - base. All accuracies are kept per problem, so that runs are compared problem by problem. Whether the
texts lost their form, too, is judged from the metrics.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from marl_jax.alarms.monitors import WINDOW
from marl_jax.study.intervals import Interval, over_seeds
from marl_jax.study.record import Record, Run, once, trained

TERMINAL = 3  # evaluations whose mean is the terminal accuracy
GAIN_SHARE = 0.1  # the drop of a cliff is at least this share of the gain
FORM = ("readability", "truncation", "length")  # alarms about the form of texts
REPEATED = 0.2  # a role lost its form if the share of tokens that it repeats rises by this

CLIFF = (
    f"Terminal is the mean of the last {TERMINAL} evaluations. The peak is chosen on one half of the problems and "
    "measured on the other, both ways round, so that choosing the highest of several noisy values does not raise it. A "
    "cliff is a drop from peak to terminal whose 95% interval excludes zero, and that is at least a tenth of the "
    "peak's gain over the base."
)

PerProblem = np.ndarray  # Float[P]: share of right answers to each problem


@dataclasses.dataclass(frozen=True)
class Course:
    """The evaluations along a run, problem by problem; all are on the same problems."""

    steps: Sequence[int]  # E, after the start
    right: np.ndarray  # Float[E, P]
    base: PerProblem | None  # before the first step
    finished: bool  # False if the run was stopped before its last step

    @property
    def peak_steps(self) -> tuple[int, int]:
        """The steps that the problems at even and at odd indices choose; the earliest of equals."""
        # Means of equal numbers of right answers may differ in their last bits.
        even, odd = (self.right[:, half::2].mean(axis=1).round(9) for half in (0, 1))
        return self.steps[int(np.argmax(even))], self.steps[int(np.argmax(odd))]

    @property
    def peak(self) -> PerProblem:
        """Accuracy of each problem at the checkpoint that the other half of the problems chose."""
        by_even, by_odd = (self.right[list(self.steps).index(step)] for step in self.peak_steps)
        peak = by_even.copy()
        peak[0::2] = by_odd[0::2]
        return peak

    @property
    def terminal(self) -> PerProblem:
        """Mean accuracy of each problem over the last evaluations."""
        return self.right[-TERMINAL:].mean(axis=0)


def per_problem(record: Record | None) -> PerProblem | None:
    """An evaluation's accuracy on each problem; None without an evaluation, or if it lacks a number for a problem."""
    values = (record or {}).get("per_problem")
    known = isinstance(values, list) and all(type(v) in (int, float) and math.isfinite(v) for v in values)
    return np.array(values, float) if known and values else None


@once
def course(run: Run) -> Course | None:
    """The course of a run; None with fewer than TERMINAL evaluations after the start, or too few problems for halves.

    Only evaluations on the problems of the last one count; `why_none` says in words what is missing.
    """
    records, later = _on_same_problems(run), _later(run)
    if len(later) < TERMINAL or len(later[0]["per_problem"]) < 2:
        return None
    start = next((record["per_problem"] for record in records if record["step"] == 0), None)
    return Course(
        [int(record["step"]) for record in later],
        np.array([record["per_problem"] for record in later], float),
        None if start is None else np.array(start, float),
        run.finished,
    )


def why_none(run: Run) -> str:
    """Why a run has no peak and no terminal accuracy, in one sentence."""
    later = _later(run)
    if not later:
        return "Peak and terminal accuracy need evaluations after the start, with results by problem; none is recorded."
    return (
        f"Peak and terminal accuracy need {TERMINAL} evaluations after the start on the same two or more problems; "
        f"there {'is' if len(later) == 1 else 'are'} {len(later)}{' of one problem' if len(later) >= TERMINAL else ''}."
    )


def lacks(run: Run) -> str:
    """The reason that `why_none` gives, in few words."""
    count = len(_later(run))
    return f"{count} of {TERMINAL} evaluations" if count < TERMINAL else "one problem"


def drop_of(courses: Sequence[Course]) -> Interval | None:
    """Peak minus terminal, over seeds and problems; None if the runs have different numbers of problems."""
    drops = [one.peak - one.terminal for one in courses]
    if not drops or len({len(drop) for drop in drops}) != 1:
        return None
    return over_seeds(np.array(drops), bounds=(-1.0, 1.0))


def is_cliff(courses: Sequence[Course]) -> bool | None:
    """Whether the runs fell off a cliff, judged together; None if that is not known."""
    drop = drop_of(courses)
    if drop is None or any(one.base is None for one in courses):
        return None
    gain = float(np.mean([np.mean(one.peak - one.base) for one in courses]))
    return drop.low > 0 and drop.mean >= GAIN_SHARE * gain - 1e-9


@once
def fell(run: Run) -> bool | None:
    """Whether a run fell off a cliff, judged by itself; None if that is not known."""
    end = course(run)
    return is_cliff([end]) if end else None


def form_of(runs: Sequence[Run]) -> str:
    """In words, how the texts of some runs lost their form."""
    if not any(run.metrics for run in runs):
        return "not recorded"
    lost = ", ".join(dict.fromkeys(sign for run in runs for sign in form_lost(run)))
    unknown = not all(run.keys("repeated/.+") for run in runs)
    return (lost or "kept") + ("; repetition not recorded" if unknown else "")


@once
def form_lost(run: Run) -> list[str]:
    """How the texts of a run lost their form by its end, by role; if empty, a fall is one of accuracy alone."""
    lost = [alarm.title for alarm in run.watch.holding if alarm.monitor.name in FORM]
    for match in run.keys("repeated/(.+)"):
        shares = run.series(match[0]).known.values
        if len(shares) >= WINDOW and shares[-WINDOW:].mean() - shares[0] >= REPEATED - 1e-9:
            lost.append(f"repetition ({match[1]})")
    return lost


def _later(run: Run) -> list[Record]:
    """The evaluations after the start, on the problems of the last one."""
    return [record for record in _on_same_problems(run) if record["step"] > 0]


@once
def _on_same_problems(run: Run) -> list[Record]:
    """The evaluations with per-problem accuracies, on the problems of the last of them."""
    known = [record for record in trained(run) if per_problem(record) is not None]
    if not known:
        return []
    same = lambda record: (record.get("data"), record.get("problems"), len(record["per_problem"]))
    return [record for record in known if same(record) == same(known[-1])]
