"""Programs of a step are kept under a name of all that they follow from, and are found by nothing else."""

import dataclasses
import hashlib
import os
import pickle
import warnings
import zlib

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

import marl_jax
from marl_jax.compiled import kept
from marl_jax.config.run_config import load_config
from marl_jax.runs.loading.parts import load_parts
from marl_jax.workflows import BUILT_IN

DEVICES = jax.devices()[:1]


@pytest.fixture(scope="module")
def cell():
    return load_config("configs/micro.py:single-shared-xs-math", [("road", "compiled")])


@pytest.fixture(scope="module")
def parts(cell):
    return load_parts(cell)


def programs(folder=None):
    """Of a number; JAX finds none of its own in the folder."""
    jax.clear_caches()
    for file in folder.glob("jit_*") if folder else ():
        file.unlink()
    return [jax.jit(step).lower(jnp.float32(0)).compile() for step in (jnp.sin, lambda x: {"twice": 2 * x})]


def keep(file, needs=None):
    kept.keep(file, programs(file.parent), needs, [])


def loaded(file):
    return kept.load(file, DEVICES, lambda needs: None)


def values(made):
    return [jax.tree.map(float, program(jnp.float32(0.3))) for program in made]


def test_kept_programs_give_what_they_gave_and_are_given_what_they_need(cold):
    file, seen = cold / "step-0-cache", []
    keep(file, ("bytes", 7))
    assert values(kept.load(file, DEVICES, seen.append)) == values(programs())
    assert seen == [("bytes", 7)]


def test_what_jax_found_in_its_own_cache_is_not_kept(cold):
    """XLA would write it without its code, which is seen when it runs."""
    programs(cold)
    with kept.jax_cache_hits(None) as found:
        made = programs()
    assert len(found) >= 2
    kept.keep(cold / "step-0-cache", made, None, found)
    assert not (cold / "step-0-cache").exists()
    if jax.default_backend() == "cpu":  # even if nobody says so
        kept.keep(cold / "step-0-cache", made, None, [])
        assert not (cold / "step-0-cache").exists()
    with kept.jax_cache_hits(None) as found:
        made = programs(cold)
    kept.keep(cold / "step-0-cache", made, None, found)
    assert values(loaded(cold / "step-0-cache")) == values(made)


def refuse(needs):
    raise MemoryError(needs)


def test_what_does_not_fit_is_refused_before_it_is_loaded(cold):
    keep(cold / "step-0-cache", "too much")
    with pytest.raises(MemoryError, match="too much"):
        kept.load(cold / "step-0-cache", DEVICES, refuse)


def sealed(content):
    data = pickle.dumps(content)
    return hashlib.sha256(data).digest() + data


DAMAGE = {
    "nothing": lambda data: b"",
    "its end missing": lambda data: data[:-100],
    "a bit wrong": lambda data: data[:500] + bytes([data[500] ^ 1]) + data[501:],
    "something else": lambda data: b"no program" * 100,
    "whole, of another form": lambda data: sealed(7),
    "whole, with what XLA cannot load": lambda data: sealed(
        (None, [(zlib.compress(b"no program"), *[jax.tree.structure(0)] * 2)])
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_as_none_and_is_written_anew(cold, damage):
    file = cold / "step-0-cache"
    keep(file)
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loaded(file) is None
        programs()  # JAX has them
        with kept.jax_cache_hits(file) as found:
            made = programs()
        kept.keep(file, made, None, found)
    assert values(loaded(file)) == values(made)
    with kept.jax_cache_hits(None) as found:
        programs()
    assert found  # as before
    assert loaded(cold / "step-1-cache") is None and loaded(None) is None


def test_jax_drops_what_was_unused_for_longest(cold):
    first, second = cold / "step-0-cache", cold / "step-1-cache"
    for file in (first, second):
        keep(file, os.urandom(1 << 18))
    loaded(first)  # so the second is older
    jax.config.update("jax_compilation_cache_max_size", first.stat().st_size + second.stat().st_size)
    compilation_cache.reset_cache()
    programs(cold)
    assert first.exists() and not second.exists()


def other(cell, **changes):
    return dataclasses.replace(cell, **changes)


def test_a_name_follows_from_all_that_the_programs_follow_from(cold, cell, parts, monkeypatch):
    place = lambda cell=cell, parts=parts, devices=DEVICES, **more: kept.file_of(cell, parts, devices, **more)
    whole = place()
    assert whole.parent == cold and place() == whole
    assert place(other(cell, seed=7)) == whole  # its noise and weights are arguments
    optimiser = dataclasses.replace(cell.learner.optimiser, grad_clip=0.5)
    differing = {
        "configuration": place(other(cell, learner=dataclasses.replace(cell.learner, optimiser=optimiser))),
        "steps": place(other(cell, steps=cell.steps + 1)),  # the rates of all steps are in the program
        "prompts": place(parts=other(parts, prompts=type(parts.prompts)({"generator": "Solve this."}))),
        "shapes": place(arguments=kept.describe({"x": jnp.zeros(3)})),
        "other shapes": place(arguments=kept.describe({"x": jnp.zeros(4)})),
        "types": place(arguments=kept.describe({"x": jnp.zeros(4, jnp.int32)})),
        "options": place(options={"xla_backend_optimization_level": 1}),
    }
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        differing["settings of JAX"] = place()
    finally:
        jax.config.update("jax_default_matmul_precision", None)
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        differing["flags"] = place()
    with monkeypatch.context() as patch:
        patch.setattr(kept, "versions", lambda: {"code": "another"})
        differing["code"] = place()
    assert len({whole, *differing.values()}) == 1 + len(differing)


def test_nothing_is_kept_that_no_name_tells_apart(cold, cell, parts, monkeypatch):
    place = lambda cell=cell, parts=parts: kept.file_of(cell, parts, DEVICES)
    assert place()
    estimator = dataclasses.replace(cell.advantages, estimator="os.path:join")
    assert place(other(cell, advantages=estimator)) is None  # code of one's own
    own = other(BUILT_IN["single"], in_arrays=lambda stage: None)
    assert place(parts=other(parts, workflow=own)) is None
    with monkeypatch.context() as patch:
        patch.setattr(marl_jax, "BEGAN", 0.0)  # the code was changed since
        assert place() is None
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/programs")
    assert place() is None
    jax.config.update("jax_compilation_cache_dir", str(cold))
    jax.config.update("jax_enable_compilation_cache", False)
    assert place() is None
