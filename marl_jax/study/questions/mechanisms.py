"""Mechanisms: how gradients add up, which role leads a shared policy, and whether a fall can be predicted.

runs ──► amplification (question 3), capture (4), prediction (7) ──► Finding
"""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from marl_jax.study.cliffs import course, fell, form_lost
from marl_jax.study.intervals import Interval, over_runs
from marl_jax.study.questions.bars import LEVEL, NOT_RUN, Bar, Finding
from marl_jax.study.record import Run, Series, at_common_steps, once, parts_of
from marl_jax.study.seeds import Cell, essential
from marl_jax.study.wording import NONE, Table, p_text

ABOVE = "above an even share"  # verdict on the role with the largest share of a cell
MOST = 9999  # orders of a permutation test
HELD_OUT = 1  # remainder of the seeds by 2: odd seeds test what even seeds chose


# ---------------------------------------------------------------- gradients


def amplification(runs: Sequence[Run]) -> Finding:
    """How a role's gradient grows with the number of its parallel agents, and how Adam's update follows it."""
    question = (
        "How does a role's gradient change with n parallel agents of it, and does Adam's update follow it?"
    )
    doubt = "Another power of n at a later stage of training, at larger scale, or where agents see different prompts."
    # By role and configuration but for the workflow's settings, room for them and the seed: {(agents, seed): for each
    # run the amplification, the lengths of sum and update, and the amplification of independent agents}.
    series: dict[str, dict[tuple[int, int], list[tuple[float, ...]]]] = {}
    for run in runs:
        fields = essential(run.config)
        for part, name in (("workflow", "settings"), ("learner", "batch"), ("engine", "max_prompt")):
            fields[part] = {**(fields.get(part) or {}), name: None}
        for match in run.keys("gradient/([^/]+)/slots/([^/]+)/amplification"):
            keys = match[0], f"gradient/{match[1]}/norm/{match[2]}", f"policy/{match[1]}/update_norm"
            parts = [run.series(key) for key in parts_of(run, match[0])]
            means, agents = (*(_mean(run.series(key)) for key in keys), _independent(parts)), len(parts)
            if all(map(math.isfinite, means)):
                key = json.dumps([match[2], fields], sort_keys=True)
                place = agents, int(run.config["seed"])
                series.setdefault(key, {}).setdefault(place, []).append(means)
    # The numbers of a role that always has one agent cannot stand for one agent of another role.
    several = {key: runs_of for key, runs_of in series.items() if any(agents > 1 for agents, _ in runs_of)}
    found = several[max(several, key=lambda key: (len(several[key]), key))] if several else {}
    counts, seeds = (sorted({place[k] for place in found}) for k in (0, 1))
    complete = [seed for seed in seeds if all((agents, seed) in found for agents in counts)]
    if sum(agents > 1 for agents in counts) < 2 or not complete:
        return Finding(question, NOT_RUN, doubt)
    means_of = [[np.mean(found[agents, seed], axis=0) for seed in complete] for agents in counts]
    amplified, sums, updates, alone = np.moveaxis(np.array(means_of), -1, 0)  # each Float[counts, seeds]
    bars, rows = [], []
    for agents, *values in zip(counts, amplified, sums / sums[0], updates / updates[0]):
        name = f"{agents} agent{'s' if agents > 1 else ''}"
        intervals = [over_runs(one) for one in values]
        bars.append(Bar(name, intervals[0], values[0].tolist(), level=math.sqrt(agents)))
        over_alone = over_runs(values[0] / math.sqrt(agents))
        rows.append(
            (str(agents), str(len(complete)), *map(_number, (intervals[0], over_alone, *intervals[1:])))
        )
    first = sum(agents < 2 for agents in counts)
    power, of_sum = growth_of_several(bars), growth(counts, sums.T)
    of_alone = growth(counts[first:], alone[first:].T)
    parallel = [row for row in rows if int(row[0]) > 1]
    answer = (
        "Relative to the mean length of one agent's part, the sum of the parts of 2 agents or more grows with n to the "
        f"power of {_number(power)}: it grows as for {_alike(power)}. With {parallel[0][0]} agents it is "
        f"{parallel[0][3]} times that of independent ones, with {parallel[-1][0]} {parallel[-1][3]} times. The sum "
        f"itself, the role's gradient, scales with n to the power of {_number(of_sum)}: with {counts[-1]} agents it is "
        f"{rows[-1][-2]} times as long as with {counts[0]}, and Adam's update {rows[-1][-1]} times."
    ) + (f" Left out: {len(several) - 1} smaller series of other cells or roles." if len(several) > 1 else "")
    how = (
        "Amplification is |sum g| / mean |g| over the parallel agents, averaged over the kept steps. For n independent "
        "agents it is the square root of n if their parts are equally long; with the measured lengths it would be n "
        f"to the power of {of_alone.mean:.3f}. That of one agent is 1 by definition, so its powers are those of 2 or "
        "more. Lengths of the sum and of Adam's update are relative to those with the fewest agents. 95% t intervals "
        "over seeds."
    )
    head = "agents", "seeds", "amplification", "over √n", "length of the sum", "length of the update"
    table = Table("Agents", rows, head, how)
    return Finding(question, answer, doubt, bars, "times", "what independent agents give", [table])


def _independent(parts: Sequence[Series]) -> float:
    """The amplification of orthogonal parts of these lengths, mean over the steps."""
    if not parts:
        return math.nan
    _, lengths = at_common_steps(part.known for part in parts)
    lengths = lengths[:, lengths.any(axis=0)]  # a step without a gradient has no ratio
    return float(np.mean(np.sqrt((lengths**2).sum(0)) / lengths.mean(0))) if lengths.size else math.nan


def _alike(power: Interval) -> str:
    """How alike the gradients of n agents are if their sum grows with this power of n."""
    independent, aligned = (power.low <= exponent <= power.high for exponent in (0.5, 1.0))
    if independent and aligned:
        return "independent or aligned agents, which these runs cannot tell apart"
    if independent:
        return "independent agents (n to the power of 0.5)"
    if aligned:
        return "aligned agents (n)"
    if power.high < 0.5:
        return "opposed agents (below n to the power of 0.5)"
    nearer = "independent" if power.mean < 0.75 else "aligned"
    return f"agents between independent (n to the power of 0.5) and aligned (n), nearer to {nearer}"


def capture(cells: Sequence[Cell]) -> Finding:
    """Which role's gradient dominates a shared policy, and whether that predicts the change of accuracy."""
    question = "Which role's gradient dominates a shared policy, and does it foretell what happens later?"
    doubt = "A rank correlation of the same sign, with p below 0.05, on the seeds that were held out."
    shared = [cell for cell in cells if cell.shared]
    bars, leading, share_rows = [], dict[str, list[str]](), list[tuple[str, ...]]()
    points: list[list[tuple[int, float, float]]] = []  # for each cell: (seed, dominance, change of accuracy)
    for cell in shared:
        by_role: dict[str, list[float]] = {}
        for run in cell.runs:
            for role, share in _shares(run).items():
                by_role.setdefault(role, []).append(share)
        halves = [(int(run.config["seed"]), _half_way(run)) for run in cell.runs if run.finished]
        points.append([(seed, *half) for seed, half in halves if half])
        means, even = {role: _share(values) for role, values in by_role.items()}, 1 / max(len(by_role), 1)
        bars += [Bar(f"{cell.label}: {role}", means[role], by_role[role], level=even) for role in means]
        if means:
            leader = max(means, key=lambda role: means[role].mean)
            leading.setdefault(leader, []).append(f"{cell.label} ({means[leader].mean:.0%})")
            others = "; ".join(f"{role} {one.mean:.2f}" for role, one in means.items() if role != leader)
            verdict = ABOVE if means[leader].low > even else "not shown"
            numbers = (_number(means[leader]), f"{even:.2f}", others or NONE, str(len(by_role[leader])))
            share_rows.append((cell.label, leader, verdict, *numbers))
    if not bars:
        return Finding(question, NOT_RUN, doubt)
    rows = []
    for name, parts in (("even seeds", (0,)), ("odd seeds, held out", (HELD_OUT,)), ("all seeds", (0, 1))):
        some = [np.array([p[1:] for p in cell if p[0] % 2 in parts]).T for cell in points]
        groups = [group for group in some if group.size > 2]
        runs = sum(group.shape[1] for group in groups)
        rho, p = _ranks(groups) if runs > 2 else (math.nan, math.nan)
        # The p of ranks that agree in all groups: the share of this order and its reverse among all orders.
        least = 2 / math.prod(math.factorial(group.shape[1]) for group in groups)
        p_cell = f"{p_text(p)}, least possible {least:.2g}" if runs > 2 and least > LEVEL else p_text(p)
        rows.append((name, str(len(groups)), str(runs), NONE if math.isnan(rho) else f"{rho:+.2f}", p_cell))
    _, tested, every = rows
    in_words = lambda row: f"{row[3]} over {row[2]} runs (p {row[4]})"
    leaders = "; ".join(f"{role} in {', '.join(names)}" for role, names in leading.items())
    answer = f"The role with the largest share of the gradient is {leaders}. "
    if tested[3] != NONE:
        answer += (
            "On held-out seeds, dominance in the first half of a run and the change of accuracy in the second have "
            f"a rank correlation, within cells, of {in_words(tested)}."
        )
    else:
        answer += (
            "There are too few runs of held-out seeds (the odd ones) to say whether dominance foretells what follows: "
            "a cell counts if it has two of them, such as seeds 1 and 3"
        )
        over_all = f"; within cells, over all seeds, the rank correlation is {in_words(every)}"
        answer += f"{over_all}." if every[3] != NONE else "."
    how = (
        "Rank correlation of the mean dominance (the largest share) over the first half of a run's steps with the "
        "change of accuracy from there to its end. Ranks are within a cell, so that differences between workflows do "
        "not count, nor do cells with one run. p is by permutation within cells; with few runs it cannot be small."
    )
    later = Table("Dominance and what follows", rows, ("", "cells", "runs", "correlation", "p"), how)
    how = (
        "A role's share is the length of its part of the gradient over the sum of all roles' lengths, mean over the "
        "kept steps, with 95% t intervals over seeds. In each cell the role with the largest share is picked and then "
        "tested by the same numbers: it is above an even share if its interval is. Nothing corrects for this choice."
    )
    head = ("", "role", "", "share", "even share", "other roles", "seeds")
    shares = Table("Shares of the gradient", share_rows, head, how, words=3)
    return Finding(question, answer, doubt, bars, "share of gradient mass", "an even share", [shares, later])


def _shares(run: Run) -> dict[str, float]:
    """{role: its mean share of the gradient} over the steps that had a gradient; empty without such a step."""
    keys = {match[0]: match[1] for match in run.keys("gradient/[^/]+/share/([^/]+)")}
    moved = [line for line in run.metrics if any(map(line.get, keys))]
    return {
        role: float(np.mean([line.get(key) or 0.0 for line in moved])) for key, role in keys.items() if moved
    }


def _half_way(run: Run) -> tuple[float, float] | None:
    """Dominance before the middle of a run, and the change of accuracy after it."""
    end = course(run)
    dominance = [run.series(match[0]).known for match in run.keys("gradient/[^/]+/dominance")]
    if end is None or not dominance:
        return None
    middle = run.step / 2
    early = dominance[0].values[dominance[0].steps <= middle]
    near = min(range(len(end.steps)), key=lambda k: abs(end.steps[k] - middle))
    # Rounded, so that equal counts of right answers are ties.
    change = round(float(end.terminal.mean() - end.right[near].mean()), 9)
    return (float(early.mean()), change) if len(early) else None


# ---------------------------------------------------------------- prediction of cliffs


# Statistics of roles; each role is compared with its own start.
MONITORS = ("entropy", "length", "approx_kl", "advantage_zero_share")
FACTORS = (3.0, 2.0, 1.5, 1 / 1.5, 1 / 2.0, 1 / 3.0)


def prediction(cells: Sequence[Cell]) -> Finding:
    """Choose the monitor and threshold that best separate falling runs from others on even seeds; test on odd seeds."""
    question = "Can a simple monitor foretell a cliff, and what does stopping by it save?"
    doubt = "A monitor that keeps its hits and its silence on other seeds and cells."
    early = sum(not run.finished for cell in cells for run in cell.runs)
    left_out = f" Left out: {early} runs that did not make all their steps." if early else ""
    runs = [run for cell in cells for run in cell.runs if run.finished and fell(run) is not None]
    if not runs:
        return Finding(question, NOT_RUN, doubt)
    fallen = [run for run in runs if fell(run)]
    lost = sum(bool(form_lost(run)) for run in fallen)
    summary = f"{len(fallen)} of {len(runs)} runs fell off a cliff" + (
        f", {lost} with a loss of form" if fallen else ""
    )
    even, odd = ([run for run in runs if run.config["seed"] % 2 == part] for part in (0, HELD_OUT))
    if not any(map(fell, even)):
        where = ", none of them with an even seed" if fallen else ""
        return Finding(question, f"{summary}{where}, so no monitor can be chosen.{left_out}", doubt)
    monitors = [_monitor(key, factor) for key in MONITORS for factor in FACTORS]
    name, fires = max(monitors, key=lambda one: _score(even, one[1]))
    rows = []
    for seeds, group in (("even seeds, chosen by", even), ("odd seeds, tested on", odd)):
        kinds, falls = _stops(group, fires), sum(map(fell, group))
        stops = [stop for kind in kinds.values() for stop in kind]
        before, late, false = map(len, kinds.values())
        counts = (len(group), falls, before, late, false, len(stops))
        kept = f"{np.mean([_saved(run, step) for run, step in stops]):+.1f}" if stops else NONE
        spared = f"{np.mean([1 - step / run.steps for run, step in stops]):.0%}" if stops else NONE
        rows.append((seeds, *map(str, counts), kept, spared))
    answer = (
        f"{summary}. On even seeds '{name}' separated these from the others best (share of falls foretold minus "
        f"that of false alarms {_score(even, fires):+.2f}). On odd seeds it fired before {before} of {falls} falls, "
        f"too late in {late}, and in {false} of {len(odd) - falls} runs that did not fall."
    )
    if stops:
        answer += f" Stopping there changes accuracy by {kept} points on average over the {len(stops)} runs it stops."
    saved = {label: [_saved(run, at) for run, at in kind] for label, kind in kinds.items()}
    bars = [Bar(label, over_runs(values), values) for label, values in saved.items() if values]
    how = (
        "A run has fallen at the first evaluation after its peak that is below the middle of peak and terminal "
        "accuracy; an alarm foretells the fall if it comes before. Points are the accuracy of the last evaluation "
        "before the alarm minus the terminal one, over all runs that are stopped, false alarms included."
    )
    counted = ("runs", "falls", "foretold", "too late", "false alarms", "stopped")
    head = ("", *counted, "points kept", "steps saved")
    table = Table("Stopping by the monitor", rows, head, how)
    return Finding(question, answer + left_out, doubt, bars, tables=[table])


Alarm = Callable[[Run], float | None]  # the step of a run at which a monitor fires first


@once
def _fall(run: Run) -> float:
    """The step by which a run that fell had fallen off its cliff."""
    end = course(run)
    assert end is not None
    middle = (end.peak.mean() + end.terminal.mean()) / 2
    after = [(step, right.mean()) for step, right in zip(end.steps, end.right) if step > max(end.peak_steps)]
    return next((step for step, share in after if share < middle), end.steps[-1])


def _stops(runs: Sequence[Run], fires: Alarm) -> dict[str, list[tuple[Run, float]]]:
    """The runs that an alarm stops, each with its step, by how the alarm relates to the fall."""
    stops: dict[str, list[tuple[Run, float]]] = {
        "stopped before a fall": [],
        "stopped after a fall": [],
        "stopped without a fall": [],
    }
    before, late, false = stops.values()
    for run in runs:
        if (step := fires(run)) is not None:
            (false if not fell(run) else before if step < _fall(run) else late).append((run, step))
    return stops


def _monitor(key: str, factor: float) -> tuple[str, Alarm]:
    """A monitor's name, and the function that gives the step of a run at which it fires first."""

    def fires(run: Run) -> float | None:
        window, firsts = max(run.steps / 10, 1), []
        for role in run.roles:
            steps, values = run.series(f"role/{role}/{key}").known
            begin = values[steps <= window].mean() if (steps <= window).any() else 0.0
            for step in steps[steps > window] if begin else ():
                now = values[(steps > step - window) & (steps <= step)].mean() / begin
                if (now >= factor) if factor > 1 else (now <= factor):
                    firsts.append(float(step))
                    break
        return min(firsts, default=None)

    way = f"rises to {factor:g}" if factor > 1 else f"falls to {factor:.2g}"
    return f"{key} {way} times its start", fires


def _score(runs: Sequence[Run], fires: Alarm) -> float:
    """Share of falls with an alarm before them, minus the share of other runs with one."""
    before, _, false = map(len, _stops(runs, fires).values())
    falls = sum(map(fell, runs))
    return before / max(falls, 1) - false / max(len(runs) - falls, 1)


def _saved(run: Run, step: float) -> float:
    """Points of accuracy at the evaluation at or before a step, minus the terminal ones."""
    end: Any = course(run)
    earlier = [k for k, at in enumerate(end.steps) if at <= step]
    before = end.right[earlier[-1]] if earlier else end.base
    return 100 * float(before.mean() - end.terminal.mean())


# ---------------------------------------------------------------- numbers


def _mean(series: Series) -> float:
    return float(series.known.values.mean()) if len(series.known.values) else math.nan


def growth(counts: Sequence[float], runs: Sequence[Sequence[float]] | np.ndarray) -> Interval:
    """The power of the count with which the values of a run grow: the slope of the logarithms, over runs."""
    return over_runs([float(np.polyfit(np.log(counts), np.log(values), 1)[0]) for values in runs])


def growth_of_several(bars: Sequence[Bar]) -> Interval:
    """The power of n with which amplification grows, from 2 agents on: that of one agent is 1 by definition."""
    some = [bar for bar in bars if bar.level > 1]
    return growth([bar.level**2 for bar in some], list(zip(*(bar.runs for bar in some))))


def _ranks(groups: Sequence[np.ndarray]) -> tuple[float, float]:  # each group is [2, n]
    """Rank correlation within groups (for one group Spearman's), and its p by permutation within them.

    The p is over all orders if they are at most MOST, else over MOST drawn ones. NaN if no group has several values of
    both.
    """
    from scipy import stats

    ranks = [np.array([stats.rankdata(row) - (len(row) + 1) / 2 for row in group]) for group in groups]
    first, second = np.concatenate(ranks, axis=1)
    scale = math.sqrt(float(first @ first) * float(second @ second))
    if not scale:
        return math.nan, math.nan
    ys = [pair[1] for pair in ranks]
    if math.prod(math.factorial(len(values)) for values in ys) <= MOST:
        orders = [np.concatenate(order) for order in itertools.product(*map(itertools.permutations, ys))]
    else:
        rng = np.random.default_rng(0)
        orders = [second, *(np.concatenate([rng.permutation(values) for values in ys]) for _ in range(MOST))]
    found, rho = np.array(orders) @ first / scale, float(second @ first) / scale
    return rho, float(np.mean(np.abs(found) >= abs(rho) - 1e-9))


def _share(values: Sequence[float]) -> Interval:
    mean, low, high = over_runs(values)
    return Interval(mean, max(low, 0.0), min(high, 1.0))


def _number(found: Interval) -> str:
    ends = f" ({found.low:.2f} – {found.high:.2f})" if math.isfinite(found.low) else ""
    return f"{found.mean:.2f}{ends}"
