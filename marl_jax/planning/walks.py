"""The calls of an episode of a workflow, for the checks of a configuration."""

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

from marl_jax.config.run_fields import RunFields
from marl_jax.learning.estimators.groups import group_key
from marl_jax.own import is_own
from marl_jax.planning.lengths import Lengths
from marl_jax.policies import shared
from marl_jax.rollouts import Limits
from marl_jax.task import Task
from marl_jax.workflows import find

if TYPE_CHECKING:
    from marl_jax.planning.dry_run import PlannedCall

MOST_SLOTS, MOST_TOKENS = 1000, 100_000  # of a role, and of a call, that are played
ACCEPTED = "\\boxed{Correct}"


def unset_settings(config: RunFields) -> list[str]:
    """Errors about settings that no config file can know: a run needs them from its user, a plan does not."""
    matched = "single_token_matched"
    if config.workflow.name != matched or config.workflow.settings.get("tokens") is not None:
        return []
    return [
        f"workflow.settings.tokens of '{matched}' is not given: give --config.workflow.settings.tokens the mean "
        "sampled tokens of an episode of the workflow that it is matched to, 'tokens_per_episode' in its run's "
        "eval.jsonl"
    ]


def compared_by(config: RunFields) -> tuple[str, ...]:
    """The fields that calls with compared rewards have in common: the key of a group, or of agent-wise means."""
    advantages = config.advantages
    if advantages.estimator == "agent":
        return ("task",) if advantages.agent_mean == "task" else ("task", "role")
    return group_key(advantages.group, find(config.workflow.name).groups)


def has_single_groups(config: RunFields) -> bool:
    """Whether no two calls can be compared if each problem is played once."""
    name, key = config.workflow.name, compared_by(config)
    if "task" not in key:
        return False
    if is_own(name):
        return {*key} >= {"task", "role", "slot", "turn"}
    workflow, calls = find(name), [(call.role, call.slot) for call in _episode(config)]
    # If calls are shorter than allowed, a budget of tokens has room for another slot.
    several = [role for role in workflow.roles if workflow.slots_of(role, config.workflow.settings) != 1]
    calls += [(role, 1) for role in several if (role, 1) not in calls]
    turns: collections.Counter[tuple[str, int]] = collections.Counter()
    groups = []
    for call in calls:
        place = {"task": 0, "role": call[0], "slot": call[1], "turn": turns[call]}
        groups.append(tuple(place.get(field) for field in key))  # calls are equal in other fields
        turns[call] += 1
    return len({*groups}) == len(groups)


def least_calls(config: RunFields) -> int:
    """How many calls the shortest episode of a built-in workflow makes: its first draft is accepted."""
    return len(_episode(config, ACCEPTED))


def _episode(config: RunFields, text: str | None = None) -> "list[PlannedCall]":
    """The calls of a built-in workflow with empty prompts and completions as long as allowed.

    All completions begin with `text`, which is `NO_VERDICT` by default, as in a dry run.
    """
    from marl_jax.planning import dry_run  # imported late, as no command's --help needs a scheduler

    workflow, settings = find(config.workflow.name), dict(config.workflow.settings)
    for kind in workflow.kinds.values():
        if kind.slots in settings:
            settings[kind.slots] = min(settings[kind.slots], MOST_SLOTS)
    if unset_settings(config):
        settings["tokens"] = 1  # the smallest value that may still be given
    assumptions = dry_run.Assumptions(Lengths(1.0, 0.0))
    speller = dry_run.Speller(assumptions, dry_run.NO_VERDICT if text is None else text)
    sampling = {
        role: dataclasses.replace(own, max_new_tokens=min(own.max_new_tokens, MOST_TOKENS), min_new_tokens=0)
        for role, own in config.role_settings.items()
    }
    family: Any = config.data.family if config.data.family in workflow.families else workflow.families[0]
    calls, _ = dry_run.play(
        workflow.bind(**settings),
        [Task("0", family, "")],
        _EmptyPrompts(),
        shared(workflow.roles),
        speller,
        speller.say,
        settings=sampling,
        limits=Limits(max_calls=2 * MOST_SLOTS),
    )
    return calls


class _EmptyPrompts:
    """Empty prompts of any role and section."""

    def __getattr__(self, name: str) -> "_EmptyPrompts":
        return self

    def __call__(self, **fields: Any) -> list[dict[str, str]]:
        return [{"role": "user", "content": ""}]
