"""Checks of a learner before a step changes a policy: unknown names, and rows that do not follow the map."""

from collections.abc import Mapping

import jax

from marl_jax.learning.learner_config import LearnerConfig
from marl_jax.policies import roles_of
from marl_jax.table import Table


def check_interventions(config: LearnerConfig, roles: Mapping[str, str]) -> None:
    """Refuse settings of roles or policies that the map does not have, and damping of several roles together."""
    known = {key.split("/")[0] for key in roles}
    for setting, names in config.interventions.named.items():
        if strangers := sorted({*names} - known):
            raise ValueError(
                f"interventions.{setting} names {strangers}, which are no roles; there are {sorted(known)}"
            )
    for policy in roles.values():
        acting = roles_of(roles, policy)
        if any(map(config.interventions.damps, acting)) and len(acting) > 1:
            raise ValueError(
                f"coherence damping is defined for isolated policies, and {policy!r} is shared: give every role "
                "that it acts on its own policy, or leave the role out of mixing.roles"
            )
    if strangers := sorted({*config.learning_rates} - {*roles.values()}):
        raise ValueError(
            f"learning_rates name {strangers}, no policies; there are {sorted({*roles.values()})}"
        )


def check_learnable(
    rows: Table, policies: Mapping[str, object], states: Mapping[str, object], roles: Mapping[str, str]
) -> None:
    """Refuse rows that do not follow the map, or lack a policy, a state or a column, and policies that share arrays."""
    codes = set(zip(rows.role.tolist(), rows.slot.tolist(), rows.policy.tolist()))
    present = [(rows.roles[role], slot, rows.policies[policy]) for role, slot, policy in codes]
    mapped = lambda role, slot, policy: roles.get(f"{role}/{slot}", roles.get(role)) == policy
    if strangers := [whose for whose in present if not mapped(*whose)]:
        raise ValueError(f"rows of (role, slot, policy) {sorted(strangers)} do not follow the map {roles}")
    if absent := sorted({*rows.present("policy")} - {*policies}):
        raise ValueError(
            f"rows are for the policies {absent}, which were not handed over; leave such rows out"
        )
    if absent := sorted({*policies} - {*states}):
        raise ValueError(f"policies {absent} have no state: take it from `init`")
    if unused := sorted({*policies} - {*roles.values()}):
        raise ValueError(f"policies {unused} have no role in the map {roles}; leave them out")
    owners: dict[int, str] = {}
    for name, tree in policies.items():
        for leaf in jax.tree.leaves(tree):
            if isinstance(leaf, jax.Array) and (other := owners.setdefault(id(leaf), name)) != name:
                raise ValueError(
                    f"policies {other!r} and {name!r} have the same arrays, whose memory the first update takes: give "
                    "each a copy, as jax.tree.map(jnp.copy, tree)"
                )
    rows.need(reward="rewards.with_rewards", advantage="learning.with_advantages")
