"""What a configuration cannot be: combinations that its single fields do not show, as one line each.

Every check runs whatever the others found, so that a command line is put right in one go.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from marl_jax.learning.groups import group_key
from marl_jax.own import is_own, load_own
from marl_jax.policies import policy_names, role_settings, trained_policies, validate_map
from marl_jax.rewards.credit import make_credit
from marl_jax.runs import fields
from marl_jax.tasks import NAMES
from marl_jax.tasks.datasets import SOURCES
from marl_jax.workflows import find

if TYPE_CHECKING:
    from marl_jax.runs.config import RunConfig

Problems = Iterator[str]


def problems(config: "RunConfig") -> list[str]:
    """All that is wrong with it, with the way out."""
    checks = (_workflow, _policies, _sampling, _data, _learning, _ranges)
    return [problem for check in checks for problem in check(config)]


def _workflow(config: "RunConfig") -> Problems:
    chosen = config.workflow
    if refused := _refused(find, chosen.name):
        yield f"workflow.name: {refused}"
        return
    workflow = find(chosen.name)
    if config.data.family not in workflow.families:
        yield f"workflow '{chosen.name}' is for {', '.join(workflow.families)}, not for {config.data.family}"
    for name, value in chosen.settings.items():
        if name not in workflow.settings:
            near = fields.nearest(name, workflow.settings)
            yield f"workflow.settings.{name} is no setting of '{chosen.name}'{near}"
            continue
        default = workflow.settings[name]
        if isinstance(default, bool):
            fits, wanted = isinstance(value, bool), "true or false"
        else:  # all others are counts, and None leaves the choice to the workflow
            count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            fits, wanted = count or (value is None and default is None), "an integer from 1 on"
        if not fits:
            yield f"workflow.settings.{name} is {value!r}; it must be {wanted}"


def _policies(config: "RunConfig") -> Problems:
    policies = config.policies
    if not _refused(find, config.workflow.name):
        yield from _refusal("policies.map", validate_map, policies.map, config.roles)
        overrides = config.role_sampling
        yield from _refusal("role_sampling", role_settings, config.roles, config.sampling, overrides)
        yield from _interventions(config)
    if not _refused(trained_policies, policies.map, policies.frozen_roles):
        if policies.map and not trained_policies(policies.map, policies.frozen_roles):
            yield "policies.frozen_roles names every role: nothing is left to train"
    else:
        yield from _refusal("policies.frozen_roles", trained_policies, policies.map, policies.frozen_roles)
    if not policies.base:
        yield "policies.base is empty: give the directory of the model to start from"
    for name in sorted(set(policies.bases) - set(policies.map.values())):
        near = fields.nearest(name, policy_names(policies.map))
        yield f"policies.bases names '{name}', which is no policy of the map{near}"
    if policies.lora_rank < 1 or policies.lora_alpha <= 0:
        yield f"lora_rank {policies.lora_rank} must be at least 1 and lora_alpha {policies.lora_alpha} positive"


def _interventions(config: "RunConfig") -> Problems:
    chosen = config.learner.interventions
    for name in ("kl_coef", "role_clip", "freeze", "alternate"):
        for role in getattr(chosen, name):
            if role not in config.roles:
                near = fields.nearest(role, config.roles)
                yield f"learner.interventions.{name} names '{role}', which is no role of the workflow{near}"
    holders = [
        {key.split("/")[0] for key, p in config.policies.map.items() if p == name}
        for name in policy_names(config.policies.map)
    ]
    if chosen.mixing.damping and any(len(roles) > 1 for roles in holders):
        yield (
            "learner.interventions.mixing.damping is defined for isolated policies: give every role its own "
            "policy, or set it to 0"
        )


def _sampling(config: "RunConfig") -> Problems:
    if _refused(find, config.workflow.name):
        return
    if _refused(role_settings, config.roles, config.sampling, config.role_sampling):
        return
    longest = max(settings.max_new_tokens for settings in config.role_settings.values())
    room, context = config.engine.max_prompt + longest, config.rollout.limits.context
    if context is not None and context > room:
        yield f"rollout.limits.context {context} is more than engine.max_prompt + max_new_tokens = {room}"
    if room > config.learner.batch.buckets[-1]:
        yield (
            f"a call may have engine.max_prompt + max_new_tokens = {room} tokens, the longest of "
            f"learner.batch.buckets is {config.learner.batch.buckets[-1]}: add a longer bucket"
        )
    sampled = {role: own for role, own in config.role_settings.items() if own.temperature > 0}
    if any(own.top_p < 1 or own.top_k for own in sampled.values()):
        for role in (role for role, own in sampled.items() if not own.top_k):
            yield (
                f"role '{role}' has top_k 0 in a run that truncates: training renormalises over what was kept, "
                f"so give the most tokens to keep, such as role_sampling.{role}.top_k=64"
            )
    frozen = {*config.policies.frozen_roles, *config.learner.interventions.freeze}
    for role, settings in config.role_settings.items():
        if role not in frozen and settings.temperature != config.learner.temperature:
            yield (
                f"role '{role}' samples at temperature {settings.temperature:g}, the learner's is "
                f"{config.learner.temperature:g}: set sampling.temperature and learner.temperature alike "
                "(above 0), or freeze the role"
            )


def _data(config: "RunConfig") -> Problems:
    data = config.data
    if is_own(data.name):
        yield from _refusal("data.name", load_own, data.name, "data set")
        return
    if data.name not in NAMES:
        yield f"data.name is '{data.name}', which is no data set{fields.nearest(data.name, NAMES)}"
        return
    procedural = data.name not in SOURCES
    family = data.name.removeprefix("micro_") if procedural else SOURCES[data.name].family
    if family not in (None, data.family):
        yield f"data.name '{data.name}' is {family}, data.family is {data.family}: choose one of a kind"
    if not procedural:
        if data.directory is None and not SOURCES[data.name].urls:
            yield f"data.directory is none: '{data.name}' is read from files, give their directory"
        for name in ("train_size", "test_size"):
            if getattr(data, name) is not None:
                yield f"data.{name} is for procedural data; '{data.name}' has the size of its files"
    elif data.directory is not None:
        yield f"data.directory is '{data.directory}', but '{data.name}' is drawn, not read: set it to none"
    if data.val_size == 0 and config.evaluation.every:
        yield "data.val_size is 0, so there is nothing to evaluate on: set evaluation.every=0"
    if data.val_size and config.evaluation.every and config.evaluation.problems > data.val_size:
        yield f"evaluation.problems {config.evaluation.problems} is more than data.val_size {data.val_size}"


def _learning(config: "RunConfig") -> Problems:
    if not _refused(find, config.workflow.name):
        family_key = config.workflow.name
        yield from _refusal("advantages.group", group_key, config.advantages.group, family_key)
    if config.rollout.samples == 1 and config.advantages.singleton == "zero":
        yield (
            "rollout.samples is 1: groups of one have no baseline and teach nothing; set it to 2 or more, or "
            "advantages.singleton=reward"
        )
    yield from _refusal("rewards", make_credit, config.rewards)
    if config.rewards.name == "voting_rubric" and config.workflow.name != "voting":
        yield f"rewards.name 'voting_rubric' is defined for voting, not for '{config.workflow.name}': use outcome"
    if config.checkpoints.best and not config.evaluation.every:
        yield "checkpoints.best needs evaluations: set evaluation.every above 0, or checkpoints.best=false"


def _ranges(config: "RunConfig") -> Problems:
    least = {
        **{
            "steps": 0,
            "seed": 0,
            "data.problems": 1,
            "data.seed": 0,
            "data.val_size": 0,
            "data.train_size": 1,
        },
        **{"data.test_size": 1, "rollout.samples": 1, "rollout.tool_delay": 1, "rollout.tool_threads": 1},
        **{
            "rollout.ahead": 1,
            "rollout.draws": 1,
            "mesh.data": 1,
            "mesh.model": 1,
            "engine.max_prompt": 1,
            "engine.lanes": 1,
            "engine.budget_bytes": 1,
        },
        **{"engine.steps": 1, "evaluation.every": 0, "evaluation.problems": 1, "evaluation.samples": 1},
        **{"checkpoints.every": 1, "checkpoints.latest": 1, "checkpoints.keep_every": 1},
        **{"logging.episodes_every": 0, "logging.episodes_problems": 1},
    }
    for name, bound in least.items():
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        if value is not None and value < bound:
            yield f"{name} is {value}; it must be at least {bound}"
    if not config.data.levels:
        yield "data.levels is empty; it must name at least one level"


def _refusal(where: str, check: Callable[..., Any], *args: Any) -> Problems:
    if message := _refused(check, *args):
        yield f"{where}: {message}"


def _refused(check: Callable[..., Any], *args: Any) -> str | None:
    try:
        check(*args)
    except (ValueError, TypeError) as error:
        return str(error)
    return None
