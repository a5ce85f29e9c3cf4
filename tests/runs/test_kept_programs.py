"""A run has the same bits whether its programs are compiled or found, from its start on and after a kill."""

import dataclasses
import shutil

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from run_kit import in_a_process, quiet, run, same
from tiny_run import KINDS, tiny_config

from marl_jax.run_folder.checkpoints import steps
from marl_jax.runs import in_arrays, loop


@pytest.mark.campaign
def test_a_run_that_is_killed_ends_with_the_same_bits_whether_it_goes_on_warm_or_cold(cold, base, tmp_path):
    whole = tmp_path / "whole"
    assert run(base, whole, steps=4) == 4
    assert list(cold.glob("*-cache"))
    for how in ("warm", "cold"):
        killed, found = tmp_path / how, []
        shutil.copytree(whole, killed)
        for step in steps(killed / "checkpoints")[1:]:
            shutil.rmtree(killed / "checkpoints" / str(step))
        if how == "cold":
            for program in cold.glob("*"):
                program.unlink()
            compilation_cache.reset_cache()
        jax.clear_caches()
        note = lambda event, found=found, **_: found.append(event) if event.endswith("/cache_hits") else None
        jax.monitoring.register_event_listener(note)
        try:
            assert run(base, killed, steps=4) == 4
        finally:
            jax.monitoring.unregister_event_listener(note)
        if how == "warm":
            assert found  # what was kept is what ran
        same(killed, whole)


def short(base, **changes):
    """Two steps on the compiled road, and nothing else that compiles."""
    config = KINDS["in_arrays"](tiny_config(base, steps=2, **changes))
    evaluation = dataclasses.replace(config.evaluation, every=0)
    return dataclasses.replace(
        config, evaluation=evaluation, checkpoints=dataclasses.replace(config.checkpoints, best=False)
    )


@pytest.mark.long
def test_a_later_start_on_the_compiled_road_takes_its_programs_as_they_are(cold, base, tmp_path, monkeypatch):
    """It neither traces nor compiles a step; the seed is another or the same."""
    loop.train(short(base), tmp_path / "first", live=quiet())
    (kept,) = cold.glob("step-*-cache")
    with monkeypatch.context() as patch:
        patch.setattr(in_arrays, "trace", None)
        patch.setattr(in_arrays.Compiled, "compiled", None)
        loop.train(short(base), tmp_path / "second", live=quiet())
        loop.train(short(base, seed=1), tmp_path / "another", live=quiet())
    same(tmp_path / "second", tmp_path / "first", "in_arrays")
    assert [kept] == list(cold.glob("step-*-cache"))


@pytest.mark.campaign
def test_programs_of_two_devices_are_kept_too(base, tmp_path):
    two = {"JAX_NUM_CPU_DEVICES": "2", "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    assert in_a_process(base, tmp_path / "first", "--kind=in_arrays", **two)[0] == 0
    (kept,) = (tmp_path / "cache").glob("step-*-cache")
    before = kept.stat()
    for program in (tmp_path / "cache").glob("jit_*"):
        program.unlink()
    assert in_a_process(base, tmp_path / "second", "--kind=in_arrays", **two)[0] == 0
    same(tmp_path / "second", tmp_path / "first", "in_arrays")
    assert kept.stat().st_mtime == before.st_mtime
    assert not list((tmp_path / "cache").glob("jit_play-*"))  # nobody asked JAX for it
