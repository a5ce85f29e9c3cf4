"""Sentences about a run: how far it is, its main numbers, how it ended, alarms, and what went wrong."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from marl_jax.alarms.monitors import MONITORS
from marl_jax.alarms.watch import Alarm
from marl_jax.study.cliffs import CLIFF, TERMINAL, course, is_cliff, why_none
from marl_jax.study.record import Run, base, best, lost_evaluations, trained
from marl_jax.study.wording import gain, interval, percent, points


def status(run: Run) -> str:
    """How far a run is."""
    if not run.metrics:
        return f"none of {run.steps} steps is recorded yet"
    return f"all {run.steps} steps" if run.finished else f"step {run.step} of {run.steps}: not finished"


def key_numbers(run: Run) -> list[tuple[str, str, str]]:
    """(name, value, text below it) of the numbers that a reader looks for first."""
    records = trained(run)
    if not records:
        return []
    start, last, top = base(run), records[-1], best(records)
    count = lambda record: f", n = {record['problems']:,} problems" if record.get("problems") else ""
    details = lambda record: f"{interval(record)}{count(record)}"
    numbers = [("Base accuracy", percent(start["accuracy"]), details(start))] if start else []
    if last is not start:
        for name, record in (("Final accuracy", last), ("Best accuracy", top)):
            numbers.append((name, percent(record["accuracy"]), f"step {record['step']}, {details(record)}"))
    if by := gain(last):
        mean, bounds = points(by).split("\n")
        numbers.append(("Final over base", f"{mean} points", f"{bounds}, paired{count(last)}"))
    return numbers


def in_words(run: Run) -> list[str]:
    """Sentences that explain the numbers: what is missing, and how the run ended."""
    records = trained(run)
    if not records:
        none = "Training made no evaluation" if run.evaluations else "No evaluation is recorded"
        return [f"{none}, so there is no curve of accuracy; rewards are those of training."]
    sentences = []
    if by := gain(records[-1]):
        verdict = "includes zero, so that no difference is shown"
        if by.excludes_zero:
            verdict = f"excludes zero: it became {'better' if by.low > 0 else 'worse'}"
            if by.low > 0 and (doubts := run.watch.holding):
                named = ", ".join(f"{alarm.title} since step {alarm.step}" for alarm in doubts)
                verdict = f"excludes zero: accuracy is higher, but alarms put the gain in doubt: {named}"
        sentences.append(
            f"The 95% interval of the paired difference between the final workflow and its base {verdict}."
        )
    if end := course(run):
        peak, terminal = float(end.peak.mean()), float(end.terminal.mean())
        chosen = " and ".join(str(step) for step in dict.fromkeys(end.peak_steps))
        last = ", ".join(map(str, end.steps[-TERMINAL:]))
        points_away, side = f"{100 * abs(peak - terminal):.1f}", "below" if terminal <= peak else "above"
        fell = is_cliff([end])
        verdict = "the base was not evaluated" if fell is None else "a cliff" if fell else "no cliff"
        early = "" if end.finished else f" The run was stopped at step {run.step} of {run.steps}."
        sentences.append(
            f"Peak {percent(peak)} (chosen at {'steps' if ' and ' in chosen else 'step'} {chosen}), terminal "
            f"{percent(terminal)} (steps {last}), {points_away} points {side}: {verdict}.{early} {CLIFF}"
        )
    else:
        sentences.append(why_none(run))
    if metric := metric_of(run):
        sentences.append(f"Accuracy here is the mean of '{metric}' over the episodes.")
    return sentences


def alarms(run: Run) -> list[tuple[str, str]]:
    """(title and steps, text of its last occurrence) of each alarm; first those that hold at the end."""
    found = []
    for title, (*earlier, last) in _by_title(run):
        end = "" if last.until is None else f", no longer at step {last.until}"
        again = f" ({len(earlier)} before, the first at step {earlier[0].step})" if earlier else ""
        found.append((f"{title} since step {last.step}{end}{again}", last.text))
    return found


def breaks(run: Run) -> list[dict[str, Any]]:
    """Marks for the curves: where each alarm, numbered, began first and last; first and last step of each loss."""
    times = [
        (str(number), title, [one.step for one in alarms])
        for number, (title, alarms) in enumerate(_by_title(run), 1)
    ]
    times += [("!", title, steps) for title, steps in _losses(run) if steps]
    return [
        {"step": step, "title": title, "number": number}
        for number, title, steps in times
        for step in sorted({steps[0], steps[-1]})
    ]


def _losses(run: Run) -> Iterator[tuple[str, list[int]]]:
    """(what was lost, at which steps): episodes and updates."""
    lines = [(line["step"], line.get("failed")) for line in run.metrics]
    yield "episodes ended by an error", [step for step, failed in lines if failed]
    for match in run.keys("policy/([^/]+)/skipped"):
        counts = run.series(match[0]).known
        more = np.diff(counts.values, prepend=0) > 0
        yield f"updates of policy {match[1]} skipped", counts.steps[more].tolist()


def _by_title(run: Run) -> list[tuple[str, list[Alarm]]]:
    times: dict[str, list[Alarm]] = {}
    for alarm in run.watch.alarms:
        times.setdefault(alarm.title, []).append(alarm)
    return sorted(times.items(), key=lambda one: one[1][-1].until is not None)


def no_alarm(run: Run) -> str:
    """The text that is shown instead of alarms."""
    if not run.judged:
        return f"Not judged: alarms need consecutive steps, and only {len(run.metrics)} of {run.step} are kept here."
    return f"None of {len(MONITORS)} monitors raised an alarm." if run.metrics else "No step is recorded yet."


def metric_of(run: Run) -> str:
    """The user's function that gives accuracies; empty if they are the grades of answers."""
    return str(run.part("config.evaluation").get("metric") or "")


def warnings(run: Run) -> list[str]:
    """What went wrong or was lost; a warning of many steps is listed once, with its last text."""
    by_pattern: dict[str, dict[int, str]] = {}  # {text without numbers: {step: text}}
    for line in run.metrics:
        for text in map(str, line.get("warnings") or ()):
            by_pattern.setdefault(re.sub(r"[\d.]+(e[+-]?\d+)?", "#", text), {})[line["step"]] = text
    found = []
    for by_step in by_pattern.values():
        first, last = min(by_step), max(by_step)
        where = f"step {first}" if len(by_step) == 1 else f"{len(by_step)} steps, {first} to {last}; the last"
        found.append(f"{where}: {by_step[last]}")
    for key, name in (
        ("failed", "episodes ended by an error"),
        ("tools_failed", "tools ended in an error or ran out of time"),
        ("prompts_cut", "prompts were shortened to fit"),
    ):
        if count := int(np.nansum(run.series(key).values)):
            found.append(f"{count:,} {name}" + " in the kept steps" * run.compact)
    for match in run.keys("policy/([^/]+)/skipped"):
        if skips := np.nanmax(run.series(match[0]).values, initial=0):
            found.append(
                f"policy {match[1]}: {skips:.0f} updates were skipped for gradients that were not finite"
            )
    found += lost_evaluations_line(run)
    for change in run.about.get("changes") or ():
        found.append("resumed with another configuration: " + "; ".join(map(str, change)))
    return found


def lost_evaluations_line(run: Run) -> list[str]:
    """A line that names the evaluations that the run made and eval.jsonl lacks; none if it has all."""
    steps = ", ".join(map(str, lost_evaluations(run)))
    return [f"eval.jsonl is damaged: it lacks the evaluation of step {steps}"] if steps else []
