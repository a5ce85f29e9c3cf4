"""Checks of the workflow of a configuration: its settings, its calls and limits, and the policies of its roles."""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from marl_jax import fields, table
from marl_jax.config.phase_fields import ROLE
from marl_jax.config.run_fields import RunFields
from marl_jax.own import is_own
from marl_jax.planning.walks import least_calls
from marl_jax.policies import SamplingSettings, role_settings, validate_map
from marl_jax.rewards.credit import USE_OWN_WORK
from marl_jax.workflows import find

Problems = Iterator[str]


def of_workflow(config: RunFields) -> Problems:
    """The mistakes in the settings of the workflow, which must exist."""
    for check in (_workflow, _settings, _calls, _slots, _roles):
        yield from check(config)


def report(where: str, check: Callable[..., Any], *args: Any) -> Problems:
    """A line with the error message of the check, if it raises."""
    if message := error_of(check, *args):
        yield f"{where}: {message}"


def error_of(check: Callable[..., Any], *args: Any) -> str | None:
    """The error message of the check if it raises; None if it passes."""
    try:
        check(*args)
    except (ValueError, TypeError) as error:
        return str(error)
    return None


def _workflow(config: RunFields) -> Problems:
    name, family = config.workflow.name, config.data.family
    workflow = find(name)
    kinds = {*map(workflow.kind_of, workflow.roles)}
    if family not in workflow.families:
        yield f"workflow '{name}' is for {', '.join(workflow.families)}, not for {family}"
    if config.rewards.name in USE_OWN_WORK and not workflow.kinds:
        roles = ", ".join(f'"{role}": solver' for role in workflow.roles)
        yield (
            f"rewards.name '{config.rewards.name}' rewards each role by its kind, and '{name}' declares no kinds: "
            f"write @workflow(roles={{{roles}}}), each role with its kind ({', '.join(table.KINDS)})"
        )
    elif config.rewards.name == "voting_rubric" and not kinds <= {"solver", "picker"}:
        yield f"rewards.name 'voting_rubric' is for solvers and pickers, as in voting, not for '{name}': use outcome"


def _settings(config: RunFields) -> Problems:
    chosen, workflow = config.workflow, find(config.workflow.name)
    for name, value in chosen.settings.items():
        if name not in workflow.settings:
            near = fields.nearest(name, workflow.settings)
            yield f"workflow.settings.{name} is no setting of '{chosen.name}'{near}"
        elif misfit := _misfit(value, workflow.settings[name], name in workflow.counts):
            yield f"workflow.settings.{name} is {value!r}; it must be {misfit}"
        elif error_of(lambda value=value: json.dumps(fields.to_json(value), allow_nan=False)):
            yield f"workflow.settings.{name} is {value!r}; it must be a value that JSON can store, with finite numbers"


def _misfit(value: Any, default: Any, counted: bool) -> str | None:
    """The required type of a setting (a count, or the type of its default) if it has another type; else None."""
    if counted:
        fits = (type(value) is int and value >= 1) or (value is None and default is None)
        return None if fits else "an integer from 1 on"
    if callable(default):
        return "left out: it is a function"
    if isinstance(default, str) and not isinstance(value, str):
        return f"a text: write '\"{value}\"'"
    if isinstance(default, bool | int | float | str):
        return fields.misfit(type(default), value)
    if isinstance(default, tuple | list):
        return None if isinstance(value, tuple | list) else 'a JSON list, such as ["a", "b"] or [1, 2]'
    return None if default is None or isinstance(value, type(default)) else f"a {type(default).__name__}"


def playable(config: RunFields) -> bool:
    """Whether the script of the workflow can be run with these settings."""
    return not (any(_settings(config)) or any(bad_sampling(config)))


def _calls(config: RunFields) -> Problems:
    """Report a limit on calls that every episode of a built-in workflow would exceed."""
    if is_own(config.workflow.name) or not playable(config):
        return
    limit, least = config.rollout.limits.max_calls, least_calls(config)
    if least > limit:
        counts = [
            f"workflow.settings.{name}"
            for name, value in find(config.workflow.name).settings.items()
            if isinstance(value, int) and not isinstance(value, bool)
        ]
        lower = f", or lower {' or '.join(counts)}" if counts else ""
        yield (
            f"rollout.limits.max_calls is {limit}, and every episode of '{config.workflow.name}' makes {least} calls "
            f"or more: raise it{lower}"
        )


def _slots(config: RunFields) -> Problems:
    """Report entries of the map that no call of a built-in workflow uses, and slots without an entry."""
    workflow = find(config.workflow.name)
    if is_own(config.workflow.name) or error_of(validate_map, config.policies.map, workflow.roles):
        return
    counts = {role: workflow.slots_of(role, config.workflow.settings) for role in workflow.roles}
    if any(type(count) is not int or count < 1 for count in counts.values()):  # `_settings` reports it
        return
    answering = set()
    for role, count in counts.items():
        for key in (f"{role}/{slot}" for slot in range(count)):
            answering.add(key if key in config.policies.map else role)
            if not {key, role} & set(config.policies.map):
                yield f"policies.map lacks '{key}': add it, or '{role}' for all slots without an entry of their own"
    for key in config.policies.map:
        if key not in answering:
            yield f"policies.map gives '{key}' a policy, but no call of this workflow uses it: leave it out"
    of_phases = {f"phases[{number}].roles": phase.roles for number, phase in enumerate(config.phases)}
    for where, names in {"policies.frozen_roles": config.policies.frozen_roles, **of_phases}.items():
        for name in names:
            role, _, slot = name.rpartition("/")
            if slot.isdecimal() and int(slot) >= counts.get(role, math.inf):
                yield f"{where} names '{name}', but the slots of '{role}' are 0 to {counts[role] - 1}"


def _roles(config: RunFields) -> Problems:
    """Report names of roles, in the map and elsewhere, that the workflow does not have."""
    yield from report("policies.map", validate_map, config.policies.map, config.roles)
    yield from bad_sampling(config)
    named = {
        f"learner.interventions.{key}": names for key, names in config.learner.interventions.named.items()
    }
    for where, names in {**named, "rewards.penalized_roles": config.rewards.penalized_roles}.items():
        yield from fields.unknown_names(where, names, config.roles, ROLE)


def bad_sampling(config: RunFields) -> Problems:
    """Report sampling settings of single roles that have the wrong type, or an impossible value."""
    types, mistyped = fields.annotations(SamplingSettings), False
    for role, override in config.role_sampling.items():
        for name, value in override.items():
            if name in types and (misfit := fields.misfit(types[name], value)):
                mistyped = True
                yield f"role_sampling.{role}.{name} is {value!r}; it must be {misfit}"
    if not mistyped:
        yield from report("role_sampling", role_settings, config.roles, config.sampling, config.role_sampling)
