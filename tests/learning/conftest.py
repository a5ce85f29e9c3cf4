"""Learning is compared with plain references, exactly in any order of operations."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def _compile_quickly():
    """Compiling takes most of the time of these tests."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
