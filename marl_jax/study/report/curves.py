"""The curves of a run: small multiples over the training step, one colour per role.

    Run ──panels──► [Panel] ──► drawing: inline pictures of the page, one image file

A panel is plain data, with the sentence that says how to read it.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from marl_jax.study import record
from marl_jax.study.record import Run, Series
from marl_jax.study.seeds import by_cell

ACCURACY, REWARD = "Accuracy on validation problems", "Reward"
OVERVIEW = (ACCURACY, REWARD)  # panels of a page over many runs
MOST = 8  # runs on one axis with a line each; more are shown by cell
FIRST = 16  # cells that are shown at first; more on one axis cannot be told apart


@dataclasses.dataclass(frozen=True)
class Line:
    """A curve, with its band if there is one."""

    name: str
    series: Series
    colour: int | None = None  # index of its colour; None is ink
    band: tuple[np.ndarray, np.ndarray] | None = None
    count: Series | None = None  # the number of items of which each value is a mean or a sum
    of: str = ""  # the name of these items
    on: bool = True  # shown at first


@dataclasses.dataclass(frozen=True)
class Panel:
    """One picture and the sentence that says how to read it."""

    title: str
    how: str
    lines: Sequence[Line]
    percent: bool = False
    unit: str = ""  # unit of the values, if they have one other than percent
    points: bool = False  # draw marks at the values, and no running mean
    logarithmic: bool = False
    level: tuple[float, str] | None = None  # a horizontal line to compare with
    mark: tuple[float, float, str] | None = None  # step, value and name of a point
    bounds: tuple[float | None, float | None] = (None, None)
    last_step: int = 0


def panels(run: Run) -> list[Panel]:
    """Every picture that the run has numbers for, accuracy first."""
    colours = {role: place for place, role in enumerate(run.roles)}

    def of_roles(
        series: Mapping[str, Series], counts: Mapping[str, Series] | None = None, of: str = "calls"
    ) -> list[Line]:
        return [
            Line(
                name,
                curve,
                colours.get(name, len(colours) + place),  # a role on several policies has one for each
                count=run.series(f"role/{name}/rows") if counts is None else counts.get(name),
                of=of,
            )
            for place, (name, curve) in enumerate(series.items())
            if len(curve.known.steps)
        ]

    def statistic(key: str) -> list[Line]:
        return of_roles({role: run.series(f"role/{role}/{key}") for role in run.roles})

    outcome = Line("outcome", run.series("reward"), count=record.episodes(run), of="episodes")
    rewards = of_roles({role: run.series(f"reward/{role}") for role in run.roles})
    norms = record.gradient_norms(run)
    # Calls of roles are counted only if the gradient's parts by role are known.
    calls: dict[str, Series] | None = None if run.keys("gradient/[^/]+/norm/.+") else {}
    amplified = record.amplifications(run)
    logarithmic = _spread_widely(norms)
    competing = len(set(run.policy_map.values())) < len(norms)
    drawn_again = len(run.series("draws/first_reward").known.steps) > 0
    found = [
        accuracy(run),
        Panel(
            REWARD,
            "Mean reward of each role's calls, and mean outcome of the episodes."
            + " Problems that taught nothing were drawn again, so the kept ones are no fair sample."
            * drawn_again,
            [outcome, *rewards] if len(outcome.series.known.steps) else rewards,
        ),
        Panel(
            "Gradient norm",
            "Length of the part of the gradient that comes from a role's calls, before clipping"
            + (", on a logarithmic scale." if logarithmic else "."),
            of_roles(norms, calls),
            logarithmic=logarithmic,
        ),
        Panel(
            "Share of gradient mass",
            "A role's norm over the sum of all; "
            + (
                "a role far above the dashed equal share takes over a shared policy."
                if competing
                else "roles with policies of their own do not compete, so it only shows whose gradients are large."
            ),
            of_roles(record.gradient_shares(norms), calls) if len(norms) > 1 else [],
            percent=True,
            level=(1 / max(len(norms), 1), "equal"),
            bounds=(0, 1),
        ),
        Panel(
            "Amplification",
            "Length of the summed gradient over the mean length of its n parts: n if they agree, the square root of n "
            "if they are unrelated, 0 if they cancel.",
            of_roles(
                {name: series for name, (series, _) in amplified.items()},
                {name: parts for name, (_, parts) in amplified.items()},
                of="parts",
            ),
            unit="times",
            bounds=(0, None),
        ),
        Panel(
            "Completion length",
            "Mean number of tokens of a role's completions.",
            statistic("length"),
            unit="tokens",
            bounds=(0, None),
        ),
        Panel(
            "Entropy",
            "Mean entropy of a role's tokens in nats; near zero it no longer explores.",
            statistic("entropy"),
            unit="nats",
            bounds=(0, None),
        ),
    ]
    return [dataclasses.replace(panel, last_step=run.step) for panel in found if panel and panel.lines]


def accuracy(run: Run) -> Panel | None:
    """Accuracy of the whole workflow on the validation split."""
    records = record.trained(run)
    if not records:
        return None
    steps, values, low, high, problems = (
        np.array([np.nan if one.get(key) is None else one[key] for one in records], float)
        for key in ("step", "accuracy", "ci_low", "ci_high", "problems")
    )
    band = np.where(np.isnan(low), values, low), np.where(np.isnan(high), values, high)
    start, top = record.base(run), record.best(records)
    return Panel(
        ACCURACY,
        "Each point is an evaluation of the whole workflow, the band its 95% interval"
        + ("; the dashed line is the base, before training." if start else "; the base was not evaluated."),
        [Line("accuracy", Series(steps, values), band=band, count=Series(steps, problems), of="problems")],
        percent=True,
        points=True,
        level=(start["accuracy"], "base") if start else None,
        mark=(top["step"], top["accuracy"], f"best {top['accuracy']:.1%}")
        if top["accuracy"] > records[-1]["accuracy"]
        else None,
        last_step=run.step,
    )


def overlay(runs: Mapping[str, Run], title: str) -> Panel:
    """The first curves of all panels with a title, a line for each run; if the runs are many, a line for each cell."""
    matching = {name: panel for name, run in runs.items() for panel in panels(run) if panel.title == title}
    firsts = {name: panel.lines[0] for name, panel in matching.items()}
    groups, what, each = {name: [name] for name in matching}, "run", ""
    if many := len(matching) > MOST:
        cells = by_cell([runs[name] for name in matching])
        names = {id(runs[name]): name for name in matching}
        groups = {cell.label: [names[id(run)] for run in cell.runs] for cell in cells}
        seeds = spread(map(len, groups.values()))
        what = f"cell, the mean of its {seeds} runs with a band from the lowest to the highest"
        counts = [line.count.known.values for line in firsts.values() if line.count]
        each = f", of {known} {next(iter(firsts.values())).of} each" if (known := spread(*counts)) else ""
    lines = [
        _of_cell(name, [firsts[one].series for one in group], place)
        if many
        else dataclasses.replace(firsts[name], name=name, colour=place, band=None)
        for place, (name, group) in enumerate(groups.items())
    ]
    lines = [line for line in lines if len(line.series.steps)]  # runs of a cell may share no step
    # Unchanged cells come first.
    first = [line.name for line in sorted(lines, key=lambda line: "+" in line.name)[:FIRST]]
    lines = [dataclasses.replace(line, on=line.name in first) for line in lines]
    few = f" {FIRST} of {len(lines)} are shown at first." if len(lines) > FIRST else ""
    return dataclasses.replace(
        next(iter(matching.values()), Panel("", "", ())),
        title=title,
        how=f"A line for each {what}{each}; a name below shows or hides it.{few}",
        lines=lines,
        level=None,
        mark=None,
        last_step=max((panel.last_step for panel in matching.values()), default=0),
    )


def spread(*numbers: Iterable[float]) -> str:
    """The smallest and the largest number as text, or the only one; empty without numbers."""
    ends = sorted(set(itertools.chain(*numbers)))
    return " to ".join(f"{end:,.0f}" for end in dict.fromkeys([*ends[:1], *ends[-1:]]))


def _of_cell(name: str, series: Sequence[Series], colour: int) -> Line:
    """The mean of a cell's runs at the steps that all of them have; the least and the greatest are the band."""
    steps, values = record.at_common_steps(series)
    return Line(name, Series(steps, values.mean(axis=0)), colour, (values.min(axis=0), values.max(axis=0)))


def _spread_widely(norms: Mapping[str, Series]) -> bool:
    """Whether a logarithmic scale is needed and possible."""
    values = np.concatenate([np.zeros(0), *(series.known.values for series in norms.values())])
    return len(values) > 0 and values.min() > 0 and values.max() > 30 * values.min()
