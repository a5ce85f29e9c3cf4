"""How tests are compiled: `make test` asks for few optimisations, because its time goes into compiling.

Both sides of a comparison, in this process or another, are then compiled alike. Run by hand or in the campaign, tests
use the programs that users run.
"""

import jax
import pytest

from marl_jax.sampling import stability

# Begun first (with --no-loadscope-reorder), so that no worker is left with one of them at the end.
LONG = ("test_loop.py", "test_examples.py", "test_independence.py", "test_update.py")
FLAG, VARIABLE = "jax_disable_most_optimizations", "JAX_DISABLE_MOST_OPTIMIZATIONS"


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONG)


# "package" would last to the end of the session, in all files of a worker: these directories have no __init__.py.
@pytest.fixture(scope="module")
def as_shipped():
    """For files that say what bits come out of the programs that users run."""
    if not jax.config.values[FLAG]:
        yield
        return
    _forget_programs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "0")
        jax.config.update(FLAG, False)
        yield
    jax.config.update(FLAG, True)
    _forget_programs()


def _forget_programs():
    """Neither JAX's cache nor what was measured of programs asks how they were compiled."""
    jax.clear_caches()
    stability._MEASURED.clear()
