"""A run that diverges says so in one line with the way back, and its folder is one that a start can go on from."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from run_kit import quiet, weights
from tiny_run import make_base, tiny_config

from marl_jax.config.run_config import CheckpointConfig, EvaluationConfig
from marl_jax.models import init, save_hf
from marl_jax.models.tokenizer import build_micro_tokenizer
from marl_jax.run_folder.checkpoints import steps
from marl_jax.run_folder.folder import FolderError
from marl_jax.run_folder.json_lines import read_lines
from marl_jax.runs import loop
from marl_jax.runs.divergence import Diverged, ways_out
from marl_jax.sampling.engine import NotFinite

RATE = "--config.learner.optimiser.schedule.learning_rate"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base") / "tiny")


def config(base, rate, **changes):
    """A run that evaluates nothing and saves every step."""
    plain = tiny_config(
        base,
        evaluation=EvaluationConfig(every=0),
        checkpoints=CheckpointConfig(every=1, latest=2, best=False),
        **{"steps": 3, **changes},
    )
    optimiser = plain.learner.optimiser
    schedule = dataclasses.replace(optimiser.schedule, learning_rate=rate)
    optimiser = dataclasses.replace(optimiser, schedule=schedule)
    return dataclasses.replace(plain, learner=dataclasses.replace(plain.learner, optimiser=optimiser))


def train(config, workdir, **options):
    return loop.train(config, workdir, live=quiet(config.steps), **options)


def test_a_learning_rate_of_a_policys_own_is_named_among_the_ways_out(base):
    wild = config(base, 0.03)
    own = dataclasses.replace(wild, learner=dataclasses.replace(wild.learner, learning_rates={"p1": 0.5}))
    assert f"{RATE} (0.03) or" in ways_out(wild)
    assert f"{RATE} (0.03, that of 'p1' 0.5 by --config.learner.learning_rates) or" in ways_out(own)


def finite(workdir):
    _, leaves = weights(workdir)
    return all(np.isfinite(np.frombuffer(leaf, np.float32)).all() for leaf in leaves.values())


@pytest.mark.long
def test_an_update_that_is_not_finite_is_one_line_and_never_saved(base, tmp_path):
    folder = tmp_path / "run"
    assert train(config(base, 0.03, steps=2), folder) == 2
    wild = config(base, 1e30)
    with pytest.raises(Diverged) as error:
        train(wild, folder, accept_changes=True)
    told = str(error.value)
    assert told.startswith(
        "step 3: the update of policy 'p0' is not finite; the last good checkpoint is of step 2"
    )
    assert f"lower {RATE} (1e+30)" in told and "--accept_changes" in told and "\n" not in told
    assert steps(folder / "checkpoints")[-1] == 2 and finite(folder)
    # The same configuration would come to the same: it is refused at once, and another one goes on.
    with pytest.raises(Diverged, match="this run diverged with this configuration: step 3"):
        train(wild, folder)
    with pytest.raises(FolderError, match="learning_rate"):
        train(config(base, 0.01), folder)
    assert (folder / "diverged.json").exists()  # a start that is refused forgets nothing
    assert train(config(base, 0.01), folder, accept_changes=True) == 3
    assert not (folder / "diverged.json").exists()
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.long
def test_policies_that_compute_nothing_finite_are_set_aside_with_their_checkpoint(
    base, tmp_path, monkeypatch
):
    folder, real = tmp_path / "run", loop.step

    def step(road, runs, states, clock):
        """As after an update that left weights which nothing can be computed with."""
        [state] = states
        if state.step == 2:
            broken = {name: jax.tree.map(lambda x: x * np.nan, tree) for name, tree in state.trees.items()}
            states = [dataclasses.replace(state, trees=broken)]
        return real(road, runs, states, clock)

    with monkeypatch.context() as patch, pytest.raises(Diverged) as error:
        patch.setattr(loop, "step", step)
        train(config(base, 0.03), folder)
    told = str(error.value)
    assert told.startswith("step 3: the model gives no finite log-probability")
    assert "the last good checkpoint is of step 1" in told and "\n" not in told
    assert steps(folder / "checkpoints") == [1] and (folder / "checkpoints" / "2.diverged").is_dir()
    assert json.loads((folder / "diverged.json").read_text())["step"] == 3
    assert train(config(base, 0.01), folder, accept_changes=True) == 3


def test_a_base_that_computes_nothing_finite_is_no_divergence(tmp_path):
    from tiny_run import MODEL

    broken = jax.tree.map(lambda x: x * np.nan, init(0, MODEL))
    save_hf(tmp_path / "base", MODEL, broken, build_micro_tokenizer())
    with pytest.raises(NotFinite, match="are its weights finite"):
        train(config(tmp_path / "base", 0.03), tmp_path / "run")
    assert not (tmp_path / "run" / "diverged.json").exists()
