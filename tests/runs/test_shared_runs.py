"""Processes that share a run compute what one process does, and go on from each other's folders."""

import dataclasses
import pickle
from pathlib import Path

import jax
import numpy as np
import pytest
from closeness import close_trees
from hosts_kit import play
from run_kit import quiet, records
from tiny_run import KINDS, tiny_config

from marl_jax.config.run_config import CheckpointConfig, EvaluationConfig, LogConfig
from marl_jax.rollouts import read_episodes
from marl_jax.run_folder.checkpoints import restore
from marl_jax.runs import loop

HERE = Path(__file__).parent


def by_itself(base, workdir, kind, count):
    """A run of one process that keeps every state and every episode."""
    config = dataclasses.replace(
        KINDS[kind](tiny_config(base)),
        steps=count,
        evaluation=EvaluationConfig(every=0),
        checkpoints=CheckpointConfig(every=1, latest=count, best=False),
        logging=LogConfig(episodes_every=1, episodes_problems=4),
    )
    assert loop.train(config, workdir, live=quiet()) == count


def agree_step_by_step(base, tmp_path, kind, *, hosts, devices, count):
    by_itself(base, tmp_path / "alone", kind, count)
    words = (base, tmp_path / "alone", tmp_path / "shared", kind, devices, tmp_path / "out")
    play(HERE / "steps_run.py", tmp_path / "logs", hosts, *words, devices=devices)
    every = [pickle.loads((tmp_path / f"out-{k}.pickle").read_bytes()) for k in range(hosts)]
    assert every[0].keys() == set(range(1, count + 1))
    lines = {line["step"]: line for line in records(tmp_path / "alone")[0]}
    for step, found in every[0].items():
        for other in every[1:]:  # replicas are equal to the bit, and so are the tables
            mine, theirs = (jax.tree.leaves(one[step]["arrays"]) for one in (every[0], other))
            assert [np.asarray(leaf).tobytes() for leaf in mine] == [
                np.asarray(leaf).tobytes() for leaf in theirs
            ]
            assert pickle.dumps(found["table"].advantage) == pickle.dumps(other[step]["table"].advantage)
        table = found["table"]
        alone = read_episodes(tmp_path / "alone" / "episodes" / f"step-{step:06d}.parquet")
        assert [bare.task.id for bare in table.bare_episodes] == [
            bare.task.id for bare in alone.bare_episodes
        ]
        for name in ("prompt", "tokens"):
            mine, theirs = getattr(table, name), getattr(alone, name)
            assert [row.tolist() for row in mine] == [row.tolist() for row in theirs], name
        for name in ("episode", "call", "slot", "turn", "reads"):
            np.testing.assert_array_equal(getattr(table, name), getattr(alone, name), name)
        assert (table.roles, table.policies) == (alone.roles, alone.policies)
        for name in ("reward", "advantage"):
            np.testing.assert_array_equal(getattr(table, name), getattr(alone, name), name)
        for row in range(len(table)):
            np.testing.assert_allclose(table.logprobs[row], alone.logprobs[row], rtol=0, atol=1e-6)
        # The first moment of Adam is a mean of gradients, the same ones before this step: it tells this one apart.
        expected, _ = restore(tmp_path / "alone" / "checkpoints", step, found["arrays"])
        for policy, state in expected["learner"].items():
            close_trees(found["arrays"]["learner"][policy].optimiser[0].mu, state.optimiser[0].mu)
            assert found["norms"][policy] == pytest.approx(
                lines[step][f"policy/{policy}/grad_norm"], rel=1e-6
            )
        close_trees(found["arrays"]["policies"], expected["policies"], roundings=64)


def test_two_processes_take_the_steps_of_one(base, tmp_path):
    """Tokens, prompts, rewards and advantages are equal, gradients within roundings, replicas to the bit."""
    agree_step_by_step(base, tmp_path, "plain", hosts=2, devices=1, count=2)
