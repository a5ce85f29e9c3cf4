"""A compiled step is kept: later starts of the same configuration run its executable, to the bit, and no others do."""

import dataclasses
import json
import os
import time
import warnings

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from run_kit import in_a_process, quiet, records
from tiny_run import KINDS, tiny_config

import marl_jax
from marl_jax.planning.plan import PlanError
from marl_jax.runs import in_arrays, loop
from marl_jax.runs.loading.parts import load_parts


@pytest.fixture
def cache(tmp_path):
    """An empty cache, instead of the one of the tests."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    compilation_cache.reset_cache()
    yield tmp_path / "cache"
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def config(base, **changes):
    made = KINDS["in_arrays"](tiny_config(base, steps=2))
    plain = {
        "evaluation": dataclasses.replace(made.evaluation, every=0),
        "checkpoints": dataclasses.replace(made.checkpoints, best=False),
    }
    return dataclasses.replace(made, **(plain | changes))


def train(base, workdir, **changes):
    loop.train(config(base, **changes), workdir, live=quiet())
    return records(workdir)[0]


def kept(cache):
    return sorted(cache.glob("step-*-cache"))


def test_a(base, cache, tmp_path, monkeypatch):
    t=time.time()
    first = train(base, tmp_path / "first")
    print("first", time.time()-t, [(f.name, f.stat().st_size) for f in cache.glob("*-cache")])
    print(kept(cache))
    monkeypatch.setattr(in_arrays.Compiled, "compiled", None)
    t=time.time()
    assert train(base, tmp_path / "second") == first
    print("second", time.time()-t)
