"""Contenders of an evaluation: the workflow, the policy of each role, and the contender it is compared with.

trained              every role by its own policy           compared with the same policies at their start
swapped              every role by the next one's policy    the same
generator_transfer   one role by a single agent's policy    the same, without the transfer
single_transfer      one role's policy, alone               compared with its own start, alone
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge, Le

from marl_jax import fields
from marl_jax.config.run_config import EngineConfig, RunConfig
from marl_jax.fields import Count, OptionalCount, nearest
from marl_jax.learning.by_role.interventions import InterventionConfig
from marl_jax.learning.estimators.worth import AdvantageConfig
from marl_jax.learning.learner_config import LARGEST_SEED
from marl_jax.policies import PolicySpec, decode_groups, policy_names, policy_of
from marl_jax.rewards.credit import CreditConfig
from marl_jax.rollouts.vllm.vllm_config import urls_of
from marl_jax.run_folder.folder import FolderError, digest_tokenizer
from marl_jax.runs.loading.parts import Parts, digests, load_parts
from marl_jax.runs.loading.stored import (
    check_unchanged,
    config_of,
    path_of,
    policies_at,
    read_which,
    whole_weights,
)
from marl_jax.workflows import single

MODES = ("trained", "base", "single_transfer", "generator_transfer", "swapped")
SPLITS = ("test", "val")


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The evaluation that the flags of the command describe."""

    # all, latest, best, base or a step. None: latest, but base for generator_transfer, so that the other roles play
    # with their initial weights.
    checkpoint: str | None = None
    split: str = "test"  # test or val
    data: str | None = None  # another data set; None: the run's
    data_directory: str | None = None  # directory of its files; None: downloaded from its publisher
    samples: Count = 1  # episodes of each problem
    problems: OptionalCount = None  # number of problems, from the first on; None: all
    mode: str = "trained"  # one of MODES
    role: str | None = None  # the role that plays alone, or is replaced; None: the generator
    # The folder of the run that a transferred policy comes from.
    generator_from: str | os.PathLike[str] | None = None
    generator_checkpoint: str | None = None  # checkpoint of that run; None: latest
    seed: Annotated[int | None, Ge(0), Le(LARGEST_SEED)] = None  # seed of the noise; None: the run's
    url: str | None = None  # new address of vLLM servers, like `engine.vllm.url`; None: the run's

    def __post_init__(self) -> None:
        """Refuse impossible values of flags."""
        for line in fields.out_of_bounds(self, "--"):
            raise FolderError(line)
        for name, known in (("mode", MODES), ("split", SPLITS)):
            if (text := getattr(self, name)) not in known:
                raise FolderError(f"--{name}={text} is unknown{nearest(text, known)}")
        if self.data_directory and not self.data:
            raise FolderError("--data_directory belongs to --data=NAME: give both or neither")
        if self.role is not None and self.mode not in ("single_transfer", "generator_transfer"):
            raise FolderError(f"--role={self.role} has no effect with --mode={self.mode}: leave it out")
        if self.generator_checkpoint and not self.generator_from:
            raise FolderError("--generator_checkpoint belongs to --generator_from=DIR: give both or neither")
        if bool(self.generator_from) != (self.mode == "generator_transfer"):
            raise FolderError(
                "--generator_from=DIR belongs to --mode=generator_transfer: give both or neither"
            )


@dataclasses.dataclass(frozen=True)
class Contender:
    """A configuration to play, and its description in records."""

    config: RunConfig
    mode: str
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A contender, the one that it is compared with, and the parts that play both."""

    contender: Contender
    base: Contender
    parts: Parts


def make_comparison(
    evaluation: Evaluation, config: RunConfig, parts: Parts, accept_changes: bool
) -> Comparison:
    """The comparison of the chosen mode."""
    learner = dataclasses.replace(config.learner, learning_rates={})  # a contender may lack some policies
    config = dataclasses.replace(config, steps=0, phases=(), learner=learner)  # nothing is trained
    match evaluation.mode:
        case "single_transfer":
            return _alone(config, parts, evaluation.role or "generator")
        case "generator_transfer":
            return _transferred(evaluation, config, parts, accept_changes)
    played = _swapped(config, parts) if evaluation.mode == "swapped" else config
    return Comparison(Contender(played, evaluation.mode), Contender(config, "base"), parts)


def _swapped(config: RunConfig, parts: Parts) -> RunConfig:
    """Every role is played by the policy of the next one, the last by that of the first."""
    names = policy_names(config.policies.map)
    if len(names) < 2:
        raise FolderError(
            f"--mode=swapped needs several policies; in this run '{names[0]}' answers for all roles"
        )
    first, *others = names
    for other in others:
        if difference := _difference(parts, first, parts, other):
            raise FolderError(
                f"--mode=swapped needs policies of one shape and tokenizer: '{other}' has another {difference} than "
                f"'{first}'"
            )
    next_policy = dict(zip(names, (*names[1:], names[0])))
    policy_map = {key: next_policy[policy] for key, policy in config.policies.map.items()}
    frozen = tuple(key for key, policy in policy_map.items() if parts.specs[policy].frozen)
    return dataclasses.replace(config, policies=_pruned(config, policy_map, frozen_roles=frozen))


def _alone(config: RunConfig, parts: Parts, role: str) -> Comparison:
    """The single-agent workflow, its generator played by the policy of a role."""
    policy = _policy(config, role)
    if "generator" not in parts.prompts.files:
        raise FolderError("--mode=single_transfer needs prompts for 'generator', which this run lacks")
    # It samples as the workflow's generator does, if there is one: an aggregator's limit may be a few tokens.
    sampling_role = "generator" if "generator" in config.roles else role.split("/")[0]
    settings = config.role_settings[sampling_role]
    limits, room = config.rollout.limits, config.engine.max_prompt + settings.max_new_tokens
    limits = dataclasses.replace(limits, context=min(limits.context or room, room))
    single_config = dataclasses.replace(
        config,
        workflow=dataclasses.replace(config.workflow, name=single.name, settings={}),
        policies=_pruned(config, {"generator": policy}, frozen_roles=()),
        engine=_engine_of(config, parts, policy),
        sampling=settings,
        role_sampling={},
        rollout=dataclasses.replace(config.rollout, limits=limits),
        # The rest is reset: it is for training, which does not happen, or names roles that are not here.
        rewards=CreditConfig(),
        advantages=dataclasses.replace(config.advantages, group=AdvantageConfig().group),
        learner=dataclasses.replace(config.learner, interventions=InterventionConfig()),
        evaluation=dataclasses.replace(config.evaluation, metric=None),
    )
    alone = Contender(single_config, "single_transfer", {"role": role})
    only = {policy: parts.specs[policy]}
    return Comparison(alone, alone, dataclasses.replace(parts, workflow=single, specs=only, metric=None))


def _transferred(evaluation: Evaluation, config: RunConfig, parts: Parts, accept_changes: bool) -> Comparison:
    """A role of the workflow played by the policy of a single agent, unchanged."""
    role = evaluation.role or "generator"
    _policy(config, role)
    if config.engine.kind == "vllm":
        raise FolderError(
            "--mode=generator_transfer plays a policy whose weights are in no folder, and a vLLM server reads folders: "
            "it is for runs with engine.kind=embedded"
        )
    path = path_of(evaluation.generator_from or "")
    their_config = dataclasses.replace(config_of(path), mesh=config.mesh)
    if len(their_config.roles) != 1:
        roles = ", ".join(their_config.roles)
        raise FolderError(
            f"the run in '{path}' has the roles {roles}: --generator_from must be the run of a single agent"
        )
    their_parts = load_parts(their_config)
    if not accept_changes:
        check_unchanged(path, digests(their_config, their_parts, {}))
    policy = policy_of(their_config.policies.map, their_config.roles[0])
    keys = [key for key in config.policies.map if role in (key, key.split("/")[0])]
    players = [config.policies.map[key] for key in keys]
    for player in players:
        if difference := _difference(parts, player, their_parts, policy):
            raise FolderError(
                f"the run in '{path}' has another {difference} than this run's '{player}': it cannot play here"
            )
    which = read_which(evaluation.generator_checkpoint or "latest", "--generator_checkpoint")
    stored = policies_at(path, their_config, their_parts, which)
    name = f"{path.name}@{stored.name}"
    specs = {**parts.specs, name: PolicySpec(base=name, frozen=True)}
    base = parts.specs[players[0]].base  # the base that it replaces
    weights = whole_weights(their_parts, policy, stored.trees[policy], parts.models[base].dtype)
    policy_map = {**config.policies.map, **dict.fromkeys(keys, name)}
    about = {"role": role, "generator_from": str(path), "generator_step": stored.step}
    return Comparison(
        Contender(dataclasses.replace(config, policies=_pruned(config, policy_map)), evaluation.mode, about),
        Contender(config, "base"),
        dataclasses.replace(
            parts,
            specs=specs,
            bases={**parts.bases, name: weights},
            models={**parts.models, name: parts.models[base]},
            tokenizers={**parts.tokenizers, name: parts.tokenizers[base]},
        ),
    )


# ---------------------------------------------------------------- maps


def _policy(config: RunConfig, role: str) -> str:
    """The policy that plays a role, or one slot of it."""
    name, _, slot = role.partition("/")
    if role not in config.policies.map and role not in config.roles:
        raise FolderError(f"--role is '{role}', which is no role of this run{nearest(role, config.roles)}")
    return policy_of(config.policies.map, name, int(slot or 0))


def _engine_of(config: RunConfig, parts: Parts, policy: str) -> EngineConfig:
    """The engine's settings, with the url of the vLLM server that serves this policy."""
    urls, groups = urls_of(config.engine.vllm), decode_groups(parts.specs)
    url = next((url for url, group in zip(urls, groups) if policy in group), "")
    return dataclasses.replace(config.engine, vllm=dataclasses.replace(config.engine.vllm, url=url))


def _difference(parts: Parts, policy: str, other_parts: Parts, other: str) -> str:
    """Why one policy cannot play in place of the other: shape or tokenizer; empty if it can."""
    base, other_base = parts.specs[policy].base, other_parts.specs[other].base
    model = parts.models[base]
    if dataclasses.replace(other_parts.models[other_base], dtype=model.dtype) != model:
        return "shape"
    return "" if digest_tokenizer(base) == digest_tokenizer(other_base) else "tokenizer"


def _pruned(config: RunConfig, policy_map: Mapping[str, str], **changes: Any) -> Any:
    """The same policies with another map; settings of policies that it does not name are removed."""
    named = lambda settings: {name: value for name, value in settings.items() if name in policy_map.values()}
    bases, trains = named(config.policies.bases), named(config.policies.trains)
    return dataclasses.replace(config.policies, map=dict(policy_map), bases=bases, trains=trains, **changes)
