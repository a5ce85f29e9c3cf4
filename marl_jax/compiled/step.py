"""A whole training step as one pure function: `step(state, key, tasks) -> state, table, metrics`.

    tasks ─stage─► prompts, completions, answers ─columns─► grades, rewards, advantages ─learn─► new weights

It has no side effect and does not call the host: `jax.jit`, `vmap` over seeds, `lax.scan` over steps and `shard_map`
over devices can be applied to it. Under `vmap` and `shard_map` it gets the names of their axes.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from marl_jax.compiled.cast import Cast, cast_of
from marl_jax.compiled.columns import Columns, table_of, with_advantages
from marl_jax.compiled.learn import Axes, Update, before_update
from marl_jax.compiled.refusal import NoArrayForm
from marl_jax.compiled.rehearsal import count_calls
from marl_jax.compiled.stage import Stage
from marl_jax.config.run_config import RunConfig
from marl_jax.learning.network import Qwen3
from marl_jax.learning.update import Learner, LearnerState
from marl_jax.models.qwen3 import full_precision
from marl_jax.models.weight_table import Tree
from marl_jax.rewards.arrays import Tests, pack_tests
from marl_jax.rollouts.scheduler import task_key
from marl_jax.runs.loading.parts import Parts, load_parts, load_tasks
from marl_jax.sampling.requests import noise_keys
from marl_jax.task import Task
from marl_jax.tasks import DataError, Position, TaskIterator

INTEGER = re.compile(r"-?[0-9]{1,9}")


class State(flax.struct.PyTreeNode):
    """All that a step needs and changes, and the weights that it only reads."""

    trees: dict[str, Tree]  # trained weights, by policy
    learner: dict[str, LearnerState]
    step: jax.Array  # [] steps taken
    bases: dict[str, Tree]  # by policy: frozen weights, its own or those under its adapter
    references: dict[str, Tree]  # by policy: the reference of its KL term; empty without one


class Tasks(flax.struct.PyTreeNode):
    """The problems of a step."""

    question: Any  # uint8 [T, Q] codes, padded with 0
    question_size: Any  # Int[T]
    reference: Any  # math: the answers, Int[T]; code: the `rewards.arrays.Tests` of the programs
    id: Any  # uint32 [T], the number of a problem, the same in any batch


Step = Callable[[State, jax.Array, Tasks], tuple[State, Columns, dict[str, Any]]]


class Halves(NamedTuple):
    """The parts of a step, also pure functions: as separate programs they can be compiled in parallel."""

    play: Callable[[State, jax.Array, Tasks], tuple[Columns, dict[str, Any]]]
    # The update of one policy: (new weights and state, computed columns, metrics).
    learn: Callable[[str, State, Columns], tuple[tuple[Tree, LearnerState], dict[str, Any], dict[str, Any]]]

    def changes(self, state: State, *inputs: Any) -> tuple[tuple[Any, Any], Columns, dict[str, Any]]:
        """The step without its count: (trees and learner, table, metrics).

        Policies are updated in the order of their names.
        """
        (columns, metrics), reports = self.play(state, *inputs), {}
        for policy in sorted(state.trees):
            (tree, learner), computed, reports[policy] = self.learn(policy, state, columns)
            trees, learners = {**state.trees, policy: tree}, {**state.learner, policy: learner}
            state = state.replace(trees=trees, learner=learners)
            columns = columns.replace(**computed)
        return (state.trees, state.learner), columns, {"policy": reports, **metrics}

    def step(self, state: State, key: jax.Array, tasks: Tasks) -> tuple[State, Columns, dict[str, Any]]:
        """The complete step."""
        (trees, learner), columns, metrics = self.changes(state, key, tasks)
        return state.replace(trees=trees, learner=learner, step=state.step + 1), columns, metrics


def make_step(
    config: RunConfig,
    *,
    parts: Parts | None = None,
    seeds_axis: str | None = None,
    data_axis: str | None = None,
) -> Step:
    """The step of a configuration.

    `seeds_axis` names the axis of a `vmap` over seeds: a loop goes on while any seed needs it. `data_axis` names the
    axis that problems are sharded over: gradients and counts are summed over it. If XLA shards the weights, both must
    name that axis, because its devices then wait for each other inside of loops. The key is a key of `jax.random`, or
    the words of `noise_words`, with which the hosted road's tokens are sampled.
    """
    return make_halves(config, parts=parts, seeds_axis=seeds_axis, data_axis=data_axis).step


def make_halves(
    config: RunConfig,
    *,
    parts: Parts | None = None,
    seeds_axis: str | None = None,
    data_axis: str | None = None,
) -> Halves:
    """The step of a configuration in parts: playing, and the update of each policy in turn."""
    cast = cast_of(config, parts)
    axes = Axes(seeds_axis, data_axis)
    count_calls(cast)  # refuses workflows without a script
    workflow = cast.parts.workflow
    assert workflow.in_arrays is not None

    @jax.enable_x64(False)
    @full_precision
    def play(state: State, key: jax.Array, tasks: Tasks) -> tuple[Columns, dict[str, Any]]:
        stage = Stage(cast, _weights(cast, state), tasks, _noise(cast, key, tasks), seeds_axis)
        answer = workflow.in_arrays(stage, **workflow.settings)  # type: ignore[misc]
        versions = {policy: learner.updates for policy, learner in state.learner.items()}
        columns = before_update(cast, with_advantages(cast, table_of(stage, answer, versions)))
        return columns, _means(columns, axes)

    @jax.enable_x64(False)
    @full_precision
    def learn_of(
        policy: str, state: State, columns: Columns
    ) -> tuple[tuple[Tree, LearnerState], dict[str, Any], dict[str, Any]]:
        return Update(cast, policy, state, columns, axes).run()

    return Halves(play, learn_of)


def start(config: RunConfig, *, parts: Parts | None = None) -> State:
    """The state before the first step of a run of this configuration; its arrays are copies that may be donated."""
    parts = parts or load_parts(config)
    policies = parts.start(config.seed)
    trees = {name: policies[name] for name in parts.trained}
    learner = Learner(Qwen3(parts.model, parts.lora_scale), config.learner, config.policies.map)
    references = parts.references(trees) if config.learner.interventions.kl_coef else {}
    state = state_of(parts, trees, learner.init(trees), references=references)
    return jax.tree.map(jnp.copy, state)  # policies share a base, and `parts` keep it


def state_of(
    parts: Parts,
    trees: Mapping[str, Tree],
    learner: Mapping[str, LearnerState],
    *,
    step: int = 0,
    references: Mapping[str, Tree] | None = None,
) -> State:
    """The state of a run, for the compiled step; its arrays are the run's own."""
    counted = {
        name: state.replace(**{count: jnp.int32(value) for count, value in state.counts.items()})
        for name, state in learner.items()
    }
    bases = {**parts.adapter_bases(), **parts.frozen_trees()}
    return State(dict(trees), counted, jnp.int32(step), bases, dict(references or {}))


def tasks_of(cast: Cast, tasks: Sequence[Task], width: int) -> Tasks:
    """Problems in arrays; `width` is the length of the longest question of all steps."""
    questions = [cast.alphabet.codes(task.question) for task in tasks]
    if not tasks:
        raise ValueError("there are no tasks to put into arrays")
    if (longest := max(map(len, questions))) > width:
        raise ValueError(f"a question has {longest} characters, more than the width {width}")
    return Tasks(
        np.stack([np.pad(codes, (0, width - len(codes))) for codes in questions]),
        np.array([len(codes) for codes in questions], np.int32),
        _programs(tasks) if cast.config.data.family == "code" else _integers(tasks),
        np.array([task_key(task) for task in tasks], np.uint32),
    )


def noise_words(cast: Cast, tasks: Sequence[Task], *, seed: int, step: int) -> np.ndarray:
    """uint32 [T, samples, calls, 2]: the noise keys of all calls of a step on the hosted road; `step` counts from 1."""
    calls = count_calls(cast)
    words = noise_keys(
        f"{seed},{step},{key},{sample},{call}"
        for key in map(task_key, tasks)
        for sample in range(cast.samples)
        for call in range(calls)
    )
    return words.reshape(len(tasks), cast.samples, calls, 2)


def problems(config: RunConfig, *, seed: int | None = None) -> Iterator[Sequence[Task]]:
    """The problems of step 1, 2, .. of the hosted run, as `to_host` takes them."""
    yield from _batches(config, load_tasks(config.data, "train"), config.seed if seed is None else seed)


def _batches(config: RunConfig, train: Sequence[Task], seed: int) -> TaskIterator:
    if config.data.problems > len(train):  # a problem twice in a batch would have the same noise twice
        raise DataError(f"data.problems is {config.data.problems} and the train split has {len(train)}")
    return TaskIterator(train, config.data.problems, Position(seed=seed))


def batches(
    config: RunConfig, *, parts: Parts | None = None, seed: int | None = None
) -> Iterator[tuple[np.ndarray, Tasks]]:
    """(key, tasks) of step 1, 2, ..: the problems and the noise of the hosted run."""
    cast, seed = cast_of(config, parts), config.seed if seed is None else seed
    train = load_tasks(config.data, "train")
    width = max(len(task.question) for task in train)
    for step, tasks in enumerate(_batches(config, train, seed), 1):
        yield noise_words(cast, tasks, seed=seed, step=step), tasks_of(cast, tasks, width)


def _integers(tasks: Sequence[Task]) -> np.ndarray:
    if bad := [task for task in tasks if not INTEGER.fullmatch(task.gold)]:
        raise NoArrayForm(
            f"the answer {bad[0].gold!r} of task {bad[0].id!r} is no integer of at most nine digits"
        )
    return np.array([int(task.gold) for task in tasks], np.int32)


def _programs(tasks: Sequence[Task]) -> Tests:
    try:
        return pack_tests(tasks)
    except ValueError as error:
        raise NoArrayForm(str(error)) from None


def _weights(cast: Cast, state: State) -> dict[str, tuple[Tree, Tree | None]]:
    """By policy, the weights that sample, in the model's dtype: (all weights or its base's, adapter or None)."""
    dtype = cast.parts.model.dtype
    served = {name: jax.tree.map(lambda leaf: leaf.astype(dtype), tree) for name, tree in state.trees.items()}
    trees: dict[str, tuple[Tree, Tree | None]] = {}
    for name, spec in cast.parts.specs.items():
        trees[name] = (state.bases[name], served.get(name)) if name in state.bases else (served[name], None)
        assert spec.lora == (trees[name][1] is not None)
    return trees


def _noise(cast: Cast, key: jax.Array, tasks: Tasks) -> Callable[[jax.Array], jax.Array]:
    """A function from indices of calls in their episodes, Int[E, n], to the keys of their noise, uint32 [E, n, 2]."""
    typed = jnp.issubdtype(jnp.result_type(key), jax.dtypes.prng_key)
    if (key.size != 1) if typed else (np.ndim(key) != 4):
        raise TypeError("the key is neither one of jax.random.key nor the words of noise_words")
    if not typed:
        if key.shape != (shape := (len(tasks.id), cast.samples, count_calls(cast), 2)):
            sizes = "{} problems by {} samples by {} calls".format
            raise TypeError(
                f"the words of the key are for {sizes(*key.shape)}, and a step has {sizes(*shape)}: slice words "
                "and tasks alike, and make both with one configuration"
            )
        words = key.reshape(-1, *key.shape[2:])
        return lambda calls: jnp.take_along_axis(words, calls[..., None], axis=1)
    ids = jnp.repeat(jnp.asarray(tasks.id), cast.samples)
    samples = jnp.tile(jnp.arange(cast.samples), len(tasks.id))
    fold = jax.vmap(jax.random.fold_in)
    keys = fold(fold(jnp.broadcast_to(key, ids.shape), ids), samples)  # by (task, sample), not by position
    of_call = lambda key, call: jax.random.bits(jax.random.fold_in(key, call), (2,))
    return lambda calls: jax.vmap(jax.vmap(of_call, (None, 0)))(keys, calls)


def _means(columns: Columns, axes: Axes) -> dict[str, Any]:
    """The mean outcome (`reward`), means over the calls of each role, and the sums `tokens` and `beyond`."""
    table = columns.table
    made, C = table.length > 0, len(columns.cues)
    outcome = table.outcome.reshape(-1, C)[:, 0]
    total = axes.sum({"reward": (outcome.sum(), jnp.float32(len(outcome)))})
    for code, role in enumerate(table.roles):
        calls = made & (table.role == code)
        for name in ("reward", "length", "readable", "truncated"):
            values = jnp.where(calls, getattr(table, name), 0).astype(jnp.float32)
            total[f"{name}/{role}"] = axes.sum((values.sum(), calls.sum().astype(jnp.float32)))
    means = {name: value / jnp.maximum(count, 1) for name, (value, count) in total.items()}
    counts = {"tokens": table.length.sum(), "beyond": jnp.sum(columns.beyond)}
    return means | axes.sum(counts)
