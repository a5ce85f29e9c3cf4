"""Fixtures of all rooms."""

import jax
import pytest

from marl_jax.sampling import stability


# "package" would last to the end of the session, in all files of a worker: these directories have no __init__.py.
@pytest.fixture(scope="module")
def compile_quickly():
    """For files that compare arithmetic, whose time goes into compiling. All others run the programs that users run."""
    stability._MEASURED.clear()
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    # Neither asks how a program was compiled.
    jax.clear_caches()
    stability._MEASURED.clear()
