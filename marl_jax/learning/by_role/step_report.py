"""The report of a learner's step: plain numbers on the host, computed from the device's outputs."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from marl_jax.learning.by_role import gradients
from marl_jax.learning.by_role.role_statistics import Evidence, role_statistics, row_statistics
from marl_jax.learning.losses import Loss, LossConfig, Mean
from marl_jax.table import Table

Unit = Any  # a role, or (role, slot)


@dataclasses.dataclass(frozen=True)
class Report:
    """The report of one step."""

    policies: dict[str, dict[str, float]]  # {policy: {metric: value}}
    roles: dict[str, dict[str, float]]  # {role: {metric: value}}
    gradients: dict[str, dict[str, Any]]  # {policy: see `gradient_report`}
    cosines: dict[tuple[str, str], float | None]  # of two roles; None: separate weights, or no gradient
    warnings: tuple[str, ...]  # sentences, for example about a gradient that was not finite
    # For each row, the log-probs of its tokens before the step; None where unknown.
    trainer_logp: Sequence[Any] = ()

    def flat(self) -> dict[str, Any]:
        """{"policy/p0/grad_norm": ..., "role/judge/entropy": ..., "cosine/a/b": ...}; None where there is no number."""
        kinds = {
            "policy": self.policies,
            "role": self.roles,
            "gradient": self.gradients,
            "cosine": self.cosines,
        }
        return _flatten(kinds)


def policy_report(
    updates: Sequence[tuple[Sequence[Loss], Mapping[str, Any]]], rate: float
) -> dict[str, float]:
    """Loss and metrics over all micro-batches, mean norms over updates; only finite updates count, if there are any.

    An update is (the losses of its micro-batches, the outputs of its optimiser step).
    """
    used = [update for update in updates if update[1]["finite"]] or updates
    losses, outputs = [loss for batch, _ in used for loss in batch], [applied for _, applied in used]
    report = {"learning_rate": rate, "loss": _mean(losses)}
    report |= {name: _mean([loss.metrics[name] for loss in losses]) for name in losses[0].metrics}
    for name in ("grad_norm", "update_norm", "clip_factor", "damping_cosine"):
        if name in outputs[0]:
            report[name] = float(np.mean([applied[name] for applied in outputs]))
    return report


def gradient_report(
    updates: Sequence[Mapping[str, Any]], units: Sequence[Unit], unit_roles: Sequence[str]
) -> dict[str, Any]:
    """`gradients.describe` of the roles, and of each role's slots if they are units, from the mean Gram matrix."""
    updates = [d for d in updates if d["finite"]]
    if not updates:
        return {}
    gram = np.mean([np.asarray(d["gram"], np.float64) for d in updates], axis=0)
    roles = list(dict.fromkeys(unit_roles))
    member = gradients.role_matrix(unit_roles, roles)
    described = gradients.describe(member @ gram @ member.T, roles)
    if list(units) != roles:
        described["slots"] = {
            role: gradients.describe(gram[np.ix_(slots, slots)], [str(units[k][1]) for k in slots])
            for role, slots in zip(roles, (np.flatnonzero(row).tolist() for row in member))
        }
    names = [_name(unit) for unit in units]
    weights = np.mean([d["weight"] for d in updates], axis=0).tolist()
    has_gradient = np.diag(gram) > 0  # a part without a gradient has no weight in the sum
    described["weight"] = {name: weights[k] if has_gradient[k] else None for k, name in enumerate(names)}
    if "layers" in updates[0]:  # like the norms above, roots of mean squares
        layers = {layer: [d["layers"][layer] for d in updates] for layer in updates[0]["layers"]}
        means = {layer: np.sqrt(np.mean(np.square(norms), axis=0)) for layer, norms in layers.items()}
        described["layers"] = {
            name: {layer: float(norms[k]) for layer, norms in means.items()} for k, name in enumerate(names)
        }
    return described


def role_reports(
    rows: Table, evidence: Evidence, loss: LossConfig, corrected: bool
) -> dict[str, dict[str, float]]:
    """Statistics of each role over all its policies: about its rows, and about its trained tokens."""
    reports: dict[str, dict[str, float]] = {}
    for role in rows.present():
        indices = np.flatnonzero(rows.having(role=role))
        trained = [i for i in indices.tolist() if evidence.logp[i] is not None]
        reports[role] = role_statistics(rows, trained, evidence, loss, corrected) if trained else {}
        reports[role] |= row_statistics(rows.take(indices))
        reports[role]["trained_rows"] = float(len(trained))
    return reports


def warnings_of(
    roles: Mapping[str, Mapping[str, float]],  # the statistics of each role
    policies: Mapping[str, Mapping[str, float]],  # the report of each policy
    skips: Mapping[str, int],  # by policy, the gradients that were left out
    tolerance: float,  # of the difference of sampler and trainer log-probs
) -> Iterator[str]:
    """One line for every large difference, and for every gradient or loss that is not finite."""
    for role, stats in roles.items():
        if not stats.get("gap_max", 0.0) <= tolerance:
            gap = f"up to {stats['gap_max']:.2g} apart (tolerance {tolerance:g})"
            yield f"role {role!r}: sampler and trainer log-probs are {gap}"
    for policy, count in skips.items():
        if count:
            times = f" {count} times" if count > 1 else ""
            yield f"policy {policy!r}: its gradient was not finite{times}, and was left out"
    for policy, report in policies.items():  # a user's own loss may be infinite
        if not (skips[policy] or math.isfinite(report.get("loss", 0.0))):
            yield f"policy {policy!r}: its loss is {report['loss']}, though its gradient is finite"


def _mean(parts: Sequence[Loss | Mean]) -> float:
    numerator = sum(float(x.numerator) for x in parts)
    return numerator / max(sum(float(x.denominator) for x in parts), 1e-30)


def _name(unit: Unit) -> str:
    return unit if isinstance(unit, str) else "/".join(map(str, unit))


def _flatten(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = prefix + _name(key)
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{name}/")
        else:
            flat[name] = None if isinstance(value, float) and not math.isfinite(value) else value
    return flat
