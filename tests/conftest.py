"""How tests are compiled."""

import jax
import pytest

from marl_jax.sampling import stability


# "package" would last to the end of the session, in all files of a worker: these directories have no __init__.py.
@pytest.fixture(scope="module")
def compile_quickly():
    """For files that compare arithmetic, whose time goes into compiling. All others run the programs that users run."""
    _forget_programs()
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    _forget_programs()


def _forget_programs():
    """Neither JAX's cache nor what was measured of programs asks how they were compiled."""
    jax.clear_caches()
    stability._MEASURED.clear()
