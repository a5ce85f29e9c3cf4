"""Checks of a configuration: one line for each combination of fields that cannot run.

All checks run that the workflow's name allows, so that a command line can be corrected in one go.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import shlex
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from marl_jax import fields
from marl_jax.config import phase_fields
from marl_jax.config.run_fields import TRACKERS, RunFields, not_installed
from marl_jax.config.workflow_checks import Problems, bad_sampling, error_of, of_workflow, playable, report
from marl_jax.learning.estimators.groups import group_key
from marl_jax.learning.learner_config import LARGEST_SEED
from marl_jax.own import is_own, load_own, own_function
from marl_jax.planning.walks import compared_by, has_single_groups
from marl_jax.policies import decode_groups, policy_names, roles_of, trained_policies
from marl_jax.rewards.credit import make_credit
from marl_jax.rewards.own_metric import load_metric
from marl_jax.rollouts.vllm.vllm_config import LOCAL, RANKS, urls_of
from marl_jax.tasks import NAMES
from marl_jax.tasks.datasets import SOURCES
from marl_jax.tasks.micro import KINDS
from marl_jax.workflows import find

OF_FILES = ("directory", "bad_rows")  # fields of `data` for data sets read from files
DRAWN = ("train_size", "test_size")  # fields of `data` for procedural data sets
COLDEST = 1e-3  # temperature; below it sampling is hardly different from greedy
# {field: (another field, its value without which the first has no effect)}
NEEDED = {
    "learner.updates_fixed": ("learner.updates", "fixed"),
    "learner.sequences_per_update": ("learner.updates", "sequences"),
    "learner.interventions.mixing.max_share": ("learner.interventions.mixing.balance", "cap"),
}


def problems(config: RunFields) -> list[str]:
    """All mistakes in a configuration, each with the way out."""
    lines = [
        *fields.out_of_bounds(config),
        *_policies(config),
        *_data(config),
        *_learning(config),
        *_hosts(config),
    ]
    if unknown := error_of(find, config.workflow.name):
        return [f"workflow.name: {unknown}", *lines]
    checks = (of_workflow, _interventions, _sampling, _engine, _groups, _phases)
    return [*(line for check in checks for line in check(config)), *lines]


def without_effect(config: RunFields, paths: Iterable[str]) -> list[str]:
    """Report settings without effect in this run or on this machine; `paths` are those that a command line sets."""
    lines = []
    if "data.levels" in paths and config.data.name not in KINDS:
        lines.append(f"data.levels is for procedural data; '{config.data.name}' has no levels: leave it out")
    for name, (other, value) in NEEDED.items():
        chosen = functools.reduce(getattr, other.split("."), config)
        if name in paths and chosen != value and not config.phases:  # a phase may set the other field
            lines.append(f"{name} is for {other}={value}: set that, too, or leave it out")
    if config.seed <= LARGEST_SEED < config.seed + config.seeds - 1:
        lines.append(
            f"seed is {config.seed} and seeds {config.seeds}: the last seed would exceed {LARGEST_SEED}; lower one"
        )
    trackers = [package for package in TRACKERS if getattr(config.logging, package)]
    return lines + [not_installed(name) for name in trackers if importlib.util.find_spec(name) is None]


def _policies(config: RunFields) -> Problems:
    policies, known = config.policies, policy_names(config.policies.map)
    owners = policies.map, policies.frozen_roles
    trained = known if error_of(trained_policies, *owners) else trained_policies(*owners)
    yield from report("policies.frozen_roles", trained_policies, *owners)
    if policies.map and not trained:
        yield "policies.frozen_roles names every role: nothing is left to train"
    if slashed := [name for name in known if "/" in name]:
        yield f"policies.map has the policy '{slashed[0]}': metrics use '/' as a separator, so choose a name without it"
    if dotted := [name for name in known if not name.strip(". ")]:
        yield f"policies.map has the policy '{dotted[0]}', which cannot name a folder: use a letter or digit in it"
    if not policies.base:
        yield "policies.base is empty: give the directory of the model to start from"
    for name in sorted(name for name, base in policies.bases.items() if not base):
        yield f"policies.bases.{name} is empty: give the directory of its model, or leave it out"
    of_training = {
        "policies.trains": policies.trains,
        "learner.learning_rates": config.learner.learning_rates,
    }
    for where, settings in {"policies.bases": policies.bases, **of_training}.items():
        yield from _unknown_policies(where, settings, policies.map)
    for where, settings in of_training.items():
        for name in sorted({*settings} & {*known} - {*trained}):
            yield f"{where} names '{name}', which is frozen: leave it out"


def _unknown_policies(where: str, settings: Mapping[str, Any], policy_map: Mapping[str, str]) -> Problems:
    """Report unknown names in {policy: setting}; for names of roles, the line gives their policy."""
    known, by_policy = policy_names(policy_map), dict[str, dict[str, Any]]()
    for name in sorted({*settings} - {*known}):
        policies = {policy for key, policy in policy_map.items() if name in (key, key.split("/")[0])}
        if len(policies) == 1:
            by_policy.setdefault(policies.pop(), {})[name] = settings[name]
        else:
            yield from fields.unknown_names(where, [name], known, phase_fields.POLICY)
    for policy, roles in by_policy.items():
        names = " and ".join(f"'{role}'" for role in roles)
        if len({*map(str, roles.values())}) > 1:
            yield (
                f"{where} gives {names} different values, but in policies.map they share the policy '{policy}': give "
                f"{where}.{policy}, or give each role its own policy"
            )
        else:
            yield f"{where} names {names}, but takes policies, not roles: give {where}.{policy}"


def _engine(config: RunFields) -> Problems:
    """Report settings that a vLLM server cannot serve, and settings of a server that is not used."""
    engine, policies = config.engine, config.policies
    if engine.kind != "vllm":
        if engine.vllm != type(engine.vllm)():
            yield f"engine.vllm is set and engine.kind is {engine.kind}: set engine.kind=vllm, or leave engine.vllm out"
        return
    urls = urls_of(engine.vllm)
    if engine.vllm.start and any(error_of(_check_url, url, True) for url in urls):
        yield (
            f"engine.vllm.url is {engine.vllm.url!r}, but engine.vllm.start starts servers on this host only: leave "
            "the url out, or give one such as http://127.0.0.1:8000"
        )
    if not engine.vllm.start and any(error_of(_check_url, url) for url in urls or [""]):
        password = " without a password (a server's key is in VLLM_API_KEY)" if "@" in engine.vllm.url else ""
        yield (
            f"engine.vllm.url is {engine.vllm.url!r}: give the server's address, such as http://127.0.0.1:8000"
            f"{password}, or have it started by engine.vllm.start=true"
        )
    if why := error_of(shlex.split, engine.vllm.flags):
        yield f"engine.vllm.flags is {engine.vllm.flags!r}, which is no command line ({why}): close its quotes"
    if policies.train == "lora" and policies.lora_rank > RANKS[-1]:
        yield f"policies.lora_rank is {policies.lora_rank}: vLLM takes up to {RANKS[-1]}"
    groups = [] if error_of(lambda: policies.specs) else decode_groups(policies.specs)
    if urls and groups and len(urls) != len(groups):
        yield (
            f"engine.vllm.url has {len(urls)} and the run needs {len(groups)} servers, for "
            f"{', '.join(' and '.join(group) for group in groups)} (each policy that is trained in full has its own): "
            "give one address for each, separated by commas, or have them started by engine.vllm.start=true"
        )
    if config.road == "compiled":
        yield "road is 'compiled', but engine.kind=vllm works only on the hosted road: set road=hosted"
    if config.seeds > 1:
        yield f"seeds is {config.seeds}: with engine.kind=vllm, start a run for each seed"
    for name in ("sampler", "budget_bytes", "steps"):
        if getattr(engine, name) is not None:
            yield f"engine.{name} is for the embedded engine: with engine.kind=vllm, leave it out"
    for role, settings in () if any(bad_sampling(config)) else config.role_settings.items():
        if settings.temperature > 0 and (settings.top_k or settings.top_p < 1):
            yield (
                f"role '{role}' truncates (top_k {settings.top_k}, top_p {settings.top_p:g}): training renormalises "
                "over the kept tokens, and vLLM does not report them; set top_k=0 and top_p=1"
            )
        if settings.temperature > 2 or 0 < settings.temperature < 0.01:
            yield f"role '{role}' has temperature {settings.temperature:g}: vLLM samples at 0 and from 0.01 to 2"
        if settings.stop_strings:
            yield f"role '{role}' has stop_strings: with engine.kind=vllm, give stop_tokens"


def _check_url(url: str, here: bool = False) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0 or "@" in parts.netloc:
        raise ValueError("it is no address")
    if here and (parts.scheme != "http" or parts.hostname not in (LOCAL, "localhost") or not parts.port):
        raise ValueError("it is no port of this host")


def _interventions(config: RunFields) -> Problems:
    chosen = config.learner.interventions
    frozen = {*chosen.freeze, *config.policies.frozen_roles}
    if chosen.freeze and config.steps and frozen.issuperset(config.roles):
        yield "learner.interventions.freeze leaves no role to train: name fewer, or set steps=0"
    if chosen.mixing.roles and not (chosen.mixing.changes_weights or chosen.mixing.damping):
        yield "learner.interventions.mixing.roles is set, but no switch of mixing is on: turn one on, or leave it out"
    if idle := sorted({*chosen.alternate} & {*config.policies.frozen_roles}):
        yield (
            f"learner.interventions.alternate names {', '.join(idle)}, frozen by policies.frozen_roles: in its turns "
            "nothing would be trained; leave it out"
        )
    names = policy_names(config.policies.map)
    holders = [roles_of(config.policies.map, name) for name in names]
    if any(len(roles) > 1 and any(map(chosen.damps, roles)) for roles in holders):
        yield (
            "learner.interventions.mixing.damping is defined for isolated policies: give each damped role its own "
            "policy, let mixing.roles name only roles that have one, or set damping=0"
        )


def _sampling(config: RunFields) -> Problems:
    if any(bad_sampling(config)):
        return
    longest = max(settings.max_new_tokens for settings in config.role_settings.values())
    room, context = config.engine.max_prompt + longest, config.rollout.limits.context
    if context is not None and context > room:
        yield f"rollout.limits.context {context} is more than engine.max_prompt + max_new_tokens = {room}: lower it"
    if room > config.learner.batch.buckets[-1]:
        yield (
            f"a call may have engine.max_prompt + max_new_tokens = {room} tokens, the longest of "
            f"learner.batch.buckets is {config.learner.batch.buckets[-1]}: add a longer bucket"
        )
    sampled = {role: settings for role, settings in config.role_settings.items() if settings.temperature > 0}
    if config.engine.sampler or any(settings.top_p < 1 or settings.top_k for settings in sampled.values()):
        for role in (role for role, settings in sampled.items() if not settings.top_k):
            yield (
                f"role '{role}' has top_k 0 in a run that truncates: training renormalises over the kept tokens, "
                f"so limit their number, such as role_sampling.{role}.top_k=64"
            )
    learning = {*config.role_settings} - {*config.policies.frozen_roles, *config.learner.interventions.freeze}
    if config.phases:
        with contextlib.suppress(ValueError):  # of a name that is reported elsewhere
            learning = {role for phase in config.phases for role in _learning_from_samples(config, phase)}
    for role, settings in sampled.items() if config.steps else ():
        if settings.min_new_tokens and not settings.top_k and role in learning:
            yield (
                f"role '{role}' has min_new_tokens {settings.min_new_tokens} and top_k 0: only with top_k does "
                "training know that its first tokens were sampled without those that end a text; set top_k, such as "
                f"role_sampling.{role}.top_k=64, or leave min_new_tokens 0"
            )
    for role, settings in config.role_settings.items():
        if config.steps and role in learning and settings.temperature < COLDEST:
            yield (
                f"role '{role}' samples at temperature {settings.temperature:g}: nothing can be learned from the one "
                "answer it gives; raise the temperature, or freeze the role"
            )


def _learning_from_samples(config: RunFields, phase: phase_fields.Phase) -> set[str]:
    """The roles that a phase trains on what it samples."""
    if phase.source != "play":
        return set()
    trained = phase.trained_roles(config.policies.map, config.policies.frozen_roles)
    return trained - {*phase_fields.learner_of(config.learner, phase).interventions.freeze}


def _data(config: RunFields) -> Problems:
    data = config.data
    if is_own(data.name):
        yield from report("data.name", _data_function, data.name)
        yield from _ignored(config)
        return
    if data.name not in NAMES:
        known = f"; there is: {', '.join(NAMES)}; files are 'jsonl' with data.directory, or your own 'module:function'"
        yield f"data.name is '{data.name}', which is no data set{fields.nearest(data.name, NAMES, known)}"
        return
    procedural = data.name in KINDS
    if procedural and not (data.levels and set(data.levels) <= set(KINDS[data.name].LEVELS)):
        known = ",".join(map(str, KINDS[data.name].LEVELS))
        levels = ",".join(map(str, data.levels)) or "empty"
        yield f"data.levels is {levels}; '{data.name}' has the levels {known}: choose among them"
    family = data.name.removeprefix("micro_") if procedural else SOURCES[data.name].family
    if family not in (None, data.family):
        yield f"data.name '{data.name}' is {family}, but data.family is {data.family}: change one of them"
    if not procedural and data.directory is None and not SOURCES[data.name].urls:
        yield f"data.directory is none: '{data.name}' is read from files, give their directory"
    yield from _ignored(config)
    if data.val_size == 0 and config.evaluation.every:
        yield "data.val_size is 0, so there is nothing to evaluate on: set evaluation.every=0"
    if data.val_size and config.evaluation.every and config.evaluation.problems > data.val_size:
        yield f"evaluation.problems {config.evaluation.problems} is more than data.val_size {data.val_size}: lower it"


def _data_function(name: str) -> None:
    if not callable(loaded := load_own(name, "data set")):
        raise ValueError(
            f"'{name}' is a {type(loaded).__name__}: name a function that maps a split to a list of tasks"
        )


def unused_fields(name: str) -> tuple[str, ...]:
    """The fields of `data` that a data set of this name does not use."""
    if is_own(name):
        return (*OF_FILES, *DRAWN, "seed", "cache", "val_size")
    return OF_FILES if name in KINDS else DRAWN


def _ignored(config: RunFields) -> Problems:
    """Report fields of `data` that are set, but that this kind of data set does not use."""
    kinds = {**dict.fromkeys(OF_FILES, "data read from files"), **dict.fromkeys(DRAWN, "procedural data")}
    defaults = {field.name: field.default for field in dataclasses.fields(config.data)}
    for name in unused_fields(config.data.name):
        if (value := getattr(config.data, name)) != defaults[name]:
            kind = kinds.get(name, "built-in data sets")
            yield f"data.{name} is {value!r}; it is for {kind}, and '{config.data.name}' is not: leave it out"


def _learning(config: RunFields) -> Problems:
    if config.engine.sampler:
        yield from report("engine.sampler", own_function, config.engine.sampler, "sampler")
    if config.evaluation.metric:
        yield from report("evaluation.metric", load_metric, config.evaluation.metric)
    yield from report("rewards", make_credit, config.rewards)
    if config.checkpoints.best and not config.evaluation.every:
        yield "checkpoints.best needs evaluations: set evaluation.every above 0, or checkpoints.best=false"


def _hosts(config: RunFields) -> Problems:
    """Report settings with which several processes cannot share a run."""
    count = config.mesh.hosts
    if count == 1:
        return
    if config.road == "compiled":
        yield f"road is 'compiled' and mesh.hosts {count}: only the hosted road runs on several hosts, set road=hosted"
    if config.seeds > 1:
        yield f"seeds is {config.seeds} and mesh.hosts {count}: parallel seeds need one process, leave one field out"
    if config.engine.kind == "vllm":
        yield f"engine.kind is 'vllm' and mesh.hosts {count}: only one process can use a vLLM server, set mesh.hosts=1"
    if config.rewards.batch == "step":
        yield (
            f"rewards.batch is 'step' and mesh.hosts {count}: each process rewards only the problems that it "
            "played, so set rewards.batch=task"
        )


def _phases(config: RunFields) -> Problems:
    if error_of(trained_policies, config.policies.map, config.policies.frozen_roles):
        return  # `_policies` reports it
    yield from phase_fields.problems(config)


def _groups(config: RunFields) -> Problems:
    message = error_of(group_key, config.advantages.group, find(config.workflow.name).groups)
    yield from [f"advantages.group: {message}"] if message else _singletons(config)


def _singletons(config: RunFields) -> Problems:
    """Report one sample per problem, if nothing can be learned by comparing its calls."""
    kinds = {config.learner.loss.kind}
    if config.phases:  # those that learn from calls of this run
        here = [p for p in config.phases if p.source.partition(":")[0] in ("play", "collected")]
        with contextlib.suppress(ValueError):  # of settings that are reported elsewhere
            kinds = {phase_fields.learner_of(config.learner, phase).loss.kind for phase in here}
    if not config.steps or kinds <= {"sft", "kto"}:
        return  # nothing is learned from calls of this run, or the loss compares none
    if is_own(config.advantages.estimator):
        return  # it may compare what it likes
    by_group = config.advantages.estimator != "agent"
    if config.rollout.samples != 1 or (by_group and config.advantages.singleton == "reward"):
        return
    if find(config.workflow.name).may_fork:  # its branches may be compared
        return
    alternative = ", or advantages.singleton=reward" if by_group else ""
    if playable(config) and has_single_groups(config):
        yield (
            "rollout.samples is 1: groups of one have no baseline and teach nothing; set it to 2 or more"
            f"{alternative}"
        )
    elif config.rewards.name == "outcome" and "task" in compared_by(config):
        yield (
            "rollout.samples is 1, and all calls of an episode get its outcome: no reward differs within a group; "
            "set rollout.samples to 2 or more, or rewards.name to a reward that differs between calls"
        )
