"""What a run was and what came of it, as tables of words: no markup, no numbers that were not recorded."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from marl_jax.runs.tables import aligned
from marl_jax.study.record import TERMINAL, Record, Run, base, best, stability, trained

NONE = "–"
CLIFF = (
    f"Terminal is the mean of the last {TERMINAL} evaluations, the peak the highest after the start; we call it a "
    "cliff where the terminal accuracy lies below the lower end of the peak's 95% interval. The highest of several "
    "noisy values flatters, so some of any drop is chance."
)


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of texts; the first `words` columns are words, the others numbers. A text may have a line beneath it."""

    title: str
    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()
    how: str = ""
    words: int = 1
    facts: bool = False  # a name and what it was, not columns to compare


def plain(table: Table) -> str:
    """For a terminal."""
    beside = lambda text: "{0} ({2})".format(*text.partition("\n")) if "\n" in text else text
    head = [text.replace("\n", " ") for text in table.head]
    rows = [list(map(beside, row)) for row in table.rows]
    return f"{table.title}\n\n{aligned([head, *rows] if head else rows, left=table.words)}"


def tables(run: Run) -> list[Table]:
    """All that have a row."""
    found = evaluations(run), own_work(run), _roles(run), _policies(run), what_it_was(run)
    return [table for table in found if table.rows]


def status(run: Run) -> str:
    """How far it is."""
    if not run.metrics:
        return f"not one of {run.steps} steps is recorded yet"
    if run.step >= run.steps:
        return f"all {run.steps} steps"
    return f"step {run.step} of {run.steps}: not finished"


# ---------------------------------------------------------------- accuracy


def key_numbers(run: Run) -> list[tuple[str, str, str]]:
    """(name, value, what stands beneath) of the numbers that are looked for first."""
    records = trained(run)
    if not records:
        return []
    start, last, top = base(run), records[-1], best(records)
    found = [("Base accuracy", percent(start["accuracy"]), interval(start))] if start else []
    if last is not start:
        found += [("Final accuracy", percent(last["accuracy"]), f"step {last['step']}, {interval(last)}")]
        found += [("Best accuracy", percent(top["accuracy"]), f"step {top['step']}, {interval(top)}")]
    if by := gain(last):
        found += [
            ("Final over base", f"{100 * by['mean']:+.1f} points", f"{difference_interval(by)}, paired")
        ]
    return found


def in_words(run: Run) -> list[str]:
    """The sentences that the numbers need: what is missing, and how the run ended."""
    records = trained(run)
    if not records:
        return ["No evaluation is recorded, so there is no accuracy to show; rewards are those of training."]
    said = []
    by = gain(records[-1])
    if by and by.get("low") is not None and by.get("high") is not None:
        better, worse = by["low"] > 0, by["high"] < 0
        verdict = "excludes zero: it became " + ("better" if better else "worse")
        verdict = verdict if better or worse else "includes zero, so that no difference is shown"
        said.append(
            f"The 95% interval of the paired difference between the final workflow and its base {verdict}."
        )
    if end := stability(run):
        drop = 100 * (end.peak["accuracy"] - end.terminal)
        steps = ", ".join(map(str, end.steps))
        said.append(
            f"Peak {percent(end.peak['accuracy'])} at step {end.peak['step']}, terminal {percent(end.terminal)} "
            f"(steps {steps}), {drop:.1f} points below: {'a cliff' if end.cliff else 'no cliff'}. {CLIFF}"
        )
    return said


def evaluations(run: Run) -> Table:
    """The base, the best and the final one on val, and everything else that was evaluated."""
    along = trained(run)
    named: list[tuple[str, Record]] = []
    if along:
        start = base(run)
        named += [("base", start)] if start else []
        named += [("best", best(along)), ("final", along[-1])]
    named += [(NONE, record) for record in run.evaluations if not _is_along(record)]
    rows = [
        (
            f"step {record.get('step', NONE)}",
            name,
            str(record.get("split", NONE)),
            str(record.get("mode", "trained")),
            percent(record.get("accuracy")),
            interval(record),
            difference(record),
            percent(record.get("any_correct")),
            _count(record.get("problems")),
            _count(record.get("samples")),
        )
        for name, record in named
    ]
    head = (
        "",
        "",
        "split",
        "mode",
        "accuracy",
        "95% interval",
        "over base,\npoints",
        "any correct",
        "problems",
        "samples",
    )
    how = "The difference to the base is paired: the same problems, one by one. Any correct: some call had the answer."
    return Table("Evaluations", rows, head, how, words=4)


OWN_WORK = {
    "accuracy": "own answer or verdict right",
    "precision": "accepted answers that were right",
    "recall": "right answers that were accepted",
    "pick_when_possible": "right pick where there was one",
    "mean": "outcome of what it planned",
    "unreadable": "unreadable",
}


def own_work(run: Run) -> Table:
    """What each role did by itself, in the first and the last evaluation along the run."""
    along = [record for record in trained(run) if record.get("roles")]
    ends = [*along[:1], *along[1:][-1:]]
    roles = [role for role in run.roles if any(role in record["roles"] for record in ends)]
    rows = []
    for key, title in OWN_WORK.items():
        cells = [percent(record["roles"].get(role, {}).get(key)) for role in roles for record in ends]
        if set(cells) - {NONE}:
            rows.append((title, *cells))
    head = ("", *(f"{role}\nstep {record['step']}" for role in roles for record in ends))
    how = "Of each role's calls on validation problems, whatever became of the episode."
    return Table("Roles' own work, first and last evaluation", rows, head, how)


def _is_along(record: Record) -> bool:
    return record.get("mode", "trained") == "trained" and record.get("split", "val") == "val"


# ---------------------------------------------------------------- first and last step

CLIPPED = {
    "clip_fraction_low": "clipped low",
    "clip_fraction_high": "clipped high",
    "clip_fraction_dual": "clipped dual",
}
ROLE_STATISTICS = {
    "reward": "mean reward",
    "entropy": "entropy, nats",
    "perplexity": "perplexity",
    "chi2": "chi2, sampler to trainer",
    "kl": "KL to the reference",
    "length": "completion length, tokens",
    "truncated_share": "cut off",
    "unreadable_share": "unreadable",
    "advantage_zero_share": "advantage zero",
    **CLIPPED,
}
POLICY_STATISTICS = {
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "clip_factor": "factor of gradient clipping",
    "update_norm": "update norm",
    **CLIPPED,
    "approx_kl": "KL to the old log-probs",
    "is_weight": "mean importance weight",
}
SHARES = re.compile(r"_share$|^clip_fraction")


def _roles(run: Run) -> Table:
    table = _first_and_last(run, "role", run.roles, ROLE_STATISTICS)
    idle = [
        text
        for role in run.roles
        for text in _ends(_uninformative(run, f"groups/{role}/"), lambda value: f"{value:.1%}")
    ]
    rows = [*table.rows, ("groups that teach nothing", *idle)] if set(idle) - {NONE} else table.rows
    return dataclasses.replace(
        table,
        title="Roles, first and last step",
        rows=rows,
        how="Single steps, so they are noisy. Perplexity and entropy are of sampled tokens; chi2 is 0 where the "
        "sampler and the trainer agree; clipped is the share of tokens whose ratio left the clip range; a group "
        "teaches nothing where all its rewards are equal.",
    )


def _policies(run: Run) -> Table:
    names = dict.fromkeys(key.split("/")[0] for key in run.below("policy/"))
    table = _first_and_last(run, "policy", list(names), POLICY_STATISTICS)
    return dataclasses.replace(
        table,
        title="Policies, first and last step",
        how="The update norm is what the optimiser moved. The old log-probs are those that the ratio is taken against: "
        "the policy's own before its first update of the step, unless learner.old_logprobs=sampler.",
    )


def _first_and_last(run: Run, kind: str, names: Sequence[str], statistics: Mapping[str, str]) -> Table:
    rows = []
    for key, title in statistics.items():
        form = (lambda value: f"{value:.1%}") if SHARES.search(key) else (lambda value: f"{value:.3g}")
        cells = [text for name in names for text in _ends(run.series(f"{kind}/{name}/{key}").values, form)]
        if set(cells) - {NONE}:
            rows.append((title, *cells))
    if not run.metrics:
        return Table("", [])
    ends = run.metrics[0]["step"], run.metrics[-1]["step"]
    return Table("", rows, ("", *(f"{name}\nstep {step}" for name in names for step in ends)))


def _ends(values: np.ndarray, form: Any) -> list[str]:
    """First and last, as they were."""
    ends = [values[0], values[-1]] if len(values) else [np.nan, np.nan]
    return [form(value) if np.isfinite(value) else NONE for value in ends]


def _uninformative(run: Run, prefix: str) -> np.ndarray:
    groups, alone, flat = (
        run.series(prefix + name).values for name in ("groups", "singletons", "zero_variance")
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        return (alone + flat) / groups if len(groups) == len(alone) == len(flat) else np.array([])


# ---------------------------------------------------------------- what it was


def what_it_was(run: Run) -> Table:
    """The settings that a reader asks for, the versions, and what it took."""
    return Table("What the run was", [row for row in _facts(run) if row[1]], words=2, facts=True)


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    config, about = run.config, run.about
    part = lambda name: config.get(name) or {}
    workflow, policies, data, sampling = map(part, ("workflow", "policies", "data", "sampling"))
    yield "cell", str(config.get("cell", ""))
    yield "workflow", _with(workflow.get("name"), workflow.get("settings"))
    yield "roles", ", ".join(f"{role} → {policy}" for role, policy in run.policy_map.items())
    yield "frozen roles", ", ".join(policies.get("frozen_roles") or ())
    lora = policies.get("train") == "lora"
    rank = f", rank {policies.get('lora_rank')}, alpha {policies.get('lora_alpha')}" if lora else ""
    yield (
        "trained",
        f"LoRA adapters{rank}" if lora else "all weights" if policies.get("train") == "full" else "",
    )
    yield "base", _with(policies.get("base"), policies.get("bases"))
    yield "data", _with(data.get("name"), {"seed": data.get("seed"), "levels": data.get("levels")})
    samples = part("rollout").get("samples")
    yield "a step", f"{data.get('problems')} problems × {samples} episodes" if samples else ""
    yield "sampling", _with(None, sampling)
    rewards = {key: value for key, value in part("rewards").items() if key != "name" and value}
    yield "rewards", _with(part("rewards").get("name"), rewards)
    yield (
        "advantages",
        _with(None, {key: part("advantages").get(key) for key in ("group", "estimator", "singleton")}),
    )
    yield "steps", f"{run.step} of {run.steps}" if run.metrics else f"0 of {run.steps}"
    yield "seed", str(config.get("seed", ""))
    for kind in ("digests", "versions"):
        yield kind, ", ".join(f"{name} {str(value)[:12]}" for name, value in (about.get(kind) or {}).items())
    yield "took", _took(run)


def _with(name: str | None, details: Mapping[str, Any] | None) -> str:
    """A name and its details that are not empty."""
    kept = [
        f"{key} {_plain(value)}" for key, value in (details or {}).items() if value not in (None, "", [], {})
    ]
    inside = ", ".join(kept)
    return f"{name} ({inside})" if name and inside else name or inside


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _took(run: Run) -> str:
    total = float(np.nansum(run.series("time/step").values))
    if not total:
        return ""
    parts = {name: float(np.nansum(run.series(f"time/{name}").values)) for name in run.below("time/")}
    kinds = ("rollout", "grade", "learn", "evaluate", "save")
    shares = [f"{name} {parts[name] / total:.0%}" for name in kinds if parts.get(name)]
    tokens = np.nansum(run.series("tokens").values)
    took = f"{total / 60:.1f} min" if total < 5400 else f"{total / 3600:.1f} h"
    return f"{took} in steps ({', '.join(shares)}), {tokens:,.0f} sampled tokens"


# ---------------------------------------------------------------- warnings


def warnings(run: Run) -> list[str]:
    """What went wrong or was lost, the same warning of many steps once, in its last words."""
    groups: dict[str, list[tuple[int, str]]] = {}
    for line in run.metrics:
        for text in line.get("warnings") or ():
            groups.setdefault(re.sub(r"[\d.]+(e[+-]?\d+)?", "#", str(text)), []).append(
                (line["step"], str(text))
            )
    said = []
    for seen in groups.values():
        steps = sorted({step for step, _ in seen})
        where = (
            f"step {steps[0]}"
            if len(steps) == 1
            else f"{len(steps)} steps, {steps[0]} to {steps[-1]}; the last"
        )
        said.append(f"{where}: {seen[-1][1]}")
    totals: Counter[str] = Counter()
    for key, name in (
        ("failed", "episodes ended by an error"),
        ("prompts_cut", "prompts were shortened to fit"),
    ):
        totals[name] = int(np.nansum(run.series(key).values))
    said += [f"{count:,} {name}" for name, count in totals.items() if count]
    for key in run.below("policy/"):
        if key.endswith("/skipped") and (skips := np.nanmax(run.series(f"policy/{key}").values, initial=0)):
            said.append(
                f"policy {key.split('/')[0]}: {skips:.0f} updates were skipped for gradients that were not finite"
            )
    for change in run.about.get("changes") or ():
        said.append("resumed with another configuration: " + "; ".join(map(str, change)))
    return said


# ---------------------------------------------------------------- numbers as words


def percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.1%}"


def interval(record: Record) -> str:
    low, high = record.get("ci_low"), record.get("ci_high")
    return NONE if low is None or high is None else f"{100 * low:.1f} – {high:.1%}"


def gain(record: Record | None) -> Mapping[str, float] | None:
    """The paired difference to the base, where one was made."""
    by = (record or {}).get("difference") or {}
    return by if by.get("mean") is not None else None


def difference(record: Record) -> str:
    by = gain(record)
    return f"{100 * by['mean']:+.1f} ({difference_interval(by)})" if by else NONE


def difference_interval(by: Mapping[str, Any]) -> str:
    low, high = by.get("low"), by.get("high")
    return NONE if low is None or high is None else f"{100 * low:+.1f} to {100 * high:+.1f}"


def _count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"
