"""How tests are compiled: `make test` asks for few optimisations, because its time goes into compiling.

Both sides of a comparison, in this process or another, are then compiled alike. Tests marked `shipped` say which bits
come out of the programs that users run; they, the campaign and tests run by hand compile those.
"""

import os
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

# Prepared data and measured steps of tests are not those of the user.
os.environ.setdefault("MARL_JAX_CACHE", str(Path(__file__).parents[1] / ".cache" / "marl_jax"))

# Begun first (with --no-loadscope-reorder), so that no worker is left with one of them at the end.
LONG = ("test_loop.py", "test_survival.py", "test_update.py", "test_examples.py", "test_engine.py")

if jax.config.values["jax_disable_most_optimizations"]:
    # Two workers keep two cores busy: a program in one part takes a fifth less of their time than one in many.
    flags = ["--xla_cpu_parallel_codegen_split_count=1"]
    # XLA's older emitters compile twice as fast; with JAX 0.12 they are gone, and their flag ends the process.
    if jax.__version_info__ < (0, 11):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])

PASSED = pytest.StashKey()  # whether all parts of a test have passed so far


def pytest_addoption(parser):
    parser.addoption(
        "--passed", type=Path, help="leave out the tests that this file names, and add those that pass"
    )


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.path.name not in LONG)
    if (passed := config.getoption("passed")) and passed.exists():
        before = set(passed.read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in before])
        items[:] = [item for item in items if item.nodeid not in before]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if passed := item.config.getoption("passed"):
        item.stash[PASSED] = report.passed and item.stash.get(PASSED, True)
        if report.when == "teardown" and item.stash[PASSED]:
            with passed.open("a") as file:
                file.write(item.nodeid + "\n")
    return report


def pytest_sessionfinish(session):
    if session.config.getoption("passed") and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK  # all passed before


@pytest.fixture(scope="module", autouse=True)
def programs_of_a_file_go_with_it():
    """A worker that kept the programs of every file would hold 6 GB at the end."""
    yield
    jax.clear_caches()


@pytest.fixture
def cache_settings():
    """JAX's settings of its cache, which are set back behind a test."""
    kinds = ("compilation_cache_dir", "compilation_cache_max_size", "persistent_cache_min_compile_time_secs")
    names = [f"jax_{kind}" for kind in (*kinds, "enable_compilation_cache")]
    before = {name: jax.config.values[name] for name in names}
    yield names
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def cold(cache_settings, tmp_path):
    """An empty folder of compiled programs, instead of the one of the tests; however fast one compiles, it is kept."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    (tmp_path / "cache").mkdir()
    compilation_cache.reset_cache()
    jax.clear_caches()
    yield tmp_path / "cache"
    jax.clear_caches()
