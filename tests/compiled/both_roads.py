"""One training step on each road from one state, for tests that compare them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_jax import compiled
from marl_jax.compiled import decoding
from marl_jax.config.run_config import load_config
from marl_jax.learning import Learner, Qwen3, with_advantages
from marl_jax.policies import is_frozen
from marl_jax.rewards.credit import with_rewards
from marl_jax.rewards.grading import grade
from marl_jax.runs.loading.parts import load_parts, load_tasks
from marl_jax.runs.loading.play import make_service, planned_engine, player_of
from marl_jax.sampling import programs
from marl_jax.sampling.methods import temper
from marl_jax.tasks import Position, TaskIterator

SMALL = {
    "data.problems": "6",
    "rollout.samples": "4",
    "sampling.max_new_tokens": "32",
    "data.train_size": "600",
}


def small(cell, **changes):
    """A cell of configs/micro.py with few problems."""
    return load_config(f"configs/micro.py:{cell}", [*{**SMALL, **changes}.items()])


def debating():
    """Three debaters on one policy."""
    config = small("single-shared-xs-math")
    return dataclasses.replace(
        config,
        cell="debate",
        workflow=dataclasses.replace(config.workflow, name="debate"),
        policies=dataclasses.replace(config.policies, map={"debater": "p0"}),
    )


def obeying(play):
    """The play of a step, or a whole step, whose key is (words, said): calls say the tokens in `said`.

    `said` is Int[T, samples, calls, M]; at -1 and after M a call draws its tokens.
    """

    def obeyed(state, key, tasks):
        words, said = key
        said, keys = said.reshape(-1, said.shape[-1]), words.reshape(-1, 2)

        def sample(logits, lanes, features):
            token, logprob, kept = programs.sample(logits, lanes, features)
            call = jnp.argmax(
                (lanes.noise[:, None] == keys).all(axis=-1), axis=1
            )  # each has words of its own
            imposed = said.at[call, lanes.generated].get(mode="fill", fill_value=-1)
            logprobs = jax.nn.log_softmax(temper(logits, lanes.temperature))
            given = jnp.take_along_axis(logprobs, imposed[:, None], axis=1)[:, 0]
            return jnp.where(imposed < 0, token, imposed), jnp.where(imposed < 0, logprob, given), kept

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoding, "sample", sample)
            return play(state, words, tasks)

    return obeyed


class Hosted:
    """A run of the hosted road without a folder: its state, and steps that say all that they did."""

    def __init__(self, config):
        self.config = config
        self.parts = parts = load_parts(config)
        policies = parts.start(config.seed)
        self.trees = {name: policies[name] for name in parts.trained}
        network = Qwen3(parts.model, parts.lora_scale, config.policies.remat, config.policies.attention)
        self.learner = Learner(network, config.learner, config.policies.map)
        self.states = self.learner.init(self.trees)
        anchored = config.learner.interventions.kl_coef
        self.references = parts.references(self.trees) if anchored else None
        shapes = planned_engine(config, parts)
        self.service = make_service(config, parts, policies | self.trees, shapes, {}, measured=True)
        train = load_tasks(config.data, "train")
        self.problems = TaskIterator(train, config.data.problems, Position(seed=config.seed))
        self.cast = compiled.cast_of(config, parts)
        self.width = max(len(task.question) for task in train)
        self.number = 0
        self.sizes = {}  # {policy: the largest norm of its gradients so far}

    def compiled_state(self):
        """The state as it is, for the compiled road."""
        trees, states = jax.tree.map(np.array, (self.trees, self.states))
        return compiled.state_of(self.parts, trees, states, step=self.number, references=self.references)

    def tasks(self, tasks, table=None):
        """(key, tasks) of the next step, for `obeying`: what the calls of a table say is imposed."""
        config, given = self.config, compiled.tasks_of(self.cast, tasks, self.width)
        words = compiled.noise_words(self.cast, tasks, seed=config.seed, step=self.number + 1)
        most = max(role.max_new_tokens for role in config.role_settings.values())
        forced = np.full((*words.shape[:3], most), -1, np.int32)
        if table is not None:
            for row in range(len(table)):
                task, sample = divmod(int(table.episode[row]), config.rollout.samples)
                forced[task, sample, table.call[row], : table.length[row]] = table.tokens[row]
        return (words, forced), given

    def step(self, tasks):
        """The table of the next step with its advantages, and the learner's report."""
        config, parts = self.config, self.parts
        player = player_of(config, parts, self.service)
        table = player.play(tasks, samples=config.rollout.samples, step=self.number + 1, seed=config.seed)
        table = with_rewards(grade(table), parts.credit)
        table, _ = with_advantages(table, config.advantages, parts.workflow.groups)
        frozen = config.policies.frozen_roles
        trains = [
            not is_frozen(table.roles[role], slot, frozen)
            for role, slot in zip(table.role.tolist(), table.slot.tolist())
        ]
        table = table.replace(trains=np.array(trains, bool))
        self.trees, self.states, report = self.learner.step(
            self.trees,
            self.states,
            table.take(table.trains),
            step=self.number,
            bases=parts.adapter_bases(),
            references=self.references,
        )
        self.number += 1
        updates = {name: state.updates for name, state in self.states.items()}
        self.service.update(parts.frozen_trees() | self.trees, updates)
        return table, report


def moments(states):
    """{policy: the first moments of its optimiser}, in which the gradient of a step is added up."""
    return {name: state.optimiser[0].mu for name, state in states.items()}


def norm(tree):
    return float(np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree))))


def distance(a, b):
    """The norm of the difference of two trees."""
    return norm(jax.tree.map(lambda x, y: np.asarray(x, np.float64) - np.asarray(y, np.float64), a, b))
