"""Compiled programs are kept in a bounded folder of the user's; a cache that cannot be used costs one line, no more."""

import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import script
from jax.experimental.compilation_cache import compilation_cache

from marl_jax import compile_cache


@pytest.fixture
def home(cache_settings, monkeypatch, tmp_path):
    """A user without any cache or setting of one."""
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    monkeypatch.setenv("MARL_JAX_CACHE", str(tmp_path / "home"))
    for name in cache_settings:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(compile_cache, "WORTH_S", 0.0)
    monkeypatch.setattr(compile_cache, "_warned", False)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    with warnings.catch_warnings():
        yield tmp_path / "home"


@pytest.fixture
def hits():
    """What JAX says of its cache: an entry for every program that was found there."""
    found = []
    note = lambda event, **_: found.append(event) if event.endswith("/cache_hits") else None
    jax.monitoring.register_event_listener(note)
    yield found
    jax.monitoring.unregister_event_listener(note)


def compiled_anew():
    """The value of a program that this process has not compiled."""
    jax.clear_caches()
    return float(jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x))(jnp.arange(7.0)))


def kept(home):
    return sorted(home.glob("compiled/*/*-cache"))


def test_a_program_is_kept_and_found_again_and_is_the_same(home, hits):
    compile_cache.keep_programs()
    first = compiled_anew()
    assert kept(home) and not hits
    assert compiled_anew() == first and hits
    assert jax.config.jax_compilation_cache_max_size == compile_cache.LIMIT


@pytest.mark.skipif(
    not os.path.exists("/proc/self/maps") or jax.default_backend() != "cpu",
    reason="mappings are counted on Linux, where programs are those of a CPU",
)
def test_programs_are_dropped_before_their_mappings_are_too_many(monkeypatch):
    mappings = lambda: sum(1 for _ in open("/proc/self/maps"))  # noqa: SIM115
    program = jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x) + x.sum())
    jax.clear_caches()
    before = mappings()
    first = [np.asarray(program(jnp.arange(float(n)))) for n in range(2, 6)]
    full = mappings()
    assert full > before and not compile_cache.make_room()
    waited = []
    limit = int(open("/proc/sys/vm/max_map_count").read())  # noqa: SIM115
    monkeypatch.setattr(compile_cache, "MAPPED", (full - 1) / limit)
    monkeypatch.setattr(compile_cache, "_undroppable", -limit)
    assert compile_cache.make_room(lambda: waited.append(mappings()))
    assert waited and abs(waited[0] - full) < 20 and mappings() < waited[0]
    monkeypatch.setattr(compile_cache, "MAPPED", 0.0)
    assert not compile_cache.make_room()  # what is left has not grown
    again = [np.asarray(program(jnp.arange(float(n)))) for n in range(2, 6)]
    assert all(map(np.array_equal, first, again))


def test_the_folder_is_told_apart_by_what_programs_depend_on(home, monkeypatch):
    folder = compile_cache._folder()
    assert jax.__version__ in folder.name
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_cpu_max_isa=AVX2")
    flags = compile_cache._folder()
    monkeypatch.setattr(compile_cache.user_cache, "processor", lambda: "another")
    assert len({folder, flags, compile_cache._folder()}) == 3


def test_the_users_own_settings_stay(home, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "7")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 7.0)
    compile_cache.keep_programs()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 7.0
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    compile_cache.keep_programs()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    compile_cache.keep_nothing()
    assert not jax.config.jax_enable_compilation_cache
    jax.config.update("jax_compilation_cache_dir", None)
    compile_cache.keep_programs()
    assert jax.config.jax_compilation_cache_dir is None  # switched off is switched off


def test_what_is_damaged_is_told_once_compiled_again_and_replaced(home, hits, capsys):
    compile_cache.keep_programs()
    first = compiled_anew()
    files = kept(home)
    for file in files:
        file.write_bytes(b"not a program")
    assert compiled_anew() == first and not hits
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"a compiled program in '{files[0].parent}' cannot be used, so it is compiled again ("
    )
    assert compiled_anew() == first and hits
    assert not capsys.readouterr().err


def test_what_a_killed_process_left_is_removed_at_the_next_start(home, hits, capsys):
    compile_cache.keep_programs()
    compiled_anew()
    half = kept(home)[0]
    half.write_bytes(half.read_bytes()[:20])
    half.with_name(half.name.replace("-cache", "-atime")).unlink()
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    compile_cache.keep_programs()
    assert half not in kept(home)
    compiled_anew()
    assert half in kept(home) and not capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_told_in_one_line(home, capsys):
    home.write_text("a file where the folder should be")
    for _ in range(2):
        compile_cache.keep_programs()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("compiled programs are not kept: '") and line.endswith(
        "cannot be used (Not a directory)"
    )
    assert jax.config.jax_compilation_cache_dir is None
    assert compiled_anew() == compiled_anew()


def test_a_full_folder_loses_what_was_unused_for_longest(home, monkeypatch):
    compile_cache.keep_programs()
    compiled_anew()
    size = sum(file.stat().st_size for file in kept(home))
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    monkeypatch.setattr(compile_cache, "LIMIT", size)
    compile_cache.keep_programs()
    for width in range(2, 6):
        jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x))(jnp.arange(float(width)))
    assert sum(file.stat().st_size for file in kept(home)) <= size


def test_folders_of_other_versions_go_when_they_were_not_used_for_long(home):
    old, recent = (home / "compiled" / name for name in ("jax-0.1-old", "jax-0.1-recent"))
    for folder in (old, recent):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    compile_cache.keep_programs()
    assert recent.exists() and not old.exists()


@pytest.mark.parametrize(("flag", "called"), [("--nocache", "keep_nothing"), ("--cache", "keep_programs")])
def test_every_command_takes_the_flag(monkeypatch, flag, called):
    found = []
    for name in ("keep_nothing", "keep_programs"):
        monkeypatch.setattr(compile_cache, name, lambda name=name: found.append(name))
    for command in ("list", "docs"):
        assert script.run(f"experiments.{command}", flag) == 0
    assert found == [called] * 2
