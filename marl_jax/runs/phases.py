"""Phases of a run, as the loop uses them: the roles that train in a step, the learner, and the source of calls.

    state ──enter──► weights, optimiser states and reference with which the phase begins         (before its first step)
    position ──learner, references, trains, collected_calls──► what each of its steps needs

Nothing here is saved: the weights at the start of a phase are in `State`, and so in every checkpoint.
"""

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marl_jax import hosts
from marl_jax.config.phase_fields import Phase, PhasePosition, learner_of, phase_at, references
from marl_jax.config.run_config import RunConfig
from marl_jax.hosts.layout import mesh_of_all
from marl_jax.learning import Learner, LearnerConfig, LearnerState, Network
from marl_jax.learning.losses import OBJECTIVES
from marl_jax.learning.objectives import NEED_REFERENCE
from marl_jax.policies import PolicySpec, Tree, is_frozen
from marl_jax.rollouts import write_episodes
from marl_jax.run_folder.checkpoints import misfit, restore, steps, tree_digest
from marl_jax.run_folder.files import disk_errors, sync_file
from marl_jax.run_folder.folder import FolderError, digest_model, read, read_config
from marl_jax.runs.collected import (
    Unit,
    collected_path,
    draw,
    files_of,
    flattened,
    read_calls,
    read_units,
    with_own_policies,
)
from marl_jax.runs.loading.parts import Parts
from marl_jax.runs.state import State
from marl_jax.table import Table


class Phases:
    """The phases of one run; a configuration without phases is a single phase without changes."""

    def __init__(self, config: RunConfig, parts: Parts, networks: Mapping[str, Network], folder: Path):
        self._config, self._parts, self._networks, self._folder = config, parts, networks, folder
        self._list = config.phases or (Phase(max(config.steps, 1)),)
        self._learners: list[tuple[LearnerConfig, Learner]] = []
        self._mesh = mesh_of_all(config.mesh.data, config.mesh.model) if hosts.count() > 1 else parts.mesh
        self._base: dict[str, Tree] | None = None
        self._calls: dict[tuple[int, int], list[Unit]] = {}

    def at(self, step: int) -> PhasePosition:
        """The phase of the step after `step`."""
        return phase_at(self._list, step)

    def learner(self, phase: Phase) -> Learner:
        """The learner with the phase's settings; phases with the same settings share it."""
        config = learner_of(self._config.learner, phase)
        for known, learner in self._learners:
            if known == config:
                return learner
        learner = Learner(self._networks, config, self._config.policies.map, mesh=self._mesh)
        self._learners.append((config, learner))
        return learner

    def reference_at_start(self, trees: Mapping[str, Tree]) -> dict[str, Tree] | None:
        """`State.reference` before any phase; set if a phase needs it: all checkpoints have the same entries."""
        _, to_others = references(self._config.learner, self._config.phases)
        return {name: _copied(tree) for name, tree in trees.items()} if to_others else None

    def init(self, trees: Mapping[str, Tree]) -> dict[str, LearnerState]:
        """Fresh states of the learner; they have the same form in all phases."""
        return self.learner(self._list[0]).init(trees)

    def check(self, trees: Mapping[str, Tree]) -> None:
        """Refuse weights and calls of other runs that do not fit the policies: in shapes, base, roles or tokens."""
        for number, phase in enumerate(self._config.phases):
            if phase.source.partition(":")[0] not in ("play", "collected") and not phase.flatten:
                with_own_policies(read_calls(files_of(phase.source)[0]), self._config, self._parts)
            moving = phase.trained_policies(self._config.policies.map, self._config.policies.frozen_roles)
            for name, source, policies in (
                ("start", phase.start, moving),
                ("reference", phase.reference, trees),
            ):
                if "@" not in source:
                    continue
                directory, step = checkpoint_of(source)
                specs = {policy: self._parts.specs[policy] for policy in policies}
                target = {"policies": _target(directory, step, policies, trees)}
                if other := misfit(directory / str(step), target) or other_base(directory.parent, specs):
                    raise FolderError(
                        f"phases[{number}].{name} '{source}' does not fit the policies {', '.join(policies)}: {other}; "
                        "take a run with the same policies; for a start, the phase's policies may name those that fit"
                    )

    def enter(self, at: PhasePosition, state: State) -> State:
        """The state with which the phase begins; unchanged if it has begun already."""
        if state.phase == at.number:
            return state
        phase, trees, states, reference = at.phase, dict(state.trees), dict(state.learner), state.reference
        moving = phase.trained_policies(self._config.policies.map, self._config.policies.frozen_roles)
        if phase.start != "last":
            source = self._weights(phase.start, moving, trees)
            trees |= {name: _copied(source[name]) for name in moving}
        if phase.copies:  # all at once, so that two policies may be swapped
            current = self._parts.frozen_trees() | trees
            trees |= {to: _copied(current[of], jnp.float32) for to, of in phase.copies.items()}
        if phase.optimiser == "fresh" or phase.start != "last":
            fresh = self.init({name: trees[name] for name in moving})
            for name in moving:
                counts = {count: getattr(states[name], count) for count in ("updates", "skipped", "empty")}
                states[name] = fresh[name].replace(**counts)
        if phase.reference == "start":
            reference = {name: _copied(tree) for name, tree in trees.items()}
        elif phase.reference != "base":
            reference = self._weights(phase.reference, trees, trees)
        return dataclasses.replace(state, phase=at.number, trees=trees, learner=states, reference=reference)

    def references(self, phase: Phase, state: State) -> dict[str, Tree] | None:
        """{policy: reference weights}; None if nothing needs them."""
        config = learner_of(self._config.learner, phase)
        if not config.interventions.kl_coef and config.loss.kind not in NEED_REFERENCE:
            return None
        if phase.reference != "base":
            return state.reference
        if self._base is None:
            self._base = self._parts.references(state.trees)
        return self._base

    def trains(self, phase: Phase, table: Table) -> np.ndarray:
        """Bool[N]: the calls with sampled tokens that train in this phase."""
        return self.reported(table) & np.array([phase.trains(*caller) for caller in table.callers], bool)

    def reported(self, table: Table) -> np.ndarray:
        """Bool[N]: the calls that reports cover: those with sampled tokens, of roles that are not frozen in the run."""
        frozen_roles = self._config.policies.frozen_roles
        frozen = [is_frozen(role, slot, frozen_roles) for role, slot, _ in table.callers]
        return (table.length > 0) & ~np.array(frozen, bool)

    def collected_calls(self, at: PhasePosition, step: int) -> Table | None:
        """The collected calls that the step learns from; None if its phase plays."""
        if at.phase.source == "play":
            return None
        return hosts.from_first(lambda: self._drawn(at, step))

    def _drawn(self, at: PhasePosition, step: int) -> Table:
        key = at.number, at.first
        if key not in self._calls:
            self._calls.clear()  # the calls of earlier phases, before those of this one are read
            self._calls[key] = self._source(at)
        in_earlier_rounds = at.number // len(self._list) * at.phase.steps
        before = in_earlier_rounds + step - at.first
        table = draw(self._calls[key], before, self._config.data.problems, self._config.seed)
        if at.phase.flatten:
            return flattened(table, at.phase.flatten, self._config, self._parts)
        table = with_own_policies(table, self._config, self._parts)
        if learner_of(self._config.learner, at.phase).loss.kind in OBJECTIVES:
            # Greedy calls are learned as if they were sampled at temperature 1.
            table = table.replace(temperature=np.where(table.temperature > 0, table.temperature, 1.0))
        return table

    def collect(self, phase: Phase, step: int, table: Table) -> None:
        """Write the calls of a step to a file, if its phase collects them."""
        if phase.collect and hosts.is_first():
            with disk_errors(self._folder):
                write_episodes(path := collected_path(self._folder, step), table)
                sync_file(path)  # later phases need it as much as the checkpoint

    def about(self, at: PhasePosition) -> dict[str, Any]:
        """The entries of a step's line about its phase."""
        name = at.phase.name or str(1 + at.number % len(self._list))
        return {"phase": name} if self._config.phases else {}

    def _source(self, at: PhasePosition) -> list[Unit]:
        kind, _, name = at.phase.source.partition(":")
        if kind != "collected":
            return read_units(files_of(at.phase.source), rewarded=not at.phase.flatten)
        wanted = [
            collected_path(self._folder, step)
            for step in range(1, at.first + 1)
            if (phase := self.at(step - 1).phase).collect and name in ("", phase.name)
        ]
        return read_units(wanted)

    def _weights(self, source: str, names: Iterable[str], trees: Mapping[str, Tree]) -> dict[str, Tree]:
        """The trees of the policies in `names`, from their base or from a checkpoint of a run."""
        if source == "base":
            start = self._parts.start(self._config.seed)
            return {name: start[name] for name in names}
        directory, step = checkpoint_of(source)
        found = restore(directory, step, {"policies": _target(directory, step, names, trees)})[0]["policies"]
        return {name: found[name] for name in names}


def checkpoint_of(source: str) -> tuple[Path, int]:
    """(directory of checkpoints, step) of RUN@STEP, which must exist."""
    run, _, step = source.rpartition("@")
    directory = Path(os.path.expanduser(run)) / "checkpoints"
    if not step.isdecimal() or int(step) not in steps(directory):
        known = ", ".join(map(str, steps(directory))) or "none"
        raise FolderError(
            f"'{source}' names no checkpoint: it must be RUN@STEP with a step of '{directory}'; there is: {known}"
        )
    return directory, int(step)


def other_base(run: Path, specs: Mapping[str, PolicySpec]) -> str:
    """A message about the first adapter that a run has trained over another base than it has here; "" if none.

    An adapter over other weights is another model, although its arrays fit.
    """
    adapters = {name: spec.base for name, spec in specs.items() if spec.lora}
    if not adapters:
        return ""
    their_specs, digests = read_config(run).policies.specs, read(run)["digests"]
    for name, base in adapters.items():
        their_base = their_specs[name].base
        if digests[f"base {their_base}"] != digest_model(base):
            return f"the adapter of '{name}' was trained over '{their_base}', whose weights differ from '{base}' here"
    return ""


def phase_digests(config: RunConfig) -> dict[str, str]:
    """Digests of the files of calls and weights outside the run that its phases name; they must not change."""
    digests: dict[str, str] = {}
    for phase in config.phases:
        for source in (name for name in (phase.start, phase.reference) if "@" in name):
            directory, step = checkpoint_of(source)
            digests[f"weights {source}"] = tree_digest(directory / str(step), "policies")
        if phase.source.partition(":")[0] not in ("play", "collected"):
            files = files_of(phase.source)
            read_calls(files[0], rewarded=not phase.flatten)
            digests[f"calls {phase.source}"] = _digest(files)
    return digests


def _target(directory: Path, step: int, names: Iterable[str], trees: Mapping[str, Tree]) -> dict[str, Tree]:
    """The trees to read from a checkpoint: those of all policies if it has them, else those of `names`."""
    complete = not misfit(directory / str(step), {"policies": trees})
    return dict(trees) if complete else {name: trees[name] for name in names}


def _digest(files: list[Path]) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(f.read_bytes()).digest() for f in files)).hexdigest()


def _copied(tree: Tree, dtype: Any = None) -> Tree:
    """A copy, because updates donate their buffers."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, dtype or leaf.dtype, copy=True), tree)
