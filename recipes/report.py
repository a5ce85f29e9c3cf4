"""The tables of docs/recipes.md and docs/recipe-arms.md, from results/recipes/*.json.

    python -m recipes.report

A claim is shown, or its opposite is, if the p of the paired difference is small after Holm's correction for the
claims of its recipe. With fewer than three seeds nothing is shown.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special

from marl_jax.commands import cli
from marl_jax.study.intervals import Interval, holm, over_runs, over_seeds, p_value
from marl_jax.study.questions.bars import LEVEL
from marl_jax.study.questions.findings import SEEDS
from marl_jax.study.wording import NONE, p_text
from recipes.recipe import RESULTS, Claim, Recipe, find, names

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {"recipes.md": ("Claims", "Runs", "Not run"), "recipe-arms.md": ("Arms",)}  # {page: its tables}
BEGIN, END = "<!-- made by python -m recipes.report -->", "<!-- end -->"
Rows = list[list[str]]
PER_CENT = ("accuracy",)  # measures that are shown as points


def interval(values: Sequence[Any], bounds: tuple[float, float] = (-1.0, 1.0)) -> Interval | None:
    """The interval of the mean over runs: over seeds and problems, or for single numbers the t interval over seeds."""
    array = np.array(values, float)
    if np.isnan(array).any():
        return None
    return over_seeds(array, bounds=bounds) if array.ndim == 2 else over_runs(array)


def sides(claim: Claim, record: Mapping[str, Any]) -> tuple[list[Any], list[Any]] | None:
    """The values of each run on both sides of a claim; None if an arm was not run, or the measure is newer."""
    if claim.than == "base" and claim.more in record["arms"]:
        runs = [run[claim.more] for run in record["runs"]]
        if any(claim.measure not in run["base"] for run in runs):
            return None
        return [run["values"][claim.measure] for run in runs], [run["base"][claim.measure] for run in runs]
    within = claim.than.startswith("=")
    arm, measure = (claim.more, claim.than[1:]) if within else (claim.than, claim.measure)
    if not {claim.more, arm} <= {*record["arms"]}:
        return None
    values = [(run[claim.more]["values"], run[arm]["values"]) for run in record["runs"]]
    if any(claim.measure not in more or measure not in less for more, less in values):
        return None
    return [more[claim.measure] for more, _ in values], [less[measure] for _, less in values]


def chance(gaps: np.ndarray) -> float | None:  # [S, P] or [S]
    """The p of a zero mean: over seeds and problems as in the study, or for single numbers over seeds."""
    if np.isnan(gaps).any() or len(gaps) < 2 or not gaps.any():
        return None
    if gaps.ndim == 2:
        return p_value(gaps)
    with np.errstate(divide="ignore"):
        t = gaps.mean() / (gaps.std(ddof=1) / math.sqrt(len(gaps)))
    return float(2 * special.stdtr(len(gaps) - 1, -abs(t)))


def verdict(mean: float, p: float | None, seeds: int) -> str:
    """The verdict in words, by the corrected p."""
    if p is None or p > LEVEL or seeds < SEEDS:
        return "not shown"
    return "shown" if mean > 0 else "the opposite is shown"


def claim_rows(name: str, recipe: Recipe, record: Mapping[str, Any]) -> Rows:
    """A row for each claim."""
    comparisons = [(claim, *both) for claim in recipe.claims if (both := sides(claim, record))]
    gaps = [np.array(more, float) - np.array(less, float) for _, more, less in comparisons]
    chances = [chance(gap) for gap in gaps]
    corrected = iter(holm([p for p in chances if p is not None]))
    rows = []
    for (claim, more, less), gap, p in zip(comparisons, gaps, chances):
        p_adj = None if p is None else next(corrected)
        scale = 100 if claim.measure in PER_CENT else 1
        values = " : ".join(_shown(np.mean(np.array(side, float)), scale) for side in (more, less))
        found = _with_bounds(interval(gap.tolist()), scale, "+")
        tested = f"{claim.measure}: {claim.more} > {claim.than.removeprefix('=')}"
        rows.append([f"`{name}`", tested, values, found, p_text(p_adj), verdict(gap.mean(), p_adj, len(gap))])
    return rows


def arm_rows(name: str, record: Mapping[str, Any]) -> Rows:
    """A row of results for each arm."""
    rows = []
    for arm in record["arms"]:
        runs = [run[arm] for run in record["runs"]]
        means = {n: np.mean(np.array([run["values"][n] for run in runs], float)) for n in runs[0]["values"]}
        end, base = (
            interval([run[key]["accuracy"] for run in runs], (0.0, 1.0)) for key in ("values", "base")
        )
        others = [f"{n} {_shown(mean)}" for n, mean in means.items() if n not in ("accuracy", "tokens")]
        sampled, seconds = (np.mean([run[key] for run in runs]) for key in ("sampled", "seconds"))
        numbers = [_shown(base.mean, 100) if base else NONE, _with_bounds(end, 100), f"{means['tokens']:.0f}"]
        numbers += [f"{sampled / 1000:,.0f}", f"{seconds:.0f}", "; ".join(others) or NONE]
        rows.append([f"`{name}`", arm, *numbers])
    return rows


def tables(titles: Sequence[str], results: Path = RESULTS) -> str:
    """The tables with these titles, of: claims, arms, how each recipe was run, recipes that were not run."""
    claims, arms, ran_rows, missing_rows = Rows(), Rows(), Rows(), Rows()
    for name in names():
        recipe, path = find(name), results / f"{name}.json"
        about = [f"`{name}`", recipe.system, recipe.claim]
        if not path.exists():
            missing_rows.append(
                [*about, "not run", f"`python -m recipes.run {name} --seeds=3`", f"{recipe.hours:g}"]
            )
            continue
        record = json.loads(path.read_text(encoding="utf-8"))
        ran = [str(len(record["runs"])), f"`{record['command']}`", f"{record['seconds'] / 60:.0f}"]
        ran_rows.append([*about, *ran, record["machine"]])
        claims += claim_rows(name, recipe, record)
        arms += arm_rows(name, record)
    shown = (
        ("Claims", "recipe|claim tested|values|difference, 95% interval|p, corrected|verdict", claims),
        ("Arms", "recipe|arm|base, %|test, %|tokens an episode|sampled, 1000|seconds|other measures", arms),
        ("Runs", "recipe|system|what its paper says|seeds|command|minutes|machine", ran_rows),
        ("Not run", "recipe|system|what its paper says|state|command|hours", missing_rows),
    )
    return "\n\n".join(
        _table(title, columns.split("|"), rows) for title, columns, rows in shown if rows and title in titles
    )


def _table(title: str, head: list[str], rows: Rows) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join([f"### {title}", "", *(f"| {' | '.join(cells)} |" for cells in lines)])


def _with_bounds(found: Interval | None, scale: int, sign: str = "") -> str:
    if found is None:
        return NONE
    mean, low, high = (_shown(value, scale, sign) for value in found)
    return f"{mean} [{low}, {high}]"


def _shown(value: float, scale: int = 1, sign: str = "") -> str:
    if not math.isfinite(value):
        return NONE if math.isnan(value) else "∞" if value > 0 else "-∞"
    return f"{value * scale:{sign}.1f}" if scale == 100 else f"{value:{sign}.3g}"


def page(text: str, titles: Sequence[str]) -> str:
    """A page with new tables."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables(titles)}\n\n{END}{rest.partition(END)[2]}"


def main(_: None, left: list[str]) -> None:
    """The command."""
    for name, titles in PAGES.items():
        path = DOCS / name
        path.write_text(page(path.read_text(encoding="utf-8"), titles), encoding="utf-8")


if __name__ == "__main__":
    cli.run(main, read=cli.no_config)
