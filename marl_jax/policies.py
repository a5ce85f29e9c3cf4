"""Policies: role -> policy maps, where each policy starts, and how each role samples.

A policy is a name, and roles map to names: in {"generator": "p0", "evaluator": "p0"} the roles share one policy, with
two names they are isolated. A key "generator/1" gives slot 1 of the generator its own policy.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from annotated_types import Gt, Le, MinLen

from marl_jax import fields
from marl_jax.fields import Count, NotNegative, Whole, nearest
from marl_jax.models.weight_table import Tree

PolicyMap = Mapping[str, str]


# ---------------------------------------------------------------- maps


def shared(roles: Iterable[str]) -> dict[str, str]:
    """All roles on one policy."""
    return dict.fromkeys(_distinct(roles), "p0")


def isolated(roles: Iterable[str]) -> dict[str, str]:
    """Each role on a policy of its own."""
    return {role: f"p{i}" for i, role in enumerate(_distinct(roles))}


def validate_map(policy_map: PolicyMap, roles: Iterable[str]) -> None:
    """Refuse a map that names a role the workflow lacks, or lacks a role the workflow has."""
    if not isinstance(policy_map, Mapping):
        raise ValueError(
            f"policy map is {policy_map!r:.80}; it must be a mapping from roles to names, as isolated(roles) is"
        )
    roles = _distinct(roles)
    for key, policy in policy_map.items():
        if role_of_key(key, roles) is None:
            raise ValueError(
                f"policy map names '{key}', which is no role of the workflow{nearest(str(key), roles)}"
            )
        if not isinstance(policy, str) or not policy:
            raise ValueError(f"policy map gives '{key}' the policy {policy!r}; a policy is a non-empty name")
    covered = {role_of_key(key, roles) for key in policy_map}
    for role in roles:
        if role not in covered:
            raise ValueError(
                f"policy map lacks the role '{role}': add '{role}', or '{role}/0', '{role}/1'..."
            )


def policy_of(policy_map: PolicyMap, role: str, slot: int = 0) -> str:
    """The policy that answers a call: that of the key "role/slot" if the map has it, else that of the role."""
    policy = policy_map.get(f"{role}/{slot}", policy_map.get(role))
    if policy is None:
        raise ValueError(f"policy map has neither '{role}/{slot}' nor '{role}': add one of them")
    return policy


def roles_of(policy_map: PolicyMap, policy: str) -> list[str]:
    """The roles that a policy answers for, in all or some slots, in the map's order."""
    return list(dict.fromkeys(key.split("/")[0] for key, name in policy_map.items() if name == policy))


def policy_names(policy_map: PolicyMap) -> tuple[str, ...]:
    """The distinct policies, in order of first mention."""
    return tuple(dict.fromkeys(policy_map.values()))


def trained_policies(policy_map: PolicyMap, frozen_roles: Iterable[str] = ()) -> tuple[str, ...]:
    """The policies that learn: those with a role that is not frozen. `frozen_roles` lists roles, or slots "role/slot".

    If only some slots of a role are frozen, its policy learns from the others.
    """
    roles = {key.rsplit("/", 1)[0] if key.rpartition("/")[2].isdecimal() else key for key in policy_map}
    frozen = set(frozen_roles)
    if unknown := [name for name in sorted(frozen - roles) if role_of_key(name, policy_map) is None]:
        raise ValueError(f"frozen role '{unknown[0]}' is not in the policy map{nearest(unknown[0], roles)}")
    free = {key: policy for key, policy in policy_map.items() if role_of_key(key, frozen) is None}
    return policy_names(free)


def per_name(given: Any | Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """{name: its value}; a value that is not a mapping applies to all names."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, given)
    if missing := [name for name in names if name not in given]:
        raise ValueError(f"no value is given for '{missing[0]}', only for: {', '.join(given)}")
    return {name: given[name] for name in names}


# ---------------------------------------------------------------- trees


@dataclasses.dataclass(frozen=True)
class PolicySpec:
    """Where a policy starts and which of its weights are trained."""

    base: str = "base"  # name of the checkpoint that it starts from, which is also its reference
    lora: bool = False  # train adapters over the frozen base instead of the weights
    frozen: bool = False  # sample from it, but do not train it

    def __post_init__(self) -> None:
        if self.lora and self.frozen:
            raise ValueError(
                "a frozen policy is its base, without adapters to train: merge trained adapters into a base first"
            )


def init_policies(
    specs: Mapping[str, PolicySpec],
    bases: Mapping[str, Tree],
    adapters: Callable[[str], Tree] | None = None,
) -> dict[str, Tree]:
    """The initial parameters of every policy: {policy: tree}, in float32 if they are trained.

    A fully trained policy is a copy of its base, because updates donate their buffers and the base stays as the
    reference. A LoRA policy is `adapters(policy)`. A frozen policy is the base itself.
    """
    trees = {}
    for name, spec in specs.items():
        if spec.base not in bases:
            known = nearest(spec.base, bases)
            raise ValueError(
                f"policy '{name}' starts from '{spec.base}', which is not among the loaded bases{known}"
            )
        if spec.lora and adapters is None:
            raise ValueError(f"policy '{name}' trains LoRA adapters: pass `adapters` to make them")
        if spec.frozen:
            trees[name] = bases[spec.base]
        else:
            start = adapters(name) if spec.lora else bases[spec.base]  # type: ignore[misc]
            trees[name] = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), start)
    return trees


def decode_groups(specs: Mapping[str, PolicySpec]) -> list[tuple[str, ...]]:
    """Which policies decode in one batch: LoRA and frozen ones by base; each fully trained one is alone in its batch.

    A frozen policy is its base with the adapter off, so it decodes with the LoRA policies of that base.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, spec in specs.items():
        own_group = "" if spec.lora or spec.frozen else name
        groups.setdefault((spec.base, own_group), []).append(name)
    return [tuple(names) for names in groups.values()]


def is_frozen(role: str, slot: int, frozen_roles: Iterable[str]) -> bool:
    """Whether a call must not train its policy: `frozen_roles` lists roles, or single slots as "role/slot"."""
    return not {role, f"{role}/{slot}"}.isdisjoint(frozen_roles)


def stack(trees: Mapping[str, Tree]) -> Tree:
    """{policy: tree} -> one tree whose leaves have a leading policy axis, in the mapping's order."""
    if not trees:
        raise ValueError("there is no policy to stack")
    (first, head), *rest = trees.items()
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), head)
    for name, tree in rest:
        if jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) != shapes:
            raise ValueError(
                f"policies '{first}' and '{name}' differ in shape (another LoRA rank?): stack them separately"
            )
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees.values())


# ---------------------------------------------------------------- sampling


@dataclasses.dataclass(frozen=True)
class SamplingSettings:
    """How a role samples. top_p 1 and top_k 0 are off; temperature 0 is greedy."""

    max_new_tokens: Count = 256  # longest completion
    min_new_tokens: Whole = 0  # no stop token is sampled, and no stop string completed, before this many
    temperature: NotNegative = 1.0  # 0 is greedy
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0  # nucleus; 1 is off
    top_k: Whole = 0  # 0 is off
    stop_tokens: tuple[Whole, ...] = ()  # in addition to the end-of-turn tokens of the template and the model
    stop_strings: tuple[Annotated[str, MinLen(1)], ...] = ()  # texts that end a completion

    def __post_init__(self) -> None:
        fields.check(self)
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens}; it must be at most max_new_tokens ({self.max_new_tokens})"
            )


def role_settings(
    roles: Iterable[str],
    default: SamplingSettings | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, SamplingSettings]:
    """{role: settings}: the default with the fields of each role's overrides replaced."""
    roles = _distinct(roles)
    known = [field.name for field in dataclasses.fields(SamplingSettings)]
    for role, override in (overrides or {}).items():
        if role not in roles:
            raise ValueError(
                f"sampling settings name '{role}', which is no role of the workflow{nearest(role, roles)}"
            )
        for name in override:
            if name not in known:
                raise ValueError(
                    f"sampling settings of '{role}' have no field '{name}'{nearest(name, known)}"
                )
    default = default or SamplingSettings()
    return {role: dataclasses.replace(default, **(overrides or {}).get(role, {})) for role in roles}


# ---------------------------------------------------------------- helpers


def _distinct(roles: Iterable[str]) -> tuple[str, ...]:
    unordered = isinstance(roles, str | set | frozenset)  # policies are numbered by the order of their roles
    names = () if unordered else tuple(roles)
    is_name = lambda name: isinstance(name, str) and name and "/" not in name
    if not names or len(set(names)) < len(names) or not all(map(is_name, names)):
        raise ValueError(
            f"roles are {roles!r}; they must be a non-empty sequence of distinct names without '/'"
        )
    return names


def role_of_key(key: Any, roles: Iterable[str]) -> str | None:
    """The role that a key of a map names: the key itself, or its part before "/slot"; None if it names no role."""
    if not isinstance(key, str):
        return None
    if key in roles:
        return key
    role, _, slot = key.rpartition("/")
    return role if slot.isdecimal() and str(int(slot)) == slot and role in roles else None
