"""The compiled road leaves the folder of the hosted one, survives as it does, and trains seeds side by side."""

import dataclasses
import io
import itertools
import json
import os
import signal
import statistics
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from run_kit import in_a_process, quiet, records, same, weights
from tiny_run import CUT, KINDS, tiny_config

from marl_jax.compiled import NoArrayForm
from marl_jax.config.run_config import MeshConfig
from marl_jax.planning.plan import PlanError
from marl_jax.rewards.credit import CreditConfig
from marl_jax.rollouts import read_episodes
from marl_jax.run_folder.checkpoints import Checkpoints, steps
from marl_jax.run_folder.folder import FolderError
from marl_jax.runs import in_arrays, loop, opening
from marl_jax.runs.divergence import Diverged
from marl_jax.runs.hosted import Hosted
from marl_jax.runs.loading import roads
from marl_jax.runs.loading.parts import load_parts, load_tasks
from marl_jax.terminal.live import Live

KIND = "in_arrays"
DIES = ("--at=step", "--visit=7", "--after=0.02")


def config(base, **changes):
    return dataclasses.replace(KINDS[KIND](tiny_config(base)), **changes)


@pytest.fixture(scope="module")
def alone(base, tmp_path_factory):
    """A run on the compiled road that was never interrupted."""
    workdir = tmp_path_factory.mktemp("compiled") / "run"
    assert loop.train(config(base), workdir, live=quiet()) == 8
    return workdir


@pytest.mark.long
def test_it_leaves_the_folder_of_the_hosted_road(base, alone, tmp_path):
    """The same lines; the first step from the same state has the same numbers, and so has the base."""
    loop.train(config(base, road="hosted"), tmp_path / "run", live=quiet())
    (mine, evaluated), (hosted, evaluated_there) = records(alone), records(tmp_path / "run")
    assert [line.keys() for line in mine] == [{*line, "beyond"} for line in hosted]
    assert evaluated[0] == evaluated_there[0] and len(evaluated) == len(evaluated_there)
    shown = {path.relative_to(alone) for path in alone.rglob("*") if "checkpoints" not in path.parts}
    there = {path.relative_to(tmp_path / "run") for path in (tmp_path / "run").rglob("*")}
    events = lambda paths: {
        path for path in paths if "tfevents" not in path.name and path.parts[0] != "checkpoints"
    }
    assert events(shown) == events(there)
    for key, value in hosted[0].items():
        if isinstance(value, float) and "padding" not in key:
            assert mine[0][key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    said = [
        read_episodes(folder / "episodes" / "step-000001.parquet") for folder in (alone, tmp_path / "run")
    ]
    assert said[0].text == said[1].text
    np.testing.assert_allclose(said[0].advantage, said[1].advantage, rtol=1e-6)
    assert json.loads((alone / "config.json").read_text())["settled"]["road"] == "compiled"


@pytest.mark.long
def test_policies_without_an_anchored_role_tell_no_kl_and_slots_that_learn_nothing_no_gradient(
    base, tmp_path
):
    voting = dataclasses.replace(tiny_config(base), rewards=CreditConfig(), steps=2)
    anchored = dataclasses.replace(voting.learner.interventions, kl_coef={"generator": 0.1})
    learner = dataclasses.replace(voting.learner, interventions=anchored, gradients="slots", layer_norms=True)
    frozen = dataclasses.replace(voting.policies, frozen_roles=("generator/1",))
    voting = dataclasses.replace(voting, learner=learner, policies=frozen)
    for road in ("compiled", "hosted"):
        loop.train(dataclasses.replace(voting, road=road), tmp_path / road, live=quiet())
    first, there = (records(tmp_path / road)[0][0] for road in ("compiled", "hosted"))
    assert first.keys() == {*there, "beyond"} and "role/generator/kl" in first
    assert not [key for key in first if key.startswith("role/aggregator/kl")]


@pytest.mark.long
def test_it_learns(alone):
    lengths = [line["role/generator/length"] for line in records(alone)[0]]
    assert lengths[-1] < lengths[0] and weights(alone, 4, KIND)[1] != weights(alone, 8, KIND)[1]


@pytest.mark.long
def test_killed_it_ends_like_a_run_that_never_was(base, alone, tmp_path):
    one = {"JAX_NUM_CPU_DEVICES": "1"}
    status, said, _ = in_a_process(base, tmp_path / "run", f"--kind={KIND}", *DIES, **one)
    assert status == -signal.SIGKILL, said[-2000:]
    assert not (tmp_path / "run" / "checkpoints" / "8").exists()
    assert loop.train(config(base), tmp_path / "run", live=quiet()) == 8
    same(tmp_path / "run", alone, KIND)


@pytest.mark.long
def test_killed_with_two_policies_it_ends_like_a_run_that_never_was(base, tmp_path):
    """Both learn behind the checkpoint that it goes on from."""
    kind, one = "voting_in_arrays", {"JAX_NUM_CPU_DEVICES": "1"}
    voting = KINDS[kind](tiny_config(base))
    assert loop.train(voting, tmp_path / "whole", live=quiet()) == 8
    status, said, _ = in_a_process(base, tmp_path / "run", f"--kind={kind}", *DIES, **one)
    assert status == -signal.SIGKILL, said[-2000:]
    found = steps(tmp_path / "run" / "checkpoints")[-1]
    assert found in (4, 6)  # the save of step 6 may not have ended
    before = weights(tmp_path / "run", found, kind)[1]
    assert loop.train(voting, tmp_path / "run", live=quiet()) == 8
    after = weights(tmp_path / "run", kind=kind)[1]
    assert {path.split("'")[3] for path in after if after[path] != before[path]} == {"p0", "p1"}
    same(tmp_path / "run", tmp_path / "whole", kind)


@pytest.mark.campaign
def test_killed_again_and_again_with_nothing_compiled_it_ends_alike(base, alone, tmp_path):
    for number, visit in enumerate((1, 6, 4, 5)):
        cold = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / f"cold-{number}"), "JAX_NUM_CPU_DEVICES": "1"}
        dies = (f"--kind={KIND}", "--at=step", f"--visit={visit}", "--after=0.02") if number < 3 else ()
        status, said, _ = in_a_process(base, tmp_path / "run", f"--kind={KIND}", *dies, **cold)
        assert status == (-signal.SIGKILL if dies else 0), said[-2000:]
    same(tmp_path / "run", alone, KIND)


@pytest.mark.campaign
def test_killed_on_two_devices_it_goes_on_with_two(base, tmp_path):
    """The problems are cut over them."""
    two = {"JAX_NUM_CPU_DEVICES": "2"}
    assert in_a_process(base, tmp_path / "whole", f"--kind={KIND}", **two)[0] == 0
    assert in_a_process(base, tmp_path / "run", f"--kind={KIND}", *DIES, **two)[0] == -signal.SIGKILL
    status, said, _ = in_a_process(base, tmp_path / "run", f"--kind={KIND}", JAX_NUM_CPU_DEVICES="1")
    assert status == 1 and "this run was begun on 2 devices and there are 1" in said, said[-2000:]
    status, said, _ = in_a_process(base, tmp_path / "run", f"--kind={KIND}", **two)
    assert status == 0 and "problems split over 2 cpu devices" in said, said[-2000:]
    same(tmp_path / "run", tmp_path / "whole", KIND)


FOUR = {"JAX_NUM_CPU_DEVICES": "4"}


@pytest.mark.long
@pytest.mark.parametrize("kind", CUT)
def test_weights_that_are_cut_learn_as_whole_ones(base, tmp_path, kind):
    """The process fails if they are whole before a step or behind it."""
    status, said, _ = in_a_process(base, tmp_path / "run", f"--kind={kind}", **FOUR)
    assert status == 0 and "weights split over 2 cpu devices" in said, said[-2000:]
    one = dataclasses.replace(CUT[kind](tiny_config(base)), mesh=MeshConfig())
    loop.train(one, tmp_path / "whole", live=quiet())
    folders = tmp_path / "run", tmp_path / "whole"
    mine, whole = (records(folder)[0][0] for folder in folders)
    assert mine.keys() == whole.keys()
    for key, value in whole.items():
        if isinstance(value, float) and "padding" not in key:
            assert mine[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    first = [read_episodes(folder / "episodes" / "step-000001.parquet") for folder in folders]
    assert first[0].text == first[1].text


@pytest.mark.campaign
def test_killed_with_weights_that_are_cut_it_ends_alike(base, tmp_path):
    cut = ("--kind=cut_in_arrays",)
    assert in_a_process(base, tmp_path / "whole", *cut, **FOUR)[0] == 0
    assert in_a_process(base, tmp_path / "run", *cut, *DIES, **FOUR)[0] == -signal.SIGKILL
    status, said, _ = in_a_process(base, tmp_path / "run", *cut, **FOUR)
    assert status == 0, said[-2000:]
    same(tmp_path / "run", tmp_path / "whole", KIND)


@pytest.mark.long
def test_seeds_side_by_side_have_the_bits_of_each_alone(base, alone, tmp_path, caplog):
    """Asked to stop on the way, and gone on with from where all of them are."""
    both = config(base, seeds=2)
    view = Asked(5)
    assert loop.train(both, tmp_path / "runs", live=view) == 5
    # As after a kill while the second seed saved.
    newest = tmp_path / "runs" / "seed-1" / "checkpoints" / "5"
    (newest / "seal.json").unlink()
    newest.rename(newest.with_name(".saving-5"))
    assert loop.train(both, tmp_path / "runs", live=quiet()) == 8
    assert "checkpoint 5 is ahead of another seed, which has no step 5: going back to step 4" in caplog.text
    assert "seed 1: step 4: val accuracy" in view.said
    same(tmp_path / "runs" / "seed-0", alone, KIND)
    loop.train(config(base, seed=1), tmp_path / "one", live=quiet())
    same(tmp_path / "runs" / "seed-1", tmp_path / "one", KIND)


@pytest.mark.long
def test_seeds_on_devices_of_their_own_are_evaluated(base, tmp_path):
    """Their weights come from each device to that of the engines."""
    two = {"JAX_NUM_CPU_DEVICES": "2"}
    status, said, _ = in_a_process(base, tmp_path / "runs", "--kind=seeds_in_arrays", **two)
    assert status == 0 and "2 seeds in turn on 2 cpu devices" in said, said[-2000:]
    for seed in range(2):
        trained, evaluated = records(tmp_path / "runs" / f"seed-{seed}")
        assert [line["step"] for line in trained] == [1, 2, 3, 4] and evaluated[-1]["step"] == 4


def test_seeds_are_one_program_where_the_device_is_no_cpu():
    told = {(seeds, name): in_arrays._in_one_program(seeds, SimpleNamespace(platform=name))
            for seeds in (1, 2) for name in ("cpu", "gpu", "tpu")}  # fmt: skip
    assert [case for case, one_program in told.items() if one_program] == [(2, "gpu"), (2, "tpu")]


@pytest.mark.long
def test_seeds_in_one_program_leave_what_each_alone_leaves_and_survive_a_kill(base, alone, tmp_path):
    """Not to the bit: a product over the weights of two seeds is another kernel than one over those of one."""
    kind, one = "seeds_in_one_program", {"JAX_NUM_CPU_DEVICES": "1"}
    status, said, _ = in_a_process(base, tmp_path / "whole", f"--kind={kind}", **one)
    assert status == 0 and "2 seeds in one program on 1 cpu device" in said, said[-2000:]
    status, said, _ = in_a_process(base, tmp_path / "run", f"--kind={kind}", *DIES, **one)
    assert status == -signal.SIGKILL, said[-2000:]
    # The save of step 6 may not have ended.
    assert all(steps(tmp_path / "run" / f"seed-{seed}" / "checkpoints")[-1] in (4, 6) for seed in range(2))
    status, said, _ = in_a_process(base, tmp_path / "run", f"--kind={kind}", **one)
    assert status == 0, said[-2000:]
    same(tmp_path / "run", tmp_path / "whole", kind)
    loop.train(config(base, seed=1), tmp_path / "one", live=quiet())
    for seed, by_itself in enumerate((alone, tmp_path / "one")):
        start = load_parts(config(base, seed=seed)).start(seed)["p0"]
        assert_comparable(tmp_path / "whole" / f"seed-{seed}", by_itself, start)


def assert_comparable(side, alone, start):
    """The folder of a seed that shared its program, and of the same seed alone: equal words, numbers that are near."""
    files = lambda folder: {
        path.relative_to(folder)
        for path in folder.rglob("*")
        if "checkpoints" not in path.parts and "tfevents" not in path.name
    }
    assert files(side) == files(alone)
    for mine, theirs in zip(records(side), records(alone), strict=True):
        assert [line["step"] for line in mine] == [line["step"] for line in theirs]
        for line, other in zip(mine, theirs):
            assert line.keys() == other.keys()
            for key, value in other.items():
                near = pytest.approx(value, rel=1e-3, abs=1e-5) if isinstance(value, float) else value
                assert line[key] == near, (line["step"], key)
    for step in (1, 4, 8):
        mine, theirs = (read_episodes(at / "episodes" / f"step-{step:06}.parquet") for at in (side, alone))
        assert mine.text == theirs.text and (any(mine.text) or step > 1)  # at the end they say nothing
        np.testing.assert_allclose(mine.advantage, theirs.advantage, rtol=1e-5)
    flat = lambda folder: np.concatenate(
        [np.frombuffer(leaf, np.float32) for leaf in weights(folder, 8, KIND)[1].values()]
    )
    moved = np.linalg.norm(flat(alone) - np.concatenate([*map(np.ravel, jax.tree.leaves(start))]))
    off = np.linalg.norm(flat(side) - flat(alone))
    print(f"{side.name}: after 8 steps weights are {off / moved:.1e} of what they learned from those alone")
    assert off < 1e-3 * moved


class Asked(Live):
    """Keeps what it shows, and has the run stop after so many steps."""

    def __init__(self, after):
        self._after, self._kept = after, io.StringIO()
        super().__init__(8, ("generator",), self._kept)

    @property
    def said(self):
        return self._kept.getvalue()

    def step(self, step, metrics):
        super().step(step, metrics)
        if step == self._after:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.long
def test_seeds_may_be_hosted_too_and_a_stop_while_the_second_plays_loses_no_step(
    base, whole, tmp_path, monkeypatch
):
    plays, play = itertools.count(1), Hosted._play_and_grade

    def asked(road, run, *others):
        if next(plays) == 4:  # its second step
            run.stop.request()
        return play(road, run, *others)

    monkeypatch.setattr(Hosted, "_play_and_grade", asked)
    assert loop.train(tiny_config(base, seeds=2), tmp_path / "runs", live=quiet()) == 1
    assert loop.train(tiny_config(base, seeds=2), tmp_path / "runs", live=quiet()) == 8
    same(tmp_path / "runs" / "seed-0", whole)


@pytest.mark.long
def test_no_seed_begins_a_save_before_all_have_ended_the_one_before(base, tmp_path, monkeypatch):
    """Killed while one of two has saved two steps more, both would have none in common."""
    begun, early, finish = threading.Event(), [], Checkpoints._finish

    def slow(self, response, place, seal):
        if seal["step"] == 4 and "seed-0" in str(place):
            begun.set()
        if seal["step"] == 2 and "seed-1" in str(place):
            early.append(begun.wait(10))
        finish(self, response, place, seal)

    monkeypatch.setattr(Checkpoints, "_finish", slow)
    loop.train(tiny_config(base, seeds=2, steps=4), tmp_path / "runs", live=quiet())
    assert early == [False]


@pytest.mark.long
def test_a_folder_refuses_another_road_and_other_seeds(base, alone, tmp_path):
    with pytest.raises(FolderError, match=r'config.road: "compiled" -> "hosted"'):
        loop.train(config(base, road="hosted"), alone, live=quiet())
    with pytest.raises(FolderError, match="is a run of one seed: leave seeds out"):
        loop.train(config(base, seeds=2), alone, live=quiet())
    loop.train(config(base, seeds=2, steps=1), tmp_path / "runs", live=quiet())
    with pytest.raises(FolderError, match=r"config.seeds: 2 -> 1"):
        loop.train(config(base, steps=1), tmp_path / "runs" / "seed-0", live=quiet())
    with pytest.raises(FolderError, match=r"is the run of one of several seeds: start them in '.*runs'"):
        loop.train(config(base, seeds=2, steps=1), tmp_path / "runs" / "seed-0", live=quiet())
    with pytest.raises(FolderError, match="holds the runs seed-0, seed-1"):
        loop.train(config(base, steps=1), tmp_path / "runs", live=quiet())
    with pytest.raises(
        FolderError, match="results of seed-1 and no seed-2: seeds side by side begin together"
    ):
        loop.train(config(base, seed=1, seeds=2, steps=1), tmp_path / "runs", live=quiet())


@pytest.mark.long
def test_a_cell_without_a_form_is_refused_or_hosted(base, tmp_path):
    draws = dataclasses.replace(config(base).rollout, draws=2)
    with pytest.raises(NoArrayForm, match=r"draws.*--config.road=hosted"):
        loop.train(config(base, rollout=draws), tmp_path / "run", live=quiet())
    view = Asked(1)
    loop.train(config(base, rollout=draws, road="auto"), tmp_path / "run", live=view)
    assert "road hosted, as there is no form in arrays for several draws of problems" in " ".join(
        view.said.split()
    )


@pytest.mark.long
@pytest.mark.parametrize("road", ["compiled", pytest.param("hosted", marks=pytest.mark.long)])
def test_the_faster_road_is_settled_once(road, base, alone, tmp_path, monkeypatch):
    tried = roads.seconds_of_step

    def seconds(of, *given):
        tried(of, *given)
        return 1.0 if isinstance(of, in_arrays.Compiled) == (road == "compiled") else 2.0

    monkeypatch.setattr(roads, "seconds_of_step", seconds)
    view, whole = Asked(2), config(base, road="auto")
    loop.train(whole, tmp_path / "run", live=view)
    assert "timed now" in view.said and "a step took compiled" in view.said
    assert json.loads((tmp_path / "run" / "config.json").read_text())["settled"]["road"] == road
    monkeypatch.setattr(roads, "seconds_of_step", None)  # settled: nothing is tried
    view = Asked(None)
    loop.train(whole, tmp_path / "run", live=view)
    assert f"road          {road}" in view.said and "a step took" not in view.said
    if road == "compiled":
        same(tmp_path / "run", alone, KIND)


@pytest.mark.long
def test_seeds_that_do_not_fit_are_refused_with_the_number_that_does(base, tmp_path, monkeypatch):
    monkeypatch.setattr(in_arrays, "free_bytes", lambda: 0)
    with pytest.raises(PlanError, match=r"2 seeds side by side need .* 0.0 MiB are free: 0 fit"):
        loop.train(config(base, seeds=2), tmp_path / "runs", live=quiet())
    many = config(base, seeds=1_000_000)  # of which no folder is made, nor a configuration each
    with pytest.raises(FolderError, match="1000000 seeds keep 4000064 files open and a process may open"):
        loop.train(many, tmp_path / "many", live=quiet())
    monkeypatch.setattr(opening.resource, "getrlimit", lambda _: (opening.resource.RLIM_INFINITY,) * 2)
    with pytest.raises(PlanError, match=r"1000000 seeds .* the weights and optimiser states of [1-9]\d* do"):
        loop.train(many, tmp_path / "many", live=quiet())
    assert not (tmp_path / "many").exists()
    with pytest.raises(PlanError, match=r"a step as one program needs .* 0.0 MiB are free: .*road=hosted"):
        loop.train(config(base), tmp_path / "run", live=quiet())


def test_the_hosted_road_is_taken_where_the_faster_one_is_asked_for_and_a_step_does_not_fit(
    base, tmp_path, monkeypatch
):
    monkeypatch.setattr(in_arrays, "free_bytes", lambda: 0)
    view = Asked(None)
    loop.train(config(base, road="auto", steps=1), tmp_path / "run", live=view)
    assert "road hosted: a step as one program needs" in view.said
    assert json.loads((tmp_path / "run" / "config.json").read_text())["settled"]["road"] == "hosted"


@pytest.mark.long
def test_a_road_that_is_asked_for_is_taken_whatever_was_settled(base, tmp_path):
    """Where it is left open again, it is timed again."""
    workdir = tmp_path / "run"
    loop.train(config(base, road="hosted", steps=1), workdir, live=quiet())
    record = json.loads((workdir / "config.json").read_text())
    record["config"]["road"], record["settled"]["road"] = "auto", "hosted"
    (workdir / "config.json").write_text(json.dumps(record))
    loop.train(config(base, steps=2), workdir, accept_changes=True, live=quiet())
    assert json.loads((workdir / "config.json").read_text())["settled"]["road"] == "compiled"
    view = Asked(None)
    loop.train(config(base, road="auto", steps=3), workdir, accept_changes=True, live=view)
    assert "timed now" in view.said and "a step took compiled" in view.said


def test_devices_that_do_not_divide_the_problems_are_refused(base, monkeypatch):
    one = config(base)
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1] * 3)
    with pytest.raises(NoArrayForm, match=r"4 problems that 3 devices do not divide: .*road=hosted"):
        in_arrays.Compiled(one, load_parts(one), load_tasks(one.data, "train"), 3)


@pytest.mark.long
def test_numbers_that_are_not_finite_stop_it(base, tmp_path, monkeypatch):
    real = in_arrays.Compiled.step

    def step(self, runs, states, at, clock):
        if states[0].step == 2:
            broken = jax.tree.map(lambda leaf: leaf * np.nan, states[0].trees)
            states = [dataclasses.replace(states[0], trees=broken)]
        return real(self, runs, states, at, clock)

    with (
        monkeypatch.context() as patch,
        pytest.raises(Diverged, match=r"step 3: .* no finite log-probability"),
    ):
        patch.setattr(in_arrays.Compiled, "step", step)
        loop.train(config(base), tmp_path / "run", live=quiet())
    with pytest.raises(Diverged, match="this run diverged with this configuration"):
        loop.train(config(base), tmp_path / "run", live=quiet())


@pytest.mark.long
def test_times_add_up_to_the_wall_clock(whole, alone):
    for folder in (whole, alone):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        apart = ("time/step", "time/wall", "time/tokens_per_second")
        parts = [{key: line[key] for key in line if key.count("/") == 1 and "time/" in key} for line in lines]
        wall = sum(line["time/wall"] for line in parts)
        # The median step, since other processes may hold the host for a moment of some.
        assert statistics.median(line["time/other"] / line["time/wall"] for line in parts) < 0.05
        told = sum(value for line in parts for key, value in line.items() if key not in apart)
        assert told == pytest.approx(wall, rel=1e-6)


@pytest.mark.long
def test_sampling_and_learning_are_told_part_by_part(whole):
    """Each part was measured, and they are the step but for what the host does between them."""
    measured = {
        "rollout": {"prefill", "decode", "host"},
        "learn": {"gradient", "optimiser", "host"},  # its own log-probs are those of the gradient's pass
    }
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for name, parts in measured.items():
            seconds = {part: line[f"time/{name}/{part}"] for part in parts}
            assert all(value > 0 for value in seconds.values()), (name, seconds)
            assert sum(seconds.values()) == pytest.approx(line[f"time/{name}"], rel=1e-6)
    inside = [f"time/{name}/{part}" for name, parts in measured.items() for part in parts]
    told = sum(line[key] for line in lines for key in (*inside, "time/grade"))
    # The host may be kept from its work between two parts for as long as other processes like: 50 ms a step.
    assert told == pytest.approx(sum(line["time/step"] for line in lines), rel=0.05, abs=0.05 * len(lines))


def test_cores_that_wait_for_each_other_do_not_end_the_run(monkeypatch):
    """XLA would end the process after 40 s; who has set another time keeps it."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    in_arrays.cpu_devices()
    assert os.environ["XLA_FLAGS"].split() == [
        "--xla_cpu_enable_fast_math=false", "--xla_cpu_collective_call_terminate_timeout_seconds=86400",
    ]  # fmt: skip
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_collective_call_terminate_timeout_seconds=60")
    in_arrays.cpu_devices()
    assert os.environ["XLA_FLAGS"] == "--xla_cpu_collective_call_terminate_timeout_seconds=60"
