"""From rewards to advantages: fills the columns penalty, group and advantage of the table."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from marl_jax import fields
from marl_jax.fields import NotNegative
from marl_jax.learning.estimators import advantages, groups
from marl_jax.learning.estimators.advantages import Estimator, Over, Singleton, Std
from marl_jax.own import OwnError, call_user_function, in_words, own_function
from marl_jax.ragged import unpadded
from marl_jax.table import Table

ROW_COLUMNS = ("weight", "clip_low", "clip_high")  # factor of a row's advantage, and its clip range

Presets = Mapping[str, Sequence[str]]  # presets of group keys that a workflow declares, {name: fields}


@dataclasses.dataclass(frozen=True)
class AdvantageConfig:
    """How rewards become advantages; `AdvantageConfig.study()` has the settings of the study."""

    group: str = "role"  # a preset of `groups.PRESETS` or of the workflow, or fields such as "task,role,turn"
    estimator: Estimator = "grpo"  # one of `advantages.ESTIMATORS`, "agent", or "module:function"
    std: Std = "unbiased"  # kind of standard deviation
    singleton: Singleton = "zero"  # the advantage of a group of one: 0, or its reward
    eps: NotNegative = 1e-6  # added to the standard deviation
    agent_mean: Over = "role"  # estimator "agent" (Dr.MAS): the calls that the mean is taken over
    agent_scale: Over = "role"  # estimator "agent": the calls that the standard deviation is taken over
    overlong: tuple[int, int] | None = None  # DAPO's (max_length, buffer) of the soft punishment for length
    # A "module:function" that maps the table with its advantages to columns of ROW_COLUMNS, {name: [N] numbers}.
    rows: str | None = None

    def __post_init__(self) -> None:
        fields.check(self)
        advantages.check_estimator(self.estimator, "agent")
        if self.rows is not None:
            own_function(self.rows, "advantages.rows")
        if "," in self.group:  # a single word may be a preset that the workflow declares
            groups.group_key(self.group)
        if self.overlong is not None and not 0 < self.overlong[1] <= self.overlong[0]:
            raise ValueError(
                f"overlong {self.overlong} must be (max_length, buffer) with 0 < buffer <= max_length"
            )

    @classmethod
    def study(cls) -> "AdvantageConfig":
        """The groups and the singletons of the study."""
        return cls(group="study", singleton="reward")


def with_advantages(
    table: Table, config: AdvantageConfig, presets: Presets | None = None
) -> tuple[Table, dict[str, groups.GroupCounts]]:
    """(the table with advantages, group counts per role); calls without tokens get no advantage."""
    if not len(table):
        return table.replace(advantage=np.zeros(0), group=np.zeros(0, np.int32)), {}
    table.need(reward="rewards.with_rewards")
    if not (table.length > 0).all():
        sampled, counts = with_advantages(table.take(table.length > 0), config, presets)
        return _spread(table, sampled), counts
    ids = group_column(table, config, presets)
    rewards, penalty = table.reward, None
    if config.overlong is not None:
        length, buffer = config.overlong
        punishment = advantages.overlong_penalty(table.length, max_length=length, buffer=buffer)
        penalty = np.asarray(punishment, np.float64)
        rewards = rewards + penalty
    rewards = groups.as_rewards(rewards)
    advantage = np.asarray(advantages_of(config, rewards, table.task, table.role, ids), np.float64)
    counts = groups.count_groups(rewards, ids, [table.roles[code] for code in table.role])
    table = table.replace(penalty=penalty, group=ids, advantage=advantage)
    return (table if config.rows is None else _own_columns(table, config.rows)), counts


def key_of(config: AdvantageConfig, presets: Presets | None = None) -> tuple[str, ...]:
    """The fields by which calls are compared with each other."""
    if config.estimator == "agent":
        return groups.PRESETS["task" if config.agent_mean == config.agent_scale == "task" else "role"]
    return groups.group_key(config.group, presets)


def advantages_of(config: AdvantageConfig, rewards: Any, task: Any, role: Any, ids: Any) -> Any:
    """Advantages, Float[N], from columns on the host or under `jit`; `ids` are the groups."""
    if config.estimator == "agent":
        over: dict[str, Any] = {"mean": config.agent_mean, "scale": config.agent_scale}
        return advantages.agent_advantages(rewards, task, role, **over, std=config.std, eps=config.eps)
    how: dict[str, Any] = {"estimator": config.estimator, "singleton": config.singleton}
    return advantages.group_advantages(rewards, ids, **how, std=config.std, eps=config.eps)


def group_column(table: Table, config: AdvantageConfig, presets: Presets | None = None) -> np.ndarray:
    """Int[N]: which calls are compared with each other."""
    key = key_of(config, presets)
    return groups.group_ids(key, **{field: _field(table, field) for field in key})


def _own_columns(table: Table, name: str) -> Table:
    """The table with the columns that a user's function returns."""
    returned = call_user_function(own_function(name, "advantages.rows"), f"advantages.rows '{name}'", table)
    message = (
        f"advantages.rows '{name}' returned {in_words(returned, 80)}; "
        f"return a dictionary of {', '.join(ROW_COLUMNS)}"
    )
    if not isinstance(returned, Mapping) or not set(returned) <= set(ROW_COLUMNS):
        raise OwnError(message)
    try:
        columns = {column: np.asarray(values, np.float64) for column, values in returned.items()}
    except (TypeError, ValueError):
        raise OwnError(message) from None
    for column, values in columns.items():
        if values.shape != (len(table),) or not (np.isfinite(values) & (values >= 0)).all():
            raise OwnError(f"{message}, each with {len(table)} finite numbers of at least 0; fix '{column}'")
    return table.replace(**columns)


def _field(table: Table, field: str) -> list[Any]:
    """The values of one field of a group key, call by call."""
    if field == "path":
        return list(zip(table.episode.tolist(), unpadded(table.path)))
    if not groups.is_attribute(field):
        return getattr(table, field).tolist()
    owner, _, name = field.partition(".")
    if owner == "call":
        labels = table.labels or [None] * len(table)
        return [
            _attribute(field, call_labels or {}, f"a call of '{table.role_of(i)}'")
            for i, call_labels in enumerate(labels)
        ]
    table.need_episodes()
    tasks = map(table.task_of, range(len(table)))
    return [
        task.level if name == "level" else _attribute(field, task.meta, f"task '{task.id}'") for task in tasks
    ]


def _attribute(field: str, attributes: Mapping[str, Any], owner: str) -> Any:
    name = field.partition(".")[2]
    if name not in attributes:
        known = f"it has: {', '.join(attributes)}" if attributes else "it has no attributes"
        raise OwnError(f"group field '{field}': {owner} has no attribute '{name}'; {known}")
    value = attributes[name]  # may be a list or a mapping
    plain = isinstance(value, str | int | float | None)
    return value if plain else json.dumps(value, sort_keys=True, default=repr)


def _spread(table: Table, part: Table) -> Table:
    """`table` with the columns of `part`, which has only the rows that sampled tokens."""
    rows, blank = np.flatnonzero(table.length > 0), {"advantage": np.nan, "group": -1}
    columns: dict[str, Any] = {"penalty": None}
    for name in ("advantage", "group", "penalty", *ROW_COLUMNS):
        if (values := getattr(part, name)) is not None:
            columns[name] = np.full(len(table), blank.get(name, 0), values.dtype)
            columns[name][rows] = values
    return table.replace(**columns)
