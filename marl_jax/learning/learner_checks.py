"""Checks of a learner before a step changes a policy: unknown names, and rows that contradict the role map."""

from collections.abc import Mapping

import jax

from marl_jax.learning.learner_config import LearnerConfig
from marl_jax.policies import roles_of
from marl_jax.table import Table


def check_interventions(config: LearnerConfig, roles: Mapping[str, str]) -> None:
    """Refuse settings for roles or policies that are not in the map, and damping of a policy with several roles."""
    known = {key.split("/")[0] for key in roles}
    for setting, names in config.interventions.named.items():
        if unknown := sorted({*names} - known):
            raise ValueError(
                f"interventions.{setting} names {unknown}, which are no roles; there are {sorted(known)}"
            )
    for policy in roles.values():
        policy_roles = roles_of(roles, policy)
        if any(map(config.interventions.damps, policy_roles)) and len(policy_roles) > 1:
            raise ValueError(
                f"coherence damping is defined for isolated policies, and {policy!r} is shared: give every role "
                "that it acts on its own policy, or leave the role out of mixing.roles"
            )
    if unknown := sorted({*config.learning_rates} - {*roles.values()}):
        raise ValueError(f"learning_rates {unknown} name no policies; there are {sorted({*roles.values()})}")


def check_not_donated(**trees: Mapping[str, object] | None) -> None:
    """Refuse trees that an earlier step has donated; XLA's error would not say which they are."""
    for argument, by_policy in trees.items():
        for name, tree in (by_policy or {}).items():
            if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(tree)):
                raise ValueError(
                    f"{argument}[{name!r}] has arrays that an earlier step donated: pass those that it returned, or a "
                    "copy from before the step, as jax.tree.map(jnp.copy, tree)"
                )


def check_learnable(
    rows: Table, policies: Mapping[str, object], states: Mapping[str, object], roles: Mapping[str, str]
) -> None:
    """Refuse rows that contradict the map or lack a policy, a state or a column, and policies that share arrays."""
    follows_map = lambda role, slot, policy: roles.get(f"{role}/{slot}", roles.get(role)) == policy
    if wrong := [caller for caller in {*rows.callers} if not follows_map(*caller)]:
        raise ValueError(f"rows of (role, slot, policy) {sorted(wrong)} do not follow the map {roles}")
    if missing := sorted({*rows.present("policy")} - {*policies}):
        raise ValueError(f"rows are for the policies {missing}, which were not passed; leave these rows out")
    if missing := sorted({*policies} - {*states}):
        raise ValueError(f"policies {missing} have no state: take it from `init`")
    if unused := sorted({*policies} - {*roles.values()}):
        raise ValueError(f"policies {unused} have no role in the map {roles}; leave them out")
    owners: dict[int, str] = {}
    for name, tree in policies.items():
        for leaf in jax.tree.leaves(tree):
            if isinstance(leaf, jax.Array) and (other := owners.setdefault(id(leaf), name)) != name:
                raise ValueError(
                    f"policies {other!r} and {name!r} share arrays, which the first update donates: give each a copy, "
                    "as jax.tree.map(jnp.copy, tree)"
                )
    rows.need(reward="rewards.with_rewards", advantage="learning.with_advantages")
