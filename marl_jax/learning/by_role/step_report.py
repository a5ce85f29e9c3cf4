"""The report of a learner's step: plain numbers on the host, made from outputs of the device."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
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
    gradients: dict[str, dict[str, Any]]  # by policy, see `gradients.describe`
    cosines: dict[tuple[str, str], float | None]  # of roles; None between separate weights
    warnings: tuple[str, ...]  # sentences, such as a gradient that was not finite
    trainer_logp: Sequence[
        Any
    ] = ()  # row by row, the log-probs of its tokens before the step; None where not known

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
    """Loss and metrics over the micro-batches, norms as means over the updates; over finite updates, if there are any.

    An update is the losses of its micro-batches and the outputs of the optimiser.
    """
    counted = [update for update in updates if update[1]["finite"]] or updates
    losses, done = [loss for batch, _ in counted for loss in batch], [applied for _, applied in counted]
    report = {"learning_rate": rate, "loss": _mean(losses)}
    report |= {name: _mean([loss.metrics[name] for loss in losses]) for name in losses[0].metrics}
    for name in ("grad_norm", "update_norm", "clip_factor", "damping_cosine"):
        if name in done[0]:
            report[name] = float(np.mean([applied[name] for applied in done]))
    return report


def gradient_report(
    done: Sequence[Mapping[str, Any]], units: Sequence[Unit], unit_roles: Sequence[str]
) -> dict[str, Any]:
    """`gradients.describe` of the roles, from the mean Gram matrix over updates; of each role's slots, if apart."""
    done = [d for d in done if d["finite"]]
    if not done:
        return {}
    gram = np.mean([np.asarray(d["gram"], np.float64) for d in done], axis=0)
    roles = list(dict.fromkeys(unit_roles))
    member = gradients.role_matrix(unit_roles, roles)
    described = gradients.describe(member @ gram @ member.T, roles)
    if list(units) != roles:
        own = {role: [k for k, of in enumerate(unit_roles) if of == role] for role in roles}
        described["slots"] = {
            role: gradients.describe(gram[np.ix_(k, k)], [str(units[i][1]) for i in k])
            for role, k in own.items()
        }
    names = [_name(unit) for unit in units]
    weights = np.mean([d["weight"] for d in done], axis=0).tolist()
    there = np.diag(gram) > 0  # a part without a gradient has no weight in the sum
    described["weight"] = {name: weights[k] if there[k] else None for k, name in enumerate(names)}
    if "layers" in done[0]:  # like the norms above, roots of mean squares
        layers = {layer: [d["layers"][layer] for d in done] for layer in done[0]["layers"]}
        means = {layer: np.sqrt(np.mean(np.square(norms), axis=0)) for layer, norms in layers.items()}
        described["layers"] = {
            name: {layer: float(norms[k]) for layer, norms in means.items()} for k, name in enumerate(names)
        }
    return described


def role_reports(
    rows: Table, evidence: Evidence, loss: LossConfig, corrected: bool
) -> dict[str, dict[str, float]]:
    """Statistics of every role over all its policies: of its rows, and of its trained tokens."""
    reports: dict[str, dict[str, float]] = {}
    for role in rows.present():
        of_role = np.flatnonzero(rows.having(role=role))
        mine = [i for i in of_role.tolist() if evidence.logp[i] is not None]
        reports[role] = role_statistics(rows, mine, evidence, loss, corrected) if mine else {}
        reports[role] |= row_statistics(rows.take(of_role))
        reports[role]["trained_rows"] = float(len(mine))
    return reports


def gap_warnings(roles: Mapping[str, Mapping[str, float]], tolerance: float) -> tuple[str, ...]:
    """One line for every role whose sampler and trainer disagree by more than float error."""
    return tuple(
        f"role {role!r}: sampler and trainer log-probs are up to {stats['gap_max']:.2g} apart "
        f"(tolerance {tolerance:g})"
        for role, stats in roles.items()
        if not stats.get("gap_max", 0.0) <= tolerance
    )


def loss_warnings(reports: Mapping[str, Mapping[str, float]], lost: Mapping[str, int]) -> tuple[str, ...]:
    """One line for every policy that was moved by a loss that is no number, as one of the user's own may be."""
    return tuple(
        f"policy {policy!r}: its loss is {report['loss']}, though its gradient is finite"
        for policy, report in reports.items()
        if not (lost[policy] or math.isfinite(report.get("loss", 0.0)))
    )


def skip_warnings(lost: Mapping[str, int]) -> tuple[str, ...]:
    """One line for every policy whose gradient was not finite."""
    return tuple(
        f"policy {policy!r}: its gradient was not finite{f' {count} times' if count > 1 else ''}, and was left out"
        for policy, count in lost.items()
        if count
    )


def _mean(parts: Sequence[Loss | Mean]) -> float:
    numerator, denominator = (
        sum(float(getattr(x, part)) for x in parts) for part in ("numerator", "denominator")
    )
    return numerator / max(denominator, 1e-30)


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
