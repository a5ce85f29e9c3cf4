"""Phases: settings that a run uses in turn, each for some steps; after the last one the list starts again.

    phases = (Phase(20, roles=("coder",)), Phase(10, roles=("planner",)))     step ──phase_at──► phase, its beginning

A run without phases is one phase, in which all policies that are not frozen train.
"""

import bisect
import dataclasses
import itertools
import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from marl_jax import fields
from marl_jax.fields import Count
from marl_jax.learning.learner_config import LearnerConfig
from marl_jax.learning.losses import OBJECTIVES
from marl_jax.learning.objectives import NEED_REFERENCE
from marl_jax.policies import is_frozen, policy_names, role_of_key, trained_policies

if TYPE_CHECKING:
    from marl_jax.config.run_fields import RunFields

# Settings of the learner that decide the form of its state, or how gradients are separated. They are fixed for a run.
KEPT = ("optimiser.kind", "optimiser.b1", "interventions.mixing", "batch", "gradients", "layer_norms", "seed")
RATE = "optimiser.schedule.learning_rate"
ROLE, POLICY = "role of the workflow", "policy of policies.map"  # kinds of names, for error messages


@dataclasses.dataclass(frozen=True)
class Phase:
    """How long it lasts, what trains, by which objective, on which calls, from which start, with which reference."""

    steps: Count
    name: str = ""
    roles: tuple[str, ...] = ()  # roles that train, as "role" or "role/slot"; none: all that are not frozen
    policies: tuple[str, ...] = ()  # policies that train; none: all
    objective: str | None = None  # replaces learner.loss.kind
    learner: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # other learner settings, by path
    source: str = "play"  # play; collected, or collected:NAME of a phase; else a file or folder of episodes
    flatten: str = ""  # with calls from a source: each episode of it becomes one sequence of this role
    collect: bool = False  # keep all calls of its steps in the run's folder
    start: str = "last"  # initial weights of what it trains: last, base, or RUN@STEP, a checkpoint of a run
    # policy -> the policy whose weights it starts with
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    optimiser: Literal["keep", "fresh"] = "keep"  # fresh: moments and schedule start again
    reference: str = "base"  # for KL and pair objectives: base, start (of the phase), or RUN@STEP

    def __post_init__(self) -> None:
        fields.check(self)
        for name, words in (("start", ("last", "base")), ("reference", ("base", "start"))):
            value = getattr(self, name)
            if value not in words and "@" not in value:
                raise ValueError(f"{name} is {value!r}; it must be {' or '.join(words)}, or RUN@STEP")
        if self.name.isdecimal():
            raise ValueError(f"name is {self.name!r}; phases without a name have numbers, so use a word")
        if self.flatten and self.source == "play":
            raise ValueError("flatten is for calls from a source: set source, or leave flatten out")
        if self.collect and self.source != "play":
            raise ValueError(f"collect needs source=play, and source is {self.source!r}: leave collect out")

    def trains(self, role: str, slot: int, policy: str) -> bool:
        """Whether a call of this role, slot and policy may train."""
        trains = not self.roles or is_frozen(role, slot, self.roles)
        return trains and (not self.policies or policy in self.policies)

    def trained_policies(self, policy_map: Mapping[str, str], frozen_roles: Sequence[str]) -> tuple[str, ...]:
        """The policies that it trains."""
        free = set(trained_policies(policy_map, frozen_roles))
        return tuple(dict.fromkeys(p for _, _, p in self._training(policy_map, frozen_roles) if p in free))

    def trained_roles(self, policy_map: Mapping[str, str], frozen_roles: Sequence[str]) -> set[str]:
        """The roles that it trains, in some of their slots."""
        return {role for role, _, _ in self._training(policy_map, frozen_roles)}

    def _training(
        self, policy_map: Mapping[str, str], frozen_roles: Sequence[str]
    ) -> Iterator[tuple[str, int, str]]:
        """(role, slot, policy) of the map's entries that train; for a role's entry, also of its slots in `roles`."""
        for key, policy in policy_map.items():
            role, slash, slot = key.rpartition("/")
            role = role if slash else key
            if slash and not slot.isdecimal():  # `policies.validate_map` refuses the key
                continue
            slots = [n for n in self.roles if n.startswith(f"{role}/") and n not in policy_map]
            for number in [int(slot)] if slash else [-1, *(int(n.rpartition("/")[2]) for n in slots)]:
                if not is_frozen(role, number, frozen_roles) and self.trains(role, number, policy):
                    yield role, number, policy


@dataclasses.dataclass(frozen=True)
class PhasePosition:
    """The position of a step in the phases."""

    number: int  # number of phases before it, counted over all rounds through the list
    phase: Phase
    first: int  # the step count at which it began: its steps are first + 1 to first + phase.steps


def phase_at(phases: Sequence[Phase], step: int) -> PhasePosition:
    """The phase of the next step, after `step` steps."""
    length = sum(phase.steps for phase in phases)
    rounds, step_in_round = divmod(step, length)
    ends = list(itertools.accumulate(phase.steps for phase in phases))
    index = bisect.bisect_right(ends, step_in_round)
    return PhasePosition(
        rounds * len(phases) + index, phases[index], rounds * length + ends[index] - phases[index].steps
    )


def learner_of(config: LearnerConfig, phase: Phase) -> LearnerConfig:
    """The learner's settings in a phase; a ValueError if they cannot be used."""
    settings = dict(phase.learner) | ({"loss.kind": phase.objective} if phase.objective else {})
    if not settings:
        return config
    if phase.objective and "loss.kind" in phase.learner:
        raise ValueError("objective and learner.loss.kind both name the loss: leave one of them out")
    for path in settings:
        if any(path == kept or path.startswith(f"{kept}.") for kept in KEPT):
            raise ValueError(f"learner.{path} is fixed for a run: it cannot change from phase to phase")
    texts = [
        (path, value if isinstance(value, str) else json.dumps(fields.to_json(value), default=repr))
        for path, value in settings.items()
    ]
    # A phase's rate is that of all policies, but for those to which the phase gives another.
    of_all = any(f"{RATE}.".startswith(f"{path}.") for path in settings)
    before = dataclasses.replace(config, learning_rates={}) if of_all else config
    changed, problems = fields.change(before, texts)
    if problems:
        raise ValueError("; ".join(problems))
    for kept in KEPT:  # a group that was replaced may change them, too
        if operator.attrgetter(kept)(changed) != operator.attrgetter(kept)(config):
            raise ValueError(f"learner.{kept} is fixed for a run: it cannot change from phase to phase")
    return changed


def references(config: LearnerConfig, phases: Sequence[Phase]) -> tuple[bool, bool]:
    """(some phase uses the policies' base as its reference, some phase has another reference)."""
    is_base = []
    for phase in phases or (Phase(1),):
        learner = learner_of(config, phase)
        if learner.interventions.kl_coef or learner.loss.kind in NEED_REFERENCE:
            is_base.append(phase.reference == "base")
    return True in is_base, any(phase.reference != "base" for phase in phases)


def problems(config: "RunFields") -> Iterator[str]:
    """The mistakes in the phases of a run, one line each."""
    phases, roles, learner = config.phases, config.roles, config.learner
    policy_map, frozen_roles = config.policies.map, config.policies.frozen_roles
    known = policy_names(policy_map)
    steps_before = 0
    for number, phase in enumerate(phases):
        where = f"phases[{number}]{f' ({phase.name})' if phase.name else ''}"
        unknown = [name for name in phase.roles if role_of_key(name, roles) is None]
        of_roles = "role of the workflow and no 'role/number' for a slot"
        yield from fields.unknown_names(f"{where}.roles", unknown, roles, of_roles)
        named = (*phase.policies, *phase.copies, *phase.copies.values())
        yield from fields.unknown_names(where, named, known, POLICY)
        if phase.flatten and phase.flatten not in roles:
            yield f"{where}.flatten is '{phase.flatten}', which is no role{fields.nearest(phase.flatten, roles)}"
        chosen = learner
        try:
            chosen = learner_of(learner, phase)
        except ValueError as error:
            yield f"{where}: {error}"
        kind = phase.objective or chosen.loss.kind
        sampled = chosen.loss.corrects_sampler or chosen.old_logprobs == "sampler"
        if phase.flatten and sampled and kind not in OBJECTIVES:
            yield (
                f"{where}.flatten makes sequences that no policy sampled, and {kind} needs the sampler's log-probs: "
                f"set objective to one of {', '.join(OBJECTIVES)}"
            )
        interventions, of_run = chosen.interventions, learner.interventions.named
        for setting, names in interventions.named.items():  # names set for the run are checked elsewhere
            place = f"{where}: learner.interventions.{setting}"
            of_phase = sorted({*names} - {*of_run[setting]})
            yield from fields.unknown_names(place, of_phase, roles, ROLE)
        of_phase = sorted({*chosen.learning_rates} - {*learner.learning_rates})
        yield from fields.unknown_names(f"{where}: learner.learning_rates", of_phase, known, POLICY)
        if not unknown and {*phase.policies} <= {*known}:
            training = phase.trained_roles(policy_map, frozen_roles)
            if not phase.trained_policies(policy_map, frozen_roles) or training <= {*interventions.freeze}:
                yield f"{where} trains nothing: name roles or policies that are not frozen, or leave the phase out"
        if idle := sorted(
            ({*interventions.alternate} - {*learner.interventions.alternate}) & {*frozen_roles}
        ):
            yield (
                f"{where}: learner.interventions.alternate names {', '.join(idle)}, frozen by policies.frozen_roles: "
                "in its turns nothing would be trained; leave it out"
            )
        if interventions.alternate and (phase.roles or phase.policies):
            yield (
                f"{where} sets learner.interventions.alternate and also roles or policies, which both decide what "
                "trains: leave one of them out"
            )
        for name in sorted(
            {*phase.copies} & {*policy_map.values()} - {*trained_policies(policy_map, frozen_roles)}
        ):
            yield f"{where}.copies names '{name}', whose roles are all in policies.frozen_roles: unfreeze one of them"
        if phase.source == "collected" or phase.source.startswith("collected:"):
            collector = phase.source.partition(":")[2]
            before = [earlier.name for earlier in phases[:number] if earlier.collect]
            if not before or (collector and collector not in before):
                what = f"'{collector}' collects nothing" if collector else "no phase before it collects"
                yield f"{where}.source is {phase.source!r}, and {what}: set collect=true in a phase that plays"
        if steps_before >= config.steps > 0:
            yield f"{where} is never reached: it would begin after step {steps_before}, and steps is {config.steps}"
        steps_before += phase.steps
    phase_names = [phase.name for phase in phases if phase.name]
    for name in sorted({name for name in phase_names if phase_names.count(name) > 1}):
        yield f"two phases are called '{name}': give them different names"
