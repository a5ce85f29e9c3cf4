"""The settings and results of a run as tables of texts: no markup, no numbers that were not recorded."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np

from marl_jax.alarms.watch import is_along
from marl_jax.study.cliffs import course, is_cliff, lacks
from marl_jax.study.record import Record, Run, base, best, cast_of, final, held_out, trained
from marl_jax.study.run_sentences import metric_of, warnings
from marl_jax.study.wording import NONE, Table, gain, in_one_line, interval, percent, points, short_number


def tables(run: Run) -> list[Table]:
    """The tables of a run that have a row."""
    found = evaluations(run), own_work(run), _roles(run), _policies(run), what_it_was(run)
    return [table for table in found if table.rows]


def evaluations(run: Run) -> Table:
    """The base, best and final evaluations on val, and all other evaluations."""
    along = trained(run)
    named = [("base", base(run)), ("best", best(along)), ("final", final(run))] if along else []
    named += [(NONE, record) for record in run.evaluations if not is_along(record)]
    columns: dict[str, Callable[[Record], str]] = {
        "split": lambda record: str(record.get("split", NONE)),
        "mode": lambda record: cast_of({"mode": "trained", **record}, run.config.get("seed")),
        "accuracy": lambda record: percent(record.get("accuracy")),
        "95% interval": interval,
        "over base,\npoints": lambda record: in_one_line(points(gain(record))),
        "any correct": lambda record: percent(record.get("any_correct")),
        "problems": lambda record: _count(record.get("problems")),
        "samples": lambda record: _count(record.get("samples")),
    }
    rows = [
        (f"step {record.get('step', NONE)}", name, *(cell(record) for cell in columns.values()))
        for name, record in named
        if record
    ]
    how = "Differences to the base are paired by problem. Any correct: episodes in which a call had the right answer."
    return Table("Evaluations", rows, ("", "", *columns), how, words=4)


def runs_table(runs: Mapping[str, Run]) -> Table:
    """A row for each of several runs; its name links to the run's page."""

    def accuracy(record: Record | None) -> str:
        return f"{percent(record['accuracy'])}\n{interval(record)}" if record else NONE

    def tested(run: Run) -> str:
        if not (pair := held_out(run)):
            return f"{NONE}\nnot evaluated"
        by = gain(pair[1])
        return f"{percent(pair[1].get('accuracy'))}\n{in_one_line(points(by)) if by else interval(pair[1])}"

    def terminal(run: Run) -> str:
        if (end := course(run)) is None:
            return f"{NONE}\n{lacks(run)}"
        fell = {None: "", True: "cliff", False: "no cliff"}[is_cliff([end])]
        return f"{percent(float(end.terminal.mean()))}\n{fell if end.finished else 'not finished'}"

    columns: dict[str, Callable[[Run], str]] = {
        "cell": lambda run: run.cell,
        "steps": lambda run: f"{run.step}/{run.steps}",
        "base": lambda run: accuracy(base(run)),
        "final": lambda run: accuracy(final(run)),
        "best": lambda run: accuracy(best(along) if (along := trained(run)) else None),
        "terminal": terminal,
        "final over base,\npoints": lambda run: points(gain(final(run))),
        "test: final,\nover its base": tested,
        "alarms": lambda run: str(len(run.watch.holding) or (NONE if run.judged else "not judged")),
        "warnings": lambda run: str(len(warnings(run)) or ("not kept" if run.compact else NONE)),
    }
    rows = [(name, *(cell(run) for cell in columns.values())) for name, run in runs.items()]
    return Table("Runs", rows, ("", *columns), words=2, links=[quote(f"{name}/report.html") for name in runs])


# ---------------------------------------------------------------- first and last

OWN_WORK = {
    "accuracy": "own answer or verdict right",
    "precision": "accepted answers that were right",
    "recall": "right answers that were accepted",
    "recall_wrong": "wrong answers that were rejected",
    "balanced_accuracy": "balanced accuracy",
    "pick_when_possible": "right picks where one was possible",
    "mean": "outcome of what it planned",
    "unreadable": "unreadable",
}
OWN_COUNTS = {
    "calls": "calls",
    "possible": "picks with a right candidate",
    "asked": "picks with right and wrong candidates",
    "said_correct": "accepted answers",
    "was_correct": "right answers",
}
CLIPPED = {
    "clip_fraction_low": "clipped low",
    "clip_fraction_high": "clipped high",
    "clip_fraction_dual": "clipped dual",
}
ROLE_STATISTICS = {
    "rows": "calls",
    "reward": "mean reward",
    "entropy": "entropy, nats",
    "perplexity": "perplexity",
    "chi2": "chi2, sampler to trainer",
    "kl": "KL to the reference, nats",
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
    "approx_kl": "KL to the old log-probs, nats",
    "is_weight": "mean importance weight",
}


def own_work(run: Run) -> Table:
    """How well each role did its own work, in the first and the last evaluation along the run."""
    along = [record for record in trained(run) if record.get("roles")]
    ends = [*along[:1], *along[1:][-1:]]
    roles = [role for role in run.roles if any(role in record["roles"] for record in ends)]
    own = [record["roles"].get(role, {}) for role in roles for record in ends]
    # The numbers of a role's choices are added; where both have a name, the role's own number is shown.
    numbers = [{**(one.get("choice") or {}), **one} for one in own]
    rows = {title: [percent(one.get(key)) for one in numbers] for key, title in OWN_WORK.items()}
    rows |= {title: [_count(one.get(key)) for one in numbers] for key, title in OWN_COUNTS.items()}
    how = (
        "Over each role's calls on validation problems, whatever the outcome of the episode. Balanced accuracy is 50% "
        "for a judge that always gives the same verdict, and for a picker that picks blindly."
    )
    return _first_and_last("Roles' own work, first and last evaluation", how, roles, ends, rows)


def _roles(run: Run) -> Table:
    ends = _end_lines(run)
    rows = {title: _at_ends(ends, "role", run.roles, key) for key, title in ROLE_STATISTICS.items()}
    by_reward = run.part("config.advantages").get("singleton") == "reward"
    rows["groups that teach nothing"] = [
        _uninformative(line, role, by_reward) for role in run.roles for line in ends
    ]
    how = (
        "Numbers of single steps, so they are noisy. Perplexity and entropy are of sampled tokens; chi2 is 0 where the "
        "sampler and the trainer agree; clipped is the share of tokens whose ratio left the clip range; a group "
        "teaches nothing where all its rewards are equal."
    )
    return _first_and_last("Roles, first and last step", how, run.roles, ends, rows)


def _policies(run: Run) -> Table:
    ends, names = _end_lines(run), list(dict.fromkeys(match[1] for match in run.keys("policy/([^/]+)/.+")))
    rows = {title: _at_ends(ends, "policy", names, key) for key, title in POLICY_STATISTICS.items()}
    how = (
        "The update norm is the length of the optimiser's step. The old log-probs are the denominator of the ratio: "
        "the policy's own before its first update of the step, unless learner.old_logprobs=sampler."
    )
    return _first_and_last("Policies, first and last step", how, names, ends, rows)


def _first_and_last(
    title: str, how: str, names: Sequence[str], ends: Sequence[Record], rows: Mapping[str, Sequence[str]]
) -> Table:
    """A row for each statistic with a value, and for each name a column per end."""
    known = [(statistic, *cells) for statistic, cells in rows.items() if set(cells) - {NONE}]
    return Table(title, known, ("", *(f"{name}\nstep {end['step']}" for name in names for end in ends)), how)


def _end_lines(run: Run) -> list[Record]:
    return [run.metrics[0], run.metrics[-1]] if run.metrics else []


def _at_ends(ends: Sequence[Record], kind: str, names: Sequence[str], key: str) -> list[str]:
    """A statistic of each name in the first and in the last step; a dash if the step does not have it."""
    form = percent if re.search("_share$|^clip_fraction", key) else short_number
    values = [line.get(f"{kind}/{name}/{key}") for name in names for line in ends]
    return [NONE if value is None or not math.isfinite(value) else form(value) for value in values]


def _uninformative(line: Record, role: str, by_reward: bool) -> str:
    """Share of a role's groups that teach nothing: of equal rewards, or of one call with advantage 0."""
    names = ("groups", "zero_variance") if by_reward else ("groups", "zero_variance", "singletons")
    counts: list[Any] = [line.get(f"groups/{role}/{name}") for name in names]
    groups, *flat = counts
    return percent(sum(flat) / groups) if groups and None not in flat else NONE


def _count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


# ---------------------------------------------------------------- what it was


def what_it_was(run: Run) -> Table:
    """The settings that a reader asks for, the versions, and the time that it took."""
    part = lambda name: run.part(f"config.{name}")
    policies, data, rewards, advantages = map(part, ("policies", "data", "rewards", "advantages"))
    samples = part("rollout").get("samples")
    adapters = f"LoRA adapters, rank {policies.get('lora_rank')}, alpha {policies.get('lora_alpha')}"
    trainable = {"lora": adapters, "full": "all weights"}
    digests, versions = (
        ", ".join(f"{name} {str(value)[:12]}" for name, value in run.part(kind).items())
        for kind in ("digests", "versions")
    )
    facts = {
        "cell": str(run.config.get("cell", "")),
        "workflow": _listed(part("workflow").get("name"), part("workflow").get("settings")),
        "roles": ", ".join(f"{role} → {policy}" for role, policy in run.policy_map.items()),
        "frozen roles": ", ".join(policies.get("frozen_roles") or ()),
        "trained": _listed(trainable.get(policies.get("train", ""), ""), policies.get("trains")),
        "base": _listed(policies.get("base"), policies.get("bases")),
        "data": _listed(data.get("name"), {name: data.get(name) for name in ("seed", "levels")}),
        "a step": f"{data.get('problems')} problems × {samples} episodes" if samples else "",
        "sampling": _listed(None, part("sampling")),
        "accuracy is": metric_of(run),
        "rewards": _listed(rewards.get("name"), {k: v for k, v in rewards.items() if k != "name" and v}),
        "advantages": _listed(None, {k: advantages.get(k) for k in ("group", "estimator", "singleton")}),
        "steps": f"{run.step} of {run.steps}",
        "seed": str(run.config.get("seed", "")),
        "digests": digests,
        "versions": versions,
        "took": _took(run),
    }
    rows = [(name, text) for name, text in facts.items() if text]
    return Table("What the run was", rows, words=2, facts=True)


def _listed(name: str | None, details: Mapping[str, Any] | None) -> str:
    """A name with those of its details that are not empty."""
    plainly = lambda value: " ".join(map(str, value)) if isinstance(value, list) else str(value)
    some = {key: value for key, value in (details or {}).items() if value not in (None, "", [], {})}
    inside = ", ".join(f"{key} {plainly(value)}" for key, value in some.items())
    return f"{name} ({inside})" if name and inside else name or inside


def _took(run: Run) -> str:
    times = {match[1]: float(np.nansum(run.series(match[0]).values)) for match in run.keys("time/(.+)")}
    seconds = run.part("made").get("seconds")  # of all steps; compact results have few
    total = seconds or times.get("wall") or times.get("step")  # older runs have the latter alone
    if not total:
        return ""
    took = f"{total / 60:.1f} min" if total < 5400 else f"{total / 3600:.1f} h"
    if seconds:
        return f"{took} in steps"
    kinds = ("rollout", "grade", "gather", "learn", "prepare", "program", "table", "evaluate", "save", "log")
    share = lambda name: f"{name.rpartition('/')[2]} {times[name] / total:.0%}"

    def with_parts(name: str) -> str:
        parts = ", ".join(share(part) for part in times if part.startswith(f"{name}/") and times[part])
        return f"{share(name)} ({parts})" if parts else share(name)

    shares = "; ".join(with_parts(name) for name in kinds if times.get(name))
    tokens, drawn = run.series("tokens"), run.series("draws/tokens")  # where problems are drawn again
    sampled = np.nansum(drawn.values) + np.nansum(tokens.values[~np.isin(tokens.steps, drawn.steps)])
    return f"{took} in steps ({shares}), {sampled:,.0f} sampled tokens"
