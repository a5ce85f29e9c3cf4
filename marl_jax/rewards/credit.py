"""Credit: from graded episodes to one reward per call, as named components whose sum is the reward.

    episodes --grade_episodes--> graded --credit--> components per call --totals--> rewards (for the learner)
                                                                        --by_role--> sums and counts (for the log)

A credit is any function from a batch of graded episodes to their calls' components; `combine` adds several up.
An episode that ended in an error earns 0.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from marl_jax.own import is_own, load_own
from marl_jax.rollouts.episodes import CallRecord, Episode
from marl_jax.tasks.families import grade_answer as grade_answer
from marl_jax.tasks.families import start_answer
from marl_jax.tasks.task import Task

Kind = Literal["solver", "judge", "picker", "planner", "team"]
Components = Mapping[str, float]  # of one call's reward
CallRewards = Sequence[Components]  # one per call of an episode

RIGHT = 0.5  # an answer graded at least so is right

# What each role's own work is: an answer, a verdict on the answer it read, a pick among those it read, guidance
# for the calls that read it, or the episode's outcome (also of roles that are not named here).
KINDS: Mapping[str, Kind] = {
    "generator": "solver",
    "worker": "solver",
    "debater": "solver",
    "coder": "solver",
    "evaluator": "judge",
    "aggregator": "picker",
    "orchestrator": "planner",
    "planner": "planner",
    "synthesizer": "team",
}


@dataclasses.dataclass(frozen=True)
class Graded:
    """An episode and what the grader said of it, between 0 and 1."""

    episode: Episode
    outcome: float  # of the workflow's answer
    answers: tuple[float | None, ...]  # of each solver's own answer (0 if unreadable); None for other calls
    kinds: tuple[Kind, ...]  # of the calls


Credit = Callable[[Sequence[Graded]], Sequence[CallRewards]]
_Pair = tuple[str, ...]  # an answer to a task, whoever gave it


class Grader:
    """The grades that the tasks' own families give; programs and algebra are worked on from `start` on."""

    def __init__(self, kinds: Mapping[str, Kind] = KINDS):
        self._kinds = kinds
        self._started: dict[_Pair, Callable[[], float]] = {}

    def start(self, episode: Episode) -> None:
        """Begin with all that the grade of a finished episode will ask for; does not wait."""
        for pair, (task, answer) in _wanted(episode, self._kinds).items():
            if pair not in self._started:
                self._started[pair] = start_answer(task, answer)

    def __call__(self, task: Task, answer: str) -> float:
        """The grade of an answer that an episode brought; waits for it."""
        return self._started[_pair(task, answer)]()


def grade_episodes(
    episodes: Sequence[Episode],
    grade: Callable[[Task, str], float] | None = None,
    kinds: Mapping[str, Kind] = KINDS,
    threads: int = 1,
) -> list[Graded]:
    """Every outcome and every solver's answer, graded; `grade(task, answer)` sees each distinct pair once.

    Without a `grade` of one's own, or with a `Grader` that may have begun, programs and algebra run side by side.
    """
    grade = grade or Grader(kinds)
    if isinstance(grade, Grader):
        for episode in episodes:
            grade.start(episode)
    wanted: dict[_Pair, tuple[Task, str]] = {}
    for episode in episodes:
        wanted |= _wanted(episode, kinds)
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            values = list(pool.map(lambda pair: grade(*pair), wanted.values()))
    else:
        values = [grade(*pair) for pair in wanted.values()]
    grades = {key: _finite(value, f"the grade of task {key[0]!r}") for key, value in zip(wanted, values)}

    def of(episode: Episode, answer: str | None) -> float:
        return 0.0 if answer is None or episode.error is not None else grades[_pair(episode.task, answer)]

    return [
        Graded(
            episode,
            of(episode, episode.answer),
            tuple(
                of(episode, call.answer) if kind == "solver" else None
                for call, kind in zip(episode.calls, _kinds_of(episode, kinds))
            ),
            _kinds_of(episode, kinds),
        )
        for episode in episodes
    ]


def _kinds_of(episode: Episode, kinds: Mapping[str, Kind]) -> tuple[Kind, ...]:
    return tuple(kinds.get(call.role, "team") for call in episode.calls)


def _wanted(episode: Episode, kinds: Mapping[str, Kind]) -> dict[_Pair, tuple[Task, str]]:
    """The answers of an episode that need a grade: its outcome's and its solvers'."""
    solved = [call.answer for call, kind in zip(episode.calls, _kinds_of(episode, kinds)) if kind == "solver"]
    answers = (episode.answer, *solved) if episode.error is None else ()
    return {_pair(episode.task, answer): (episode.task, answer) for answer in answers if answer is not None}


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


def _pair(task: Task, answer: str) -> tuple[str, ...]:
    return task.id, task.question, task.gold, answer


def _own(graded: Graded, index: int) -> float | None:
    call, answers = graded.episode.calls[index], graded.answers
    match graded.kinds[index]:
        case "solver":
            return answers[index]
        case "judge":
            seen = [answers[i] for i in call.reads if answers[i] is not None]
            if not seen:
                return None
            return float(call.answer == ("Correct" if _right(seen[-1]) else "Incorrect"))
        case "picker":
            candidates = [answers[i] for i in call.reads]
            return float(_right(candidates[_picked(graded, index)])) if any(map(_right, candidates)) else None
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
                "own": 0.5 * _right(own),
                "final": 0.5 * _right(graded.outcome),
                "wrong": -1.0 * (call.answer is not None and not _right(own)),
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


def _right(grade: float | None) -> bool:
    return grade is not None and grade >= RIGHT


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
        raise ValueError(
            f"{who} returned {_size(result)} for {len(graded)} episodes; return one item per episode"
        )
    return [_checked_episode(item, one.episode, who) for item, one in zip(result, graded)]


def _checked_episode(item: Any, episode: Episode, who: str) -> CallRewards:
    where = f"task {episode.task.id!r}, sample {episode.sample}"
    if isinstance(item, numbers.Real):
        item = [item] * len(episode.calls)
    if not _is_list(item) or len(item) != len(episode.calls):
        raise ValueError(
            f"{who} returned {_size(item)} for {where} of {len(episode.calls)} calls; "
            "return one number, or one per call"
        )
    named = [parts if isinstance(parts, Mapping) else {"user": parts} for parts in item]
    return [
        {
            name: _finite(value, f"{who}: component {name!r} of {where}, call {i}")
            for name, value in parts.items()
        }
        for i, parts in enumerate(named)
    ]


def _finite(value: Any, what: str) -> float:
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{what} is {value!r}; it must be a finite number")
    return number


def _is_list(value: Any) -> bool:
    return (isinstance(value, Sequence) and not isinstance(value, str)) or getattr(value, "ndim", 0) > 0


def _size(value: Any) -> str:
    return f"{len(value)} items" if _is_list(value) else f"a {type(value).__name__}"
