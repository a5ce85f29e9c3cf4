"""Credit assignment: from a graded table to the reward of each call, as the sum of named components.

    kind, grade, outcome, choice, reads --credit--> {component: [N]} --with_rewards--> columns components and reward

A credit is a function from a graded table to components; NaN marks a component that a call does not have. The credits
here run on numpy and under `jit` alike. Whatever a credit returns for them, calls of an episode that ended in an error
have no components and earn 0.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from marl_jax import fields
from marl_jax.episodes import Episode
from marl_jax.fields import Count
from marl_jax.own import OwnError, call_user_function, is_own, own_function
from marl_jax.rewards.grading import RIGHT, finite
from marl_jax.rewards.leaves import function_of, over_leaves
from marl_jax.table import COLUMNS, JUDGE, META, PICKER, PLANNER, SOLVER, TEAM, Table

Components = Mapping[str, Any]  # {name: Float[N]}
Credit = Callable[[Table], Components]  # what it gives calls of failed episodes is ignored (`with_rewards`)

# A table enters `jit` as its columns. Registered here, not in `table`, so that tables are read without importing JAX.
jax.tree_util.register_dataclass(Table, [*COLUMNS, "components"], [*META])


def with_rewards(table: Table, credit: Credit, leaves: str = "mean") -> Table:
    """The table with the components of every call, and their sum.

    A credit sees each path of a forked episode as an episode without forks. If a call is on several paths, each of its
    components is a function of the component's values on them (see `rewards.leaves`).
    """
    function_of(leaves)  # a bad name is refused, whether there are forks or not
    flat, rows = table.paths()
    try:
        components = credit(flat)
    except TypeError as error:
        if "'Table' object" not in str(error):
            raise
        raise OwnError(
            f"the credit takes episodes but was called with a table ({error}): pass rewards.by_episodes(function)"
        ) from error
    if not isinstance(components, Mapping):
        raise OwnError(f"the credit gave a {type(components).__name__}: return a dictionary of components")
    if misshapen := [name for name, part in components.items() if np.shape(part) != (len(flat),)]:
        raise OwnError(
            f"component {misshapen[0]!r} of the credit is no array of {len(flat)} numbers, one for each call"
        )
    xp = namespace(table)
    components = {
        name: xp.where(flat.sound, xp.asarray(part, float), xp.nan) for name, part in components.items()
    }
    if flat is not table:
        components = {name: over_leaves(part, rows, len(table), leaves) for name, part in components.items()}
    reward = sum((xp.where(xp.isnan(part), 0.0, part) for part in components.values()), xp.zeros(len(table)))
    return table.replace(components=components, reward=reward)


def namespace(table: Table) -> Any:
    """The module that computes with the table's columns: `jax.numpy` or `numpy`."""
    return jnp if isinstance(table.kind, jax.Array) else np


# --- the credits ----------------------------------------------------------------------------------------------


def outcome(table: Table) -> Components:
    """The reward of every call is the grade of the workflow's answer."""
    return {"outcome": _outcome(table)}


def voting_rubric(table: Table) -> Components:
    """The study's rubric for voting.

    A voter: +0.5 if its answer is right, +0.5 if the final one is, -1 if its answer was readable and wrong. The
    aggregator: 0 if no candidate was right, otherwise +1 or -1 for picking a right or a wrong one.

    Other kinds of roles have no rule: they raise OwnError, or earn infinity under jit, where values cannot raise.
    """
    xp = namespace(table)
    voter, picker = table.kind == SOLVER, table.kind == PICKER
    has_rule = ~table.sound | voter | picker
    if not isinstance(has_rule, jax.core.Tracer) and not has_rule.all():
        role = table.role_of(int(np.argmin(has_rule)))
        raise OwnError(f"credit 'voting_rubric' has no rule for role {role!r}; use it for voting workflows")
    value, known = own_work(table)
    right = table.grade >= RIGHT

    pick = xp.where(picker, xp.where(known, 2 * value - 1, 0.0), xp.where(has_rule, xp.nan, xp.inf))
    of_voters = {
        "own": 0.5 * right,
        "final": 0.5 * (_outcome(table) >= RIGHT),
        "wrong": -1.0 * (table.readable & ~right),
    }
    return {name: xp.where(voter, part, xp.nan) for name, part in of_voters.items()} | {"pick": pick}


def own_correctness(table: Table) -> Components:
    """The reward of every call is the grade of its work, see `own_work`; no component where that is unknown."""
    value, known = own_work(table)
    xp = namespace(table)
    return {"own": xp.where(known, value, xp.nan)}


def team_and_local(alpha: float) -> Credit:
    """AT-GRPO: alpha times the outcome, plus `own_work` of the call."""

    def credit(table: Table) -> Components:
        value, known = own_work(table)
        return {"team": alpha * _outcome(table), "local": namespace(table).where(known, value, 0.0)}

    return credit


def length_penalty(weight: float, free: int, limit: int, roles: Sequence[str] = ()) -> Credit:
    """0 up to `free` sampled tokens, then down to -weight at `limit`; for the given roles, or for all."""
    if weight < 0:
        raise ValueError(f"length penalty: weight={weight} must be at least 0")
    if not 0 <= free < limit:
        raise ValueError(f"length penalty: free={free} and limit={limit} must satisfy 0 <= free < limit")

    def credit(table: Table) -> Components:
        xp = namespace(table)
        # JAX divides integers in float32, numpy in float64.
        over = xp.clip((xp.asarray(table.length, float) - free) / (limit - free), 0.0, 1.0)
        return {"length": _if_role(table, -weight * over, roles)}

    return credit


def format_penalty(weight: float, roles: Sequence[str] = ()) -> Credit:
    """-weight for a call whose answer, verdict, pick or plan cannot be read; for the given roles, or for all."""
    if weight < 0:
        raise ValueError(f"format penalty: weight={weight} must be at least 0")

    def credit(table: Table) -> Components:
        return {"format": _if_role(table, namespace(table).where(table.readable, 0.0, -weight), roles)}

    return credit


def combine(*credits: Credit) -> Credit:
    """The components of several credits; components of equal names are added."""

    def credit(table: Table) -> Components:
        xp = namespace(table)
        combined: dict[str, Any] = {}
        for part in credits:
            for name, values in part(table).items():
                before = combined.get(name, values * xp.nan)
                gap = xp.isnan(before) | xp.isnan(values)
                combined[name] = xp.where(gap, xp.where(xp.isnan(values), before, values), before + values)
        return combined

    return credit


def own_work(table: Table) -> tuple[Any, Any]:
    """The grade of each call's work [N], between 0 and 1, and whether the call could be right at all [N].

    A solver: its answer's grade. A judge that read an answer: 1 if its verdict on the last one is right. A picker with
    a right candidate: 1 if its pick is right. A planner: the mean grade of the solvers that read its plan. Others: the
    outcome. A call on several paths has the mean over the paths on which it could be right.
    """
    if table.forked:
        flat, in_tree = table.paths()
        value, known = own_work(flat)
        counts = np.bincount(in_tree, known, len(table))
        sums = np.bincount(in_tree, np.where(known, value, 0.0), len(table))
        return sums / np.maximum(counts, 1), counts > 0
    xp = namespace(table)
    rows, solved, right = _shown(table)
    last_right, any_solved = last_answer_read(table)
    # Candidates are the solvers' answers that it read, from 1; a pick that cannot be read counts as the first.
    pick = xp.where((table.choice >= 1) & (table.choice <= solved.sum(axis=1)), table.choice, 1)
    picked = (right & (xp.cumsum(solved, axis=1) == pick[:, None])).any(axis=1)
    # A solver counts once for a plan that it read several times.
    earlier = xp.tri(table.reads.shape[1], k=-1, dtype=bool)
    repeated = ((table.reads[:, :, None] == table.reads[:, None, :]) & earlier).any(axis=2)
    plan_readers = (table.reads >= 0) & ~repeated & (table.kind == SOLVER)[:, None]
    plan_grade = _row_sums(xp, len(table), rows, xp.where(plan_readers, table.grade[:, None], 0.0))
    plan_grade = plan_grade / xp.maximum(_row_sums(xp, len(table), rows, 1.0 * plan_readers), 1)

    kinds = [table.kind == kind for kind in (SOLVER, JUDGE, PICKER, PLANNER, TEAM)]
    always = xp.ones_like(picked)
    values = (table.grade, 1.0 * (table.choice == last_right), 1.0 * picked, plan_grade, _outcome(table))
    possible = (always, any_solved, right.any(axis=1), always, always)
    value, known = xp.zeros(len(table)), ~always
    # Not `select`: its argmax cannot be lowered in float64 programs under jit.
    for is_kind, kind_value, kind_known in zip(kinds, values, possible):
        value, known = xp.where(is_kind, kind_value, value), xp.where(is_kind, kind_known, known)
    return value, known


def last_answer_read(table: Table) -> tuple[Any, Any]:
    """Bool[N] and Bool[N]: whether the last answer that a call read is right, and whether it read one."""
    xp = namespace(table)
    solved, right = answers_read(table)
    last = xp.max(xp.where(solved, xp.arange(table.reads.shape[1]), 0), axis=1)
    return xp.take_along_axis(right, last[:, None], axis=1)[:, 0], solved.any(axis=1)


def answers_read(table: Table) -> tuple[Any, Any]:
    """For the calls that each call was shown [N, R]: whether they are solvers', and whether they are right."""
    if table.forked:  # a call's prompt is the same on all of its paths
        flat, in_tree = table.paths()
        first = np.unique(in_tree, return_index=True)[1]
        solved, right = answers_read(flat)
        return solved[first], right[first]
    return _shown(table)[1:]


def _shown(table: Table) -> tuple[Any, Any, Any]:
    """(rows of the calls that were shown, and `solved` and `right` as in `answers_read`), for a table without forks."""
    table.need(grade="rewards.grade")
    xp = namespace(table)
    if xp is np and table.bare_episodes:
        first = np.searchsorted(table.episode, table.episode)
        if (np.diff(table.episode) < 0).any() or (table.call != np.arange(len(table)) - first).any():
            raise OwnError(
                "credit needs whole episodes in order: select them with of_episodes, not with take"
            )
    rows = (xp.arange(len(table)) - table.call)[:, None] + table.reads
    rows = xp.where(table.reads >= 0, rows, 0)
    solved = (table.reads >= 0) & (table.kind == SOLVER)[rows]
    return rows, solved, solved & (xp.where(solved, table.grade[rows], 0.0) >= RIGHT)


# --- a credit named in a config -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CreditConfig:
    """A credit by name: outcome, voting_rubric, own_correctness, team_and_local, or "module:function"."""

    name: str = "outcome"  # a built-in reward, or "module:function"
    alpha: float = 1.0  # weight of the outcome in team_and_local
    format_penalty: float = 0.0  # subtracted from the reward of a call whose answer cannot be read
    length_penalty: float = 0.0  # subtracted in part above `length_free` tokens, in full from `length_limit`
    length_free: int = 0  # tokens that cost nothing
    length_limit: int = 0  # tokens that cost the full penalty
    penalized_roles: tuple[str, ...] = ()  # the roles that penalties apply to; empty: all
    batch: Literal["task", "step"] = "task"  # which episodes one call of the credit sees
    leaves: str = "mean"  # value of a call before a fork: mean, max or min of its paths, or "module:function"
    threads: Count = 1  # calls of the credit that run at a time

    def __post_init__(self) -> None:
        fields.check(self)
        function_of(self.leaves)  # a bad name is refused
        if self.batch == "step" and self.threads > 1:
            raise ValueError(f"batch 'step' is one call: set threads to 1, not {self.threads}")


NAMED: Mapping[str, Callable[..., Any]] = {  # credits, and `team_and_local`, which makes one
    "outcome": outcome,
    "voting_rubric": voting_rubric,
    "own_correctness": own_correctness,
    "team_and_local": team_and_local,
}
# These use `own_work`, so every role's kind must be declared.
USE_OWN_WORK = ("voting_rubric", "own_correctness", "team_and_local")


def make_credit(config: CreditConfig) -> Credit:
    """The credit a config describes; a user's function is imported here, so that a bad name fails early."""
    if config.name == "team_and_local":
        parts = [team_and_local(config.alpha)]
    elif config.name in NAMED:
        parts = [NAMED[config.name]]
    elif is_own(config.name):
        parts = [load_credit(config.name, config.batch)]
    else:
        raise ValueError(
            f"credit {config.name!r} is unknown; use {', '.join(NAMED)}, or your own as 'module:function'"
        )
    if config.format_penalty:
        parts.append(format_penalty(config.format_penalty, config.penalized_roles))
    if config.length_penalty:
        limits = config.length_free, config.length_limit
        parts.append(length_penalty(config.length_penalty, *limits, config.penalized_roles))
    return combine(*parts) if len(parts) > 1 else parts[0]


def load_credit(name: str, batch: Literal["task", "step"] = "task") -> Credit:
    """A user's function, `module:function`, with its result checked.

    It receives the graded episodes of a problem that ended without an error (with a batch of "step" those of all
    problems) and returns, per episode or per call of each, one number or {component: number}.
    The function may be slow: in a run it is called on a thread, see `rewards.background_credit`.
    """
    return by_episodes(own_function(name, "credit"), f"credit {name!r}", batch)


def by_episodes(
    function: Callable[[list[Episode]], Any],
    who: str = "the credit function",
    batch: Literal["task", "step"] = "task",
) -> Credit:
    """A function of graded episodes as a credit, called for each problem, or with all episodes of a table at once.

    An exception in the function is raised as an OwnError: one line that names the place.
    """

    def earned_by(sound: list[Episode]) -> list[list[dict[str, float]]]:
        passed = [*sound]
        result = call_user_function(function, who, passed)
        if [*map(id, passed)] != [*map(id, sound)]:
            raise OwnError(
                f"{who} changed the list of episodes that it was given; sort or shorten a copy of it"
            )
        return _checked(result, sound, who)

    def credit(table: Table) -> Components:
        if table.forked:
            raise OwnError("a credit takes single paths, and this table has forks: use with_rewards")
        sound = [episode for episode in table.episodes() if episode.error is None]
        batches: dict[str, list[Episode]] = {}
        for episode in sound:
            batches.setdefault(episode.task.id if batch == "task" else "", []).append(episode)
        earned = {id(it): calls for part in batches.values() for it, calls in zip(part, earned_by(part))}
        by_call = (parts for episode in sound for parts in earned[id(episode)])
        components: dict[str, np.ndarray] = {}
        for row, parts in zip(np.flatnonzero(table.sound), by_call, strict=True):
            for name, value in parts.items():
                components.setdefault(name, np.full(len(table), np.nan))[row] = value
        return components

    return credit


# --- details --------------------------------------------------------------------------------------------------


def _outcome(table: Table) -> Any:
    table.need(outcome="rewards.grade")
    return table.outcome


def _row_sums(xp: Any, count: int, rows: Any, values: Any) -> Any:
    """Float[count]: the sum of the values of each row."""
    flat, added = rows.reshape(-1), xp.broadcast_to(values, rows.shape).reshape(-1)
    return jnp.zeros(count).at[flat].add(added) if xp is jnp else np.bincount(flat, added, count)


def _if_role(table: Table, values: Any, roles: Sequence[str]) -> Any:
    xp = namespace(table)
    chosen = xp.array([not roles or role in roles for role in table.roles] or [True])[table.role]
    return xp.where(chosen, values, xp.nan)


def _checked(result: Any, episodes: Sequence[Episode], who: str) -> list[list[dict[str, float]]]:
    """A credit's result as components of finite numbers, a dictionary per call; one-line errors otherwise."""
    if not _is_list(result) or len(result) != len(episodes):
        raise OwnError(
            f"{who} returned {_size(result)} for {len(episodes)} episodes; return one item per episode"
        )
    return [_checked_episode(item, episode, who) for item, episode in zip(result, episodes)]


def _checked_episode(item: Any, episode: Episode, who: str) -> list[dict[str, float]]:
    where = f"task {episode.task.id!r}, sample {episode.sample}"
    if isinstance(item, Real | Mapping) or getattr(item, "ndim", None) == 0:
        item = [item] * len(episode.calls)
    if not _is_list(item) or len(item) != len(episode.calls):
        raise OwnError(
            f"{who} returned {_size(item)} for {where} of {len(episode.calls)} calls; "
            "return one number or {component: number}, or one per call"
        )
    named = [parts if isinstance(parts, Mapping) else {"user": parts} for parts in item]
    return [
        {
            name: finite(value, f"{who}: component {name!r} of {where}, call {i}")
            for name, value in parts.items()
        }
        for i, parts in enumerate(named)
    ]


def _is_list(value: Any) -> bool:
    return (isinstance(value, Sequence) and not isinstance(value, str)) or getattr(value, "ndim", 0) > 0


def _size(value: Any) -> str:
    return f"{len(value)} items" if _is_list(value) else f"a {type(value).__name__}"
