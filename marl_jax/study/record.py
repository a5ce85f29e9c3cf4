"""The record of a run, read from its folder, finished or not: numbers by step, and evaluations.

    config.json ─┐
    metrics.jsonl ┼─► Run ─► curves, tables        (episodes: see `page_episodes`)
    eval.jsonl ──┘

A null becomes NaN in a series, never zero. What was not recorded is empty, and the page or table says so.
"""

import dataclasses
import functools
import json
import os
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from marl_jax.alarms.watch import Watch, is_along, judge, watch_of
from marl_jax.run_folder import folder
from marl_jax.run_folder.json_lines import missing_evaluations, read_lines

Record = Mapping[str, Any]
ODD = ArithmeticError, AttributeError, LookupError, TypeError, ValueError  # by values that no run writes
LARGEST = 1 << 62  # bound of the numbers that a run writes


class Series(NamedTuple):
    """One number over steps; NaN where it was null."""

    steps: np.ndarray  # the steps that have a value
    values: np.ndarray  # one for each step

    @property
    def known(self) -> "Series":
        """The series without its nulls."""
        finite = np.isfinite(self.values)
        return Series(self.steps[finite], self.values[finite])

    def constant(self, value: float) -> "Series":
        """The same steps with one value at all of them."""
        return Series(self.steps, np.full(len(self.steps), float(value)))


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """All numbers of a run folder. Runs are hashed by identity, so that `once` can cache what is computed from one."""

    folder: Path  # the folder that it was read from
    about: Mapping[str, Any]  # config.json: config, digests, versions, settled, changes
    metrics: tuple[Record, ...]  # lines of metrics.jsonl
    evaluations: tuple[Record, ...]  # lines of eval.jsonl
    # The alarms of compact results, judged before their rows were thinned.
    alarms: tuple[Record, ...] | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration, as JSON."""
        return self.about.get("config", {})

    @property
    def cell(self) -> str:
        """The name that the run is shown under."""
        return str(self.config.get("cell") or self.folder.name)

    @property
    def changed(self) -> bool:
        """Whether a resume changed more than the versions that the run had."""
        lines = [str(line) for change in self.about.get("changes") or () for line in change]
        return any(not line.startswith("versions.") for line in lines)

    @property
    def step(self) -> int:
        """The last step with a record."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def steps(self) -> int:
        """The steps that the configuration asks for."""
        return int(self.config.get("steps") or 0)

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.steps

    @property
    def policy_map(self) -> Mapping[str, str]:
        """{role: policy}."""
        return self.part("config.policies.map")

    @property
    def compact(self) -> bool:
        """Whether it was read from compact results, which have some of its steps and no episodes."""
        return self.alarms is not None

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles in the configuration's order, then the others that the metrics name."""
        named = [key.split("/")[0] for key in self.policy_map]
        return tuple(dict.fromkeys([*named, *(match[1] for match in self.keys("reward/(.+)"))]))

    @functools.cached_property
    def watch(self) -> Watch:
        """The alarms that its rows raise, as this version defines them; for compact results, the stored alarms."""
        return judge(self.metrics, self.evaluations) if self.alarms is None else watch_of(self.alarms)

    @property
    def judged(self) -> bool:
        """Whether its steps were judged for alarms: these need consecutive steps, so not in a folder that lost rows."""
        return self.alarms is not None or len({line["step"] for line in self.metrics}) >= self.step

    def part(self, path: str) -> Mapping[str, Any]:
        """A part of config.json by its path, such as "config.learner.optimiser"; empty if the run has none."""
        found: Any = self.about
        for name in path.split("."):
            found = found.get(name) or {}
        return found  # type: ignore[no-any-return]

    def series(self, key: str) -> Series:
        """The values of one key, for the steps that have it; of several lines of a step, the last counts."""
        found = {line["step"]: line[key] for line in self.metrics if key in line}
        numbers = [np.nan if value is None else float(value) for value in found.values()]
        return Series(np.array([*found], float), np.array(numbers, float))

    def keys(self, pattern: str) -> list[re.Match[str]]:
        """The keys of the metrics that a pattern matches in full, in order of appearance."""
        keys = dict.fromkeys(key for line in self.metrics for key in line)
        return [match for key in keys if (match := re.fullmatch(pattern, key))]


def once(function: Callable[[Run], Any]) -> Callable[[Run], Any]:
    """Cache a function of a run for as long as the run exists: a study calls it for every pair of cells."""
    cache: weakref.WeakKeyDictionary[Run, Any] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def cached(run: Run) -> Any:
        if run not in cache:
            cache[run] = function(run)
        return cache[run]

    return cached


def read_run(workdir: str | os.PathLike[str]) -> Run:
    """The run in a folder; only `config.json` has to be there."""
    path = Path(os.path.expanduser(workdir)).absolute()
    about = folder.read(path)
    lines = (tuple(read_lines(path / name)) for name in ("metrics.jsonl", "eval.jsonl"))
    try:
        return sound(Run(path, about, *lines))
    except ValueError as error:
        raise folder.FolderError(
            f"'{path}' is damaged ({error}): restore that value, or remove the folder"
        ) from None


# Types of the fields that are read from a run, by path; a field that may be null may also be missing.
_NUMBER, _NULL = (int, float), type(None)
_PARTS = ("workflow", "evaluation", "data", "sampling", "rollout", "rewards", "advantages", "learner")
_DEEPER = ("optimiser", "optimiser.schedule", "interventions", "interventions.mixing")
_ABOUT: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("config", "config.policies", "config.policies.map"), (dict,)),
    **{f"config.{part}": (dict, _NULL) for part in (*_PARTS, *(f"learner.{part}" for part in _DEEPER))},
    **{"config.workflow.name": (str, _NULL), "config.workflow.settings": (dict, _NULL)},
    **dict.fromkeys(("config.seed", "config.steps", "config.evaluation.every"), (int, _NULL)),
    **dict.fromkeys(("config.data.problems", "config.rollout.samples"), (int, _NULL)),
    **dict.fromkeys(("digests", "versions", "made"), (dict, _NULL)),
    **{"changes": (list, _NULL), "made.seconds": (*_NUMBER, _NULL)},
}
_LINE: Mapping[str, tuple[type, ...]] = {
    "step": (int,),
    **{"warnings": (list, _NULL), "alarms": (list, _NULL), "phase": (str, _NULL)},  # all others are numbers
}
_SCORES = ("accuracy", "ci_low", "ci_high", "any_correct", "problems", "samples")
_EVALUATION: Mapping[str, tuple[type, ...]] = {
    "step": (int,),
    **dict.fromkeys(_SCORES, (*_NUMBER, _NULL)),
    **dict.fromkeys(("roles", "difference"), (dict, _NULL)),
}
_ALARM: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("name", "who"), (str,)),
    **{"step": (int,), "evidence": (dict,), "until": (int, _NULL)},
}


def sound(run: Run) -> Run:
    """Return the run if its fields have the types that a run writes; else a ValueError names the first fault."""
    for fault in _faults(run):
        raise ValueError(fault)
    return run


def _faults(run: Run) -> Iterator[str]:
    yield from _misfits("", run.about, _ABOUT)
    yield from _entries("config.policies.map", run.policy_map, str)
    yield from _entries("versions", run.part("versions"), str)
    for change in run.about.get("changes") or ():
        yield from _misfits("", {"a change": change}, {"a change": (list,)})
    for name, records, shape in (
        ("a line of metrics", run.metrics, _LINE),
        ("an evaluation", run.evaluations, _EVALUATION),
        ("an alarm", run.alarms or (), _ALARM),
    ):
        for record in records:
            yield from _misfits(f"{name}: ", record, shape)
    for record in run.evaluations:
        scores = {name: record.get(name) or 0 for name in ("step", *_SCORES)}
        yield from (
            f"an evaluation: {name} is {_json(value)}" for name, value in scores.items() if not _usual(value)
        )
        yield from _entries("an evaluation: roles", record.get("roles") or {}, dict)
    for line in run.metrics:
        for key, value in line.items():
            wrong_type = not isinstance(value, (*_NUMBER, _NULL)) and key not in _LINE
            if wrong_type or (type(value) is int and not _usual(value)):
                yield f"{key} of step {_json(line['step'])} is {_json(value)}"


def _misfits(where: str, record: Any, shape: Mapping[str, tuple[type, ...]]) -> Iterator[str]:
    """A line for each field of a record that has another type than in `shape`."""
    if not isinstance(record, Mapping):
        yield f"{where}{_json(record)}"
        return
    for path, types in shape.items():
        value: Any = record
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if type(value) not in types:
            yield f"{where}{path} is {_json(value)}"


def _entries(where: str, part: Mapping[str, Any], kind: type) -> Iterator[str]:
    """A line for each value that is not of the given type."""
    yield from (f"{where}.{key} is {_json(value)}" for key, value in part.items() if type(value) is not kind)


def _usual(value: float) -> bool:
    return -LARGEST < value < LARGEST  # False for a NaN


def _json(value: Any) -> str:
    return json.dumps(value)[:40]


def find_runs(root: str | os.PathLike[str], unread: list[str]) -> list[Path]:
    """The run folders in and below a directory, by name. A run is not searched for other runs.

    Links are followed; a run that is also below the directory itself is listed under that path only. Directories that
    cannot be listed are named in `unread`.
    """

    def failed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            unread.append(f"'{error.filename}' cannot be read: {error.strerror}")

    found, seen, tops = [], set(), [os.fspath(root)]
    for top in tops:  # linked directories are appended below
        for directory, below, files in os.walk(top, onerror=failed):
            if (real := os.path.realpath(directory)) in seen:
                below.clear()
                continue
            seen.add(real)
            if "metrics.jsonl" in files and folder.CONFIG not in files:
                unread.append(f"'{directory}' has metrics.jsonl and no {folder.CONFIG}: restore it")
            if folder.CONFIG in files and {folder.LOCK, "metrics.jsonl", "eval.jsonl"} & {*files}:
                found.append(Path(directory))
                below.clear()
            tops += sorted(path for name in below if os.path.islink(path := os.path.join(directory, name)))
    return sorted(found)


def at_common_steps(series: Iterable[Series]) -> tuple[np.ndarray, np.ndarray]:
    """The steps that several series have in common, and their values there, Float[series, steps]."""
    found = list(series)
    steps = functools.reduce(np.intersect1d, [one.steps for one in found])
    return steps, np.array([one.values[np.isin(one.steps, steps)] for one in found])


# ---------------------------------------------------------------- gradients


def gradient_norms(run: Run) -> dict[str, Series]:
    """Norm of each role's part of its policy's gradient; if parts were not recorded, of each policy's gradient.

    A role that answers from several policies has a series for each, named "role (policy)".
    """
    order = {role: place for place, role in enumerate(run.roles)}
    parts = sorted(run.keys("gradient/([^/]+)/norm/(.+)"), key=lambda match: order.get(match[2], len(order)))
    if not parts:
        return {match[1]: run.series(match[0]) for match in run.keys("policy/(.+)/grad_norm")}
    return {name: run.series(match[0]) for name, match in _by_role(parts).items()}


def _by_role(matches: Sequence[re.Match[str]]) -> dict[str, re.Match[str]]:
    """Matches of a policy and a role, by the role; by "role (policy)" if the role has several."""
    owners = Counter(match[2] for match in matches)
    return {match[2] if owners[match[2]] == 1 else f"{match[2]} ({match[1]})": match for match in matches}


def gradient_shares(norms: Mapping[str, Series]) -> dict[str, Series]:
    """Each norm over the sum of all norms, step by step; a role without a gradient in a step has share 0 there."""
    steps = np.unique(np.concatenate([series.steps for series in norms.values()])) if norms else np.array([])
    table = np.zeros((len(norms), len(steps)))
    for row, series in zip(table, norms.values()):
        row[np.searchsorted(steps, series.steps)] = np.nan_to_num(series.values)
    mass = table.sum(axis=0)
    shares = np.divide(table, mass, out=np.full_like(table, np.nan), where=mass > 0)
    return {name: Series(steps, row) for name, row in zip(norms, shares)}


def episodes(run: Run) -> Series:
    """How many episodes each step had; from the configuration if the results were stored without this number."""
    recorded, reward = run.series("episodes"), run.series("reward")
    if len(recorded.steps) or run.keys("draws/.+") or run.config.get("phases"):
        return recorded
    problems, samples = run.part("config.data").get("problems"), run.part("config.rollout").get("samples")
    return reward.constant(problems * samples) if problems and samples else recorded


def parts_of(run: Run, amplification: str) -> list[str]:
    """The keys of the norms of the parts whose sum an amplification measures."""
    norms = re.escape(amplification.removesuffix("amplification")) + "norm/.+"
    return [match[0] for match in run.keys(norms)]


def amplifications(run: Run) -> dict[str, tuple[Series, Series]]:
    """(|sum g| / mean |g|, number of parts g); the parts are a role's slots if recorded, else a policy's roles."""

    def pair(key: str) -> tuple[Series, Series]:
        return (series := run.series(key)), series.constant(len(parts_of(run, key)))

    parts = _by_role(run.keys("gradient/([^/]+)/slots/(.+)/amplification"))
    slots = {role: pair(match[0]) for role, match in parts.items()}
    slots = {role: one for role, one in slots.items() if np.any(one[0].known.values != 1)}
    roles = Counter(match[1] for match in run.keys("gradient/([^/]+)/norm/.+"))
    policies = [match for match in run.keys("gradient/([^/]+)/amplification") if roles[match[1]] > 1]
    return slots or {match[1]: pair(match[0]) for match in policies}


# ---------------------------------------------------------------- evaluations


def trained(run: Run) -> list[Record]:
    """The evaluations along the run, one per step, in the order of steps."""
    found = [record for record in run.evaluations if is_along(record) and record.get("accuracy") is not None]
    by_step = {int(record["step"]): record for record in found}
    return [by_step[step] for step in sorted(by_step)]


def base(run: Run) -> Record | None:
    """The evaluation before the first step."""
    return next((record for record in trained(run) if record["step"] == 0), None)


def final(run: Run) -> Record | None:
    """The last evaluation along the run."""
    return next(reversed(trained(run)), None)


def best(records: Sequence[Record]) -> Record:
    """The evaluation with the highest accuracy; the earliest if several have it."""
    return max(records, key=lambda record: (record["accuracy"], -record["step"]))


def held_out(run: Run) -> list[Record]:
    """[base, final policies] on the same test problems, the last with the most problems; empty if either is missing."""
    played = [
        record
        for record in run.evaluations
        if record.get("split") == "test" and record.get("mode") in ("trained", "base")
    ]
    ends = [record for record in played if record["step"] == run.steps]
    last = max(reversed(ends), key=lambda record: record.get("problems") or 0, default=None)
    if last is None:
        return []
    same = [(key, last.get(key)) for key in ("problems", "samples", "seed", "data")]
    starts = [record for record in played if record["step"] == 0]
    bases = [record for record in starts if all(record.get(key) == value for key, value in same)]
    return [bases[-1], last] if bases else []


def cast_of(record: Record, seed: Any) -> str:
    """Who played in an evaluation: the mode, the role, whose policy, and the noise seed if it is not the run's."""
    source, noise = record.get("generator_from"), record.get("seed", seed)
    words = [record.get("mode"), record.get("role"), f"from {source}" if source else None]
    words += [f"noise {noise}"] if noise != seed else []
    return " ".join(map(str, filter(None, words)))


def lost_evaluations(run: Run) -> list[int]:
    """Steps whose evaluation the run made and `eval.jsonl` lacks; none if the run was changed at a resume."""
    every = run.part("config.evaluation").get("every") or 0
    return [] if run.changed else missing_evaluations(run.evaluations, every, run.step)
