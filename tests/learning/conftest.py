"""Learning is compared with plain references, exactly in any order of operations."""

import jax
import pytest


# "package" would last to the end of the session, in all files of a worker: this directory has no __init__.py.
@pytest.fixture(autouse=True, scope="module")
def _compile_quickly():
    """Compiling takes most of the time of these tests. All others run the programs that users run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()  # which do not ask how a program was compiled
