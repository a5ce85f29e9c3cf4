"""The curves of a run: small multiples over the training step, one colour per role.

    Run ──panels──► [Panel] ──► drawing: inline pictures of the page, one image file

A panel is plain data, with the sentence that says how to read it.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from marl_jax.study.record import (
    Run,
    Series,
    amplifications,
    base,
    best,
    gradient_norms,
    gradient_shares,
    trained,
)

SMOOTH_FROM, WINDOWS = 40, 25  # so many steps get a running mean over a 25th of them

ACCURACY, REWARD = "Accuracy on validation problems", "Reward"
OVERVIEW = (ACCURACY, REWARD)  # of a page over many runs


@dataclasses.dataclass(frozen=True)
class Line:
    """A curve, with its band if it has one."""

    name: str
    series: Series
    colour: int | None = None  # the how-manyeth; None is ink
    low: np.ndarray | None = None
    high: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Panel:
    """One picture and the sentence that says how to read it."""

    title: str
    how: str
    lines: Sequence[Line]
    percent: bool = False
    points: bool = False  # marks at the values, and no running mean
    logarithmic: bool = False
    level: tuple[float, str] | None = None  # a horizontal line to compare with
    mark: tuple[float, float, str] | None = None  # step and value of a point to be named
    bounds: tuple[float | None, float | None] = (None, None)
    last_step: int = 0


def panels(run: Run) -> list[Panel]:
    """Every picture that the run has numbers for, accuracy first."""
    found = [accuracy(run), *_of_roles(run)]
    return [panel for panel in found if panel is not None]


def accuracy(run: Run) -> Panel | None:
    """Accuracy of the whole workflow on the validation split."""
    records = trained(run)
    if not records:
        return None
    numbers = lambda key: np.array([np.nan if r.get(key) is None else r[key] for r in records], float)
    line = Line(
        "accuracy",
        Series(numbers("step"), numbers("accuracy")),
        None,
        np.where(np.isnan(numbers("ci_low")), numbers("accuracy"), numbers("ci_low")),
        np.where(np.isnan(numbers("ci_high")), numbers("accuracy"), numbers("ci_high")),
    )
    start, top = base(run), best(records)
    return Panel(
        ACCURACY,
        "Each point is an evaluation of the whole workflow, the band its 95% interval"
        + ("; the dashed line is the base, before training." if start else "; the base was not evaluated."),
        [line],
        percent=True,
        points=True,
        level=(start["accuracy"], "base") if start else None,
        mark=(top["step"], top["accuracy"], f"best {top['accuracy']:.1%}")
        if top["accuracy"] > records[-1]["accuracy"]
        else None,
        last_step=run.step,
    )


def _of_roles(run: Run) -> Iterator[Panel | None]:
    tones = {role: i for i, role in enumerate(run.roles)}
    rewards = {role: run.series(f"reward/{role}") for role in run.roles}
    lines = _lines(rewards, tones)
    outcome = Line("outcome", run.series("reward"))
    if len(outcome.series.known.steps):
        lines = [outcome, *lines]
    how = "Mean reward of each role's calls, and mean outcome of the episodes."
    if len(run.series("draws/first_reward").known.steps):
        how += " Problems that taught nothing were drawn again: what was kept is no fair sample of them."
    yield _panel(run, REWARD, how, lines)

    norms = gradient_norms(run)
    lines = _lines(norms, tones)
    values = np.concatenate([line.series.known.values for line in lines]) if lines else np.array([])
    positive = values[values > 0]
    logarithmic = len(positive) == len(values) and len(values) > 0 and positive.max() > 30 * positive.min()
    yield _panel(
        run,
        "Gradient norm",
        "Length of the part of the gradient that comes from a role's calls, before clipping"
        + (", on a logarithmic scale." if logarithmic else "."),
        lines,
        logarithmic=logarithmic,
    )
    if len(norms) > 1:
        yield _panel(
            run,
            "Share of gradient mass",
            "A role's norm over the sum of all; "
            + (
                "a role far above the dashed equal share takes a shared policy over."
                if len(set(run.policy_map.values())) < len(norms)
                else "roles with policies of their own do not compete, so it only shows whose gradients are large."
            ),
            _lines(gradient_shares(norms), tones),
            percent=True,
            level=(1 / len(norms), "equal"),
            bounds=(0, 1),
        )
    yield _panel(
        run,
        "Amplification",
        "Summed gradient over the mean length of its parts: their number where they agree, its square root where "
        "they are unrelated, 0 where they cancel.",
        _lines(amplifications(run), tones),
        bounds=(0, None),
    )
    for title, how, key in (
        ("Completion length", "Mean number of tokens of a role's completions.", "length"),
        ("Entropy", "Mean entropy of a role's tokens in nats; near zero it no longer explores.", "entropy"),
    ):
        series = {role: run.series(f"role/{role}/{key}") for role in run.roles}
        yield _panel(run, title, how, _lines(series, tones), bounds=(0, None))


def _lines(series: Mapping[str, Series], tones: Mapping[str, int]) -> list[Line]:
    return [
        Line(name, one, tones.get(name.split(" (")[0], len(tones) + place))
        for place, (name, one) in enumerate(series.items())
        if len(one.known.steps)
    ]


def _panel(run: Run, title: str, how: str, lines: Sequence[Line], **more: Any) -> Panel | None:
    return Panel(title, how, lines, last_step=run.step, **more) if lines else None


def legend(pictures: Sequence[Panel]) -> str:
    """What holds for all pictures of steps; nothing where their lines are not smoothed."""
    windows = {
        smoothing(len(line.series.steps)) for panel in pictures if not panel.points for line in panel.lines
    }
    if windows <= {1}:
        return ""
    return f"Thin lines are single steps, thick ones the mean of the last {max(windows)}; the number is where they end."


def smoothing(steps: int) -> int:
    """Steps that the running mean of so many is taken over; 1 is none."""
    return 1 if steps < SMOOTH_FROM else max(3, steps // WINDOWS)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` values that are not NaN, up to each; NaN where there is none."""
    there = np.isfinite(values)
    totals = np.concatenate([[0.0], np.cumsum(np.where(there, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(there)])
    stop = np.arange(1, len(values) + 1)
    start = np.maximum(stop - window, 0)
    count = counts[stop] - counts[start]
    return np.where(count > 0, (totals[stop] - totals[start]) / np.maximum(count, 1), np.nan)
