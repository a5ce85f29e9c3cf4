"""A recipe: a claim, one configuration, arms that differ from it in some fields, and measures.

config ──arms──► runs of equal seeds and problems ──measures──► numbers ──claims──► shown, not shown, or the opposite
"""

import dataclasses
import functools
import importlib.util
import json
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import recipes
from marl_jax import fields
from marl_jax.config.run_config import (
    CheckpointConfig,
    ConfigError,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    LogConfig,
    PoliciesConfig,
    RunConfig,
    WorkflowConfig,
)
from marl_jax.fields import nearest
from marl_jax.learning.batching import BatchConfig
from marl_jax.learning.learner_config import LearnerConfig
from marl_jax.learning.optimiser import OptimiserConfig, ScheduleConfig
from marl_jax.policies import SamplingSettings
from marl_jax.rollouts import read_episodes
from marl_jax.runs.collected import collected_path
from marl_jax.runs.evaluation import outcomes, values
from marl_jax.table import Table
from marl_jax.task import Family

__all__ = [
    "STILL",
    "Claim",
    "Recipe",
    "Trained",
    "changed",
    "find",
    "mean",
    "micro",
    "names",
    "over_problems",
    "part",
    "steps_of",
]

RESULTS = Path(__file__).parents[1] / "results" / "recipes"
# Fields of a phase that plays as other phases do, and trains nothing.
STILL = {"learner": {"optimiser.schedule.learning_rate": 0.0}}
Values = float | Sequence[float]  # one number, or one for each test problem


@dataclasses.dataclass(frozen=True)
class Trained:
    """One run of an arm, up to the step that is compared."""

    table: Table  # graded episodes of the test problems
    samples: int = 1  # episodes of each problem
    by_metric: bool = False  # whether outcomes are those of `evaluation.metric`
    base: Table | None = None  # episodes of the same problems by the initial policies
    # Episodes of further evaluations, by name.
    also: Mapping[str, Table] = dataclasses.field(default_factory=dict)
    lines: Sequence[Mapping[str, Any]] = ()  # of its metrics.jsonl, up to that step
    folder: Path = Path()

    def collected(self) -> list[Table]:
        """The tables that collecting phases have stored, step by step, up to the step that is compared."""
        paths = [collected_path(self.folder, line["step"]) for line in self.lines]
        return [read_episodes(path) for path in paths if path.exists()]


Measure = Callable[[Trained], Values]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim that a measure of an arm is larger than in another arm, than at its start, or than its other measure."""

    measure: str
    more: str  # the arm whose measure is larger
    than: str  # the arm whose measure is smaller; "base": the same arm at its start; "=MEASURE": its other measure


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One system at micro scale."""

    system: str  # its name and where it is published
    claim: str  # what its paper says, in one sentence
    config: Callable[[], RunConfig]  # the configuration that all arms share
    arms: Mapping[str, Mapping[str, Any]]  # {name: {path of a field: value}}
    claims: Sequence[Claim]  # the claims that are tested
    measures: Mapping[str, Measure] = dataclasses.field(default_factory=dict)  # besides accuracy and tokens
    # Fields that are set for the evaluation only.
    examined: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # {name: fields}: further evaluations of the same policies.
    also: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    hours: float = 0.5  # time of three seeds of all arms on two cores

    def __post_init__(self) -> None:
        """Refuse claims about arms and measures that do not exist, and an arm that no claim could name."""
        if "base" in self.arms:
            raise ConfigError(["arms: in claims 'base' is the start of an arm: give this arm another name"])
        measures = (*COMMON, *self.measures)
        for claim in self.claims:
            within = claim.than.startswith("=")
            arms = [claim.more] + [claim.than] * (not within and claim.than != "base")
            for kind, named, known in (
                ("arm", arms, self.arms),
                ("measure", [claim.measure] + [claim.than[1:]] * within, measures),
            ):
                for name in named:
                    if name not in known:
                        raise ConfigError(
                            [f"claims: '{name}' is no {kind} of the recipe{nearest(name, known)}"]
                        )


def names() -> list[str]:
    """The modules of this folder that contain a recipe."""
    found = [module.name for module in pkgutil.iter_modules(recipes.__path__)]
    return [name for name in found if name not in ("recipe", "run", "report", "sums", "words")]


def find(name: str) -> Recipe:
    """The recipe of a name, or a user's recipe as "module"; an error if there is none."""
    module = f"recipes.{name}" if name in names() else name
    if module.startswith(".") or ("." not in module and not (module and importlib.util.find_spec(module))):
        raise ConfigError([f"recipe '{name}' does not exist{nearest(name, names())}"])
    try:
        found = getattr(importlib.import_module(module), "RECIPE", None)
    except ImportError as error:
        raise ConfigError([f"recipe '{name}' cannot be imported: {error}"]) from None
    if not isinstance(found, Recipe):
        raise ConfigError([f"module '{module}' has no RECIPE: give it one, of recipes.recipe.Recipe"])
    return found


def changed(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """The configuration with the fields at these dotted paths set; one error names all mistakes."""
    texts = [(p, v if isinstance(v, str) else json.dumps(fields.to_json(v))) for p, v in values.items()]
    made, problems = fields.change(config, texts)
    if problems:
        raise ConfigError(problems)
    return made


def micro(
    workflow: str,
    policies: Mapping[str, str],
    *,
    steps: int = 40,
    problems: int = 16,
    samples: int = 8,
    base: str = "configs/bases/micro-xs",
    family: Family = "math",
    levels: Sequence[int] = (1,),
    learning_rate: float = 5e-4,
    **others: Any,
) -> RunConfig:
    """A run of about a second per step on two cores, with twenty checkpoints; `others` are fields, `__` for a dot."""
    config = RunConfig(
        cell=workflow.partition(":")[0].rpartition(".")[2],
        workflow=WorkflowConfig(workflow, prompts="micro"),
        policies=PoliciesConfig(policies, base=base, dtype="float32"),
        data=DataConfig(
            family, f"micro_{family}", problems=problems, levels=tuple(levels), train_size=1024, test_size=128
        ),
        sampling=SamplingSettings(max_new_tokens=64, temperature=1.0),
        engine=EngineConfig(max_prompt=448, lanes=128),
        learner=LearnerConfig(
            optimiser=OptimiserConfig(schedule=ScheduleConfig(learning_rate)),
            batch=BatchConfig(buckets=(256, 512), token_budget=4096),
        ),
        evaluation=EvaluationConfig(every=0),
        checkpoints=CheckpointConfig(every=max(steps // 20, 1), keep_every=max(steps // 20, 1), best=False),
        logging=LogConfig(episodes_every=0, tensorboard=False),
        steps=steps,
    )
    values = {path.replace("__", "."): value for path, value in others.items()}
    return changed(config, {"rollout.samples": samples, **values})  # all at once: one field may need another


def over_problems(function: Callable[[Table], np.ndarray]) -> Measure:
    """A measure of the test problems from a function of the table to one value for each episode."""

    def measure(trained: Trained) -> list[float]:
        return np.asarray(function(trained.table), float).reshape(-1, trained.samples).mean(axis=1).tolist()

    return functools.wraps(function)(measure)


def part(metric: str, *, late: bool = True) -> Measure:
    """The mean of a metric over the last quarter of the steps that have it, or over the first."""

    def measure(trained: Trained) -> float:
        values = [line[metric] for line in trained.lines if line.get(metric) is not None]
        count = max(len(values) // 4, 1)
        return mean(values[-count:] if late else values[:count])

    return measure


def steps_of(phase: str) -> Measure:
    """A measure: the number of steps of a phase."""
    return lambda trained: float(sum(line.get("phase") == phase for line in trained.lines))


def mean(values: Sequence[float] | np.ndarray) -> float:
    """The mean of values; NaN if there are none."""
    return float(np.mean(values)) if len(values) else float("nan")


def accuracy(trained: Trained) -> list[float]:
    """The share of right answers (for forked episodes, of right paths) to each problem, or the metric's value."""
    worth = values if trained.by_metric else outcomes
    return worth(trained.table, trained.samples).mean(axis=1).tolist()


def tokens(trained: Trained) -> float:
    """The mean number of tokens that are sampled in an episode."""
    return float(trained.table.length.sum() / len(trained.table.bare_episodes))


COMMON: Mapping[str, Measure] = {"accuracy": accuracy, "tokens": tokens}  # measures of every recipe
