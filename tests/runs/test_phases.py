"""Phases of a run: who is frozen is so to the bit, kills between and inside phases change nothing."""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest
from run_kit import quiet, records, run, same
from tiny_run import KINDS, tiny_config

from marl_jax.config.phase_fields import Phase
from marl_jax.config.run_config import CheckpointConfig, EvaluationConfig, WorkflowConfig
from marl_jax.learning.estimators.worth import AdvantageConfig
from marl_jax.policies import isolated
from marl_jax.rewards.credit import CreditConfig
from marl_jax.rollouts import read_episodes, write_episodes
from marl_jax.run_folder import checkpoints
from marl_jax.run_folder.checkpoints import restore
from marl_jax.run_folder.folder import FolderError
from marl_jax.runs import loop
from marl_jax.runs.collected import draw, files_of, read_units
from marl_jax.runs.loading.parts import load_parts
from marl_jax.runs.phases import Phases
from marl_jax.table import Table

pytestmark = pytest.mark.long

EVERY = {
    "checkpoints": CheckpointConfig(every=1, latest=20, best=False),
    "evaluation": EvaluationConfig(every=0),
}


def phased(base, workdir, *phases, **changes):
    changes = {"steps": sum(phase.steps for phase in phases), **EVERY, **changes}
    return run(base, workdir, phases=phases, **changes)


def stored(workdir, step, *, trees=("policies", "learner")):
    """{path: array} of a checkpoint, optimiser states included."""
    config = tiny_config(json.loads((workdir / "config.json").read_text())["config"]["policies"]["base"])
    parts = load_parts(config)
    start = {name: parts.start(0)[name] for name in parts.trained}
    learner = Phases(config, parts, None, workdir)
    templates = {"policies": start, "learner": learner.init(start), "reference": start}
    found, _ = restore(workdir / "checkpoints", step, {name: templates[name] for name in trees})
    leaves = jax.tree_util.tree_flatten_with_path(found)[0]
    return {
        jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves if np.ndim(leaf)
    } or pytest.fail("no arrays")


def changed(before, after):
    """The policies of which some array, weight or moment, is another."""
    return {
        name for name in ("p0", "p1") for path in before
        if f"'{name}'" in path and before[path].tobytes() != after[path].tobytes()
    }  # fmt: skip


@pytest.fixture(scope="module")
def turns(base, tmp_path_factory):
    """Two steps of one policy, two of the other, and one of both; AdamW with weight decay and momentum."""
    workdir = tmp_path_factory.mktemp("turns") / "run"
    phased(
        base,
        workdir,
        Phase(2, "first", policies=("p0",)),
        Phase(2, "second", roles=("aggregator",)),
        Phase(1),
    )
    return workdir


def test_what_does_not_train_keeps_every_bit_of_weights_and_moments(turns):
    at = {step: stored(turns, step) for step in range(1, 6)}
    moved = [changed(at[step], at[step + 1]) for step in range(1, 5)]
    assert moved == [{"p0"}, {"p1"}, {"p1"}, {"p0", "p1"}]
    lines, _ = records(turns)
    assert [line["phase"] for line in lines] == ["first", "first", "second", "second", "3"]
    trained = [[line[f"role/{role}/trained_rows"] for role in ("generator", "aggregator")] for line in lines]
    assert trained == [[32, 0], [32, 0], [0, 16], [0, 16], [32, 16]]


def test_the_frozen_copy_is_served_beside_what_trains(turns):
    versions = {
        (call.policy, call.version)
        for episode in read_episodes(turns / "episodes" / "step-000004.parquet").episodes()
        for call in episode.calls
    }
    assert versions == {("p0", 2), ("p1", 1)}


def test_one_phase_is_the_run_without_phases(base, whole, tmp_path):
    run(base, tmp_path / "run", phases=(Phase(8, "all"),))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {line.pop("phase") for line in lines} == {"all"}
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    same(tmp_path / "run", whole)


class Killed(Exception):
    pass


def die_in_step(monkeypatch, number):
    """The process ends in this step, after its update and before anything of it is kept."""
    inner = loop.step_metrics.of_step
    calls = iter(range(number))

    def of_step(*args):
        if next(calls) == number - 1:
            raise Killed
        return inner(*args)

    monkeypatch.setattr(loop.step_metrics, "of_step", of_step)


@pytest.fixture(scope="module")
def mixed(base, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("mixed") / "run"
    loop.train(KINDS["phased"](tiny_config(base)), workdir, live=quiet())
    return workdir


@pytest.mark.parametrize("number", [1, 3, 5, 7], ids=lambda n: f"step {n}")
def test_phases_killed_anywhere_end_like_those_never_killed(base, mixed, tmp_path, monkeypatch, number):
    """Phases of every kind: play and collect, SFT from the base, DPO against its start, policies that change places."""
    config, workdir = KINDS["phased"](tiny_config(base)), tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        die_in_step(patch, number)
        loop.train(config, workdir, live=quiet())
    assert loop.train(config, workdir, live=quiet()) == 8
    same(workdir, mixed, kind="phased")
    assert (workdir / "collected").exists()


def test_the_phases_did_what_they_say(mixed):
    lines, _ = records(mixed)
    assert [line["phase"] for line in lines] == ["play", "play", "sft", "sft", "dpo", "dpo", "swap", "play"]
    assert all(line["policy/p0/chosen"] > 0 for line in lines[2:4])
    assert all(line["policy/p0/pairs"] > 0 for line in lines[4:6])
    # At its first step the policy is its own reference: every margin is 0, and the loss log 2.
    assert lines[4]["policy/p0/loss"] == pytest.approx(np.log(2), abs=1e-6) != lines[5]["policy/p0/loss"]
    assert lines[5]["policy/p0/margin"] > 0
    assert sorted(path.name for path in (mixed / "collected").iterdir()) == [
        f"step-{step:06d}.parquet" for step in (1, 2, 8)
    ]


def test_a_phase_begins_at_the_base_and_with_copies(base, tmp_path):
    workdir = tmp_path / "run"
    nothing = {"optimiser.schedule.learning_rate": 0.0}
    phased(
        base, workdir, Phase(1), Phase(1, start="base", policies=("p0",), learner=nothing),
        Phase(1, copies={"p0": "p1"}, policies=("p1",), learner=nothing, reference="start"),
    )  # fmt: skip
    config = tiny_config(base)
    start = load_parts(config).start(config.seed)
    weights = [stored(workdir, step, trees=("policies",)) for step in (1, 2, 3)]
    of = lambda found, policy: {
        path.replace(policy, "p"): x.tobytes() for path, x in found.items() if policy in path
    }
    begun = {
        jax.tree_util.keystr(path): np.asarray(x)
        for path, x in jax.tree.leaves_with_path({"policies": start})
    }
    assert of(weights[1], "p0") == of(begun, "p0") != of(weights[0], "p0")
    assert of(weights[1], "p1") == of(weights[0], "p1")  # no learning rate, and it was frozen
    assert of(weights[2], "p0") == of(weights[1], "p1") == of(weights[2], "p1")
    kept = stored(workdir, 3, trees=("reference",))
    assert of(kept, "p0") == {
        path.replace("policies", "reference"): x for path, x in of(weights[2], "p0").items()
    }
    line = records(workdir)[0][1]
    assert (
        line["policy/p0/updates"] == 2 and line["policy/p0/steps"] == 1
    )  # a fresh clock, all updates counted


def test_a_phase_may_begin_at_a_checkpoint_of_another_run_and_be_compared_with_one(base, turns, tmp_path):
    nothing = {"optimiser.schedule.learning_rate": 0.0}
    phased(base, tmp_path / "run", Phase(1, start=f"{turns}@4", reference=f"{turns}@3", learner=nothing))
    bits = lambda found: {path.replace("reference", "policies"): x.tobytes() for path, x in found.items()}
    before, compared = (bits(stored(turns, step, trees=("policies",))) for step in (4, 3))
    assert bits(stored(tmp_path / "run", 1, trees=("policies",))) == before
    assert bits(stored(tmp_path / "run", 1, trees=("reference",))) == compared != before
    alone = ("p0",)  # of a run that trains both; the other stays at its base
    phased(base, tmp_path / "half", Phase(1, policies=alone, start=f"{turns}@4", learner=nothing))
    half, second = ((tmp_path / "half", 1), (turns, 2))  # when only p0 had moved there
    assert bits(stored(*half, trees=("policies",))) == bits(stored(*second, trees=("policies",)))
    with pytest.raises(FolderError, match=r"must be RUN@STEP with a step of .* there is: 1, 2, 3, 4, 5"):
        phased(base, tmp_path / "other", Phase(1, start=f"{turns}@9"))
    alone = dataclasses.replace(tiny_config(base).policies, map={"generator": "p0", "aggregator": "p0"})
    misfit = rf"phases\[1\].start '{turns}@4' does not fit the policies p0: 'policies' p1.* nothing here; take a run"
    with pytest.raises(FolderError, match=misfit):  # before the first phase
        phased(base, tmp_path / "other", Phase(1), Phase(1, start=f"{turns}@4"), policies=alone)
    other = tmp_path / "turns"
    shutil.copytree(turns, other)
    phased(base, tmp_path / "third", Phase(1, start=f"{other}@4"), Phase(1))
    place = other / "checkpoints" / "4"
    checkpoints._strip(place, ("learner",))  # as pruning does: the policies are the same
    phased(base, tmp_path / "third", Phase(1, start=f"{other}@4"), Phase(1))
    seal = checkpoints._read_seal(place)
    weights = next(name for name in seal["files"] if name.startswith("policies/"))
    seal["files"][weights] = "0" * 64
    checkpoints._write_seal(place, seal)
    with pytest.raises(FolderError, match=r"weights .*@4"):
        phased(base, tmp_path / "third", Phase(1, start=f"{other}@4"), Phase(1))


def test_draws_go_through_all_tasks_before_one_comes_again(mixed):
    units = read_units([mixed / "collected" / f"step-{step:06d}.parquet" for step in (1, 2)])
    seen = [
        [(head.task.id, head.key[1]) for head in draw(units, k, 4, 7).bare_episodes[::4]] for k in range(4)
    ]
    assert sorted(seen[0] + seen[1]) == sorted(seen[2] + seen[3]) and len({*seen[0], *seen[1]}) == 8
    assert seen[0] + seen[1] != seen[2] + seen[3]
    assert len(draw(units, 0, 100, 7).bare_episodes) == 32  # all there are
    with pytest.raises(FolderError, match="is not a file or folder with episodes"):
        files_of(mixed / "nothing")


def test_a_source_that_is_no_file_of_episodes_is_refused_before_the_first_phase(base, tmp_path):
    source = tmp_path / "calls.parquet"
    source.write_bytes(b"PAR1")
    with pytest.raises(
        FolderError, match=r"the calls of a phase: '.*calls.parquet' cannot be read as episodes"
    ):
        phased(base, tmp_path / "run", Phase(1), Phase(1, objective="sft", source=str(source)))


def test_a_team_is_told_again_by_one_role(base, mixed, tmp_path):
    """Episodes of voting, flattened, are learned by the generator of a single agent."""
    config = functools.partial(
        tiny_config,
        base,
        workflow=WorkflowConfig("single", prompts="micro"),
        advantages=AdvantageConfig(group="role,call.kind"),  # the rows of an episode have no labels
        steps=2,
        **EVERY,
    )
    policies = dataclasses.replace(tiny_config(base).policies, map=isolated(("generator",)))
    learner = dataclasses.replace(
        tiny_config(base).learner,
        batch=dataclasses.replace(tiny_config(base).learner.batch, buckets=(256,), token_budget=256),
    )
    told = Phase(
        2, "tell", source=str(mixed / "collected"), flatten="generator", objective="sft", collect=False
    )
    loop.train(config(policies=policies, learner=learner, phases=(told,)), tmp_path / "run", live=quiet(2))
    line = records(tmp_path / "run")[0][-1]
    assert line["role/generator/trained_rows"] == 16 and line["policy/p0/updates"] == 2
    assert line["groups/generator/groups"] == 1  # of the role in the whole step
    table = read_episodes(tmp_path / "run" / "episodes" / "step-000001.parquet")
    team = [one for file in (mixed / "collected").iterdir() for one in read_episodes(file).episodes()]
    assert {"<generator>", "</aggregator>"} <= {
        tag for tag in ("<generator>", "</aggregator>") if tag in table.text[0]
    }
    first = table.bare_episodes[0]
    (whose,) = [one for one in team if (one.task.id, one.key) == (first.task.id, first.key)]
    assert len(whose.calls) == 3
    for call in whose.calls:
        assert call.text.strip() in table.text[0]
    with pytest.raises(FolderError, match="set the phase's flatten to one of these"):
        plain = dataclasses.replace(told, flatten="")
        loop.train(config(policies=policies, phases=(plain,)), tmp_path / "other", live=quiet(2))


def test_marks_weights_and_clips_come_back_from_a_file(mixed, tmp_path):
    table = read_episodes(mixed / "collected" / "step-000001.parquet")
    marks = [np.arange(n) > 0 for n in table.length]
    columns = {"weight": np.linspace(0, 1, len(table)), "clip_low": np.full(len(table), 0.1)}
    marked = table.replace(**columns, spoken=type(table.tokens).of(marks, bool))
    write_episodes(tmp_path / "calls.parquet", marked)
    found = read_episodes(tmp_path / "calls.parquet")
    np.testing.assert_array_equal(found.weight, columns["weight"])
    assert [found.spoken[i].tolist() for i in range(3)] == [mark.tolist() for mark in marks[:3]]
    assert found.clip_high is None and table.spoken is None and isinstance(found, Table)


def test_a_phase_may_change_the_weight_decay(base, tmp_path):
    """Without a gradient, decay alone moves weights."""
    none, flat = {"optimiser.weight_decay": 0.0}, CreditConfig(name="test_alarms:nothing")
    workdir = tmp_path / "run"
    assert phased(base, workdir, Phase(1), Phase(1, learner=none), Phase(1), rewards=flat) == 3
    at = [stored(workdir, step, trees=("policies",)) for step in (1, 2, 3)]
    assert (changed(at[0], at[1]), changed(at[1], at[2])) == (set(), {"p0", "p1"})
