"""A run has the same bits whether its programs are compiled or found, from its start on and after a kill."""

import shutil

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from run_kit import run, same

from marl_jax.run_folder.checkpoints import steps


@pytest.fixture
def cold(tmp_path):
    """An empty cache, instead of the one of the tests."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    compilation_cache.reset_cache()
    jax.clear_caches()
    yield tmp_path / "cache"
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()
    jax.clear_caches()


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
