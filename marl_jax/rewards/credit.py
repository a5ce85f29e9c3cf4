"""Credit: from graded episodes to one reward per call, as named components whose sum is the reward.

    graded episodes --credit--> components per call --totals--> rewards (for the learner)
                                                    --by_role--> sums and counts (for the log)

A credit is any function from a batch of graded episodes to their calls' components; `combine` adds several up.
An episode that ended in an error earns 0.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from marl_jax.own import is_own, load_own
from marl_jax.rewards.grading import Graded, finite, is_right
from marl_jax.rollouts.episodes import CallRecord, Episode

Components = Mapping[str, float]  # of one call's reward
CallRewards = Sequence[Components]  # one per call of an episode
Credit = Callable[[Sequence[Graded]], Sequence[CallRewards]]


class CreditError(ValueError):
    """A credit function returned what is no credit; the text is one line."""


def assign(credit: Credit, graded: Sequence[Graded]) -> list[CallRewards]:
    """The components of every call, checked; calls of an episode that ended in an error have none."""
    sound = [one for one in graded if one.episode.error is None]
    earned = iter(_checked(credit(sound), sound, "the credit function") if sound else ())
    return [next(earned) if one.episode.error is None else [{} for _ in one.episode.calls] for one in graded]


def totals(rewards: Iterable[CallRewards]) -> list[list[float]]:
    """One reward per call of each episode."""
    return [[math.fsum(components.values()) for components in calls] for calls in rewards]


def by_role(
    episodes: Sequence[Episode], rewards: Sequence[CallRewards]
) -> dict[str, dict[str, tuple[float, int]]]:
    """Per role, each component's (sum, count) over the calls that have it, and the whole as "reward"."""
    found: dict[str, dict[str, tuple[float, int]]] = {}
    for episode, calls in zip(episodes, rewards, strict=True):
        for call, components in zip(episode.calls, calls, strict=True):
            role = found.setdefault(call.role, {})
            for name, value in {**components, "reward": math.fsum(components.values())}.items():
                before, count = role.get(name, (0.0, 0))
                role[name] = (before + value, count + 1)
    return found


# --- the credits ----------------------------------------------------------------------------------------------


def outcome(graded: Sequence[Graded]) -> list[CallRewards]:
    """Every call earns what the workflow's answer is worth."""
    return [[{"outcome": one.outcome} for _ in one.episode.calls] for one in graded]


def voting_rubric(graded: Sequence[Graded]) -> list[CallRewards]:
    """The study's rubric for voting.

    A voter: +0.5 if its own answer is right, +0.5 if the final one is, -1 if its own was readable and wrong. The
    aggregator: 0 if no candidate was right, otherwise +1 or -1 for picking a right or a wrong one.
    """
    return [[_rubric(one, i) for i in range(len(one.episode.calls))] for one in graded]


def own_correctness(graded: Sequence[Graded]) -> list[CallRewards]:
    """Every call earns what its own work is worth, see `own_work`; nothing where that cannot be said."""
    return [[{} if value is None else {"own": value} for value in own_work(one)] for one in graded]


def team_and_local(alpha: float) -> Credit:
    """AT-GRPO: alpha times the outcome, plus the call's own work."""

    def credit(graded: Sequence[Graded]) -> list[CallRewards]:
        return [
            [{"team": alpha * one.outcome, "local": value or 0.0} for value in own_work(one)]
            for one in graded
        ]

    return credit


def length_penalty(weight: float, free: int, limit: int, roles: Sequence[str] = ()) -> Credit:
    """0 up to `free` sampled tokens, then down to -weight at `limit`; of the given roles, or of all."""
    if not 0 <= free < limit:
        raise ValueError(f"length penalty: free={free} and limit={limit} must satisfy 0 <= free < limit")

    def penalty(call: CallRecord) -> float:
        return -weight * min(max((len(call.tokens) - free) / (limit - free), 0.0), 1.0)

    return _per_call("length", penalty, roles)


def format_penalty(weight: float, roles: Sequence[str] = ()) -> Credit:
    """-weight for a call whose answer, verdict, pick or plan cannot be read; of the given roles, or of all."""
    return _per_call("format", lambda call: 0.0 if call.answer is not None else -weight, roles)


def combine(*credits: Credit) -> Credit:
    """The components of several credits; equal names are added."""

    def credit(graded: Sequence[Graded]) -> list[CallRewards]:
        combined: list[list[dict[str, float]]] = [[{} for _ in one.episode.calls] for one in graded]
        for part in credits:
            for calls, earned in zip(combined, part(graded), strict=True):
                for components, more in zip(calls, earned, strict=True):
                    for name, value in more.items():
                        components[name] = components.get(name, 0.0) + value
        return list(combined)

    return credit


def own_work(graded: Graded) -> list[float | None]:
    """What each call's own work is worth, between 0 and 1; None where there was nothing to get right.

    A solver: its answer. A judge: 1 if its verdict on the last answer it read is right. A picker: whether its pick
    is right, None if no candidate was. A planner: the mean of the solvers that read it. Others: the outcome.
    """
    return [_own(graded, index) for index in range(len(graded.episode.calls))]


# --- a credit named in a config -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CreditConfig:
    """A credit by name: outcome, voting_rubric, own_correctness, team_and_local, or "module:function"."""

    name: str = "outcome"
    alpha: float = 1.0  # of team_and_local
    format_penalty: float = 0.0
    length_penalty: float = 0.0
    length_free: int = 0  # tokens that cost nothing
    length_limit: int = 0  # tokens that cost the whole penalty
    penalized_roles: tuple[str, ...] = ()  # empty: all
    batch: Literal["task", "step"] = "task"  # whose episodes it sees together
    threads: int = 1  # calls of it at a time

    def __post_init__(self) -> None:
        if self.batch not in ("task", "step"):
            raise ValueError(f"batch is {self.batch!r}; it must be 'task' or 'step'")
        if self.threads < 1:
            raise ValueError(f"threads are {self.threads}; at least 1 is needed")
        if self.batch == "step" and self.threads > 1:
            raise ValueError(f"batch is 'step', which is one call, and threads are {self.threads}")


NAMED: Mapping[str, Credit] = {
    "outcome": outcome,
    "voting_rubric": voting_rubric,
    "own_correctness": own_correctness,
}


def make_credit(config: CreditConfig) -> Credit:
    """The credit a config describes; a user's function is imported here, so that a bad name fails early."""
    if config.name == "team_and_local":
        parts = [team_and_local(config.alpha)]
    elif config.name in NAMED:
        parts = [NAMED[config.name]]
    elif is_own(config.name):
        parts = [load_credit(config.name)]
    else:
        known = ", ".join([*NAMED, "team_and_local"])
        raise ValueError(f"credit {config.name!r} is unknown; use {known}, or your own as 'module:function'")
    if config.format_penalty:
        parts.append(format_penalty(config.format_penalty, config.penalized_roles))
    if config.length_penalty:
        limits = config.length_free, config.length_limit
        parts.append(length_penalty(config.length_penalty, *limits, config.penalized_roles))
    return combine(*parts) if len(parts) > 1 else parts[0]


def load_credit(name: str) -> Credit:
    """A user's own function, `module:function`, with its result checked.

    It receives the batch of `Graded` episodes that ended without an error and returns, per episode, one number for
    all of its calls, or one number or {component: number} per call. It may be slow: in a run it is called on a
    thread, see `rewards.crediting`.
    """
    function = load_own(name, "credit")
    if not callable(function):
        raise ValueError(f"credit {name!r} is a {type(function).__name__}, not a function")

    def credit(graded: Sequence[Graded]) -> list[CallRewards]:
        return _checked(function(graded), graded, f"credit {name!r}")

    return credit


# --- details --------------------------------------------------------------------------------------------------


def _own(graded: Graded, index: int) -> float | None:
    call, answers = graded.episode.calls[index], graded.answers
    match graded.kinds[index]:
        case "solver":
            return answers[index]
        case "judge":
            seen = [answers[i] for i in call.reads if answers[i] is not None]
            if not seen:
                return None
            return float(call.answer == ("Correct" if is_right(seen[-1]) else "Incorrect"))
        case "picker":
            candidates = [is_right(answers[i]) for i in call.reads]
            return float(candidates[_picked(graded, index)]) if any(candidates) else None
        case "planner":
            led = [
                a for a, other in zip(answers, graded.episode.calls) if index in other.reads and a is not None
            ]
            return math.fsum(led) / len(led) if led else 0.0
    return graded.outcome


def _rubric(graded: Graded, index: int) -> Components:
    call, own = graded.episode.calls[index], graded.answers[index]
    match graded.kinds[index]:
        case "solver":
            return {
                "own": 0.5 * is_right(own),
                "final": 0.5 * is_right(graded.outcome),
                "wrong": -1.0 * (call.answer is not None and not is_right(own)),
            }
        case "picker":
            picked_right = _own(graded, index)
            return {"pick": 0.0 if picked_right is None else 2 * picked_right - 1}
    raise ValueError(
        f"credit 'voting_rubric' has no rule for role {call.role!r}; use it for voting workflows"
    )


def _picked(graded: Graded, index: int) -> int:
    """Position among what the call read; a pick that cannot be read means the first."""
    call = graded.episode.calls[index]
    pick = int(call.answer) if call.answer is not None and call.answer.isdecimal() else 1
    return pick - 1 if 1 <= pick <= len(call.reads) else 0


def _per_call(name: str, value: Callable[[CallRecord], float], roles: Sequence[str]) -> Credit:
    def credit(graded: Sequence[Graded]) -> list[CallRewards]:
        return [
            [{name: value(call)} if not roles or call.role in roles else {} for call in one.episode.calls]
            for one in graded
        ]

    return credit


def _checked(result: Any, graded: Sequence[Graded], who: str) -> list[CallRewards]:
    """A credit's result as components of finite numbers, one set per call; one-line errors otherwise."""
    if not _is_list(result) or len(result) != len(graded):
        raise CreditError(
            f"{who} returned {_size(result)} for {len(graded)} episodes; return one item per episode"
        )
    return [_checked_episode(item, one.episode, who) for item, one in zip(result, graded)]


def _checked_episode(item: Any, episode: Episode, who: str) -> CallRewards:
    where = f"task {episode.task.id!r}, sample {episode.sample}"
    if isinstance(item, numbers.Real):
        item = [item] * len(episode.calls)
    if not _is_list(item) or len(item) != len(episode.calls):
        raise CreditError(
            f"{who} returned {_size(item)} for {where} of {len(episode.calls)} calls; "
            "return one number, or one per call"
        )
    named = [parts if isinstance(parts, Mapping) else {"user": parts} for parts in item]
    return [
        {
            name: finite(value, f"{who}: component {name!r} of {where}, call {i}", CreditError)
            for name, value in parts.items()
        }
        for i, parts in enumerate(named)
    ]


def _is_list(value: Any) -> bool:
    return (isinstance(value, Sequence) and not isinstance(value, str)) or getattr(value, "ndim", 0) > 0


def _size(value: Any) -> str:
    return f"{len(value)} items" if _is_list(value) else f"a {type(value).__name__}"
