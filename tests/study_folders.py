"""Folders of runs, written by hand as the training run writes them."""

import copy
import dataclasses
import json
import math

import numpy as np

from marl_jax.rollouts import CallRecord, Episode, Table, write_episodes
from marl_jax.study import results
from marl_jax.study.record import read_run
from marl_jax.task import Task

ROLES = ("generator", "aggregator")


def call(role, text, slot=0, answer=None, **more):
    tokens = tuple(range(len(text) % 7 + 1))
    return CallRecord(
        role, "p0" if role == "generator" else "p1", slot, 0, (1, 2, 3), tokens, (-0.5,) * len(tokens), text, "stop",
        answer, **more,
    )  # fmt: skip


def episode(question="12+34=?", answer="46", texts=None, **more):
    texts = texts or ("12+34 is \\boxed{46}", "It is \\boxed{45}", "I say \\boxed{46}")
    calls = [call("generator", text, slot, text[-3:-1]) for slot, text in enumerate(texts)]
    calls.append(call("aggregator", "\\boxed{1}", answer="1", reads=(0, 1, 2)))
    return Episode(Task("t1", "math", question, gold="46"), 0, "voting", tuple(calls), answer, **more)


def metrics(step, roles=ROLES, isolated=True, **more):
    rng = np.random.default_rng(step)
    learned = 1 - math.exp(-step / 60)
    line = {"step": step, "reward": 0.42 + 0.2 * learned + rng.normal(0, 0.02), "episodes": 512}
    line |= {"calls": 2048, "tokens": 25_000 + step, "failed": 0, "prompts_cut": 0}
    policies = {role: f"p{k}" if isolated else "p0" for k, role in enumerate(roles)}
    norms = {
        role: (0.4 + 1.1 * k) * math.exp(rng.normal(0, 0.2) + step / 150) for k, role in enumerate(roles)
    }
    for k, role in enumerate(roles):
        policy = policies[role]
        line |= {
            f"reward/{role}": line["reward"] + 0.06 * k,
            f"credit/{role}/outcome": line["reward"],
            f"groups/{role}/groups": 64,
            f"groups/{role}/singletons": 0,
            f"groups/{role}/zero_variance": 20 + k,
            f"role/{role}/entropy": 0.9 * math.exp(-step / 80) + 0.1 * k,
            f"role/{role}/perplexity": 1.9 - 0.5 * learned,
            f"role/{role}/chi2": 1e-6 * (k + 1),
            f"role/{role}/length": 14 + 30 * k * learned + rng.normal(0, 0.4),
            f"role/{role}/truncated_share": 0.01 * k,
            f"role/{role}/unreadable_share": 0.1 * (1 - learned),
            f"role/{role}/rows": 1536 - 1024 * k,
            f"role/{role}/advantage_zero_share": 0.3,
            f"role/{role}/ratio_mean": 1.0,
            f"role/{role}/clip_fraction_high": 0.003,
            f"gradient/{policy}/norm/{role}": norms[role],
            f"gradient/{policy}/share/{role}": 1.0,
            f"gradient/{policy}/amplification": 1.0 if isolated else 1.4,
            f"policy/{policy}/grad_norm": norms[role],
            f"policy/{policy}/learning_rate": 3e-4,
            f"policy/{policy}/skipped": 0,
            f"policy/{policy}/clip_fraction_low": 0.001,
            f"policy/{policy}/clip_fraction_high": 0.002,
            f"policy/{policy}/update_norm": 0.01,
            f"policy/{policy}/approx_kl": 0.001,
        }
    seconds = {"rollout": 5.0, "grade": 0.4, "learn": 2.5, "step": 8.0}
    line |= {f"time/{part}": value for part, value in seconds.items()}
    return line | {"time/tokens_per_second": 3100.0} | more


def evaluation(step, accuracy, difference=None, **more):
    record = {"step": step, "split": "val", "mode": "trained", "accuracy": accuracy}
    record |= {"per_problem": [float(k < round(128 * accuracy)) for k in range(128)]}
    record |= {"ci_low": accuracy - 0.06, "ci_high": accuracy + 0.055, "problems": 128, "samples": 1}
    record |= {"any_correct": min(accuracy + 0.2, 1), "roles": {"generator": {"accuracy": accuracy - 0.1}}}
    return record | {"difference": difference} | more


def policies(**owners):
    return {"map": owners, "base": "configs/bases/micro-s", "train": "full", "frozen_roles": []}


def config(cell="voting-isolated-s-math", steps=200, **more):
    name = "single" if cell.startswith("single-") else "voting"
    owners = {"generator": "p0", "aggregator": "p1" if "isolated" in cell else "p0"}
    owners = {"generator": "p0"} if name == "single" else owners
    return {
        "schema": 1,
        "config": {
            "schema": 1,
            "cell": cell,
            "workflow": {"name": name, "settings": {}, "prompts": "micro"},
            "policies": policies(**owners),
            "data": {"family": "math", "name": "micro_math", "problems": 64, "seed": 0},
            "sampling": {"max_new_tokens": 64, "temperature": 1.0, "top_p": 1.0, "top_k": 0},
            "rollout": {"samples": 8},
            "rewards": {"name": "rubric", "alpha": 0.5, "format_penalty": 0.0, "penalized_roles": []},
            "learner": {"optimiser": {"schedule": {"peak": 3e-4}}},
            "steps": steps,
            "seed": 7,
        },
        "digests": {"base configs/bases/micro-s": "a" * 64, "tokenizer": "b" * 64, "data train": "d" * 64},
        "versions": {"marl_jax": "0.1.0", "code": "c" * 64, "jax": "0.10.2"},
        "settled": {"lanes": 512},
        "changes": [],
        **more,
    }


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(folder, *, about=None, lines=None, evaluations=None, episodes=None):
    """A folder; `episodes` is {step: [(episode, what it and its calls earned)]}."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(about or config()))
    if lines is not None:
        write_lines(folder / "metrics.jsonl", lines)
    if evaluations is not None:
        write_lines(folder / "eval.jsonl", evaluations)
    for step, entries in (episodes or {}).items():
        write_episodes(folder / "episodes" / f"step-{step:06d}.parquet", table_of(entries))
    return folder


def table_of(entries):
    """The table of episodes with what they earned; ungraded where that is None."""
    if any(earned is None for _, earned in entries):
        return Table.of([one for one, _ in entries])
    graded = [
        dataclasses.replace(one, outcome=earned["outcome"], answers=(None,) * len(one.calls))
        for one, earned in entries
    ]

    def column(name):
        """One number for each call; NaN for None."""
        return np.array([x for one, earned in entries for x, _ in zip(earned[name], one.calls)], float)

    return Table.of(graded).replace(reward=column("rewards"), advantage=column("advantages"))


RIGHT = {"outcome": 1.0, "rewards": [1.0, -0.5, 1.0, 1.0], "advantages": [0.7, -1.2, 0.7, None]}
WRONG = {"outcome": 0.0, "rewards": [0.0, -1.0, 0.0, -1.0], "advantages": [-0.9, -1.4, -0.9, -0.8]}


def full_run(folder, steps=200, cell="voting-isolated-s-math"):
    """A run with everything."""
    evaluations = [evaluation(0, 0.421)]
    for step in range(10, steps + 1, 10):
        gain = 0.19 * (1 - math.exp(-step / 50)) - 0.0004 * max(step - 110, 0)
        evaluations.append(
            evaluation(step, 0.421 + gain, {"mean": gain, "low": gain - 0.07, "high": gain + 0.07})
        )
    evaluations.append(evaluation(steps, 0.55, split="test", samples=4, problems=512))
    lines = [metrics(step, isolated="isolated" in cell) for step in range(1, steps + 1)]
    for place, gap in ((2, 0.0012), (9, 0.0031)):
        gaps = f"sampler and trainer log-probs are up to {gap} apart (tolerance 0.001)"
        lines[place]["warnings"] = [f"role 'generator': {gaps}"]
    wrong = episode(answer="45", texts=("12+34 is \\boxed{45}", "no idea", "hm \\boxed{45}"))
    episodes = {10: [(wrong, WRONG), (episode(), RIGHT)], steps: [(episode(), RIGHT), (wrong, WRONG)]}
    return write_run(
        folder, about=config(cell, steps), lines=lines, evaluations=evaluations, episodes=episodes
    )


def answers(*values):
    return [float(value) for value in values]


def run(folder, seed, accuracies, cell="voting-isolated-s-math", test=None, val="v", lines=None, **changes):
    """A run with {step: per_problem} on val, and (of the base, of the last checkpoint) on test."""
    about = copy.deepcopy(config(cell, steps=max(accuracies)))
    about["config"] |= {"seed": seed, **changes}
    about["digests"]["data val"] = val
    records = [evaluation(step, np.mean(values), per_problem=values) for step, values in accuracies.items()]
    for step, mode, values in zip((0, max(accuracies)), ("base", "trained"), test or ()):
        more = {"split": "test", "mode": mode, "seed": seed, "data": "t", "problems": len(values)}
        records.append(evaluation(step, np.mean(values), per_problem=values, **more))
    return read_run(
        write_run(folder, about=about, lines=lines or [metrics(max(accuracies))], evaluations=records)
    )


def course(rng, *shares, problems=60):
    """Evaluations of a run whose accuracy goes along these."""
    return {10 * k: answers(*(rng.random(problems) < share)) for k, share in enumerate(shares)}


def cell(root, name, shares, seeds=range(3), problems=60, lines=None, **more):
    """Runs whose accuracies go along these shares, in the folder of a cell."""
    rng, about = np.random.default_rng(0), {"cell": name.partition("+")[0], **more}
    return [
        run(root / name / f"seed-{seed}", seed, course(rng, *shares, problems=problems), lines=lines, **about)
        for seed in seeds
    ]


def with_about(one, **parts):
    """The run with other parts of its config.json."""
    return dataclasses.replace(one, about={**one.about, **parts})


def paired_results(root):
    """Results of four isolated and three shared runs of voting whose seeds end apart, and {bar: points of each run}.

    The points are those of the JSON files: the mean of the last three evaluations less that of the other side, or the
    base.
    """
    rng = np.random.default_rng(3)
    ends = {"voting-isolated-s-math": (0.9, 0.8, 0.7, 0.85), "voting-shared-s-math": (0.5, 0.3, 0.6)}
    for name, of_seeds in ends.items():
        for seed, end in enumerate(of_seeds):
            run(root / "runs" / name / f"seed-{seed}", seed, course(rng, 0.2, end, end, end), name)
    results.collect(root / "runs", root / "results")
    isolated, shared = (
        [json.loads(path.read_text())["evaluations"] for path in sorted((root / "results" / name).iterdir())]
        for name in ends
    )
    base, end = (
        lambda run: np.mean(run[0]["per_problem"]),
        lambda run: np.mean([e["per_problem"] for e in run[-3:]]),
    )
    points = {
        f"{name} over base": [end(run) - base(run) for run in runs]
        for name, runs in zip(ends, (isolated, shared))
    }
    points[" over ".join(ends)] = [end(one) - end(other) for one, other in zip(isolated, shared)]
    return root / "results", {label: [100 * value for value in values] for label, values in points.items()}
